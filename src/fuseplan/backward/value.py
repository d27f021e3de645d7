"""The gradients of a plan as a value: a graph of plans that prints, parses, runs, and tells its bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.backward.operators import giving_lse
from fuseplan.backward.run import CompiledBackward
from fuseplan.backward.walk import RECOMPUTES, Walk, gradient_of
from fuseplan.errors import PlanError, Unsupported, did_you_mean
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Planned
from fuseplan.graph.node import Node, Origin
from fuseplan.graph.type import Type
from fuseplan.kernels.target import Target
from fuseplan.language.declarations import Array
from fuseplan.language.dtypes import dtype_of
from fuseplan.op import Op
from fuseplan.ops.ranges import Save
from fuseplan.plans.plan import FusionPlan

FORWARD = "forward"


@dataclass(frozen=True)
class Kept:
    """A value that the gradients read from the forward pass, or compute again.

    Attributes:
        name: the value's; for one that is computed again, the operators that do so.
        nbytes: of the value: memory between the passes, or what computing it again saves of that.
    """

    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nbytes} bytes"


class Backward:
    """The gradients of a plan, as a graph of plans.

    Its first node is the forward plan with `save` where a gradient reads a value; each other node is a plan,
    or a view of a weight. Inputs are `src`, the operands, and `grad`, the gradient of the output.

    Attributes:
        graph: the graph; its text is that of the value.

    Raises:
        PlanError: the graph does not begin with a plan of such inputs.
    """

    def __init__(self, graph: Graph) -> None:
        if not graph.nodes or not isinstance(graph.nodes[0].op, Planned) or "grad" not in graph.inputs:
            raise PlanError("this is no graph of gradients", want="the forward plan first, and an input grad")
        self.graph = graph

    @property
    def forward(self) -> FusionPlan:
        """The forward plan, which saves the values that gradients read."""
        return _plan_of(self.graph.nodes[0])

    @property
    def gradients(self) -> dict[str, str]:
        """The value of the graph that is the gradient of each of `wrt`."""
        named = (each.origin.name for each in self.graph.nodes[:1])
        return dict(zip(next(named).split(), self.graph.outputs, strict=True))

    @property
    def plans(self) -> tuple[FusionPlan, ...]:
        """The plans of the gradients, in the order in which they run: a kernel each."""
        return tuple(_plan_of(each) for each in self.graph.nodes[1:] if isinstance(each.op, Planned))

    @property
    def saved(self) -> tuple[Kept, ...]:
        """The results of the forward plan that gradients read."""
        read = {name for node in self.graph.nodes[1:] for name in node.inputs}
        types, results = self.graph.types, self.graph.nodes[0].outputs[1:]
        return tuple(Kept(name, types[name].nbytes) for name in results if name in read)

    @property
    def recomputed(self) -> tuple[Kept, ...]:
        """The values that a plan of a gradient computes again in the place of saving them."""
        named = (
            (each.origin.name, _plan_of(each)) for each in self.graph.nodes if each.origin.kind == RECOMPUTES
        )
        return tuple(Kept(name, plan[name.count("->")].dst.nbytes) for name, plan in named)

    def compile(self, target: Target | str = "cpu", **how: Any) -> CompiledBackward:
        """Compiles the forward plan and the plans of the gradients.

        Args:
            target: as for `fuseplan.compile`.
            **how: likewise: `threads`, `accuracy`, `cache`, ...

        Raises:
            Unsupported: no template of the target computes a plan; it says which and why.
            BuildError: the target is not this machine, or the toolchain failed.
            ArgumentError: an argument cannot be.
        """
        return CompiledBackward(self.graph, self.gradients, {"target": target, **how})

    def evaluate(self, given: Mapping[str, Any]) -> dict[str, Array]:
        """The gradients in float64, by the names of `wrt`; `given` are arrays for all inputs of the graph.

        Raises:
            ArgumentError: an input is missing, unknown, or of another shape.
        """
        made = self.graph.evaluate(given)
        return {name: made[value] for name, value in self.gradients.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backward) and (self.graph, self.gradients) == (other.graph, other.gradients)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(self.graph)

    def __repr__(self) -> str:
        told = f"{len(self.plans)} kernels for the gradients of {', '.join(self.gradients)}"
        return f"<{told} of {self.forward}>"

    @classmethod
    def parse(cls, text: str) -> Backward:
        """The gradients that a text writes.

        Raises:
            PlanError: it writes none.
        """
        return cls(Graph.parse(text))


def _plan_of(node: Node) -> FusionPlan:
    assert isinstance(node.op, Planned)  # by the caller
    return node.op.plan


def backward(plan: FusionPlan, wrt: Collection[str] | None = None, results: Collection[str] = ()) -> Backward:
    """The gradients of a plan; `FusionPlan.backward` tells the arguments and errors."""
    floats = (each.key for each in plan.operands if dtype_of(each.dtype).is_float)
    wanted = ["src", *floats] if wrt is None else list(wrt)
    _check(plan, wanted, results)
    told, plan = str(plan), giving_lse(plan, Walk(plan, wanted, results))
    walk = Walk(plan, wanted, results)
    try:
        walk.run()
    except Unsupported as error:
        raise Unsupported(error.what, text=told, refusals=error.refusals) from None
    forward = _saving(plan, walk.saves)
    inputs = {"src": Type(plan.src.shape, plan.src.dtype)}
    inputs |= {each.key: Type(each.shape, each.dtype) for each in plan.operands}
    inputs["grad"] = Type(plan.output.shape, plan.output.dtype)
    given = {each.key: each for each in plan.results}
    inputs |= {gradient_of(key): Type(given[key].shape, given[key].dtype) for key in results}
    outputs = ("out", *(each.key for each in forward.results))
    first = Node(
        Planned(str(forward)),
        ("src", *(each.key for each in forward.operands)),
        outputs,
        Origin(" ".join(wanted), FORWARD),
    )
    return Backward(Graph(inputs, [first, *walk.nodes], [walk.gradients[name] for name in wanted]))


def _check(plan: FusionPlan, wrt: Collection[str], results: Collection[str]) -> None:
    if plan.is_open:
        raise PlanError(
            "gradients are of tensors of known extents", text=str(plan), remedy="Use plan.with_extents(..)"
        )
    if plan.src.layout is None:
        raise PlanError("gradients are of tensors without gaps", got=str(plan.src), text=str(plan))
    known = ["src", *(each.key for each in plan.operands)]
    saved = [each.key for each in plan.results if isinstance(plan[each.step].op, Save)]
    for name, names, what in [(each, known, "src or operand") for each in wrt] + [
        (each, saved, "saved value") for each in results
    ]:
        if name not in names:
            raise PlanError(
                f"the plan has no {what} {name!r}", text=str(plan), remedy=did_you_mean(name, names)
            )
    if not wrt:
        raise PlanError("there is nothing to take the gradient of", text=str(plan), want="names in wrt")


def _saving(plan: FusionPlan, saves: Mapping[int, str]) -> FusionPlan:
    """The plan with a `save` in front of operators."""
    ops: list[Op] = []
    for step in plan:
        ops += [Save(saves[step.index])] if step.index in saves else []
        ops.append(step.op)
    return FusionPlan(plan.src, *ops)
