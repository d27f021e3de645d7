"""A run of a model beside its meaning in float64: the outputs, and the first step that is too far from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuseplan.errors import FuseplanError
from fuseplan.graph.cut import Site
from fuseplan.graph.evaluate import Run, widened
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import told
from fuseplan.graph.ops import Map
from fuseplan.graph.place import Call, Compute, Launch, Step
from fuseplan.graph.session import Session
from fuseplan.graph.trial import launch
from fuseplan.graph.type import numpy_dtype, word_of
from fuseplan.measure.data import deviation
from fuseplan.measure.spaces import empty
from fuseplan.reports.books import named
from fuseplan.reports.report import Printed
from fuseplan.scalar import calls

# Of a value's largest element; a number that lies between two of i8 is rounded to either.
ALLOWED = {"f64": 1e-9, "f32": 1e-3, "f16": 2e-2, "bf16": 1e-1, "i8": 2e-2, "u8": 2e-2}


@dataclass(frozen=True)
class StepRow:
    """A step of a run beside float64.

    Attributes:
        step: its plan, or the operator that NumPy or another library runs.
        operators: names of the framework's operators that it computes.
        error: the largest difference of a value that it makes, over the value's largest element.
        read: the largest such error of the values that it reads.
        allowed: the most that is right.
        alone: of a plan, its error where it reads the right values; None of other steps, and where it was not
            run alone.
    """

    step: str
    operators: tuple[str, ...]
    error: float
    read: float
    allowed: float
    alone: float | None = None


@dataclass(frozen=True)
class Comparison(Printed):
    """A model's outputs beside float64.

    Attributes:
        outputs: error and largest right error, by the output's name.
        first: the first step over its allowed error; None where all are within.
    """

    derived = ("is_right",)

    outputs: dict[str, tuple[float, float]]
    steps: tuple[StepRow, ...]
    first: StepRow | None

    @property
    def is_right(self) -> bool:
        """Whether all outputs are within the allowed error."""
        return all(error <= allowed for error, allowed in self.outputs.values())

    def lines(self) -> Iterator[str]:
        for name, (error, allowed) in self.outputs.items():
            word = "right" if error <= allowed else "WRONG"
            yield f"{name}: {error:.2g} of the largest element beside float64, at most {allowed:.2g}: {word}"
        if self.first is None and self.steps:
            yield f"all {len(self.steps)} steps are within the allowed error"
        if self.first is None:
            return
        first = self.first
        yield f"the first step over the allowed error of {first.allowed:.2g}:"
        yield f"  {first.step}"
        yield f"      of {', '.join(first.operators)}"
        yield f"      {first.error:.2g} away, of values that are {first.read:.2g} away"
        if first.alone is not None:
            yield f"      {first.alone:.2g} away where it reads the right values"


def compared(
    session: Session,
    exact: Graph,
    given: Mapping[str, Any],
    run: Mapping[str, Run],
    outputs: Mapping[str, str],
    tolerance: float | None = None,
) -> Comparison:
    """Runs a model step by step beside its float64 meaning.

    Args:
        exact: the graph that tells its meaning, with the same names of values.
        given: the inputs by name.
        run: what evaluates other libraries' operators of `exact`.
        outputs: the value of each of the model's outputs, by the output's name.
        tolerance: the most that a value may be away; by its dtype unless given, and some steps of i8 in a
            model that quantizes.
    """
    kept = [name for name in exact.types if name not in exact.inputs and name not in exact.constants]
    least = allowed_by_rounding(exact)
    want = Graph(exact.inputs, exact.nodes, kept, exact.constants).evaluate(given, run)
    want |= {name: np.asarray(each) for name, each in given.items()} | exact.constants
    errors: dict[str, float] = {}
    allowed: dict[str, float] = {}
    rows: list[StepRow] = []
    first: StepRow | None = None
    for step, made in session.steps(given):
        for name, value in made.items():
            errors[name] = distance(value, want[name]) if name in want else 0.0
            allowed[name] = max(allowed_error(value), least) if tolerance is None else tolerance
        if not made:
            continue
        over = [name for name in made if errors[name] > allowed[name]]
        row = _row(step, list(made), errors, allowed)
        if over and first is None:
            alone = _alone(step.site, exact, want) if isinstance(step, Launch) else None
            first = row = StepRow(row.step, row.operators, row.error, row.read, row.allowed, alone)
        rows.append(row)
    unmade = [value for value in outputs.values() if value not in errors and value in want]
    for name, value in session(given).items() if unmade else ():  # views, and values that are made in parts
        errors.setdefault(name, distance(value, want[name]))
        allowed.setdefault(name, max(allowed_error(value), least) if tolerance is None else tolerance)
    ends = {name: (errors.get(value, 0.0), allowed.get(value, 0.0)) for name, value in outputs.items()}
    return Comparison(ends, tuple(rows), first)


def distance(got: Any, want: Any) -> float:
    """The largest difference by the largest element; infinite where the values are of another kind."""
    if not isinstance(got, np.ndarray) or not isinstance(want, np.ndarray):
        return 0.0 if type(got) is type(want) and got == want else float("inf")
    got, want = widened(got), widened(want)
    if got.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    return deviation(got.astype(np.float64), want.astype(np.float64))


def allowed_by_rounding(graph: Graph) -> float:
    """The most that is right of any value in a graph that rounds numbers to whole ones; 0 in others."""
    made = (graph.types[name] for node in graph.nodes for name in node.outputs if name)
    stored = any(each.dtype in ("i8", "u8") for each in made)
    rounds = any("round" in calls(node.op.expression) for node in graph.nodes if isinstance(node.op, Map))
    return ALLOWED["i8"] if stored or rounds else 0.0


def allowed_error(value: Any) -> float:
    """The most that is right of a value that a model makes, by its dtype."""
    return ALLOWED.get(word_of(value.dtype), 0.0) if isinstance(value, np.ndarray) else 0.0


def _row(
    step: Step, made: Sequence[str], errors: Mapping[str, float], allowed: Mapping[str, float]
) -> StepRow:
    if isinstance(step, Launch):
        nodes, read, text = step.site.nodes, step.site.reads, str(step.site.plan)
    elif isinstance(step, Compute):
        nodes, read, text = (step.node,), step.node.inputs, told(step.node)
    else:
        assert isinstance(step, Call)  # copies make no value
        nodes, read, text = step.unit.nodes, step.unit.reads, f"operators of {step.unit.library}"
    names = tuple(dict.fromkeys(named(node).name for node in nodes))
    worst = max(made, key=lambda name: errors[name] - allowed[name])
    before = max((errors.get(name, 0.0) for name in read), default=0.0)
    return StepRow(text, names, errors[worst], before, allowed[worst])


def _alone(site: Site, exact: Graph, want: Mapping[str, Any]) -> float | None:
    """The error of a site's plan on the right values; None where it does not run by itself."""
    elements = (each for each in site.plan.operands if each.per == "element")
    specs = {site.operands[each.key]: site.plan[each.step].dst for each in elements}
    specs |= {} if site.beside else {site.src: site.plan.src}
    values: dict[str, Any] = {}
    for name in site.reads:
        values[name] = want[name].astype(numpy_dtype(exact.types[name].dtype))
        if name in specs:
            laid = empty(specs[name])
            laid[...] = values[name].reshape(laid.shape)
            values[name] = laid
    try:
        made = launch(site, values)()
    except FuseplanError:
        return None
    exactly = site.whole([want[name] for name in site.results])
    return distance(made.reshape(exactly.shape), exactly)
