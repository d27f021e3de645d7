"""Gradients of attention for Hopper, run by the emulator: coordinates, barriers, masks against float64."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import gluon_emulator
from forced import refusal_of
from fuseplan.backends.triton.templates.hopper_attention_gradient import HopperAttentionGradient
from fuseplan.execution.select import select
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from numeric.test_hopper import offsets, stored
from numeric.test_hopper_attention import GPU, data, hiding

PLANS = (
    "f16[1x2x200x64, bhsd] -> attention_gradient(by=%s)",
    "bf16[1x4x260x32, bshd of bhsd] -> attention_gradient(is_causal=True, key_heads=2, by=%s)",
    "f16[1x1x330x128, bhsd] -> attention_gradient(is_causal=True, by=%s)",
    "bf16[1x2x150x16, bhsd] -> attention_gradient(is_causal=True, offset=-9, by=%s)",
    "f16[1x2x150x80, bhsd] -> attention_gradient(keys=290, offset=140, is_causal=True, window=100, by=%s)",
    "f16[1x2x200x16, bhsd] -> attention_gradient(keys=140, offset=-20, window=30, by=%s)",
    "f16[1x2x200x64, bhsd] -> attention_gradient(softcap=2, window=150, features=24, by=%s) -> bias -> gelu",
    "bf16[1x2x130x16, bhsd] -> attention_gradient(keys=70, scale=-0.2, by=%s)",
    "bf16[2x4x130x16, bhsd] -> attention_gradient(key_heads=2, score='x * tanh(x + 0.1 * index(h))', by=%s)",
    "f16[1x2x200x32, bhsd] -> attention_gradient(score='where(index(t) + index(s) < 400, x, -inf)', by=%s)",
    "f16[1x2x200x32, bhsd] -> attention_gradient(score='where(index(h) < 1, x, 0.25)', by=%s)",
    "f16[2x2x200x64, bhsd] -> attention_gradient(is_padded=True, by=%s)",
    "bf16[2x4x150x80, bshd of bhsd] -> attention_gradient(is_causal=True, key_heads=2, is_padded=True,"
    " bias_axes=hst, by=%s)",
    "f16[2x2x140x128, bhsd] -> attention_gradient(mask_axes=bst, by=%s)",
    "bf16[1x4x130x32, bhsd] -> attention_gradient(keys=128, key_heads=1, bias_axes=bht, mask_axes=t, by=%s)",
)
BOTH = [text % by for text in PLANS for by in ("query", "key")]


def check(choice: HopperAttentionGradient, kernel: Kernel, plan: FusionPlan, arrays: dict[str, Any]) -> None:
    """Runs the text into poisoned memory, and compares every result."""
    dst = np.full(kernel.dst.span, np.nan, np.float32)
    results = {each.key: np.full(prod(each.shape), np.nan, np.float32) for each in kernel.results}

    def memory(slot: Slot) -> Any:
        if slot.key == "lengths":
            return arrays["lengths"].astype(np.int32)
        if slot.kind == "operand":
            return stored(arrays[slot.key], kernel.operand(slot.key).strides or (1,))
        if slot.kind == "src":
            return stored(arrays["src"].transpose(plan.src.canonical_order), kernel.src.element_strides)
        return dst if slot.kind == "dst" else results[slot.key]

    source = choice.emit(kernel, GPU)
    gluon_emulator.run(source, [memory(slot) for slot in source.slots])
    given = dict(arrays)
    want, more = plan.evaluate(given.pop("src"), given)
    pairs = [(want.transpose(plan.output.canonical_order), dst, kernel.dst.shape, kernel.dst.element_strides)]
    pairs += [(more[each.key], results[each.key], each.shape, each.strides) for each in kernel.results]
    for wanted, memory_of, shape, strides in pairs:
        got, size = memory_of[offsets(shape, strides)], np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-6 * size, err_msg=choice.text)


def choices(kernel: Kernel) -> list[HopperAttentionGradient]:
    listed = HopperAttentionGradient.candidates(kernel, GPU, "default")
    return [each for each in listed if isinstance(each, HopperAttentionGradient)]


@pytest.mark.parametrize("text", BOTH)
def test_every_form_computes_the_plan(text: str) -> None:
    plan = FusionPlan.parse(text)
    assert refusal_of(plan, HopperAttentionGradient, GPU) is None
    kernel = lower(match(plan))
    made = choices(kernel)
    is_plain = "mask_axes=bst, by=key" in text or "bias_axes=hst, by=key" in text
    assert {each.persistent for each in made} == ({False} if is_plain else {False, True})
    has_turns = plan.src.shape[-1] > 64 and not is_plain
    assert {each.in_turn for each in made} == ({False, True} if has_turns else {False})
    for choice in made:
        check(choice, kernel, plan, hiding(plan))


def test_queries_and_keys_without_a_partner_give_zeros() -> None:
    """Sums of minus infinity, of f32's least number, and keys behind the last query's place."""
    for by in ("query", "key"):
        text = f"f16[1x1x140x16, bhsd] -> attention_gradient(is_causal=True, keys=300, by={by})"
        plan = FusionPlan.parse(text)
        arrays = data(plan)
        arrays["lse"][0, 0, 5], arrays["lse"][0, 0, 7] = -np.inf, np.inf
        kernel = lower(match(plan))
        for choice in choices(kernel)[1:3]:
            check(choice, kernel, plan, arrays)


def test_the_longest_tiles_come_first() -> None:
    for by, first in (("query", "3 - short"), ("key", "short")):
        text = f"f16[3x2x512x64, bhsd] -> attention_gradient(is_causal=True, by={by})"
        kernel = lower(match(FusionPlan.parse(text)))
        choice = next(each for each in choices(kernel) if each.persistent and each.groups == 2)
        assert choice.lots(kernel, GPU).lots == 2
        assert f"tile = gl.where(turn == 0, {first}, " in choice.emit(kernel, GPU).text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("f16[1x2x64x64, bhsd] -> attention_gradient(bias_axes=st) -> add", "beside-keys"),
        ("f16[1x2x64x60, bhsd] -> attention_gradient", "copy-alignment"),
        ("f16[1x2x64x64, bhds of bhsd] -> attention_gradient", "copy-alignment"),
        ("f32[1x2x64x64, bhsd] -> attention_gradient", "not-half"),
        ("f16[1x2x64x136, bhsd] -> attention_gradient", "head-size"),
        ("f16[1x2x64x128, bhsd] -> attention_gradient(softcap=2, by=key)", "capped-slopes"),
        ("f16[1x2x200x64, bhsd] -> attention_gradient(keys=150, offset=150, window=30)", "unseen-keys"),
        ("f16[1x2x64x64, bhsd] -> attention", "no-attention"),
    ],
)
def test_others_go_to_the_portable_template(text: str, code: str) -> None:
    refusal = refusal_of(text, HopperAttentionGradient, GPU)
    assert refusal is not None
    assert refusal.reason.code == code


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16[4x16x4096x128, bhsd] -> attention_gradient(is_causal=True)", "hopper_attention_gradient"),
        ("bf16[16x16x1024x64, bhsd] -> attention_gradient(by=key)", "hopper_attention_gradient"),
        ("bf16[1x2x40x64, bhsd] -> attention_gradient(by=key)", "attention_gradient"),
    ],
)
def test_tiles_of_many_rows_are_chosen_where_there_are_many(text: str, name: str) -> None:
    target = replace(parse_target("triton:sm_90"))
    chosen = select(lower(match(FusionPlan.parse(text))), target, tuned=False)
    assert chosen.template.name == name
