"""Whether fusing paid, measured: the fused kernel, our operators one at a time, and eager torch.

Verdicts are kept in a file in the cache folder, one JSON object a line; `explain` shows the last one for its
plan, target and processor. Times that were taken beside other programs are no verdict, and are not kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fuseplan.errors import ArgumentError, BuildError, FuseplanError
from fuseplan.execution.build import build_sound
from fuseplan.execution.run import BoundPlan
from fuseplan.execution.runner import Runner, runner_of
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.match import unfuse
from fuseplan.kernels.target import Target
from fuseplan.measure.ground import Ground, first_wrong
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.quiet import undisturbed, unsteady
from fuseplan.ops.ranges import RANGES, Save
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.stores import journal
from fuseplan.stores.tuned import processor_of


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


FILE = "verdicts.jsonl"
FUSED, UNFUSED = "fused", "one at a time"
ROUNDS = 7
UNKNOWN = "other programs were not looked for"
TORCH = "torch"
ANOTHER = 0.1  # of the largest output: what is further away computes something else
SHOWN = 200  # characters of torch's own message


@dataclass(frozen=True)
class Verdict(journal.Stored):
    """What fusing a plan brought on one machine.

    Attributes:
        plan, target, processor: what was measured, and where.
        template: the choice that ran.
        fused: seconds of the fused kernel, median.
        others: seconds of each unfused run: fuseplan's own kernels one at a time, and the frameworks'.
        refused: runs that could not be measured, and why.
        kernels: how many kernels our own unfused run is.
        date: when, in UTC.
        disturbance: which other use of the machine makes the times unreliable; None where there was none.
    """

    derived = ("speedup", "pays")

    plan: str
    target: str
    processor: str
    template: str
    fused: float
    others: Mapping[str, float]
    refused: Mapping[str, str]
    kernels: int
    date: str
    disturbance: str | None = UNKNOWN  # of an earlier version, which did not look

    @property
    def best_other(self) -> str | None:
        """The fastest unfused run; None where none could be measured."""
        return min(self.others, key=lambda name: self.others[name]) if self.others else None

    @property
    def speedup(self) -> float | None:
        """The fastest unfused run's time over the fused kernel's.

        None where there is no such run, and where the times are unreliable.
        """
        best = self.best_other
        return None if best is None or self.disturbance else self.others[best] / self.fused

    @property
    def pays(self) -> bool | None:
        """Whether the fused kernel is at least as fast as every unfused run; None without a speedup."""
        return None if self.speedup is None else self.speedup >= 1

    @classmethod
    def from_json(cls, told: Any) -> Verdict:
        """Of what `to_json` gave.

        Raises:
            ValueError: it is not that, or has a time that is not positive.
        """
        found = super().from_json(told)
        if min(found.fused, *found.others.values()) <= 0:
            raise ValueError("a time is not positive")
        return found

    def __str__(self) -> str:
        ranked = sorted(self.others.items(), key=lambda pair: pair[1])
        ratios = {} if self.disturbance else {name: f", {each / self.fused:.2f}x" for name, each in ranked}
        listed = [f"  {name}: {_us(seconds)}{ratios.get(name, '')}" for name, seconds in ranked]
        listed += [f"  {name}: not measured: {why}" for name, why in self.refused.items()]
        advised = [f"  {advice}"] if (advice := self._advice()) else []
        return "\n".join([self._sentence(), *listed, f"  {self.processor}, {self.date}", *advised])

    def _advice(self) -> str | None:
        if self.disturbance:
            return "nothing is kept: measure again when other programs rest, or wait with --patience 60"
        if self.pays is False:
            return "run it unfused here, or look for a better choice with `fuseplan tune`"
        return None

    def _sentence(self) -> str:
        if self.disturbance:
            return f"no verdict: {self.disturbance}; fused took {_us(self.fused)}"
        if self.speedup is None:
            return f"the fused kernel takes {_us(self.fused)}; there was nothing to compare it with"
        if self.pays:
            return f"fusing pays: {_us(self.fused)}, {self.speedup:.2f} times as fast as {self.best_other}"
        return f"fusing loses: {_us(self.fused)}, {self.best_other} is {1 / self.speedup:.2f} times as fast"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def judge(
    records: Records,
    ground: Ground,
    variants: Mapping[str, Callable[[], object]],
    refused: Mapping[str, str],
    patience: float = 0.0,
) -> Verdict:
    """Times the variants, of which `FUSED` is the fused kernel, and keeps the verdict if it is reliable.

    Args:
        variants: by name: the fused kernel, `UNFUSED`, and each framework.
        refused: other runs, and why they are not among the variants.
        patience: seconds to wait for other programs to rest.
    """
    times = partial(ground.times, variants, ROUNDS)
    timed, disturbance = undisturbed(times, ground.watch, patience, unsteady)
    taken = {name: timing.median for name, timing in timed.items()}
    verdict = Verdict(
        plan=str(records.plan),
        target=str(records.target),
        processor=processor_of(records.target),
        template=records.choice.template.text,
        fused=taken.pop(FUSED),
        others=taken,
        refused=dict(refused),
        kernels=len(records.plan),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        disturbance=disturbance,
    )
    if disturbance is None:
        journal.append(FILE, verdict.to_json())
    return verdict


def recorded(plan: str, target: str, processor: str) -> Verdict | None:
    """The last verdict on a plan on this kind of machine; None where there is none."""
    for verdict in reversed(journal.read(FILE, Verdict.from_json)):
        is_asked = (verdict.plan, verdict.target, verdict.processor) == (plan, target, processor)
        if is_asked and verdict.disturbance is None:
            return verdict
    return None


def verdict_on(records: Records, runner: Runner, ground: Ground, patience: float = 0.0) -> Verdict:
    """The verdict on a plan, measured, and kept if it is reliable.

    Args:
        records: of the fused plan; its target is one of this machine's.
        patience: seconds to wait for other programs to rest.

    Raises:
        ArgumentError: the fused kernel's result is wrong here; it is not compared then.
        MemoryError: what float64 needs does not fit.
    """
    variants: dict[str, Callable[[], object]] = {FUSED: _fused(records, runner, ground)}
    refused: dict[str, str] = {}
    with _torch_at_its_best(records):
        makers = {UNFUSED: _one_at_a_time, TORCH: _torch}
        for name, make in makers.items():
            try:
                variants[name] = make(records, ground)
            except (CannotRunError, FuseplanError, ImportError, RuntimeError) as error:
                refused[name] = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
        return judge(records, ground, variants, refused, patience)


def _fused(records: Records, runner: Runner, ground: Ground) -> Callable[[], object]:
    call = ground.call(lambda **given: BoundPlan(runner, given))
    wrong = first_wrong(records.kernel, records.choice.template, ground.deviations(call()))
    if wrong is not None:
        raise ArgumentError(
            f"{records.choice} computes {records.plan} wrongly on {records.target}: {wrong} from float64; "
            "choose another with template=, and report this"
        )
    return call


def _one_at_a_time(records: Records, ground: Ground) -> Callable[[], object]:
    if len(records.plan) == 1:
        raise CannotRunError("the plan is one operator")
    threads = None if records.target.processors else records.target.threads
    return OneAtATime(records.plan, {**ground.tensors, **ground.results()}, threads, records.target)


def _torch(records: Records, ground: Ground) -> Callable[[], object]:
    from fuseplan.measure.torch_eager import as_arrays, eager  # noqa: PLC0415 - torch is optional

    call = eager(records.plan, {**ground.tensors, **ground.results()})
    got = call()
    deviation = ground.deviation(got if records.target.processors else as_arrays(got))
    if not deviation <= ANOTHER:
        raise CannotRunError(f"its result is {deviation:.1e} of the largest output away from float64")
    return call


def _torch_at_its_best(records: Records) -> contextlib.AbstractContextManager[None]:
    """Torch's settings while it is measured; nothing where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return contextlib.nullcontext()
    from fuseplan.measure.torch_eager import at_its_best  # noqa: PLC0415 - as above

    return at_its_best(records.plan, records.target)
