"""Writes the text of the kernels with reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Place, argument
from fuseplan.backends.triton.index import Index, as_index, number
from fuseplan.backends.triton.resources import together
from fuseplan.backends.triton.shell import Writer, programs_of
from fuseplan.backends.triton.templates.meeting import Meeting
from fuseplan.backends.triton.templates.normalization_reader import ONCE, Reader
from fuseplan.backends.triton.templates.normalization_reducer import Reducer
from fuseplan.backends.triton.templates.normalization_tiles import Knobs, Tile
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel, Stage
from fuseplan.kernels.target import Target


class NormalizationWriter(Writer):
    """Writes one kernel.

    A program reads its blocks of the group's tile once a reduction and once more to write dst, or keeps them;
    every second pass runs backwards, to meet what the second cache still holds.
    """

    entry = "normalization"

    def __init__(self, knobs: Knobs, kernel: Kernel, target: Target, title: str) -> None:
        super().__init__(kernel, title)
        self.knobs, self.target = knobs, target
        self.reader = Reader(kernel, knobs, self.text)
        self.cut, self.stages = self.reader.cut, self.reader.elements.stages
        self.groups = self.cut.launched if self.is_open else as_index(knobs.groups)
        self.meeting = Meeting(
            self.text,
            knobs.programs,
            knobs.groups,
            self.cut.numbers,
            max(len(each.names) for each in kernel.statistics),
            self.reader.compute,
            repeats=not self.is_open and self.cut.tiles > knobs.groups,
        )
        self.reducer = Reducer(self.reader, self.meeting)
        self.workspace_bytes, self.options = self.meeting.workspace_bytes, tuple(self._options())
        results = (Slot("result", each.key) for each in kernel.results)
        self.tensors = (Slot("src"), *self.reader.elements.slots, Slot("dst"), *results)
        most = 0 if self.is_open else knobs.programs * knobs.groups
        self.programs = programs_of(kernel, self.cut.count, self.cut.width, knobs.programs, most)

    def _options(self) -> Iterator[tuple[str, int]]:
        yield "num_warps", self.knobs.warps
        yield "num_stages", 1
        if self.meeting.is_needed:
            yield from together(self.target, self.knobs.warps, self.knobs.resident)

    def write_body(self) -> None:
        text, knobs = self.text, self.knobs
        _, group = self.meeting.begin(self.groups)
        if self.meeting.repeats:
            with text.block(f"for tile in range({group}, {self.cut.tiles}, {knobs.groups})"):
                self._tile(number("tile", self.cut.tiles))
        else:
            self._tile(group)
        self.meeting.end()

    def _tile(self, tile: Index) -> None:
        """All passes over one tile."""
        self.reader.begin(tile)
        held = self.reader.read_all() if self.cut.is_kept else []
        for place, reduction in enumerate(self.kernel.statistics):
            self.reducer.reduce(reduction, held, is_backward=place % 2 == 1)
        self._write(held, is_backward=len(self.kernel.statistics) % 2 == 1)
        if self.kernel.results:
            with self.meeting.first():
                self._results()

    def _write(self, held: Sequence[Tile], *, is_backward: bool) -> None:
        """The last pass."""
        reader, known = self.reader, self.reader.known(self.stages)
        self.text.line("# dst")

        def write(each: Tile) -> None:
            reader.elements.store(reader.element(each), replace(each.place, known=known), ONCE)

        if held:
            reader.each("finish", held, write)
            return
        with reader.blocks(is_backward) as places:
            reader.each("finish", reader.read_next(places, self.kernel.last_formulas, ONCE), write)

    def _results(self) -> None:
        text, cut, elements = self.text, self.cut, self.reader.elements
        guard = cut.has_channel
        place = Place("", str(cut.channel), str(cut.channel), str(guard), str(guard))
        for result in self.kernel.results:
            text.line(f"# {result.key}")
            where = Index(argument(Slot("result", result.key))) + cut.result
            if result.updated:
                elements.given[result.key] = text.let("old", f"tl.load({where}{guard.guard()})")
            formula = dialect.simplified(result.expression)
            known = elements.prepare(place.channel, place.channel_mask, [Stage(0, result.key, formula)])
            (made,) = elements.values([formula], "", replace(place, known=known))
            text.line(f"tl.store({where}, {made}{guard.guard(other='')})")
