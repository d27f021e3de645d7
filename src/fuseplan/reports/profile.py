"""The time of each operator of a model before it is fused, the bound on it, and the plans that would pay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fuseplan.errors import PlanError, Unsupported, counted
from fuseplan.graph.formulas import formula_of
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target
from fuseplan.measure.peaks import Floor, GpuPeaks, Peaks, peaks_of
from fuseplan.messages.quantities import bytes_text, count_text, seconds_text
from fuseplan.plans.plan import FusionPlan
from fuseplan.reports.books import origins
from fuseplan.reports.report import OperatorRow, Printed, Report, SiteRow
from fuseplan.scalar import functions

SCHEMA = "fuseplan.profile/1"
SHOWN = 20  # rows of a table in a text


@dataclass(frozen=True)
class ProfileRow:
    """An operator of the framework, run by the framework.

    Attributes:
        name: in the model.
        kind: there: `Conv`.
        line: the line of Python that wrote it; empty where the model does not tell.
        seconds: of a run, median.
        share: of all operators' time.
        moved: bytes that it reads and writes.
        flops: operations; 0 where they are not known.
        bound: what the machine's measured peaks say that bounds it: `compute`, or the memory that it reads;
            empty where they are not measured.
        floor: the least time by these peaks.
        sites: numbers of the plans that would compute it.
    """

    name: str
    kind: str
    line: str
    seconds: float
    share: float
    moved: int
    flops: int
    bound: str
    floor: float
    sites: tuple[int, ...]


@dataclass(frozen=True)
class PlanRow:
    """A plan that would compute operators of the model.

    Attributes:
        number: the site's, as in the report.
        plan: its text.
        operators: names of those that it would compute.
        seconds: their time.
        estimate: the plan's, by the model that ranks templates, and at least its floor.
    """

    number: int
    plan: str
    operators: tuple[str, ...]
    seconds: float
    estimate: float

    @property
    def gain(self) -> float:
        """Seconds that the plan would save."""
        return self.seconds - self.estimate


@dataclass(frozen=True)
class Profile(Printed):
    """A model's operators, the longest first, and plans, those of the largest gain first.

    Attributes:
        runner: the runtime that ran the operators.
        seconds: of all operators.
        operators: those that run; views and folded ones do not.
        plans: those of the report.
        is_measured: whether the machine's peaks are known.
        schema: the version of these records.
    """

    runner: str
    seconds: float
    operators: tuple[ProfileRow, ...]
    plans: tuple[PlanRow, ...]
    is_measured: bool
    schema: str = SCHEMA

    @property
    def tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Title, columns and rows: of the operators, and of the plans."""
        head = ("operator", "kind", "time", "share", "bytes", "operations", "bound", "of floor", "plan")
        title = f"{counted(len(self.operators), 'operator')} by {self.runner}: {seconds_text(self.seconds)}"
        yield title, head, [_cells(row) for row in self.operators]
        gain = sum(max(0.0, row.gain) for row in self.plans)
        title = f"{counted(len(self.plans), 'plan')}, which would save {seconds_text(gain)} by the model"
        rows = [
            (str(row.number), *map(seconds_text, (row.seconds, row.estimate)), row.plan) for row in self.plans
        ]
        yield title, ("plan", "time", "estimate", "text"), rows

    def lines(self) -> Iterator[str]:
        return (line for table in self.tables for line in _lines(*table))


def profiled(
    report: Report, graph: Graph, target: Target, runner: str, seconds: Mapping[str, float]
) -> Profile:
    """The profile of a model.

    Args:
        report: what becomes of its operators.
        runner: the runtime that ran the operators.
        seconds: of each operator, by name; operators that are not run have none.
    """
    work = {origin.name: _work(graph, nodes) for origin, nodes in origins(graph).items()}
    known = peaks_of(target)
    rows = [row for row in report.operators if row.name in seconds and row.state in ("fused", "left")]
    whole = sum(seconds[row.name] for row in rows) or 1.0
    made = [_row(row, seconds[row.name], whole, work[row.name], known) for row in rows]
    plans = [_plan(site, seconds, work, known) for site in report.sites]
    return Profile(
        runner,
        sum(row.seconds for row in made),
        tuple(sorted(made, key=lambda row: -row.seconds)),
        tuple(sorted(plans, key=lambda row: -row.gain)),
        known is not None,
    )


@dataclass(frozen=True)
class _Work:
    """The operations of an operator, and the dtype of its result."""

    flops: int
    dtype: str


def _floor(known: Peaks | GpuPeaks | None, work: _Work, moved: int) -> Floor:
    """The least time for so many operations and bytes on a machine whose peaks may be known."""
    if known is None:
        return Floor(0.0, "")
    if isinstance(known, Peaks):
        return known.floor(work.flops, moved, dtype=work.dtype)
    rate = known.flops.get(work.dtype, known.flops["f32"])
    computing, moving = work.flops / rate, moved / known.bytes_a_second["dram"]
    return Floor(computing, "compute") if computing > moving else Floor(moving, "dram")


def _row(
    row: OperatorRow, seconds: float, whole: float, work: _Work, known: Peaks | GpuPeaks | None
) -> ProfileRow:
    floor = _floor(known, work, row.moved)
    told = (seconds, seconds / whole, row.moved, work.flops, floor.bound, floor.seconds)
    return ProfileRow(row.name, row.kind, row.line, *told, row.sites)


def _plan(
    site: SiteRow, seconds: Mapping[str, float], work: Mapping[str, _Work], known: Peaks | GpuPeaks | None
) -> PlanRow:
    taken = sum(seconds.get(name, 0.0) for name in site.operators)
    inside = [work[name] for name in site.operators]
    floor = _floor(known, _Work(sum(each.flops for each in inside), inside[0].dtype), site.after)
    return PlanRow(site.number, site.plan, site.operators, taken, max(site.seconds, floor.seconds))


def _work(graph: Graph, nodes: Sequence[Node]) -> _Work:
    made = graph.types[next(filter(None, nodes[-1].outputs))]
    return _Work(sum(_flops(graph, node) for node in nodes), made.dtype)


def _flops(graph: Graph, node: Node) -> int:
    """Operations of a node: two a product, one a function of an element; 0 of another library's."""
    made = graph.types[next(filter(None, node.outputs))]
    formula = formula_of(graph, node)
    if formula is not None:
        return functions(formula.expression) * made.size
    if not isinstance(node.op, Layer):
        return 0
    src = node.op.src([graph.types[name] for name in node.inputs])
    try:
        return lower(match(FusionPlan(src, node.op.op))).flops
    except (PlanError, Unsupported):
        return 0


def _cells(row: ProfileRow) -> tuple[str, ...]:
    where = ", ".join(map(str, row.sites))
    times = f"{row.seconds / row.floor:.1f}" if row.floor else ""
    flops = count_text(row.flops) if row.flops else ""
    share = f"{row.share:.1%}"
    return (
        row.name,
        row.kind,
        seconds_text(row.seconds),
        share,
        bytes_text(row.moved),
        flops,
        row.bound,
        times,
        where,
    )


def _lines(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in columns; rows behind the first are counted."""
    columns = [max(map(len, column)) for column in zip(head, *rows[:SHOWN], strict=True)]
    yield title
    for line in (head, *rows[:SHOWN]):
        yield "  " + "  ".join(map(str.ljust, line, columns)).rstrip()
    if len(rows) > SHOWN:
        yield f"  and {len(rows) - SHOWN} more"
    yield ""
