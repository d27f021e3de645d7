"""Writes the kernel for Hopper: one warp copies, one to three groups of warps multiply and finish tiles."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from math import prod

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import Index, as_index, ceil_div, number
from fuseplan.backends.triton.shell import Writer
from fuseplan.backends.triton.templates.hopper_finishing import Finishing, accumulator, brought
from fuseplan.backends.triton.templates.hopper_schedule import (
    IMPORTS,
    PART_TILES,
    Schedule,
    advance,
    allocated,
    barriers,
    counted,
    ring,
    specialized,
)
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot


class HopperWriter(Writer):
    """Writes one kernel."""

    language, imports = "gluon", IMPORTS

    def __init__(self, schedule: Schedule, processors: int, title: str) -> None:
        super().__init__(schedule.kernel, title)
        self.schedule, self.geometry = schedule, schedule.geometry
        knobs = self.knobs = schedule.knobs
        self.grid, self.programs = schedule.grid(processors), schedule.programs(processors)
        self.finishing = Finishing(self.text, schedule)
        self.copying = _Copying(self.text, schedule, self.grid)
        self.tensors = schedule.tensors(self.finishing.slots)
        # two programs share a processor only if the compiler is told to keep to half of its registers
        threads = 128 * (knobs.groups + 1) * knobs.programs
        limit = (("maxnreg", 65536 // threads // 8 * 8),) if knobs.programs > 1 else ()
        self.options = (("num_warps", 4), *limit)

    # ---- the groups that multiply

    def _taken(self, which: str = "") -> str:
        """What a group is given, by its names there; behind those of its own stands `which` group it is."""
        schedule = self.schedule
        names = ["src_ring", "weight_ring", f"dst_tiles{which}", "empty", "full"]
        names += ["held"] if self.knobs.resident else []
        names += ["order"] if schedule.takes_turns else []
        names += [f"{name}{which}" for operand in schedule.copied for name in brought(operand)]
        return ", ".join([*names, *self._tail])

    def _consume(self) -> None:
        text, knobs, schedule = self.text, self.knobs, self.schedule
        with text.function(f"consume({self._taken()}, group: gl.constexpr)"):
            text.line(
                f"whole: gl.constexpr = {accumulator(schedule.sum_shape[1])}",
                f"layout: gl.constexpr = {accumulator(schedule.part_width)}",
                "slot = 0",
            )
            schedule.begin(text)
            if knobs.reaching:
                text.line(f"lines: gl.constexpr = {self._swizzled(2)}")
            start, stride = self._turns()
            if knobs.resident:
                text.line("mbarrier.wait(held, 0)")
            self.finishing.begin()
            with text.block(f"for tile in range({start}, {schedule.launched * schedule.across}, {stride})"):
                schedule.place_tile(text)
                self.finishing.prepare()
                self._multiply()
                self.finishing.finish()
            text.line("tma.store_wait(pendings=0)")

    def _turns(self) -> tuple[str, int]:
        """The group's first tile and its distance to the next, with stage and phase set for the first."""
        text, knobs, blocks = self.text, self.knobs, self.schedule.blocks
        start, stride = "gl.program_id(0)", self.grid
        if self.schedule.takes_turns:
            # Groups take tiles in turn: while one finishes its tile, the next multiplies. A group that waited
            # for a stage before the one in front of it has would take the barrier's last phase for its own.
            done = number("group", knobs.groups) * blocks
            text.line(
                "mine = 1 if group == 0 else 0",
                f"stage = {done % knobs.stages}",
                f"phase = {done // knobs.stages % 2}",
            )
            group = number("group", knobs.groups)
            start, stride = f"{Index('gl.program_id(0)') + group * self.grid}", self.grid * knobs.groups
        else:
            text.line("stage = 0", "phase = 0")
        return start, stride

    def _multiply(self) -> None:
        """The sum of a tile; a stage is given back when the product after it has begun."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        text.line(f"total = gl.zeros({schedule.sum_shape}, gl.float32, layout=whole)")
        if schedule.takes_turns:
            text.line("mbarrier.wait(order.index(group), mine)", "mine ^= 1")
        with text.block(f"for block in range({schedule.blocks})"):
            text.line("mbarrier.wait(full.index(stage), phase)")
            for line in range(schedule.lines):
                factors = self._factors(line)
                text.line(*(f"{name} = {tile}" for name, tile in factors.items()))
                text.line(f"total = warpgroup_mma({', '.join(factors)}, total, is_async=True)")
            text.line(
                f"total = warpgroup_mma_wait({schedule.lines}, deps=(total,))",
                f"before = gl.where(stage == 0, {knobs.stages - 1}, stage - 1)",
                "mbarrier.arrive(empty.index(before), pred=block > 0)",
            )
            advance(text, knobs.stages)
        if schedule.takes_turns:
            text.line(f"mbarrier.arrive(order.index((group + 1) % {knobs.groups}))")
        text.line(
            "total = warpgroup_mma_wait(0, deps=(total,))",
            f"before = gl.where(stage == 0, {knobs.stages - 1}, stage - 1)",
            "mbarrier.arrive(empty.index(before))",
        )
        if schedule.takes_turns:
            text.line(
                f"stage += {schedule.blocks * (knobs.groups - 1)}",
                f"phase = phase ^ (stage // {knobs.stages} % 2)",
                f"stage = stage % {knobs.stages}",
            )

    def _factors(self, line: int) -> dict[str, str]:
        """The blocks of src and of the weight that one product takes, by name, rows first."""
        knobs, schedule = self.knobs, self.schedule
        block = Index("block" if knobs.resident else "stage") * schedule.lines + line
        src_shape = f"[{prod(knobs.box)}, {knobs.depth}]"
        src = self._src_lines(line) if knobs.reaching else f"src_ring.index(stage).reshape({src_shape})"
        weight = f"weight_ring.index({block})"
        is_turned = self.geometry.is_turned
        if not is_turned:
            weight += f".reshape([{knobs.columns}, {knobs.depth}])"
        both = [("src_tile", src, False), ("weight_tile", weight, is_turned)]
        rows, columns = both[::-1] if knobs.swapped else both
        pair = {rows[0]: _turned(rows[1], rows[2]), columns[0]: _turned(columns[1], not columns[2])}
        if schedule.shares_tile and not (knobs.reaching and rows[0] == "src_tile"):
            share = schedule.sum_shape[0]
            pair[rows[0]] += f".slice(group * {share}, {share}, 0)"
        return pair

    def _src_lines(self, line: int) -> str:
        """The lines of src that a tap along the first axis reads: they begin where its own does."""
        schedule, geometry = self.schedule, self.geometry
        first = Index("stage") * schedule.span + line * geometry.axes[0].dilation
        if schedule.shares_tile and not self.knobs.swapped:
            first = first + number("group", self.knobs.groups) * schedule.own[0]
        shape = f"[{prod(schedule.own)}, {self.knobs.depth}]"
        return f"src_ring.index({first})._reinterpret(dst.dtype, {shape}, lines)"

    # ---- the kernel

    @property
    def _weight(self) -> Slot:
        return Slot("operand", self.kernel.weight.key)

    @property
    def arguments(self) -> list[str]:
        more = ["src_more"] if self.knobs.reaching else []
        return ["src", *more, argument(self._weight), *self._tail]

    @property
    def _tail(self) -> list[str]:
        """The arguments behind src and the weight."""
        return [*(argument(slot) for slot in (*self.finishing.slots, Slot("dst"))), *self.schedule.given]

    def write_body(self) -> None:
        self.copying.write()
        self._consume()
        self._allocate()
        given = [f"{self._taken(f'_{group}')}, {group}" for group in range(self.knobs.groups)]
        specialized(self.text, given, ", ".join(self.copying.names))

    def _allocate(self) -> None:
        """The ring of tiles, the groups' tiles of dst, and the barriers between the warps."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        weight = argument(self._weight)
        if knobs.reaching:
            shape = [knobs.stages * schedule.span, *knobs.box[1:], knobs.depth]
            text.line(f"src_ring = {allocated('src.dtype', str(shape), self._swizzled(len(shape) - 1))}")
        else:
            ring(text, "src_ring", "src", knobs.stages)
        held = schedule.blocks if knobs.resident else knobs.stages
        ring(text, "weight_ring", weight, held * schedule.lines)
        counted(text, "empty", knobs.stages, knobs.groups if knobs.together else 1)
        counted(text, "full", knobs.stages, 1)
        if knobs.resident:
            text.line(f"held = {barriers(0)}", "mbarrier.init(held, count=1)")
        if schedule.takes_turns:
            counted(text, "order", knobs.groups, 1)
        for group in range(knobs.groups):
            ring(text, f"dst_tiles_{group}", "dst", PART_TILES)
            for operand in schedule.copied:
                tile, full = (f"{name}_{group}" for name in brought(operand))
                ring(text, tile, "dst", len(schedule.parts))
                text.line(f"{full} = {barriers(0)}", f"mbarrier.init({full}, count=1)")
        text.line("fence_async_shared()")

    def _swizzled(self, rank: int) -> str:
        """The layout of lines of src in shared memory: that of the copies' boxes."""
        return f"gl.NVMMASharedLayout({min(128, self.knobs.depth * HALF)}, {8 * HALF}, {rank})"


