"""The operators of a plan one at a time, each compiled and bound by itself: what fusing is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.match import unfuse
from fuseplan.plan import FusionPlan
from fuseplan.target import Target


def bytes_moved(compiled: CompiledPlan) -> int:
    """Bytes that one launch reads and writes, its workspace included."""
    return compiled.choice.template.traffic(compiled.kernel, compiled.target).total


class OneAtATime:
    """A kernel an operator; calling it runs them in order and gives the last one's output.

    Args:
        plan: the plan.
        arrays: `src` and operands by the plan's keys.
        threads: as for the fused plan.
        target: where; the tensors lie there.
    """

    def __init__(
        self,
        plan: FusionPlan,
        arrays: Mapping[str, Any],
        threads: int | None = None,
        target: Target | str = "cpu",
    ) -> None:
        self.compiled: list[CompiledPlan] = []
        self._bound: list[Callable[[], object]] = []
        src = arrays["src"]
        for step, alone in zip(plan.steps, unfuse(plan), strict=True):
            compiled = compile_plan(alone, target, threads=threads)
            pairs = zip(alone.operands, step.operands, strict=True)
            given: dict[str, Any] = {own.key: arrays[ours.key] for own, ours in pairs}
            bound = compiled.bind(**given)
            out = bound(src)
            self._bound.append(partial(bound, src, out))
            self.compiled.append(compiled)
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
        return sum(bytes_moved(compiled) for compiled in self.compiled)
