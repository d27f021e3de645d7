"""The centre of a kernel: the part that is more than the arithmetic of one element, if it has any."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.kernels.contraction import Contraction
from fuseplan.language.attend import Attend, AttendGradient
from fuseplan.language.reduction import INDEX, Part, Statistic
from fuseplan.ops.scan import UnaryOp
from fuseplan.plans.text import operator_text
from fuseplan.system.locks import cached_property


@dataclass(frozen=True)
class Reduction:
    """Statistics of the prologue's result, which the epilogue reads again.

    Attributes:
        statistics: in order: each may use the numbers of those before it.
        over: the axes of src that they join.
        per: has numbers of its own. Of a `channel` or an `activation`, dst has src's shape. Of a `row` or a
            `cell`, a place along the axes that stay, dst has extent 1 along those that the plan's output
            lacks, and operands have axes.
        index: what a step along each axis of src adds to an element's place, where a statistic reads it.
        inner: statistics that read those before, of each run of a cell's elements alone: the axes
            `inner_over`, which are among `over`.
    """

    statistics: tuple[Statistic, ...]
    over: tuple[int, ...]
    per: str
    index: tuple[int, ...] = ()
    inner: tuple[Statistic, ...] = ()
    inner_over: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The state of all elements: the parts of all statistics."""
        return tuple(part for each in self.statistics for part in each.parts)

    @property
    def run_names(self) -> frozenset[str]:
        """The numbers of runs."""
        return frozenset(name for each in self.inner for name in each.names)

    @property
    def has_cells(self) -> bool:
        """Whether the axes may be any, and each tensor has some of them."""
        return self.per not in ("channel", "activation")

    @property
    def text(self) -> str:
        """All fields, a line for each statistic."""
        which = f"over axes {listed(self.over)}" if self.has_cells else f"per {self.per}"
        lines = [f"{which}: {each.text}" for each in self.statistics]
        lines += [f"over axes {listed(self.inner_over)}: {each.text}" for each in self.inner]
        return "\n".join([*lines, *([f"{INDEX} steps {listed(self.index)}"] if self.index else [])])


@dataclass(frozen=True)
class Summary:
    """Statistics of a contraction's features: no tensor has the contraction's result.

    The stages `between` are applied to that result, whose axes are those of src with features for channels.
    The epilogue reads the numbers of each position.
    """

    contraction: Contraction
    reduction: Reduction

    @property
    def count(self) -> int:
        """Elements that one number is made of."""
        return self.contraction.features

    @property
    def text(self) -> str:
        """Both, a line or more each."""
        return f"{self.contraction.text}\n{self.reduction.text}"


@dataclass(frozen=True)
class Unary:
    """An operator along an axis of the prologue's result; operands have a step along each axis of src.

    Attributes:
        op: the operator, by the kernel's number of its axis.
        count: elements along it.
        flops: an operation for each element.
    """

    op: UnaryOp
    count: int
    flops: int

    @property
    def text(self) -> str:
        """The operator as a plan writes it."""
        return operator_text(self.op)


Centre = Contraction | Reduction | Summary | Attend | AttendGradient | Unary


def listed(numbers: tuple[int, ...]) -> str:
    """Axes or steps in a kernel's text."""
    return ":".join(map(str, numbers))
