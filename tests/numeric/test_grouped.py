"""The templates for narrow groups against the float64 reference."""

from typing import Any

import numpy as np
import pytest

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.grouping import grouping
from fuseplan.backends.cpu.templates.depthwise import Depthwise, Grouped
from fuseplan.backends.cpu.templates.depthwise_planes import DepthwisePlanes, GroupedPlanes
from fuseplan.execution.select import select
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.template import Template
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

# Tensor and convolution: groups of at most two features; and of more, which only wide vectors hold twice.
SHAPES = (
    ("2x12x9x11, nhwc", "conv2d(6, kernel=3, padding=1, groups=6)"),
    ("1x15x7x7, nhwc", "conv2d(10, kernel=3, stride=2, padding=1, groups=5)"),
    ("1x22x6x9, nhwc", "conv2d(22, kernel=(1, 4), padding=((0, 0), (3, 0)), groups=11)"),
    ("1x32x8x10, nhwc", "conv2d(4, kernel=3, dilation=2, padding=2, groups=2)"),
    ("1x8x5x5, nhwc", "conv2d(8, kernel=1, groups=4)"),
    ("1x8x20x20, nhwc", "conv2d(8, kernel=11, padding=5, groups=4)"),
    ("2x10x40, nwc", "conv1d(10, kernel=5, padding=2, groups=5)"),
    ("1x6x90, nwc", "conv1d(6, kernel=70, padding=((69, 0),), groups=3)"),
    ("1x12x4x5x6, ndhwc", "conv3d(6, kernel=3, padding=1, groups=3)"),
    ("3x66x1x1, nhwc", "conv2d(66, kernel=1, groups=33)"),
)
WIDE = (
    ("1x32x14x14, nhwc", "conv2d(32, kernel=3, padding=1, groups=8)"),
    ("1x64x14x14, nhwc", "conv2d(64, kernel=3, padding=1, groups=8)"),
    ("1x80x7x9, nhwc", "conv2d(30, kernel=3, padding=1, groups=5)"),
    ("1x21x12x5, nhwc", "conv2d(35, kernel=3, stride=(1, 2), padding=1, groups=7)"),
)

FEW = (  # one group
    ("2x3x19x23", "conv2d(10, kernel=3, stride=2, padding=1)"),
    ("1x3x12x9", "conv2d(9, kernel=(5, 2), padding=((2, 1), (0, 3)), dilation=2)"),
    ("1x2x40", "conv1d(17, kernel=5, stride=3)"),
    ("2x2x5x6x20", "conv3d(3, kernel=3, padding=1)"),
    ("1x3x32x32", "conv2d(20, kernel=4, stride=4)"),
    ("1x2x6x7", "conv2d(8, kernel=1)"),
)


@pytest.mark.parametrize(("shape", "conv"), FEW)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_group_of_few_channels(shape: str, conv: str, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{shape}] -> sigmoid -> {conv} -> bias -> relu")
    for width in (32, 64):
        assert_close(forced(plan, GroupedPlanes, narrowed(width)), random_arrays(plan, 1))


def test_few_channels_first_are_not_transposed() -> None:
    """Copies with channels innermost would have three of a vector's eight lanes."""
    target = narrowed(32)
    for text in ("conv2d(32, kernel=3, stride=2, padding=1)", "conv2d(96, kernel=4, stride=4)"):
        kernel = lower(match(FusionPlan.parse(f"f32[1x3x224x224] -> {text} -> bias -> relu")))
        chosen = select(kernel, target).template
        assert isinstance(chosen, GroupedPlanes)
        assert chosen.rows * chosen.vectors * chosen.features <= 8, "16 registers hold the factors too"
    many = lower(match(FusionPlan.parse("f32[1x64x56x56] -> conv2d(64, kernel=5, padding=2, groups=64)")))
    for each in DepthwisePlanes.candidates(many, target, "default"):
        assert isinstance(each, DepthwisePlanes)
        assert each.rows * each.vectors <= 8
    for text in ("f32[64x3] -> linear(8)", "f32[3x2x9x9] -> conv2d_weight_gradient(2, kernel=3)"):
        refused = refusal_of(text, GroupedPlanes, target)
        assert refused
        assert refused.code == Reason.GROUP_WIDTH.code


