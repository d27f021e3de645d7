"""What the warps of the kernel for Hopper agree on: who does which tile, in which order, through what."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import prod
from operator import mul
from typing import Any

from fuseplan.backends.triton.index import Index, as_index, ceil_div, number
from fuseplan.backends.triton.shell import of_launch, programs_of
from fuseplan.backends.triton.templates.hopper_tiles import Geometry, even
from fuseplan.backends.triton.templates.summary_rows import state_bytes
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Programs, Slot
from fuseplan.kernels.kernel import KernelOperand
from fuseplan.system.locks import cached_property

PART = 64
PART_TILES = 2  # of dst in shared memory: one is written while the one before it is copied out
SCATTER_BYTES = 2048  # more than the compiler takes where a group's threads exchange a part of dst
BARRIER_BYTES = 1024  # more than the barriers of any choice take
IMPORTS = (
    "import triton.language as tl",
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
# Registers a thread: of the second and third group, and of the warp that copies; the first group gets the
# rest of the 512 that one thread of each has together (256 where two programs share a processor). With one
# group and 24, Triton 3.6 asks for more registers where it should give some back, and the launch fails.
REGISTERS = {1: (0, 32), 2: (240, 24), 3: (160, 24)}
# Where src passes registers, a thread has as many as any: ptxas gives none more than a launch begins with.
LOADING = {1: (128, 128), 2: (168, 168), 3: (128, 128)}
SUM_REGISTERS = {1: 64, 2: 128, 3: 64}  # sums of a thread that leave registers for any epilogue
KEPT_REGISTERS = 40  # of a thread that loads, besides what it has loaded


@dataclass(frozen=True)
class Knobs:
    """The template's fields; it says what they are."""

    box: tuple[int, ...]
    columns: int
    depth: int
    stages: int
    groups: int = 2
    together: bool = False
    resident: bool = False
    programs: int = 1
    band: int = 1
    swapped: bool = False
    reaching: bool = False
    spread: bool = False
    whole_lines: bool = False
    padded: bool = False