def _turned(tile: str, is_turned: bool) -> str:
    """A tile of shared memory, or its transpose."""
    return f"{tile}.permute((1, 0))" if is_turned else tile


class _Copying:
    """Writes what one warp runs: copies of src and of the weight into the ring."""

    def __init__(self, text: Text, schedule: Schedule, grid: int) -> None:
        self.text, self.schedule, self.grid = text, schedule, grid
        self.knobs, self.geometry = schedule.knobs, schedule.geometry
        self.contraction = schedule.kernel.contraction
        self.weight = argument(Slot("operand", schedule.kernel.weight.key))
        more = ["src_more"] if self.knobs.reaching else []
        held = ["held"] if self.knobs.resident else []
        rings = ("src_ring", "weight_ring", "empty", "full")
        self.names = ["src", *more, self.weight, *rings, *held, *schedule.given]

    def write(self) -> None:
        """The function `produce`."""
        text, schedule = self.text, self.schedule
        with text.function(f"produce({', '.join(self.names)})"):
            schedule.begin(text)
            if self.knobs.resident:
                self._hold_weight()
            text.line("stage = 0", "phase = 1")
            tiles = schedule.launched * schedule.across
            with text.block(f"for tile in range(gl.program_id(0), {tiles}, {self.grid})"):
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
            where = self._weight_at(Index("feature"), line * taps + tap, channel)
            text.line(f"tma.async_load({self.weight}, {where}, held, weight_ring.index({place}))")

    def _weight_at(self, feature: Index, tap: Index | int, channel: object) -> str:
        """The coordinates of a block of the weight."""
        return f"[{channel}, {feature}]" if self.geometry.is_turned else f"[{feature}, {tap}, {channel}]"

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
            where = self._weight_at(feature, at, "channel")
            text.line(f"tma.async_load({self.weight}, {where}, {into})")
        advance(text, knobs.stages)

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
