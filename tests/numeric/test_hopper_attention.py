"""Attention for Hopper, run by the emulator: coordinates, barriers, masks and order against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gluon_emulator
from forced import refusal_of
from fuseplan.backends.triton.templates.hopper_attention import HopperAttention
from fuseplan.execution.select import select
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.plans.plan import FusionPlan
from numeric.test_hopper import offsets, stored

# Three processors: programs have several tiles, and pairs of a long one and a short one.
GPU = replace(parse_target("triton:sm_90"), processors=3)
PLANS = (
    "f16[1x2x200x64, bhsd] -> attention",
    "bf16[1x4x260x32, bshd of bhsd] -> attention(is_causal=True, key_heads=2, return_lse=True)",
    "f16[1x1x330x256, bhsd] -> attention(is_causal=True)",
    "bf16[1x2x40x16, bhsd] -> attention(is_causal=True, offset=-9, return_lse=True)",
    "bf16[1x2x40x16, bhsd] -> attention(is_causal=True, offset=-9, nan_unseen=True)",
    "f16[1x4x130x32, bshd of bhsd] -> attention(key_heads=2, key_strides=(9999, 4160, 32, 1),"
    " value_strides=(33280, 32, 256, 1))",
    "f16[1x2x150x80, bhsd] -> attention(keys=290, offset=140, is_causal=True, window=100)",
    "f16[1x2x200x16, bhsd] -> attention(keys=100, offset=50, window=30, return_lse=True)",
    "f16[2x2x70x96, bhsd] -> attention(softcap=2.0, window=50, features=24) -> bias -> gelu",
    "bf16[1x2x130x16, bhsd] -> attention(keys=70, scale=-0.2)",
    "bf16[2x3x130x16, bhsd] -> attention(score='x - 0.1 * (index(h) + index(b)) * abs(index(t) - index(s))')",
    "f16[1x2x200x64, bhsd] -> attention(keys=300, score='where(index(t) < 128, -inf, x)')",
    "f16[2x2x200x64, bhsd] -> attention(is_padded=True, return_lse=True)",
    "bf16[2x4x150x80, bshd of bhsd] -> attention(is_causal=True, key_heads=2, is_padded=True, bias_axes=hst)",
    "f16[2x2x140x128, bhsd] -> attention(mask_axes=bst)",
    "f16[2x4x130x256, bhsd] -> attention(keys=100, key_heads=1, bias_axes=bht, mask_axes=bt)",
)
OPEN = "f16[*x2x150x16, bhsd] -> attention(is_causal=True, keys=170, return_lse=True)"
Array = NDArray[Any]


def choices(kernel: Kernel) -> list[HopperAttention]:
    """One choice for each pair of a program's tiles and of groups' turns, the last of the sizes."""
    made = {
        (each.persistent, each.in_turn): each
        for each in HopperAttention.candidates(kernel, GPU, "default")
        if isinstance(each, HopperAttention)
    }
    assert len(made) == 4
    return list(made.values())


def data(plan: FusionPlan) -> dict[str, Array]:
    """Eighths, which every dtype has."""
    rng = np.random.default_rng(3)
    shapes = {"src": plan.src.shape, **{each.key: each.shape for each in plan.operands}}
    return {key: np.asarray(rng.integers(-8, 9, shape) / 8) for key, shape in shapes.items()}


def hiding(plan: FusionPlan) -> dict[str, Array]:
    """The same with a mask that hides a third; images of no and of some keys, and NaN behind them."""
    arrays, rng = data(plan), np.random.default_rng(5)
    if "mask" in arrays:
        arrays["mask"] = rng.random(arrays["mask"].shape) < 2 / 3
    if "lengths" in arrays:
        keys = arrays["key"].shape[2]
        arrays["lengths"] = np.array((0, 2 * keys // 3))
        for role, image in product(("key", "value"), range(2)):
            arrays[role][image, :, arrays["lengths"][image] :] = np.nan
    return arrays


class Call:
    """The memories of a launch, by slot, and what it wrote."""

    def __init__(self, plan: FusionPlan, arrays: dict[str, Array]) -> None:
        self.plan, self.arrays, self.kernel = plan, arrays, lower(match(plan))
        self.dst = np.full(self.kernel.dst.span, np.nan, np.float32)
        self.sums = np.full(prod(plan.src.shape[:3]), np.nan, np.float32)

    def memory(self, slot: Slot) -> Any:
        if slot.kind == "extent":
            return gluon_emulator.Number(self.plan.src.shape[0])
        if slot.key == "lengths":
            return self.arrays["lengths"].astype(np.int32)
        if slot.kind == "operand":
            return stored(self.arrays[slot.key], self.kernel.operand(slot.key).strides or (1,))
        if slot.kind == "src":
            values = self.arrays["src"].transpose(self.plan.src.canonical_order)
            return stored(values, self.kernel.src.element_strides)
        return self.dst if slot.kind == "dst" else self.sums

    def check(self, told: str) -> None:
        given = dict(self.arrays)
        want, results = self.plan.evaluate(given.pop("src"), given)
        got = self.dst[offsets(self.kernel.dst.shape, self.kernel.dst.element_strides)]
        want = want.transpose(self.plan.output.canonical_order)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=told)
        for value in results.values():
            np.testing.assert_allclose(self.sums, np.ravel(value), rtol=2e-5, atol=2e-5, err_msg=told)


def launch(choice: HopperAttention, kernel: Kernel, plan: FusionPlan, target: Target = GPU) -> None:
    """Runs the text of the kernel on the plan's extents, and checks what it wrote."""
    source, call = choice.emit(kernel, target).at(plan.src.shape[0]), Call(plan, hiding(plan))
    gluon_emulator.run(source, [call.memory(slot) for slot in source.slots])
    call.check(choice.text)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the emulator's: 0 * inf of `nan_unseen`
