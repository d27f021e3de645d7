"""Torch tensors in and out, read and written where they lie; a plan beside the layers it replaces.

Tensors on the CPU are taken through DLPack without a copy; `channels_last` is the layout nhwc. A plan
records no gradient: a tensor that needs one is refused.
"""

import torch

import fuseplan
from fuseplan import BatchNorm, Conv2d, FusionPlan, Relu


def main() -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3, padding=1, bias=False), torch.nn.BatchNorm2d(32), torch.nn.ReLU()
    ).eval()
    convolution, norm = layers[0], layers[1]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)

    plan = FusionPlan("f32[4x16x28x28, nhwc]", Conv2d(32, kernel=3, padding=1), BatchNorm(), Relu())
    fused = fuseplan.compile(plan).bind(
        weight=convolution.weight.detach(),
        mean=norm.running_mean,
        variance=norm.running_var,
        scale=norm.weight.detach(),
        shift=norm.bias.detach(),
        epsilon=norm.eps,
    )

    src = torch.randn(4, 16, 28, 28).to(memory_format=torch.channels_last)
    dst = fused(src)
    print(f"{type(dst).__name__}{list(dst.shape)}, {dst.dtype}, strides {dst.stride()}")
    with torch.no_grad():
        print(f"largest difference from the layers: {(dst - layers(src)).abs().max():.0e}")

    out = torch.empty_like(dst)
    print(f"written into the tensor given: {fused(src, out) is out}, equal: {torch.equal(out, dst)}")

    half = FusionPlan("bf16[4x16x28x28, nhwc]", Conv2d(32, kernel=3, padding=1), Relu())
    weight = convolution.weight.detach().bfloat16()
    dst = fuseplan.compile(half)(src.bfloat16(), weight=weight)
    print(f"{half}: {dst.dtype}")

    try:
        fused(src.requires_grad_())
    except fuseplan.ArgumentError as error:
        print(error)


if __name__ == "__main__":
    main()
