"""The report on a model: rows that are plain records, whose fields are its JSON, and a record that prints."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fuseplan.errors import counted, refusing
from fuseplan.messages.quantities import bytes_text, seconds_text
from fuseplan.system import limits
from fuseplan.system.gathering import gathered
from fuseplan.system.reading import Record, bytes_of, json_of, record


class Printed(Record):
    """A record that prints."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of its text."""
        raise NotImplementedError


@dataclass(frozen=True)
class OperatorRow:
    """What became of an operator of the framework.

    Attributes:
        name: its name in the model.
        kind: its kind there: `Conv`, `aten.relu.default`.
        line: the line of Python that wrote it; empty where the model does not tell.
        state: `fused` (a plan's kernel computes it), `folded` (computed before the model runs, computed
            once for all calls, or taken away), `view` (the same elements), or `left`.
        sites: numbers of the sites that compute it; several where it is several operators of plans.
        reads: names of the operators whose values it reads; of those that run.
        moved: bytes that it reads and writes by itself.
        between: of these, bytes of values that another operator makes or reads.
        code: why it is left; empty where it is not.
        got: the value, operator or plan to blame.
    """

    name: str
    kind: str
    line: str
    state: str
    sites: tuple[int, ...]
    reads: tuple[str, ...]
    moved: int
    between: int
    code: str = ""
    got: str = ""


@dataclass(frozen=True)
class MeasuredRow:
    """What was measured at a plan, beside the framework's own operators.

    Attributes:
        peer: the framework and its version.
        seconds: of the plan, median; None where it was not timed.
        peer_seconds: of the framework's operators; None where they were not timed.
        error: the plan's largest distance from float64, over the largest value; None where not finite.
        peer_error: the framework's; None where its operators were not run.
        allowed: the largest error that is right.
        disturbance: which other use of the machine makes the times unreliable; empty where there was none.
        said: why the plan, or the framework beside it, was not timed; empty where both were.
    """

    peer: str
    seconds: float | None
    peer_seconds: float | None
    error: float | None
    peer_error: float | None
    allowed: float
    disturbance: str
    said: str = ""

    @property
    def gain(self) -> float | None:
        """The framework's time over the plan's; None where one was not timed."""
        return self.peer_seconds / self.seconds if self.seconds and self.peer_seconds else None


@dataclass(frozen=True)
class SiteRow:
    """A plan of a model.

    Attributes:
        number: counted from 1, in the order of execution.
        plan: its text.
        template: the kernel's template with its knobs.
        operators: names of the framework's operators that it computes.
        lines: the lines of Python that wrote them.
        before: bytes that these operators move one at a time.
        after: bytes that the kernel moves.
        seconds: time of a launch, by the model that ranks templates.
        code: why the plan ends where it does.
        got: the value or operator to blame.
        between: bytes written and read again because the plan ends there.
        measured: beside the framework's own operators; None where nothing was measured.
        rules: names of the user's rules that gave operators of the plan.
        opened: the plan with an open batch, whose kernel serves every extent; empty where there is none.
        fixed: of a model whose batch is open, why the kernel is for this extent alone; else empty.
        apart: why it is not one plan with other products of its input; empty where there are none.
    """

    number: int
    plan: str
    template: str
    operators: tuple[str, ...]
    lines: tuple[str, ...]
    before: int
    after: int
    seconds: float
    code: str
    got: str
    between: int
    measured: MeasuredRow | None = None
    rules: tuple[str, ...] = ()
    opened: str = ""
    fixed: str = ""
    apart: str = ""


@dataclass(frozen=True)
class RevertedRow:
    """A plan that was found and left to the framework: it is slower or wrong, or is not built.

    Attributes:
        plan: its text.
        operators: names of the framework's operators that it stands for.
        code: why it is left.
        got: the evidence.
        measured: beside the framework's own operators; None where nothing was measured.
    """

    plan: str
    operators: tuple[str, ...]
    code: str
    got: str
    measured: MeasuredRow | None


@dataclass(frozen=True)
class ReasonRow:
    """A reason with all its cases.

    Attributes:
        code: as in the catalogues of reasons.
        sentence: the cause.
        remedy: the advice.
        between: bytes of the cases that are written and read again because of it.
        cases: for each kind of operator, or value to blame, the names of its operators.
    """

    code: str
    sentence: str
    remedy: str
    between: int
    cases: dict[str, tuple[str, ...]]

    @property
    def count(self) -> int:
        """The number of cases."""
        return sum(map(len, self.cases.values()))


@dataclass(frozen=True)
class CopyRow:
    """A value that is copied between steps.

    Attributes:
        value: its name.
        moved: bytes read and written.
        reader: the step that takes it in another layout, or from memory of ours.
    """

    value: str
    moved: int
    reader: str


@dataclass(frozen=True)
class Launches:
    """How many things run.

    Attributes:
        before: operators that the framework runs: all that are no views and do not fold.
        kernels: launches of our kernels.
        numpy: operators that NumPy runs; torch, on a GPU.
        copies: values that are copied.
        libraries: operators that other libraries run, by what runs them.
    """

    before: int
    kernels: int
    numpy: int
    copies: int
    libraries: dict[str, int]

    @property
    def after(self) -> int:
        """Kernels, operators and copies."""
        return self.kernels + self.numpy + self.copies + sum(self.libraries.values())


SCHEMA = "fuseplan.report/6"
READ = (SCHEMA, "fuseplan.report/5")  # which had no `unkept`
SHOWN = 6  # names in a line; the others are counted