class Schedule:
    """What follows from a kernel and a choice.

    Attributes:
        made: features of dst in a tile.
        own, own_columns: the part of a tile that one group finishes: all, or a share of the features where
            they are the products' rows, else of the first axis of the box that has several rows, so that the
            shares lie side by side.
        shares_tile: whether a group finishes only a part of a tile.
        takes_turns: whether each group has tiles of its own.
        letters: the axes of the rows.
        is_open: whether a launch says how many rows there are.
        lines: taps along the first axis for which one copy of src serves: one, unless it reaches.
        span: lines of src in such a copy.
        reach, more: those besides the first tap's; how many are copied at a time: boxes are powers of two.
        blocks: copies of src for a tile.
        part, part_columns: what a group finishes at once: few positions along the products' columns, so that
            the stages' values fit into registers.
        is_crowded: whether the group's sums leave few registers: parts are smaller then.
        sum_shape: rows and columns of a group's products.
        part_width: columns of the products that are finished at once.
        pieces, weight_pieces: copies that bring a block of src, and of the weight: boxes are powers of two.
        weight_bytes, src_bytes: of one block of the weight, and of one copy of src.
    """

    def __init__(self, knobs: Knobs, geometry: Geometry) -> None:
        self.knobs, self.geometry, self.kernel = knobs, geometry, geometry.kernel
        self.made = knobs.columns // geometry.ways
        self.counts, self.across = geometry.counts(knobs.box), ceil_div(geometry.features, self.made)
        self.tiles = prod(self.counts) * self.across
        self.open_place = self.geometry.opened.get("axis")
        self.letters = tuple(axis.letter for axis in geometry.axes)
        self.is_open = self.kernel.open_axis is not None
        self.lines = self.geometry.axes[0].taps if knobs.reaching else 1
        self.reach = geometry.axes[0].reach if knobs.reaching else 0
        self.more, self.span = self.reach & -self.reach, knobs.box[0] + self.reach
        self.blocks = self.geometry.products(knobs.depth) // self.lines
        self.shares_tile = knobs.groups > 1 and knobs.together
        self.takes_turns = knobs.groups > 1 and not knobs.together
        self.own, self.own_columns = knobs.box, self.made
        if self.shares_tile and knobs.swapped:
            self.own_columns //= knobs.groups
        elif self.shares_tile:
            self.own = _shrunk(knobs.box, prod(knobs.box) // knobs.groups)
        sums = prod(self.own) * self.own_columns * geometry.ways // 128
        self.is_crowded = sums > SUM_REGISTERS[knobs.groups]
        most = PART >> (self.is_crowded + geometry.is_summed)  # statistics have sums beside those of products
        self.part, self.part_columns = self.own, min(even(self.own_columns), most)
        if knobs.swapped:
            self.part = _shrunk(self.own, min(even(prod(self.own)), most))
            self.part_columns = self.own_columns
        self.sum_shape = prod(self.own), self.own_columns * geometry.ways
        self.part_width = self.part_columns
        if knobs.swapped:
            self.sum_shape, self.part_width = self.sum_shape[::-1], prod(self.part)
        self.pieces = prod(knobs.box) // prod(map(even, knobs.box))
        self.weight_pieces = knobs.columns // even(knobs.columns)
        self.itemsize = self.kernel.src.itemsize
        self.weight_bytes = knobs.columns * knobs.depth * self.itemsize
        self.src_bytes = self.span * prod(knobs.box[1:]) * knobs.depth * self.itemsize

    def varied(self, **knobs: Any) -> Schedule:
        """The schedule of another choice of stages, bands, spread sums or a weight that is held."""
        made = copy(self)
        made.knobs = replace(self.knobs, **knobs)
        return made

    @property
    def given(self) -> list[str]:
        """What every function is given besides tensors."""
        has_room = self.knobs.spread or self.geometry.padded or self.geometry.is_summed
        return [*["workspace"] * has_room, *["extent"] * self.is_open]

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of the ring."""
        return self.src_bytes + (0 if self.knobs.resident else self.lines * self.weight_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether the last group has no rows or features in any tile: ptxas drops its products."""
        sizes = zip(self.knobs.box, self.own, (axis.rows for axis in self.geometry.axes), strict=True)
        tiles = *sizes, (self.made, self.own_columns, self.geometry.features)
        return any(size - own >= extent for size, own, extent in tiles)

    @cached_property
    def extents(self) -> list[Index]:
        """Positions along each axis of the rows, in a launch. The cost model does not read them."""
        return [
            of_launch(self.kernel, axis.rows) if place == self.open_place else as_index(axis.rows)
            for place, axis in enumerate(self.geometry.axes)
        ]

    @cached_property
    def launched(self) -> Index:
        """Tiles of all rows, in a launch."""
        return reduce(mul, map(ceil_div, self.extents, self.knobs.box))

    @cached_property
    def sums(self) -> list[tuple[str, str, int]]:
        """Name, layout and columns of each of the group's sums: powers of two, the largest first."""
        columns = self.sum_shape[1]
        widths = [1 << bit for bit in range(columns.bit_length())[::-1] if columns >> bit & 1]
        if len(widths) == 1:
            return [("total", "whole", columns)]
        return [(f"total_{number}", f"whole_{width}", width) for number, width in enumerate(widths)]

    @property
    def scatters_features(self) -> bool:
        """Whether dst, whose channels lie side by side, is written from registers."""
        return self.geometry.scatters and self.geometry.is_beside and not self.geometry.is_summed

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes of the copy of src in the workspace, where there is one."""
        src, pitch = self.kernel.src, self.geometry.pitch
        return src.batch * prod(src.spatial) * pitch * self.itemsize if self.geometry.padded else 0

    @property
    def row_tiles(self) -> int:
        """Tiles of rows that a group finishes."""
        return prod(self.counts) * (self.knobs.groups if self.shares_tile else 1)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of all tiles, where rows have statistics."""
        rows = self.row_tiles * prod(self.own) * self.geometry.is_summed
        return state_bytes(self.kernel, rows, self.across) if rows else 0

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of a group but the first, and of the warps that copy or load."""
        return (LOADING if self.geometry.gathers else REGISTERS)[self.knobs.groups]

    @property
    def arrivals(self) -> int:
        """At the barrier of a full stage: of bytes, and of warps that load src."""
        return 1 if self.knobs.resident or not self.geometry.gathers else 2

    @property
    def held_loads(self) -> int:
        """Elements of src that a thread has room for."""
        return self.registers[1] - KEPT_REGISTERS

    def grid(self, processors: int) -> int:
        """Programs: as many as run at a time, or fewer where there are fewer tiles, if that is known."""
        most = processors * self.knobs.programs
        is_whole = self.is_open or self.geometry.padded or self.knobs.spread
        return most if is_whole else min(self.tiles, most)

    def programs(self, processors: int) -> int | Programs:
        """Programs of a launch."""
        if not self.is_open and (self.geometry.padded or self.knobs.spread):
            return self.grid(processors)
        place = self.open_place or 0
        across = self.tiles // self.counts[place]
        rows, most = self.geometry.axes[place].rows, self.grid(processors)
        return programs_of(self.kernel, rows, self.knobs.box[place], across, most)

    @property
    def first(self) -> tuple[Index, ...]:
        """Where the group's part of a tile begins, along each axis of the rows and the features."""
        names = [*self.letters, "feature"]
        sizes = (*self.knobs.box, self.made)
        counts = (*(ceil_div(extent, size) for extent, size in zip(self.extents, sizes, strict=False)),)
        ends = zip(names, (*counts, as_index(self.across)), sizes, strict=True)
        found = [Index(name, 0, (count.high - 1) * size) for name, count, size in ends]
        if self.shares_tile:
            axis = next(axis for axis, (all_, own) in enumerate(self._shares) if own < all_)
            found[axis] = found[axis] + number("group", self.knobs.groups) * self._shares[axis][1]
        return tuple(found)

    @property
    def _shares(self) -> tuple[tuple[int, int], ...]:
        """Extents of a tile and of a group's part of it, along each axis of the rows and the features."""
        own = (*self.own, self.own_columns)
        return tuple(zip((*self.knobs.box, self.made), own, strict=True))

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Where each part of the group's tile of dst begins in it, in the order of the products' columns."""
        own, part = (*self.own, self.own_columns), (*self.part, self.part_columns)
        steps = (range(0, all_, size) for all_, size in zip(own, part, strict=True))
        return tuple(product(*steps))

    def at(self, part: tuple[int, ...]) -> list[Index]:
        """Where a part begins in dst."""
        return [first + more for first, more in zip(self.first, part, strict=True)]

    @cached_property
    def copied(self) -> tuple[KernelOperand, ...]:
        """Operands that the copy engine brings, in tiles of dst."""
        if self.geometry.scatters:
            return ()
        return tuple(op for op in self.kernel.operands if op.role == "epilogue" and not op.packed)

    @cached_property
    def is_staged(self) -> bool:
        """Whether parts of dst have tiles of their own; else they leave from where an operand's came."""
        return not self.geometry.scatters and bool(self.kernel.saved or not self.copied)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a program takes."""
        knobs = self.knobs
        held = self.blocks * self.lines * self.weight_bytes if knobs.resident else 0
        tiles = PART_TILES * prod(self.part) * self.part_columns * self.is_staged
        tiles += len(self.copied) * prod(self.own) * self.own_columns
        each = tiles * self.itemsize
        if self.geometry.scatters:
            each = self._scattered_bytes
        return self.stage_bytes * knobs.stages + held + knobs.groups * each + BARRIER_BYTES

    @property
    def _scattered_bytes(self) -> int:
        """What the compiler takes where threads exchange a part of dst: all of it where it is turned."""
        whole = prod(self.part) * self.part_columns * self.itemsize
        is_whole = self.knobs.swapped or self.scatters_features
        return whole if is_whole else SCATTER_BYTES

    def tensors(self, tail: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """The kernel's tensors; `tail` are the epilogue's."""
        knobs, geometry = self.knobs, self.geometry
        moved = None if geometry.scatters else geometry.dst_map(self.part, self.part_columns)
        keys = {op.key for op in self.copied} | {output.key for output in self.kernel.saved.values()}
        boxes = [knobs.box, *[(self.more, *knobs.box[1:])] * knobs.reaching]
        maps = [None] if geometry.gathers else [geometry.src_map(box, knobs.depth) for box in boxes]
        kind, given = ("workspace", [Slot("src")]) if geometry.padded else ("src", [])
        return (
            *(Slot(kind, map=each) for each in maps),
            *given,
            Slot("operand", self.kernel.weight.key, geometry.weight_map(knobs.columns, knobs.depth)),
            *(replace(slot, map=moved) if slot.key in keys else slot for slot in tail),
            Slot("dst", map=moved),
        )

    # ---- lines that several warps have

    def place_tile(self, text: Text, *, needs_feature: bool = True) -> None:
        """The first row of a tile along each axis, and its first feature."""
        knobs, across = self.knobs, self.across
        tile = number("tile", self.launched * across)
        rest, block = tile // across, tile % across
        if across > 1 and knobs.band > 1:
            # a band of row tiles takes every block of features before the next band: both stay in the L2
            band = text.index("band", tile // (knobs.band * across))
            inside = text.index("inside", tile % (knobs.band * across))
            if band.constant is None:
                height = f"gl.minimum({self.launched} - {band * knobs.band}, {knobs.band})"
                text.line(f"height = {height}", f"rest = {band * knobs.band} + {inside} % height")
                rest, block = number("rest", self.launched), number(f"({inside} // height)", across)
            else:  # the only one
                rest, block = inside % int(self.launched.high), inside // int(self.launched.high)
        if needs_feature:
            text.line(f"feature = {block * self.made}")
        # tiles of one image follow one another: what they read of src, they read twice
        axes = list(zip(self.letters, self.knobs.box, self.counts, strict=True))
        *inner, first = sorted(axes, key=lambda axis: (axis[0] == "n", -axes.index(axis)))
        for letter, size, count in inner:
            text.line(f"{letter} = {rest % count * size}")
            rest = rest // count
        text.line(f"{first[0]} = {rest * first[1]}")

    def begin(self, text: Text) -> None:
        """Coordinates of the copy engine have 32 bits."""
        if self.is_open:
            text.line("extent = extent.to(gl.int32)")


def advance(text: Text, stages: int, stage: str = "stage", phase: str = "phase") -> None:
    """The next stage of a ring; a barrier's phase turns each time around."""
    text.line(
        f"{stage} += 1",
        f"{phase} = gl.where({stage} == {stages}, {phase} ^ 1, {phase})",
        f"{stage} = gl.where({stage} == {stages}, 0, {stage})",
    )


def widened(at: Index, is_wide: bool) -> Index:
    """A coordinate for offsets, in 64 bits where they need these."""
    return at.named(f"gl.cast({at}, gl.int64)") if is_wide else at


def _shrunk(box: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """A part of the box with so many rows, side by side in the order of the box."""
    found = list(box)
    for axis, size in enumerate(box):
        found[axis] = max(1, size * rows // prod(found))
    return tuple(found)


def allocated(dtype: str, shape: str, layout: str) -> str:
    """A buffer in shared memory."""
    return f"gl.allocate_shared_memory({dtype}, {shape}, {layout})"


def barriers(count: int) -> str:
    """So many barriers; with 0, one that is not indexed."""
    return allocated("gl.int64", f"[{count}, 1]" if count else "[1]", "mbarrier.MBarrierLayout()")


def counted(text: Text, name: str, count: int, arrivals: int) -> None:
    """Writes barriers that so many arrivals turn, each."""
    text.line(f"{name} = {barriers(count)}")
    with text.block(f"for place in gl.static_range({count})"):
        text.line(f"mbarrier.init({name}.index(place), count={arrivals})")


def ring(text: Text, name: str, mapped: str, count: int) -> None:
    """Writes buffers of one box of a tensor map each."""
    shape = f"[{count}] + {mapped}.block_type.shape"
    text.line(f"{name} = {allocated(f'{mapped}.dtype', shape, f'{mapped}.layout')}")


def specialized(
    text: Text, given: Sequence[str], copying: str, warps: int = 1, registers: tuple[int, int] | None = None
) -> None:
    """Writes the warps and their registers.

    Args:
        text: takes the lines.
        given: the arguments of `consume`, which groups run.
        copying: those of `produce`.
        warps: that run it.
        registers: of a thread of a group but the first, and of those; by `REGISTERS` without.
    """
    others = len(given) - 1
    multiplying, left = registers or REGISTERS[len(given)]
    all_warps, counts = [*[4] * others, warps], [*[multiplying] * others, left]
    text.line("gl.warp_specialize(", "    [")
    text.line(*(f"        (consume, ({each}))," for each in given))
    text.line(f"        (produce, ({copying})),", "    ],", f"    {all_warps},", f"    {counts},", ")")
