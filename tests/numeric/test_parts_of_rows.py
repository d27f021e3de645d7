"""Operators that read parts of an axis, in front of statistics and behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fuseplan
from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

PLANS = (
    "[2x3x5x32, bhsd] -> rms_norm -> rotary",
    "[2x5x3x6, bshd] -> scale -> layer_norm -> rotary(dims=4) -> add",
    "[2x3x5x14] -> rms_norm -> save(y) -> rotary(dims=8, interleaved=True, batched=True)",
    "[5x64] -> rotary -> softmax -> bias",
    "[9x154] -> glu(silu) -> dynamic_quantize(f8e4m3)",
    "[3x4x96] -> add -> glu(gelu, gate=first) -> dynamic_quantize(f8e4m3, each=block, block=16)",
    "[7x60] -> glu(interleaved=True) -> softmax(0) -> bias",
    "[2x6x3x7, nhwc] -> add -> save(a) -> glu(silu, axis=c) -> mean(hw) -> bias",
    "[2x7x3x64] -> rms_norm -> glu(silu) -> scale",
    "[2x3x5x38, bhsd] -> rms_norm -> rotary(whole=True)",  # each formula reads one part of a table
    "[2x5x3x22, bshd] -> scale -> rotary(whole=True, batched=True, inverse=True) -> dynamic_quantize(i8)",
    "[2x4x24] -> layer_norm -> glu(axis=c) -> prelu(shared=True)",  # an operand of one element
)


@pytest.mark.parametrize("plan", [*(f"f32{plan}" for plan in PLANS), f"f16{PLANS[0]}", f"bf16{PLANS[4]}"])
def test_any_plan_and_dtype(plan: str) -> None:
    made = FusionPlan.parse(plan)
    arrays = random_arrays(made, 5)
    assert_close(forced(made, Reduction, narrowed(32)), arrays, slack=64)
    assert_close(fuseplan.compile(made, "reference"), arrays)


@pytest.mark.parametrize(
    "plan", [f"bf16{PLANS[0]}", *(f"f32{PLANS[place]}" for place in (1, 2, 4, 5, 7, 9, 10, 11))]
)
def test_a_gpus_text_in_the_interpreter(plan: str) -> None:
    assert_interpreted(plan, GpuReduction, slack=64)


def test_rows_in_blocks_and_parts_of_blocks() -> None:
    """A program reads its row in several tiles, and several programs share one."""
    for template in (GpuReduction(1, 64, 1, 4), GpuReduction(1, 128, 4, 4)):
        for chain in ("rms_norm -> rotary", "glu(silu) -> dynamic_quantize(f8e4m3)"):
            assert_interpreted(f"f32[3x700] -> {chain}", template, slack=64)
    compiled = forced(
        "f32[3x9002] -> rms_norm -> rotary", Reduction, narrowed(32, threads=2), Reduction(1, 3)
    )
    assert_close(compiled, random_arrays(compiled.plan, 5), slack=64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_normed_and_turned_heads_are_torchs(interleaved: bool) -> None:
    plan = FusionPlan.parse(f"f32[2x7x3x16, bshd] -> rms_norm -> rotary(interleaved={interleaved})")
    arrays = random_arrays(plan, 3)
    x, cos, sin, scale = (torch.from_numpy(np.array(arrays[key])) for key in ("src", "cos", "sin", "scale"))
    normed = torch.nn.functional.rms_norm(x, (16,), scale, 1e-5)
    a, b = (normed[..., ::2], normed[..., 1::2]) if interleaved else normed.chunk(2, -1)
    turn = cos[:, None], sin[:, None]
    turned = a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]
    want = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    np.testing.assert_allclose(forced(plan, Reduction, narrowed(32))(**arrays), want, atol=1e-5)
