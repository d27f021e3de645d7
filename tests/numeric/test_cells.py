"""What the supported table says of the CPU, run: each cell's template on a plan of it, beside float64."""

import pytest

from cells import covering
from closeness import assert_close
from forced import forced, narrowed
from fuseplan.cli.combinations import Cell
from fuseplan.kernels.template import Template
from fuseplan.measure.data import random_arrays
from training import assert_trained, training_arrays

WIDTH = 32  # bytes of a vector of cpu:avx2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each combination, and each template in each dtype and in each layout; with `--whole`, all cells."""
    is_whole = metafunc.config.getoption("whole")
    metafunc.parametrize(("turn", "cell", "kind"), [*covering("cpu:avx2", whole=is_whole)])


def test_a_cell_is_computed(turn: int, cell: Cell, kind: type[Template]) -> None:
    compiled = forced(plan := cell.plan(turn), kind, narrowed(WIDTH))
    if plan.results:
        assert_trained(compiled, training_arrays(plan))
    else:
        assert_close(compiled, random_arrays(plan, 5), slack=64)
