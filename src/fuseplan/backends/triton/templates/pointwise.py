"""Plans without a contraction: one pass over src, all operators applied to tiles in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.template import GpuTemplate, Packing, vector_packing
from fuseplan.backends.triton.templates.pointwise_writer import PointwiseWriter, power_of_two
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand, functions
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim

_TILE = 4096  # elements
_WIDEST = 2048  # channels of a tile


@dataclass(frozen=True)
class GpuPointwise(GpuTemplate):
    """Chains of elementwise operators, in any layout.

    reads:  src and every operand once; what depends on the channel alone is computed once a tile, or once for
            all tiles of a program
    writes: dst once
    chosen: for every plan without a contraction

    Attributes:
        form: what a row of a tile is: the channels of a position (`rows`), the positions of a channel
            (`planes`), or whatever lies there (`flat`, of one row).
        outer: rows of a tile.
        inner: elements of a row in a tile.
        programs: programs that share the rows of one column of tiles; 0: one a tile.
        warps: of a program.
    """

    name: ClassVar[str] = "pointwise"
    error_scale: ClassVar[str] = "what each function of the formulas gives"

    form: str
    outer: int
    inner: int
    programs: int
    warps: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(
            kernel.convolution is None, Reason.CONTRACTION_IN_POINTWISE, operator=kernel.contraction_step
        )
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        channels, area = kernel.dst.channels, prod(kernel.dst.spatial)
        tile = _TILE // 2 if kernel.compute_dtype == "f64" else _TILE  # f64 takes two registers
        if kernel.dst.is_channels_last or area == 1:
            inner = min(power_of_two(channels), _WIDEST)
            yield cls("rows", max(1, tile // inner), inner, 0, 4)
        yield cls("flat", 1, tile // 2, 0, 4)
        if not kernel.dst.is_channels_last and area > 1:
            inner = min(power_of_two(area), _WIDEST)
            yield cls("planes", max(1, tile // inner), inner, 0, 4)

    def suits(self, kernel: Kernel) -> bool:
        """Whether dst is stored as the form's rows need it."""
        if self.form == "flat":
            return self.outer == 1
        area = prod(kernel.dst.spatial)
        return area == 1 or kernel.dst.is_channels_last == (self.form == "rows")

    def packing(self, kernel: Kernel, operand: KernelOperand) -> Packing:
        return vector_packing(kernel, operand)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return model.seconds(target, self.traffic(kernel, target))

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding a function, relative to the function's result: there is no sum of products."""
        return sum(functions(stage.expression) for stage in kernel.epilogue) * model.unit_roundoff(kernel)

    def error_bound(self, kernel: Kernel) -> float:
        return self.bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return PointwiseWriter(self, kernel, self.text).source()