# What shapes above are in the other layout.
FIRST = {"nhwc": "nchw", "nwc": "ncw", "ndhwc": "ncdhw"}
BOTH = pytest.mark.parametrize("kind", [Grouped, GroupedPlanes], ids=lambda kind: kind.name)


def plan_of(kind: type[Template], tensor: str, rest: str, dtype: str = "f32") -> FusionPlan:
    shape, layout = tensor.split(", ")
    return FusionPlan.parse(f"{dtype}[{shape}, {layout if kind is Grouped else FIRST[layout]}] -> {rest}")


@BOTH
@pytest.mark.parametrize(
    ("tensor", "conv", "width"),
    [*((*shape, width) for shape in SHAPES for width in (16, 32, 64)), *((*shape, 64) for shape in WIDE)],
)
@pytest.mark.part(3)
def test_any_shape(kind: type[Template], tensor: str, conv: str, width: int) -> None:
    plan = plan_of(kind, tensor, f"{conv} -> bias -> relu")
    assert_close(forced(plan, kind, narrowed(width)), random_arrays(plan, 1))


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("tensor", "conv"), [*SHAPES, *WIDE])
def test_error_stays_within_the_bound_that_is_claimed(kind: type[Template], tensor: str, conv: str) -> None:
    plan = plan_of(kind, tensor, conv)
    compiled = forced(plan, kind, narrowed(64))
    arrays = random_arrays(plan, 2)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    assert (np.abs(got - want) <= compiled.choice.template.error_bound(compiled.kernel) * size).all()


@BOTH
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("before", ["", "batch_norm -> relu -> ", "add -> "])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.part(3)
def test_any_dtype_and_operators_around(kind: type[Template], dtype: str, before: str, width: int) -> None:
    conv = "conv2d(18, kernel=3, padding=1, groups=9) -> add -> silu"
    plan = plan_of(kind, "2x18x9x13, nhwc", before + conv, dtype)
    assert_close(forced(plan, kind, narrowed(width)), random_arrays(plan, 3), slack=20)


@BOTH
def test_operators_around_a_volume(kind: type[Template]) -> None:
    plan = plan_of(kind, "1x12x4x5x21, ndhwc", "batch_norm -> prelu -> conv3d(6, kernel=3, groups=3) -> bias")
    assert_close(forced(plan, kind, narrowed(32)), random_arrays(plan, 3), slack=20)


@BOTH
@pytest.mark.parametrize("strides", ["9000:1:900:30", "9000:90:10:1", "9000:900:30:2"])
def test_strided_src(kind: type[Template], strides: str) -> None:
    plan = FusionPlan.parse(f"f32[1x24x8x9, strides={strides}] -> conv2d(24, kernel=3, padding=1, groups=6)")
    if plan.output.is_channels_last == (kind is Grouped):
        assert_close(forced(plan, kind, narrowed(64)), random_arrays(plan, 4))
    else:
        refusal = refusal_of(plan, kind, narrowed(64))
        assert refusal is not None
        assert refusal.reason in (Reason.CHANNELS_FIRST, Reason.CHANNELS_LAST)


@BOTH
def test_every_candidate_and_other_knobs(kind: type[Template]) -> None:
    plan = plan_of(kind, "2x36x13x17, nhwc", "conv2d(36, kernel=3, padding=1, groups=9) -> bias")
    target, arrays = narrowed(32, threads=2), random_arrays(plan, 5)
    candidates = list(kind.candidates(lower(match(plan)), target, "default"))
    odd: list[Template] = [Grouped(1, 1, 1, 1), Grouped(3, 5, 6, 2), Grouped(4, 4, 4, 100)]
    if kind is GroupedPlanes:
        odd = [GroupedPlanes(1, 1, 3, 2, 4), GroupedPlanes(3, 2, 4, 5, 100), GroupedPlanes(2, 1, 1, 1, 2)]
    for template in [*candidates, *odd]:
        assert_close(forced(plan, kind, target, template), arrays)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_reach_what_they_touch(kind: type[Template], bad: float) -> None:
    plan = plan_of(kind, "1x12x6x27, nhwc", "conv2d(12, kernel=3, padding=1, groups=4)")
    for key in ("src", "weight"):
        arrays = random_arrays(plan, 6)
        arrays[key].flat[arrays[key].size // 2] = bad
        assert_same_exceptions(forced(plan, kind, narrowed(64)), arrays)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("tensor", "conv"), [*SHAPES, *WIDE])