@dataclass(frozen=True)
class Report(Printed):
    """The closed books of a model: each of its operators in one row, and each launch counted.

    Attributes:
        target: the kind of machine, `cpu:avx2`.
        launches: how many things run, before and after.
        moved_before: bytes that the framework's operators move one at a time.
        moved_after: bytes that kernels, operators and copies move.
        operators: a row for each operator of the framework.
        sites: the plans.
        left: the reasons of the operators that are in no plan, the most bytes first.
        ends: the reasons why plans end, the most bytes first.
        copies: values that are copied between steps.
        reverted: plans that were found and left to the framework.
        unkept: why the next start exports the model again; empty where it reads the graph from the cache.
        schema: the version of these records.
    """

    target: str
    launches: Launches
    moved_before: int
    moved_after: int
    operators: tuple[OperatorRow, ...]
    sites: tuple[SiteRow, ...]
    left: tuple[ReasonRow, ...]
    ends: tuple[ReasonRow, ...]
    copies: tuple[CopyRow, ...] = ()
    reverted: tuple[RevertedRow, ...] = ()
    unkept: str = ""
    schema: str = SCHEMA

    @property
    def ours(self) -> str:
        """What runs the operators of a graph that are in no plan, and no other library's."""
        return "NumPy" if self.target.startswith("cpu") else "torch"

    def lines(self) -> Iterator[str]:
        """What runs, the plans, what is in no plan, and why plans end."""
        states = collections.Counter(row.state for row in self.operators)
        launches = self.launches
        yield (
            f"{counted(len(self.operators), 'operator')}: "
            f"{', '.join(f'{count} {state}' for state, count in states.items())}"
        )
        libraries = "".join(f", {count} by {name}" for name, count in launches.libraries.items())
        yield (
            f"launches: {launches.before} before; {launches.after} after: "
            f"{counted(launches.kernels, 'kernel')}, {launches.numpy} by {self.ours}{libraries}, "
            f"{launches.copies} by copies"
        )
        moved = sum(each.moved for each in self.copies)
        yield (
            f"traffic: {bytes_text(self.moved_before)} before; {bytes_text(self.moved_after)} after, "
            f"{bytes_text(moved)} of it by copies"
        )
        if self.unkept:
            yield f"the next start exports the model again: {self.unkept}"
        yield ""
        yield "plans"
        for alike in gathered((site.plan, site) for site in self.sites).values():
            yield from _plan_lines(alike)
        if self.reverted:
            yield ""
            yield "left to the framework"
        for each in self.reverted:
            yield f"  {each.plan}"
            yield f"      {listed(each.operators)}: {each.got}  [{each.code}]"
        yield from _reason_lines("in no plan", self.left, is_remedied=True)
        yield from _reason_lines("plans end", self.ends, is_remedied=False)
        if self.copies:
            yield ""
            yield "copies"
        copied = ((each.reader, f"{each.value} ({bytes_text(each.moved)})") for each in self.copies)
        for reader, copies in gathered(copied).items():
            yield f"  {len(copies)} x for {reader}: {listed(copies)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        return self  # nothing of it changes


def read_report(path: str | PathLike[str]) -> Report:
    """The report in a file of JSON, as `fuseplan explain model.onnx --json` prints it.

    Raises:
        ArgumentError: the file is no report of this version or the one before.
        OSError: the file cannot be read.
    """
    with refusing(f"{path} is no report on a model", ValueError):
        told = json_of(bytes_of(Path(path), limits.REPORT_BYTES))
        if not isinstance(told, dict) or told.get("schema") not in READ:
            raise ValueError(f"its schema is not {SCHEMA}")
        return record(Report, told | {"schema": SCHEMA})


def listed(names: Sequence[str], shown: int = SHOWN) -> str:
    """Some names; the others are counted."""
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _plan_lines(sites: Sequence[SiteRow]) -> Iterator[str]:
    first = sites[0]
    yield f"  {len(sites)} x {first.plan}"
    yield f"      {listed([site.operators[0] for site in sites])}"
    yield (
        f"      {first.template.partition('(')[0]}: {bytes_text(first.before)} before, "
        f"{bytes_text(first.after)} after; {seconds_text(first.seconds)} by the model"
    )
    if first.rules:
        yield f"      by {counted(len(first.rules), 'rule')}: {', '.join(first.rules)}"
    if first.opened:
        yield f"      for every batch: {first.opened}"
    if first.fixed:
        yield f"      for this batch alone: {first.fixed}"
    if first.apart:
        yield f"      not joined with other products of its input: {first.apart}"
    if first.measured is not None:
        yield f"      {measured_text(first.measured)}"


def measured_text(measured: MeasuredRow) -> str:
    """The time beside the framework's, the error beside the one that is right; or why there are none."""
    if measured.error is None and measured.said:
        return measured.said
    times = [] if measured.seconds is None else [f"{seconds_text(measured.seconds)} measured"]
    if measured.gain is not None:
        times.append(f"{measured.gain:.2f} times as fast as {measured.peer}")
    error = "not finite" if measured.error is None else f"{measured.error:.1e}"
    times.append(f"error {error} of {measured.allowed:.1e}")
    return ", ".join([*times, *filter(None, [measured.said, measured.disturbance])])


def _reason_lines(head: str, reasons: Sequence[ReasonRow], *, is_remedied: bool) -> Iterator[str]:
    if reasons:
        yield ""
        yield head
    for reason in reasons:
        yield f"  {reason.count} x {reason.code}, {bytes_text(reason.between)}: {reason.sentence}"
        cases = [f"{kind} ({listed(names)})" for kind, names in reason.cases.items()]
        yield f"      {listed(cases if is_remedied else list(reason.cases))}"
        if is_remedied:
            yield f"      {reason.remedy}"
