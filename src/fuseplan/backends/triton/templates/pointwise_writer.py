"""Writes the text of the pointwise kernels: a tile of dst, wherever its elements lie in src."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from fuseplan.backends.parts import ends
from fuseplan.backends.triton.elementwise import Elementwise, Known, Place
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    condition,
    counted,
    divides,
    merged,
    number,
    offset,
    power_of_two,
)
from fuseplan.backends.triton.shell import Writer, of_launch, programs_of
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.layouts import image_strides
from fuseplan.language.tensor import TensorSpec

VECTOR = 16  # elements: a mask that changes inside of so many keeps them from being moved at once


@dataclass(frozen=True)
class PointwiseKnobs:
    """The fields of `GpuPointwise`, which says what they mean."""

    form: str
    outer: int
    inner: int
    programs: int
    warps: int


def channel_run(dst: TensorSpec) -> int:
    """Neighbours in memory that have one channel: 1 where c is innermost, or all positions.

    Without a name for the layout, by the strides: the other axes may lie in any order.
    """
    if dst.layout is None and dst.is_dense and dst.channels > 1:
        return dst.element_strides[1]
    return 1 if dst.is_channels_last else prod(dst.spatial)


class PointwiseWriter(Writer):
    """Writes one kernel.

    The elements of dst, in the order in which they are stored, are seen as a matrix: `outer` rows of `inner`
    elements. In the form `rows` a row is the channels of one position, in `planes` the positions of one
    channel of one image, and `flat` is a single row.

    Attributes:
        row: elements of a row of the matrix; of the single row, those that one image adds.
        blocks: tiles along the rows and along each row; along the single row, and 1.
        filled: the share of the elements along a tile's row that there are.
        looping: programs that share the rows, each of which goes on to further tiles; 0: each has one tile.
        most: programs of a launch, at most.
    """

    entry = "pointwise"

    def __init__(self, knobs: PointwiseKnobs, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, title)
        self.knobs, self.options = knobs, (("num_warps", knobs.warps), ("num_stages", 1))
        self.ends = ends(kernel)
        src, dst = (end.spec for end in self.ends)
        self.channels, self.run = dst.channels, channel_run(dst)
        self.image = kernel.dst.size // kernel.dst.batch
        self.size = of_launch(kernel, dst.size)
        is_flat = knobs.form == "flat"
        self.row = {"flat": self.image, "rows": self.channels, "planes": self.run}[knobs.form]
        down, across = ceil_div(self.size, knobs.inner), 1
        if not is_flat:
            down, across = ceil_div(self.size // self.row, knobs.outer), ceil_div(self.row, knobs.inner)
        self.blocks = down, across
        elements, room = (self.size.high, down.high) if is_flat else (self.row, across)
        self.filled = elements / (room * knobs.inner)
        self.looping = knobs.programs if knobs.programs < down.high else 0
        self.most = (as_index(self.looping) if self.looping else down) * across
        order = sorted(range(dst.rank), key=lambda axis: (-dst.element_strides[axis], dst.shape[axis]))
        order = [axis for axis in order if dst.shape[axis] > 1]
        self.axes = [(dst.shape[axis], src.element_strides[axis], axis) for axis in order]
        self.is_wide = (
            self.is_open or max(kernel.src.span, kernel.dst.span) + knobs.inner * knobs.outer >= WIDE
        )
        self.before, self.behind = (
            [Elementwise(kernel, end.role, self.text, number=number) for number in range(len(end.starts))]
            for end in self.ends
        )
        self.epilogue = self.behind[0]
        self.tensors = (Slot("src"), *self.before[0].slots, *self.epilogue.slots, Slot("dst"))
        row, tile = (1, knobs.inner) if is_flat else (self.row, knobs.outer)
        # The size is that of one part: a program moves the same places of all.
        self.programs = programs_of(kernel, dst.size // row, tile, across, self.looping * across)

    def write_body(self) -> None:
        if self.knobs.form == "flat":
            self._flat()
        else:
            self._matrix()

    # ---- one row

    def _flat(self) -> None:
        text, block = self.text, self.knobs.inner
        program = number("tl.program_id(0)", self.most).wide(self.is_wide)
        start, lane = text.index("start", program * block), text.index("lane", arange(block))
        mask = ALL if divides(block, self.size) else lane < self.size - start
        if not mask or divides(VECTOR, self.size) or self.most.constant == 1:
            self._flat_tile(start, lane, text.mask("mask", mask))
            return
        # A mask that may end anywhere would keep every program from moving whole vectors.
        with text.block(f"if {start + block} <= {self.size}"):
            self._flat_call(start, lane, "True")
        with text.block("else"):
            self._flat_call(start, lane, str(mask))

    def _flat_call(self, start: Index, lane: Index, mask: str) -> None:
        """Calls the function that moves a tile of which some elements may not exist."""

        def write() -> tuple[str, ...]:
            self._flat_tile(start, lane, condition("mask"))
            return ()

        self.text.call("tile", {"mask": mask}, write)

    def _flat_tile(self, start: Index, lane: Index, mask: Mask) -> None:
        image = self.image
        element = start + lane
        if self.kernel.parts:
            self._parts(self.text.index("element", element), str(mask))
            return
        inside = self._inside(element, (start % image + lane) % image)
        axes = merged((extent, stride) for extent, stride, _ in self.axes)
        where = element
        if len(axes) > 1 or any(stride != 1 for _, stride in axes):
            where = offset(self.text.index("element", element), axes)
        place = Place(str(element), "", str(inside), str(mask), "")
        self._tile(str(where), place, lambda: self._flat_channels(start, lane))

    def _inside(self, element: Index, following: Index) -> Index:
        """The place of an element of dst in one image, as that is stored; `following` where images follow."""
        if any(axis == 0 for *_, axis in self.axes[1:]):
            dst = self.ends[1].spec
            steps = image_strides(dst.shape, dst.element_strides)
            return offset(element, merged((extent, steps[axis]) for extent, _, axis in self.axes))
        return following

    def _flat_channels(self, start: Index, lane: Index) -> Known | None:
        """What depends on the channel, computed once for each that the tile has."""
        if not self.epilogue.has_channels:
            return None
        if self.channels == 1:
            return Known("", self.epilogue.prepare(str(arange(1))).values)
        if self.run == 1:
            return self._repeating_channels(start, lane)
        if self.knobs.inner <= self.run:
            return self._two_channels(start, lane)
        return self._many_channels(start, lane)

    def _repeating_channels(self, start: Index, lane: Index) -> Known:
        """All channels: they follow one another."""
        channel = self.text.index("channel", arange(power_of_two(self.channels)))
        has_channel = self.text.mask("has_channel", channel < self.channels)
        known = self.epilogue.prepare(str(channel), str(has_channel))
        begin = (start % self.channels).narrow(self.is_wide)
        which = self.text.index("which", (begin + lane) % self.channels)
        return self.epilogue.spread(known, str(which))

    def _two_channels(self, start: Index, lane: Index) -> Known:
        """A tile no larger than a plane meets two at most."""
        text = self.text
        plane = text.index("plane", start // self.run)
        channel = text.index("channel", plane % self.channels)
        following = text.index("next_channel", (plane + 1) % self.channels)
        first, second = self.epilogue.prepare(str(channel)), self.epilogue.prepare(str(following))
        is_first = lane < self.run - (start % self.run).narrow(self.is_wide)
        return (
            self.epilogue.select(str(text.mask("is_first", is_first)), first, second) if is_first else first
        )

    def _many_channels(self, start: Index, lane: Index) -> Known:
        """Those of the planes that the tile meets."""
        text, run = self.text, self.run
        plane = text.index("plane", (start // run % self.channels).narrow(self.is_wide))
        count = power_of_two((self.knobs.inner - 2) // run + 2)
        channel = text.index("channel", (plane + arange(count)) % self.channels)
        known = self.epilogue.prepare(str(channel))
        which = text.index("which", ((start % run).narrow(self.is_wide) + lane) // run)
        return self.epilogue.spread(known, str(which))

    def _tile(self, where: str, place: Place, channels: Callable[[], Known | None]) -> None:
        """Loads, applies the stages, stores.

        What depends on the channel comes after the loads of all that is large: it is waited for itself, and
        nothing behind it would be on its way meanwhile.
        """
        masked = f", mask={place.mask}, other=0.0" if place.mask else ""
        x = self.epilogue.source(where, masked)
        place = replace(self.epilogue.read(place), known=channels())
        self.epilogue.store(self.epilogue.widened(x, self.kernel.src.dtype), place)

    # ---- parts of an axis

    def _parts(self, element: Index, mask: str) -> None:
        """Reads each part of src at the places of a tile, and writes each part of dst."""
        text = self.text
        known: dict[str, Index] = {}

        def along(name: str, strides: Sequence[int]) -> Index:
            value = offset(element, merged((extent, strides[axis]) for extent, _, axis in self.axes))
            if str(value) not in known:
                known[str(value)] = text.index(name, value)
            return known[str(value)]

        others = {
            operand.key: str(along(f"{operand.key}_at", end.strides(operand)))
            for end, elements in zip(self.ends, (self.before[0], self.epilogue), strict=True)
            for operand in elements.operands
            if operand.strides
        }
        before, behind = (
            [Place(str(first + start), "", "", mask, "", others) for start in end.starts]
            for first, end in (
                (along(f"{name}_at", end.spec.element_strides), end)
                for name, end in zip(("src", "dst"), self.ends, strict=True)
            )
        )
        masked = f", mask={mask}, other=0.0" if mask else ""
        loaded = [text.let("x", f"tl.load(src + {place.element}{masked})") for place in before]
        before = [stages.read(place) for stages, place in zip(self.before, before, strict=True)]
        given: dict[str, str] = {}
        for index, (stages, place) in enumerate(zip(self.before, before, strict=True)):
            x = stages.widened(loaded[index], self.kernel.src.dtype)
            given[f"x[{index}]"] = stages.apply(x, place)
        for stages, place in zip(self.behind, behind, strict=True):
            stages.given = given
            stages.store(x, stages.read(place))

    # ---- many rows

    def _matrix(self) -> None:
        text, knobs = self.text, self.knobs
        row, (down, across), programs = self.row, self.blocks, self.looping
        program = text.index("program", number("tl.program_id(0)", self.most))
        column = program % across * knobs.inner + arange(knobs.inner).wide(self.is_wide)
        column = text.index("column", column)
        has_column = text.mask("has_column", column < row)
        first = program // across

        def tile(block: Index, channels: Callable[[], Known | None]) -> None:
            self._matrix_tile(block, column, has_column, channels)

        def known() -> Known | None:
            return self._column_channels(column, has_column)

        if not programs:
            tile(text.index("block", first.wide(self.is_wide)), known)
            return
        found = known()
        with text.block(f"for block in range({first}, {down}, {programs})"):
            tile(counted("block", down, self.is_wide), lambda: found)

    def _column_channels(self, column: Index, has_column: Mask) -> Known | None:
        """What depends on the channel alone, where a row is the channels of a position."""
        if self.knobs.form != "rows":
            return None
        return self.epilogue.prepare(str(column.at(ACROSS)), str(has_column.at(ACROSS)))

    def _matrix_tile(
        self, block: Index, column: Index, has_column: Mask, channels: Callable[[], Known | None]
    ) -> None:
        text, rows, row = self.text, self.size // self.row, self.row
        row_at = text.index("row", block * self.knobs.outer + arange(self.knobs.outer))
        has_row = text.mask("has_row", row_at < rows)
        mask = text.mask("mask", has_row.at(DOWN) & has_column.at(ACROSS))
        across = column.at(ACROSS)
        at = text.index("at", row_at.at(DOWN) * row + across)
        inside = self._inside(at, (row_at % (self.image // row)).at(DOWN) * row + across)
        channel, channel_mask = across, has_column.at(ACROSS)
        if self.knobs.form == "planes":
            channel_mask = ALL
            if self.epilogue.has_channels:
                channel = text.index("channel", row_at % self.channels).at(DOWN)
        place = Place(str(at), str(channel), str(inside), str(mask), str(channel_mask))
        self._tile(str(self._matrix_offset(at, row_at, column)), place, channels)

    def _matrix_offset(self, at: Index, row_at: Index, column: Index) -> Index:
        """Where the tile's elements lie in src."""
        is_rows = self.knobs.form == "rows"
        along = [axis for axis in self.axes if (axis[2] == 1 if is_rows else axis[2] > 1)]
        inner = merged((extent, stride) for extent, stride, _ in along)
        outer = merged(axis[:2] for axis in self.axes if axis not in along)
        row = self.row
        if inner in ((), ((row, 1),)) and [stride for _, stride in outer] in ([], [row]):
            return at
        return offset(row_at, outer).at(DOWN) + offset(column, inner).at(ACROSS)
