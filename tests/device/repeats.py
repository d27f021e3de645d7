"""Launches of one kernel again and again: between walls, within the error bound, and each time the same."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from device.guarded import CANARY, Walled, inputs, output
from device.test_numeric import made
from fuseplan.compile import CompiledPlan
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import evaluated
from fuseplan.measure.spaces import torch_dtype
from fuseplan.plans.plan import FusionPlan

REPEATS = 8
SLACK = 64.0  # roundings of the compute dtype, of the largest value


def walls(plan: FusionPlan, device: str = "cuda") -> dict[str, Walled]:
    """Poisoned results between margins."""
    specs = {each.key: each.spec for each in plan.results}
    return {
        key: Walled(spec.shape, spec.element_strides, torch_dtype(spec.dtype), CANARY, device)
        for key, spec in specs.items()
    }


def old(tensors: Mapping[str, Any], results: dict[str, Walled]) -> dict[str, Any]:
    """The tensors that results are written into; old values in those that are updated."""
    for key in tensors.keys() & results.keys():
        results[key].tensor.copy_(tensors[key])
    return {key: wall.tensor for key, wall in results.items()}


def deviation(plan: FusionPlan, got: Any, want: Any, dtype: str) -> float:
    """The largest error over what is allowed: at most 1 is right."""
    epsilon = SLACK * DTYPES[plan.src.compute_dtype].epsilon
    rounding = DTYPES[dtype].epsilon if dtype in ("f16", "bf16") else 0.0
    allowed = (epsilon + rounding / 8) * want.abs().amax() + rounding * want.abs() + 1e-30
    return float(((got.double() - want).abs() / allowed).nan_to_num(nan=float("inf")).amax())


def repeated(
    compiled: CompiledPlan, tensors: Mapping[str, Any], results: Collection[str], count: int = REPEATS
) -> tuple[Any, ...]:
    """The output and the results of a launch; fails where a wall falls, or another launch gives others.

    Args:
        compiled: the kernel.
        tensors: src, operands, and old values of results that are updated.
        results: the keys of the results.
        count: the number of launches.
    """
    plan, src = compiled.plan, tensors["src"]
    operands = {key: tensor for key, tensor in tensors.items() if key != "src" and key not in results}
    bound, seen = compiled.bind(**operands), list[tuple[Any, ...]]()
    for _ in range(count):
        out, made = output(plan, str(src.device)), walls(plan, str(src.device))
        bound(src, out.tensor, **old(tensors, made))
        assert out.stands
        assert all(wall.stands for wall in made.values())
        seen.append((out.tensor, *(wall.tensor for wall in made.values())))
    for again in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], again, strict=True))
    return seen[0]


def assert_repeated(kind: type[Template], place: int, text: str) -> None:
    """Fails unless each launch of that candidate gives every output and result within its bound."""
    compiled = made(kind, place, text)
    plan, tensors = compiled.plan, inputs(compiled.plan, 1)
    want, exact = evaluated(plan, tensors)
    out, *results = repeated(compiled, tensors, exact)
    assert deviation(plan, out, want, plan.output.dtype) <= 1
    for tensor, (key, value) in zip(results, exact.items(), strict=True):
        assert deviation(plan, tensor, value, plan.src.dtype) <= 1, key
