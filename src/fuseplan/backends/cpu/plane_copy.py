"""Copies a plane of src into a thread's own memory: plain rows in the compute type, prologue applied."""

from __future__ import annotations

from math import prod

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.depthwise_plan import PlanePlan
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.loops import nested, pieces


class PlaneCopy:
    """The rows that a block of results needs, over all positions of the far axes.

    Args:
        block_rows: output rows of a block.

    Attributes:
        pitch: elements from one row of the copy to the next; whole vectors.
        far_strides: elements from one position of each far axis to the next.
        nbytes: room that a thread needs.
    """

    def __init__(self, frame: Frame, plan: PlanePlan, block_rows: int) -> None:
        self.frame, self.b, self.plan, self.block_rows = frame, frame.body, plan, block_rows
        self.kernel = frame.kernel
        self.stages = Elementwise(frame, "prologue")
        self.rows = min(plan.row.size, plan.row.reach(block_rows))
        self.pitch = -(-plan.column.size // frame.lanes) * frame.lanes
        sizes = [axis.size for axis in plan.volume]
        slab = self.rows * self.pitch
        steps = [prod(sizes[i + 1 :]) * slab for i in range(len(sizes))]
        # Taps that became a far axis lie side by side.
        self.far_strides = (*steps, 1)[: len(plan.far)]
        self.low = plan.conv.padding[-1][0] if plan.pads else 0
        self.nbytes = -(-prod(sizes) * slab * model.itemsize(self.kernel) // 64) * 64

    def emit(self, source: Index, channel: Index, first: Index) -> Value:
        """Copies what output rows `first` on read of the plane at storage offset `source`.

        Returns:
            the address at which row 0, column 0 of the plane (or its padding) stands or would stand.
        """
        b, row = self.b, self.plan.row
        own = b.at(
            self.frame.pointer("workspace"), self.frame.thread * (self.nbytes // model.itemsize(self.kernel))
        )
        begin = self._clamped(b.const(first * row.stride - row.low, I64))
        far, pitch = self.plan.strides
        sizes = (*(axis.size for axis in self.plan.volume), self.rows)
        with nested(b, sizes, "line") as at:
            if self.plan.conv.channels_per_group > 1:
                channel = channel + at[0]
            offset, to = source + begin * pitch, b.const(0, I64)
            for index, stride, step in zip(at, (*far, pitch), self._steps, strict=True):
                offset, to = offset + index * stride, to + index * step
            self._line(offset, channel, b.at(own, to))
        return b.at(own, (b.const(0, I64) - begin) * self.pitch)

    @property
    def _steps(self) -> tuple[int, ...]:
        """Elements of the copy from one position of each axis to the next, rows last."""
        return (*self.far_strides[: len(self.plan.volume)], self.pitch)

    def _clamped(self, begin: Value) -> Value:
        """The first row copied: all rows of the copy exist."""
        low = self.b.select(self.b.compare("sgt", begin, 0), begin, 0)
        return self.b.const(self.b.smaller(low, self.plan.row.size - self.rows), I64)

    def _line(self, source: Value, channel: Index, to: Value) -> None:
        lanes, size = self.frame.lanes, self.plan.conv.src_spatial[-1]
        if self.plan.pads:
            with self.b.loop(0, self.pitch, lanes, name="column") as column:
                self.b.store(self.b.number(self.plan.conv.fill), self.b.at(to, column))
        to = self.b.at(to, self.low)
        step = self.kernel.src.element_strides[-1]
        if step != 1 and size > 1:
            with self.b.loop(0, size, name="column") as column:
                self._part(source + column * step, channel, self.b.at(to, column), 1)
            return

        def part(column: Index, count: int) -> None:
            self._part(source + column, channel, self.b.at(to, column), count)

        pieces(self.b, size, lanes, part, name="column")

    def _part(self, source: Value, channel: Index, to: Value, count: int) -> None:
        b, dtype = self.b, self.kernel.src.dtype
        x = storage.read_at(b, dtype, self.frame.pointer("src"), source, count)
        x = self.stages.apply(x, Place(source, channel, False, count), {})
        b.store_first(x, to, count)
