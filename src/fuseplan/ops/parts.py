"""Operators that read several elements of one axis at once: gated products, rotary embedding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

from fuseplan.errors import PlanError
from fuseplan.language.declarations import Along, Array, inner, operand, word
from fuseplan.language.extents import is_integer, outermost_first
from fuseplan.language.fields import one_of, refused
from fuseplan.language.layouts import dense
from fuseplan.language.parts import Split, part
from fuseplan.language.slopes import slopes
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Given, Op, operator
from fuseplan.ops.activation import Gelu, Relu, Sigmoid, Silu
from fuseplan.scalar import Scalar, leaf


class Parted(Elementwise):
    """An elementwise operator whose formulas read, or make, several parts of one axis.

    A class has the method `apply(self, x, **leaves)`: `x` are the leaves of src's parts, and the result is a
    formula for each part of the output. Parts of src behind those that `turned` counts pass unchanged.
    """

    has_parts: ClassVar[bool] = True

    @abstractmethod
    def split(self, src: TensorSpec) -> Split:
        """How the axis is in parts; a PlanError where the axis has no such parts."""

    @property
    def backward(self) -> Op | None:
        """The operator that makes src's gradient, of src and `grad` or of the output's alone; or None."""
        return None

    def turned(self, split: Split, src: TensorSpec) -> int:
        """The number of src's parts that the formulas read."""
        return split.reads

    def formulas(self, src: TensorSpec, keys: Mapping[str, str] | None = None) -> tuple[Scalar, ...]:
        """A formula for each part of the output, over parts of `x` and of operands, and parameters."""
        split = self.split(src)
        x = [part(leaf("x"), index) for index in range(split.reads)]
        count = self.turned(split, src)
        return (*type(self).apply(self, x[:count], **self.leaves(keys)), *x[count:])

    def output(self, src: TensorSpec) -> TensorSpec:
        """The axis has as many parts as are made."""
        split, shape = self.split(src), list(src.shape)
        shape[split.axis] = split.extent * split.makes
        return src if src.layout is not None and tuple(shape) == src.shape else src.with_shape(shape)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        dst, split = given.by.empty(self.output(given.spec).shape), self.split(given.spec)
        return split.fill(dst, self.formulas(given.spec), self.leaf_values(given), given.by.table), {}


@dataclass(frozen=True)
class Gated(Parted):
    """What a gated product and its gradient share: the fields, and the two parts of src."""

    activation: Elementwise = inner(default=Sigmoid())
    gate: str = word(("first", "second"), default="second")
    axis: str = "last"
    interleaved: bool = False
    makes: ClassVar[int] = 1

    @property
    def reads(self) -> str | None:
        return "rows" if self.axis == "last" else None

    def split(self, src: TensorSpec) -> Split:
        """Two parts, made into one; of a gradient, into two."""
        one_of(self.name, "axis", self.axis, ("last", *src.names))
        axis = src.rank - 1 if self.axis == "last" else src.names.index(self.axis)
        if src.shape[axis] % 2:
            raise refused(
                self.name, "axis", "must have an even number of elements", got=f"{src.shape[axis]} of {src}"
            )
        return Split(axis, src.shape[axis] // 2, 2, self.makes, self.interleaved)

    def parted(self, x: Sequence[Any]) -> Sequence[Any]:
        """Gate and value of the two parts; or the two parts of gate and value."""
        return x if self.gate == "first" else x[::-1]

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x10]", cls()
        yield "f32[2x3x14]", cls(Silu(), gate="first")
        yield "f32[2x6x3x7, nhwc]", cls(Gelu(), axis="c")
        yield "f32[1x3x3x2x10]", cls(Relu(), interleaved=True)


@operator
class Glu(Gated):
    """x[0] * activation(x[1])

    x[0] and x[1] are the halves of an axis, the last one unless `axis` names another; with `interleaved`, its
    even and its odd elements. dst is half as long along that axis.

    `glu` is torch.nn.functional.glu: the second half is the gate. `gate=first` makes the first half the
    gate, activation(x[0]) * x[1], as do models that store the gate's features in front of the others (Llama's
    joined `gate_up_proj`). SwiGLU is `glu(silu)`, GEGLU `glu(gelu)`, ReGLU `glu(relu)`.
    """

    torch = "glu"

    @property
    def backward(self) -> Op:
        return GluBackward(self.activation, self.gate, self.axis, self.interleaved)

    def apply(self, x: Sequence[Scalar], **parameters: Scalar) -> tuple[Scalar, ...]:
        gate, value = self.parted(x)
        return (value * type(self.activation).apply(self.activation, gate, **parameters),)


