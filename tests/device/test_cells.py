"""What the supported table says of a GPU, run: each cell's template on a plan of it, beside float64."""

import pytest
import torch

from cells import parameters
from device.guarded import inputs, output, wanted, worst
from forced import forced
from fuseplan.compile import CompiledPlan
from fuseplan.measure.gpu_data import evaluated
from fuseplan.plan import FusionPlan
from fuseplan.target import parse_target
from fuseplan.template import Template
from fuseplan.tensor import DTYPES

SLACK = 64  # roundings of the compute dtype, of the largest value


@pytest.mark.parametrize(("kind", "plan"), parameters("triton:sm_90"))
def test_a_cell_is_computed(kind: type[Template], plan: FusionPlan) -> None:
    compiled = forced(plan, kind, parse_target("cuda"))
    if plan.results:
        assert_trained(compiled)
        return
    tensors, out = inputs(plan, 5), output(plan)
    want, allowed = wanted(compiled, tensors)
    assert worst(compiled(out=out.tensor, **tensors), want, allowed) <= 1
    assert out.stands
    assert torch.equal(compiled(**tensors), out.tensor), "other bits the second time"


def assert_trained(compiled: CompiledPlan) -> None:
    """The output and every result, each over its largest value."""
    plan = compiled.plan
    tensors, out = inputs(plan, 5), output(plan)
    want, results = evaluated(plan, tensors)
    made = compiled(out=out.tensor, **tensors)
    assert out.stands
    rounding = DTYPES[plan.src.dtype].epsilon if plan.src.itemsize == 2 else 0.0
    several = SLACK * DTYPES[plan.src.compute_dtype].epsilon
    for key, value in {"out": want, **results}.items():
        off = (getattr(made, key).double() - value).abs().amax()
        allowed = several + (rounding if key == "out" else 0)
        assert float(off) <= allowed * float(value.abs().amax()), key
