"""What the supported table says of a GPU, run: each cell's template on a plan of it, beside float64."""

from typing import Any

import pytest
import torch

from cells import covering
from device.guarded import inputs, output, wanted, worst
from forced import forced
from fuseplan.cli.combinations import Cell
from fuseplan.compile import CompiledPlan
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import evaluated
from fuseplan.ops.normalization import Normalization, reduced_axes
from fuseplan.plans.plan import FusionPlan

EPSILON = 1e-5  # the operators' own
SLACK = 64  # roundings of the compute dtype, of the largest value


@pytest.mark.parametrize(("turn", "cell", "kind"), [*covering("triton:sm_90", whole=True)])
def test_a_cell_is_computed(turn: int, cell: Cell, kind: type[Template]) -> None:
    compiled = forced(plan := cell.plan(turn), kind, parse_target("cuda"))
    if plan.results:
        assert_trained(compiled)
        return
    tensors, out = inputs(plan, 5), output(plan)
    want, allowed = wanted(compiled, tensors)
    assert worst(compiled(out=out.tensor, **tensors), want, allowed) <= 1
    assert out.stands
    assert torch.equal(compiled(**tensors), out.tensor), "other bits the second time"


def assert_trained(compiled: CompiledPlan) -> None:
    """The output and every result, each over its largest value; in the output, a rounding of the mean too."""
    plan = compiled.plan
    tensors, out = inputs(plan, 5), output(plan)
    want, results = evaluated(plan, tensors)
    made = compiled(out=out.tensor, **tensors)
    assert out.stands
    rounding = DTYPES[plan.src.dtype].epsilon if plan.src.itemsize == 2 else 0.0
    epsilon = DTYPES[plan.src.compute_dtype].epsilon
    for key, value in {"out": want, **results}.items():
        allowed = (SLACK * epsilon + (rounding if key == "out" else 0)) * value.abs().amax()
        if key == "out":
            allowed = allowed + 2 * epsilon * moved(plan, tensors)
        off = (getattr(made, key).double() - value).abs()
        assert bool((off <= allowed).all()), f"{key}: {float((off / allowed).amax())} of what is allowed"


def moved(plan: FusionPlan, tensors: dict[str, Any]) -> Any:
    """How far the output is, where its mean is off by all of itself: |mean| scale / deviation.

    The mean is a number of the compute dtype; of two values that lie close, its rounding is much of either's
    deviation.
    """
    step, op = next((step, step.op) for step in plan if isinstance(step.op, Normalization))
    x = tensors[step.keys.get("input", "src")].double()
    axes = reduced_axes(op.per, x.dim())
    deviation = (x.var(axes, correction=0, keepdim=True) + EPSILON).sqrt()
    return x.mean(axes, keepdim=True).abs() * tensors[step.keys["scale"]].double().abs().amax() / deviation
