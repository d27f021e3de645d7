"""Builds a vector from elements that lie anywhere in a short stretch of memory: few loads, then shuffles.

Which elements is known when the kernel is written, so a shift, every second element, or a row with zeros
beside it cost a load or two and a shuffle or two. Nothing outside the stretch is read.

A square of L vectors of L lanes is transposed in registers, rows in, columns out. Two levels, as the hardware
has them: squares inside 128-bit lanes by interleaving, then the 128-bit lanes themselves. For 16 floats that
is 64 two-source shuffles, each one instruction on AVX-512; for 8 floats 24 on AVX2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import BITS, element_of, lanes_of

Positions = tuple[int | None, ...]


class Stretch:
    """Elements `low` to `high` (not included) after an address, in the compute type.

    What was made is kept, so an object serves code that runs straight through, without a branch. `fill` is
    what lies where no element does. `read(start, count)` reads elements of another dtype, or changes them.
    """

    def __init__(
        self,
        b: Builder,
        address: Value,
        low: int,
        high: int,
        fill: float = 0.0,
        read: Callable[[int, int], Value] | None = None,
    ) -> None:
        self.b, self.address, self.low, self.high, self.fill = b, address, low, high, fill
        self._read = read or self._plain
        self._loaded: dict[int, Value] = {}
        self._made: dict[Positions, Value] = {}

    def vector(self, positions: Sequence[int | None]) -> Value:
        """The elements at the positions, `fill` for None; lanes after the last position hold anything."""
        key = tuple(positions)
        if key not in self._made:
            self._made[key] = self._vector(key)
        return self._made[key]

    def _vector(self, positions: Positions) -> Value:
        starts = self._starts(sorted({at for at in positions if at is not None}))
        return combined(self.b, [(start, self._load(start)) for start in starts], positions, self.fill)

    def _starts(self, wanted: Sequence[int]) -> list[int]:
        """Where to load: the fewest vectors; of two ways the one whose vectors other positions need too."""
        lanes = self.b.lanes
        aligned, free = [
            self._cover(wanted, [at - (at - self.low) % lanes if whole else at for at in wanted])
            for whole in (True, False)
        ]
        return aligned if len(aligned) <= len(free) else free

    def _cover(self, wanted: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Loads that hold all wanted positions; `starts` says where to begin one for each position."""
        chosen: list[int] = []
        for at, start in zip(wanted, starts, strict=True):
            if not chosen or at >= chosen[-1] + self.b.lanes:
                chosen.append(max(self.low, min(start, self.high - self.b.lanes)))
        return chosen

    def _load(self, start: int) -> Value:
        if start not in self._loaded:
            count = min(self.b.lanes, self.high - start)
            self._loaded[start] = self._read(start, count)
        return self._loaded[start]

    def _plain(self, start: int, count: int) -> Value:
        return self.b.load_first(self.b.at(self.address, start), count, self.b.vector)


def combined(
    b: Builder, pieces: Sequence[tuple[int, Value]], positions: Sequence[int | None], fill: float = 0.0
) -> Value:
    """The elements at the positions, `fill` for None, out of vectors that begin at known places.

    Lanes after the last position hold anything. A piece that holds none of the positions costs nothing.
    """
    lanes = b.lanes
    holder = [_holder(at, pieces, lanes) for at in positions]
    needed = [number for number in range(len(pieces)) if number in holder]
    if not needed:
        return b.number(fill)
    found, where = pieces[needed[0]][1], list(range(lanes))
    for number in needed:
        begin = pieces[number][0]
        # Where each lane's element is by now: in `found`, or in the piece that is shuffled into it.
        for lane, at in enumerate(positions):
            if at is not None and holder[lane] == number:
                where[lane] = at - begin + (lanes if number != needed[0] else 0)
        if number != needed[0]:
            found, where = b.shuffle(found, pieces[number][1], where), list(range(lanes))
    if None in positions:
        outside = [at is None for at in positions] + [False] * (lanes - len(positions))
        picked = [lanes if is_outside else place for is_outside, place in zip(outside, where, strict=True)]
        return b.shuffle(found, b.number(fill), picked)
    return found if where == list(range(lanes)) else b.shuffle(found, found, where)


def _holder(at: int | None, pieces: Sequence[tuple[int, Value]], lanes: int) -> int | None:
    """Which piece has the element."""
    if at is None:
        return None
    return next(number for number, (start, _) in enumerate(pieces) if 0 <= at - start < lanes)


_LANE_BITS = 128


def transposed(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """Column i of the square whose rows are given, for each i."""
    lanes = lanes_of(rows[0].type)
    if lanes != len(rows):
        raise ValueError(f"a square has as many rows as lanes: got {len(rows)} rows of {lanes}")
    width = min(lanes, _LANE_BITS // BITS[element_of(rows[0].type)])
    groups = lanes // width
    # inner[g][q]: in 128-bit lane l, column l*width + q of rows g*width ... g*width + width - 1
    inner = [_square(b, rows[g * width : (g + 1) * width], width) for g in range(groups)]
    columns: list[Value | None] = [None] * lanes
    for q in range(width):
        for lane, column in enumerate(_lanes(b, [inner[g][q] for g in range(groups)], width)):
            columns[lane * width + q] = column
    return [column for column in columns if column is not None]


def _square(b: Builder, rows: Sequence[Value], width: int) -> list[Value]:
    """Transposes the width x width squares that stand in each 128-bit lane."""
    if width == 1:
        return list(rows)
    if width == 2:
        return [_interleaved(b, rows[0], rows[1], 1, high, 2) for high in (False, True)]
    low01, high01 = (_interleaved(b, rows[0], rows[1], 1, high, 4) for high in (False, True))
    low23, high23 = (_interleaved(b, rows[2], rows[3], 1, high, 4) for high in (False, True))
    pairs = ((low01, low23), (high01, high23))
    return [_interleaved(b, first, second, 2, high, 4) for first, second in pairs for high in (False, True)]


def _lanes(b: Builder, groups: Sequence[Value], width: int) -> list[Value]:
    """Vector l has 128-bit lane l of each group, in order."""
    if len(groups) == 1:
        return list(groups)
    if len(groups) == 2:
        return [_picked(b, groups[0], groups[1], (lane, 2 + lane), width) for lane in (0, 1)]
    halves = [
        [_picked(b, groups[g], groups[g + 1], lanes, width) for g in (0, 2)]
        for lanes in ((0, 1, 4, 5), (2, 3, 6, 7))
    ]
    return [
        _picked(b, first, second, lanes, width)
        for first, second in halves
        for lanes in ((0, 2, 4, 6), (1, 3, 5, 7))
    ]


def _interleaved(b: Builder, first: Value, second: Value, size: int, high: bool, width: int) -> Value:
    """In each 128-bit lane, blocks of `size` from the low or high half of first and second in turn."""
    lanes = lanes_of(first.type)
    picked: list[int] = []
    for start in range(0, lanes, width):
        half = start + (width // 2 if high else 0)
        for block in range(half, half + width // 2, size):
            picked += [block + i for i in range(size)] + [lanes + block + i for i in range(size)]
    return b.shuffle(first, second, picked)


def _picked(b: Builder, first: Value, second: Value, lanes: Sequence[int], width: int) -> Value:
    """128-bit lanes of first followed by second, picked by number."""
    return b.shuffle(first, second, [lane * width + i for lane in lanes for i in range(width)])
