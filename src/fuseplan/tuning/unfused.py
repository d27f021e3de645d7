"""The operators of a plan one at a time, each compiled and bound by itself: what fusing is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fuseplan.errors import BuildError
from fuseplan.execution.build import build_sound
from fuseplan.execution.run import BoundPlan
from fuseplan.execution.runner import runner_of
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.match import unfuse
from fuseplan.kernels.target import Target
from fuseplan.ops.ranges import RANGES
from fuseplan.ops.save import Save
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step


class OneAtATime:
    """A kernel an operator; calling it runs them in order and gives the last one's output.

    Args:
        arrays: `src` and operands by the plan's keys.
        threads: as for the fused plan.
        target: where; the tensors lie there.

    Raises:
        Unsupported, BuildError, ArgumentError: an operator alone cannot be compiled or run for the target.
    """

    def __init__(
        self,
        plan: FusionPlan,
        arrays: Mapping[str, Any],
        threads: int | None = None,
        target: Target | str = "cpu",
    ) -> None:
        self.decided: list[Records] = []
        self._bound: list[Callable[[], object]] = []
        src, held = arrays["src"], dict(arrays)
        for step, alone in zip(plan.steps, unfuse(plan), strict=True):
            if isinstance(step.op, (Save, *RANGES)):  # the value is there, and nothing has to be computed
                if isinstance(step.op, Save):
                    held[step.op.key] = src
                continue
            records = decide(alone, target, threads=threads)
            given = _given(alone, step, held)
            got = bound_plan(records, given)(src)
            out, *results = got if isinstance(got, tuple) else (got,)
            given |= {each.key: tensor for each, tensor in zip(alone.results, results, strict=True)}
            self._bound.append(partial(bound_plan(records, given), src, out))
            self.decided.append(records)
            src = out
        self._result = src

    def __call__(self) -> Any:
        """Runs them all."""
        for call in self._bound:
            call()
        return self._result

    @property
    def nbytes(self) -> int:
        """Bytes they read and write, all together."""
        return sum(each.choice.template.traffic(each.kernel, each.target).total for each in self.decided)


def _given(alone: FusionPlan, step: Step, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's operands and updated results by the keys of its own plan."""
    keys = step.leaves
    given = {own.key: arrays[keys[own.name]] for own in alone.operands}
    results = zip(alone.results, step.results, strict=True)
    return given | {own.key: arrays[ours.key] for own, ours in results if own.updated}


def bound_plan(records: Records, operands: Mapping[str, Any]) -> BoundPlan:
    """The chosen kernel, built and bound to operands and results.

    Raises:
        BuildError: it cannot be built, or does not run on this machine.
        ArgumentError: an operand is not what the plan takes.
    """
    records, program = build_sound(records)
    runner = runner_of(records.plan, records.kernel, records.choice.template, program)
    if runner is None:
        raise BuildError(f"code for {records.target} does not run here: {program.refusal}")
    return BoundPlan(runner, operands)
