"""The operators that a graph has besides those of plans: formulas, views, joins, other libraries'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, ClassVar, Self

import numpy as np

from fuseplan.errors import PlanError, Unsupported
from fuseplan.graph.op import GraphOp, Tensor, check_count, float_type, wide
from fuseplan.graph.type import FLOATS, Type, broadcast, numpy_dtype
from fuseplan.language.formula import parse_expression
from fuseplan.messages.excerpt import shown
from fuseplan.scalar import NUMPY, Scalar, fold, leaves_of
from fuseplan.scalar import text as formula_text
from fuseplan.system.locks import cached_property

LEAVES = ascii_lowercase  # the inputs of a formula, in order


@dataclass(frozen=True)
class Map(GraphOp):
    """formula(a, b, ..): each element by a formula of the inputs' elements, broadcast as NumPy does.

    `map("a * b + 1")` has two inputs: its leaves are a, b, c, .. for the inputs in order.
    """

    name: ClassVar[str] = "map"

    formula: str

    @cached_property
    def expression(self) -> Scalar:
        """The formula as an expression."""
        return parse_expression(self.formula)

    def count(self) -> int:
        """As many as the last of its leaves says."""
        return 1 + max((LEAVES.index(name) for name in leaves_of(self.expression)), default=0)

    @classmethod
    def of(cls, expression: Scalar) -> Self:
        """The operator of an expression over leaves a, b, c, ..."""
        return cls(formula_text(expression))

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        check_count(self, given)
        dtype = float_type(self, given)
        shape = broadcast([each.shape or () for each in given])
        names = next((each.names for each in given if each.names and each.shape == shape), "")
        return (Type(shape, dtype, names),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The formula by NumPy; 2-byte floats are computed in f32."""
        leaves = dict(zip(LEAVES, map(wide, given), strict=False))
        kind = next(iter(leaves.values())).dtype.type
        table: dict[str, Any] = {**NUMPY, "const": kind, "pow": np.power}
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            made = np.asarray(fold(self.expression, leaves, table))
        shape = np.broadcast_shapes(*(each.shape for each in given))
        return (np.broadcast_to(made, shape).astype(given[0].dtype),)

    @classmethod
    def read(cls, values: Sequence[Any], named: dict[str, Any]) -> Self:
        """The operator of a formula's text, kept as we print it."""
        made = super().read(values, named)
        if not isinstance(made.formula, str):
            raise PlanError("map takes the text of a formula", got=shown(made.formula))
        expression = parse_expression(made.formula, LEAVES)
        if expression.is_condition:
            raise PlanError("the formula is a comparison, not a number", got=made.formula)
        return cls.of(expression)


