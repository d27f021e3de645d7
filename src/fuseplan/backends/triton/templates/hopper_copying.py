"""Writes what one warp of the kernel for Hopper runs: copies of src and of the weight into the ring."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.templates.hopper_schedule import Schedule
from fuseplan.backends.triton.templates.hopper_tiles import HALF, ceil_div
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot


def write(text: Text, schedule: Schedule, grid: int) -> None:
    """The function `produce`."""
    _Copying(text, schedule, grid).write()


def names(schedule: Schedule) -> list[str]:
    """Its arguments."""
    weight = argument(Slot("operand", schedule.kernel.weight.key))
    return ["src", weight, "a", "b", "empty", "full", *(["held"] if schedule.knobs.resident else [])]


class _Copying:
    def __init__(self, text: Text, schedule: Schedule, grid: int) -> None:
        self.text, self.schedule, self.grid = text, schedule, grid
        self.knobs, self.geometry = schedule.knobs, schedule.geometry
        self.contraction = schedule.kernel.contraction
        self.weight = argument(Slot("operand", schedule.kernel.weight.key))

    def write(self) -> None:
        text, schedule = self.text, self.schedule
        text.line("@gluon.jit")
        with text.block(f"def produce({', '.join(names(schedule))})"):
            if self.knobs.resident:
                self._hold_weight()
            text.line("stage = 0", "phase = 1")
            with text.block(f"for tile in range(gl.program_id(0), {schedule.tiles}, {self.grid})"):
                schedule.place_tile(text, needs_feature=not self.knobs.resident)
                with ExitStack() as loops:
                    where, tap = self._loops(loops)
                    self._copy(where, tap)
        text.line("", "")

    def _hold_weight(self) -> None:
        """Copies the weight of the program's features, once for all of its tiles."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        parts = ceil_div(self.geometry.channels, knobs.depth)
        across = schedule.across
        text.line(
            f"feature = gl.program_id(0) % {across} * {knobs.columns}" if across > 1 else "feature = 0",
            f"mbarrier.expect(held, {schedule.blocks * schedule.weight_bytes})",
        )
        for tap in range(self.contraction.taps):
            for part in range(parts):
                where = f"[feature, {tap}, {part * knobs.depth}]"
                block = f"b.index({tap * parts + part})"
                text.line(f"tma.async_copy_global_to_shared({self.weight}, {where}, held, {block})")

    def _loops(self, loops: ExitStack) -> tuple[list[str], str]:
        """Opens the loops over taps and channels; coordinates in src, and the tap's number."""
        where, tap = [self.geometry.axes[0]], "0"
        if self.geometry.is_flat:
            return self._channel_loop(loops, where), tap
        for axis, letter in enumerate(self.geometry.axes[1:]):
            size, low = self.contraction.kernel[axis], self.contraction.padding[axis][0]
            step, dilation = self.contraction.stride[axis], self.contraction.dilation[axis]
            first = letter if step == 1 else f"{letter} * {step}"
            first = f"{first} - {low}" if low else first
            if size > 1:
                loops.enter_context(self.text.block(f"for tap_{letter} in range({size})"))
                first += f" + tap_{letter}" + (f" * {dilation}" if dilation > 1 else "")
                tap = f"tap_{letter}" if tap == "0" else f"({tap}) * {size} + tap_{letter}"
            where.append(first)
        return self._channel_loop(loops, where), tap

    def _channel_loop(self, loops: ExitStack, where: list[str]) -> list[str]:
        depth, channels = self.knobs.depth, self.geometry.channels
        most = ceil_div(channels, depth) * depth
        loops.enter_context(self.text.block(f"for channel in range(0, {most}, {depth})"))
        if self.contraction.groups == 1:
            return [*where, "channel"]
        return [*where, f"feature // {self.contraction.features_per_group} * {channels} + channel"]

    def _copy(self, where: list[str], tap: str) -> None:
        text, knobs = self.text, self.knobs
        weight_bytes = 0 if knobs.resident else self.schedule.weight_bytes
        text.line(
            "mbarrier.wait(empty.index(stage), phase)",
            "ready = full.index(stage)",
            f"mbarrier.expect(ready, {prod(knobs.box) * knobs.depth * HALF + weight_bytes})",
            f"tma.async_copy_global_to_shared(src, [{', '.join(where)}], ready, a.index(stage))",
        )
        if not knobs.resident:
            image = f"n * {self.geometry.features} + " if self.contraction.weight_per_batch else ""
            at = f"[{image}feature, {tap}, channel]"
            text.line(f"tma.async_copy_global_to_shared({self.weight}, {at}, ready, b.index(stage))")
        self.schedule.advance(text)
