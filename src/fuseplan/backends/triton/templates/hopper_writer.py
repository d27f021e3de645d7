"""Writes the kernel for Hopper: one warp copies, one to three groups of warps multiply and finish tiles."""

from __future__ import annotations

from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.templates import hopper_copying
from fuseplan.backends.triton.templates.hopper_schedule import (
    PART_TILES,
    Schedule,
    allocated,
    barriers,
)
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import KernelOperand

IMPORTS = (
    "from triton.experimental import gluon",
    "from triton.experimental.gluon import language as gl",
    "from triton.experimental.gluon.language.nvidia.hopper import (",
    "    fence_async_shared,",
    "    mbarrier,",
    "    tma,",
    "    warpgroup_mma,",
    "    warpgroup_mma_wait,",
    ")",
)
STORED = {"f16": "gl.float16", "bf16": "gl.bfloat16"}
# Registers a thread: of the second and third group, and of the warp that copies; the first group gets the
# rest of the 512 that one thread of each has together (256 where two programs share a processor). With one
# group and 24, Triton 3.6 asks for more registers where it should give some back, and the launch fails.
REGISTERS = {1: (0, 32), 2: (240, 24), 3: (160, 24)}


class HopperWriter:
    """Writes one kernel."""

    def __init__(self, schedule: Schedule, processors: int, title: str) -> None:
        self.schedule, self.title = schedule, title
        self.knobs, self.kernel, self.geometry = schedule.knobs, schedule.kernel, schedule.geometry
        self.grid = schedule.grid(processors)
        self.text = Text()
        self.epilogue = Elementwise(self.kernel, "epilogue", self.text, namespace="gl")

    def source(self) -> Source:
        """The whole kernel."""
        text, knobs = self.text, self.knobs
        text.line(*(f"# {line}" for line in [self.title, *self.kernel.text.splitlines()]), "")
        text.line(*IMPORTS, "", "")
        hopper_copying.write(text, self.schedule, self.grid)
        self._consume()
        self._entry()
        # two programs share a processor only if the compiler is told to keep to half of its registers
        threads = 128 * (knobs.groups + 1) * knobs.programs
        limit = (("maxnreg", 65536 // threads // 8 * 8),) if knobs.programs > 1 else ()
        return Source(
            str(text),
            "fused",
            self.schedule.slots(self.epilogue.slots),
            language="gluon",
            grid=(self.grid, 1, 1),
            options=(("num_warps", 4), *limit),
        )

    # ---- the groups that multiply

    def _consume(self) -> None:
        text, knobs, schedule = self.text, self.knobs, self.schedule
        names = ["a", "b", "c", "empty", "full"]
        names += ["held"] if knobs.resident else []
        names += ["order"] if schedule.takes_turns else []
        names += [name for operand in schedule.copied for name in _brought(operand)]
        names += [argument(slot) for slot in (*self.epilogue.slots, Slot("dst"))]
        text.line("@gluon.jit")
        with text.block(f"def consume({', '.join(names)}, group: gl.constexpr)"):
            text.line(
                f"whole: gl.constexpr = {_accumulator(knobs.columns)}",
                f"layout: gl.constexpr = {_accumulator(schedule.part)}",
                "slot = 0",
            )
            start, stride = self._turns()
            if knobs.resident:
                text.line("mbarrier.wait(held, 0)")
            with text.block(f"for tile in range({start}, {schedule.tiles}, {stride})"):
                schedule.place_tile(text)
                for operand in schedule.copied:
                    self._bring(operand)
                self._multiply()
                self._finish()
            text.line("tma.store_wait(pendings=0)")
        text.line("", "")

    def _turns(self) -> tuple[str, int]:
        """The group's first tile and its distance to the next, with stage and phase set for the first."""
        text, knobs, blocks = self.text, self.knobs, self.schedule.blocks
        start, stride = "gl.program_id(0)", self.grid
        if self.schedule.takes_turns:
            # Groups take tiles in turn: while one finishes its tile, the next multiplies. A group that waited
            # for a stage before the one in front of it has would take the barrier's last phase for its own.
            text.line(
                "mine = 1 if group == 0 else 0",
                f"stage = group * {blocks} % {knobs.stages}",
                f"phase = group * {blocks} // {knobs.stages} % 2",
            )
            start, stride = f"gl.program_id(0) + group * {self.grid}", self.grid * knobs.groups
        else:
            text.line("stage = 0", "phase = 0")
        if self.schedule.copied:
            text.line("turn = 0")
        return start, stride

    def _multiply(self) -> None:
        """The sum of a tile; a stage is given back when the product after it has begun."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        first, second = self._factors()
        text.line(f"total = gl.zeros(({schedule.rows}, {knobs.columns}), gl.float32, layout=whole)")
        if schedule.takes_turns:
            text.line("mbarrier.wait(order.index(group), mine)", "mine ^= 1")
        with text.block(f"for block in range({schedule.blocks})"):
            text.line(
                "mbarrier.wait(full.index(stage), phase)",
                f"first = {first}",
                f"second = {second}",
                "total = warpgroup_mma(first, second, total, is_async=True)",
                "total = warpgroup_mma_wait(1, deps=(total,))",
                f"before = gl.where(stage == 0, {knobs.stages - 1}, stage - 1)",
                "mbarrier.arrive(empty.index(before), pred=block > 0)",
            )
            schedule.advance(text)
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

    def _factors(self) -> tuple[str, str]:
        """The blocks of src and of the weight that one product takes."""
        knobs, rows = self.knobs, self.schedule.rows
        block = "block" if knobs.resident else "stage"
        src = f"a.index(stage).reshape([{prod(knobs.box)}, {knobs.depth}])"
        if self.schedule.shares_tile:
            src += f".slice(group * {rows}, {rows}, 0)"
        return src, f"b.index({block}).reshape([{knobs.columns}, {knobs.depth}]).permute((1, 0))"

    # ---- what comes after the sum

    @property
    def _first_row(self) -> list[str]:
        """The first row of the group's part of a tile, along each axis."""
        letters = list(self.geometry.axes)
        if self.schedule.shares_tile:
            axis = self.schedule.split_axis
            letters[axis] += f" + group * {self.schedule.own[axis]}"
        return letters

    @property
    def _parts(self) -> range:
        """First columns of the parts in which a tile is finished."""
        return range(0, self.knobs.columns, self.schedule.part)

    def _bring(self, operand: KernelOperand) -> None:
        """Starts the copies of an operand's tile; they run while the group multiplies."""
        tile, full = _brought(operand)
        name = argument(Slot("operand", operand.key))
        self.text.line(f"mbarrier.expect({full}, {self.schedule.rows * self.knobs.columns * HALF})")
        for place, column in enumerate(self._parts):
            where = ", ".join([*self._first_row, _plus("feature", column)])
            self.text.line(
                f"tma.async_copy_global_to_shared({name}, [{where}], {full}, {tile}.index({place}))"
            )

    def _finish(self) -> None:
        """The stages after the sum, a part of the columns at a time, each copied out when it is ready."""
        text, schedule = self.text, self.schedule
        for operand in schedule.copied:
            text.line(f"mbarrier.wait({_brought(operand)[1]}, turn)")
        if schedule.copied:
            text.line("turn ^= 1")
        inside, mask = self._positions()
        stored = STORED[self.kernel.dst.dtype]
        for place, (column, part) in enumerate(zip(self._parts, self._split(), strict=True)):
            first = _plus("feature", column)
            where = ", ".join([*self._first_row, first])
            text.line(f"column = {first} + gl.arange(0, {schedule.part}, layout=gl.SliceLayout(0, layout))")
            result = self.epilogue.apply(part, self._place(inside, mask), self._read(place))
            text.line(
                f"tma.store_wait(pendings={PART_TILES - 1})",
                "gl.thread_barrier()",
                f"c.index(slot).reshape([{schedule.rows}, {schedule.part}]).store({result}.to({stored}))",
                "fence_async_shared()",
                f"tma.async_copy_shared_to_global(dst, [{where}], c.index(slot))",
                "slot ^= 1",
            )

    def _split(self) -> list[str]:
        """The parts of the sum, columns in order; every thread keeps what it has."""
        text, parts, width = self.text, ["total"], self.knobs.columns
        if width == self.schedule.part:
            return parts
        while width > self.schedule.part:
            width //= 2
            parts = [half for whole in parts for half in self._halves(whole, width)]
        return [text.let("part", f"gl.convert_layout({each}, layout, assert_trivial=True)") for each in parts]

    def _halves(self, whole: str, width: int) -> tuple[str, str]:
        left, right = self.text.name("half"), self.text.name("half")
        halved = f"{whole}.reshape([{self.schedule.rows}, 2, {width}]).permute((0, 2, 1)).split()"
        self.text.line(f"{left}, {right} = {halved}")
        return left, right

    def _read(self, place: int) -> dict[str, str]:
        """Names of the copied operands' parts, in registers."""
        shape = f"[{self.schedule.rows}, {self.schedule.part}]"
        found = {}
        for operand in self.schedule.copied:
            tile, _ = _brought(operand)
            read = f"{tile}.index({place}).reshape({shape}).load(layout)"
            found[operand.key] = self.text.let(f"{operand.key}_read", read)
        return found

    def _place(self, inside: str, mask: str) -> Place:
        """How the elements of a part are indexed."""
        ragged = self.geometry.features % self.knobs.columns
        channel_mask = f"(column < {self.geometry.features})[None, :]" if ragged else ""
        if not inside:
            return Place("", "column[None, :]", "", "", channel_mask)
        masks = " & ".join(filter(None, (f"({mask})[:, None]", channel_mask)))
        return Place("", "column[None, :]", f"({inside})[:, None] + column[None, :]", masks, channel_mask)

    def _positions(self) -> tuple[str, str]:
        """Offset of each row within its image, and which rows there are; "" where nothing asks."""
        if all(operand.per != "activation" for operand in self.epilogue.operands):
            return "", ""
        text, geometry, schedule = self.text, self.geometry, self.schedule
        text.line(f"row = gl.arange(0, {schedule.rows}, layout=gl.SliceLayout(1, layout))")
        if geometry.is_flat:
            text.line(f"position = {self._first_row[0]} + row")
            pixels = prod(self.kernel.dst.spatial)
            return f"position % {pixels} * {geometry.features}", f"position < {geometry.extents[0]}"
        inside, masks, inner = [], [], schedule.rows
        for axis, letter in enumerate(geometry.axes):
            inner //= schedule.own[axis]
            text.line(f"{letter}_row = {self._first_row[axis]} + row // {inner} % {schedule.own[axis]}")
            masks.append(f"({letter}_row < {geometry.extents[axis]})")
            if axis:
                inside.append(f"{letter}_row * {self.kernel.dst.element_strides[axis + 1]}")
        return " + ".join(inside), " & ".join(masks)

    # ---- the kernel

    def _entry(self) -> None:
        text, knobs, schedule = self.text, self.knobs, self.schedule
        held = ["held"] if knobs.resident else []
        turns = ["order"] if schedule.takes_turns else []
        slots = schedule.slots(self.epilogue.slots)
        tail = [argument(slot) for slot in (*self.epilogue.slots, Slot("dst"))]
        text.line("@gluon.jit")
        with text.block(f"def fused({', '.join(argument(slot) for slot in slots)})"):
            self._allocate()
            text.line("gl.warp_specialize(", "    [")
            for group in range(knobs.groups):
                brought = [f"{name}_{group}" for op in schedule.copied for name in _brought(op)]
                names = ["a", "b", f"c_{group}", "empty", "full", *held, *turns, *brought, *tail, str(group)]
                text.line(f"        (consume, ({', '.join(names)})),")
            text.line(f"        (produce, ({', '.join(hopper_copying.names(schedule))})),", "    ],")
            others = knobs.groups - 1
            multiplying, copying = map(str, REGISTERS[knobs.groups])
            warps, registers = [*["4"] * others, "1"], [*[multiplying] * others, copying]
            text.line(f"    [{', '.join(warps)}],", f"    [{', '.join(registers)}],", ")")

    def _allocate(self) -> None:
        """The ring of tiles, the groups' tiles of dst, and the barriers between the warps."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        weight = argument(Slot("operand", self.kernel.weight.key))
        _ring(text, "a", "src", knobs.stages)
        _ring(text, "b", weight, schedule.blocks if knobs.resident else knobs.stages)
        self._barriers("empty", knobs.stages, knobs.groups if knobs.together else 1)
        self._barriers("full", knobs.stages, 1)
        if knobs.resident:
            text.line(f"held = {barriers(0)}", "mbarrier.init(held, count=1)")
        if schedule.takes_turns:
            self._barriers("order", knobs.groups, 1)
        for group in range(knobs.groups):
            _ring(text, f"c_{group}", "dst", PART_TILES)
            for operand in schedule.copied:
                tile, full = (f"{name}_{group}" for name in _brought(operand))
                _ring(text, tile, "dst", len(self._parts))
                text.line(f"{full} = {barriers(0)}", f"mbarrier.init({full}, count=1)")
        text.line("fence_async_shared()")

    def _barriers(self, name: str, count: int, arrivals: int) -> None:
        self.text.line(f"{name} = {barriers(count)}")
        with self.text.block(f"for place in gl.static_range({count})"):
            self.text.line(f"mbarrier.init({name}.index(place), count={arrivals})")


def _ring(text: Text, name: str, mapped: str, count: int) -> None:
    """Buffers of one box of a tensor map each."""
    shape = f"[{count}] + {mapped}.block_type.shape"
    text.line(f"{name} = {allocated(f'{mapped}.dtype', shape, f'{mapped}.layout')}")


def _brought(operand: KernelOperand) -> tuple[str, str]:
    """A copied operand's tile in shared memory, and its barrier."""
    return f"{operand.key}_tile", f"{operand.key}_full"


def _accumulator(columns: int) -> str:
    """The layout of a product's rows and columns over the threads of a group."""
    return f"gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, {columns}, 16])"


def _plus(name: str, number: int) -> str:
    return f"{name} + {number}" if number else name