def _halved(op: GluBackward, src: TensorSpec) -> Along:
    """The extents of the gated product of src."""
    axis = op.split(src).axis
    extents = (extent // 2 if each == axis else extent for each, extent in enumerate(src.shape))
    return Along(tuple(range(src.rank)), tuple(extents))


@operator
class GluBackward(Gated):
    """grad * activation(x[1]), grad * x[0] * derivative(activation)(x[1])

    The gradient of src of `glu` with the same fields: x is glu's src, whose parts are `glu`'s, and dst has
    the same parts.

    grad: the shape of glu's output, the gradient of it.
    """

    makes = 2
    grad = operand(_halved)

    def apply(self, x: Sequence[Scalar], grad: Scalar, **parameters: Scalar) -> tuple[Scalar, ...]:
        """The formulas, in the order of the parts."""
        gate, value = self.parted(x)
        made, back = type(self.activation).apply(self.activation, gate, **parameters), part(grad, 0)
        by_gate = slopes.times(back * value, slopes.derivative(made, str(gate.args[0])))
        return tuple(self.parted((by_gate, back * made)))


def _angles(op: Rotary, src: TensorSpec) -> Along:
    """Axes of positions and of pairs."""
    position = src.names.index("s") if "s" in src.names[:-1] else src.rank - 2
    axes = (0, position) if op.batched and position else (position,)
    count = op.dimensions(src) // (1 if op.whole else 2)
    return Along((*axes, src.rank - 1), (*(src.shape[axis] for axis in axes), count))


@operator
class Rotary(Parted):
    """x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin

    Rotary position embedding: pairs of elements of the last axis are turned by an angle for each position.
    The elements of a pair are `dims`/2 apart, as in Llama; with `interleaved` they are neighbours, as in
    GPT-J. `dims` elements are turned, all with 0, and the others pass unchanged. Positions are the axis s, or
    the axis in front of the last where no other axis has that name: f16[8x32x512x128, bhsd] and
    f16[8x512x32x128, bshd] are both turned along s.

    `inverse` turns by the negative angles, which is also the gradient: that of src is `rotary(inverse=True)`
    of that of dst.

    cos, sin: (s, dims/2), each angle once; with `batched` (b, s, dims/2). With `whole` they have dims
    elements, as models repeat them, and each element is computed with those at its place.
    """

    onnx = "RotaryEmbedding"
    reads = "rows"

    cos = operand(_angles)
    sin = operand(_angles)
    dims: int = 0
    interleaved: bool = False
    inverse: bool = False
    batched: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.dims) or self.dims < 0 or self.dims % 2:
            raise refused(self.name, "dims", "must be an even number of elements", got=self.dims)
        if self.whole and (self.dims or self.interleaved):
            problem = "is for an axis that is turned as two halves"
            raise refused(
                self.name, "whole", problem, got=f"dims={self.dims}, interleaved={self.interleaved}"
            )

    @property
    def backward(self) -> Op | None:
        return None if self.whole else replace(self, inverse=not self.inverse)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src, in its order without gaps: heads inside of queries stay there."""
        made, order = super().output(src), outermost_first(src.element_strides)
        if src.layout is not None:
            return made
        return TensorSpec(src.shape, src.dtype, strides=dense(src.shape, order), names=src.names)

    def dimensions(self, src: TensorSpec) -> int:
        """Elements that are turned."""
        return self.dims or src.shape[-1]

    def split(self, src: TensorSpec) -> Split:
        """The longest parts that pairs, and the elements that pass, are made of."""
        if src.rank < 2:
            raise PlanError(f"{self.name} reads positions and their elements", got=f"{src}", want="two axes")
        size, dims = src.shape[-1], self.dimensions(src)
        if dims > size or size % 2:
            raise refused(
                self.name, "dims", "turns an even number of elements of an axis of even extent",
                got=f"{dims} of {size}", want=f"at most {size // 2 * 2}",
            )  # fmt: skip
        passing = (size - dims) // 2 if self.interleaved else size - dims
        extent = gcd(dims // 2, passing)
        return Split(src.rank - 1, extent, size // extent, size // extent, self.interleaved)

    def turned(self, split: Split, src: TensorSpec) -> int:
        """The parts in front."""
        return self.dimensions(src) // split.extent

    def apply(self, x: Sequence[Scalar], cos: Scalar, sin: Scalar) -> tuple[Scalar, ...]:
        """The formulas, in the order of the parts."""
        half = len(x) // 2
        made = list(x)
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if self.interleaved else (pair, pair + half)
            a, b = x[first], x[second]
            places = (first, second) if self.whole else (pair, pair)
            along, across = ([part(each, place) for place in places] for each in (cos, sin))
            across = [-each if self.inverse else each for each in across]
            made[first], made[second] = a * along[0] - b * across[0], b * along[1] + a * across[1]
        return tuple(made)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x5x14, bhsd]", cls()
        yield "f32[2x5x3x14, bshd]", cls(interleaved=True)
        yield "f32[2x3x5x14]", cls(dims=6)
        yield "f32[3x5x16, hsd]", cls(dims=8, interleaved=True)
        yield "f32[7x6]", cls(inverse=True)
        yield "f32[2x5x3x8, bshd]", cls(batched=True)
        yield "f32[2x5x3x14, bshd]", cls(whole=True, batched=True, inverse=True)


PARTED = (Glu, GluBackward, Rotary)
