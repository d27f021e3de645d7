"""Convolutions as products in Triton's interpreter: shapes, layouts, dtypes, groups, tails, tiles."""

import numpy as np
import pytest

from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.templates.product_cost import bound
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret

LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
BOTH = pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
SM_90 = parse_target("triton:sm_90")

SHAPES = (
    ("2x5x9x11", "conv2d(7, kernel=3, padding=1)"),
    ("1x64x9x9", "conv2d(33, kernel=3, padding=1)"),
    ("1x3x20x20", "conv2d(40, kernel=7, stride=2, padding=3)"),
    ("1x40x10x12", "conv2d(20, kernel=1, stride=2)"),
    ("1x16x10x12", "conv2d(20, kernel=1, padding=1)"),
    ("1x9x13x15", "conv2d(70, kernel=(5, 2), stride=(2, 3), padding=((0, 3), (1, 0)))"),
    ("1x20x17x18", "conv2d(8, kernel=3, dilation=(2, 3), padding=2)"),
    ("2x12x9x8", "conv2d(18, kernel=3, padding=1, groups=3)"),
    ("1x64x8x8", "conv2d(64, kernel=3, padding=1, groups=16)"),
    ("1x60x8x8", "conv2d(45, kernel=3, padding=1, groups=15)"),
    ("1x100x6x6", "conv2d(150, kernel=3, padding=1, groups=2)"),
    ("2x19x9x7", "conv2d(38, kernel=3, padding=1, groups=19)"),
    ("1x1x8x8", "conv2d(1, kernel=3)"),
    ("3x130x1x1", "conv2d(100, kernel=1)"),
    ("1x4x1x40", "conv2d(5, kernel=(1, 9), padding=(0, 4))"),
    ("2x3x50", "conv1d(7, kernel=9, stride=3, padding=4)"),
    ("2x20x33", "conv1d(34, kernel=3, padding=same)"),
    ("1x5x6x7x8", "conv3d(9, kernel=3, padding=1)"),
    (
        "2x34x5x9x6",
        "conv3d(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding=((0, 1), (1, 1), (2, 0)), groups=2)",
    ),
)


def kernel_of(plan: str) -> Kernel:
    return lower(match(FusionPlan.parse(plan)))


def plan_of(shape: str, conv: str, last: bool, tail: str = "", dtype: str = "f32") -> str:
    return f"{dtype}[{shape}, {LAYOUTS[shape.count('x') + 1][last]}] -> {conv}{tail}"


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_any_shape(shape: str, conv: str, last: bool) -> None:
    assert_interpreted(plan_of(shape, conv, last, " -> bias -> relu"), Product)


@pytest.mark.part(8)
@BOTH
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize(("shape", "conv"), SHAPES[:3] + SHAPES[7:9] + SHAPES[15:])
def test_any_dtype(shape: str, conv: str, dtype: str, last: bool) -> None:
    assert_interpreted(plan_of(shape, conv, last, " -> bias -> add -> relu", dtype), Product)


