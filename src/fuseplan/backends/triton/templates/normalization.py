"""Plans with an operator that has statistics: sums over channels first, then the elements, in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.template import GpuTemplate, Packing, vector_packing
from fuseplan.backends.triton.templates.normalization_writer import NormalizationWriter
from fuseplan.backends.triton.templates.pointwise_writer import ceil_div
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim, unit_roundoff


@dataclass(frozen=True)
class GpuNormalization(GpuTemplate):
    """Sums and moments over a channel or a place, and elementwise operators before and behind them.

    reads:  src and operands per element once a reduction and once more, or once where a program keeps them
    writes: dst and every result once
    chosen: for every plan with an operator that has statistics

    Attributes:
        form: `rows`: a tile has rows of channels or places; `planes`: positions of one channel.
        rows: of a tile; 1 of planes.
        columns: of a tile, or positions.
        unrolled: tiles read at a time, in each pass; 0: all of a program's are read once and kept.
        programs: of a group, which share the rows or positions of a tile.
        groups: of programs, which share the tiles.
        warps: of a program.
        resident: programs that a processor holds at a time.
    """

    name: ClassVar[str] = "normalization"
    error_scale: ClassVar[str] = (
        "the sum of the sizes of what is added, and what each function of the formulas gives"
    )

    form: str
    rows: int
    columns: int
    unrolled: int
    programs: int
    groups: int
    warps: int
    resident: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(bool(kernel.reductions), Reason.NO_NORMALIZATION)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        channels = (
            kernel.dst.channels if kernel.reduced_per == "channel" else kernel.dst.size // kernel.dst.batch
        )
        yield cls("rows", 16, 64, 2, 1, ceil_div(channels, 64), 4, 1)

    def packing(self, kernel: Kernel, operand: KernelOperand) -> Packing:
        return vector_packing(kernel, operand)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return model.seconds(target, self.traffic(kernel, target))

    @staticmethod
    def bound(kernel: Kernel) -> float:
        return kernel.reduced_count * unit_roundoff(kernel)

    def error_bound(self, kernel: Kernel) -> float:
        return self.bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return NormalizationWriter(self, kernel, self.text).source()
