"""What the class of an operator declares: operands, results, parameters, and activations inside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.language.tensor import Dense, TensorSpec

Array = NDArray[np.float64]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Along:
    """The extents of an operand along some axes of src, in src's order: perhaps not src's own extents."""

    axes: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Beside:
    """An operand that a kernel reads where the caller has it.

    Attributes:
        spec: how it lies.
        axes: the axes of src that it has; () of one with axes of its own.
    """

    spec: TensorSpec | Dense
    axes: tuple[int, ...] = ()


# A word of PER, or a function of (op, src): such a word, some axes with other extents, a tensor beside src,
# or a weight's shape.
Per = str | Callable[[Any, TensorSpec], str | Along | Beside | Shape]
# A condition on the operator; a text is the name of a field that tells it.
When = str | Callable[[Any], bool]

# The axes that an operand has, of those of src.
PER: dict[str, Callable[[TensorSpec], tuple[int, ...]]] = {
    "channel": lambda src: (src.channel_axis,) if src.shape else (),
    "activation": lambda src: tuple(sorted(src.canonical_order[1:] or src.canonical_order)),
    "position": lambda src: tuple(src.canonical_order[2:]),
    "element": lambda src: tuple(range(src.rank)),
    "block": lambda src: tuple(range(src.rank)),
    "row": lambda src: tuple(axis for axis in range(src.rank) if axis != src.channel_axis),
    "shared": lambda src: (),
}
SAMPLE_TENSORS = ("f32[3x5]", "f32[2x3x7]", "f32[2x5x3x7, nhwc]", "f32[1x3x3x2x5]")
IN_SRC_DTYPE = ("weight", "element", "beside")  # the other operands are few, and kept in the compute dtype


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator is given at run time, for a known src.

    Attributes:
        name: its key among the operator's arguments.
        shape: logical extents.
        dtype: src's for weights and elements, else the compute dtype; there, an array of src's dtype is taken
            too, and widened.
        per: `channel`, `activation`, `element`, `row` (all axes but the channels'), `block` (all axes),
            `shared`, `axes` for any other axes of src, `weight` for any other shape, or `beside` for one that
            is read where the caller has it.
        axes: the axes of src that it has, in its own order; none of a weight.
        block: neighbours along the channels' axis that have one element together.
        key: its name in a plan: its own where it is the first of that name, else `name_2`, `name_3`; "" of an
            operator by itself. Nothing else in the plan has the same.
        step: the index of its operator in the plan.
        spec: how its tensor lies, where the kernel reads it where the caller has it; None where it is packed.
    """

    name: str
    shape: Shape
    dtype: str
    per: str
    axes: tuple[int, ...] = ()
    block: int = 1
    key: str = ""
    step: int = 0
    spec: TensorSpec | Dense | None = None

    def __str__(self) -> str:
        return f"operand `{self.key}`"


@dataclass(frozen=True)
class Result:
    """A tensor that an operator gives besides its output, for a known src.

    Attributes:
        name: its key among arguments and among the results of a call.
        shape: logical extents.
        dtype: src's where it has all of src's elements, else the compute dtype.
        per: `channel`, `activation`, or `element`: a value of the plan, in its dtype and layout; `beside` of
            one with axes of its own.
        updated: the caller gives the tensor, and its new value depends on the old one.
        axes: the axes of src that it has.
        spec: how its tensor lies in memory.
        key: as an operand's.
        step: as an operand's.
    """

    name: str
    shape: Shape
    dtype: str
    per: str
    updated: bool
    axes: tuple[int, ...]
    spec: TensorSpec | Dense
    key: str = ""
    step: int = 0

    def __str__(self) -> str:
        return f"result `{self.key}`"


@dataclass(frozen=True)
class Parameter:
    """A number that an operator is given at run time, and the value the plan has for it.

    `key` and `step` are as an operand's.
    """

    name: str
    value: float
    key: str = ""
    step: int = 0


