"""A whole graph of Dynamo's with plans beside the same as Inductor compiles it: the faster has the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx

from fuseplan.graph.choose import Mode
from fuseplan.graph.trial import problem_of
from fuseplan.kernels.template import Accuracy
from fuseplan.stores import sites
from fuseplan.stores.sites import Key, Measured
from fuseplan.torch.cutting import copied
from fuseplan.torch.inductor import PEER
from fuseplan.torch.turns import key_of, lost, timed

Call = Callable[..., Any]
PLANS = "plans and Inductor"


def faster(
    given: fx.GraphModule,
    inputs: Sequence[Any],
    choose: Mode,
    accuracy: Accuracy,
    dryrun: bool,
    with_plans: Callable[..., Call],
) -> Call:
    """The graph with plans, or Inductor's own of the whole graph where that is faster, measured.

    Inductor fuses the operators around a site with the site's own where no plan takes them: a site that is
    faster by itself may make the graph slower. A stored measurement counts, whatever `choose` says. A graph
    with gradients is chosen site by site alone: torch compiles its backward pass in the first call.

    Args:
        choose: `measured`: measure where nothing is stored.
        accuracy: of the plans.
        dryrun: nothing is compiled.
        with_plans: makes the graph with plans; is given the reason why Inductor has the graph, for reports.
    """
    key = key_of(given.code, inputs, f"{PLANS} {accuracy}", PEER)
    plain = copied(given)  # plans, and Inductor, write into the graph
    found = sites.KEPT.records().get(key)
    if dryrun:
        return with_plans(lost=lost(found))
    if found is not None:
        return compile_fx(plain, inputs) if lost(found) else with_plans()
    if choose == "predicted" or not _is_measurable(inputs):
        return with_plans()
    ours = with_plans()
    try:
        own = compile_fx(plain, inputs)
        found = _measured(key, {PLANS: ours, PEER: own}, inputs)
    except Exception as error:  # Inductor's, or no memory for the inputs once more: plans need neither
        warnings.warn(f"the whole graph is not measured: {problem_of(error)}", stacklevel=2)
        return ours
    sites.keep(found)
    return own if lost(found) else ours


def _is_measurable(inputs: Sequence[Any]) -> bool:
    """Whether all inputs are torch's own tensors with elements, of which no gradient is taken."""
    is_plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in inputs)
    return is_plain and not (torch.is_grad_enabled() and any(each.requires_grad for each in inputs))


def _measured(key: Key, made: dict[str, Call], inputs: Sequence[Any]) -> Measured:
    """Both forms of the graph timed in turns, on tensors like those of a call."""
    given = [each.detach().clone() for each in inputs]  # calls may write
    return timed(key, {name: partial(each, *given) for name, each in made.items()}, inputs[0].device)
