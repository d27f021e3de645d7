"""Operators of src alone along one of its axes: what kernels, frameworks and peers know of them is here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from fuseplan.language.arithmetic import Arithmetic
from fuseplan.language.declarations import Array
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.messages.reasons import Reason
from fuseplan.op import Given, Op, operator


class UnaryOp(Op):
    """An operator whose output has src's shape, an element of it made of elements along `axis`, a number.

    It is the centre of a kernel of its own kind, with elementwise operators on either side. Frameworks have
    it by the names `torch`, whose `dim` is the axis, and `onnx`, whose second input is. Other fields are true
    or false, attributes of ONNX by the same names, and unknown to torch.

    Attributes:
        missing: the reason where a plan has no operator of the kind.
        beside: the reason where another centre stands beside one.
    """

    missing: ClassVar[Reason]
    beside: ClassVar[Reason]
    axis: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.axis):
            raise refused(self.name, "axis", "must be a number", got=shown(self.axis))

    @abstractmethod
    def along(self, x: Array, axis: int, by: Arithmetic) -> Array:
        """The output in float64."""

    @property
    def backward(self) -> Op | None:
        """The operator that makes src's gradient of the output's, where this is linear; None elsewhere."""
        return None

    @property
    def reads(self) -> str | None:
        """The last axis, for the number -1."""
        return "rows" if self.axis == -1 else None

    def axis_of(self, src: TensorSpec) -> int:
        """The axis in the logical order; a PlanError where src has none of that number."""
        axis = self.axis + src.rank * (self.axis < 0)
        if not 0 <= axis < src.rank:
            raise refused(self.name, "axis", f"of {self.axis} is no axis of src", got=str(src))
        return axis

    def along_axis(self, axis: int) -> UnaryOp:
        """The same operator along another axis."""
        return type(self)(**{**self.attributes(), "axis": axis})

    def output(self, src: TensorSpec) -> TensorSpec:
        self.axis_of(src)
        return super().output(src)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        return self.along(given.src, self.axis_of(given.spec), given.by) * (1 + given.slip), {}


@operator
class Cumsum(UnaryOp):
    """sum(x[j] for j <= i) at each place i along an axis

    Sums are along `axis`, a number, the last one unless told, as in torch.cumsum. With `exclusive` an element
    is not in its own sum, and the first sum is 0; with `reverse` sums are over j >= i, as
    ONNX's CumSum has both.
    """

    onnx = "CumSum"
    torch = "cumsum"
    kind = "scan"
    missing, beside = Reason.NO_SCAN, Reason.BESIDE_SCAN
    error_scale = "the sum of |terms|, and the result of each function of the formulas"

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    @property
    def backward(self) -> Op:
        return replace(self, reverse=not self.reverse)

    def along(self, x: Array, axis: int, by: Arithmetic) -> Array:
        around, last = (slice(None),) * axis, x.shape[axis] - 1
        turned = (*around, [last - place for place in range(last + 1)] if self.reverse else slice(None))
        made = x[turned].cumsum(axis)
        if self.exclusive:
            inclusive, made = made, by.zeros(tuple(x.shape))
            made[(*around, slice(1, None))] = inclusive[(*around, slice(0, last))]
        return made[turned]

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls()
        yield "f32[2x3x7]", cls(0, exclusive=True)
        yield "f32[2x3x19]", cls(exclusive=True, reverse=True)
        yield "f32[2x5x3x7, nhwc]", cls(1)
        yield "f32[1x3x3x2x5]", cls(2, reverse=True)
