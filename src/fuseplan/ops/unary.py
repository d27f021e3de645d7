"""Operators of src alone, along one of its axes: what kernels, frameworks and peers know of them is here."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from fuseplan.language.arithmetic import Arithmetic
from fuseplan.language.declarations import Array
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.messages.reasons import Reason
from fuseplan.op import Given, Op


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
