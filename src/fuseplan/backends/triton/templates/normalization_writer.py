"""Writes the text of the kernels with reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Known, Place, argument
from fuseplan.backends.triton.resources import PARTITIONS, REGISTERS
from fuseplan.backends.triton.templates.normalization_meeting import Meeting
from fuseplan.backends.triton.templates.normalization_reader import ONCE, Held, Reader
from fuseplan.backends.triton.templates.normalization_reducer import Reducer
from fuseplan.backends.triton.templates.normalization_tiles import Knobs
from fuseplan.backends.triton.templates.pointwise_writer import STORED, ceil_div
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target

MOST = 255  # registers of a thread


class NormalizationWriter:
    """Writes one kernel.

    A program reads its blocks of the group's tile once a reduction and once more to write dst, or keeps them;
    every second pass runs backwards, to meet what the second cache still holds.
    """

    def __init__(self, knobs: Knobs, kernel: Kernel, target: Target, title: str) -> None:
        self.knobs, self.kernel, self.target, self.title = knobs, kernel, target, title
        self.text = Text()
        self.reader = Reader(kernel, knobs, self.text)
        self.cut, self.stages = self.reader.cut, self.reader.elements.stages
        self.meeting = Meeting(
            self.text,
            knobs.programs,
            knobs.groups,
            self.cut.numbers,
            max(len(each.names) for each in kernel.reductions),
            self.reader.compute,
            repeats=self.cut.tiles > knobs.groups,
        )
        self.reducer = Reducer(self.reader, self.meeting)
        workspace = (Slot("workspace"),) if self.meeting.is_needed else ()
        results = (Slot("result", each.key) for each in kernel.results)
        self.slots = (Slot("src"), *self.reader.elements.slots, Slot("dst"), *results, *workspace)

    def source(self) -> Source:
        """The whole kernel."""
        text, knobs = self.text, self.knobs
        text.line("import triton", "import triton.language as tl", "", "")
        text.line(*(f"# {line}" for line in [self.title, *self.kernel.text.splitlines()]))
        text.line("@triton.jit")
        with text.block(f"def normalization({', '.join(argument(slot) for slot in self.slots)})"):
            self._body()
        return Source(
            str(text),
            "normalization",
            self.slots,
            workspace_bytes=self.meeting.workspace_bytes,
            language="triton",
            grid=(knobs.programs * knobs.groups, 1, 1),
            options=tuple(self._options()),
        )

    def _options(self) -> Iterator[tuple[str, int]]:
        """A program that meets others must run beside them: its registers are limited to its share."""
        warps, resident = self.knobs.warps, self.knobs.resident
        yield "num_warps", warps
        yield "num_stages", 1
        if not self.meeting.is_needed:
            return
        yield "cooperative", 1
        most = REGISTERS // (warps * 32 * resident)
        if self.target.name.startswith("gfx"):
            yield "waves_per_eu", ceil_div(warps * resident, PARTITIONS)
        elif most < MOST:
            yield "maxnreg", most

    def _body(self) -> None:
        text, programs = self.text, self.knobs.programs
        text.line("program = tl.program_id(0)")
        if self.meeting.is_needed:
            text.line(f"member = program % {programs}", f"group = program // {programs}")
        else:
            text.line("group = program")
        self.meeting.begin()
        if self.meeting.repeats:
            with text.block(f"for tile in range(group, {self.cut.tiles}, {self.knobs.groups})"):
                self._tile()
        else:
            text.line("tile = group")
            self._tile()
        self.meeting.end()

    def _tile(self) -> None:
        """All passes over one tile."""
        self.reader.begin()
        held = self.reader.read_all() if self.cut.is_kept else []
        for number, reduction in enumerate(self.kernel.reductions):
            self.reducer.reduce(reduction, held, is_backward=number % 2 == 1)
        self._write(held, is_backward=len(self.kernel.reductions) % 2 == 1)
        self._results()

    def _write(self, held: Sequence[Held], *, is_backward: bool) -> None:
        """The last pass."""
        reader, known = self.reader, self.reader.known(self.stages)
        self.text.line("# dst")
        for each in held:
            self._write_tile(each, known)
        if held:
            return
        formulas = [stage.expression for stage in self.kernel.epilogue]
        with reader.blocks(is_backward) as places:
            for each in reader.read_next(places, formulas, ONCE):
                self._write_tile(each, known)

    def _write_tile(self, held: Held, known: Known) -> None:
        place = held.tile.place
        x = self.reader.element(held)
        result = self.reader.elements.apply(x, place, held.operands, known)
        is_compute = self.kernel.dst.dtype == self.kernel.compute_dtype
        stored = result if is_compute else f"{result}.to(tl.{STORED[self.kernel.dst.dtype]})"
        mask = f", mask={place.mask}" if place.mask else ""
        self.text.line(f"tl.store(dst + {place.element}, {stored}{mask}{ONCE})")

    def _results(self) -> None:
        if not self.kernel.results:
            return
        if self.meeting.is_needed:
            with self.text.block("if member == 0"):
                self._write_results()
        else:
            self._write_results()

    def _write_results(self) -> None:
        text, (channel, mask) = self.text, self.cut.channel
        masked, others = (f", mask={mask}", ", other=0.0") if mask else ("", "")
        for result in self.kernel.results:
            text.line(f"# {result.key}")
            where = f"{argument(Slot('result', result.key))} + {self.cut.result}"
            if result.updated:
                self.reader.elements.given[result.key] = text.let("old", f"tl.load({where}{masked}{others})")
            known = self.reader.elements.prepare(
                channel, mask, [(result.key, dialect.simplified(result.expression))]
            )
            (made,) = self.reader.elements.values(
                [dialect.simplified(result.expression)], "", self._vector(), None, known
            )
            text.line(f"tl.store({where}, {made}{masked})")

    def _vector(self) -> Place:
        """The numbers of a tile as if they were its elements."""
        channel, mask = self.cut.channel
        return Place("", channel, "column", mask, mask)
