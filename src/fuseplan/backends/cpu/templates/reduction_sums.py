"""Sums over all cells beside statistics of each: a row for each task, and the rows added in their order.

The tasks follow from the kernel alone, so that results do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import pieces
from fuseplan.backends.cpu.templates.reduction_loops import Offsets, Unit, rounded
from fuseplan.backends.cpu.templates.reduction_spots import Known, Pass, Spots
from fuseplan.backends.lattice import KEPT
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.dtypes import dtype_of

ROWS = 64  # at most: tasks that have sums of their own
COLUMNS = 256  # that a task adds
LINE = 64  # bytes of a line of the caches


def columns_of(kernel: Kernel) -> int:
    """Columns of a sum, of which there is one or more."""
    return kernel.sums[0].nbytes // dtype_of(kernel.sums[0].dtype).itemsize


def sum_bytes(kernel: Kernel, tasks: int) -> int:
    """Bytes of the sums of all tasks."""
    if not kernel.sums:
        return 0
    row = rounded(columns_of(kernel) * dtype_of(kernel.compute_dtype).itemsize, LINE)
    return tasks * len(kernel.sums) * row


class ColumnSums:
    """Writes the sums of one kernel.

    Args:
        kernel: has sums.
        tasks: as many as have sums of their own.
        keeps_x: the elements behind the prologue lie in `KEPT`.
    """

    def __init__(self, frame: Frame, kernel: Kernel, spots: Spots, tasks: int, *, keeps_x: bool) -> None:
        self.frame, self.b, self.kernel, self.spots, self.tasks = frame, frame.body, kernel, spots, tasks
        terms = {each.key: spots.formulas((), (), each.expression) for each in kernel.sums}
        stages, source = ((), KEPT) if keeps_x else (kernel.prologue, "src")
        self.way = Pass(spots, stages, terms, source=source)
        self._row = sum_bytes(kernel, tasks) // (tasks * len(kernel.sums))
        self._known: Known = {}
        self.rooms: dict[str, Value] = {}

    def _room(self, task: Index, place: int) -> Value:
        """Where a task's row of a sum begins."""
        offset = (task * len(self.kernel.sums) + place) * self._row
        return self.b.at(self.frame.pointer("workspace"), offset, "i8")

    def begin(self, task: Index) -> None:
        """The task's sums are zero."""
        for place, each in enumerate(self.kernel.sums):
            room = self.rooms[each.key] = self._room(task, place)

            def clear(at: Index, count: int, room: Value = room) -> None:
                storage.write_at(self.b, self.kernel.compute_dtype, self.b.number(0.0), room, at, count)

            pieces(self.b, columns_of(self.kernel), self.b.lanes, clear, name="clear")

    def prepare(self, unit: Unit) -> None:
        """What all elements of a cell have in common."""
        self._known = self.way.prepared(unit)

    def add(self, unit: Unit, places: Sequence[Offsets], count: int, at: Index) -> None:
        """Adds the terms of vectors of elements to the task's sums."""
        known = self.way.known(unit, self._known, at, count)
        spots = [self.spots.spot(unit, place, count, at) for place in places]
        for spot, x in self.way.made(spots, known, keeps=False):
            for key, room in self.rooms.items():
                (term,) = self.way.terms[key].values(x, spot, known)
                where, dtype = spot.offsets[key], self.kernel.compute_dtype
                before = storage.read_at(self.b, dtype, room, where, count)
                storage.write_at(self.b, dtype, before + term, room, where, count)

    def finish(self) -> None:
        """The rows of all tasks, added in their order: a phase of tasks of some columns each."""
        self.frame.wait(self.tasks)
        columns = columns_of(self.kernel)
        across = -(-columns // COLUMNS)
        with self.frame.tasks(across) as task:
            start = task * COLUMNS
            within = start, self.b.smaller(start + COLUMNS, columns)
            for place in range(len(self.kernel.sums)):
                add = partial(self._add_rows, place)
                pieces(self.b, columns, self.b.lanes, add, name="column", within=within)

    def _add_rows(self, place: int, at: Index, count: int) -> None:
        total, dtype = self.b.variable(self.b.vector, 0.0), self.kernel.compute_dtype
        with self.b.loop(0, self.tasks, name="row") as row:
            total.set(total.get() + storage.read_at(self.b, dtype, self._room(row, place), at, count))
        made, to = self.kernel.sums[place], self.frame.pointer("result", self.kernel.sums[place].key)
        storage.write_at(self.b, made.dtype, total.get(), to, at, count)
