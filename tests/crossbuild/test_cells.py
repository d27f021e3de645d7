"""What the supported table says of GPUs, compiled: cells with every combination, dtype and layout.

All of them run on a GPU: `tests/device/test_cells.py`.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from cells import taken
from forced import forced
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template
from fuseplan.plans.plan import FusionPlan

TARGETS = ("triton:sm_90", "triton:gfx942")
MOST = 80  # of a target
STEP = 7919  # a prime: all cells are come by, neighbours in the table far apart


def covering(target: str) -> Iterator[Any]:
    """Cells whose combination, or whose template in that dtype or in that layout, was in none before."""
    seen: set[tuple[str, ...]] = set()
    listed = list(taken(target))
    for place in range(len(listed)):
        turn, cell, kind = listed[place * STEP % len(listed)]
        new = {(cell.combination,), (kind.name, cell.dtype), (kind.name, cell.layout, "layout")}
        if new - seen:
            seen |= new
            plan = cell.plan(turn)
            yield pytest.param(target, kind, plan, id=f"{target}-{cell.combination}-{kind.name}-{plan}")


CASES = {target: list(covering(target)) for target in TARGETS}


@pytest.mark.part(6)
@pytest.mark.parametrize(("target", "kind", "plan"), [case for cases in CASES.values() for case in cases])
def test_a_cell_compiles(target: str, kind: type[Template], plan: FusionPlan) -> None:
    assert forced(plan, kind, parse_target(target)).program.code


@pytest.mark.parametrize("target", TARGETS)
def test_the_set_is_bounded(target: str) -> None:
    assert len(CASES[target]) <= MOST


def test_numbers_that_programs_pass_on_are_scalars() -> None:
    """As columns of 16 numbers they were 2,048 stores to shared memory, and the code took 205 KB, not 28."""
    made = forced(
        "bf16[8x65536] -> layer_norm", GpuReduction, parse_target(TARGETS[0]), GpuReduction(1, 4096, 16, 8)
    )
    assert len(made.program.code) < 1 << 16
