"""A graph cut into plans: the sites, and a reason for each other operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fuseplan.compile import CompiledPlan
from fuseplan.execution.build import build_sound
from fuseplan.execution.stages import Records
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node
from fuseplan.graph.op import Tensor
from fuseplan.graph.ops import Permute, Slice
from fuseplan.graph.type import FLOATS, numpy_dtype, word_of
from fuseplan.graph.why import Reason
from fuseplan.graph.write import Bound, Joined, Stage, names_in
from fuseplan.kernels.kernel import Kernel
from fuseplan.plans.plan import FusionPlan
from fuseplan.stores.sites import Measured
from fuseplan.system.locks import cached_property


class Range(NamedTuple):
    """The part of a joined value that a plan writes: from `begin` to `end` along an axis."""

    value: str
    axis: int
    begin: int
    end: int


@dataclass(frozen=True)
class Site:
    """A plan and the nodes that it computes.

    Attributes:
        records: what the stages made of it.
        nodes: in an order of execution.
        src, dst: names of the values that it reads and makes.
        beside: src and the values that lie beside it along an axis, where the plan reads them as one tensor.
        further: the values that are the plan's results, with their places behind its output.
        ranges: of dst, the values that it makes, where they are several, or one whose axes lie in another
            order: dst is no value of the graph then.
        operands: by the plan's keys: the name of a value, several names, or an array that is bound once.
        ended: why the plan goes no further.
        others: find the same site without operators folded into the weight, and with factors that are not
            rounded.
        measured: what was measured here; None where nothing was.
        into: where the result lies, if not in memory of its own.
        rules: names of the rules that gave operators of the plan.
        opened: the records of the plan with an open axis, whose kernel the site launches; the reason where
            an extent is open and no such kernel serves it; None where none is open.
        apart: why it is not one product with others of its input; None where there are no others.
    """

    plan: FusionPlan
    records: Records
    nodes: tuple[Node, ...]
    src: str
    dst: str
    operands: Mapping[str, Bound]
    ended: Reason
    others: tuple[Callable[[], Site | Reason], ...] = field(default=(), repr=False, compare=False)
    measured: Measured | None = field(default=None, compare=False)
    into: Range | None = None
    rules: tuple[str, ...] = ()
    opened: Records | Reason | None = field(default=None, compare=False)
    ranges: Mapping[str, Slice | Permute] = field(default_factory=dict)
    apart: Reason | None = field(default=None, compare=False)
    beside: Joined | None = None
    further: Mapping[str, int] = field(default_factory=dict)

    @property
    def built(self) -> Records:
        """The records of the plan that is compiled."""
        return self.opened if isinstance(self.opened, Records) else self.records

    def of(self, built: Records) -> Site:
        """The site of the records that were built, whose choice may be another one than the first."""
        if built is self.built:
            return self
        is_open = isinstance(self.opened, Records)
        return replace(self, opened=built) if is_open else replace(self, records=built)

    @property
    def kernel(self) -> Kernel:
        """The computation of a launch, on the site's own extents."""
        is_open = isinstance(self.opened, Records)
        return self.built.kernel.with_extent(self.plan.src.shape[0]) if is_open else self.records.kernel

    def compiled(self) -> CompiledPlan:
        """The plan, compiled, or found where it was compiled before.

        Raises:
            BuildError: the toolchain failed.
        """
        return CompiledPlan(*build_sound(self.built))

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the values that it reads, each once."""
        bounds = (self.beside or self.src, *self.operands.values())
        return tuple(dict.fromkeys(name for each in bounds for name in names_in(each)))

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the graph's values that its output is."""
        return tuple(self.ranges) or (self.dst,)

    def whole(self, results: Sequence[Tensor]) -> Tensor:
        """The results as the one tensor that a launch writes."""
        for op in self.ranges.values():
            return (
                np.concatenate(results, op.axis)
                if isinstance(op, Slice)
                else results[0].transpose(np.argsort(op.order))
            )
        return results[0]

    @property
    def joins(self) -> dict[str, tuple[int, int]]:
        """The operands that are several values, by key: how many, and the axis that joins them."""
        pairs = ((key, each) for key, each in self.operands.items() if isinstance(each, Joined))
        return {key: (len(each.names), each.axis) for key, each in pairs}


def bound(plan: FusionPlan, stages: Sequence[Stage]) -> dict[str, Bound]:
    """The operands of a plan's operators by its keys; constants of other dtypes in that of its arithmetic."""
    src, operands = plan.src, dict[str, Bound]()
    wide = src if src.dtype in FLOATS else plan.output  # what indices look up
    dtype, kept = numpy_dtype(wide.compute_dtype), (src.dtype, wide.dtype, "bool")
    known = {each.key: each for each in plan.operands}
    for step, stage in zip(plan.steps, stages, strict=True):
        for name, each in stage.operands.items():
            key = step.keys[name]
            given = each.reshape(known[key].shape) if isinstance(each, np.ndarray) else each
            if not names_in(given) and word_of(given.dtype) not in (*kept, known[key].dtype):  # type: ignore[union-attr]
                given = given.astype(dtype)  # type: ignore[union-attr]
            operands[key] = given
    return operands


@dataclass(frozen=True)
class Attempt:
    """A plan for some nodes that was tried.

    Attributes:
        nodes: that the plan computes, in an order of execution.
        plan: its text; empty where no run of operators says what the nodes compute.
        reason: why there is no such site; of a site, why it goes no further.
        is_site: whether the plan is one of the cut.
    """

    nodes: tuple[Node, ...]
    plan: str
    reason: Reason
    is_site: bool = False


@dataclass(frozen=True)
class Cut:
    """A graph cut into plans.

    Attributes:
        sites: the plans, in the order of the nodes that they end with.
        left: why each other node is in none, by the node's identity; views are not among them, and joins
            whose parts plans write in place may be.
        tried: all plans that were tried, in order.
        reverted: sites that were found and left to the framework: slower, wrong, or not to be built.
    """

    graph: Graph
    sites: tuple[Site, ...]
    left: Mapping[int, Reason]
    tried: tuple[Attempt, ...] = ()
    reverted: tuple[Site, ...] = ()

    @cached_property
    def joined(self) -> frozenset[str]:
        """The values that plans write in parts, so that no step joins them."""
        return frozenset(site.into.value for site in self.sites if site.into)

    def reason(self, node: Node) -> Reason | None:
        """Why a node is in no plan and no view of values; None where it is."""
        return None if self.joined & {*node.outputs} else self.left.get(id(node))
