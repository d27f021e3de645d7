"""Phase 0 of a contraction: src as the compute loops want it.

Copies src into the workspace channels-last, in the compute type, with the padding written out and the
prologue applied. The loops behind it then read every tap of every output position without a test or a table:
at 128 channels the copy is 3 % of a 3x3 convolution, and it is where nchw input, f16 storage and operators
before the convolution are taken care of at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import BITS, I64, vector
from fuseplan.backends.cpu.loops import ceil_div, offset_of, pieces, places, within
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.bounds import bounds_of
from fuseplan.language.dtypes import dtype_of
from fuseplan.system.locks import cached_property

LINE = 64  # positions whose copy is worth a task
_ALIGN = 16  # elements: 64 bytes of float


@dataclass(frozen=True)
class Held:
    """The elements that the loops read, where these are not of the compute type.

    Attributes:
        dtype: as src may have it; unsigned bytes are `u8`.
        element: LLVM's type.
        shift: that is added to src's numbers.
    """

    dtype: str
    element: str
    shift: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return BITS[self.element] // 8


@dataclass(frozen=True)
class Staged:
    """How the compute loops find src: a dense channels-last image with (padded) spatial extents.

    Attributes:
        itemsize: bytes of an element that the loops read.
        copies: whether phase 0 makes a copy; otherwise the loops read src itself.
        low: padding before, per spatial axis.
        extents: spatial sizes with padding.
    """

    convolution: Contraction
    copies: bool
    low: tuple[int, ...]
    extents: tuple[int, ...]
    itemsize: int = 4
    held: Held | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each spatial axis."""
        channels = self.convolution.channels
        return tuple(channels * prod(self.extents[axis + 1 :]) for axis in range(len(self.extents)))

    @property
    def image(self) -> int:
        """Elements of one image."""
        return self.convolution.channels * prod(self.extents)

    @property
    def line(self) -> int:
        """Elements of one line along the last spatial axis, padding included."""
        return self.convolution.channels * self.extents[-1]

    @property
    def rows(self) -> int:
        """Lines along the last spatial axis, over all images."""
        return self.convolution.batch * prod(self.extents[:-1])

    def lines_under(self, count: int) -> int:
        """Lines that the taps of `count` neighbouring outputs along the first spatial axis reach."""
        conv = self.convolution
        first = (count - 1) * conv.stride[0] + (conv.kernel[0] - 1) * conv.dilation[0] + 1
        return first * prod(self.extents[1:-1])

    @cached_property
    def elements(self) -> int:
        """Room in the workspace, in elements; the loops may read one vector past the end."""
        return -(-(self.convolution.batch * self.image) // _ALIGN) * _ALIGN + 2 * _ALIGN if self.copies else 0

    def workspace(self) -> dict[str, int]:
        """The workspace of a kernel that has nothing else there, for `Frame.source`."""
        if isinstance(self.convolution.batch, int):
            return {"workspace": self.elements * self.itemsize}
        images = {"workspace": 3 * _ALIGN * self.itemsize, "per_extent": self.image * self.itemsize}
        return images if self.copies else {}


def staged(
    kernel: Kernel, *, always: bool = False, extents: Sequence[int] | None = None, held: Held | None = None
) -> Staged:
    """Decides whether src must be copied: padding, another layout or dtype, or a prologue.

    Args:
        always: copy in any case.
        extents: padded spatial sizes, where a template wants more than the taps reach.
        held: what the loops read; elements of the compute type unless told.
    """
    conv = kernel.contraction
    wanted = tuple(extents) if extents is not None else reach(conv)
    low = tuple(pair[0] for pair in conv.padding)
    itemsize = held.itemsize if held else dtype_of(kernel.compute_dtype).itemsize
    is_read = kernel.src.dtype == (held.dtype if held else kernel.compute_dtype) and not (held and held.shift)
    plain = channels_last(kernel) and is_read and not kernel.prologue
    padded = any(low) or any(want > have for want, have in zip(wanted, conv.src_spatial, strict=True))
    if plain and not padded and not always:
        return Staged(conv, False, low, conv.src_spatial, itemsize, held)
    return Staged(conv, True, low, wanted, itemsize, held)


def reach(conv: Contraction) -> tuple[int, ...]:
    """The padded extent that the taps of all output positions cover, per spatial axis."""
    return tuple(
        max((out - 1) * stride + (taps - 1) * dilation + 1, low + 1)
        for out, stride, taps, dilation, (low, _) in zip(
            conv.dst_spatial, conv.stride, conv.kernel, conv.dilation, conv.padding, strict=True
        )
    )


def channels_last(kernel: Kernel) -> bool:
    """Whether src's channels are innermost, without gaps (so they are where there is one position)."""
    spec = kernel.src
    return spec.layout is not None and (spec.is_channels_last or prod(spec.shape[2:]) == 1)


def emit(frame: Frame, plan: Staged, workspace: Value) -> Value:
    """Writes phase 0 and the wait for it, where a copy is made; gives what the loops read.

    `workspace` is where the copy goes: `plan.elements` elements, aligned to 64 bytes.
    """
    if not plan.copies:
        return frame.pointer("src")
    stager, b = Stager(frame, plan), frame.body
    lines = 1 if isinstance(plan.rows, int) else max(1, LINE // plan.extents[-1])
    tasks = ceil_div(plan.rows, lines)
    with frame.tasks(tasks) as task:
        start, stop = within(b, task, lines, plan.rows)
        stager.copy_lines(start, stop - start if lines > 1 else 1, stager.at(workspace, start * plan.line))
    frame.wait(tasks)
    return workspace


class Stager:
    """Copies lines of src (along the last spatial axis), padding written out, as the loops read them."""

    def __init__(self, frame: Frame, plan: Staged) -> None:
        self.frame, self.b, self.plan = frame, frame.body, plan
        self.kernel, self.conv = frame.kernel, plan.convolution
        self.dtype, self.held = self.kernel.src.dtype, plan.held
        self.element = plan.held.element if plan.held else self.b.element
        self.channels = self.conv.channels
        self.src = frame.pointer("src")
        self.stages = Elementwise(frame, "prologue")
        # What of a line comes from src: the rest is padding.
        self.width = min(self.conv.src_spatial[-1], plan.extents[-1] - plan.low[-1])

    def at(self, copy: Value, index: Index) -> Value:
        """The address of an element of a copy."""
        return self.b.at(copy, index, self.element)

    def _put(self, x: Value, place: Value, count: int) -> None:
        """Writes elements that were computed."""
        if self.held:
            whole = self.b.convert("fptosi", x + float(self.held.shift) if self.held.shift else x, "i32")
            x = whole if self.element == "i32" else self.b.convert("trunc", whole, self.element)
        self.b.store_first(x, place, count)

    def copy_lines(self, first: Index, count: Index, target: Value) -> None:
        """`count` lines from number `first` on, one behind the other."""
        with self.b.loop(0, count, name="line") as i:
            self.copy_line(i + first, self.at(target, i * self.plan.line))

    def copy_line(self, row: Value, target: Value) -> None:
        """Line `row` of all images' lines, to `target`."""
        b = self.b
        inside, source = self._source_line(row)
        if inside is None:
            self._copy_line(target, source)
            return
        with b.when(inside):
            self._copy_line(target, source)
        outside = b.op("i1", f"xor i1 {inside.name}, true")
        with b.when(outside):
            self._fill(target, 0, self.plan.line)

    def _source_line(self, row: Value) -> tuple[Value | None, Value]:
        """Whether the line is in src at all (None: always), and where its first element lies there."""
        b, plan, strides = self.b, self.plan, self.kernel.src.element_strides
        lines = list(zip(plan.extents[:-1], plan.low, self.conv.src_spatial, strict=False))
        image, *at = places(row, (self.conv.batch, *(extent for extent, _, _ in lines)))
        at = [position - low for position, (_, low, _) in zip(at, lines, strict=True)]
        tests = [
            b.compare("ult", b.const(position, I64), have)
            for position, (extent, low, have) in zip(at, lines, strict=True)
            if low or extent - low > have
        ]
        offset = offset_of([image, *at], (strides[0], *strides[2:-1]))
        return b.both(tests) if tests else None, b.const(offset, I64)

    def _copy_line(self, line: Value, source: Value) -> None:
        channels, low = self.channels, self.plan.low[-1]
        self._fill(line, 0, low * channels)
        begin = self.at(line, low * channels)
        strides = self.kernel.src.element_strides
        if strides[1] == 1 or channels == 1:
            self._copy_channels_last(begin, source)
        elif strides[-1] == 1 or self.width == 1:
            self._copy_channels_first(begin, source)
        else:
            self._copy_strided(begin, source)
        behind = (low + self.width) * channels
        self._fill(line, behind, self.plan.extents[-1] * channels - behind)

    def _fill(self, line: Value, start: int, count: int) -> None:
        """Writes padding."""
        if count <= 0:
            return
        b, fill = self.b, self.b.number(self.conv.fill)
        if self.conv.fill:

            def part(at: Index, size: int) -> None:
                b.store_first(fill, self.at(line, at + start), size)

            pieces(b, count, self.frame.lanes, part, name="padding")
            return
        b.module.declarations.add("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
        size, byte = count * self.plan.itemsize, self.held.shift & 255 if self.held else 0
        where = self.at(line, start)
        b.line(f"call void @llvm.memset.p0.i64(ptr {where.name}, i8 {byte}, i64 {size}, i1 false)")

    def _read(self, offset: Index, count: int) -> Value:
        return storage.read_at(self.b, self.dtype, self.src, offset, count)

    # ---- channels innermost

    def _copy_channels_last(self, begin: Value, source: Value) -> None:
        """Positions lie one stride apart; without a prologue a dense line is one run."""
        step = self.kernel.src.element_strides[-1]
        if not self.stages.stages and (step == self.channels or self.width == 1):
            run = self._widened if self.held else partial(self._run, staged_channel=False)
            run(begin, source, self.width * self.channels)
            return
        with self.b.loop(0, self.width, name="position") as position:
            target = self.at(begin, position * self.channels)
            self._run(target, source + position * step, self.channels, staged_channel=True)

    def _run(self, begin: Value, source: Value, count: int, *, staged_channel: bool) -> None:
        """`count` elements that follow one another; lanes are channels when `staged_channel`."""
        b, lanes = self.b, self.frame.lanes

        def part(start: Index, size: int) -> None:
            x = self._read(source + start, size)
            if staged_channel:
                x = self.stages.apply(x, Place(source + start, start, True, size), {})
            self._put(x, self.at(begin, start), size)

        pieces(b, count, lanes, part, name="run")

    def _widened(self, begin: Value, source: Value, count: int) -> None:
        """`count` integers that follow one another, without a number of the compute type between."""
        b, size = self.b, self.frame.target.vector_bytes // self.plan.itemsize
        assert self.held
        kind, shift = storage.element_type(self.dtype), self.held.shift
        word = "sext" if bounds_of(self.dtype)[0] < 0 else "zext"

        def part(start: Index, some: int) -> None:
            x = b.load_first(b.at(self.src, source + start, kind), some, vector(size, kind))
            x = b.convert(word, x, self.element) if kind != self.element else x
            # A byte wraps around: 128 more is 128 less.
            moved = x + (shift - 256 if shift > 127 else shift) if shift else x
            b.store_first(moved, self.at(begin, start), some)

        pieces(b, count, size, part, name="run")

    # ---- positions innermost

    def _copy_channels_first(self, begin: Value, source: Value) -> None:
        """Squares of lanes x lanes, transposed in registers after the prologue: there lanes are positions."""
        part = partial(self._squares, begin, source)
        pieces(self.b, self.channels, self.frame.lanes, part, name="channel")

    def _squares(self, begin: Value, source: Value, channel: Index, count: int) -> None:
        """All positions of `count` channels."""
        part = partial(self._square, begin, source, channel, count)
        pieces(self.b, self.width, self.frame.lanes, part, name="position")

    def _square(
        self, begin: Value, source: Value, channel: Index, count: int, position: Index, positions: int
    ) -> None:
        b, lanes, step = self.b, self.frame.lanes, self.kernel.src.element_strides[1]
        rows = []
        for i in range(count):
            offset = source + (channel + i) * step + position
            x = self._read(offset, positions)
            rows.append(self.stages.apply(x, Place(offset, channel + i, False, positions), {}))
        rows += [Value(b, b.vector, "poison")] * (lanes - count)
        for i, column in enumerate(transposed(b, rows)[:positions]):
            self._put(column, self.at(begin, (position + i) * self.channels + channel), count)

    # ---- any strides

    def _copy_strided(self, begin: Value, source: Value) -> None:
        """One element at a time: right for any strides, and rare."""
        b, strides = self.b, self.kernel.src.element_strides
        with (
            b.loop(0, self.width, name="position") as position,
            b.loop(0, self.channels, name="channel") as channel,
        ):
            offset = source + position * strides[-1] + channel * strides[1]
            x = self._read(offset, 1)
            x = self.stages.apply(x, Place(offset, channel, True, 1), {})
            self._put(x, self.at(begin, position * self.channels + channel), 1)
