"""Writes the kernel for Hopper: one warp copies, one to three groups of warps multiply and finish tiles."""

from __future__ import annotations

from math import prod

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import Index, number
from fuseplan.backends.triton.shell import Writer
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.hopper_copying import Copying, Gathering, swizzled, write_padding
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
from fuseplan.backends.triton.templates.hopper_spread import Spread
from fuseplan.kernels.emit import COUNTER_BYTES, Slot


class HopperWriter(Writer):
    """Writes one kernel."""

    language, imports = "gluon", IMPORTS

    def __init__(self, schedule: Schedule, processors: int, title: str) -> None:
        super().__init__(schedule.kernel, title)
        self.schedule, self.geometry = schedule, schedule.geometry
        knobs = self.knobs = schedule.knobs
        self.grid, self.programs = schedule.grid(processors), schedule.programs(processors)
        self.spread = Spread(schedule, self.grid)
        self.workspace_bytes = self.spread.workspace_bytes
        self.finishing = Finishing(self.text, schedule, self.spread)
        kind = Gathering if self.geometry.gathers else Copying
        self.copying = kind(self.text, schedule, self.grid, self.spread)
        self.element = named(self.kernel.src.dtype, "gl")
        self.tensors = schedule.tensors(self.finishing.slots)
        # two programs share a processor only if the compiler is told to keep to half of its registers
        threads = 128 * (knobs.groups + 1) * knobs.programs
        limit = (("maxnreg", 65536 // threads // 8 * 8),) if knobs.programs > 1 else ()
        self.options = (("num_warps", 4), *limit)
        self.padding = ["given", "workspace"] if self.geometry.is_padded else []
        if self.padding:
            self.options += (("cooperative", 1),)
            self.workspace_bytes_per_extent = schedule.padded_bytes // self.kernel.images * self.is_open
            self.workspace_bytes = COUNTER_BYTES + schedule.padded_bytes * (not self.is_open)

    # ---- the groups that multiply

    def _taken(self, which: str = "") -> str:
        """What a group is given, by its names there; behind those of its own stands `which` group it is."""
        schedule = self.schedule
        tiles = [] if self.geometry.scatters else [f"dst_tiles{which}"]
        names = ["src_ring", "weight_ring", *tiles, "empty", "full"]
        names += ["held"] if self.knobs.resident else []
        names += ["order"] if schedule.takes_turns else []
        names += [f"{name}{which}" for operand in schedule.copied for name in brought(operand)]
        return ", ".join([*names, *self._tail])

    def _consume(self) -> None:
        text, knobs, schedule = self.text, self.knobs, self.schedule
        with text.function(f"consume({self._taken()}, group: gl.constexpr)"):
            text.line(
                f"whole: gl.constexpr = {accumulator(schedule.sum_shape[1], schedule.itemsize)}",
                *(f"{name}: gl.constexpr = {each}" for name, each in self.finishing.layouts().items()),
            )
            if not self.geometry.scatters:
                text.line("slot = 0")
            schedule.begin(text)
            if knobs.reaching:
                text.line(f"lines: gl.constexpr = {swizzled(schedule, 2)}")
            if self.padding:
                write_padding(text, schedule)
            start, stride = self._turns()
            if knobs.resident:
                text.line("mbarrier.wait(held, 0)")
            self.finishing.begin()
            with self.spread.turns(text, start, stride):
                schedule.place_tile(text)
                self.finishing.prepare()
                self._multiply()
                self.finishing.finish()
            if not self.geometry.scatters:
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
        first, ends = ("begin", "begin, end") if knobs.spread else ("0", f"{schedule.blocks}")
        with text.block(f"for block in range({ends})"):
            text.line("mbarrier.wait(full.index(stage), phase)")
            for line in range(schedule.lines):
                factors = self._factors(line)
                text.line(*(f"{name} = {tile}" for name, tile in factors.items()))
                text.line(f"total = warpgroup_mma({', '.join(factors)}, total, is_async=True)")
            text.line(
                f"total = warpgroup_mma_wait({schedule.lines}, deps=(total,))",
                f"before = gl.where(stage == 0, {knobs.stages - 1}, stage - 1)",
                f"mbarrier.arrive(empty.index(before), pred=block > {first})",
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
        return f"src_ring.index({first}).reinterpret({self.element}, {shape}, lines)"

    # ---- the kernel

    @property
    def _weight(self) -> Slot:
        return Slot("operand", self.kernel.weight.key)

    @property
    def arguments(self) -> list[str]:
        more = ["src_more"] if self.knobs.reaching and not self.geometry.gathers else []
        given, room = self.padding[:1], self.padding[1:]
        return ["src", *more, *given, argument(self._weight), *self._ends, *room, *self.schedule.given]

    @property
    def _tail(self) -> list[str]:
        """What groups are given behind src and the weight."""
        return [*self._ends, *self.padding, *self.schedule.given]

    @property
    def _ends(self) -> list[str]:
        """The epilogue's arguments, and dst."""
        return [argument(slot) for slot in (*self.finishing.slots, Slot("dst"))]

    def write_body(self) -> None:
        self.copying.write()
        self._consume()
        self._allocate()
        given = [f"{self._taken(f'_{group}')}, {group}" for group in range(self.knobs.groups)]
        copying = self.copying
        specialized(self.text, given, ", ".join(copying.names), copying.warps, self.schedule.registers)

    def _allocate(self) -> None:
        """The ring of tiles, the groups' tiles of dst, and the barriers between the warps."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        weight = argument(self._weight)
        if knobs.reaching or self.geometry.gathers:
            shape = [knobs.stages * schedule.span, *knobs.box[1:], knobs.depth]
            if not knobs.reaching:
                shape = [knobs.stages, prod(knobs.box), knobs.depth]
            text.line(f"src_ring = {allocated(self.element, str(shape), swizzled(schedule, len(shape) - 1))}")
        else:
            ring(text, "src_ring", "src", knobs.stages)
        held = schedule.blocks if knobs.resident else knobs.stages
        ring(text, "weight_ring", weight, held * schedule.lines)
        counted(text, "empty", knobs.stages, knobs.groups if knobs.together else 1)
        counted(text, "full", knobs.stages, schedule.arrivals)
        if knobs.resident:
            text.line(f"held = {barriers(0)}", "mbarrier.init(held, count=1)")
        if schedule.takes_turns:
            counted(text, "order", knobs.groups, 1)
        for group in range(knobs.groups):
            if not self.geometry.scatters:
                ring(text, f"dst_tiles_{group}", "dst", PART_TILES)
            for operand in schedule.copied:
                tile, full = (f"{name}_{group}" for name in brought(operand))
                ring(text, tile, "dst", len(schedule.parts))
                text.line(f"{full} = {barriers(0)}", f"mbarrier.init({full}, count=1)")
        text.line("fence_async_shared()")


def _turned(tile: str, is_turned: bool) -> str:
    """A tile of shared memory, or its transpose."""
    return f"{tile}.permute((1, 0))" if is_turned else tile