def test_nothing_outside_dst_is_written_nor_outside_src_read(
    kind: type[Template], tensor: str, conv: str, guarded: Any
) -> None:
    plan = plan_of(kind, tensor, f"{conv} -> bias")
    arrays = random_arrays(plan, 7)
    compiled = forced(plan, kind, narrowed(64))
    want = compiled(**arrays)
    src, dst = guarded(plan.src), guarded(plan.output)
    src[...] = arrays.pop("src")
    np.testing.assert_array_equal(compiled(src, out=dst, **arrays), want)


@pytest.mark.parametrize(
    ("kind", "plan", "reason"),
    [
        (Grouped, "f32[1x8x6x6, nhwc] -> relu", Reason.NO_CONTRACTION),
        (Grouped, "f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3)", Reason.GROUP_WIDTH),
        (Grouped, "f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3, groups=8)", Reason.GROUP_WIDTH),
        (Grouped, "f32[1x32x6x6, nhwc] -> conv2d(32, kernel=3, groups=2)", Reason.GROUP_WIDTH),
        (Grouped, "f32[1x64x6x6, nhwc] -> conv2d(4, kernel=3, groups=2)", Reason.GROUP_WIDTH),
        (Grouped, "f32[1x8x6x6] -> conv2d(8, kernel=3, groups=4)", Reason.CHANNELS_FIRST),
        (GroupedPlanes, "f32[1x8x6x6] -> relu", Reason.NO_CONTRACTION),
        (GroupedPlanes, "f32[1x8x6x6] -> conv2d(8, kernel=3, groups=8)", Reason.GROUP_WIDTH),
        (GroupedPlanes, "f32[1x64x6x6] -> conv2d(4, kernel=3, groups=2)", Reason.GROUP_WIDTH),
        (GroupedPlanes, "f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3, groups=4)", Reason.CHANNELS_LAST),
    ],
)
def test_refusals(kind: type[Template], plan: str, reason: Reason) -> None:
    refusal = refusal_of(plan, kind, narrowed(32))
    assert refusal is not None
    assert refusal.reason is reason


@BOTH
def test_the_cost_model_prefers_it_where_it_is_quicker(kind: type[Template]) -> None:
    plan = plan_of(kind, "1x128x56x56, nhwc", "conv2d(128, kernel=3, padding=1, groups=32) -> relu")
    assert type(select(lower(match(plan)), narrowed(64)).template) is kind


def test_a_block_holds_whole_groups_and_every_feature_has_its_weights() -> None:
    plan = FusionPlan.parse("f32[1x22x4x4, nhwc] -> conv2d(33, kernel=(1, 2), groups=11)")
    conv = lower(match(plan)).contraction
    pack = grouping(conv, 8)
    assert (pack.channels, pack.features, pack.parts, pack.blocks) == (4, 6, 1, 6)
    assert pack.sources(0, 1, 6) == [1, 1, 1, 3, 3, 3]
    assert pack.features_of(2, 0) == 3
    array = np.arange(33 * 2 * 2, dtype=np.float32).reshape(33, 2, 1, 2)
    packed = Packing(array.shape, "f32", pack.steps).of(array)
    assert packed.shape == (6, 2, 1, 2, 8)
    np.testing.assert_array_equal(packed[1, 1, 0, 0, :6], array[6:12, 0, 0, 1])
    assert not packed[5, :, :, :, 3:].any()


def test_a_channel_with_several_features_fills_its_vectors() -> None:
    plan = FusionPlan.parse("f32[1x5x4x4, nhwc] -> conv2d(15, kernel=2, groups=5)")
    conv = lower(match(plan)).contraction
    pack = grouping(conv, 4)
    assert (pack.channels, pack.features, pack.parts, pack.blocks) == (4, 12, 3, 2)
    assert pack.sources(1, 0, 4) == [1, 1, 2, 2]
    assert pack.features_of(1, 0) == 3
    assert pack.features_of(1, 1) == 0
    assert refusal_of(plan, Depthwise, narrowed(16)) is None
