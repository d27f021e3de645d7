"""Reduces the elements of a tile to its channels' numbers: a program's, then those of all in its group.

Moments are never differences of large sums. In a loop a lane's are Welford's ("Note on a method for
calculating corrected sums of squares and products", Technometrics 4, 1962). Elements at hand, and parts, are
put together around a guess of their common mean, whose error is taken out again: Chan, Golub and LeVeque,
"Algorithms for computing the sample variance", The American Statistician 37, 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.index import Index, arange, as_index, power_of_two
from fuseplan.backends.triton.templates.meeting import Meeting
from fuseplan.backends.triton.templates.normalization_reader import Reader
from fuseplan.backends.triton.templates.normalization_tiles import Tile
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.kernel import Stage
from fuseplan.language import reduction
from fuseplan.language.reduction import Statistic


@dataclass
class Moments:
    """Names of parts' means, and of the sums of squares around them; `count`: elements of each part."""

    count: str
    mean: str
    square: str


def together(text: Text, parts: Moments, total: str, axis: int = 0) -> Moments:
    """The moments of parts along an axis as those of all: `total` elements."""
    back = "[:, None]" if axis else ""
    weighted = text.let("weighted", f"{parts.mean} * {parts.count}")
    guess = text.let("guess", f"tl.sum({weighted}, {axis}) / {total}")
    off = text.let("off", f"{parts.mean} - {guess}{back}")
    moved = text.let("moved", f"{off} * {parts.count}")
    first = text.let("first", f"tl.sum({moved}, {axis})")
    second = text.let("second", f"tl.sum({parts.square} + {moved} * {off}, {axis})")
    return around(text, guess, first, second, total)


def around(text: Text, guess: str, first: str, second: str, total: str) -> Moments:
    """The moments of `total` elements whose deviations from a guess, and their squares, have these sums."""
    mean = text.let("mean", f"{guess} + {first} / {total}")
    square = text.let("square", f"{second} - {first} * ({first} / {total})")
    return Moments(total, mean, square)


Take = Callable[[list[str], str], None]  # takes a reduction's expressions of a tile, where they exist
Visit = Callable[[Take, Sequence[str]], None]  # gives tiles of the program; names that are counted on


