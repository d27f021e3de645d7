"""Direct convolution of a transposed one with a stride: a convolution for each residue, in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import larger, offset_of, places
from fuseplan.backends.cpu.staging import Staged
from fuseplan.backends.cpu.templates.direct_writer import DirectKnobs, DirectWriter
from fuseplan.backends.cpu.tiling import Tiling, serving, tiling
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Join, Step, Take
from fuseplan.kernels.target import Target
from fuseplan.kernels.transposed import Run, every, of_residues, widest


def largest(kernel: Kernel) -> Kernel:
    """The kernel of the residue with the most outputs and taps, for estimates; any other kernel as it is."""
    if not kernel.contraction.is_transposed:
        return kernel
    made = _padded(kernel.contraction)
    dst = kernel.dst.with_shape((*kernel.dst.shape[:2], *made.dst_spatial))
    return replace(kernel, centre=made, dst=dst)


def _padded(conv: Contraction) -> Contraction:
    """The widest convolution; none begins inside src."""
    made = widest(conv)
    return replace(made, padding=tuple((max(0, low), high) for low, high in made.padding))


def rows_fit(kernel: Kernel, rows: int) -> bool:
    """Whether tiles of so many positions cover every residue; channels first, whole lines or parts of one."""
    counts = [[run[0].count for run in runs] for runs in every(kernel.contraction)]
    if model.features_innermost(kernel) or _is_single(kernel.contraction):
        return rows <= min(map(prod, counts)) * kernel.dst.batch
    return all(
        rows <= each[-1] or (rows % each[-1] == 0 and len(each) > 1 and each[-2] % (rows // each[-1]) == 0)
        for each in counts
    )


def _is_single(conv: Contraction) -> bool:
    """Whether a residue has one output of an image: positions are images then."""
    return all(run[0].count == 1 for runs in every(conv) for run in runs)


def by_residues(conv: Contraction, steps: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """The steps of a weight, which are told for each combination of runs, for each residue of these."""
    chains = []
    for runs, rest in zip(every(conv), steps, strict=True):
        for of in product(*runs):
            chains.append((*(Take(2 + axis, each.taps) for axis, each in enumerate(of)), *rest))
    return (Join(tuple(chains)),)


class ResidueWriter(DirectWriter):
    """Writes the tasks of a run of residues along each axis.

    Args:
        runs: of the residues.
        known: the contraction with numbers.
        common: how src is found by all of them.
        src: what the loops read.
        weight: elements of the packed weight in front of that of the first of these residues.
    """

    def __init__(
        self,
        knobs: DirectKnobs,
        frame: Frame,
        runs: Sequence[Run],
        known: Contraction,
        common: Staged,
        src: Value,
        weight: int,
    ) -> None:
        self.frame, whole = frame, frame.kernel.contraction
        self.dot, self.runs, self.ahead = None, runs, weight
        of = [run[0] for run in runs]
        self._set(knobs, frame.kernel, of_residues(whole, of))
        self.is_single = _is_single(whole)
        self.per_image &= not self.is_single
        self.staged = replace(common, convolution=self.conv)
        ahead = (low - each.low for low, each in zip(common.low, of, strict=True))
        self.src = self.b.at(src, offset_of(ahead, common.strides))
        planned = replace(common, convolution=of_residues(known, of))
        sheets = [1 if self.per_image else each.batch for each in (known, self.conv)]
        covering = tiling(
            planned,
            knobs.rows,
            self.image * sheets[0],
            plain=True,
            scattered=self.innermost or self.is_single,
        )
        self.tiling = replace(covering, staged=self.staged, positions=self.image * sheets[1])
        self.tilings = serving(self.b, self.tiling, self.image)
        self.fetched = self._fetched(covering.count)
        # dst as src is found: its positions lie a stride apart.
        pitch = self.kernel.pitch if self.innermost else 1
        spread = replace(self.conv, stride=whole.stride, channels=pitch)
        self._dst = Staged(spread, False, (), whole.dst_spatial)
        self._lengths = [len(run) for run in runs]
        self.size = self.conv.groups * self.panels * self.depth * self.panel
        self.count = prod(self._lengths)

    def each_residue(self, write: Callable[[Index], None], task: Index) -> None:
        """Writes a task for each residue, a loop where there are several."""
        if self.count == 1:
            self._residue(0)
            write(task)
            return
        with self.b.loop(0, self.count, name="residue") as number:
            self._residue(number)
            write(task)

    def _residue(self, number: Index) -> None:
        """The residue whose outputs are written next."""
        packed = self.frame.pointer("operand", self.kernel.weight.key)
        self.weight = self.b.at(packed, number * self.size + self.ahead)
        at = zip(self.runs, places(number, self._lengths), strict=True)
        self._begin = offset_of((run[0].begin + place for run, place in at), self._dst.strides)

    def _elements(self, tiles: Tiling, image: Index | None, position: Index) -> Iterable[Index]:
        lying = replace(tiles, staged=self._dst)
        distances = lying.distances()
        if distances is None:
            return [lying.offset(self.b, position + r, image) + self._begin for r in range(tiles.rows)]
        first = lying.offset(self.b, position, image) + self._begin
        return [first + distance for distance in distances]

    def _runs(self, tiles: Tiling, plane: Index, position: Index) -> Iterator[tuple[int, Index, int, int]]:
        size, rows = self._dst.image, tiles.rows
        if self.is_single:
            image = size * self.conv.features
            yield 0, plane * size + position * image + self._begin, rows, image
            return
        lying = replace(tiles, staged=self._dst)
        first, distances = lying.offset(self.b, position, plane) + self._begin, lying.distances() or ()
        width = min(rows, tiles.width)
        for begin in range(0, rows, width):
            yield begin, first + distances[begin], width, self._dst.convolution.stride[-1]


def source(knobs: DirectKnobs, kernel: Kernel, target: Target) -> Source:
    """A task is a block of each residue's outputs, neighbours in dst; src is copied before them."""
    known = kernel.contraction
    parts = list(every(known))
    frame = Frame(knobs, kernel, target, workspace=_common(kernel, parts).copies)
    common = _common(frame.kernel, parts)
    src = staging.emit(frame, common, frame.pointer("workspace" if common.copies else "src"))
    writers, weight = list[ResidueWriter](), 0
    for runs in parts:
        writers.append(ResidueWriter(knobs, frame, runs, known, common, src, weight))
        weight += writers[-1].count * writers[-1].size
    shared = [(writer, *writer.shared_out()) for writer in writers]
    most = shared[0][1]
    for _, tasks, _ in shared[1:]:
        if isinstance(most, int) and isinstance(tasks, int):
            most = max(most, tasks)
        else:
            most = larger(frame.body, most, tasks)
    with frame.tasks(most) as task:
        for writer, tasks, write in shared:
            with frame.body.when(frame.body.compare("slt", task, tasks)):
                writer.each_residue(write, task)
    return frame.source(**common.workspace())


def _common(kernel: Kernel, parts: Sequence[Sequence[Run]]) -> Staged:
    """How src is found: with the padding of all residues."""
    wide, extents = _padded(kernel.contraction), list[int]()
    for axis, (low, _) in enumerate(wide.padding):
        along = [runs[axis][0] for runs in parts]
        ends = (each.count + (len(each.taps) - 1) * each.step - each.low for each in along)
        extents.append(low + max(1, *ends))
    return staging.staged(replace(kernel, centre=wide), extents=extents)
