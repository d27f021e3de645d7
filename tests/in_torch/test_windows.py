"""Windows and softmax as torch has them: which plans compute them, and that the results lie as torch's."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError

F = nn.functional


class Windows(nn.Module):  # type: ignore[misc]
    """Padding in front of windows, means over windows that divide the image or hold all of it, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv2d(6, 8, 3, stride=2), nn.Conv2d(8, 8, 1)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = F.relu(self.conv(F.pad(src, (0, 1, 1, 2))))
        pooled = F.max_pool2d(F.pad(padded, (1, 0), value=-torch.inf), 3)
        few = self.mix(F.adaptive_avg_pool2d(src @ src.mT, 4)[:, :1].expand(-1, 8, -1, -1)).softmax(1)
        lone = F.adaptive_avg_pool2d(padded, 1) + F.avg_pool2d(padded, 99, ceil_mode=True)
        return (
            pooled,
            few,
            lone,
            F.pad(padded, (1, 1, 0, 0), mode="replicate"),
            F.pad(src, (2, -1), value=3.0),
            torch.as_strided(padded, (2, 2, 3), (160, 20, 4)),
        )


def test_windows_are_plans_and_the_rest_torchs() -> None:
    torch.manual_seed(0)
    module, src = Windows().eval(), torch.randn(2, 6, 8, 8)
    with torch.no_grad():
        whole, want = fused.fuse(module, src), module(src)
        for got, right in zip(whole(src), want, strict=True):
            assert _steps(got) == _steps(right)
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4)
    assert [str(site.plan) for site in whole.fusion.cut.sites] == [
        "f32[2x6x8x8, nhwc] -> conv2d(8, kernel=3, stride=2, padding=((1, 2), (0, 1))) -> bias -> relu",
        "f32[2x8x5x4, nhwc] -> max_pool2d(3, padding=((0, 0), (1, 0)))",
        "f32[2x6x8x8, nhwc] -> avg_pool2d(2)",  # its reader, behind views, wants the channels last
        "f32[2x8x4x4, nhwc] -> conv2d(8, kernel=1) -> bias",
        "f32[2x8x4x4, nhwc] -> softmax(1)",
        "f32[2x8x5x4, nhwc] -> mean((2, 3), keepdim=True)",
        "f32[2x8x5x4, nhwc] -> mean((2, 3), keepdim=True) -> add",
    ]


def _steps(tensor: torch.Tensor) -> list[int]:
    """The strides that some element's place depends on."""
    return [step for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


class Decoder(nn.Module):  # type: ignore[misc]
    """A step of a U-Net's way up, and of a generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.ConvTranspose2d(6, 8, 2, stride=2), nn.BatchNorm2d(8)
        self.last = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(F.gelu(self.norm(self.up(src)))) - 0.5)


def test_transposed_convolutions_are_plans_with_what_follows_them() -> None:
    torch.manual_seed(0)
    module, src = Decoder().eval(), torch.randn(2, 6, 8, 7)
    with torch.no_grad():
        whole = fused.fuse(module, src)
        torch.testing.assert_close(whole(src), module(src), atol=1e-5, rtol=1e-4)
    plans = [str(site.plan) for site in whole.fusion.cut.sites]
    assert [plan.split(" -> ")[1] for plan in plans] == [
        "conv_transpose2d(8, kernel=2, stride=2)",
        "conv_transpose2d(3, kernel=4, stride=2, padding=1)",
    ]
    assert plans[1].endswith(' -> bias -> elementwise("x - 0.5") -> tanh')


def test_gradients_of_transposed_convolutions_are_torchs() -> None:
    torch.manual_seed(0)
    layers = (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=2, output_padding=1, groups=2), nn.Tanh())
    block, src = fused.Fused(*layers), torch.randn(2, 6, 5, 7, requires_grad=True)
    found = []
    for call in (block, lambda each: nn.Sequential.forward(block, each)):
        block.zero_grad()
        src.grad = None
        call(src).square().sum().backward()
        found.append([src.grad, *(each.grad for each in block.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


class Shifted(nn.Module):  # type: ignore[misc]
    """A parameter of one element a channel, taken from an operator's result, and that from the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shift = nn.ConvTranspose2d(4, 6, 2, stride=2), nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.up(src) - self.shift), F.relu(self.shift - self.up(src * 2))


def test_differences_from_a_parameter_of_channels_are_in_the_plan() -> None:
    torch.manual_seed(0)
    module, src = Shifted().eval(), torch.randn(2, 4, 5, 3)
    with torch.no_grad():
        whole = fused.fuse(module, src)
        for got, want in zip(whole(src), module(src), strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
        module.shift.mul_(3)
        torch.testing.assert_close(whole(src)[0], module(src)[0], atol=1e-6, rtol=1e-5)
    plans = [str(site.plan) for site in whole.fusion.cut.sites]
    assert sum("bias -> batch_norm(inverse=True) -> " in plan for plan in plans) == 2


def test_an_accuracy_is_that_of_all_kernels() -> None:
    """Winograd's F(4x4) is allowed by default: its error is twice torch's and more."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, src = nn.Conv2d(64, 64, 3, padding=1).eval(), torch.randn(1, 64, 16, 16)
    exact = copy.deepcopy(module).double()(src.double())
    forms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        module,
        fused.fuse(module, src),
        fused.fuse(module, src, accuracy="strict"),
        torch.compile(module, backend="fuseplan", options={"accuracy": "strict"}),
    ]
    with torch.no_grad():
        torchs, usual, *strict = (float((made(src) - exact).norm()) for made in forms)
    assert max(strict) < 2 * torchs < usual
    with pytest.raises(ArgumentError, match="accuracy='loose'; want 'default', 'strict'"):
        fused.fuse(module, src, accuracy="loose")