class Reducer:
    """Writes the passes that reduce."""

    def __init__(self, reader: Reader, meeting: Meeting) -> None:
        self.reader, self.meeting = reader, meeting
        self.text, self.cut, self.knobs = reader.text, reader.cut, reader.knobs
        self.compute, self.count = reader.compute, reader.kernel.reduced_count

    def reduce(self, statistic: Statistic, held: Sequence[Tile], *, is_backward: bool) -> None:
        """One pass; its numbers are given to all formulas behind it.

        Args:
            held: the program's tiles, where it keeps them; else they are read in a loop.
            is_backward: the last block first.
        """
        self.text.line(f"# {statistic.text}")
        formulas = [dialect.simplified(each) for each in statistic.expressions]
        elements = self.reader.elements
        known = self.reader.known([Stage(0, statistic.word, each) for each in formulas])

        def given(tiles: Sequence[Tile], take: Take, into: Sequence[str]) -> None:
            def write(each: Tile) -> None:
                x = self.reader.element(each)
                take(elements.values(formulas, x, replace(each.place, known=known)), str(each.exists))

            self.reader.each(self.text.name("add"), tiles, write, into)

        def read(places: Sequence[Index], take: Take, into: Sequence[str]) -> None:
            given(self.reader.read_next(places, statistic.expressions), take, into)

        def visit(take: Take, into: Sequence[str]) -> None:
            if held:
                given(held, take, into)
                return
            with self.reader.blocks(is_backward) as places:
                read(places, take, into)

        def moments() -> list[str]:
            pivot = self._pivot(partial(read, [as_index(0)])) if self.compute == "tl.float64" else ""
            first = self._apart(partial(given, held[:1]), pivot) if held else None
            return self._moments(self._apart(visit, pivot), first, pivot)

        codes = {reduction.Sums: lambda: self._sums(len(statistic.names), visit), reduction.Moments: moments}
        made = codes[type(statistic)]()
        elements.given |= dict(zip(statistic.names, made, strict=True))

    def _sums(self, count: int, visit: Visit) -> list[str]:
        made = self._totals(count, visit)
        if self.meeting.is_needed:
            made = [self.text.let("total", f"tl.sum({name}, 0)") for name in self.meeting.exchange(made)]
        return made

    def _totals(self, count: int, visit: Visit) -> list[str]:
        """Sums of all that the program has of a channel."""
        text = self.text
        held = [text.name("total") for _ in range(count)]
        text.line(*(f"{name} = tl.zeros({self.reader.shape}, {self.compute})" for name in held))

        def take(values: list[str], exists: str) -> None:
            for name, value in zip(held, values, strict=True):
                text.line(f"{name} += {f'tl.where({exists}, {value}, 0.0)' if exists else value}")

        visit(take, held)
        made = [text.let("total", f"tl.sum({name}, 0)") for name in held]
        if self.cut.segment > 1:
            made = [self.text.let("total", f"tl.sum({name}, 1)") for name in self._segments(made)]
        return made

    def _pivot(self, visit_same: Visit) -> str:
        """The mean of each channel's first block, which is the same number in every program.

        Sums in float64 are as wide as what they sum: of distances from this number they keep digits that the
        rounding of a large mean would cost. It is zero where the mean is not finite.
        """
        (total,) = self._totals(1, visit_same)
        count = min(self.cut.block, self.cut.extent) * self.cut.segment
        mean = self.text.let("pivot", f"{total} / {float(count)!r}")
        return self.text.let("pivot", f"tl.where({mean} - {mean} == 0.0, {mean}, 0.0)")

    def _apart(self, visit: Visit, pivot: str) -> Visit:
        """The same tiles, as distances from a number of each channel; as they are without one."""
        if not pivot:
            return visit
        each = self._by_column(pivot)

        def shifted(take: Take, into: Sequence[str]) -> None:
            def near(made: list[str], exists: str) -> None:
                take([self.text.let("near", f"{made[0]} - {each}")], exists)

            visit(near, into)

        return shifted

    def _by_column(self, number: str) -> str:
        """A number of each channel where its columns are."""
        return self.text.let("guess", f"tl.gather({number}, which, 0)") if self.cut.spreads else number

    def _moments(self, visit: Visit, first: Visit | None, pivot: str) -> list[str]:
        """Mean and variance; tiles are less `pivot`. `first` gives the first one, where tiles are kept."""
        text = self.text
        own = self._named("own", self._share(self.reader.member))
        found = self._of_kept(visit, first, own) if first else self._of_read(visit, own)
        every = f"{float(self.count)!r}"
        if self.meeting.is_needed:
            mean, square = self.meeting.exchange([found.mean, found.square])
            found = together(text, Moments(self._shares(), mean, square), every)
        mean = text.let("mean", f"{found.mean} + {pivot}") if pivot else found.mean
        return [mean, text.let("variance", f"{found.square} / {every}")]

    def _of_kept(self, visit: Visit, first: Visit, own: str) -> Moments:
        """Of what is at hand: the mean of the first tile, then all deviations from it.

        Of n tiles, their squares are at most 1 + n times those from the mean: that much is lost to
        cancellation, at most. The first tile is whole where it is not the only one.
        """
        text = self.text
        (total,) = self._totals(1, first)
        count = own if self.cut.steps == 1 else f"{self.cut.block}.0"
        guess = text.let("guess", f"{total} / {self._numbers_of(count)}")
        each = self._by_column(guess)

        def deviate(take: Take, into: Sequence[str]) -> None:
            def apart(made: list[str], exists: str) -> None:
                off = text.let("off", f"{made[0]} - {each}")
                take([off, f"{off} * {off}"], exists)

            visit(apart, into)

        moved, squares = self._totals(2, deviate)
        return around(text, guess, moved, squares, self._numbers_of(own))

    def _numbers_of(self, columns: str) -> str:
        """How many elements a channel has where each of its columns has so many: a number or a name."""
        segment = self.cut.segment
        if segment == 1:
            return columns
        is_name = columns.isidentifier()
        return f"({columns} * {segment}.0)" if is_name else f"{float(columns) * segment!r}"

    def _named(self, stem: str, value: str) -> str:
        """A number as it is, anything else by a name."""
        return value if value.replace(".", "").isdigit() else self.text.let(stem, value)

    def _of_read(self, visit: Visit, own: str) -> Moments:
        """In one pass over memory, each lane by itself, element by element: Welford's."""
        text, cut, shape, compute = self.text, self.cut, self.reader.shape, self.compute
        count, mean, square = text.name("count"), text.name("mean"), text.name("square")
        counts = "tl.full((), 0"
        if not cut.is_even:  # elements may be missing
            counts = f"tl.zeros({shape if cut.is_planes else f'({self.knobs.rows}, 1)'}"
        zeros = f"tl.zeros({shape}, {compute})"
        text.line(f"{count} = {counts}, {compute})", f"{mean} = {zeros}", f"{square} = {zeros}")

        def take(made: list[str], exists: str) -> None:
            (value,) = made
            one, seen = "1.0", count
            if not cut.is_even:
                one, seen = f"tl.where({exists}, 1.0, 0.0)", f"tl.maximum({count}, 1.0)"
            text.line(f"{count} += {one}")
            share = text.let("share", f"1.0 / {seen}")
            if not cut.is_even:
                value = text.let("value", f"tl.where({exists}, {value}, {mean})")
            off = text.let("off", f"{value} - {mean}")
            text.line(f"{mean} += {off} * {share}", f"{square} += {off} * ({value} - {mean})")

        visit(take, (count, mean, square))
        found = together(text, Moments(count, mean, square), own)
        return self._joined(found, own) if cut.segment > 1 else found

    def _segments(self, lanes: Sequence[str]) -> list[str]:
        """Vectors of columns as matrices of a row a channel; zero where there is no position."""
        text, cut = self.text, self.cut
        area = power_of_two(cut.segment)
        at = text.index(text.name("at"), arange(cut.numbers * area))
        column = at // area * cut.segment + at % area
        index = text.index(text.name("index"), column)
        inside = text.mask(text.name("inside"), (at % area < cut.segment) & (index < cut.width))
        if index.high >= self.knobs.columns:
            text.line(f"{index} = tl.minimum({index}, {self.knobs.columns - 1})")
        shape = f"({cut.numbers}, {area})"
        gathered = [f"tl.gather({name}, {index}, 0)" for name in lanes]
        if inside:
            gathered = [f"tl.where({inside}, {each}, 0.0)" for each in gathered]
        return [text.let("segments", f"tl.reshape({each}, {shape})") for each in gathered]

    def _joined(self, lanes: Moments, own: str) -> Moments:
        """The moments of columns as those of channels."""
        text = self.text
        ones = text.let("ones", f"tl.zeros_like({lanes.mean}) + {own}")
        count, mean, square = self._segments([ones, lanes.mean, lanes.square])
        return together(text, Moments(count, mean, square), self._numbers_of(own), axis=1)

    def _share(self, member: Index) -> str:
        """Rows or positions of a program, as a number of the compute dtype."""
        cut, programs = self.cut, self.knobs.programs
        if programs == 1:
            return f"{cut.extent}.0"
        block = cut.block * max(1, self.knobs.unrolled)
        blocks = (cut.blocks + programs - 1 - member) // programs
        missing = cut.blocks * block - cut.extent
        less = f" - tl.where({member} == {(cut.blocks - 1) % programs}, {missing}.0, 0.0)" if missing else ""
        if blocks.constant is not None:
            return f"{blocks.constant * block}.0{less}"
        return f"({blocks}).to({self.compute}) * {block}.0{less}"

    def _shares(self) -> str:
        """What every program of the group has seen, a channel."""
        cut, programs = self.cut, self.knobs.programs
        text = self.text
        member = text.index(text.name("members"), arange(power_of_two(programs)))
        share, exists = self._share(member), member < programs
        share = f"tl.where({exists}, {share}, 0.0)" if exists else f"tl.zeros_like({member}) + {share}"
        share = text.let("shares", share)
        if cut.segment > 1:
            share = text.let("shares", f"{share} * {cut.segment}.0")
        return f"{share}[:, None]" if cut.numbers else share
