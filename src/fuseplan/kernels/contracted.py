"""Convolutions, products, pools and the gradients of weights as the contraction of a kernel.

The gradient of a convolution's weight is the sum over images n and positions o of
grad[n, f, o] * src[n, c, o*stride + k*dilation - padding]. So it is a convolution of src whose channels are
the images, whose window is moved by the dilation over taps that lie a stride apart, and whose weight is grad;
channels become one more spatial axis, without a window. Groups are images, each with a weight of its own.
The gradient of a linear layer's weight is the case without windows: rows are the channels. Nothing is moved:
both lie as the plan has them, and dst is dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fuseplan.kernels import transposed
from fuseplan.kernels.contraction import Contraction, Pool
from fuseplan.kernels.kernel import KernelOperand
from fuseplan.language.declarations import Operand
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops import pool
from fuseplan.ops.conv import Conv, ConvTranspose, factor
from fuseplan.ops.matmul import Product
from fuseplan.ops.windows import Window, reach
from fuseplan.plans.step import Step
from fuseplan.plans.text import operator_text


def contraction(step: Step) -> Contraction:
    """A product is a convolution of one tap; the channels of a pool are groups."""
    op, src = step.op, step.src
    assert isinstance(op, Product | Conv | ConvTranspose | pool.Pool)  # by the rules
    once = (1,) * len(src.spatial)
    one_tap = Window(once, once, once, ((0, 0),) * len(once), src.spatial)
    window = one_tap if isinstance(op, Product) else op.window(src)
    moved = Contraction(
        batch=src.batch,
        channels=src.channels,
        features=src.channels,
        groups=src.channels,
        src_spatial=src.spatial,
        dst_spatial=window.dst,
        kernel=window.kernel,
        stride=window.stride,
        dilation=window.dilation,
        padding=window.padding,
    )
    if isinstance(op, pool.Pool):
        return replace(moved, pool=Pool(op.join, op.counted(src)))
    made = replace(moved, features=op.features, precision=op.precision)
    if src.dtype in op.integers and src.dtype != factor(op, src):
        made = replace(made, factor=src.dtype)
    if isinstance(op, Product):
        return replace(made, groups=1, weight_per_batch=op.batched)
    if isinstance(op, Conv):
        return replace(made, groups=op.groups)
    return transposed.plain(
        replace(made, groups=op.groups, is_transposed=True, written=operator_text(op, parameters=False))
    )


NO_WINDOW = Window((), (), (), (), ())


class KernelTensor(TensorSpec):
    """A kernel's tensor, with one axis more than a plan's may have: three spatial axes in groups."""

    most_axes: ClassVar[int] = 6


@dataclass(frozen=True)
class Gradient:
    """The contraction of a weight's gradient.

    Attributes:
        src: (groups, images, channels of a group, *spatial).
    """

    src: TensorSpec
    convolution: Contraction

    def dst(self, dtype: str) -> TensorSpec:
        """(groups, features of a group, channels of a group, *kernel), dense as the plan's output."""
        conv = self.convolution
        return KernelTensor((conv.batch, conv.features, *conv.dst_spatial), dtype)

    def weight(self, grad: Operand) -> KernelOperand:
        """The gradient of the layer's output as the convolution's weight."""
        conv = self.convolution
        groups = (conv.batch,) if conv.weight_per_batch else ()
        taps = conv.kernel if any(conv.kernel[1:]) else ()  # rows have no positions
        shape = (conv.channels, *groups, conv.features, *taps)
        axes = (*range(1, 2 + len(groups)), 0, *range(2 + len(groups), len(shape)))
        return KernelOperand(grad.key, axes, shape, grad.dtype, "weight")


def gradient(src: TensorSpec, features: int, groups: int, window: Window, precision: str) -> Gradient:
    """The gradient of the weight of a layer with that window over src.

    Args:
        src: (n, c, *spatial), any strides.
        window: how the layer's moves.
    """
    images, channels, *steps = src.element_strides
    # Elements behind the last window are not read; padding there is what the windows reach.
    ends = [
        (kernel - 1) * dilation + reach(positions, stride) - low - extent
        for kernel, dilation, positions, stride, (low, _), extent in zip(
            window.kernel,
            window.dilation,
            window.dst,
            window.stride,
            window.padding,
            src.spatial,
            strict=True,
        )
    ]
    own = src.channels // groups
    spatial = (own, *(max(1, extent + min(0, end)) for extent, end in zip(src.spatial, ends, strict=True)))
    padding = ((low, max(0, end)) for (low, _), end in zip(window.padding, ends, strict=True))
    convolution = Contraction(
        batch=groups,
        channels=src.batch,
        features=features // groups,
        groups=1,
        src_spatial=spatial,
        dst_spatial=(own, *window.kernel),
        kernel=(1, *window.dst),
        stride=(1, *window.dilation),
        dilation=(1, *window.stride),
        padding=((0, 0), *padding),
        weight_per_batch=groups > 1,
        precision=precision,
    )
    strides = (channels * own, images, channels, *steps)
    lying = KernelTensor((groups, src.batch, *spatial), src.dtype, strides=strides)
    return Gradient(lying, convolution)


def layer(conv: Contraction) -> Contraction | None:
    """The grouped convolution whose weight's gradient a contraction is; None of any other."""
    if not (conv.written and conv.weight_per_batch):
        return None
    own, *src_spatial = conv.src_spatial
    return Contraction(
        batch=conv.channels,
        channels=conv.batch * own,
        features=conv.batch * conv.features,
        groups=conv.batch,
        src_spatial=tuple(src_spatial),
        dst_spatial=conv.kernel[1:],
        kernel=conv.dst_spatial[1:],
        stride=conv.dilation[1:],
        dilation=conv.stride[1:],
        padding=conv.padding[1:],
    )
