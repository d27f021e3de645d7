"""Two forms of a whole graph timed in turns: with plans, and as a framework has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from fuseplan.execution.stages import with_threads
from fuseplan.graph.choose import key_on
from fuseplan.graph.trial import HOW
from fuseplan.graph.why import Reason, Why
from fuseplan.kernels.target import parse_target
from fuseplan.measure.ground import machine_of
from fuseplan.measure.quiet import unsteady
from fuseplan.stores.sites import Key, Measured
from fuseplan.torch.kernels import target_of


def key_of(code: str, inputs: Sequence[Any], plans: str, peer: str) -> Key:
    """What the measurement is stored by: the graph, its tensors, and torch's settings."""
    text, threads = target_of(next(each.device for each in inputs if isinstance(each, torch.Tensor)))
    target = parse_target(text) if threads is None else with_threads(parse_target(text), threads)
    told = [code, plans, f"{torch.is_grad_enabled()} {torch.get_float32_matmul_precision()}"]
    told += [
        f"{each.dtype} {tuple(each.shape)} {each.stride()} {each.requires_grad}"
        if isinstance(each, torch.Tensor)
        else str(each)
        for each in inputs
    ]
    return key_on(target, "\n".join(told), peer)


def lost(found: Measured | None) -> Reason | None:
    """Why the framework has the graph; None where plans have it."""
    return Reason(Why.of(found.code), found.said) if found is not None and found.code else None


def timed(key: Key, calls: Mapping[str, Callable[[], Any]], device: torch.device) -> Measured:
    """Both forms, the one with plans first, by their names; times that others disturb say nothing."""
    (plans, ours), (peer, own) = calls.items()
    _, clock = machine_of(parse_target(target_of(device)[0]).device)
    clock.protocol = replace(HOW, rounds=7)
    watch = clock.watch()
    times = clock.interleave({plans: ours, peer: own})
    seconds = {name: timing.median for name, timing in times.items()}
    disturbance = watch.disturbance() or unsteady(times)
    is_slower = disturbance is None and seconds[peer] < seconds[plans]
    said = f"the whole graph takes {seconds[plans] * 1e6:.1f} us with plans, {peer} {seconds[peer] * 1e6:.1f}"
    date, code = datetime.now(UTC).isoformat(timespec="seconds"), Why.SLOWER.code if is_slower else ""
    said = said if is_slower else ""
    return Measured(key, plans, peer, None, 0.0, date, None, seconds, code, said, disturbance)
