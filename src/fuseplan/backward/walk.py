"""The operators of a plan, last to first: each turns the gradient of its output into that of its input.

A gradient is a chain of operators on a value of the graph until a second reader needs it; then the plan that
reads it first saves it. An operator's input that a derivative reads is saved by the forward plan, or computed
again by operators without tensors from a value that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import singledispatch

from fuseplan.backward.factors import Chain, Piece, factor, is_free, reads_input, slope_of
from fuseplan.errors import Unsupported
from fuseplan.graph.layer import Planned
from fuseplan.graph.node import Node, Origin
from fuseplan.graph.op import GraphOp
from fuseplan.graph.ops import Reshape
from fuseplan.kernels.match import alone
from fuseplan.language.declarations import Operand
from fuseplan.language.derivative import ZERO
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Reason, Refusal
from fuseplan.op import Elementwise, Op
from fuseplan.ops.affine import Add, Mul
from fuseplan.ops.conversion import Cast
from fuseplan.ops.parts import Parted
from fuseplan.ops.ranges import Save
from fuseplan.ops.reductions import Sum
from fuseplan.ops.scan import UnaryOp
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.scalar import leaf


def gradient_of(result: str) -> str:
    """The input that is the gradient of a result of the plan."""
    return f"grad_{result}"


GRADIENT, RECOMPUTES = "gradient", "recomputes"  # what a node is for, in its comment

OPEN = ("elementwise", "normalization")  # in front of any other kind, no kernel saves a value


class Walk:
    """The nodes of the gradients of a plan, collected from its last operator to its first.

    Attributes:
        nodes: in an order of execution.
        gradients: the value that is the gradient of each of `wrt`.
        saves: the names of the operators' inputs that the forward plan has to save, by the operator's index.
    """

    def __init__(self, plan: FusionPlan, wrt: Collection[str], of: Collection[str] = ()) -> None:
        self.plan, self.wrt, self.of = plan, wrt, of
        self.nodes: list[Node] = []
        self.gradients: dict[str, str] = {}
        self.saves: dict[int, str] = {}
        self._made: dict[int, str] = {}
        self._joined: dict[str, list[str]] = {}
        self._taken = {"src", "grad", "out", *map(gradient_of, of)}
        self._taken |= {each.key for each in plan.operands} | {each.key for each in plan.results}
        walls = [step.index for step in plan if step.op.kind not in OPEN or step.op.has_parts]
        self._last_wall = max(walls, default=-1)
        self._first = min((step.index for step in plan if self.wanted(step)), default=len(plan))
        self._needed = {step.index for step in plan if self._is_needed(step)}

    def run(self) -> None:
        """Collects the nodes; Unsupported where an operator has no gradient as plans."""
        chain = Chain("grad", self.plan.output)
        for step in reversed(self.plan.steps):
            if self.wanted(step) or self.is_ahead(step):
                is_elementwise = isinstance(step.op, Elementwise) and not step.op.has_parts
                free = chain if is_elementwise or not chain.is_full else self.stored(chain, step)
                chain = gradient(step.op, self, step, free)
        if "src" in self.wrt:
            self.gradients["src"] = self.value(chain, "src_gradient")

    def wanted(self, step: Step) -> list[Operand]:
        """The operands of an operator whose gradients are wanted."""
        return [each for each in step.operands if each.key in self.wrt]

    def is_ahead(self, step: Step) -> bool:
        """Whether the gradient of the operator's input is wanted, or one in front of it."""
        return "src" in self.wrt or self._first < step.index

    def _is_needed(self, step: Step) -> bool:
        """Whether the walk reads the operator's input to pass it."""
        if not isinstance(step.op, Elementwise):
            return self.is_ahead(step) and step.op.kind == "normalization"
        return not step.op.has_parts and self.is_ahead(step) and reads_input(step)

    def named(self, wanted: str) -> str:
        """A name that no other value has."""
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name

    def add(self, op: GraphOp, inputs: Sequence[str], outputs: Sequence[str], origin: Origin) -> None:
        """Adds a node."""
        self.nodes.append(Node(op, tuple(inputs), tuple(outputs), origin))

    def viewed(self, name: str, views: Sequence[GraphOp], wanted: str) -> str:
        """Adds views of a value, one after the other, and gives the name of the last."""
        for view in views:
            made = self.named(wanted)
            self.add(view, (name,), (made,), Origin(wanted, GRADIENT))
            name = made
        return name

    def emit(self, chain: Chain, wanted: str) -> str:
        """Adds the plan of a chain, and gives the name of its output; saved values have the plan's names."""
        plan = FusionPlan(chain.spec, *(piece.op for piece in chain.pieces))
        given = [dict(chain.pieces[each.step].given)[each.name] for each in plan.operands]
        name = self.named(wanted)
        saved = [isinstance(plan[each.step].op, Save) for each in plan.results]
        made = [name]
        made += [
            each.key if is_saved else self.named(each.key)
            for each, is_saved in zip(plan.results, saved, strict=True)
        ]
        for each, result in zip(plan.results, made[1:], strict=True):
            wanted_by = dict(chain.pieces[each.step].gives)
            if each.name in wanted_by:
                self.gradients[wanted_by[each.name]] = result
        origin = Origin(chain.again, RECOMPUTES) if chain.again else Origin(wanted, GRADIENT)
        self.add(Planned(str(plan)), (chain.start, *given), made, origin)
        return name

    def value(self, chain: Chain, wanted: str) -> str:
        """The name of a chain's value, which a plan computes unless it is there."""
        return self.emit(chain, wanted) if chain.pieces else chain.start

    def stored(self, chain: Chain, step: Step) -> Chain:
        """The gradient of an operator's output as a value of the graph."""
        return Chain(self.value(chain, f"grad_{step.op.name}"), step.dst)

    def before(self, step: Step) -> str:
        """The value that is an operator's input: given, saved by the forward plan, or computed again."""
        place = step.index
        if place == 0:
            return "src"
        front = self.plan[place - 1].op
        if isinstance(front, Save):
            return front.key
        if place > self._last_wall:
            if place not in self.saves:
                self.saves[place] = self.named(f"{step.op.name}_input")
            return self.saves[place]
        if place not in self._made:
            self._made[place] = self._again(step)
        return self._made[place]

    def after(self, step: Step) -> str:
        """The value that is an operator's output: the plan's own, or saved by the forward plan."""
        return "out" if step.index + 1 == len(self.plan) else self.before(self.plan[step.index + 1])

    def _again(self, step: Step) -> str:
        """An operator's input, computed again by a plan of its own, from the value last saved or src."""
        saves = [each.index for each in self.plan.steps[: step.index] if isinstance(each.op, Save)]
        begin = max(saves, default=-1) + 1
        front, first = self.plan.steps[begin : step.index], self.plan[begin]
        pieces = tuple(Piece(alone(each.op), tuple(self.operands(each).items())) for each in front)
        return self.emit(Chain(self.before(first), first.src, pieces, _told(front)), f"{step.op.name}_input")

    def source(self, step: Step) -> Chain:
        """An operator's input as a chain: by operators without tensors from a value that is there anyway."""
        place = step.index
        while not self._is_there(place) and is_free(self.plan[place - 1].op):
            place -= 1
        if not self._is_there(place):
            return Chain(self.before(step), step.src)
        free, first = self.plan.steps[place : step.index], self.plan[place]
        return Chain(self.before(first), first.src, tuple(Piece(each.op) for each in free), _told(free))

    def _is_there(self, place: int) -> bool:
        if place == 0 or place in self.saves or place in self._made:
            return True
        return isinstance(self.plan[place - 1].op, Save) or place in self._needed

    def operands(self, step: Step) -> dict[str, str]:
        """The graph's names of an operator's operands, by the operator's own."""
        return {each.name: each.key for each in step.operands} | step.op.again

    def elementwise(self, step: Step, chain: Chain) -> Chain:
        """The gradient of the input of an elementwise operator; the walk keeps those of its operands."""
        if not dtype_of(step.dst.dtype).is_float:
            raise refused(step, f"{step.dst.dtype}: integers have no gradient")
        wanted = self.wanted(step)
        for place, each in enumerate(wanted):
            more = self.is_ahead(step) or place + 1 < len(wanted)
            chain = self._operand(step, each, chain, is_read_again=more)
        for name, saved in step.op.again.items():
            chain = self.stored(chain, step) if chain.pieces else chain
            made = chain.then(self._factor(step, name))
            self._joined.setdefault(saved, []).append(self.value(made, f"{saved}_gradient"))
        if not self.is_ahead(step):
            return chain
        chain = chain.then(self._factor(step, "x"))
        return chain if step.src.dtype == step.dst.dtype else chain.then([Piece(Cast(step.src.dtype))])

    def _factor(self, step: Step, by: str) -> tuple[Piece, ...]:
        if slope_of(step, by) == ZERO:
            raise refused(step, "a slope that is 0 everywhere")
        at = self.before(step) if reads_input(step, by) else ""
        return factor(step, by, at, self.operands(step))

    def joined(self, step: Step, chain: Chain) -> Chain:
        """The gradient of a saved value: the sum of those of its readers."""
        (saved,) = step.results
        others = [
            *self._joined.get(saved.key, ()),
            *([gradient_of(saved.key)] if saved.key in self.of else []),
        ]
        return chain.then([Piece(Add(), (("other", each),)) for each in others])

    def _operand(self, step: Step, operand: Operand, chain: Chain, *, is_read_again: bool) -> Chain:
        """Adds the gradient of an operand; gives that of the operator's output, saved if it is read again."""
        source = self.source(step) if slope_of(step, operand.name) == leaf("x") else None
        if source is None or not source.pieces:
            by = self._factor(step, operand.name)
            return self.operand(step, operand, by, chain, is_read_again=is_read_again)
        chain = self.stored(chain, step)
        made = source.then([Piece(Mul(), (("other", chain.start),))])
        self.operand(step, operand, (), made, is_read_again=False)
        return chain

    def operand(
        self, step: Step, operand: Operand, by: Sequence[Piece], chain: Chain, *, is_read_again: bool
    ) -> Chain:
        """Adds the gradient of an operand: the sum of a chain times `by` over the axes that it lacks.

        Returns:
            The chain, which the plan of the sum saves if it is read again.
        """
        key, front = f"{operand.key}_gradient", chain
        tail = self._summed(step, operand, is_wide=chain.spec.dtype == operand.dtype)
        if not by and not tail:
            self.gradients[operand.key] = self.value(chain, key)
            return Chain(self.gradients[operand.key], step.dst)
        if tail and chain.is_full:
            front = chain = self.stored(chain, step)
        if is_read_again and chain.pieces:
            name = self.named(f"grad_{step.op.name}")
            front, chain = chain.then([Piece(Save(name))]), Chain(name, step.dst)
        self._keep(operand, self.emit(front.then(by).then(tail), key))
        return chain

    def _keep(self, operand: Operand, name: str) -> None:
        """The gradient of an operand in the operand's shape."""
        if operand.axes or operand.per == "element":
            self.gradients[operand.key] = name
            return
        made = self.viewed(name, [Reshape(operand.shape)], f"{operand.key}_gradient")
        self.gradients[operand.key] = made

    def _summed(self, step: Step, operand: Operand, *, is_wide: bool) -> list[Piece]:
        """The sum over the axes that an operand lacks, in the operand's dtype."""
        if operand.block > 1 or operand.per in ("weight", "beside"):
            raise refused(step, f"the gradient of {operand.key}")
        axes = tuple(axis for axis in range(step.src.rank) if axis not in operand.axes)
        cast = [Piece(Cast(operand.dtype))] if not is_wide else []
        return [*cast, Piece(Sum(axes))] if axes else cast


