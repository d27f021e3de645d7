"""Plans with an operator that has statistics: sums over channels first, then the elements, in one kernel.

Behind the template: which ways to cut a kernel are worth trying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil, log2, prod
from typing import ClassVar

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import formulas_of
from fuseplan.backends.triton.index import ceil_div, power_of_two
from fuseplan.backends.triton.resources import REGISTERS
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates import normalization_cost as cost
from fuseplan.backends.triton.templates.normalization_tiles import Cut, Knobs
from fuseplan.backends.triton.templates.normalization_writer import NormalizationWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, accuracy_claim, result_claim, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import calls

CANDIDATES = 26


@dataclass(frozen=True)
class GpuNormalization(Knobs, GpuTemplate):
    """Sums and moments over a channel or a place, and elementwise operators before and behind them.

    Groups of programs share a tile's rows or positions. Each program reduces its part, shares its sums,
    waits for the other programs of its group, and goes on, so that the whole plan is one kernel.

    reads:  src and operands per element once per reduction and once for dst; once in all where a program
            keeps them
    writes: dst and every result once
    chosen: for every plan with an operator that has statistics

    Attributes:
        form: `rows`: a tile has rows of channels or places; `planes`: positions of one channel.
        rows: rows of a tile; 1 for planes.
        columns: columns of a tile, or its positions.
        unrolled: tiles read at a time, in each pass; 0: a program reads all of its tiles once and keeps them.
        programs: programs of a group; they share the rows or positions of a tile.
        groups: groups of programs; they share the tiles.
        warps: warps of a program.
        resident: programs that a processor has to hold at a time.
    """

    name: ClassVar[str] = "normalization"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = (
        "the sum of |terms| of a reduction, and the result of each function of the formulas"
    )

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(bool(kernel.statistics) and not kernel.has_cells, Reason.NO_NORMALIZATION)
        yield result_claim(kernel)
        if not isinstance(accuracy, str):
            least = min(each.error_bound(kernel) for each in cls._made(kernel, target))
            yield accuracy_claim(least, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        made = cls._made(kernel, target)
        if not isinstance(accuracy, str):
            made = (each for each in made if each.error_bound(kernel) <= accuracy)
        yield from islice(made, CANDIDATES)

    @classmethod
    def _made(cls, kernel: Kernel, target: Target) -> Iterator[GpuNormalization]:
        """All that are worth a thought, the best guess first."""
        known = kernel.representative
        listed: Iterable[Knobs] = Space(known, target).choices()
        if kernel.open_axis is not None:  # a launch has any number of tiles, each of which has one program
            listed = (each for each in listed if (each.programs, each.groups) == (1, Cut(known, each).tiles))
        for each in sorted(listed, key=lambda choice: cost.seconds(known, target, choice)):
            yield cls(**vars(each))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        """Every pass counts as a read, although a cache may serve it; what is kept is read once."""
        written = kernel.written_bytes
        large = cost.kept_bytes(kernel)
        vectors = kernel.minimum_bytes - written - large
        read = large if not self.unrolled else sum(cost.read_per_pass(kernel))
        return Traffic(read + vectors, written, cost.passed_bytes(kernel, self))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return round(cost.seconds(kernel.representative, target, self), 7)

    def error_bound(self, kernel: Kernel) -> float:
        """One rounding for each addition that a term goes through, and the errors of the functions.

        A lane adds up what it reads, then lanes and programs are added in pairs: Higham, Accuracy and
        Stability of Numerical Algorithms, 2002, section 4.2. Moments take twice as many roundings.
        """
        cut = Cut(kernel, self)
        own = cut.steps * max(1, self.unrolled)
        pairs = sum(ceil(log2(count)) for count in (cut.block, cut.segment, self.programs))
        functions = dialect.relative_errors(formulas_of(kernel), kernel.dst.dtype)
        return 2 * (own + pairs + 2) * unit_roundoff(kernel) + functions

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return NormalizationWriter(self, kernel, target, self.text).source(target)


WIDTHS = (32, 64, 128, 256)  # bytes of a row in a tile
MOST = 255  # registers of a thread
MOST_THREADS = 2048  # of a processor
KEEPING, READING = 36, 20  # registers for all else
PLACE = 1.5  # registers that hold where a tile lies
LONG = {"exp", "expm1", "log", "log1p", "tanh", "erf", "pow"}
INSIDE = 8  # registers for an element inside of one of these
PASSED = 0.75  # registers for each number of the others that a thread reads at a time
RESIDENT = ((4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2))  # warps, programs of a processor
FEWEST = {4: 2, 8: 1, 16: 1}
UNROLLED = (0, 2, 4)
TURNS = (1, 2, 3, 4, 6, 8, 12, 16)  # tiles of a group
SMALL_AREA = 256  # positions up to which a tile may have several channels


class Space:
    """All cuts of a kernel on a GPU that are worth a thought."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.tensors = cost.kept_bytes(kernel) / kernel.src.nbytes
        self.numbers = max(len(reduction.names) for reduction in kernel.statistics)
        is_long = any(not LONG.isdisjoint(calls(formula)) for formula in formulas_of(kernel))
        self.inside = INSIDE if is_long else 0

    def choices(self) -> Sequence[Knobs]:
        """All whose programs registers hold; where none is, the one that spills least."""
        made = [each for each in self.made() if self.target.warp * each.warps * each.resident <= MOST_THREADS]
        return [each for each in made if self.fits(each)] or [min(made, key=self.registers)]

    def made(self) -> Iterator[Knobs]:
        """All, whether registers hold them or not."""
        vector = 16 // max(self.kernel.src.itemsize, self.kernel.dst.itemsize)
        for (form, columns), (warps, resident), unrolled in product(self.shapes(), RESIDENT, UNROLLED):
            tile = warps * self.target.warp * vector
            rows, width = (1, tile) if form == "planes" else (max(1, tile // columns), columns)
            yield from self.grids(Knobs(form, rows, width, unrolled, 1, 1, warps, resident))

    def shapes(self) -> Iterator[tuple[str, int]]:
        """Forms, and columns of a tile of rows; 0 for planes."""
        kernel = self.kernel
        area, channels = prod(kernel.dst.spatial), kernel.dst.channels
        per_place = kernel.reduction.per == "activation"
        if per_place or kernel.dst.is_channels_last or area == 1:
            across = area * channels if per_place else channels
            widths = [width // kernel.dst.itemsize for width in WIDTHS]
            fitting = [columns for columns in widths if columns < 2 * across]
            yield from (("rows", columns) for columns in fitting or [power_of_two(across)])
        else:
            yield "planes", 0
            if area <= SMALL_AREA:
                yield from (("rows", columns) for columns in (256, 512, 1024) if area <= columns)

    def grids(self, choice: Knobs) -> Iterator[Knobs]:
        """The numbers of groups and of programs in each that fill the GPU."""
        cut = Cut(self.kernel, choice)
        places = self.target.processors * choice.resident
        found = {(min(places // groups, cut.blocks), groups) for groups in shares(cut.tiles, places)}
        found |= {(1, cut.tiles)}  # more than are there at a time, if need be: alone, nobody waits
        for programs, groups in sorted(found):
            made = replace(choice, programs=programs, groups=groups)
            is_double = programs == 1 and choice.resident > FEWEST[choice.warps]
            if not is_double:
                yield made

    def fits(self, choice: Knobs) -> bool:
        """Whether the registers of a processor hold the programs."""
        return self.registers(choice) <= min(MOST, REGISTERS // (32 * choice.warps * choice.resident))

    def registers(self, choice: Knobs) -> float:
        """What a thread needs, nearly: of 230 kernels that spill over 100 bytes it foresees nine in ten."""
        threads = self.target.warp * choice.warps
        cut, each = Cut(self.kernel, choice), choice.rows * choice.columns / threads
        words, place = self.tensors * self.kernel.src.itemsize / 4, PLACE
        if not cut.is_aligned:  # each element has a register of its own, and so has its place
            words, place = max(self.tensors, words), each
        read = each * words * (cut.steps if cut.is_kept else choice.unrolled)
        is_wide = self.kernel.src.itemsize >= 4
        wide = each * (2 + (0 if is_wide else self.tensors) + self.inside)
        passed = self.numbers * power_of_two(choice.programs) * max(1, cut.numbers) / threads
        meeting = PASSED * passed if choice.programs > 1 else 0.0
        if cut.is_kept:
            return KEEPING + read + cut.steps * place + max(wide, meeting)
        return READING + max(read + choice.unrolled + wide, meeting)


def shares(tiles: int, places: int) -> Iterator[int]:
    """Numbers of groups that have as many tiles each, or nearly, and places for two programs or more."""
    yield from (ceil_div(tiles, each) for each in TURNS if 2 * ceil_div(tiles, each) <= places)
