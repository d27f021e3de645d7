"""Writes the text of the pointwise kernels: a tile of dst, wherever its elements lie in src."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, argument
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel

STORED = {"f16": "float16", "bf16": "bfloat16"}
WIDE = 2**31  # elements: from here on offsets need 64 bits
VECTOR = 16  # elements: a mask that changes inside of so many keeps them from being moved at once


class Knobs(Protocol):
    """The template's fields."""

    @property
    def form(self) -> str:
        """What a row of a tile is: `rows`, `planes` or `flat`."""

    @property
    def outer(self) -> int:
        """Rows of a tile."""

    @property
    def inner(self) -> int:
        """Elements of a row in a tile."""

    @property
    def programs(self) -> int:
        """Programs that share the rows of one column of tiles; 0: one a tile."""

    @property
    def warps(self) -> int:
        """Of a program."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, at_least - 1).bit_length()


def merged(extents: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Axes as (extent, stride), outermost first; two become one where the outer steps over a whole inner."""
    found: list[tuple[int, int]] = []
    for extent, stride in zip(extents, strides, strict=True):
        if extent == 1:
            continue
        if found and found[-1][1] == extent * stride:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return found


def offset(index: str, axes: Sequence[tuple[int, int]]) -> str:
    """Text of the place of element `index` (a name), counted along `axes` with the last one fastest."""
    terms = []
    for place, (extent, stride) in enumerate(axes):
        below = prod(each for each, _ in axes[place + 1 :])
        term = index if below == 1 else f"{index} // {below}"
        term = term if place == 0 else f"{term} % {extent}"
        terms.append(term if stride == 1 else f"{term} * {stride}")
    return " + ".join(terms) or f"{index} * 0"