def _told(steps: Sequence[Step]) -> str:
    return " -> ".join(step.op.name for step in steps)


def refused(step: Step, got: str | None = None) -> Unsupported:
    """The error about an operator whose gradient is no plan; `got` is the field or value to blame."""
    refusal = Refusal(Reason.NO_GRADIENT, got=got or step.title, operator=step.index)
    return Unsupported("the gradient of this plan is not made of plans", text="", refusals=[refusal])


Rule = Callable[[Op, Walk, Step, Chain], Chain]


@singledispatch
def gradient(op: Op, walk: Walk, step: Step, chain: Chain) -> Chain:
    """The gradient of an operator's input from that of its output; the walk keeps those of its operands.

    Raises:
        Unsupported: there is no rule for the operator.
    """
    raise refused(step)


@gradient.register
def _(op: Elementwise, walk: Walk, step: Step, chain: Chain) -> Chain:
    return walk.elementwise(step, chain)


@gradient.register
def _(op: UnaryOp | Parted, walk: Walk, step: Step, chain: Chain) -> Chain:
    back = op.backward
    if walk.wanted(step):
        raise refused(step, f"the gradients of {' and '.join(op.operand_fields)}")
    if back is None:
        raise refused(step)
    if "grad" in back.operand_fields:
        return walk.source(step).then([Piece(back, (("grad", walk.stored(chain, step).start),))])
    return chain.then([Piece(back, tuple(walk.operands(step).items()))])


@gradient.register
def _(op: Save, walk: Walk, step: Step, chain: Chain) -> Chain:
    return walk.joined(step, chain)