@dataclass(frozen=True)
class Convert(GraphOp):
    """The same numbers in another floating-point dtype.

    Plans compute in f32 or wider and round what they write, so inside of one a conversion changes nothing.
    """

    name: ClassVar[str] = "convert"

    dtype: str

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """The type of src, in the dtype."""
        (src,) = known(self, given)
        float_type(self, given)
        if self.dtype not in FLOATS:
            raise PlanError("convert makes f64, f32, f16 or bf16", got=shown(self.dtype))
        return (Type(src.shape, self.dtype, src.names),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Rounded to the dtype; float64 stays as it is, so that the exact meaning rounds nothing."""
        (src,) = given
        return (src if src.dtype == np.float64 else src.astype(numpy_dtype(self.dtype)),)


@dataclass(frozen=True)
class Reshape(GraphOp):
    """The same elements, in logical order, in another shape."""

    name: ClassVar[str] = "reshape"

    shape: tuple[int, ...]

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        if src.size != math.prod(self.shape):
            raise PlanError("reshape keeps the number of elements", got=str(src), want=self.text)
        names = src.names if self.shape == src.shape else ""
        return (Type(self.shape, src.dtype, names),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same elements; a view where their places allow one."""
        return (given[0].reshape(self.shape),)


@dataclass(frozen=True)
class Permute(GraphOp):
    """The axes in another order: axis i of the result is axis order[i] of src."""

    name: ClassVar[str] = "permute"

    order: tuple[int, ...]

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        if sorted(self.order) != list(range(src.rank)):
            want = f"each of 0 to {src.rank - 1}"
            raise PlanError("permute names each axis once", got=f"{self.order} of {src}", want=want)
        shape = src.shape or ()
        return (Type(tuple(shape[axis] for axis in self.order), src.dtype),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (given[0].transpose(self.order),)


@dataclass(frozen=True)
class Slice(GraphOp):
    """The elements from `begin` to `end` along an axis, each `step`-th."""

    name: ClassVar[str] = "slice"

    axis: int
    begin: int
    end: int
    step: int = 1

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        is_axis = 0 <= self.axis < src.rank
        if not is_axis or not 0 <= self.begin <= self.end <= (src.shape or ())[self.axis] or self.step < 1:
            want = "a range within an axis, and a step of 1 or more"
            raise PlanError("slice takes a range of one axis", got=f"{self.text} of {src}", want=want)
        shape = list(src.shape or ())
        shape[self.axis] = len(range(self.begin, self.end, self.step))
        return (Type(tuple(shape), src.dtype, src.names),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (given[0][(slice(None),) * self.axis + (slice(self.begin, self.end, self.step),)],)


@dataclass(frozen=True)
class Expand(GraphOp):
    """The elements repeated along axes of extent 1, and along new ones in front, as NumPy broadcasts."""

    name: ClassVar[str] = "expand"

    shape: tuple[int, ...]

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        if broadcast([src.shape or (), self.shape]) != self.shape:
            raise PlanError("expand repeats axes of extent 1", got=str(src), want=self.text)
        return (Type(self.shape, src.dtype),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (np.broadcast_to(given[0], self.shape),)


VIEWS = (Reshape, Permute, Slice, Expand)


@dataclass(frozen=True)
class Flip(GraphOp):
    """The elements along some axes in the opposite order."""

    name: ClassVar[str] = "flip"

    axes: tuple[int, ...]

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        if any(not 0 <= axis < src.rank for axis in self.axes):
            raise PlanError(f"{self.text}: there is no such axis", got=str(src))
        return (src,)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (np.flip(given[0], self.axes),)


@dataclass(frozen=True)
class Concat(GraphOp):
    """The inputs one behind the other along an axis."""

    name: ClassVar[str] = "concat"
    takes: ClassVar[int | None] = None

    axis: int

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        check_count(self, given)
        first, *others = known(self, given)
        shape = first.shape or ()
        is_axis = 0 <= self.axis < first.rank
        rests = {self._rest(each) for each in (first, *others)}
        if not is_axis or len(rests) != 1 or len({each.dtype for each in given}) != 1:
            told = " and ".join(map(str, given))
            raise PlanError(f"concat takes tensors that differ along axis {self.axis} alone", got=told)
        extent = sum((each.shape or ())[self.axis] for each in given)
        names = first.names if all(each.names == first.names for each in others) else ""
        return (Type((*shape[: self.axis], extent, *shape[self.axis + 1 :]), first.dtype, names),)

    def _rest(self, each: Type) -> tuple[int, ...]:
        shape = each.shape or ()
        return (*shape[: self.axis], -1, *shape[self.axis + 1 :])

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (np.concatenate(given, self.axis),)

    def write(self, given: Sequence[Tensor], dst: Tensor) -> None:
        np.concatenate(given, self.axis, out=dst)


@dataclass(frozen=True)
class Pad(GraphOp):
    """The tensor with `value` around it: so many elements (low, high) along each axis."""

    name: ClassVar[str] = "pad"

    padding: tuple[tuple[int, int], ...]
    value: float = 0.0

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        float_type(self, given)
        if len(self.padding) != src.rank or any(side < 0 for pair in self.padding for side in pair):
            raise PlanError("pad takes (low, high) of each axis, none negative", got=f"{self.text} of {src}")
        extents = zip(src.shape or (), self.padding, strict=True)
        return (Type(tuple(extent + low + high for extent, (low, high) in extents), src.dtype, src.names),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (np.pad(given[0], self.padding, constant_values=self.value),)


@dataclass(frozen=True)
class Reduce(GraphOp):
    """The mean, sum, largest or smallest element along axes, which stay with extent 1 where `keepdims`."""

    name: ClassVar[str] = "reduce"

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = True

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        (src,) = known(self, given)
        if self.kind not in _REDUCE or sorted(set(self.axes)) != list(self.axes):
            raise PlanError("reduce takes mean, sum, amax or amin, and axes in order", got=self.text)
        float_type(self, given)
        if any(not 0 <= axis < src.rank for axis in self.axes):
            raise PlanError(f"{self.text}: there is no such axis", got=str(src))
        shape, names = src.shape or (), src.names if self.keepdims else ""
        if self.keepdims:
            return (Type(tuple(1 if a in self.axes else n for a, n in enumerate(shape)), src.dtype, names),)
        return (Type(tuple(n for a, n in enumerate(shape) if a not in self.axes), src.dtype),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """NumPy's; 2-byte floats are summed in f32."""
        made = _REDUCE[self.kind](wide(given[0]), axis=self.axes, keepdims=self.keepdims)
        return (np.asarray(made).astype(given[0].dtype),)


_REDUCE: dict[str, Any] = {"mean": np.mean, "sum": np.sum, "amax": np.max, "amin": np.min}


@dataclass(frozen=True)
class Foreign(GraphOp):
    """An operator of another library, which that library runs: `onnx.Resize`, `aten.topk.default`.

    Attributes:
        operator: the library's word, a dot, and the library's name of the operator.
        attributes: names and values, as the library has them: numbers, texts, bytes, and tuples of them.
        results: the types of its results.
    """

    name: ClassVar[str] = "foreign"
    takes: ClassVar[int | None] = None

    operator: str
    attributes: tuple[tuple[str, Any], ...] = ()
    results: tuple[Type, ...] = ()

    @property
    def word(self) -> str:
        return self.operator

    @property
    def library(self) -> str:
        """The library's word."""
        return self.operator.partition(".")[0]

    @property
    def text(self) -> str:
        """The operator with its attributes; a text tells the types of its results beside it."""
        told = ", ".join(f"{name}={value!r}" for name, value in self.attributes)
        return f"{self.operator}({told})" if told else self.operator

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        return self.results

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """NumPy's, of the operators that plans compute; all others the library computes."""
        if self.operator in MEANINGS:
            return (np.asarray(MEANINGS[self.operator](*given)),)
        raise Unsupported(f"{self.operator} is run by its library", text=self.text, refusals=())


PRODUCTS = ("onnx.MatMul", "torch.aten.matmul.default", "torch.aten.bmm.default")  # of stacks of matrices
SAFE_SOFTMAX = (
    "torch.aten._safe_softmax.last"  # torch's, over the last axis: zeros where nothing is above -inf
)

HIDDEN = "torch.aten.where.hidden"  # scores where a mask is true, minus infinity elsewhere


def _safe_softmax(scores: Tensor) -> Tensor:
    largest = np.max(scores, -1, keepdims=True)
    powers = np.exp(wide(scores) - np.where(largest == -np.inf, 0, largest))
    sums = powers.sum(-1, keepdims=True)
    return np.asarray(powers / np.where(largest == -np.inf, 1, sums)).astype(scores.dtype)


MEANINGS: dict[str, Any] = {
    **dict.fromkeys(PRODUCTS, np.matmul),
    SAFE_SOFTMAX: _safe_softmax,
    HIDDEN: lambda scores, seen: np.where(seen, scores, np.asarray(-np.inf, scores.dtype)),
    "onnx.IsNaN": np.isnan,
    "onnx.Where": np.where,
}


def known(op: GraphOp, given: Sequence[Type]) -> Sequence[Type]:
    """The inputs, each a tensor of known shape.

    Raises:
        PlanError: one is not, or their number is wrong.
    """
    check_count(op, given)
    for each in given:
        if each.shape is None:
            raise PlanError(f"{op.word} takes tensors whose shape is known", got=str(each))
    return given


OPS: tuple[type[GraphOp], ...] = (Map, Convert, Reshape, Permute, Slice, Expand, Flip, Concat, Pad, Reduce)
BY_WORD = {each.name: each for each in OPS}
