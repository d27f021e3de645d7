"""Runs of neighbouring rows of which products tell the compiler: true, or of no use to a vector."""

from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles, row_axes, rows_run
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.plans.plan import FusionPlan

PLANS = (
    "f16[3x4x5x5] -> conv2d(8, kernel=1)",
    "f16[3x4x4x6] -> conv2d(8, kernel=1)",
    "f32[2x4x7x28] -> conv2d(8, kernel=3, padding=1)",
    "f32[2x4x28x7] -> conv2d(8, kernel=3, padding=1)",
    "f32[2x4x8x9] -> conv2d(8, kernel=(3, 2))",
    "f32[2x4x8x3] -> conv2d(8, kernel=(1, 3))",
    "f32[2x4x3x8] -> conv2d(8, kernel=(3, 1))",
    "f16[2x4x9x16] -> conv2d(8, kernel=3, stride=2, padding=1)",
    "f16[2x4x9x15] -> conv2d(8, kernel=3, stride=(2, 1), padding=1)",
    "f16[2x4x9x15, nhwc] -> conv2d(8, kernel=3, padding=1)",
    "f16[1x4x15] -> conv1d(8, kernel=3, padding=1)",
    "f16[3x4x15] -> conv1d(8, kernel=3, padding=1)",
    "f16[2x4x3x5x7] -> conv3d(8, kernel=3, padding=1)",
    "f16[2x4x3x5, strides=900:3:300:60] -> conv2d(8, kernel=1)",
    "f16[2x4x3x5, strides=900:80:16:1] -> conv2d(8, kernel=2)",
    "f16[3x5x4, bcs of bsc] -> matmul(8, batched=True)",
)


def tiles_of(plan: str) -> Tiles:
    return Tiles(lower(match(FusionPlan.parse(plan))), Knobs(16, 16, 16))


def starts(tiles: Tiles) -> NDArray[np.int64]:
    """Offset in src of the first element under each row's window."""
    conv, steps = tiles.conv, tiles.kernel.src.element_strides
    image, *places = np.indices((conv.batch, *conv.dst_spatial)).reshape(1 + len(conv.kernel), -1)
    begins = [
        (at * stride - low) * step
        for at, stride, (low, _), step in zip(places, conv.stride, conv.padding, steps[2:], strict=True)
    ]
    return np.array(image * steps[0] + sum(begins))


def written(tiles: Tiles) -> NDArray[np.int64]:
    """Offset in dst of each row's first feature."""
    conv, steps = tiles.conv, tiles.kernel.dst.element_strides
    image, *places = np.indices((conv.batch, *conv.dst_spatial)).reshape(1 + len(conv.kernel), -1)
    return np.array(
        image * steps[0] + sum(at * step for at, step in zip(places, steps[2:], strict=True)), np.int64
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_is_true_or_allows_no_vector(plan: str) -> None:
    tiles = tiles_of(plan)
    dst_run = rows_run(row_axes(tiles.kernel.dst, tiles.batches))
    for run, offsets in ((tiles.src_run, starts(tiles)), (dst_run, written(tiles))):
        whole = offsets[: prod(offsets.shape) // run * run].reshape(-1, run)
        is_true = bool((np.diff(whole, axis=1) == 1).all())
        assert is_true or (whole[:, 0] % 2).any(), f"{run} in {plan}"  # odd: not even two are aligned


@pytest.mark.parametrize(
    ("plan", "src", "dst"),
    [
        ("f16[3x4x5x5] -> conv2d(8, kernel=1)", 2, 2),
        ("f16[3x4x4x6] -> conv2d(8, kernel=1)", 1, 1),  # Triton derives a run of 8
        ("f32[2x4x7x28] -> conv2d(8, kernel=3, padding=1)", 4, 1),
        ("f32[2x4x7x64] -> conv2d(8, kernel=3, padding=1)", 16, 1),
        ("f32[2x4x8x3] -> conv2d(8, kernel=(1, 3))", 1, 1),  # rows lie three apart
        ("f16[2x4x9x16] -> conv2d(8, kernel=3, stride=2, padding=1)", 1, 1),
        ("f16[2x4x9x15, nhwc] -> conv2d(8, kernel=3, padding=1)", 1, 1),
        ("f16[1x4x15] -> conv1d(8, kernel=3, padding=1)", 1, 1),  # a single run
    ],
)
def test_runs(plan: str, src: int, dst: int) -> None:
    tiles = tiles_of(plan)
    assert (tiles.src_run, rows_run(row_axes(tiles.kernel.dst, tiles.batches))) == (src, dst)
