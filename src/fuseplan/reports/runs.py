"""The report on the steps of a run."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping

from fuseplan.graph.memory import Buffer
from fuseplan.graph.node import told
from fuseplan.graph.ops import VIEWS
from fuseplan.graph.place import Call, Compute, Copy, Launch, Placed, Placement, Step, inputs_of
from fuseplan.kernels.target import Target
from fuseplan.reports.books import books
from fuseplan.reports.report import Report
from fuseplan.reports.rows import CopyRow


def report_of(placement: Placement, target: Target | str, ran: Mapping[int, str] | None = None) -> Report:
    """The report on the steps of a run.

    Args:
        ran: what runs the operators of another library, by the identity of the node; without it,
            the library's word stands for it.
    """
    libraries: collections.Counter[str] = collections.Counter()
    for step in placement.steps:
        if isinstance(step, Call):
            libraries.update((ran or {}).get(id(node), step.unit.library) for node in step.unit.nodes)
    by_numpy = sum(isinstance(step, Compute) and not _is_copy(step) for step in placement.steps)
    copies = tuple(_copies(placement))
    return books(placement.cut, target, numpy=by_numpy, libraries=libraries, copies=copies)


def _copies(placement: Placement) -> Iterator[CopyRow]:
    """Copies between steps, and views of elements that do not lie so."""
    for index, step in enumerate(placement.steps):
        if not _is_copy(step) or not isinstance(step, Copy | Compute) or step.dst is None:
            continue
        buffer = step.dst.buffer
        value = step.value if isinstance(step, Copy) else step.node.outputs[0]
        readers = (each for each in placement.steps[index + 1 :] if _reads(each, buffer))
        nbytes = 2 * math.prod(buffer.shape) * buffer.dtype.itemsize
        yield CopyRow(value, nbytes, next(map(_told, readers), "the outputs"))


def _is_copy(step: Step) -> bool:
    """Whether a step gives the same elements: a copy, or a view whose elements do not lie so."""
    is_view = isinstance(step, Compute) and isinstance(step.node.op, VIEWS) and step.dst is not None
    return isinstance(step, Copy) or is_view


def _reads(step: Step, buffer: Buffer) -> bool:
    return any(isinstance(each, Placed) and each.buffer is buffer for each in inputs_of(step))


def _told(step: Step) -> str:
    if isinstance(step, Launch):
        return str(step.site.plan)
    if isinstance(step, Copy):
        return f"a copy of {step.value}"
    return told(step.node if isinstance(step, Compute) else step.unit.nodes[0])
