"""Writes the kernel for Hopper: one warp copies, one to three groups of warps multiply and finish tiles."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import Index, as_index, number
from fuseplan.backends.triton.shell import Writer
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.hopper_copying import Copying, Gathering, swizzled, write_padding
from fuseplan.backends.triton.templates.hopper_finishing import Finishing, brought
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
from fuseplan.backends.triton.templates.hopper_summary import Summarizing
from fuseplan.backends.triton.templates.hopper_tiles import even
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
        finishes = Summarizing if self.geometry.is_summed else Finishing
        self.finishing = finishes(self.text, schedule, self.spread)
        kind = Gathering if self.geometry.gathers else Copying
        self.copying = kind(self.text, schedule, self.grid, self.spread)
        self.element = named(self.kernel.src.dtype, "gl")
        self.tensors = schedule.tensors(self.finishing.slots)
        # two programs share a processor only if the compiler is told to keep to half of its registers
        threads = 128 * (knobs.groups + 1) * knobs.programs
        limit = (("maxnreg", 65536 // threads // 8 * 8),) if knobs.programs > 1 else ()
        self.options = (("num_warps", 4), *limit)
        self.padding = ["given"] if self.geometry.padded else []
        if self.padding or self.geometry.is_summed:
            self.options += (("cooperative", 1),)
            room = schedule.padded_bytes + schedule.state_bytes
            self.workspace_bytes_per_extent = room // self.kernel.images * self.is_open
            self.workspace_bytes = COUNTER_BYTES + room * (not self.is_open)

    # ---- the groups that multiply

    def _taken(self, which: str = "") -> str:
        """What a group is given, by its names there; behind those of its own stands `which` group it is."""
        schedule = self.schedule
        tiles = [f"dst_tiles{which}"] * self.schedule.is_staged
        names = ["src_ring", "weight_ring", *tiles, "empty", "full"]
        names += ["held"] if self.knobs.resident else []
        names += ["order"] if schedule.takes_turns else []
        names += [f"{name}{which}" for operand in schedule.copied for name in brought(operand)]
        return ", ".join([*names, *self._tail])

    def _consume(self) -> None:
        text, knobs, schedule = self.text, self.knobs, self.schedule
        with text.function(f"consume({self._taken()}, group: gl.constexpr)"):
            text.line(*(f"{name}: gl.constexpr = {each}" for name, each in self.finishing.layouts().items()))
            text.line(*["slot = 0"] * self.schedule.is_staged)
            schedule.begin(text)
            if knobs.reaching or len(schedule.sums) > 1:
                turned = self.geometry.is_turned and not knobs.swapped
                beside = even(knobs.columns) if turned else knobs.depth
                text.line(f"lines: gl.constexpr = {swizzled(schedule, 2, beside)}")
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
            self.finishing.end()
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
        """The sums of a tile; a stage is given back when the products after it have begun."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        totals = ", ".join(name for name, _, _ in schedule.sums)
        count, deps = schedule.lines * len(schedule.sums), totals + "," * (len(schedule.sums) == 1)
        for name, whole, width in schedule.sums:
            shape = schedule.sum_shape[0], width
            text.line(f"{name} = gl.zeros({shape}, gl.float32, layout={whole})")
        if schedule.takes_turns:
            text.line("mbarrier.wait(order.index(group), mine)", "mine ^= 1")
        first, ends = ("begin", "begin, end") if knobs.spread else ("0", f"{schedule.blocks}")
        with text.block(f"for block in range({ends})"):
            text.line("mbarrier.wait(full.index(stage), phase)")
            for line in range(schedule.lines):
                rows, *columns = self._factors(line)
                for (name, _, _), factor in zip(schedule.sums, columns, strict=True):
                    text.line(f"{name} = warpgroup_mma({rows}, {factor}, {name}, is_async=True)")
            text.line(
                f"{totals} = warpgroup_mma_wait({count}, deps=({deps}))",
                f"before = gl.where(stage == 0, {knobs.stages - 1}, stage - 1)",
                f"mbarrier.arrive(empty.index(before), pred=block > {first})",
            )
            advance(text, knobs.stages)
        if schedule.takes_turns:
            text.line(f"mbarrier.arrive(order.index((group + 1) % {knobs.groups}))")
        text.line(
            f"{totals} = warpgroup_mma_wait(0, deps=({deps}))",
            f"before = gl.where(stage == 0, {knobs.stages - 1}, stage - 1)",
            "mbarrier.arrive(empty.index(before))",
        )
        if schedule.takes_turns:
            text.line(
                f"stage += {schedule.blocks * (knobs.groups - 1)}",
                f"phase = phase ^ (stage // {knobs.stages} % 2)",
                f"stage = stage % {knobs.stages}",
            )

    def _factors(self, line: int) -> Iterator[str]:
        """Writes the rows that the products of a line take, and the columns of each; their names."""
        schedule = self.schedule
        rows, columns = ("weight_tile", "src_tile") if self.knobs.swapped else ("src_tile", "weight_tile")
        share, begin = schedule.sum_shape[0], as_index(0)
        mine = number("group", self.knobs.groups) * share if schedule.shares_tile else begin
        yield self._factor(rows, line, mine, share, 0)
        for total, _, width in schedule.sums:
            yield self._factor(total.replace("total", columns), line, begin, width, 1)
            begin += width

    def _factor(self, name: str, line: int, begin: Index, count: int, axis: int) -> str:
        """Writes `count` lines of a block of src or of the weight, whose pieces lie one behind the other."""
        knobs, size, block, turned = self.knobs, prod(self.knobs.box), Index("stage"), False
        if name.startswith("weight"):
            block = Index("block" if knobs.resident else "stage") * self.schedule.lines + line
            size, turned = knobs.columns, self.geometry.is_turned
        piece = even(size)
        if size > piece:
            block, size = block * (size // piece) + begin // piece, count
        shape = [knobs.depth, size] if turned else [size, knobs.depth]
        tile = f"{'weight_ring' if name.startswith('weight') else 'src_ring'}.index({block})"
        if size > piece:
            tile += f".reinterpret({self.element}, {shape}, lines)"
        elif not turned:
            tile += f".reshape({shape})"
        if knobs.reaching and name.startswith("src"):
            tile, size = self._src_lines(line), count
        tile += ".permute((1, 0))" if turned == (axis == 0) else ""
        tile += f".slice({begin}, {count}, {axis})" if size > count else ""
        self.text.line(f"{name} = {tile}")
        return name

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
        return ["src", *more, *self.padding, argument(self._weight), *self._ends, *self.schedule.given]

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
            ring(text, "src_ring", "src", knobs.stages * schedule.pieces)
        held = schedule.blocks if knobs.resident else knobs.stages
        ring(text, "weight_ring", weight, held * schedule.lines * schedule.weight_pieces)
        counted(text, "empty", knobs.stages, knobs.groups if knobs.together else 1)
        counted(text, "full", knobs.stages, schedule.arrivals)
        if knobs.resident:
            text.line(f"held = {barriers(0)}", "mbarrier.init(held, count=1)")
        if schedule.takes_turns:
            counted(text, "order", knobs.groups, 1)
        for group in range(knobs.groups):
            if self.schedule.is_staged:
                ring(text, f"dst_tiles_{group}", "dst", PART_TILES)
            for operand in schedule.copied:
                tile, full = (f"{name}_{group}" for name in brought(operand))
                ring(text, tile, "dst", len(schedule.parts))
                text.line(f"{full} = {barriers(0)}", f"mbarrier.init({full}, count=1)")
        text.line("fence_async_shared()")