@pytest.mark.part(8)
@BOTH
@pytest.mark.parametrize(
    "before", ["relu", "batch_norm -> relu", "add", "batch_norm(per_activation) -> prelu"]
)
@pytest.mark.parametrize("after", ["batch_norm -> gelu", "batch_norm(per_activation) -> add -> prelu"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "conv", ["conv2d(20, kernel=3, padding=1)", "conv2d(20, kernel=3, padding=1, groups=4)"]
)
def test_operators_before_and_after(before: str, after: str, dtype: str, conv: str, last: bool) -> None:
    plan = plan_of("2x20x7x9", f"{before} -> {conv}", last, f" -> {after}", dtype)
    assert_interpreted(plan, Product)


@BOTH
def test_few_channels_after_a_prologue(last: bool) -> None:
    """Taps and channels are one axis of the sum, and padding is zero whatever the prologue makes of zero."""
    plan = plan_of("2x3x9x11", "bias -> add -> conv2d(20, kernel=3, padding=1)", last, " -> relu")
    assert_interpreted(plan, Product)


@pytest.mark.parametrize(
    "strides", ["400:7:90:16", "900:1:170:24", "1300:2:250:40", "6:13000:1:2400"], ids=str
)
@pytest.mark.parametrize("before", ["", "relu -> "])
def test_any_strides_of_src(strides: str, before: str) -> None:
    assert_interpreted(f"f32[2x3x4x5, strides={strides}] -> {before}conv2d(8, kernel=2, padding=1)", Product)


SPLIT = (
    Product(16, 16, 16, split=2),
    Product(32, 16, 16, split=4, ahead=True, joined=4),
    Product(16, 32, 16, split=3, swapped=True),
    Product(16, 32, 32, split=2, swapped=True, ahead=True),
    Product(16, 32, 16, split=2, parts=2, group=2),
)


@BOTH
@pytest.mark.parametrize("form", SPLIT, ids=lambda form: form.text)
@pytest.mark.parametrize("arithmetic", ["native", "tf32x3"])
@pytest.mark.parametrize(
    ("shape", "conv"),
    [
        ("2x40x5x6", "conv2d(36, kernel=3, padding=1)"),
        ("1x70x5x6", "relu -> conv2d(36, kernel=(3, 1), stride=2)"),
        ("1x5x6x7", "conv2d(36, kernel=3, padding=1)"),
        ("1x48x4x5", "conv2d(40, kernel=3, groups=2)"),
    ],
)
@pytest.mark.part(8)
def test_sums_in_parts(shape: str, conv: str, arithmetic: str, form: Product, last: bool) -> None:
    """Parts that no tap or channel ends with, and a last one that is shorter."""
    plan = plan_of(shape, conv, last, " -> bias -> add", "f16" if arithmetic == "native" else "f32")
    assert_interpreted(plan, Product(**{**form.knobs, "arithmetic": arithmetic}))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_few_tiles_are_split_and_few_rows_stand_second(dtype: str) -> None:
    few = list(
        Product.candidates(kernel_of(f"{dtype}[1x512x7x7] -> conv2d(512, kernel=3)"), SM_90, "default")
    )
    assert {1, 8} <= {each.knobs["split"] for each in few}
    assert any(each.knobs["swapped"] and each.knobs["rows"] < 64 for each in few)
    many = Product.candidates(kernel_of(f"{dtype}[64x512x28x28] -> conv2d(512, kernel=3)"), SM_90, "default")
    assert {each.knobs["split"] for each in many} == {1}
    grouped = Product.candidates(
        kernel_of(f"{dtype}[1x64x7x7] -> conv2d(64, kernel=3, groups=16)"), SM_90, "default"
    )
    assert {each.knobs["split"] for each in grouped} == {1}


@pytest.mark.part(8)
@BOTH
@pytest.mark.parametrize(
    ("positions", "features", "depth"), [(16, 16, 16), (32, 64, 32), (64, 16, 16), (16, 32, 64)]
)
@pytest.mark.parametrize("joined", [1, 2, 8])
@pytest.mark.parametrize("ahead", [False, True])
def test_any_tile(positions: int, features: int, depth: int, joined: int, ahead: bool, last: bool) -> None:
    plan = plan_of("1x40x4x5", "conv2d(36, kernel=3, padding=1)", last, " -> bias -> relu", "f16")
    assert_interpreted(
        plan, Product(positions, features, depth, joined=joined, ahead=ahead, swapped=not last)
    )


@BOTH
@pytest.mark.parametrize("joined", [1, 4])
@pytest.mark.parametrize(
    ("shape", "conv"),
    [
        ("1x40x5x6", "conv2d(20, kernel=3, padding=1)"),
        ("1x40x5x6", "conv2d(20, kernel=2)"),
        ("1x16x5x6", "conv2d(20, kernel=(3, 1), padding=1)"),
        ("1x70x5x6", "conv2d(20, kernel=1, stride=2)"),
        ("1x34x4x5", "conv2d(34, kernel=3, padding=1, groups=17)"),
        ("1x20x2x3x4", "conv3d(6, kernel=2, padding=1)"),
    ],
)
@pytest.mark.parametrize("before", ["", "bias -> "])
@pytest.mark.part(3)
def test_loading_ahead(shape: str, conv: str, before: str, joined: int, last: bool) -> None:
    plan = plan_of(shape, before + conv, last, " -> bias -> relu")
    assert_interpreted(plan, Product(32, 32, 32, joined=joined, ahead=True, swapped=last, arithmetic="ieee"))


@BOTH
def test_f64_without_an_instruction_for_products(last: bool) -> None:
    for conv in ("conv2d(20, kernel=3, padding=1)", "conv2d(20, kernel=3, groups=10)"):
        plan = plan_of("2x20x6x7", conv, last, " -> bias -> relu", "f64")
        assert_interpreted(plan, Product, "triton:gfx942")


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_offsets_of_64_bits(seed: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tensors of 2^31 elements and more."""
    monkeypatch.setattr("fuseplan.backends.triton.templates.product_tiles.WIDE", 64)
    for conv in ("conv2d(20, kernel=3, padding=1)", "conv2d(20, kernel=3, padding=1, groups=10)"):
        for channels in (3, 20) if "groups" not in conv else (20,):
            plan = plan_of(f"2x{channels}x6x7", conv, last, " -> bias -> relu")
            first = next(iter(Product.candidates(kernel_of(plan), SM_90, "default")))
            assert "int64" in first.emit(kernel_of(plan), SM_90).text
            assert_interpreted(plan, Product, seed=seed)


def test_offsets_have_64_bits_exactly_where_they_need_them() -> None:
    for batch, needed in ((1023, False), (1024, True)):
        kernel = kernel_of(f"f16[{batch}x32x256x256] -> conv2d(32, kernel=3, padding=1)")
        assert Tiles(kernel, Knobs(128, 32, 32)).is_wide == needed


@BOTH
def test_every_candidate(last: bool) -> None:
    for dtype in ("f32", "f16", "f64"):
        plan = plan_of(
            "2x24x5x9", "conv2d(40, kernel=3, stride=2, padding=1)", last, " -> bias -> relu", dtype
        )
        for candidate in Product.candidates(kernel_of(plan), SM_90, "default"):
            assert isinstance(candidate, Product)
            assert_interpreted(plan, candidate)


def test_an_accuracy_decides_how_products_are_computed() -> None:
    kernel = kernel_of("f32[1x512x8x8] -> conv2d(8, kernel=3)")
    between = (bound(kernel, "ieee") + bound(kernel, "tf32x3")) / 2
    for accuracy, arithmetic in (
        ("default", "tf32x3"),
        ("strict", "ieee"),
        (between, "tf32x3"),
        (1.0, "tf32x3"),
    ):
        found = Product.candidates(kernel, SM_90, accuracy)
        assert {each.knobs["arithmetic"] for each in found} == {arithmetic}


def test_an_accuracy_that_no_sum_has_is_refused() -> None:
    kernel = kernel_of("f32[1x8x8x8] -> conv2d(4, kernel=3)")
    refusal = next(claim for claim in Product.limits(kernel, SM_90, 1e-9) if not claim.holds)
    assert refusal.reason is Reason.ACCURACY


def test_a_kernel_without_a_convolution_is_refused() -> None:
    kernel = kernel_of("f32[1x8x8x8] -> relu")
    refusal = next(claim for claim in Product.limits(kernel, SM_90, "default") if not claim.holds)
    assert refusal.reason is Reason.NO_CONTRACTION


@pytest.mark.parametrize(
    ("conv", "merged", "blocks"),
    [
        ("conv2d(64, kernel=3)", 1, 1),
        ("conv2d(64, kernel=3, groups=2)", 1, 2),
        ("conv2d(64, kernel=3, groups=16)", 4, 4),
        ("conv2d(64, kernel=3, groups=64)", 16, 4),
        ("conv2d(640, kernel=3, groups=64)", 2, 32),
    ],
)
def test_narrow_groups_stand_side_by_side(conv: str, merged: int, blocks: int) -> None:
    tiles = Tiles(kernel_of(f"f32[1x64x8x8] -> {conv}"), Knobs(64, 64, 64))
    assert (tiles.merged, tiles.group_blocks) == (merged, blocks)


@BOTH
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_infinities_and_nan_stand_where_the_reference_has_them(dtype: str, last: bool) -> None:
    """Also where f32 is multiplied in parts: an infinity has no part but itself."""
    plan = FusionPlan.parse(plan_of("1x40x5x6", "conv2d(20, kernel=3, padding=1)", last, dtype=dtype))
    arrays = random_arrays(plan, 7)
    arrays["src"][0, 3, 2, 2], arrays["src"][0, 30, 4, 5], arrays["src"][0, 7, 0, 0] = np.inf, -np.inf, np.nan
    arrays["weight"][5, 8, 1, 1] = np.inf
    kernel = lower(match(plan))
    chosen = next(iter(Product.candidates(kernel, SM_90, "default")))
    assert isinstance(chosen, Product)
    got = wide(interpret(chosen, kernel, SM_90, arrays))
    with np.errstate(all="ignore"):
        want = reference(plan, arrays)
    assert np.isinf(want).any()
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(got), test(want))


@pytest.mark.parametrize(("channels", "joined"), [(16, False), (64, True)])
def test_steps_of_joined_bytes_are_long(channels: int, joined: bool) -> None:
    """Triton counts those of 16 bytes twice, with no error, and only on a GPU."""
    kernel = kernel_of(f"f8e4m3[4x{channels}x8x8] -> conv2d(8, kernel=3)")
    knobs = [each.knobs for each in Product.candidates(kernel, SM_90, "default")]
    steps = [int(each["depth"]) for each in knobs if int(each["joined"]) > 1]
    assert bool(steps) == joined
    assert all(step >= 32 for step in steps)
