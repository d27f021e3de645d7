"""Plans that change the dtype, on a GPU: every number as torch converts it, and chains within their bound."""

from typing import Any

import pytest
import torch

import fuseplan
from every_number import every_code, floats
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.language.dtypes import CONVERTED, DTYPES, FACTORS, dtype_of
from fuseplan.measure.data import deviation, random_arrays, reference
from fuseplan.measure.ground import allowed_deviation
from fuseplan.plans.plan import FusionPlan

OTHERS = [name for name in CONVERTED if name not in FACTORS]
CHAINS = (
    "f32[3x5] -> quantize(i8, zero_points=True)",
    "bf16[2x37x129, bsc] -> quantize(f8e4m3, per=block, block=16) -> dequantize(bf16, per=block, block=16)",
    "f16[3x17x9x11, nhwc] -> bias -> quantize(i8, per=channel) -> dequantize(f16, per=channel) -> add",
    "i8[3x17x9x11] -> dequantize(per=channel, zero_points=True) -> batch_norm -> relu -> cast(f8e5m2)",
    "i32[64x1000] -> dequantize(f16, per=row) -> silu",
    "f32[64x1000] -> cast(f64) -> bias -> cast(bf16)",
    "bool[7x33] -> cast(f32) -> add",
    "bf16[512x4096] -> layer_norm -> quantize(f8e4m3, per=row)",
    "f32[300x1000] -> rms_norm -> quantize(i8, per=block)",
    "bf16[512x4096] -> rms_norm -> dynamic_quantize(f8e4m3)",
    "f16[300x1000] -> add -> save(sum) -> layer_norm -> gelu -> dynamic_quantize(i8)",
    "bf16[3x100x1024] -> silu -> mul -> dynamic_quantize(f8e4m3, each=block)",
    "f16[256x512] -> linear(384) -> bias -> quantize(i8, per=row)",
    "f16[512x512] -> linear(512) -> bias -> gelu -> cast(f32)",
    "f32[2x24x13x15, nhwc] -> conv2d(40, kernel=3, padding=1) -> relu -> quantize(f8e4m3, per=channel)",
)


def tensor(name: str, values: Any) -> Any:
    return torch.from_numpy(values).to("cuda").to(getattr(torch, DTYPES[name].package))


@pytest.mark.parametrize("before", FACTORS)
@pytest.mark.parametrize("after", [name for name in CONVERTED if name != "f64"])
def test_every_number_is_converted_as_torch_does(before: str, after: str) -> None:
    x = tensor("f32", floats(dtype_of(after))).to(getattr(torch, DTYPES[before].package))
    if after == "f8e4m3":
        x = x[~(x.float().abs() > DTYPES[after].largest)]  # torch's overflow differs between its versions
    elif not dtype_of(after).is_float and after != "bool":
        x = x[x.float().abs() < DTYPES[after].largest]
    x = x.reshape(1, -1)
    got = fuseplan.compile(f"{before}[1x{x.shape[1]}] -> cast({after})", "cuda")(x)
    torch.testing.assert_close(
        got.double(), x.to(getattr(torch, DTYPES[after].package)).double(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("before", OTHERS)
@pytest.mark.parametrize("after", FACTORS)
def test_every_element_is_converted_as_torch_does(before: str, after: str) -> None:
    x = torch.from_numpy(every_code(dtype_of(before))).to("cuda").view(getattr(torch, DTYPES[before].package))
    x = x.reshape(2, -1)
    got = fuseplan.compile(f"{before}[2x{x.shape[1]}] -> cast({after})", "cuda")(x)
    want = x.double().to(getattr(torch, DTYPES[after].package)) if before != "i32" else x.to(got.dtype)
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("text", CHAINS)
def test_chains_are_within_their_bound(text: str) -> None:
    plan = FusionPlan.parse(text)
    compiled = fuseplan.compile(plan, "cuda")
    for seed in (1, 2):
        arrays = random_arrays(plan, seed, device="cuda")
        made = compiled(**arrays)
        out = made.out if plan.results else made
        error = deviation(out, reference(plan, arrays), dtype=plan.output.dtype)
        assert error <= allowed_deviation(lower(match(plan)), compiled.choice.template)
