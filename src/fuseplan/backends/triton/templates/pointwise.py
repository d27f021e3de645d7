"""Plans without a contraction: one pass over src, all operators applied to tiles in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.triton import dialect, model
from fuseplan.backends.triton.index import power_of_two
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.pointwise_writer import PointwiseKnobs, PointwiseWriter, channel_run
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, pointwise_claims
from fuseplan.messages.reasons import Claim

# Measured on an H100, batch_norm and ReLU of eight shapes: narrow rows read fewer operands a tile, a loop
# over tiles gains less from operands that are kept than it loses, rows that begin anywhere move one by one.
# Chains without operands of a channel take 0.981 of the time with one vector a thread that they take with
# four (13 chains, 8 MB to 700 MB), rows of channels 0.977 with two. Where elements of a byte are stored, or
# an axis is read in parts, two are better: silu, product and fp8 took 141.5 us for 154.1, rotary 135.1 for
# 150.2 (H200).
_WIDEST = 256  # elements of a row in a tile
_LOOPING = 0.95
_SCATTERED = 0.85
_SHARING = 8  # programs of a processor that share the rows
_LARGE = 128  # positions of a channel from which a flat tile may be twice as large
_MOST = 128  # elements of a thread, in all parts of an axis: of 1,024, a kernel took 156 s to compile


@dataclass(frozen=True)
class GpuPointwise(PointwiseKnobs, GpuTemplate):
    """Chains of elementwise operators, in any layout.

    reads:  src and every operand once; expressions of the channel alone are computed per tile, or once for
            all tiles of a program
    writes: dst once
    chosen: for every plan without a contraction

    Attributes:
        form: the contents of a row of a tile: the channels of a position (`rows`), the positions of a channel
            (`planes`), or any neighbours in memory (`flat`, a single row).
        outer: rows of a tile.
        inner: elements of a row in a tile.
        programs: programs that share the rows of one column of tiles; 0: one program per tile.
        warps: warps of a program.
    """

    name: ClassVar[str] = "pointwise"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the result of each function of the formulas"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from pointwise_claims(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        made: dict[GpuPointwise, None] = {}
        for form in _forms(kernel):
            for warps, share in ((4, _share(kernel, form)), (4, 1.0), (4, 2.0), (4, 0.5), (8, 1.0), (8, 2.0)):
                tile = min(power_of_two(int(share * _tile(kernel))), _most(kernel, warps * target.warp))
                inner = tile if form == "flat" else min(_row(kernel, form), tile)
                made[cls(form, tile // inner, inner, 0, warps)] = None
                if form == "rows" and share == 1:
                    made[cls(form, tile // inner, inner, _SHARING * target.processors, warps)] = None
        yield from sorted(made, key=lambda template: template.seconds(kernel, target))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        writer = PointwiseWriter(self, kernel.representative, "")
        used = writer.filled * min(1.0, writer.most.high / target.processors)
        used *= _SCATTERED if self.form == "planes" else 1.0
        used *= _LOOPING if self.programs else 1.0
        estimate = model.seconds(target, self.traffic(kernel, target), used=used)
        return round(estimate, 7)  # the model knows no better than a tenth of a microsecond

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """The errors of the functions, each relative to its result: there is no sum of products."""
        return sum(
            max(dialect.relative_errors([formula], kernel.dst.dtype) for formula in stage.expressions)
            for stage in (*kernel.prologue, *kernel.epilogue)
        )

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return PointwiseWriter(self, kernel, self.text).source(target)


def _share(kernel: Kernel, form: str) -> float:
    """A tile's part of `_tile` that is tried first."""
    if form == "rows":
        return 0.5
    if any(operand.is_channel for operand in kernel.operands):
        return 2.0 if prod(kernel.dst.spatial) >= _LARGE and kernel.dst.itemsize == 4 else 1.0
    return 0.5 if kernel.parts or kernel.dst.itemsize == 1 else 0.25


def _tile(kernel: Kernel) -> int:
    """Elements of a tile of four warps: 64 bytes a thread, 16 where doubles take the registers."""
    elements = 128 * 64 // max(2, kernel.src.itemsize, kernel.dst.itemsize)
    return elements // 4 if kernel.compute_dtype == "f64" else elements


def _most(kernel: Kernel, threads: int) -> int:
    """The most lanes of a tile, each of which has an element of every part."""
    parts = max(kernel.parts.reads, kernel.parts.makes) if kernel.parts else 1
    return threads * max(1, power_of_two(_MOST // parts + 1) // 2)


def _forms(kernel: Kernel) -> tuple[str, ...]:
    """The forms worth trying, the best first."""
    channels = kernel.dst.channels
    if not any(operand.is_channel for operand in kernel.operands):
        return ("flat",)
    if channel_run(kernel.dst) > 1:  # planes are those of a named layout
        return ("flat", "planes") if kernel.dst.layout else ("flat",)
    if channels > 1024:
        return ("rows",)
    return ("rows", "flat") if channels * kernel.dst.itemsize % 16 == 0 else ("flat", "rows")


def _row(kernel: Kernel, form: str) -> int:
    """Elements of a row in a tile: a power of two that divides them, if there is a large one."""
    row = kernel.dst.channels if form == "rows" else channel_run(kernel.dst)
    dividing = row & -row
    return min(_WIDEST, dividing if dividing >= 32 else power_of_two(row))
