"""Attention on a GPU: every candidate of the templates, beside float64, again and again."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from device.guarded import inputs
from device.repeats import repeated
from device.test_numeric import KIND, _candidates, made
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.attention_gradient import GpuAttentionGradient
from fuseplan.backends.triton.templates.hopper_attention import HopperAttention
from fuseplan.backends.triton.templates.hopper_attention_gradient import HopperAttentionGradient
from fuseplan.kernels.template import Template
from fuseplan.measure.data import deviation, evaluated
from fuseplan.measure.ground import allowed_deviation

PLANS = (
    "[2x3x200x64, bhsd] -> attention",
    "[2x4x130x128, bshd of bhsd] -> attention(is_causal=True, key_heads=2, return_lse=True)",
    "[1x2x300x256, bhsd] -> attention(is_causal=True)",
    "[1x3x257x80, bhsd] -> attention(keys=400, offset=143, is_causal=True, window=100)",
    "[2x2x190x96, bhsd] -> attention(window=50, softcap=20.0) -> add -> relu",
    "[3x8x1x128, bhsd] -> attention(keys=3000, key_heads=2, is_padded=True, return_lse=True)",
    "[2x4x65x32, bhsd] -> attention(keys=100, bias_axes=hst, mask_axes=bt, return_lse=True) -> bias",
    "[1x2x40x64, bhsd] -> attention(is_causal=True, offset=-9, return_lse=True)",
    "[2x4x150x64, bshd of bhsd] -> attention(is_causal=True, key_heads=2, rotary=64)",
    "[2x4x1x80, bhsd] -> attention(keys=999, offset=998, rotary=40, interleaved=True)",
    "[2x3x150x64, bhsd] -> attention(score='where(x > 2, -inf, x - 2 ** -index(h) * index(s))')",
)
MANY = (  # of which programs have several tiles, with and without a middle one
    "bf16[5x9x700x64, bhsd] -> attention(is_causal=True, return_lse=True)",
    "f16[3x16x1000x128, bshd of bhsd] -> attention(is_causal=True, key_heads=4)",
    "bf16[4x11x900x256, bhsd] -> attention(keys=333, is_causal=True, offset=-70)",
    "f16[4x12x640x64, bshd of bhsd] -> attention(keys=777, key_heads=3, return_lse=True) -> bias -> gelu",
    "bf16[7x6x513x128, bhsd] -> attention(keys=1030, softcap=30.0, window=200, offset=400)",
    "f16[6x8x500x256, bhsd] -> attention(scale=-0.05)",
    "bf16[9x20x200x96, bhsd] -> attention(keys=150, offset=80, window=30, features=40, return_lse=True)",
)
GRADIENTS = (
    "[2x3x200x64, bhsd] -> attention_gradient",
    "[2x3x256x128, bhsd] -> attention_gradient(is_causal=True, by=key)",
    "[2x4x130x128, bshd of bhsd] -> attention_gradient(is_causal=True, key_heads=2, by=key)",
    "[2x4x130x128, bshd of bhsd] -> attention_gradient(is_causal=True, key_heads=2)",
    "[1x2x300x256, bhsd] -> attention_gradient(is_causal=True, by=key)",
    "[1x3x257x80, bhsd] -> attention_gradient(keys=400, offset=143, is_causal=True, window=100)",
    "[2x2x190x96, bhsd] -> attention_gradient(window=50, softcap=20.0, by=key)",
    "[3x8x70x64, bhsd] -> attention_gradient(keys=300, key_heads=2, is_padded=True, by=key)",
    "[2x4x65x32, bhsd] -> attention_gradient(keys=100, bias_axes=hst, mask_axes=bt, by=key)",
    "[2x4x65x32, bhsd] -> attention_gradient(keys=100, bias_axes=hst, mask_axes=bt) -> bias",
    "[2x4x150x64, bhsd] -> attention_gradient(key_heads=2, score='x * tanh(x + 0.01 * index(s))', by=key)",
    "[2x4x150x64, bhsd] -> attention_gradient(key_heads=2, score='x * tanh(x - 0.01 * index(t))')",
)
SLOPES = (  # likewise; each by queries and by keys
    "bf16[5x9x700x64, bhsd] -> attention_gradient(is_causal=True, by=",
    "f16[3x16x1000x128, bshd of bhsd] -> attention_gradient(is_causal=True, key_heads=4, by=",
    "f16[4x12x640x64, bshd of bhsd] -> attention_gradient(keys=777, key_heads=3, softcap=20.0, by=",
    "bf16[7x6x513x128, bhsd] -> attention_gradient(keys=1030, window=200, offset=400, by=",
    "bf16[2x40x384x96, bhsd] -> attention_gradient(features=40, by=",
)
SEEDS = (1, 2, 3)


def _cases() -> Iterator[Any]:
    """(template, place among its candidates, plan)."""
    few = [dtype + chain for dtype, chain in product(("f16", "bf16", "f32"), PLANS)]
    halves = [text for text in few if text.startswith("bf16")]
    gradients = [dtype + chain for dtype, chain in product(("f16", "bf16", "f32"), GRADIENTS)]
    slopes = [f"{text}{by})" for text, by in product(SLOPES, ("query", "key"))]
    each = (
        (GpuAttention, few),
        (HopperAttention, (*halves, *MANY)),
        (GpuAttentionGradient, gradients),
        (HopperAttentionGradient, (*gradients, *slopes)),
    )
    for kind, texts in each:
        for text in texts:
            for place in range(len(_candidates(kind, text, KIND))):
                yield pytest.param(kind, place, text, id=f"{kind.name}-{place}-{text}")


@pytest.mark.parametrize(("kind", "place", "text"), list(_cases()))
def test_every_candidate_is_within_its_bound(kind: type[Template], place: int, text: str) -> None:
    compiled = made(kind, place, text)
    plan, template = compiled.plan, compiled.choice.template
    for seed in SEEDS if kind in (HopperAttention, HopperAttentionGradient) else (1,):
        tensors = inputs(plan, seed)
        want, exact = evaluated(plan, tensors)
        out, *results = repeated(compiled, tensors, exact)
        assert deviation(out, want) <= allowed_deviation(compiled.kernel, template)
        for each, tensor, value in zip(plan.results, results, exact.values(), strict=True):
            allowed = allowed_deviation(compiled.kernel, template, each.dtype)
            assert deviation(tensor, value) <= allowed
