"""Direct convolution of a transposed one with a stride: a convolution for each residue, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import offset_of
from fuseplan.backends.cpu.staging import Staged
from fuseplan.backends.cpu.templates.direct_writer import DirectKnobs, DirectWriter
from fuseplan.backends.cpu.tiling import Tiling, is_per_image, tiling
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Join, Step, Take
from fuseplan.kernels.target import Target
from fuseplan.kernels.transposed import Residue, every, of_residues, widest


def largest(kernel: Kernel) -> Kernel:
    """The kernel of the residue with the most outputs and taps, for estimates; any other kernel as it is."""
    conv = kernel.contraction
    if not conv.is_transposed:
        return kernel
    made = widest(conv)
    made = replace(made, padding=tuple((max(0, low), high) for low, high in made.padding))
    dst = kernel.dst.with_shape((*kernel.dst.shape[:2], *made.dst_spatial))
    return replace(kernel, centre=made, dst=dst)


def most_rows(kernel: Kernel) -> int:
    """Positions of the largest tile that every residue has: channels first, those of a line."""
    counts = [[each.count for each in of] for of in every(kernel.contraction)]
    if not model.features_innermost(kernel):
        return min(each[-1] for each in counts)
    return min(map(prod, counts)) * (1 if is_per_image(kernel) else kernel.dst.batch)


def by_residues(conv: Contraction, steps: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """The steps of a weight, which are told for the taps of each residue, as one result after another."""
    taken = (tuple(Take(2 + axis, each.taps) for axis, each in enumerate(of)) for of in every(conv))
    return (Join(tuple((*taps, *rest) for taps, rest in zip(taken, steps, strict=True))),)


class ResidueWriter(DirectWriter):
    """Writes the tasks of one residue.

    Args:
        knobs: of the template.
        frame: the kernel being written.
        of: the residue along each axis.
        common: how src is found by all of them.
        src: what the loops read.
    """

    def __init__(
        self, knobs: DirectKnobs, frame: Frame, of: Sequence[Residue], common: Staged, src: Value
    ) -> None:
        self.frame, whole = frame, frame.kernel.contraction
        self.stored, self.of = None, of
        self._set(knobs, frame.kernel, of_residues(whole, of))
        self.staged = replace(common, convolution=self.conv)
        ahead = (low - each.low for low, each in zip(common.low, of, strict=True))
        self.src = self.b.at(src, offset_of(ahead, common.strides))
        sheet = self.image * (1 if self.per_image else self.conv.batch)
        self.tiling = tiling(self.staged, knobs.rows, sheet, plain=True, scattered=self.innermost)
        self.tilings = [(self.tiling, Value(self.b, "i1", "true"))]
        # dst as src is found: its positions lie a stride apart.
        pitch = self.kernel.pitch if self.innermost else 1
        spread = replace(self.conv, stride=whole.stride, channels=pitch)
        self._dst = Staged(spread, False, (), whole.dst_spatial)
        self._begin = offset_of((each.begin for each in of), self._dst.strides)

    def _elements(self, tiles: Tiling, image: Index | None, position: Index) -> list[Index]:
        lying = replace(tiles, staged=self._dst)
        distances = lying.distances()
        if distances is None:
            return [lying.offset(self.b, position + r, image) + self._begin for r in range(tiles.rows)]
        first = lying.offset(self.b, position, image) + self._begin
        return [first + distance for distance in distances]

    def _run(self, tiles: Tiling, plane: Index, position: Index) -> tuple[Index, int]:
        lying = replace(tiles, staged=self._dst)
        return lying.offset(self.b, position, plane) + self._begin, self._dst.convolution.stride[-1]


def source(knobs: DirectKnobs, kernel: Kernel, target: Target) -> Source:
    """A task is a block of each residue's outputs, neighbours in dst; src is copied before them."""
    conv = kernel.contraction
    parts = list(every(conv))
    common = _common(kernel, parts)
    frame = Frame(knobs, kernel, target, workspace=common.copies)
    src = staging.emit(frame, common, frame.pointer("workspace" if common.copies else "src"))
    writers, weight = [], 0
    for of in parts:
        writer = ResidueWriter(knobs, frame, of, common, src)
        writer.weight = frame.body.at(writer.weight, weight)
        weight += writer.conv.groups * writer.panels * writer.depth * writer.panel
        writers.append(writer.shared_out())
    most = max(int(tasks) for tasks, _ in writers)
    with frame.tasks(most) as task:
        for tasks, write in writers:
            with ExitStack() as guard:
                if tasks < most:
                    guard.enter_context(frame.body.when(frame.body.compare("slt", task, tasks)))
                write(task)
    return frame.source(**common.workspace(model.itemsize(kernel)))


def _common(kernel: Kernel, parts: Sequence[Sequence[Residue]]) -> Staged:
    """How src is found: with the padding of all residues."""
    wide = largest(kernel)
    low = [pair[0] for pair in wide.contraction.padding]
    extents = [
        max(
            front + 1,
            *(
                front - of[axis].low + of[axis].count + (len(of[axis].taps) - 1) * of[axis].step
                for of in parts
            ),
        )
        for axis, front in enumerate(low)
    ]
    return staging.staged(wide, extents=extents)
