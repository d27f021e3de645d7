"""The one template of the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.kernels.centre import Summary
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, accuracy_claim
from fuseplan.messages.reasons import Claim


@dataclass(frozen=True)
class Interpreted(Template):
    """Every kernel, stage by stage over whole float64 arrays.

    reads:  src, every operand and every stage's result
    writes: every stage's result in float64, and dst
    chosen: only by the target `reference`
    """

    name: ClassVar[str] = "interpreted"
    opens: ClassVar[bool] = True
    ranges: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        """It computes every kernel; a caller may still ask for less error than float64 has."""
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        yield cls()

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        """What has to move, and one float64 array a stage."""
        between = 8 * (len(kernel.prologue) * kernel.src.size + len(kernel.epilogue) * kernel.dst.size)
        written = kernel.written_bytes
        return Traffic(kernel.minimum_bytes - written, written, between)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """By a rate that NumPy reaches nearly everywhere; there is nothing to rank it against."""
        return kernel.flops / 1e9 + self.traffic(kernel, target).total / 1e9

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """The bound of float64 sums in any order: one rounding per product and per element that is joined."""
        has_products = isinstance(kernel.centre, Contraction | Summary)
        depth = kernel.contraction.depth if has_products else 0
        joined = 0 if isinstance(kernel.centre, Contraction) else kernel.reduced_count
        return float((depth + joined) * 2.0**-53)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        """The kernel's own text: the interpreter reads the record."""
        operands = tuple(Slot("operand", operand.key) for operand in kernel.operands)
        outputs = tuple(Slot("result", output.key) for output in kernel.outputs)
        slots = (Slot("src"), Slot("dst"), *operands, *outputs, Slot("parameters"))
        return Source(kernel.text, "interpret", slots, language="kernel")

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """Dense, in logical order."""
        return Packing(operand.shape, kernel.compute_dtype)
