"""Convolutions, products and pools as the contraction of a kernel."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.kernels import transposed
from fuseplan.kernels.contraction import Contraction, Pool
from fuseplan.ops import pool
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Product
from fuseplan.ops.transposed import ConvTranspose
from fuseplan.ops.windows import Window
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
    if isinstance(op, Product):
        return replace(made, groups=1, weight_per_batch=op.batched)
    if isinstance(op, Conv):
        return replace(made, groups=op.groups)
    return transposed.plain(
        replace(made, groups=op.groups, is_transposed=True, written=operator_text(op, parameters=False))
    )
