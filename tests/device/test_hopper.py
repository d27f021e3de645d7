"""Every form of the kernel for Hopper, with seeds and repetitions: what the emulator cannot show is here."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from device.guarded import inputs, output, wanted, worst
from forced import forced
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan

KIND = parse_target("triton:sm_90")  # what the cases are made for
SEEDS = (1, 2, 3, 4)
REPEATS = 6
PLANS = (
    "f16[64x128x28x28, nhwc] -> conv2d(128, kernel=3, padding=1) -> batch_norm -> add -> relu",
    "bf16[16x64x55x55, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "f16[5x72x19x23, nhwc] -> conv2d(200, kernel=3, stride=2, padding=1) -> bias -> add",
    "bf16[4100x520] -> matmul(1304) -> bias -> gelu(approximate=tanh)",
    "f16[64x512x7x7, nhwc] -> conv2d(2048, kernel=1) -> bias -> relu",
    "bf16[4100x520] -> linear(2608) -> bias -> glu(silu, gate=first)",
    "bf16[1100x3080] -> matmul(3000) -> bias -> add -> relu",
    "bf16[1100x3080] -> linear(3008) -> glu(silu, gate=first)",
    "f32[16x8x62x62] -> conv2d(64, kernel=3, precision=tf32) -> bias -> relu",
    "f32[8x64x30x31] -> conv2d(136, kernel=3, padding=1, precision=tf32) -> batch_norm -> add -> relu",
    "f32[8x40x31x31, nhwc] -> conv2d(64, kernel=3, stride=2, padding=1, precision=tf32) -> bias -> add",
    "f32[4x64x33x40] -> conv_transpose2d(64, kernel=4, stride=2, padding=1, precision=tf32) -> bias",
    "f32[3x55x23x19] -> conv_transpose2d(30, kernel=2, stride=2, precision=tf32) -> add"
    " -> batch_norm(per_activation)",
    "f32[2x3x17x33x32] -> conv3d(24, kernel=3, precision=tf32) -> bias",
    "f32[1000x520] -> matmul(1304, precision=tf32) -> bias",
    "bf16[4100x523] -> matmul(1304) -> bias -> gelu(approximate=tanh)",
    "f16[4100x522] -> linear(1303) -> bias -> add -> relu",
    "bf16[4100x520] -> matmul(1306) -> bias -> save(kept) -> gelu",
    "f16[3x700x333] -> matmul(250, batched=True) -> bias",
    "bf16[7x31x29x29, nhwc] -> conv2d(66, kernel=3, padding=1) -> bias -> batch_norm -> add -> relu",
    "f32[1000x521] -> matmul(1303, precision=tf32) -> bias",
)


def forms(text: str) -> list[Hopper]:
    """The best choice of each combination of knobs but the sizes, and of sizes that are sums or are not."""
    found: dict[tuple[Any, ...], Hopper] = {}
    kernel = lower(match(FusionPlan.parse(text)))
    for choice in Hopper.candidates(kernel, KIND, "default"):
        assert isinstance(choice, Hopper)
        sizes, schedule = ("box", "columns", "depth", "stages", "band"), choice.schedule(kernel)
        form = tuple(value for key, value in choice.knobs.items() if key not in sizes)
        found.setdefault((*form, choice.band > 1, schedule.pieces > 1, schedule.weight_pieces > 1), choice)
    return list(found.values())


def cases() -> Iterator[Any]:
    for text in PLANS:
        yield from (pytest.param(text, choice, id=f"{choice.text} {text}") for choice in forms(text))


@pytest.mark.parametrize(("text", "choice"), list(cases()))
def test_every_form_is_right_again_and_again(text: str, choice: Hopper) -> None:
    compiled = forced(text, Hopper, parse_target("cuda"), choice)
    for seed in SEEDS:
        tensors = inputs(compiled.plan, seed)
        want, allowed = wanted(compiled, tensors)
        src = tensors.pop("src")
        bound = compiled.bind(**tensors)
        outs = [output(compiled.plan) for _ in range(REPEATS)]
        for out in outs:  # back to back: a launch begins while the one before it ends
            bound(src, out.tensor)
        torch.cuda.synchronize()
        assert all(out.stands for out in outs), "something was written beside the output"
        assert max(worst(out.tensor, want, allowed) for out in outs) <= 1
