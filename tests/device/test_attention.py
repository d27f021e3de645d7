"""Attention on a GPU: every candidate of the template, beside float64, again and again."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from device.guarded import inputs, output
from device.test_numeric import KIND, _candidates, made
from device.test_training import walls
from fuseplan.backends.triton.templates.attention import GpuAttention
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
)
REPEATS = 8


def _cases() -> Iterator[Any]:
    """(place among the candidates, plan)."""
    for dtype, chain in product(("f16", "bf16", "f32"), PLANS):
        for place in range(len(_candidates(GpuAttention, dtype + chain, KIND))):
            yield pytest.param(place, dtype + chain, id=f"{place}-{dtype}{chain}")


@pytest.mark.parametrize(("place", "text"), list(_cases()))
def test_every_candidate_is_within_its_bound(place: int, text: str) -> None:
    compiled = made(GpuAttention, place, text)
    plan, template = compiled.plan, compiled.choice.template
    tensors = inputs(plan, 1)
    want, exact = evaluated(plan, tensors)
    bound = compiled.bind(**{key: tensor for key, tensor in tensors.items() if key != "src"})
    seen: list[tuple[Any, ...]] = []
    for _ in range(REPEATS):
        out, results = output(plan), walls(plan)
        bound(tensors["src"], out.tensor, **{key: wall.tensor for key, wall in results.items()})
        assert out.stands
        assert all(wall.stands for wall in results.values())
        seen.append((out.tensor, *(wall.tensor for wall in results.values())))
    assert deviation(seen[0][0], want) <= allowed_deviation(compiled.kernel, template)
    for tensor, value in zip(seen[0][1:], exact.values(), strict=True):
        assert deviation(tensor, value) <= allowed_deviation(compiled.kernel, template, "f32")
    for again in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], again, strict=True))
