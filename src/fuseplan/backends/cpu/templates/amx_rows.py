"""Rows of src as tiles: copied as they lie, or gathered under the taps of a window; f32 in three parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I1, I64, lanes_of, vector
from fuseplan.backends.cpu.loops import ceil_div, nested, offset_of, pieces, places
from fuseplan.backends.cpu.staging import Staged
from fuseplan.backends.cpu.tile_registers import FACTORS, ROW_BYTES, ROWS, TILE_BYTES, Factors
from fuseplan.backends.cpu.tiling import is_run
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import LARGE

BLOCK = 2 * ROWS  # rows of two tiles
PART_BYTES = 2 * TILE_BYTES  # of a part of a step of a block of rows, or of a panel


def steps_of(kernel: Kernel) -> int:
    """Steps of a sum over all taps, each of as many elements as a tile's row has."""
    return -(-kernel.contraction.depth // FACTORS[kernel.src.dtype].channels)


@dataclass(frozen=True)
class Rows:
    """A task's rows: `count` from `first` on, of a group, and of an image where tasks stay inside one."""

    image: Index | None
    group: Index
    first: Index
    count: Index


class RowTiles:
    """A thread's tiles of a task's rows, by so many steps, and room where elements are gathered in front.

    Attributes:
        held: steps of the rows.
        nbytes: of the tiles of so many rows.
        window_bytes: of the elements under the taps of a tile's rows; 0 where rows are copied as they lie.

    Args:
        rows: of a task, at most.
        extent: steps of one tap that are there at once; of several taps, all are.
    """

    def __init__(self, frame: Frame, factors: Factors, rows: int, extent: int) -> None:
        self.frame, self.b, self.factors = frame, frame.body, factors
        self.conv = conv = frame.kernel.contraction
        self.element = storage.element_type(frame.kernel.src.dtype)
        self.src = Staged(conv, False, tuple(low for low, _ in conv.padding), conv.src_spatial)
        self.steps = steps_of(frame.kernel)
        self.step_bytes = factors.parts * PART_BYTES
        self.held = extent if conv.taps == 1 else self.steps
        self.nbytes = ceil_div(rows, BLOCK) * self.held * self.step_bytes
        # Taps along the last axis that fill whole steps are gathered alone, and stay in the first cache.
        is_whole = conv.kernel[-1] * conv.channels_per_group % factors.channels == 0
        self.outer = conv.kernel[:-1] if is_whole and conv.taps > 1 else ()
        self.pitch = (self.held // prod(self.outer) + 1) * factors.channels
        self.window_bytes = 0 if is_run(self.src) else ROWS * self.pitch * frame.kernel.src.itemsize

    def place(self, tiles: Value, window: Value) -> None:
        """Tells where they lie."""
        self.room, self.window = tiles, window

    def copy(self, rows: Rows, begin: Index, extent: int) -> None:
        """Some steps of a task's rows as tiles; what is padding, or behind the last channel, is zero.

        A tile's lines are written one behind the other: those of all tiles of a row share a few sets of the
        first cache.
        """
        b, conv, size, image = self.b, self.conv, self.factors.channels, rows.image
        of_src = self.frame.pointer("src")
        within = (begin * size, (begin + extent) * size) if conv.taps == 1 else None
        group = rows.group * conv.channels_per_group
        with b.loop(0, ceil_div(rows.count, ROWS), name="tile") as tile:
            first, count = rows.first + tile * ROWS, b.smaller(rows.count - tile * ROWS, ROWS)
            at = tile // 2 * (self.held * self.step_bytes) + tile % 2 * TILE_BYTES
            room = b.at(self.room, at - begin * self.step_bytes if within else at, "i8")
            if is_run(self.src):
                before: Index = 0 if image is None else image * self.src.image
                own = b.at(of_src, before + first * conv.channels + group, self.element)
                self._copy_tile(room, count, (own, conv.channels), conv.channels_per_group, within)
            else:
                own = b.at(self.window, 0 - begin * size if within else 0, self.element)
                with nested(b, self.outer, "part") as part:
                    self._gather(own, image, first, count, group, part, within)
                    steps = self.steps // prod(self.outer)
                    number = offset_of(part, [prod(self.outer[axis + 1 :]) for axis in range(len(part))])
                    place = b.at(room, number * (steps * self.step_bytes), "i8")
                    self._copy_tile(place, count, (own, self.pitch), steps * size, within)

    def _copy_tile(
        self,
        room: Value,
        count: Index,
        src: tuple[Value, int],
        channels: int,
        within: tuple[Index, Index] | None,
    ) -> None:
        """Rows of so many elements, a pitch apart, as the lines of a tile of each step."""
        b, size, (first, pitch) = self.b, self.factors.channels, src
        kind = vector(size, self.element)

        def part(start: Index, elements: int) -> None:
            line = b.at(room, start * (self.step_bytes // size), "i8")
            with b.loop(0, count, name="row") as row:
                x = b.load_first(b.at(first, row * pitch + start, self.element), elements, kind)
                place = b.at(line, row * ROW_BYTES, "i8")
                if self.factors.parts == 1:
                    b.store(x, place, align=ROW_BYTES)
                else:
                    self._put_parts(x, place)

        pieces(b, channels, size, part, name="channel", within=within)

    def _gather(
        self,
        window: Value,
        image: Index | None,
        first: Index,
        count: Index,
        channel: Index,
        part: Sequence[Value],
        within: tuple[Index, Index] | None,
    ) -> None:
        """The elements under all taps of a tile's positions, in order; of one tap, those of some channels.

        Taps side by side in src are one run. A run's last vector may reach into the next run, which follows.
        Where taps along the last axis fill whole steps, they alone are gathered, of a part: they stay in the
        first cache.
        """
        b, conv, size = self.b, self.conv, self.factors.channels
        kind = vector(size, self.element)
        *outer, last = conv.kernel
        if self.outer:
            outer = [1 for _ in outer]
        span = last if conv.groups == conv.dilation[-1] == 1 else 1
        run, extents = (
            span * conv.channels_per_group,
            ((conv.batch,) if image is None else ()) + conv.dst_spatial,
        )
        with b.loop(0, count, name="row") as row:
            line = b.at(window, row * self.pitch, self.element)
            if conv.taps > 1 and conv.depth % size:
                zeros = Value(b, kind, "zeroinitializer")
                b.store(zeros, b.at(line, (self.steps - 1) * size, self.element))
            at = places(first + row, extents)
            own, *spots = at if image is None else [image, *at]
            with nested(b, (*outer, last // span), "tap") as loops:
                taps = [*part, loops[-1]] if self.outer else loops
                inside = [
                    b.const(spot * step + tap * by, I64) - low
                    for spot, step, tap, by, (low, _) in zip(
                        spots, conv.stride, taps, conv.dilation, conv.padding, strict=True
                    )
                ]
                offset = offset_of([own, *inside], (self.src.image, *self.src.strides)) + channel
                begin = b.at(self.frame.pointer("src"), offset, self.element)
                number = offset_of(loops, [prod(conv.kernel[axis + 1 :]) for axis in range(len(loops))])
                put = b.at(line, number * conv.channels_per_group, self.element)
                self._gather_run(begin, put, run, self._bounds(inside, span), within)

    def _gather_run(
        self,
        begin: Value,
        put: Value,
        run: int,
        bounds: tuple[Value, Value] | None,
        within: tuple[Index, Index] | None,
    ) -> None:
        """A run of elements of src, zero outside the bounds: most runs lie inside them."""
        b, size = self.b, self.factors.channels
        kind = vector(size, self.element)

        def all_of(start: Index, elements: int) -> None:
            x = b.load_first(b.at(begin, start, self.element), elements, kind)
            b.store(x, b.at(put, start, self.element))

        def some_of(start: Index, elements: int) -> None:
            assert bounds is not None
            condition = self._between(start, elements, bounds)
            x = b.load_where(b.at(begin, start, self.element), f"{condition.type} {condition.name}", kind)
            b.store(x, b.at(put, start, self.element))

        if bounds is None:
            pieces(b, run, size, all_of, name="channel", within=within)
            return
        inside = bounds[1] - bounds[0]
        for how, part in (("eq", all_of), ("ne", some_of)):
            with b.when(b.compare(how, inside, run)):
                pieces(b, run, size, part, name="channel", within=within)

    def _bounds(self, inside: Sequence[Value], span: int) -> tuple[Value, Value] | None:
        """The first element of a run of taps that lies in src, and that behind the last; None: all do."""
        b, conv = self.b, self.conv
        if not any(map(any, conv.padding)):
            return None
        tests = [
            b.compare("ult", spot, extent)
            for spot, extent, around in zip(inside[:-1], conv.src_spatial, conv.padding, strict=False)
            if any(around)
        ]
        low, high = (
            self._limited(edge - inside[-1], span) * conv.channels_per_group
            for edge in (0, conv.src_spatial[-1])
        )
        return low, b.select(b.both(tests), high, b.const(0, I64))

    def _limited(self, x: Value, most: int) -> Value:
        """Between 0 and the most."""
        larger = self.b.intrinsic("llvm.smax", I64, x, self.b.const(0, I64))
        return self.b.intrinsic("llvm.smin", I64, larger, self.b.const(most, I64))

    def _between(self, start: Index, elements: int, bounds: tuple[Value, Value]) -> Value:
        """A condition for each element of a vector from `start` on: whether it lies between bounds."""
        b, size = self.b, self.factors.channels
        b.module.declarations.add("declare i64 @llvm.x86.bmi.bzhi.64(i64, i64)")
        below = []
        for bound in bounds:
            number = self._limited(bound - start, elements)
            below.append(b.op(I64, f"call i64 @llvm.x86.bmi.bzhi.64(i64 -1, i64 {number.name})"))
        low, high = below
        bits = b.op(I64, f"and i64 {high.name}, {b.op(I64, f'xor i64 {low.name}, -1').name}")
        first = b.convert("trunc", bits, f"i{size}") if f"i{size}" != I64 else bits
        return b.op(vector(size, I1), f"bitcast {first.type} {first.name} to {vector(size, I1)}")

    def _put_parts(self, x: Value, place: Value) -> None:
        """Writes the parts of elements of f32, as `Thirds` has them, but for ties.

        Whole numbers round to an upper half: on a Xeon with AMX, copies take 0.6 of the time that they take
        with conversions. Large numbers leave a NaN behind, so that one test finds them.
        """
        b, left, parts = self.b, x, []
        for _ in range(2):
            parts.append(self._upper(b.convert("bitcast", left, "i32") + 0x8000))
            left = left - parts[-1]
        self._store_parts([*parts, left], place)
        flags, bits = b.compare("uno", left, 0.0), f"i{lanes_of(x.type)}"
        found = b.op(bits, f"bitcast {flags.type} {flags.name} to {bits}")
        with b.when(b.compare("ne", found, 0)):
            is_large = b.compare("uge", b.intrinsic("llvm.fabs", x.type, x), LARGE)
            parts = [b.select(is_large, 0.0, part) for part in parts]
            self._store_parts([*parts, b.select(is_large, x, left)], place)

    def _upper(self, bits: Value) -> Value:
        """Numbers of f32 of the upper halves of whole numbers."""
        kept = self.b.const(-0x10000, bits.type)
        upper = self.b.op(bits.type, f"and {bits.type} {bits.name}, {kept.name}")
        return self.b.convert("bitcast", upper, "float")

    def _store_parts(self, parts: Sequence[Value], place: Value) -> None:
        """Writes the upper half of each element of each part."""
        for number, part in enumerate(parts):
            kind = vector(2 * lanes_of(part.type), "i16")
            halves = self.b.op(kind, f"bitcast {part.type} {part.name} to {kind}")
            upper = self.b.shuffle(halves, halves, range(1, lanes_of(kind), 2))
            self.b.store(upper, self.b.at(place, number * PART_BYTES, "i8"), align=ROW_BYTES)
