"""Products of f32, bf16 and i8 by tiles, which Intel's AMX multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.staging import channels_last
from fuseplan.backends.cpu.templates.amx_rows import BLOCK, steps_of
from fuseplan.backends.cpu.templates.amx_writer import PANEL, SUMS_BYTES, AmxKnobs, AmxWriter, panels_of
from fuseplan.backends.cpu.tile_registers import FACTORS, FEATURES, LANES, ROW_BYTES, factors_of
from fuseplan.backends.cpu.tiling import is_per_image, sheet
from fuseplan.backends.parts import gates_beside
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing, Pad, Reshape, Step, Thirds, Transpose
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, lanes, summation_bound, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim

_DEPTH = 8  # steps whose part of a panel, 16 KiB, stays in the first cache beside rows
_NEAR = 4  # steps of a block of rows of f32 that stay in the first cache
_LEAST_PANELS = 16  # of a task of many rows


@dataclass(frozen=True)
class Amx(AmxKnobs):
    """Tiles of 16 rows x 16 features in AMX's registers; any channels-last convolution of f32, bf16 or i8.

    A factor of f32 is the sum of three numbers of bf16, of which six pairs are multiplied: together they take
    half of the time of f32 in vectors (Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial
    Intelligence Datatype For Higher-Precision Computations, 2019).

    reads:  src once for each block of panels, copied as tiles; weight once for each block of rows
    writes: dst once
    chosen: where the processor has the tiles, and the sums are long enough to pay for the copy

    Attributes:
        rows: output positions of a task.
        panels: panels of 32 features of a task.
        depth: steps, of 64 channels in i8 and 32 otherwise, whose part of a panel stays in the first cache.
        extent: steps whose part of the task's rows stays in the second cache.
    """

    name: ClassVar[str] = "amx"
    opens: ClassVar[bool] = True
    efficiency: ClassVar[float] = 0.95
    gated: ClassVar[bool] = True
    ranges: ClassVar[bool] = True
    sums_integers: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from super().limits(kernel, target, accuracy)
        is_exact = accuracy == "default" or kernel.src.dtype == "i8"
        yield model.about(kernel, is_exact, Reason.ACCURACY, "denormal numbers taken for 0")

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        dtypes = f"{kernel.src.dtype} and {kernel.weight.dtype}"
        yield model.about(kernel, factors_of(kernel) is not None, Reason.TILE_DTYPE, dtypes)
        feature = FEATURES[kernel.src.dtype]
        holds = feature in target.features.split(",") and target.vector_bytes == ROW_BYTES
        yield claim(holds, Reason.NO_TILES, got=str(target), want=feature[1:])
        yield model.about(kernel, not kernel.prologue, Reason.PROLOGUE)
        is_last = channels_last(as_rows(kernel)) and model.features_innermost(as_rows(kernel))
        yield model.about(kernel, is_last, Reason.CHANNELS_FIRST, str(kernel.src))

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        kernel = as_rows(kernel)
        yield from dict.fromkeys(
            cls._of(kernel, target, _rows(kernel, target, most)) for most in (256, 128, 64, BLOCK)
        )

    @classmethod
    def _of(cls, kernel: Kernel, target: Target, rows: int) -> Template:
        steps, parts = steps_of(kernel), FACTORS[kernel.src.dtype].parts
        extent, panels = _extent(target, rows * parts, steps), _panels(kernel, target, rows)
        if extent < steps:
            panels = min(panels, max(1, target.l2_bytes // 2 // (rows * SUMS_BYTES)))
        # Parts of f32 are multiplied twice as often as they are read: the second cache keeps up.
        is_near = parts == 1 and rows > BLOCK
        return cls(rows, panels, min(_DEPTH, steps) if is_near else extent, extent)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per product; of f32, one of each sum of 32 products of parts, and two of the parts.

        The pairs that are left out are at most two roundings of the product. A step's pairs are summed in two
        halves.
        """
        if FACTORS[kernel.src.dtype].parts == 1:
            return summation_bound(kernel)
        steps = 6 * steps_of(as_rows(kernel))
        return (2 + min(LANES, kernel.contraction.depth) + 1 + steps) * unit_roundoff(kernel)

    def waste(self, kernel: Kernel, target: Target) -> float:
        """Whole tiles multiply six times as fast as vectors: 1.1 to 1.4 TFLOP/s on a core of a Xeon with AMX.

        A copied element takes as long as 15 operations, one of the weight that is read again as long as 8. In
        parts of f32, tiles are 1.9 times as fast: see `_moved`.
        """
        kernel = as_rows(kernel)
        conv, factors = kernel.contraction, FACTORS[kernel.src.dtype]
        features = panels_of(conv) * PANEL / conv.features_per_group
        channels = steps_of(kernel) * factors.channels / conv.depth
        rows = -(-self.rows // LANES) * LANES / self.rows
        if factors.parts > 1:
            rows *= self._uneven(kernel, target)
            return rows * features * channels / 1.92 + self._moved(kernel, target) / 2
        copies, count = -(-panels_of(conv) // self.panels), sheet(kernel)
        moved = 15 * copies / conv.features_per_group + 8 * (-(-count // self.rows) - 1) / count
        # A tile of i8 has twice as many channels; vectors of f64 have half as many elements.
        faster = 6 * factors.channels / 32 * model.itemsize(kernel) / 4
        return rows * features * channels / faster + moved / 2

    def _uneven(self, kernel: Kernel, target: Target) -> float:
        """Time of the thread with the most rows, and of whole tasks, over the time of equal shares."""
        conv, count = kernel.contraction, sheet(kernel)
        blocks = -(-count // self.rows)
        sheets = conv.groups * (conv.batch if is_per_image(kernel) else 1)
        tasks = sheets * blocks * -(-panels_of(conv) // self.panels)
        return blocks * self.rows / count * -(-tasks // target.threads) * target.threads / tasks

    def _moved(self, kernel: Kernel, target: Target) -> float:
        """Operations' time, for each product of f32, of the elements that are copied, read and written.

        A copied element takes as long as 40 operations, or 60 under several taps; 12 less where a block of
        rows by few steps stays in the first cache, and 25 more where rows leave the second. One of the result
        takes 20. One of the weight arrives in the time of 125, most of it beside enough products, for each
        thread that reads it; it takes 45 where it is read again from beyond the second cache.
        """
        conv, count, steps = kernel.contraction, sheet(kernel), steps_of(kernel)
        blocks = -(-count // self.rows)
        room = self.rows * (self.extent if conv.taps == 1 else steps) * 3 * ROW_BYTES
        is_near, is_far = self.rows <= BLOCK and steps <= _NEAR, 2 * room > target.l2_bytes
        copied = (40 if conv.taps == 1 else 60) - 12 * is_near + 25 * is_far
        readers = min(blocks, target.threads)
        beside = blocks * -(-self.rows // LANES) * LANES / readers
        again = 45 * (6 * kernel.weight.size > target.l2_bytes // 2)
        weight = readers * max(24, 125 - 1.25 * beside) + again * (blocks - readers)
        parts = -(-panels_of(conv) // self.panels)
        # A thread's tasks follow one another: it copies rows once, if it holds all steps.
        copies = parts if self.extent < steps else min(parts, target.threads)
        return copied * copies / conv.features_per_group + weight / count + 20 / conv.depth

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return AmxWriter(self, kernel, target).source()

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        packed = super().packing(kernel, target, operand)
        return replace(packed, dtype=operand.dtype) if operand.role == "weight" else packed

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The weight as [image][group][panel][step][tile][4 bytes of a step][feature of the tile].

        Steps go through the channels of a tap, then of the next. Zeros follow the last of them, and the last
        feature. Vectors of gates and of values take turns.
        """
        conv, panels = kernel.contraction, panels_of(kernel.contraction)
        groups = conv.groups * (conv.batch if conv.weight_per_batch else 1)
        steps, beside = steps_of(kernel), FACTORS[kernel.src.dtype].channels // LANES
        inner = conv.channels_per_group, conv.taps
        gates = gates_beside(kernel.parts, panels * PANEL // 2, lanes(kernel, target), inner)
        features = panels * PANEL if gates else conv.features_per_group
        return (
            *gates,
            Reshape((groups, features, *inner)),
            Transpose((0, 1, 3, 2)),
            Reshape((groups, features, conv.depth)),
            Pad((groups, panels * PANEL, steps * beside * LANES)),
            Reshape((groups, panels, 2, LANES, steps, LANES, beside)),
            Transpose((0, 1, 4, 2, 5, 3, 6)),
            *((Thirds(3),) if FACTORS[kernel.src.dtype].parts > 1 else ()),
        )


def _rows(kernel: Kernel, target: Target, most: int) -> int:
    """Rows of a task, shared out evenly in whole tiles: fewer where a thread would get none."""
    count, rows = sheet(kernel), most
    sheets = kernel.contraction.groups * (kernel.contraction.batch if is_per_image(kernel) else 1)
    parts = -(-panels_of(kernel.contraction) // _LEAST_PANELS)
    while rows > BLOCK and sheets * -(-count // rows) * parts < target.threads:
        rows = max(BLOCK, rows // 2 // BLOCK * BLOCK)
    even = -(-count // -(-count // rows))
    return min(count, -(-even // LANES) * LANES)


def _extent(target: Target, rows: int, steps: int) -> int:
    """Steps that stay in the second cache: all that fit a half of it, or equal parts, beside sums."""
    most = max(_DEPTH, target.l2_bytes // 2 // (rows * ROW_BYTES))
    slices = -(-steps // most)
    return steps if slices == 1 else -(-steps // slices // _DEPTH) * _DEPTH


def _panels(kernel: Kernel, target: Target, rows: int) -> int:
    """Panels of a task: threads get several tasks, each of many panels, since it copies its rows."""
    conv, panels = kernel.contraction, panels_of(kernel.contraction)
    blocks = conv.groups * (conv.batch if is_per_image(kernel) else 1) * -(-sheet(kernel) // rows)
    least = max(1, min(_LEAST_PANELS, rows // 2))
    wanted = 4 * target.threads if target.threads > 1 else 1
    several = min(-(-wanted // blocks), panels // least)
    parts = min(panels, max(several, -(-target.threads // blocks)))
    return -(-panels // parts)
