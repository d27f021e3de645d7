"""Transposed convolutions as products in Triton's interpreter: residues, layouts, dtypes, groups, tails."""

from __future__ import annotations

import pytest

from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.ops.conv import TRANSPOSED
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
BOTH = pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])

SHAPES = (
    ("2x20x9x7", "conv_transpose2d(33, kernel=2, stride=2)"),
    ("1x33x6x5", "conv_transpose2d(18, kernel=4, stride=2, padding=1)"),
    ("2x5x6x7", "conv_transpose2d(19, kernel=3, stride=2, padding=1)"),
    ("2x5x6x7", "conv_transpose2d(19, kernel=3, stride=2, padding=1, output_padding=1)"),
    ("1x64x5x5", "conv_transpose2d(40, kernel=5, padding=1)"),
    ("1x40x5x6", "conv_transpose2d(20, kernel=1, stride=2)"),
    ("1x12x5x4", "conv_transpose2d(7, kernel=(5, 2), stride=(3, 2), padding=((0, 3), (1, 0)))"),
    ("1x20x7x6", "conv_transpose2d(8, kernel=3, stride=(4, 2), dilation=(2, 3), padding=2)"),
    ("2x12x5x4", "conv_transpose2d(18, kernel=3, stride=2, padding=1, groups=3)"),
    ("2x19x5x4", "conv_transpose2d(38, kernel=3, stride=2, padding=1, groups=19)"),
    ("1x6x4x7", "conv_transpose2d(6, kernel=2, stride=(3, 1), padding=((0, 1), 3), output_padding=(2, 0))"),
    ("2x3x20", "conv_transpose1d(7, kernel=9, stride=3, padding=4)"),
    ("2x17x10", "conv_transpose1d(16, kernel=6, stride=3, padding=((1, 3),), output_padding=1)"),
    ("3x20x1x1", "conv_transpose2d(17, kernel=4)"),
    ("1x20x1x1", "conv_transpose2d(17, kernel=3, stride=2, padding=1)"),
    ("1x18x1x3", "conv_transpose2d(24, kernel=(3, 4), stride=2, padding=(0, 1))"),
    ("1x18x4x3", "conv_transpose2d(5, kernel=4, stride=2, dilation=3, padding=2)"),
    ("1x6x2x2", "conv_transpose2d(5, kernel=2, stride=9, padding=4)"),
    ("1x5x3x4x5", "conv_transpose3d(9, kernel=3, stride=2, padding=1, output_padding=1)"),
    ("2x34x2x4x3", "conv_transpose3d(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding=0, groups=2)"),
)  # fmt: skip


def plan_of(shape: str, conv: str, last: bool, tail: str = "", dtype: str = "f32") -> str:
    return f"{dtype}[{shape}, {LAYOUTS[shape.count('x') + 1][last]}] -> {conv}{tail}"


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_any_shape(shape: str, conv: str, last: bool) -> None:
    assert_interpreted(plan_of(shape, conv, last, " -> bias -> relu"), Product)


@pytest.mark.part(4)
@BOTH
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize(("shape", "conv"), SHAPES[:4] + SHAPES[13:16] + SHAPES[18:])
def test_any_dtype(shape: str, conv: str, dtype: str, last: bool) -> None:
    assert_interpreted(plan_of(shape, conv, last, " -> bias -> add -> gelu", dtype), Product)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("before", ["relu", "batch_norm(per_activation) -> prelu"])
@pytest.mark.parametrize("after", ["batch_norm -> gelu", "batch_norm(per_activation) -> add -> prelu"])
@pytest.mark.parametrize("kernel", [3, 4])
def test_operators_on_either_side(kernel: int, before: str, after: str, dtype: str, last: bool) -> None:
    conv = f"{before} -> conv_transpose2d(20, kernel={kernel}, stride=2, padding=1) -> {after}"
    assert_interpreted(plan_of("2x12x5x6", conv, last, dtype=dtype), Product)


@pytest.mark.parametrize(
    "plan", [FusionPlan(*sample) for kind in TRANSPOSED for sample in kind.samples()], ids=str
)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_every_candidate_of_each_sample(plan: FusionPlan, dtype: str) -> None:
    target = parse_target("triton:sm_90")
    plan = FusionPlan.parse(f"{dtype}{str(plan)[3:]} -> bias")
    for template in list(Product.candidates(lower(match(plan)), target, "default"))[:4]:
        assert isinstance(template, Product)
        assert_interpreted(plan, template, target)


@pytest.mark.parametrize("tail", ["", " -> bias -> relu"])
def test_rows_of_an_open_axis(tail: str) -> None:
    plan = f"f32[*x6x4x5, nhwc] -> conv_transpose2d(18, kernel=4, stride=2, padding=1){tail}"
    assert_interpreted(plan, Product, extent=3)


@pytest.mark.parametrize(
    ("plan", "is_joint"),
    [
        ("f32[2x64x16x16] -> conv_transpose2d(64, kernel=4, stride=2, padding=1, output_padding=1)", True),
        ("f32[2x64x16x16, nhwc] -> conv_transpose2d(64, kernel=4, stride=2)", False),
        ("f16[2x64x16x16] -> conv_transpose2d(64, kernel=4, stride=2)", False),
        ("f16[2x64x16x16, nhwc] -> conv_transpose2d(64, kernel=2, stride=2)", True),
        ("f32[2x64x4x4] -> conv_transpose2d(64, kernel=4, stride=2, padding=1)", False),  # half is cut off
        ("f32[2x64x16x16] -> conv_transpose2d(64, kernel=3, stride=2)", False),
        ("f32[2x64x16x16] -> conv_transpose2d(64, kernel=4, stride=2, groups=2)", False),
    ],
)
def test_residues_share_a_tile_where_that_pays(plan: str, is_joint: bool) -> None:
    tiles = Tiles(lower(match(FusionPlan.parse(plan))), Knobs(64, 64, 32))
    assert (tiles.is_joint, bool(tiles.residues)) == (is_joint, not is_joint)


def test_stride_1_is_a_convolution_of_every_template() -> None:
    plan = FusionPlan.parse("f16[2x64x8x8, nhwc] -> conv_transpose2d(64, kernel=3, padding=1) -> relu")
    kernel = lower(match(plan))
    assert not kernel.contraction.is_transposed
    assert next(iter(Hopper.candidates(kernel, parse_target("triton:sm_90"), "default")))
