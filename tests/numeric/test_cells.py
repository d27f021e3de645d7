"""What the supported table says of the CPU, run: each cell's template on a plan of it, beside float64."""

import pytest

from cells import parameters
from closeness import assert_close
from forced import forced, narrowed
from fuseplan.cli.combinations import Cell
from fuseplan.kernels.template import Template
from fuseplan.measure.data import random_arrays
from training import assert_trained, training_arrays

WIDTH = 32  # bytes of a vector of cpu:avx2


@pytest.mark.part(10)
@pytest.mark.parametrize(("turn", "cell", "kind"), parameters("cpu:avx2"))
def test_a_cell_is_computed(turn: int, cell: Cell, kind: type[Template]) -> None:
    compiled = forced(plan := cell.plan(turn), kind, narrowed(WIDTH))
    if plan.results:
        assert_trained(compiled, training_arrays(plan))
    else:
        assert_close(compiled, random_arrays(plan, 5), slack=64)
