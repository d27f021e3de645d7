"""A whole graph of Dynamo's with plans beside the same as Inductor compiles it: the faster has the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx

from fuseplan.execution.stages import with_threads
from fuseplan.graph.choose import Mode, key_on
from fuseplan.graph.trial import HOW, problem_of
from fuseplan.graph.why import Reason, Why
from fuseplan.kernels.target import parse_target
from fuseplan.measure.ground import machine_of
from fuseplan.stores import sites
from fuseplan.stores.sites import Key, Measured
from fuseplan.torch.inductor import PEER
from fuseplan.torch.kernels import target_of

Call = Callable[..., Any]
PLANS = "plans and Inductor"


def faster(
    given: fx.GraphModule, inputs: Sequence[Any], choose: Mode, dryrun: bool, with_plans: Callable[..., Call]
) -> Call:
    """The graph with plans, or Inductor's own of the whole graph where that is faster, measured.

    Inductor fuses the operators around a site with the site's own where no plan takes them: a site that is
    faster by itself may make the graph slower. A stored measurement counts, whatever `choose` says. A graph
    with gradients is chosen site by site alone: torch compiles its backward pass in the first call.

    Args:
        choose: `measured`: measure where nothing is stored.
        dryrun: nothing is compiled.
        with_plans: makes the graph with plans; is given the reason why Inductor has the graph, for reports.
    """
    key, plain = _key(given, inputs), _copied(given)  # plans, and Inductor, write into the graph
    found = sites.KEPT.records().get(key)
    if dryrun:
        return with_plans(lost=_lost(found))
    if found is not None:
        return compile_fx(plain, inputs) if _lost(found) else with_plans()
    if choose == "predicted" or not _is_measurable(inputs):
        return with_plans()
    ours = with_plans()
    try:
        own = compile_fx(plain, inputs)
        found = _measured(key, {PLANS: ours, PEER: own}, inputs)
    except Exception as error:  # Inductor's, or no memory for the inputs once more: plans need neither
        warnings.warn(f"the whole graph is not measured: {problem_of(error)}", stacklevel=2)
        return ours
    sites.KEPT.keep(found)
    return own if _lost(found) else ours


def _is_measurable(inputs: Sequence[Any]) -> bool:
    """Whether all inputs are torch's own tensors with elements, of which no gradient is taken."""
    is_plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in inputs)
    return is_plain and not (torch.is_grad_enabled() and any(each.requires_grad for each in inputs))


def _key(given: fx.GraphModule, inputs: Sequence[Any]) -> Key:
    """What the measurement is stored by: the graph, its tensors, and torch's settings."""
    text, threads = target_of(next(each.device for each in inputs if isinstance(each, torch.Tensor)))
    target = parse_target(text) if threads is None else with_threads(parse_target(text), threads)
    told = [given.code, PLANS, f"{torch.is_grad_enabled()} {torch.get_float32_matmul_precision()}"]
    told += [
        f"{each.dtype} {tuple(each.shape)} {each.stride()} {each.requires_grad}"
        if isinstance(each, torch.Tensor)
        else str(each)
        for each in inputs
    ]
    return key_on(target, "\n".join(told), PEER)


def _lost(found: Measured | None) -> Reason | None:
    """Why Inductor has the graph; None where plans have it."""
    return Reason(Why.of(found.code), found.said) if found is not None and found.code else None


def _copied(given: fx.GraphModule) -> fx.GraphModule:
    """The graph once more."""
    graph: fx.Graph = fx.Graph()
    graph.output(graph.graph_copy(given.graph, {}))
    made = fx.GraphModule(given, graph)
    made.meta = dict(given.meta)
    return made


def _measured(key: Key, made: dict[str, Call], inputs: Sequence[Any]) -> Measured:
    """Both forms of the graph timed in turns, on tensors like those of a call."""
    target, _ = target_of(inputs[0].device)
    _, clock = machine_of(parse_target(target).device)
    clock.protocol = replace(HOW, rounds=7)
    given = [each.detach().clone() for each in inputs]  # calls may write
    watch = clock.watch()
    times = clock.interleave({name: partial(each, *given) for name, each in made.items()})
    seconds = {name: timing.median for name, timing in times.items()}
    ours, own = seconds[PLANS] * 1e6, seconds[PEER] * 1e6
    said = f"the whole graph takes {ours:.1f} us with plans, Inductor's {own:.1f}"
    code = Why.SLOWER.code if own < ours else ""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Measured(
        key, PLANS, PEER, None, 0.0, date, None, seconds, code, said if code else "", watch.disturbance()
    )