class PointwiseWriter:
    """Writes one kernel.

    The elements of dst, in the order in which they are stored, are seen as a matrix: `outer` rows of `inner`
    elements. In the form `rows` a row is the channels of one position, in `planes` the positions of one
    channel of one image, and `flat` is a single row.
    """

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        self.knobs, self.kernel, self.title = knobs, kernel, title
        dst = kernel.dst
        self.channels, self.area = dst.channels, prod(dst.spatial)
        self.size, self.last = dst.size, dst.is_channels_last
        order = sorted(range(dst.rank), key=lambda axis: (-dst.element_strides[axis], dst.shape[axis]))
        order = [axis for axis in order if dst.shape[axis] > 1]
        self.axes = [(dst.shape[axis], kernel.src.element_strides[axis], axis) for axis in order]
        self.is_wide = max(kernel.src.span, dst.span) + knobs.inner * knobs.outer >= WIDE
        self.text = Text()
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        self.compute = f"tl.{dialect.COMPUTE[kernel.src.dtype]}"
        self.slots = (Slot("src"), *self.epilogue.slots, Slot("dst"))

    @property
    def extents(self) -> tuple[int, int]:
        """Rows of the matrix and elements in each."""
        row = {"flat": self.size, "rows": self.channels, "planes": self.area}[self.knobs.form]
        return self.size // row, row

    @property
    def blocks(self) -> tuple[int, int]:
        """Tiles along the rows and along each row."""
        rows, row = self.extents
        return ceil_div(rows, self.knobs.outer), ceil_div(row, self.knobs.inner)

    def source(self) -> Source:
        """The whole kernel."""
        text = self.text
        text.line("import triton", "import triton.language as tl", "", "")
        text.line(*(f"# {line}" for line in [self.title, *self.kernel.text.splitlines()]))
        text.line("@triton.jit")
        with text.block(f"def pointwise({', '.join(argument(slot) for slot in self.slots)})"):
            if self.knobs.form == "flat":
                self._flat()
            else:
                self._matrix()
        return Source(
            str(text),
            "pointwise",
            self.slots,
            language="triton",
            grid=(self.programs, 1, 1),
            options=(("num_warps", self.knobs.warps), ("num_stages", 1)),
        )

    @property
    def programs(self) -> int:
        """Programs of a launch: as many as tiles, or as the knob says and a loop in each."""
        down, across = self.blocks
        return across * min(down, self.knobs.programs or down)

    # ---- one row

    def _flat(self) -> None:
        text, block = self.text, self.knobs.inner
        wide = ".to(tl.int64)" if self.is_wide else ""
        text.line(f"start = tl.program_id(0){wide} * {block}", f"lane = tl.arange(0, {block})")
        if self.size % block == 0:
            self._flat_tile("")
        elif self.size % VECTOR == 0:
            text.line(f"mask = lane < {self.size} - start")
            self._flat_tile("mask")
        else:
            # A mask that may end anywhere would keep every program from moving whole vectors.
            with text.block(f"if start + {block} <= {self.size}"):
                self._flat_tile("")
            with text.block("else"):
                text.line(f"mask = lane < {self.size} - start")
                self._flat_tile("mask")

    def _flat_channels(self) -> Known | None:
        """What depends on the channel, computed once for each that the tile has."""
        if not self.epilogue.has_channels:
            return None
        if self.last or self.area == 1:
            return self._repeating_channels()
        return self._two_channels() if self.knobs.inner <= self.area else self._many_channels()

    def _repeating_channels(self) -> Known:
        """All channels: they follow one another."""
        channels, count = self.channels, power_of_two(self.channels)
        self.text.line(f"channel = tl.arange(0, {count})")
        known = self.epilogue.prepare("channel", f"channel < {channels}" if count > channels else "")
        self.text.line(f"which = ((start % {channels}).to(tl.int32) + lane) % {channels}")
        return self.epilogue.spread(known, "which")

    def _two_channels(self) -> Known:
        """A tile no larger than a plane meets two at most."""
        self.text.line(
            f"plane = start // {self.area}",
            f"channel = plane % {self.channels}",
            f"next_channel = (plane + 1) % {self.channels}",
        )
        first, second = self.epilogue.prepare("channel"), self.epilogue.prepare("next_channel")
        self.text.line(f"is_first = lane < {self.area} - (start % {self.area}).to(tl.int32)")
        return self.epilogue.select("is_first", first, second)

    def _many_channels(self) -> Known:
        """Those of the planes that the tile meets."""
        count = power_of_two((self.knobs.inner - 2) // self.area + 2)
        self.text.line(
            f"plane = (start // {self.area} % {self.channels}).to(tl.int32)",
            f"channel = (plane + tl.arange(0, {count})) % {self.channels}",
        )
        known = self.epilogue.prepare("channel")
        self.text.line(f"which = ((start % {self.area}).to(tl.int32) + lane) // {self.area}")
        return self.epilogue.spread(known, "which")

    def _flat_tile(self, mask: str) -> None:
        element = "start + lane"
        inside = (
            f"(start % {self.size // self.kernel.dst.batch} + lane) % {self.size // self.kernel.dst.batch}"
        )
        axes = merged([extent for extent, _, _ in self.axes], [stride for _, stride, _ in self.axes])
        if len(axes) < 2 and (not axes or axes[0][1] == 1):
            where = element
        else:
            self.text.line("element = start + lane")
            where = offset("element", axes)
        self._tile(where, Place(element, "", inside, mask, ""), self._flat_channels)

    def _tile(self, where: str, place: Place, channels: Callable[[], Known | None]) -> None:
        """Loads, applies the stages, stores.

        What depends on the channel comes after the loads of all that is large: it is waited for itself, and
        nothing behind it would be on its way meanwhile.
        """
        text = self.text
        masked = f", mask={place.mask}, other=0.0" if place.mask else ""
        x = text.let("x", f"tl.load(src + {where}{masked})")
        held = self.epilogue.read(place)
        known = channels()
        is_compute = self.kernel.dst.dtype == self.kernel.compute_dtype
        x = x if is_compute else text.let("x", f"{x}.to({self.compute})")
        result = self.epilogue.apply(x, place, held, known)
        masked = f", mask={place.mask}" if place.mask else ""
        stored = result if is_compute else f"{result}.to(tl.{STORED[self.kernel.dst.dtype]})"
        text.line(f"tl.store(dst + {place.element}, {stored}{masked})")

    # ---- many rows

    def _matrix(self) -> None:
        text, knobs = self.text, self.knobs
        row, (down, across) = self.extents[1], self.blocks
        text.line("program = tl.program_id(0)")
        first = f"program % {across} * {knobs.inner} + " if across > 1 else ""
        wide = ".to(tl.int64)" if self.is_wide else ""
        text.line(f"column = {first}tl.arange(0, {knobs.inner}){wide}")
        if across * knobs.inner != row:
            text.line(f"has_column = column < {row}")
        programs = self.programs // across
        block = f"program // {across}" if across > 1 else "program"
        if programs == down:
            text.line(f"block = {block}")
            self._matrix_tile(self._column_channels)
        else:
            known = self._column_channels()
            with text.block(f"for block in range({block}, {down}, {programs})"):
                self._matrix_tile(lambda: known)

    def _column_channels(self) -> Known | None:
        """What depends on the channel alone, where a row is the channels of a position."""
        return self.epilogue.prepare(*self._column_channel()) if self.knobs.form == "rows" else None

    def _column_channel(self) -> tuple[str, str]:
        has = self.blocks[1] * self.knobs.inner != self.extents[1]
        return "column[None, :]", "has_column[None, :]" if has else ""

    def _matrix_tile(self, channels: Callable[[], Known | None]) -> None:
        text, knobs = self.text, self.knobs
        (rows, row), (down, across) = self.extents, self.blocks
        wide = "tl.full((), 0, tl.int64) + " if self.is_wide else ""
        text.line(f"row = {wide}block * {knobs.outer} + tl.arange(0, {knobs.outer})")
        masks = []
        if down * knobs.outer != rows:
            text.line(f"has_row = row < {rows}")
            masks.append("has_row[:, None]")
        if across * knobs.inner != row:
            masks.append("has_column[None, :]")
        if len(masks) == 2:
            text.line(f"mask = {' & '.join(masks)}")
            masks = ["mask"]
        images = self.size // self.kernel.dst.batch // row
        within = f"(row % {images})[:, None] * {row} + column[None, :]" if images > 1 else "column[None, :]"
        text.line(f"at = row[:, None] * {row} + column[None, :]")
        channel, channel_mask = self._column_channel()
        if knobs.form == "planes":
            channel_mask = ""
            if self.epilogue.has_channels:
                text.line(f"channel = row % {self.channels}")
                channel = "channel[:, None]"
        place = Place("at", channel, within, "".join(masks), channel_mask)
        self._tile(self._matrix_offset(), place, channels)

    def _matrix_offset(self) -> str:
        """Where the tile's elements lie in src."""
        along = self._row_axes()
        inner = merged(*self._columns_of(along))
        outer = merged(*self._columns_of([axis for axis in self.axes if axis not in along]))
        row = self.extents[1]
        if inner in ([], [(row, 1)]) and [stride for _, stride in outer] in ([], [row]):
            return "at"
        return f"({offset('row', outer)})[:, None] + ({offset('column', inner)})[None, :]"

    def _row_axes(self) -> list[tuple[int, int, int]]:
        """The axes of dst that one row of the matrix has."""
        if self.knobs.form == "rows":
            return [axis for axis in self.axes if axis[2] == 1]
        return [axis for axis in self.axes if axis[2] > 1]

    @staticmethod
    def _columns_of(axes: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        return [extent for extent, _, _ in axes], [stride for _, stride, _ in axes]
