"""Statistics over any axes on a GPU: held in registers, block by block, and split over programs that meet."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import fuseplan
from device.guarded import inputs
from device.repeats import assert_repeated
from device.test_numeric import KIND, _candidates
from fuseplan.backends.triton.templates.reduction import GpuReduction

DTYPES = ("f16", "bf16", "f32", "f64")
PLANS = (
    "[33x40] -> softmax",
    "[1000x768] -> scale -> softmax",
    "[3x70001] -> log_softmax -> add",
    "[8x131072] -> softmax",
    "[1000x768] -> bias -> dropout(0.1, seed=3) -> add -> save(sum) -> layer_norm",
    "[513x129] -> softmax(0)",
    "[20003x5] -> relu -> sum(0) -> tanh",
    "[3x17x9x11, nhwc] -> relu -> mean(hw) -> bias",
    "[16x64x57x55] -> relu -> mean(hw) -> bias -> relu",
    "[8x40x57x55, nhwc] -> mean -> tanh",
    "[2x3x5x7, bhsc] -> bias -> amax(h) -> add",
    "[2x30x50x7, strides=1:10000:200:20] -> sum((1, 2), keepdim=True) -> scale",
    "[30x40x50, cbs of bsc] -> add -> softmax(bs) -> add",
    "[2x30x70] -> relu -> save(a) -> softmax(1) -> save(b) -> add(other=a)",
    "[2x5x30x70, nhwc] -> relu -> save(a) -> mean(hw) -> save(b) -> bias -> add(other=b)",
    "[4x30x50x70, strides=1:200000:4000:50 of bhsc] -> layer_norm -> relu",
    "[5] -> softmax -> bias",
    "[7x333x64, nwc] -> sum(1, keepdim=True) -> bias",
    "[2x3x5x7, bhsc] -> bias -> amin(h) -> add",
    "[3x70001] -> amin(1)",
    "[33x40] -> prod(0)",
    "[3x70001] -> var(1)",
    "[3x17x9x11, nhwc] -> var(hw, correction=0) -> bias",
    "[20003x5] -> logsumexp(0)",
    "[33x40] -> argmax(1)",
    "[3x70001] -> argmax(1)",
    "[20003x5] -> argmax(0)",
    "[3x17x9x11, nhwc] -> argmax(hw)",
    "[8x40x57x55] -> argmax",
    "[33x40] -> cross_entropy",
    "[64x50257] -> cross_entropy(label_smoothing=0.1, z_loss=0.001)",
    "[300x4508] -> cross_entropy(label_smoothing=0.1)",
    "[257x3002] -> scale -> softmax",
    "[3x17x57x55, nhwc] -> cross_entropy(ignore_index=2)",
    "[3x17x57x55] -> cross_entropy",
    "[64x50257] -> cross_entropy_backward(label_smoothing=0.1, z_loss=0.001)",
    "[3x17x57x55, nhwc] -> cross_entropy_backward(ignore_index=2)",
    "[64x50257] -> cross_entropy_gradient(label_smoothing=0.1, z_loss=0.001)",
    "[64x30528] -> cross_entropy_gradient",
    "[2x300x16x128, bshd] -> rms_norm -> rotary",
    "[2x300x16x128, bshd] -> rms_norm -> rotary(whole=True)",
    "[2x16x300x80, bhsd] -> rms_norm -> rotary(dims=64, interleaved=True)",
    "[300x1000] -> glu(silu) -> softmax",
    "[2x64x57x55] -> add -> save(a) -> group_norm(8) -> silu",
    "[2x320x33x31, nhwc] -> add -> save(a) -> group_norm(32) -> silu",
    "[4x6x5x17x13] -> group_norm(2)",
    "[3x17x57x55] -> instance_norm -> relu",
    "[1000x768] -> scale -> softmax_backward",
    "[3x17x57x55, nhwc] -> log_softmax_backward(hw) -> bias",
    "[3x17x57x55, nhwc] -> instance_norm -> add",
    "[2x64x57x55] -> group_norm_backward(8) -> add",
    "[257x1000] -> layer_norm_backward(gradients=True) -> add",
    "[3000x4096] -> rms_norm_backward(gradients=True, statistics=saved)",
    "[2x300x20000] -> layer_norm_backward(gradients=True, statistics=saved)",
    "[3x17x57x55, nhwc] -> instance_norm_backward",
)
SPECIAL = (float("inf"), float("-inf"), float("nan"))
REPEATS = 8


def _cases() -> Iterator[Any]:
    """(place among the candidates, plan): the best, the middle one and the worst of each."""
    for dtype, chain in product(DTYPES, PLANS):
        count = len(_candidates(GpuReduction, dtype + chain, KIND))
        for place in sorted({0, count // 2, count - 1}):
            yield pytest.param(place, dtype + chain, id=f"{place}-{dtype}{chain}")


@pytest.mark.parametrize(("place", "text"), list(_cases()))
def test_every_output_is_within_the_bound(place: int, text: str) -> None:
    assert_repeated(GpuReduction, place, text)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", ["70x300", "3x70000"])
@pytest.mark.parametrize("word", ["softmax", "log_softmax", "amax", "amin", "argmax", "logsumexp", "sum"])
def test_infinities_and_nan_are_torchs(word: str, shape: str, axis: int) -> None:
    compiled = fuseplan.compile(f"f32[{shape}] -> {word}({axis})", "cuda")
    (src,) = inputs(compiled.plan, 1).values()
    for place, special in enumerate(SPECIAL):
        src[place, place], src[-1 - place, 30:36] = special, special
    src[2, 100:], src[:, 9] = float("-inf"), float("-inf")
    got = compiled(src)
    want = getattr(torch, word)(src, axis).to(got.dtype)  # torch counts in i64
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
