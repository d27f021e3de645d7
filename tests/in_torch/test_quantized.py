"""Quantized models of torch's: `quantized_decomposed`, products of i8, and weights of i8, beside torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # it makes the operators
from torch import nn
from torch.nn import functional

import fuseplan.torch

OPS = torch.ops.quantized_decomposed
WORDS = {torch.int8: "i8", torch.uint8: "u8"}
RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def rounded(x: torch.Tensor, scale: float, point: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = (scale, point, *RANGES[dtype], dtype)
    return OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *numbers), *numbers)


class WeightOnly(nn.Module):  # type: ignore[misc]
    """As torchao has it: the weight becomes floats in each call, the scales stand behind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", integers(24, 40))
        self.register_buffer("scale", torch.rand(24) / 100)
        self.bias = nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.linear(x, self.weight.to(x.dtype)) * self.scale + self.bias)


class Products(nn.Module):  # type: ignore[misc]
    """A product of i8 with dynamic scales of rows."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        self.is_turned = is_turned
        self.register_buffer("weight", integers(24, 40) if is_turned else integers(40, 24))
        self.register_buffer("scale", torch.rand(24) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        whole = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
        sums = torch._int_mm(whole, self.weight.t() if self.is_turned else self.weight)
        return sums.to(torch.float32) * scale * self.scale


class Exported(nn.Module):  # type: ignore[misc]
    """A convolution and a product as pt2e exports them: weights with a scale for each channel."""

    def __init__(self, dtype: torch.dtype, point: int) -> None:
        super().__init__()
        self.dtype, self.point = dtype, point
        for name, each in (("kernel", integers(9, 6, 3, 3)), ("matrix", integers(10, 9))):
            self.register_buffer(name, each)
            self.register_buffer(f"{name}_scale", torch.rand(len(each)) / 900)
            self.register_buffer(f"{name}_point", torch.zeros(len(each), dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(9) / 9)

    def made(self, name: str) -> torch.Tensor:
        scales = getattr(self, f"{name}_scale"), getattr(self, f"{name}_point")
        made: torch.Tensor = OPS.dequantize_per_channel(
            getattr(self, name), *scales, 0, -127, 127, torch.int8
        )
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = rounded(x, 0.0307, self.point, self.dtype)
        x = functional.relu(functional.conv2d(x, self.made("kernel"), self.bias, padding=1))
        x = rounded(rounded(x, 0.0211, self.point, self.dtype).mean((2, 3)), 0.0107, self.point, self.dtype)
        return rounded(functional.linear(x, self.made("matrix")), 0.0203, self.point, self.dtype)


def forms(module: nn.Module, x: torch.Tensor) -> list[Any]:
    torch._dynamo.reset()
    return [fuseplan.torch.fuse(module, x), torch.compile(module, backend="fuseplan")]


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_integers_are_made_once(rows: int, dtype: torch.dtype) -> None:
    module, x = WeightOnly().to(dtype).eval(), torch.randn(rows, 40, dtype=dtype)
    made = fuseplan.torch.fuse(module, x)
    assert [str(site.plan).split(" -> ")[1] for site in made.report.sites] == ["linear(24)"]
    assert "5 operators: 1 folded, 4 fused" in str(made.report)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for call in (made, *forms(module, x)):
        torch.testing.assert_close(call(x), module(x), rtol=bound, atol=bound)
    module.weight.copy_(integers(24, 40))  # the next call makes them anew
    torch.testing.assert_close(made(x), module(x), rtol=bound, atol=bound)


@pytest.mark.parametrize("is_turned", [False, True])
def test_products_of_integers_are_exact(is_turned: bool) -> None:
    module, x = Products(is_turned).eval(), torch.randn(33, 40)
    made = fuseplan.torch.fuse(module, x)
    plans = [str(site.plan) for site in made.report.sites]
    assert any(
        plan.startswith("i8[33x40] -> ") and "(24) -> cast(f32) -> mul_along" in plan for plan in plans
    )
    for call in (made, *forms(module, x)):
        torch.testing.assert_close(call(x), module(x), rtol=1e-6, atol=1e-6)


def test_sums_of_integers_are_an_output() -> None:
    module = Sums()
    given = integers(17, 300)
    for call in forms(module, given):
        torch.testing.assert_close(call(given), module(given), rtol=0, atol=0)


class Sums(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", integers(300, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.weight)


@pytest.mark.parametrize(("dtype", "point"), [(torch.int8, 0), (torch.int8, -7), (torch.uint8, 101)])
def test_exported_quantized_models(dtype: torch.dtype, point: int) -> None:
    """A number between two integers may become either: of few results, one more or less."""
    module, x = Exported(dtype, point).eval(), torch.randn(5, 6, 9, 7)
    made, want = fuseplan.torch.fuse(module, x), module(x)
    plans = " ".join(str(site.plan) for site in made.report.sites)
    assert plans.count(f"cast({WORDS[dtype]})") == 4
    assert "conv2d" in plans
    assert "linear" in plans
    for call in (made, *forms(module, x)):
        apart = (call(x) - want).abs()
        assert apart.max() <= 0.0203 * 1.01
        assert (apart > 1e-5).float().mean() <= 0.05


def test_what_is_left_to_torch_tells_why() -> None:
    """Integers of 16 bits, scales for each channel of a value, and casts between integers."""

    class Left(nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            numbers = (0.01, 0, -(2**15), 2**15 - 1, torch.int16)
            made = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *numbers), *numbers)
            scales = torch.full((4,), 0.02), torch.zeros(4, dtype=torch.int64)
            whole = OPS.quantize_per_channel(made, *scales, 1, -128, 127, torch.int8)
            return OPS.dequantize_per_channel(whole, *scales, 1, -128, 127, torch.int8) + whole.to(
                torch.int16
            )

    x = torch.randn(3, 4)
    made = fuseplan.torch.fuse(Left(), x)
    torch.testing.assert_close(made(x), Left()(x), rtol=0, atol=0)
    told = str(made.report)
    for name in ("quantize_per_tensor", "quantize_per_channel", "dequantize_per_channel", "_to_copy"):
        assert name in told


def test_casts_of_values() -> None:
    """Numbers that i8 may not hold are torch's, which wraps them around; an image of u8 is not a weight."""

    class Casts(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            made = self.conv(image.to(torch.float32) / 255 - 0.5)
            return (
                made,
                (made * 300).clamp(max=500, min=-128).to(torch.int8),
                (made * 90).clamp(max=127, min=-128).to(torch.int8),
            )

    image = torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)
    module = Casts()
    made = fuseplan.torch.fuse(module, image)
    plans = [str(site.plan) for site in made.report.sites]
    assert any(plan.startswith("u8[2x3x20x20") for plan in plans)
    assert sum("cast(i8)" in plan for plan in plans) == 1
    first, wrapped, held = made(image)
    torch.testing.assert_close(first, module(image)[0])
    torch.testing.assert_close(wrapped, (first * 300).clamp(-128, 500).to(torch.int8), rtol=0, atol=0)
    torch.testing.assert_close(held, (first * 90).clamp(-128, 127).to(torch.int8), rtol=0, atol=0)


def test_weights_of_integers_beside_an_open_extent_are_torchs() -> None:
    """Calls with open extents keep nothing: the weight would be packed in each call."""
    module, x = WeightOnly().eval(), torch.randn(5, 40)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    made = fuseplan.torch.fuse(module, x, dynamic_shapes=shapes)
    assert not any("linear" in str(site.plan) for site in made.report.sites)
    for rows in (5, 9):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(made(x), module(x))
