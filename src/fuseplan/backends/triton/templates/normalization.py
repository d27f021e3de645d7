"""Plans with an operator that has statistics: sums over channels first, then the elements, in one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, log2
from typing import ClassVar

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import formulas_of
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates import normalization_cost as cost
from fuseplan.backends.triton.templates.normalization_choice import Space
from fuseplan.backends.triton.templates.normalization_tiles import Cut, Knobs
from fuseplan.backends.triton.templates.normalization_writer import NormalizationWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, accuracy_claim, result_claim, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import calls

MOST = 26  # candidates


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
        yield from islice(made, MOST)

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
        names = (name for formula in formulas_of(kernel) for name in calls(formula))
        functions = sum(dialect.relative_error(name, kernel.dst.dtype) for name in names)
        return 2 * (own + pairs + 2) * unit_roundoff(kernel) + functions

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return NormalizationWriter(self, kernel, target, self.text).source()
