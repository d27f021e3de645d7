"""What MIOpen accepts and then computes as something else is computed as it is written."""

import numpy as np
import pytest

from closeness import assert_close
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import random_arrays, reference
from fuseplan.plans.plan import FusionPlan
from orders import ORDERS, orders

CASES = [pytest.param(*pair, id=str(pair[0])) for pair in orders("f32", "f64", "f16", "bf16")]


@pytest.mark.parametrize(("plan", "miopens"), CASES)
@pytest.mark.part(2)
def test_the_order_is_computed_as_written(plan: FusionPlan, miopens: FusionPlan) -> None:
    arrays = random_arrays(plan, 11)
    compiled = compile_plan(plan, "cpu", cache=False)
    assert compiled.kernels == 1
    assert_close(compiled, arrays, slack=32)  # tanh shrinks the result, not the error of the sums
    want = reference(plan, arrays)
    needed = {"src", *(held.key for held in miopens.operands)}
    other = reference(miopens, {key: array for key, array in arrays.items() if key in needed})
    assert np.abs(want - other).max() > 0.1 * np.abs(want).max(), "the two could not be told apart"


def test_every_order_is_there() -> None:
    assert {letters for letters, _, _ in ORDERS} == {"CAN", "CAA", "CNN", "CANA"}
