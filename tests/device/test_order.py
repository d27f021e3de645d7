"""What MIOpen accepts and then computes as something else is computed as it is written, on a GPU too."""

import pytest

from device.guarded import inputs, output, wanted, worst
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import reference
from fuseplan.plans.plan import FusionPlan
from orders import orders

CASES = [pytest.param(*pair, id=str(pair[0])) for pair in orders("f32", "f16", "bf16")]


@pytest.mark.parametrize(("plan", "miopens"), CASES)
def test_the_order_is_computed_as_written(plan: FusionPlan, miopens: FusionPlan) -> None:
    compiled = compile_plan(plan, "cuda")
    assert compiled.kernels == 1
    tensors, out = inputs(plan, 11), output(plan)
    want, allowed = wanted(compiled, tensors)
    assert worst(compiled(out=out.tensor, **tensors), want, allowed) <= 1
    assert out.stands
    other = reference(miopens, tensors)
    assert float((want - other).abs().amax()) > 0.1 * float(want.abs().amax()), "could not be told apart"
