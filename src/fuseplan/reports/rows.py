"""The rows of a report on a model: plain records, whose fields are its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.system.reading import Record


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
        state: `fused` (a plan's kernel computes it), `folded` (computed before the model runs, or taken
            away), `view` (the same elements), or `left`.
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
        numpy: operators that NumPy runs.
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
