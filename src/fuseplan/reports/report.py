"""The report on a model: a record that prints, and that is read back from its JSON."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fuseplan.errors import counted, refusing
from fuseplan.messages.quantities import bytes_text, seconds_text
from fuseplan.reports.rows import (
    CopyRow,
    Launches,
    MeasuredRow,
    OperatorRow,
    Printed,
    ReasonRow,
    RevertedRow,
    SiteRow,
)
from fuseplan.system import limits
from fuseplan.system.gathering import gathered
from fuseplan.system.reading import bytes_of, json_of, record

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
            f"{counted(launches.kernels, 'kernel')}, {launches.numpy} by NumPy{libraries}, "
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
