"""Measures whether fusing a plan paid: the fused kernel, our operators one at a time, and eager torch."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

from fuseplan.errors import ArgumentError, FuseplanError
from fuseplan.measure.checks import first_wrong
from fuseplan.measure.ground import Ground
from fuseplan.measure.layers import CannotRunError
from fuseplan.run import BoundPlan
from fuseplan.runner import Runner
from fuseplan.stages import Records
from fuseplan.tuning.unfused import OneAtATime
from fuseplan.tuning.verdict import FUSED, UNFUSED, Verdict, judge

TORCH = "torch"
ANOTHER = 0.1  # of the largest output: what is further away computes something else
SHOWN = 200  # characters of torch's own message


def verdict_on(records: Records, runner: Runner, ground: Ground, patience: float = 0.0) -> Verdict:
    """The verdict on a plan, measured, and kept if it is reliable.

    Args:
        records: of the fused plan; its target is one of this machine's.
        runner: of its program.
        ground: the plan's, on the target.
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
    from fuseplan.measure.torch_eager import eager  # noqa: PLC0415 - torch is optional

    call = eager(records.plan, {**ground.tensors, **ground.results()})
    got = call()
    deviation = ground.deviation(got if records.target.processors else _as_arrays(got))
    if not deviation <= ANOTHER:
        raise CannotRunError(f"its result is {deviation:.1e} of the largest output away from float64")
    return call


def _as_arrays(got: Any) -> Any:
    return tuple(map(_as_array, got)) if isinstance(got, tuple) else _as_array(got)


def _as_array(tensor: Any) -> Any:
    """A torch tensor of the host as NumPy's; f32 holds what bf16 does."""
    return (tensor.float() if tensor.element_size() == 2 else tensor).numpy()


def _torch_at_its_best(records: Records) -> contextlib.AbstractContextManager[None]:
    """Torch's settings while it is measured; nothing where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return contextlib.nullcontext()
    from fuseplan.measure.torch_eager import at_its_best  # noqa: PLC0415 - as above

    return at_its_best(records.plan, records.target)
