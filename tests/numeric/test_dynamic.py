"""Quantizing by the elements' own scales, and several operators with statistics of the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.compile import compile
from fuseplan.errors import PlanError, Unsupported
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

CHAINS = (
    "[9x77] -> dynamic_quantize({})",
    "[2x3x70] -> rms_norm -> dynamic_quantize({})",
    "[5x301] -> add -> save(sum) -> layer_norm -> gelu -> dynamic_quantize({})",
    "[2x5x3x7, nhwc] -> bias -> dynamic_quantize({}, each=tensor)",
    "[3x4x48] -> silu -> mul -> dynamic_quantize({}, each=block, block=16)",
    "[2x2x3x6, bhsc] -> dynamic_quantize({}, each=block, block=3)",
)
JOINED = (
    "[9x77] -> layer_norm -> softmax",
    "[2x3x70, nwc] -> softmax(w) -> bias -> log_softmax(w)",
    "[5x301] -> rms_norm -> save(y) -> silu -> mul(other=y) -> layer_norm -> add",
)


def assert_half_a_step(plan: FusionPlan, got: np.ndarray, scales: np.ndarray, value: np.ndarray) -> None:
    """Elements times their scales are within half a step of the dtype of what was quantized."""
    row = dtype_of(plan.output.dtype)
    spread = scales.reshape(scales.shape + (1,) * (value.ndim - scales.ndim))
    if plan.ops[-1].attributes()["each"] == "block":
        spread = np.repeat(scales, value.shape[-1] // scales.shape[-1], -1)
    step = spread if not row.is_float else np.maximum(row.epsilon * np.abs(value), spread * 2.0**-9)
    assert (np.abs(exact(got, row.name) * spread - value) <= 0.501 * step).all()


@pytest.mark.parametrize(
    ("chain", "dtype"),
    [
        *((f"f32{chain}", ("i8", "f8e4m3")[place % 2]) for place, chain in enumerate(CHAINS)),
        (f"f16{CHAINS[1]}", "i8"),
        (f"bf16{CHAINS[4]}", "f8e4m3"),
    ],
)
def test_elements_and_scales(chain: str, dtype: str) -> None:
    plan = FusionPlan.parse(chain.format(dtype))
    arrays = random_arrays(plan, 3)
    value = evaluated(FusionPlan(plan.src, *plan.ops[:-1]), arrays)[0] if plan.ops[1:] else arrays["src"]
    outcome = forced(plan, Reduction, narrowed(32))(**arrays)
    np.testing.assert_allclose(outcome.scales, evaluated(plan, arrays)[1]["scales"], rtol=1e-5)
    assert_half_a_step(plan, outcome.out, exact(outcome.scales, "f32"), value)


@pytest.mark.parametrize("plan", [f"f32{plan}" for plan in JOINED])
def test_statistics_behind_statistics(plan: str) -> None:
    made = FusionPlan.parse(plan)
    arrays = random_arrays(made, 5)
    assert_close(forced(made, Reduction, narrowed(32)), arrays, slack=64)
    assert_close(forced(made, Reduction, narrowed(64, threads=2), Reduction(1, 2)), arrays, slack=64)


@pytest.mark.parametrize(
    "plan", [f"f16{CHAINS[1]}", f"bf16{CHAINS[4]}", f"f32{JOINED[1]}", f"f32{JOINED[2]}"]
)
def test_a_gpus_text_in_the_interpreter(plan: str) -> None:
    assert_interpreted(plan.format("f8e4m3"), GpuReduction, slack=64)


def test_a_gpus_programs_meet_once_for_each_statistic() -> None:
    template = GpuReduction(1, 1024, 2, 4)
    assert_interpreted("f32[3x1900] -> rms_norm -> dynamic_quantize(f8e4m3)", template, slack=64)


BLOCKS = "layer_norm -> dynamic_quantize(f8e4m3, each=block)"


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("f32[9x48] -> rms_norm -> dynamic_quantize(i8, each=block, block=16)", GpuReduction),
        (f"bf16[5x384] -> add -> save(sum) -> {BLOCKS}", GpuReduction),
        (
            "f16[2x3x640] -> rms_norm -> gelu -> dynamic_quantize(f8e5m2, each=block)",
            GpuReduction(1, 128, 1, 4, True),
        ),
        (f"f16[6x640] -> {BLOCKS}", GpuReduction(2, 256, 1, 4, True)),
        (f"f16[6x512] -> {BLOCKS}", GpuReduction(2, 256, 2, 4)),
        (f"f16[6x640] -> {BLOCKS}", GpuReduction(1, 128, 5, 4)),
        ("f16[6x512] -> layer_norm", GpuReduction(2, 256, 2, 4)),
    ],
)
def test_blocks_behind_statistics_of_rows(text: str, template: GpuReduction | type[GpuReduction]) -> None:
    assert_interpreted(text, template, slack=64)


def test_blocks_behind_statistics_of_rows_in_float64() -> None:
    plan = FusionPlan.parse("f32[9x256] -> rms_norm -> dynamic_quantize(i8, each=block)")
    arrays = random_arrays(plan, 3)
    value = evaluated(FusionPlan(plan.src, *plan.ops[:-1]), arrays)[0]
    outcome = compile(plan, "reference")(**arrays)
    np.testing.assert_allclose(outcome.scales, np.abs(value.reshape(9, 2, 128)).max(-1) / 127, rtol=1e-6)
    assert_half_a_step(plan, outcome.out, exact(outcome.scales, "f32"), value)


@pytest.mark.parametrize(
    "text",
    [
        "f32[9x48] -> dynamic_quantize(i8, each=block, block=16) -> rms_norm",
        "f32[9x48] -> softmax(0) -> dynamic_quantize(i8, each=block, block=16)",
        "f32[9x96] -> glu -> rms_norm -> dynamic_quantize(i8, each=block, block=16)",
        "f32[9x48] -> linear(48) -> rms_norm -> dynamic_quantize(i8, each=block, block=16)",
    ],
)
def test_what_no_kernel_of_blocks_holds(text: str) -> None:
    with pytest.raises((Unsupported, PlanError)):
        compile(text, "triton:sm_90")


def test_rows_of_zeros_and_of_no_numbers() -> None:
    """Zeros stay zeros, and an infinity or NaN is told by the scale."""
    src = np.ones((4, 40), np.float32)
    src[0], src[1, 3], src[2, 5] = 0, np.inf, np.nan
    outcome = forced("f32[4x40] -> dynamic_quantize(i8)", Reduction, narrowed(32))(src)
    np.testing.assert_array_equal(outcome.scales[:2], np.array([2.0**-126, np.inf], np.float32))
    assert np.isnan(outcome.scales[2])
    assert outcome.scales[3] == np.float32(1) / 127
    np.testing.assert_array_equal(outcome.out[:, 0], [0, 0, 0, 127])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[3x5] -> dynamic_quantize(i32)", "dtype is not 'i32'"),
        ("f32[3x5] -> dynamic_quantize(i8, each=channel)", "each is not 'channel'"),
        ("f32[3x5] -> dynamic_quantize(i8, block=5)", "block has no meaning here"),
        ("f32[3x200] -> dynamic_quantize(i8, each=block)", "must divide the last axis"),
        ("i8[3x5] -> dynamic_quantize(i8)", "computes with floating-point numbers"),
    ],
)
def test_scales_that_are_none(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)
