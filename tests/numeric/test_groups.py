"""Statistics of an image's channels and of groups of them: torch's numbers, and both backends' kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.errors import PlanError
from fuseplan.execution.stages import decide
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

TENSORS = (
    "3x6",
    "2x6x7",
    "2x6x7, nwc",
    "2x6x5x7",
    "2x6x5x7, nhwc",
    "2x6x3x7, strides=1000:150:40:2",
    "1x6x3x2x5",
    "2x6x3x2x5, ndhwc",
)


def torch_made(plan: FusionPlan, arrays: dict[str, Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The plan's first operator by torch."""
    (step,) = plan.steps[:1]
    src, *affine = (torch.from_numpy(np.asarray(array)).to(dtype) for array in arrays.values())
    weight, bias = affine or (None, None)
    epsilon = step.parameters[0].value
    if step.op.name == "instance_norm":
        return functional.instance_norm(src, None, None, weight, bias, eps=epsilon)
    return functional.group_norm(src, step.op.attributes()["groups"], weight, bias, epsilon)  # type: ignore[arg-type]


@pytest.mark.part(2)
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("word", ["group_norm(1)", "group_norm(2)", "group_norm(6)", "instance_norm"])
@pytest.mark.parametrize("affine", [True, False])
def test_operators_are_torchs(tensor: str, word: str, affine: bool) -> None:
    if word == "instance_norm" and tensor == "3x6":
        pytest.skip("torch and we have no instance norm without places")
    told = word if affine else f"{word.removesuffix(')')}{', ' if '(' in word else '('}affine=False)"
    plan = FusionPlan.parse(f"f64[{tensor}] -> {told}")
    arrays = random_arrays(plan, 1)
    want = torch_made(plan, arrays)
    np.testing.assert_allclose(evaluated(plan, arrays)[0], want.numpy(), atol=1e-12)
    ours = {key: torch.from_numpy(array) for key, array in arrays.items()}
    np.testing.assert_allclose(evaluated(plan, ours)[0].numpy(), want.numpy(), atol=1e-12)
    assert_close(forced(plan, Reduction, narrowed(32)), arrays)


PLANS = (
    "[2x6x5x7] -> add -> save(sum) -> group_norm(2) -> silu",
    "[2x6x5x7, nhwc] -> add -> save(sum) -> group_norm(3) -> bias -> add(other=sum)",
    "[3x34x1x9, nhwc] -> group_norm(2) -> relu",
    "[1x4x3x2x5] -> scale -> group_norm(2) -> add",
    "[2x5x9x7] -> relu -> instance_norm -> add -> gelu",
    "[2x5x9x7, nhwc] -> instance_norm(affine=False) -> batch_norm(per_activation)",
    "[7x64] -> group_norm(4) -> quantize(i8)",
)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_and_dtype(dtype: str, plan: str) -> None:
    made = FusionPlan.parse(dtype + plan)
    for width in (16, 64):
        assert_close(forced(made, Reduction, narrowed(width)), random_arrays(made, 5), slack=64)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("plan", [f"bf16{PLANS[0]}", *(f"f32{plan}" for plan in PLANS[1:])])
def test_a_gpus_text_in_the_interpreter(plan: str, place: int) -> None:
    """The best and the worst candidate."""
    records = decide(plan, "triton:sm_90")
    candidates = list(GpuReduction.candidates(records.kernel, records.target, "default"))
    assert_interpreted(plan, candidates[place], slack=64)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["f32[2x5x8x8] -> group_norm(1)", "f16[3x10x4x16] -> group_norm(2) -> silu"])
def test_a_piece_that_lies_in_one_channel_has_that_channels_scale(plan: str) -> None:
    """All pieces of a group stay in registers."""
    assert_interpreted(plan, GpuReduction(1, 32, 1, 1, lanes=True, ahead=1), slack=64)


@pytest.mark.parametrize("inputs", ["normal", "large mean", "large range"])
@pytest.mark.parametrize("word", ["group_norm(4)", "instance_norm"])
def test_errors_are_at_most_one_and_a_half_times_torchs(word: str, inputs: str) -> None:
    """The root of the mean square, of four tensors."""
    plan = FusionPlan.parse(f"f32[2x16x30x31] -> {word}")
    compiled, squares = forced(plan, Reduction, narrowed(32)), np.zeros(2)
    for seed in range(4):
        arrays = random_arrays(plan, seed, inputs=inputs)
        want = evaluated(plan, arrays)[0]
        both = compiled(**arrays), torch_made(plan, arrays, torch.float32).numpy()
        squares += [np.square(made - want).sum() for made in both]
    assert squares[0] <= 1.5**2 * squares[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[2x6x7] -> group_norm(4)", "must divide the channels"),
        ("f32[2x6x7] -> group_norm(0)", "must be a number of groups"),
        ("f32[2x6x7] -> group_norm(2, affine=3)", "affine"),
        ("f32[2x6] -> instance_norm", "no statistics of this tensor"),
        ("f32[6] -> group_norm(2)", "reads the axes n and c"),
        ("f32[2x6x8, bsc] -> group_norm(2)", "reads the channels at axis 1"),
    ],
)
def test_groups_that_are_none(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)
