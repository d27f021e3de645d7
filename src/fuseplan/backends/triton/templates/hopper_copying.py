"""Writes what one warp of the kernel for Hopper runs: copies of src and of the weight into the ring."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import Index, as_index, ceil_div, number
from fuseplan.backends.triton.templates.hopper_schedule import Schedule
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot


def write(text: Text, schedule: Schedule, grid: int) -> None:
    """The function `produce`."""
    _Copying(text, schedule, grid).write()


def names(schedule: Schedule) -> list[str]:
    """Its arguments."""
    weight = argument(Slot("operand", schedule.kernel.weight.key))
    more = ["src_more"] if schedule.knobs.reaching else []
    held = ["held"] if schedule.knobs.resident else []
    return ["src", *more, weight, "src_ring", "weight_ring", "empty", "full", *held]


class _Copying:
    def __init__(self, text: Text, schedule: Schedule, grid: int) -> None:
        self.text, self.schedule, self.grid = text, schedule, grid
        self.knobs, self.geometry = schedule.knobs, schedule.geometry
        self.contraction = schedule.kernel.contraction
        self.weight = argument(Slot("operand", schedule.kernel.weight.key))

    def write(self) -> None:
        text, schedule = self.text, self.schedule
        with text.function(f"produce({', '.join(names(schedule))})"):
            if self.knobs.resident:
                self._hold_weight()
            text.line("stage = 0", "phase = 1")
            with text.block(f"for tile in range(gl.program_id(0), {schedule.tiles}, {self.grid})"):
                schedule.place_tile(text, needs_feature=not self.knobs.resident)
                with ExitStack() as loops:
                    where, tap = self._loops(loops)
                    self._copy(where, tap)

    def _hold_weight(self) -> None:
        """Copies the weight of the program's features, once for all of its tiles."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        across, lines = schedule.across, schedule.lines
        program = number("gl.program_id(0)", self.grid)
        text.line(
            f"feature = {program % across * knobs.columns}",
            f"mbarrier.expect(held, {schedule.blocks * lines * schedule.weight_bytes})",
        )
        taps = self.contraction.taps // lines
        parts = range(0, ceil_div(self.geometry.channels, knobs.depth) * knobs.depth, knobs.depth)
        for place, (tap, channel, line) in enumerate(product(range(taps), parts, range(lines))):
            where = f"[feature, {line * taps + tap}, {channel}]"
            text.line(f"tma.async_load({self.weight}, {where}, held, weight_ring.index({place}))")

    def _loops(self, loops: ExitStack) -> tuple[list[Index], Index]:
        """Opens the loops over taps and channels; coordinates in src, and the tap's number."""
        where, tap = [], as_index(0)
        for place, axis in enumerate(self.geometry.axes):
            first = Index(axis.letter) * axis.step - axis.low
            if axis.taps > 1 and not (self.knobs.reaching and place == 0):
                own = Index(f"tap_{axis.letter}")
                loops.enter_context(self.text.block(f"for {own} in range({axis.taps})"))
                first, tap = first + own * axis.dilation, tap * axis.taps + own
            where.append(first)
        return [*where, self._channel_loop(loops)], tap

    def _channel_loop(self, loops: ExitStack) -> Index:
        depth, channels = self.knobs.depth, self.geometry.channels
        most = ceil_div(channels, depth) * depth
        loops.enter_context(self.text.block(f"for channel in range(0, {most}, {depth})"))
        if self.contraction.groups == 1:
            return Index("channel")
        feature = Index("feature", 0, self.contraction.features - 1)
        return feature // self.contraction.features_per_group * channels + Index("channel")

    def _copy(self, where: list[Index], tap: Index) -> None:
        text, knobs, schedule = self.text, self.knobs, self.schedule
        lines = schedule.lines
        weight_bytes = 0 if knobs.resident else lines * schedule.weight_bytes
        text.line(
            "mbarrier.wait(empty.index(stage), phase)",
            "ready = full.index(stage)",
            f"mbarrier.expect(ready, {schedule.src_bytes + weight_bytes})",
        )
        self._copy_src(where)
        feature = Index("feature")
        if self.contraction.weight_per_batch:
            feature = Index("n") * self.geometry.features + feature
        for line in range(0 if knobs.resident else lines):
            at = tap + line * (self.contraction.taps // lines)
            block = Index("stage") * lines + line
            into = f"ready, weight_ring.index({block})"
            text.line(f"tma.async_load({self.weight}, [{feature}, {at}, channel], {into})")
        schedule.advance(text)

    def _copy_src(self, where: list[Index]) -> None:
        """The rows of the first tap and, where they reach further, the lines behind them."""
        text, schedule = self.text, self.schedule
        if not self.knobs.reaching:
            at = ", ".join(map(str, where))
            text.line(f"tma.async_load(src, [{at}], ready, src_ring.index(stage))")
            return
        line, *rest = where
        size = self.knobs.box[0]
        begins = [
            ("src", 0),
            *(("src_more", size + more) for more in range(0, schedule.reach, schedule.more)),
        ]
        for name, begin in begins:
            into = f"src_ring.index({Index('stage') * schedule.span + begin})"
            view = f"{into}._reinterpret(src.dtype, {name}.block_type.shape, {name}.layout)"
            at = ", ".join(map(str, [line + begin, *rest]))
            text.line(f"tma.async_load({name}, [{at}], ready, {view})")
