"""Builds a vector from elements that lie anywhere in a short stretch of memory: few loads, then shuffles.

Which elements is known when the kernel is written, so a shift, every second element, or a row with zeros
beside it cost a load or two and a shuffle or two. Nothing outside the stretch is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.cpu.ir import Builder, Value

Positions = tuple[int | None, ...]


class Stretch:
    """Elements `low` to `high` (not included) after an address, in the compute type.

    What was made is kept, so an object serves code that runs straight through, without a branch. `fill` is
    what lies where no element does.
    """

    def __init__(self, b: Builder, address: Value, low: int, high: int, fill: float = 0.0) -> None:
        self.b, self.address, self.low, self.high, self.fill = b, address, low, high, fill
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
            self._loaded[start] = self.b.load_first(self.b.at(self.address, start), count, self.b.vector)
        return self._loaded[start]


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
