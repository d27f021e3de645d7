"""The operators that a graph has besides those of plans: formulas, views, windows, other libraries'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, ClassVar, Self

import numpy as np

from fuseplan.errors import PlanError, Unsupported
from fuseplan.graph.op import GraphOp, Tensor, check_count, float_type, wide
from fuseplan.graph.type import Type, broadcast
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
        """The shape of all inputs together, in their dtype."""
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
class Reshape(GraphOp):
    """The same elements, in logical order, in another shape."""

    name: ClassVar[str] = "reshape"

    shape: tuple[int, ...]

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """The shape that it says."""
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
        """The extents in that order."""
        (src,) = known(self, given)
        if sorted(self.order) != list(range(src.rank)):
            want = f"each of 0 to {src.rank - 1}"
            raise PlanError("permute names each axis once", got=f"{self.order} of {src}", want=want)
        shape = src.shape or ()
        return (Type(tuple(shape[axis] for axis in self.order), src.dtype),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """A view."""
        return (given[0].transpose(self.order),)


VIEWS = (Reshape, Permute)


@dataclass(frozen=True)
class Concat(GraphOp):
    """The inputs one behind the other along an axis."""

    name: ClassVar[str] = "concat"
    takes: ClassVar[int | None] = None

    axis: int

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """The extents of the first, that of the axis summed."""
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
        """NumPy's."""
        return (np.concatenate(given, self.axis),)


@dataclass(frozen=True)
class Reduce(GraphOp):
    """The mean, sum, largest or smallest element along axes, which stay with extent 1 where `keepdims`."""

    name: ClassVar[str] = "reduce"

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = True

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """The shape without the axes."""
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
class Pool(GraphOp):
    """The largest or the mean element under a window that moves over the spatial axes.

    Windows begin `stride` apart and have `kernel` taps `dilation` apart, one number a spatial axis; `padding`
    is (low, high) a spatial axis, and `dst` has the extents of the result. A window's mean is that of its
    taps inside src, and inside the padding too where `counts_padding`. The last windows may reach beyond the
    high padding, which counts for no mean.
    """

    name: ClassVar[str] = "pool"

    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dst: tuple[int, ...]
    dilation: tuple[int, ...] = ()
    counts_padding: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The dilation of each spatial axis."""
        return self.dilation or (1,) * len(self.kernel)

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """n, c, and the spatial extents that it says."""
        (src,) = known(self, given)
        counts = {src.rank - 2, len(self.stride), len(self.padding), len(self.dst), len(self.steps)}
        if self.kind not in ("amax", "mean") or counts != {len(self.kernel)}:
            raise PlanError("pool takes amax or mean, and each number for every spatial axis", got=self.text)
        dtype, shape = float_type(self, given), src.shape or ()
        return (Type((*shape[:2], *self.dst), dtype, src.names),)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One spatial axis after the other: windows are products of intervals."""
        made = wide(given[0])
        counts = np.ones((1,) * made.ndim, made.dtype)
        for place in range(len(self.kernel)):
            made = self._along(made, place, -np.inf if self.kind == "amax" else 0)
            if self.kind == "mean":
                counts = counts * self._counts(given[0].shape, place)
        return ((made / counts if self.kind == "mean" else made).astype(given[0].dtype, copy=False),)

    def _along(self, src: Tensor, place: int, fill: float) -> Tensor:
        """The largest element, or the sum, of each window of one axis."""
        axis, step, stride = 2 + place, self.steps[place], self.stride[place]
        shape = [self.dst[place] if each == axis else extent for each, extent in enumerate(src.shape)]
        made: Tensor = np.full_like(src, fill, shape=shape)
        combine = np.maximum if self.kind == "amax" else np.add
        for tap in range(self.kernel[place]):
            place_of_first = tap * step - self.padding[place][0]  # in src, of the first window's tap
            first = max(0, -(place_of_first // stride))
            count = min(self.dst[place], (src.shape[axis] - 1 - place_of_first) // stride + 1) - first
            if count > 0:
                part = _every(made, axis, first, 1, count)
                begin = place_of_first + first * stride
                combine(part, _every(src, axis, begin, stride, count), out=part)
        return made

    def _counts(self, shape: tuple[int, ...], place: int) -> Tensor:
        """How many taps of each window of one axis count."""
        (low, high), extent, step = self.padding[place], shape[2 + place], self.steps[place]
        inside = (0, low + extent + high) if self.counts_padding else (low, low + extent)
        begins = np.arange(self.dst[place]) * self.stride[place]
        taps = begins[:, None] + np.arange(self.kernel[place]) * step
        found = ((taps >= inside[0]) & (taps < inside[1])).sum(1)
        spread = [1] * len(shape)
        spread[2 + place] = len(found)
        made: Tensor = found.reshape(spread).astype(np.float32)
        return made


def _every(array: Tensor, axis: int, begin: int, stride: int, count: int) -> Tensor:
    """So many elements of an axis, `stride` apart."""
    index = [slice(None)] * array.ndim
    index[axis] = slice(begin, begin + (count - 1) * stride + 1, stride)
    found: Tensor = array[tuple(index)]
    return found


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
        """The operator."""
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
        """The types that its reader found."""
        return self.results

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Nothing: the library computes it."""
        raise Unsupported(f"{self.operator} is run by its library", text=self.text, refusals=())


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


OPS: tuple[type[GraphOp], ...] = (Map, Reshape, Permute, Concat, Reduce, Pool)
BY_WORD = {each.name: each for each in OPS}
