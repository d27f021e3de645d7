"""The fusion plan: an input and the operators applied to it, in order.

A plan is a value: it prints, parses, compares, and has a meaning in float64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fuseplan.errors import ArgumentError, PlanError, Unsupported, a_thing, counted, did_you_mean, near_miss
from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.declarations import Array, Operand, Parameter, Result
from fuseplan.language.extents import extents_in
from fuseplan.language.fields import refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import ARROW, shown
from fuseplan.messages.models import instead_of
from fuseplan.messages.reasons import Reason, Refusal
from fuseplan.op import Op
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.ranges import Save
from fuseplan.plans import naming
from fuseplan.plans.dot import PlanTable, dot_text
from fuseplan.plans.given import given_by_key, wide
from fuseplan.plans.step import Step, has_long_sums
from fuseplan.plans.text import check_count, named_text, parse_json, parse_plan, plan_json, plan_text

Placed = TypeVar("Placed", Operand, Parameter, Result)
DIRECTIONS = ("vertical", "horizontal")


class FusionPlan(PlanTable):
    """An input and the operators applied to it, in order.

    Args:
        src: the input, or its text.
        *ops: the first operators; `add` appends more.
        direction: `vertical`: each operator takes the result of the one before.

    Raises:
        PlanError: an operator does not fit its input.
        Unsupported: `direction` is `horizontal`.

    A plan is compared by its value. Once it was hashed or compiled it is frozen, since a value that is a
    key must not change.
    """

    def __init__(self, src: TensorSpec | str, *ops: Op, direction: str = "vertical") -> None:
        self._src = _input(src)
        _check_direction(direction, str(self._src))
        self._steps: list[Step] = []
        self._taken = {"x"}  # keys of the steps
        self._is_frozen = False
        listed = [op for op in ops if isinstance(op, Op)]
        self._src = naming.named(self._src, listed, named_text)
        naming.check(self._src, listed, named_text)
        for op in ops:
            self._append(op)

    def add(self, op: Op) -> Step:
        """Appends an operator and returns its place in the plan.

        Raises:
            PlanError: the plan is frozen, `op` is no operator, or it does not fit the one in front; the plan
                stays as it was.
        """
        was = self._src, self._steps, self._taken
        try:
            if isinstance(op, Op) and op.reads is not None and not self._is_frozen:
                self._name([*self.ops, op])
            return self._append(op)
        except PlanError:
            self._src, self._steps, self._taken = was
            raise

    def _append(self, op: Op) -> Step:
        """Appends an operator; the axes of the input have their names."""
        if self._is_frozen:
            raise PlanError(
                "the plan is frozen: it was compiled, or used as a key",
                text=str(self),
                remedy="Make a new one: FusionPlan(plan.src, *plan.ops, Relu())",
            )
        if not isinstance(op, Op):
            raise PlanError("this is not an operator", got=shown(op), text=str(self), remedy=_remedy(op))
        check_count(len(self) + 1)
        src, index = self.output, len(self)
        try:
            op.check_dtype(src)
            dst, operands, results = op.output(src), op.operands(src), op.results(src)
            for name, key in op.again.items():
                self._check_again(op, name, key)
            views = op.views(src)
            for name in (*(each.name for each in results if isinstance(op, Save)), *views):
                if name in self._taken:
                    field = "names" if views else "key"
                    raise refused(op.name, field, f"cannot be {name}: the plan has a tensor of that name")
        except PlanError as error:
            raise error.located(plan_text(self._src, [*self.ops, op]), index) from None
        statistics = op.reduced_names(src) if isinstance(op, Normalization) else ()
        self._steps.append(
            Step(
                index,
                op,
                src,
                dst,
                self._placed(operands),
                self._placed(op.parameters()),
                self._placed(results),
                tuple((name, _key(name, self._taken)) for name in statistics),
            )
        )
        return self._steps[-1]

    def _placed(self, declared: Iterable[Placed]) -> tuple[Placed, ...]:
        """Operands, parameters or results of the next operator with their keys in the plan."""
        made = (replace(each, key=_key(each.name, self._taken), step=len(self)) for each in declared)
        return tuple(made)

    def _check_again(self, op: Op, operand: str, key: str) -> None:
        """Checks that an operator's operand is an earlier value of the plan, of the right shape."""
        saved = {each.key: each.spec for each in self.results if isinstance(self[each.step].op, Save)}
        if key not in saved:
            near = (
                did_you_mean(key, saved) if saved else "Write `save(name)` behind the operator that makes it"
            )
            raise refused(
                op.name, operand, f"is no value that the plan saves before: {shown(key)}", remedy=near
            )
        if saved[key].shape != self.output.shape:
            raise refused(
                op.name, operand, "is a value of another shape", got=str(saved[key]), want=str(self.output)
            )

    def _name(self, ops: list[Op]) -> None:
        """Gives the input's axes the names that the last operator tells, and the steps so far with them."""
        found = naming.named(self._src, ops, named_text)
        naming.check(found, ops, named_text)
        if found.names == self._src.names:
            return
        self._src, self._steps, self._taken = found, [], {"x"}
        for op in ops[:-1]:
            self._append(op)

    @property
    def src(self) -> TensorSpec:
        """The input."""
        return self._src

    @property
    def output(self) -> TensorSpec:
        """The result of the last operator; the input while there is none."""
        return self._steps[-1].dst if self._steps else self._src

    @property
    def steps(self) -> tuple[Step, ...]:
        """The operators at their places."""
        return tuple(self._steps)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operators."""
        return tuple(step.op for step in self._steps)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All tensors given at run time besides the input, in the plan's order."""
        return tuple(operand for step in self._steps for operand in step.operands)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All numbers given at run time, in the plan's order."""
        return tuple(parameter for step in self._steps for parameter in step.parameters)

    @property
    def results(self) -> tuple[Result, ...]:
        """All tensors that the plan gives besides its output, in the plan's order."""
        return tuple(result for step in self._steps for result in step.results)

    @property
    def views(self) -> dict[str, tuple[slice, ...]]:
        """The parts of its output that it gives too: their indices, by key."""
        return {name: index for step in self._steps for name, index in step.op.views(step.src).items()}

    @property
    def compute_dtype(self) -> str:
        """The dtype of computation and parameters: f64 for f64 and long sums of integers, else f32."""
        dtypes = (self._src.dtype, *(step.dst.dtype for step in self._steps))
        is_long = has_long_sums(self._src, self._steps)
        return "f64" if is_long or "f64" in dtypes else "f32"

    @property
    def is_open(self) -> bool:
        """Whether the input has open axes: each call says how long they are."""
        return bool(self._src.open_axes)

    def with_extents(self, *extents: int) -> FusionPlan:
        """The plan with numbers for its open axes, in logical order; itself where it has none.

        Raises:
            PlanError: there are more or fewer numbers than open axes, or one cannot be an extent.
        """
        return FusionPlan(self._src.with_extents(*extents), *self.ops) if self.is_open or extents else self

    @property
    def is_frozen(self) -> bool:
        """Whether `add` is refused."""
        return self._is_frozen

    def freeze(self) -> None:
        """Lets no operator be added any more."""
        self._is_frozen = True

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, index: int) -> Step:
        try:
            return self._steps[index]
        except IndexError:
            raise IndexError(
                f"the plan has {counted(len(self), 'operator')}; there is no plan[{index}]: {self}"
            ) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FusionPlan):
            return NotImplemented
        return self._src == other._src and self.ops == other.ops

    def __hash__(self) -> int:
        self.freeze()
        return hash((self._src, self.ops))

    def __str__(self) -> str:
        return plan_text(self._src, self.ops)

    def __repr__(self) -> str:
        return f"FusionPlan.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> FusionPlan:
        """The plan that a text writes: `f16[64x256x55x55, nhwc] -> conv2d(64, kernel=1) -> bias -> relu`.

        Raises:
            PlanError: it writes none; carets stand under the piece to blame.
        """
        src, ops = parse_plan(text)
        try:
            return cls(src, *ops)
        except PlanError as error:
            raise error.located(text, error.operator) from None

    def backward(self, wrt: Collection[str] | None = None, results: Collection[str] = ()) -> Any:
        """The gradients of the whole plan: a `fuseplan.Backward`, which stands above plans.

        Args:
            wrt: what to differentiate by: `src` and keys of operands; all unless given.
            results: keys of saved values whose gradients are given too, as `grad_KEY`.

        Raises:
            PlanError: a name is none of the plan's; src is open or has gaps.
            Unsupported: no plans compute the gradient of an operator; it names the operator.
        """
        return import_module("fuseplan.backward.value").backward(self, wrt, results)

    def to_json(self) -> str:
        """The plan as JSON: `{"src": ..., "operators": [{"name": ..., "fields": {...}}, ...]}`."""
        return plan_json(self._src, self.ops)

    def to_dot(self) -> str:
        """The plan as a graph in Graphviz's language; `Match.to_dot` frames the kernel too."""
        return dot_text(self._src, self._steps)

    @classmethod
    def from_json(cls, text: str) -> FusionPlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the JSON is broken or is no plan's; the message says where.
        """
        src, ops = parse_json(text)
        return cls(src, *ops)

    def reference(
        self, src: ArrayLike, operands: Mapping[str, ArrayLike], parameters: Mapping[str, float] | None = None
    ) -> Array:
        """The output that `evaluate` gives: float64, of `plan.output.shape`."""
        return self.evaluate(src, operands, parameters)[0]

    def evaluate(
        self,
        src: ArrayLike,
        operands: Mapping[str, ArrayLike],
        parameters: Mapping[str, float] | None = None,
        slip: float = 0.0,
    ) -> tuple[Array, dict[str, Array]]:
        """The meaning of the plan in float64, operator by operator, nothing rounded between them.

        Args:
            src: an array of `plan.src.shape`, logical order; any dtype. Open axes are as long as in src.
            operands: the arrays, by the keys of `plan.operands`; and the old values of the results that are
                updated, by theirs.
            parameters: numbers in the place of the plan's own, by the keys of `plan.parameters`.
            slip: relative error put on each statistic: how far it moves the output is how far rounding may.

        Returns:
            The output, float64, of `plan.output.shape`; and the results and views by key, float64.

        Raises:
            ArgumentError: an array is missing, unknown or of another shape.
        """
        if self.is_open:
            extents = extents_in("src", np.shape(src), self._src.shape)
            return self.with_extents(*extents).evaluate(src, operands, parameters, slip)
        arrays, values = given_by_key(self._steps, operands, parameters or {})
        return self.meaning(wide("src", src, self._src.shape), arrays, values, slip)

    def meaning(
        self,
        src: Any,
        tensors: Mapping[str, Any],
        values: Mapping[str, float],
        slip: float = 0.0,
        by: Arithmetic = ARRAYS,
    ) -> tuple[Any, dict[str, Any]]:
        """`evaluate` without checks, for tensors of any kind; the arguments are as for `Step.evaluate`."""
        results: dict[str, Any] = {}
        for step in self._steps:
            src, made = step.evaluate(src, {**tensors, **results}, values, slip, by)
            results |= made
        return src, results | {name: src[index] for name, index in self.views.items()}


def as_plan(plan: FusionPlan | str) -> FusionPlan:
    """The plan, read where it is a text.

    Raises:
        PlanError: the text is no plan.
        ArgumentError: it is neither.
    """
    if isinstance(plan, FusionPlan):
        return plan
    if not isinstance(plan, str):
        told = f"want a FusionPlan or its text, got {a_thing(plan)}\n  {instead_of(plan)}"
        raise ArgumentError(told.rstrip())
    return FusionPlan.parse(plan)


def _input(src: object) -> TensorSpec:
    """What a plan begins with."""
    if isinstance(src, TensorSpec):
        return src
    if not isinstance(src, str):
        got = a_thing(src) if hasattr(src, "shape") else shown(src)  # a tensor prints its elements
        raise PlanError("a plan begins with a TensorSpec or its text", got=got, remedy=instead_of(src))
    if ARROW in src:
        raise PlanError("this is a whole plan, not its input", text=src, remedy="Use FusionPlan.parse(text)")
    return TensorSpec.parse(src)


def _remedy(value: object) -> str:
    """The way to write a value that is no operator."""
    if isinstance(value, type) and issubclass(value, Op):
        return f"Write {value.__name__}(...)"
    if isinstance(value, list | tuple):
        return "Operators are given one by one: FusionPlan(src, *operators)"
    return "FusionPlan.parse reads a text, with the input's" if isinstance(value, str) else instead_of(value)


def _check_direction(direction: str, text: str) -> None:
    if direction not in DIRECTIONS:
        raise PlanError(
            f"there is no direction {shown(direction)}",
            want=" or ".join(DIRECTIONS),
            remedy=near_miss(str(direction), DIRECTIONS),
        )
    if direction == "horizontal":
        refusal = Refusal(Reason.HORIZONTAL, got="direction=horizontal", want="direction=vertical")
        raise Unsupported("no plan is fused horizontally", text=text, refusals=[refusal])


def _key(name: str, taken: set[str]) -> str:
    """The first of `name`, `name_2`, `name_3`, ... that is not taken; it is taken then."""
    key, count = name, 1
    while key in taken:
        count += 1
        key = f"{name}_{count}"
    taken.add(key)
    return key