@pytest.mark.parametrize("text", PLANS)
def test_every_form_computes_the_plan(text: str) -> None:
    plan = FusionPlan.parse(text)
    assert refusal_of(plan, HopperAttention, GPU) is None
    kernel = lower(match(plan))
    for choice in choices(kernel):
        launch(choice, kernel, plan)


@pytest.mark.parametrize("extent", [1, 3])
def test_one_text_serves_every_batch(extent: int) -> None:
    plan = FusionPlan.parse(OPEN)
    kernel = lower(match(plan))
    for choice in choices(kernel)[1:3]:
        launch(choice, kernel, plan.with_extents(extent))


def test_persistent_programs_take_pairs_of_tiles() -> None:
    kernel = lower(match(FusionPlan.parse("f16[3x2x512x64, bhsd] -> attention(is_causal=True)")))
    for choice in choices(kernel):
        tiles = -(-512 // choice.lots(kernel, GPU).rows)
        assert choice.lots(kernel, GPU).lots == (-(-tiles // 2) if choice.persistent else tiles)
        assert choice.emit(kernel, GPU).grid[0] == (3 if choice.persistent else 6 * tiles)


def test_programs_share_the_halves_of_pairs() -> None:
    """Three tiles of a head are a pair and its half; of two programs none has the pairs of all heads."""
    plan, target = (
        FusionPlan.parse("f16[1x4x300x16, bhsd] -> attention(is_causal=True)"),
        replace(GPU, processors=2),
    )
    kernel = lower(match(plan))
    choice = HopperAttention(groups=2, keys=128, stages=4, persistent=True, in_turn=False)
    lots = choice.lots(kernel, target)
    tiles = [1.0 + 1.0, 1.0 + 2.0, 1.0 + 3.0]
    assert lots.is_turning
    assert lots.seconds(1.0, 1.0) == 2 * (tiles[0] + tiles[2] + tiles[1])
    launch(choice, kernel, plan, target)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("f16[1x2x64x64, bhsd] -> attention -> add", "beside-keys"),
        ("f16[1x2x64x64, bhsd] -> attention -> save(a) -> gelu", "saved"),
        ("f16[1x2x64x64, bhsd] -> attention(rotary=64)", "turned-copies"),
        ("f16[1x2x64x60, bhsd] -> attention", "copy-alignment"),
        ("f16[1x2x64x64, bhds of bhsd] -> attention", "copy-alignment"),
        ("f32[1x2x64x64, bhsd] -> attention", "not-half"),
        ("f16[1x2x64x264, bhsd] -> attention", "head-size"),
        ("f16[64x64] -> matmul(64)", "no-attention"),
    ],
)
def test_others_go_to_the_portable_template(text: str, code: str) -> None:
    refusal = refusal_of(text, HopperAttention, GPU)
    assert refusal is not None
    assert refusal.reason.code == code


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16[4x16x4096x128, bhsd] -> attention(is_causal=True)", "hopper_attention"),
        ("bf16[16x16x1024x64, bhsd] -> attention", "hopper_attention"),
        ("bf16[32x32x1x128, bhsd] -> attention(keys=4096, key_heads=8)", "attention"),
        ("bf16[1x12x128x64, bhsd] -> attention", "attention"),
    ],
)
def test_tiles_of_many_queries_are_chosen_where_there_are_many(text: str, name: str) -> None:
    chosen = select(lower(match(FusionPlan.parse(text))), parse_target("triton:sm_90"), tuned=False)
    assert chosen.template.name == name
