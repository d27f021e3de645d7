"""The gradients of whole plans on a GPU, from torch's tensors, against float64; run to run bit for bit."""

import pytest
import torch

from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan

PLANS = (
    "f32[512x768] -> linear(256) -> bias -> gelu",
    "f32[8x64x96] -> add -> save(y) -> layer_norm -> silu",
    "f32[512x768] -> rms_norm -> scale",
    "f32[64x1000] -> softmax -> mul",
    "f32[8x32x28x28, nhwc] -> conv2d(64, kernel=3, padding=1, groups=2) -> bias -> relu",
    "f32[8x32x28x28] -> batch_norm_training -> prelu",
    "f32[512x768] -> linear(1024) -> bias -> glu(silu, gate=first)",
    "f32[8x32x29x28, nhwc] -> conv2d(64, kernel=3, stride=2, padding=1) -> bias -> relu",
    "f32[8x32x28x28] -> conv2d(32, kernel=3, stride=2, padding=1, groups=32) -> relu",
    "f32[8x32x28x28, nhwc] -> group_norm(8) -> silu",
    "f32[8x32x28x28] -> instance_norm -> relu",
    "f32[2x4x129x64, bhsd] -> attention(key_heads=2, keys=200)",
    "f32[2x4x129x40, bshd of bhsd] -> attention(is_causal=True, window=50, softcap=20.0) -> bias",
)


@pytest.mark.parametrize("text", PLANS)
def test_gradients_are_those_of_float64(text: str) -> None:
    made = FusionPlan.parse(text).backward()
    arrays = random_arrays(made.forward, 0)
    compiled = made.compile("cuda")
    tensors = {name: torch.from_numpy(each).to("cuda") for name, each in arrays.items()}
    outcome = compiled.forward(**tensors)
    named = dict(zip(outcome._fields, outcome, strict=True)) if made.forward.results else {"out": outcome}
    grad = torch.empty_like(named["out"]).normal_(generator=torch.Generator("cuda").manual_seed(0))
    held = {name: each for name, each in (tensors | named).items() if name in compiled.reads}
    first, second = compiled(grad, **held), compiled(grad, **held)
    want = made.evaluate({**arrays, "grad": grad.cpu().numpy()})
    for name, got in first._asdict().items():
        assert torch.equal(got, getattr(second, name)), name
        exact = torch.from_numpy(want[name])
        assert torch.linalg.norm(got.cpu().double() - exact) <= 2e-5 * torch.linalg.norm(exact), name
