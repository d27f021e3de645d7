"""Reduces the elements of a tile to its channels' numbers: a program's, then those of all in its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.templates.normalization_meeting import Meeting
from fuseplan.backends.triton.templates.normalization_reader import Held, Reader
from fuseplan.backends.triton.templates.normalization_sums import Moments, Sums, Welford, around, together
from fuseplan.backends.triton.templates.pointwise_writer import power_of_two
from fuseplan.reduction import Reduction

Take = Callable[[list[str], str], None]  # takes a reduction's expressions of a tile, where they exist
Visit = Callable[[Take], None]  # gives tiles of the program


class Reducer:
    """Writes the passes that reduce."""

    def __init__(self, reader: Reader, meeting: Meeting) -> None:
        self.reader, self.meeting = reader, meeting
        self.text, self.cut, self.knobs = reader.text, reader.cut, reader.knobs
        self.compute, self.count = reader.compute, reader.kernel.reduced_count

    def reduce(self, reduction: Reduction, held: Sequence[Held], *, is_backward: bool) -> None:
        """One pass; its numbers are given to all formulas behind it.

        Args:
            reduction: what is reduced.
            held: the program's tiles, where it keeps them; else they are read in a loop.
            is_backward: the last block first.
        """
        self.text.line(f"# {reduction.text}")
        formulas = [dialect.simplified(each) for each in reduction.expressions]
        elements = self.reader.elements
        known = self.reader.known([(reduction.kind, each) for each in formulas])

        def give(each: Held, take: Take) -> None:
            x = self.reader.element(each)
            take(elements.values(formulas, x, each.tile.place, each.operands, known), each.tile.exists)

        def visit(take: Take) -> None:
            for each in held:
                give(each, take)
            if held:
                return
            with self.reader.blocks(is_backward) as places:
                for each in self.reader.read_next(places, reduction.expressions):
                    give(each, take)

        if reduction.kind == "sums":
            made = self._sums(len(reduction.names), visit)
        else:
            pivot = self._pivot(reduction, give) if self.compute == "tl.float64" else ""
            first = self._apart(lambda take: give(held[0], take), pivot) if held else None
            made = self._moments(self._apart(visit, pivot), first, pivot)
        elements.given |= dict(zip(reduction.names, made, strict=True))

    def _sums(self, count: int, visit: Visit) -> list[str]:
        made = self._totals(count, visit)
        if self.meeting.is_needed:
            made = [self.text.let("total", f"tl.sum({name}, 0)") for name in self.meeting.exchange(made)]
        return made

    def _totals(self, count: int, visit: Visit) -> list[str]:
        """Sums of all that the program has of a channel."""
        sums = Sums(self.text, self.reader.shape, self.compute, count)
        sums.begin()
        visit(sums.take)
        made = [self.text.let("total", f"tl.sum({name}, 0)") for name in sums.held]
        if self.cut.segment > 1:
            made = [self.text.let("total", f"tl.sum({name}, 1)") for name in self._segments(made)]
        return made

    def _pivot(self, reduction: Reduction, give: Callable[[Held, Take], None]) -> str:
        """The mean of each channel's first block, which is the same number in every program.

        Sums in float64 are as wide as what they sum: of distances from this number they keep digits that the
        rounding of a large mean would cost. It is zero where the mean is not finite.
        """
        (block,) = self.reader.read_next(["0"], reduction.expressions)
        (total,) = self._totals(1, lambda take: give(block, take))
        count = min(self.cut.block, self.cut.extent) * self.cut.segment
        mean = self.text.let("pivot", f"{total} / {float(count)!r}")
        return self.text.let("pivot", f"tl.where({mean} - {mean} == 0.0, {mean}, 0.0)")

    def _apart(self, visit: Visit, pivot: str) -> Visit:
        """The same tiles, as distances from a number of each channel; as they are without one."""
        if not pivot:
            return visit
        each = self._by_column(pivot)

        def shifted(take: Take) -> None:
            visit(lambda made, exists: take([self.text.let("near", f"{made[0]} - {each}")], exists))

        return shifted

    def _by_column(self, number: str) -> str:
        """A number of each channel where its columns are."""
        return self.text.let("guess", f"tl.gather({number}, which, 0)") if self.cut.segment > 1 else number

    def _moments(self, visit: Visit, first: Visit | None, pivot: str) -> list[str]:
        """Mean and variance; tiles are less `pivot`. `first` gives the first one, where tiles are kept."""
        text = self.text
        own = text.let("own", self._share(self.reader.member))
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
        text, segment = self.text, self.cut.segment
        many = f" * {segment}.0" if segment > 1 else ""
        (total,) = self._totals(1, first)
        guess = text.let(
            "guess", f"{total} / ({own if self.cut.steps == 1 else f'{self.cut.block}.0'}{many})"
        )
        each = self._by_column(guess)

        def deviate(take: Take) -> None:
            def apart(made: list[str], exists: str) -> None:
                off = text.let("off", f"{made[0]} - {each}")
                take([off, f"{off} * {off}"], exists)

            visit(apart)

        moved, squares = self._totals(2, deviate)
        return around(text, guess, moved, squares, f"({own}{many})")

    def _of_read(self, visit: Visit, own: str) -> Moments:
        """In one pass over memory, each lane by itself."""
        is_cut, shape = not self.cut.is_even, self.reader.shape
        welford = Welford(self.text, shape, self.compute, is_cut)
        welford.begin(shape if self.cut.is_planes else f"({self.knobs.rows}, 1)")
        visit(lambda made, exists: welford.take(made[0], exists))
        found = together(self.text, welford.held, own)
        return self._joined(found, own) if self.cut.segment > 1 else found

    def _segments(self, lanes: Sequence[str]) -> list[str]:
        """Vectors of columns as matrices of a row a channel; zero where there is no position."""
        text, cut = self.text, self.cut
        area = power_of_two(cut.segment)
        size = cut.numbers * area
        at = text.let("at", f"tl.arange(0, {size})")
        index = text.let("index", f"({at} // {area}) * {cut.segment} + {at} % {area}")
        inside = text.let("inside", f"({at} % {area} < {cut.segment}) & ({index} < {cut.width})")
        text.line(f"{index} = tl.minimum({index}, {self.knobs.columns - 1})")
        shape = f"({cut.numbers}, {area})"
        gathered = [f"tl.where({inside}, tl.gather({name}, {index}, 0), 0.0)" for name in lanes]
        return [text.let("segments", f"tl.reshape({each}, {shape})") for each in gathered]

    def _joined(self, lanes: Moments, own: str) -> Moments:
        """The moments of columns as those of channels."""
        text, segment = self.text, self.cut.segment
        ones = text.let("ones", f"tl.zeros_like({lanes.mean}) + {own}")
        count, mean, square = self._segments([ones, lanes.mean, lanes.square])
        return together(text, Moments(count, mean, square), f"({own} * {segment}.0)", axis=1)

    def _share(self, member: str) -> str:
        """Rows or positions of a program, as a number of the compute dtype."""
        cut, programs = self.cut, self.knobs.programs
        if programs == 1:
            return f"tl.full((), {cut.extent}, {self.compute})"
        block = cut.block * max(1, self.knobs.unrolled)
        share = f"(({cut.blocks + programs - 1} - {member}) // {programs}).to({self.compute}) * {block}.0"
        missing = cut.blocks * block - cut.extent
        if missing:
            share += f" - tl.where({member} == {(cut.blocks - 1) % programs}, {missing}.0, 0.0)"
        return share

    def _shares(self) -> str:
        """What every program of the group has seen, a channel."""
        cut, count = self.cut, power_of_two(self.knobs.programs)
        text = self.text
        member = text.let("members", f"tl.arange(0, {count})")
        share = text.let("shares", f"tl.where({member} < {self.knobs.programs}, {self._share(member)}, 0.0)")
        if cut.segment > 1:
            share = text.let("shares", f"{share} * {cut.segment}.0")
        return f"{share}[:, None]" if cut.numbers else share
