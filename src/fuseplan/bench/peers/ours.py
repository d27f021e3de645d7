"""fuseplan through its public functions, in the forms that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fuseplan.arrays import empty
from fuseplan.bench.peers.peer import Array, Arrays, Prepared
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.declarations import Result
from fuseplan.measure.clock import rotating
from fuseplan.plan import FusionPlan
from fuseplan.template import Accuracy
from fuseplan.tensor import Dense
from fuseplan.tuning.unfused import OneAtATime


class Fuseplan:
    """The plan as one kernel, bound to its arrays."""

    name: ClassVar[str] = "fuseplan"
    packages: ClassVar[tuple[str, ...]] = ()
    accuracy: ClassVar[Accuracy] = "default"

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Compiles once and binds each copy of the arrays."""
        compiled = compile_plan(plan, "cpu", threads=self._threads, accuracy=self.accuracy)
        outputs = [empty(plan.output) for _ in copies]
        calls = []
        further = [{each.key: _result(each.result) for each in plan.results} for _ in copies]
        for arrays, out, results in zip(copies, outputs, further, strict=True):
            operands: dict[str, Any] = {key: array for key, array in arrays.items() if key != "src"}
            calls.append(partial(compiled.bind(**operands, **results), arrays["src"], out))

        def result() -> Array | tuple[Array, ...]:
            calls[0]()
            return (np.array(outputs[0]), *further[0].values()) if further[0] else np.array(outputs[0])

        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result, facts_of(compiled))


def facts_of(compiled: CompiledPlan) -> dict[str, Any]:
    """What a result line says of a kernel of ours."""
    template = compiled.choice.template
    return {
        "template": template.name,
        "knobs": template.knobs,
        "target": str(compiled.target),
        "nbytes": compiled.traffic.total,
        "flops": template.flops(compiled.kernel),
    }


def _result(result: Result) -> Array:
    return empty(Dense(result.shape, result.dtype))


class FuseplanAgain(Fuseplan):
    """The same once more, in a process of its own: how far apart two measurements of one thing are."""

    name = "fuseplan:again"


class FuseplanStrict(Fuseplan):
    """Without the faster and less accurate form of Winograd."""

    name = "fuseplan:strict"
    accuracy = "strict"


class FuseplanUnfused:
    """The plan's operators one at a time, each a kernel of its own: what fusing saves."""

    name: ClassVar[str] = "fuseplan:unfused"
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Compiles and binds every operator, for each copy of the arrays."""
        calls = [OneAtATime(plan, arrays, self._threads) for arrays in copies]

        def result() -> Array:
            return np.array(calls[0]())

        facts = {"target": "cpu", "nbytes": calls[0].nbytes}
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result, facts)
