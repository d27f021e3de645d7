"""Rows that a kernel keeps in registers as they are stored, in Triton's interpreter."""

import pytest

from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

ROWS = (
    ("bf16[3x1000] -> layer_norm", GpuReduction(1, 256, 1, 1, lanes=True, kept=True)),
    ("f16[3x512] -> rms_norm", GpuReduction(1, 256, 1, 1, lanes=True, kept=True)),
    ("f16[3x700] -> scale -> softmax", GpuReduction(1, 256, 1, 1, lanes=True, kept=True)),
    ("bf16[3x1025] -> add -> save(sum) -> layer_norm", GpuReduction(1, 256, 1, 1, lanes=True, kept=True)),
    ("f16[5x600] -> rms_norm_backward", GpuReduction(1, 256, 1, 1, lanes=True, kept=True)),
)


@pytest.mark.parametrize(("plan", "template"), ROWS)
def test_a_kept_row_is_right_in_the_interpreter(plan: str, template: GpuReduction) -> None:
    assert_interpreted(plan, template, slack=64)


def test_rows_are_kept_where_a_loop_would_read_them_again() -> None:
    def kept(text: str, target: str = "triton:sm_90") -> bool:
        kernel = lower(match(FusionPlan.parse(text)))
        found = GpuReduction.candidates(kernel, parse_target(target), "default")
        return any(each.knobs["kept"] for each in found)

    assert kept("bf16[4096x65536] -> layer_norm")
    assert kept("f16[8192x32768] -> softmax")
    assert not kept("bf16[4096x65536] -> layer_norm", "triton:gfx942")  # has other instructions
    assert not kept("f32[4096x32768] -> layer_norm")  # are as wide as they are stored
    assert not kept("bf16[4096x65536] -> sum(1)")  # is one pass
    assert not kept("bf16[16384x4096] -> layer_norm")  # fits into registers as it is computed with