@dataclass(frozen=True)
class OperandField:
    """The declaration of an operand: its extents, and the condition for an operator to have it."""

    per: Per
    when: Callable[[Any], bool]
    dtype: Callable[[Any, TensorSpec], str] | None = None


@dataclass(frozen=True)
class ResultField:
    """The declaration of a result: its extents, the condition for having it, and if it is updated."""

    per: Per
    when: Callable[[Any], bool]
    updated: bool


def _always(_: object) -> bool:
    return True


def _condition(when: When) -> Callable[[Any], bool]:
    return attrgetter(when) if isinstance(when, str) else when


def operand(
    per: Per,
    *,
    when: When = _always,
    dtype: Callable[[Any, TensorSpec], str] | None = None,
    default: None = None,
    kw_only: bool = False,
) -> Any:
    """Declares a tensor given at run time.

    An annotated operand is also a field: the name of an earlier saved value that the operator reads instead.

    Args:
        per: `channel` (c elements), `activation` (one image: c and spatial), `element` (the shape of src),
            `shared` (one element), `row` (one for each row), `block` (one for `block` neighbours in a row, a
            field of the operator), or a function of (op, src) that gives one of these words, extents `Along`
            some axes, a tensor `Beside` src, or a shape.
        when: whether the operator has it: a function, or the name of a field.
        dtype: the dtype, from the operator and src, where that is neither src's nor the compute dtype.
        default: of the field; type checkers read it.
        kw_only: likewise.
    """
    return OperandField(per, _condition(when), dtype)


def result(per: Per, *, when: When = _always, updated: bool = False) -> Any:
    """Declares a tensor that the operator gives besides its output.

    Args:
        per: `channel`, `activation`, or a function of (op, src) that gives one of these words, or a tensor
            `Beside` src.
        when: as for `operand`.
        updated: the caller gives the tensor; its old value is a leaf of that name.
    """
    return ResultField(per, _condition(when), updated)


def inner(*, default: object = None, operands: bool = False) -> Any:
    """Declares an attribute that must be an elementwise operator, without operands unless `operands`."""
    return _declared(default, inner=True, operands=operands)


def parameter(*, default: float | None = None, when: When = _always) -> Any:
    """Declares a number given at run time; without a default, the plan has to say it."""
    return _declared(default, parameter=_condition(when))


def word(known: Collection[str], *, default: str | None = None) -> Any:
    """Declares an attribute that is one of the known words."""
    return _declared(default, words=known)


def count(*, default: int | None = None) -> Any:
    """Declares an attribute that is a whole number from 1 to 2^31 - 1."""
    return _declared(default, count=True)


def _declared(default: object, **marks: object) -> Any:
    return field(metadata=marks) if default is None else field(default=default, metadata=marks)


def extents(src: TensorSpec, per: str, block: int = 1) -> Shape:
    """The shape of an operand; (1,) where it has none of src's axes and is not src's as a whole.

    With a `block` it has one element for so many neighbours along the channels' axis, and for what is left.
    """
    last = src.channel_axis if block > 1 else None
    whole = tuple(
        -(-src.shape[axis] // block) if axis == last and block > 1 else src.shape[axis]
        for axis in PER[per](src)
    )
    return whole if per == "element" else whole or (1,)


def lined_up(value: Any, shape: Sequence[int], axes: Sequence[int], block: int = 1) -> Any:
    """A tensor with some axes of another one, with as many axes: (c,) as (1, c, 1, 1).

    Where it has one element for a block of neighbours, each of them has it.
    """
    made = value.reshape(aligned(value.shape, axes, len(shape)))
    for axis, whole in enumerate(shape):
        if block > 1 and made.shape[axis] not in (1, whole):
            made = made[(slice(None),) * axis + (np.arange(whole) // block,)]
    return made


def aligned(shape: Sequence[int], axes: Sequence[int], rank: int) -> list[int]:
    """The shape with which a tensor that has some of the axes lines up with one that has all of them."""
    extent = dict(zip(axes, shape, strict=False))
    return [extent.get(axis, 1) for axis in range(rank)]
