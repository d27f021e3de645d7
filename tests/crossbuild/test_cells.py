"""What the supported table says of GPUs, compiled: cells with every combination, dtype and layout.

All of them run on a GPU: `tests/device/test_cells.py`.
"""

import pytest

from cells import covering
from forced import forced
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.cli.combinations import Cell
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template

TARGETS = ("triton:sm_90", "triton:gfx942")
MOST = 80  # of a target
CASES = {target: list(covering(target)) for target in TARGETS}


@pytest.mark.part(6)
@pytest.mark.parametrize(
    ("target", "turn", "cell", "kind"),
    [
        pytest.param(target, *case.values, id=f"{target}-{case.id}")
        for target, cases in CASES.items()
        for case in cases
    ],
)
def test_a_cell_compiles(target: str, turn: int, cell: Cell, kind: type[Template]) -> None:
    assert forced(cell.plan(turn), kind, parse_target(target)).program.code


@pytest.mark.parametrize("target", TARGETS)
def test_the_set_is_bounded(target: str) -> None:
    assert len(CASES[target]) <= MOST


def test_numbers_that_programs_pass_on_are_scalars() -> None:
    """As columns of 16 numbers they were 2,048 stores to shared memory, and the code took 205 KB, not 28."""
    made = forced(
        "bf16[8x65536] -> layer_norm", GpuReduction, parse_target(TARGETS[0]), GpuReduction(1, 4096, 16, 8)
    )
    assert len(made.program.code) < 1 << 16
