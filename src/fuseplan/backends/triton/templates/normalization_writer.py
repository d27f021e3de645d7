"""Writes the text of the kernels with reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, Stages, argument
from fuseplan.backends.triton.resources import PARTITIONS, REGISTERS
from fuseplan.backends.triton.templates.normalization_meeting import Meeting
from fuseplan.backends.triton.templates.normalization_sums import Moments, Sums, Welford, in_turn, together
from fuseplan.backends.triton.templates.normalization_tiles import Cut, Knobs, Tile
from fuseplan.backends.triton.templates.pointwise_writer import STORED, ceil_div, power_of_two
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel, Stage
from fuseplan.reduction import Reduction
from fuseplan.scalar import Scalar, leaves_of
from fuseplan.target import Target

MOST = 255  # registers of a thread


@dataclass
class Held:
    """A tile that was read: names of src, as it is stored, and of the operands per element by key."""

    tile: Tile
    x: str
    operands: dict[str, str] = field(default_factory=dict)


Values = Callable[[Held], list[str]]  # names of what a reduction's expressions are of a tile
Take = Callable[[list[str], str], None]  # adds them, where elements exist, to what was found before


class NormalizationWriter:
    """Writes one kernel.

    A program reads its blocks of the group's tile once a reduction and once more to write dst, or keeps them;
    every second pass runs backwards, to meet what the second cache still holds.
    """

    def __init__(self, knobs: Knobs, kernel: Kernel, target: Target, title: str) -> None:
        self.knobs, self.kernel, self.target, self.title = knobs, kernel, target, title
        self.cut = Cut(kernel, knobs)
        self.text = Text()
        self.elements = Elementwise(kernel, "epilogue", self.text)
        self.compute = f"tl.{dialect.COMPUTE[kernel.src.dtype]}"
        self.before = _simplified(kernel.prologue)
        most = max(len(each.names) for each in kernel.reductions)
        self.meeting = Meeting(
            self.text,
            knobs.programs,
            knobs.groups,
            self.cut.numbers,
            most,
            self.compute,
            repeats=self.cut.tiles > knobs.groups,
        )
        workspace = (Slot("workspace"),) if self.meeting.is_needed else ()
        results = (Slot("result", each.key) for each in kernel.results)
        self.slots = (Slot("src"), *self.elements.slots, Slot("dst"), *results, *workspace)
        self.shape = f"({knobs.columns},)" if self.cut.is_planes else f"({knobs.rows}, {knobs.columns})"

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
        self.elements.given.clear()
        self.cut.columns(self.text)
        self._preload()
        before = self._known(self.before)
        held = self._read_all() if self.cut.is_kept else []
        for number, reduction in enumerate(self.kernel.reductions):
            self._reduce(reduction, held, before, is_backward=number % 2 == 1)
        self._write(held, before, is_backward=len(self.kernel.reductions) % 2 == 1)
        self._results()

    # ---- what is per channel

    def _preload(self) -> None:
        """Reads what is per channel or shared; per place too, where that is what the numbers are per."""
        channel, mask = self.cut.channel
        masked = f", mask={mask}, other=0.0" if mask else ""
        for operand in self.elements.operands:
            pointer = argument(Slot("operand", operand.key))
            if operand.per == "shared":
                where = ""
            elif operand.per == "channel":
                where = f" + {channel}{masked}"
            elif operand.per == "activation" and self.cut.per_place:
                where = f" + column{masked}"
            else:
                continue
            self.elements.given[operand.key] = self.text.let(operand.key, f"tl.load({pointer}{where})")

    def _known(self, stages: Stages) -> Known:
        known = self.elements.prepare(*self.cut.channel, stages)
        return self.elements.spread(known, "which", stages) if self.cut.segment > 1 else known

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
        mask = mask if self.cut.segment > 1 or self.cut.is_planes or self.cut.is_exact else "has_column"
        masked, others = (f", mask={mask}", ", other=0.0") if mask else ("", "")
        for result in self.kernel.results:
            text.line(f"# {result.key}")
            where = f"{argument(Slot('result', result.key))} + {self.cut.result}"
            if result.updated:
                self.elements.given[result.key] = text.let("old", f"tl.load({where}{masked}{others})")
            known = self.elements.prepare(
                channel, mask, [(result.key, dialect.simplified(result.expression))]
            )
            (made,) = self.elements.values(
                [dialect.simplified(result.expression)], "", self._vector(), None, known
            )
            text.line(f"tl.store({where}, {made}{masked})")

    def _vector(self) -> Place:
        """The numbers of a tile as if they were its elements."""
        channel, mask = self.cut.channel
        return Place("", channel, "column", mask, mask)

    # ---- passes

    @contextmanager
    def _blocks(self, is_backward: bool) -> Iterator[list[str]]:
        """A loop over the program's blocks; the texts of its tiles' places."""
        text, cut, programs = self.text, self.cut, self.knobs.programs
        member = "member" if self.meeting.is_needed else "0"
        steps = str(cut.steps)
        if cut.blocks % programs:
            steps = text.let("steps", f"({cut.blocks + programs - 1} - {member}) // {programs}")
        with text.block(f"for step in range(0, {steps})"):
            step = f"({steps} - 1 - step)" if is_backward else "step"
            block = text.let("block", f"{member} + {step} * {programs}" if programs > 1 else step)
            many = self.knobs.unrolled
            yield [f"({block} * {many} + {each})" if many > 1 else block for each in range(many)]

    def _read_all(self) -> list[Held]:
        """Reads all tiles of the program."""
        cut, programs, held = self.cut, self.knobs.programs, []
        formulas = [each for reduction in self.kernel.reductions for each in reduction.expressions]
        member = "member" if self.meeting.is_needed else "0"
        for step in range(cut.steps):
            is_last = step == cut.steps - 1
            is_cut = is_last and cut.extent < cut.steps * programs * cut.block
            tile = cut.tile(self.text, f"({member} + {step * programs})", is_cut)
            held.append(self._read(tile, [*formulas, *self._formulas], self._hint(True)))
        return held

    @property
    def _formulas(self) -> list[Scalar]:
        """The formulas of the last pass."""
        return [stage.expression for stage in self.kernel.epilogue]

    def _hint(self, is_last: bool) -> str:
        return ', eviction_policy="evict_first"' if is_last else ""

    def _read(self, tile: Tile, formulas: Sequence[Scalar], hint: str) -> Held:
        """Begins reading what formulas need of a tile."""
        used = frozenset().union(*map(leaves_of, formulas))
        if "x" in used:
            used |= frozenset().union(*(leaves_of(formula) for _, formula in self.before))
        mask = f", mask={tile.place.mask}, other=0.0" if tile.place.mask else ""
        x = self.text.let("x", f"tl.load(src + {tile.source}{mask}{hint})") if "x" in used else ""
        operands = {
            operand.key: self.text.let(
                operand.key,
                f"tl.load({argument(Slot('operand', operand.key))} + {tile.place.element}{mask}{hint})",
            )
            for operand in self.elements.operands
            if operand.per == "element" and operand.key in used
        }
        return Held(tile, x, operands)

    def _element(self, held: Held, before: Known) -> str:
        """What the prologue gives of a tile, in the compute dtype."""
        if not held.x:
            return ""
        is_compute = self.kernel.src.dtype == self.kernel.compute_dtype
        x = held.x if is_compute else self.text.let("x", f"{held.x}.to({self.compute})")
        return self.elements.apply(x, held.tile.place, held.operands, before, self.before)

    def _reduce(self, reduction: Reduction, held: Sequence[Held], before: Known, is_backward: bool) -> None:
        """One pass, and the numbers of all programs of the group put together."""
        text = self.text
        formulas = [dialect.simplified(each) for each in reduction.expressions]
        known = self._known([(reduction.kind, each) for each in formulas])

        def values(each: Held) -> list[str]:
            return self.elements.values(
                formulas, self._element(each, before), each.tile.place, each.operands, known
            )

        text.line(f"# {reduction.text}")
        if reduction.kind == "moments":
            made = self._moments(reduction, held, values, is_backward)
        else:
            made = self._sums(reduction, held, values, is_backward)
        self.elements.given |= dict(zip(reduction.names, made, strict=True))

    def _loop(self, reduction: Reduction, values: Values, take: Take, is_backward: bool) -> None:
        """Reads the program's blocks, and hands on the values of each tile."""
        with self._blocks(is_backward) as places:
            tiles = [self.cut.tile(self.text, place, not self.cut.is_even) for place in places]
            read = [self._read(tile, reduction.expressions, self._hint(False)) for tile in tiles]
            for each in read:
                take(values(each), each.tile.exists)

    def _sums(
        self, reduction: Reduction, held: Sequence[Held], values: Values, is_backward: bool
    ) -> list[str]:
        """The sums of all elements of the tile's channels."""
        sums = Sums(self.text, self.shape, self.compute, len(reduction.names))
        sums.begin()
        for each in held:
            sums.take(values(each), each.tile.exists)
        if not held:
            self._loop(reduction, values, sums.take, is_backward)
        made = [self.text.let("total", f"tl.sum({name}, 0)") for name in sums.held]
        if self.cut.segment > 1:
            made = [self.text.let("total", f"tl.sum({name}, 1)") for name in self._segments(made)]
        if self.meeting.is_needed:
            made = [self.text.let("total", f"tl.sum({name}, 0)") for name in self.meeting.exchange(made)]
        return made

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

    def _moments(
        self, reduction: Reduction, held: Sequence[Held], values: Values, is_backward: bool
    ) -> list[str]:
        """Mean and variance of all elements of the tile's channels."""
        text, cut = self.text, self.cut
        if held:
            each = (values(tile)[0] for tile in held)
            parts = in_turn(text, each, len(held), held[-1].tile.exists, self.compute)
        else:
            welford = Welford(text, self.shape, self.compute, not cut.is_even)
            welford.begin(f"({self.knobs.columns},)" if cut.is_planes else f"({self.knobs.rows}, 1)")
            self._loop(reduction, values, lambda made, exists: welford.take(made[0], exists), is_backward)
            parts = welford.held
        member = "member" if self.meeting.is_needed else "0"
        own = text.let("own", self._share(member))
        found = together(text, parts, own)
        if cut.segment > 1:
            found = self._joined(found, own)
        if self.meeting.is_needed:
            mean, square = self.meeting.exchange([found.mean, found.square])
            found = together(
                text, Moments(self._shares(), mean, square), f"{float(self.kernel.reduced_count)!r}"
            )
        variance = text.let("variance", f"{found.square} / {float(self.kernel.reduced_count)!r}")
        return [found.mean, variance]

    def _joined(self, lanes: Moments, own: str) -> Moments:
        """The moments of columns as those of channels."""
        text, segment = self.text, self.cut.segment
        ones = text.let("ones", f"tl.zeros_like({lanes.mean}) + {own}")
        count, mean, square = self._segments([ones, lanes.mean, lanes.square])
        return together(text, Moments(count, mean, square), f"({own} * {segment}.0)", axis=1)

    def _share(self, member: str) -> str:
        """Rows or positions of a program, as a number of the compute dtype."""
        cut, programs = self.cut, self.knobs.programs
        block = cut.block * max(1, self.knobs.unrolled)
        steps = f"(({cut.blocks + programs - 1} - {member}) // {programs})"
        missing = cut.blocks * block - cut.extent
        rows = f"{steps} * {block}"
        if missing:
            rows += f" - tl.where({member} == {(cut.blocks - 1) % programs}, {missing}, 0)"
        if member == "0":
            return f"tl.full((), {cut.extent}, {self.compute})"
        return f"({rows}).to({self.compute})"

    def _shares(self) -> str:
        """What every program of the group has seen, a channel."""
        cut, count = self.cut, power_of_two(self.knobs.programs)
        text = self.text
        member = text.let("members", f"tl.arange(0, {count})")
        share = text.let("shares", f"tl.where({member} < {self.knobs.programs}, {self._share(member)}, 0.0)")
        if cut.segment > 1:
            share = text.let("shares", f"{share} * {cut.segment}.0")
        return f"{share}[:, None]" if cut.numbers else share

    def _write(self, held: Sequence[Held], before: Known, is_backward: bool) -> None:
        """The last pass."""
        known = self._known(self.elements.stages)
        self.text.line("# dst")
        for each in held:
            self._write_tile(each, before, known)
        if held:
            return
        with self._blocks(is_backward) as places:
            tiles = [self.cut.tile(self.text, place, not self.cut.is_even) for place in places]
            read = [self._read(tile, self._formulas, self._hint(True)) for tile in tiles]
            for each in read:
                self._write_tile(each, before, known)

    def _write_tile(self, held: Held, before: Known, known: Known) -> None:
        place = held.tile.place
        result = self.elements.apply(self._element(held, before), place, held.operands, known)
        is_compute = self.kernel.dst.dtype == self.kernel.compute_dtype
        stored = result if is_compute else f"{result}.to(tl.{STORED[self.kernel.dst.dtype]})"
        mask = f", mask={place.mask}" if place.mask else ""
        self.text.line(f"tl.store(dst + {place.element}, {stored}{mask}{self._hint(True)})")


def _simplified(stages: Sequence[Stage]) -> Stages:
    return tuple((stage.op_text, dialect.simplified(stage.expression)) for stage in stages)
