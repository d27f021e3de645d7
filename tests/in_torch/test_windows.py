"""Windows and softmax as torch has them: which plans compute them, and that the results lie as torch's."""

import torch
from torch import nn

import fuseplan.torch as fused

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
