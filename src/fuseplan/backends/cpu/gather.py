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

    What was made is kept, so an object serves code that runs straight through, without a branch.
    """

    def __init__(self, b: Builder, address: Value, low: int, high: int) -> None:
        self.b, self.address, self.low, self.high = b, address, low, high
        self._loaded: dict[int, Value] = {}
        self._made: dict[Positions, Value] = {}

    def vector(self, positions: Sequence[int | None]) -> Value:
        """The elements at the positions, zero for None; lanes after the last position hold anything."""
        key = tuple(positions)
        if key not in self._made:
            self._made[key] = self._vector(key)
        return self._made[key]

    def _vector(self, positions: Positions) -> Value:
        b, lanes = self.b, self.b.lanes
        starts = self._starts(sorted({at for at in positions if at is not None}))
        if not starts:
            return b.number(0.0)
        picked = [_first_start(at, starts, lanes) for at in positions]
        # Where each lane's element is by now: in `found`, or in what is shuffled into it next.
        found, where = self._load(starts[0]), list(range(lanes))
        for lane, (at, start) in enumerate(zip(positions, picked, strict=True)):
            if at is not None and start == starts[0]:
                where[lane] = at - start
        for start in starts[1:]:
            for lane, at in enumerate(positions):
                if at is not None and picked[lane] == start:
                    where[lane] = lanes + at - start
            found, where = b.shuffle(found, self._load(start), where), list(range(lanes))
        if None in positions:
            zeros = [lane for lane, at in enumerate(positions) if at is None]
            return b.shuffle(
                found, b.number(0.0), [lanes if i in zeros else place for i, place in enumerate(where)]
            )
        return found if where == list(range(lanes)) else b.shuffle(found, found, where)

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


def _first_start(at: int | None, starts: Sequence[int], lanes: int) -> int | None:
    return next((start for start in starts if at is not None and 0 <= at - start < lanes), None)
