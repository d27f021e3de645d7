"""The channels-first 1x1 convolution against the float64 reference: shapes, dtypes, knobs, borders."""

from typing import Any

import numpy as np
import pytest

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.planes import Planes
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])

# Shape of src, and features.
SHAPES = (
    ("1x64x56x56", 256),
    ("2x19x9x11", 37),
    ("1x16x14x14", 16),
    ("3x5x7x7", 3),
    ("1x7x1x2", 1),
    ("1x1x5x5", 5),
    ("2x3x3x5", 50),
    ("1x130x8x16", 7),
    ("1x4x4x4", 8),
    ("2x6x31", 20),
    ("1x10x2", 9),
    ("2x9x3x5x7", 13),
    ("1x8x4x4x8", 14),
)


def plan_of(shape: str, features: int, tail: str = "", *, dtype: str = "f32") -> FusionPlan:
    axes = shape.count("x") - 1
    return FusionPlan.parse(f"{dtype}[{shape}] -> conv{axes}d({features}, kernel=1){tail}")


@WIDTHS
@pytest.mark.parametrize(("shape", "features"), SHAPES)
@pytest.mark.part(2)
def test_any_shape(width: int, shape: str, features: int) -> None:
    plan = plan_of(shape, features, " -> bias -> add -> relu")
    assert_close(forced(plan, Planes, narrowed(width)), random_arrays(plan, 1))


@pytest.mark.parametrize(("shape", "features"), SHAPES)
def test_error_stays_within_the_bound_that_is_claimed(shape: str, features: int) -> None:
    plan = plan_of(shape, features)
    compiled = forced(plan, Planes, narrowed(32))
    arrays = random_arrays(plan, 2)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    assert (np.abs(got - want) <= compiled.choice.template.error_bound(compiled.kernel) * size).all()


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("shape", "features"), SHAPES[1:5])
def test_any_dtype(dtype: str, width: int, shape: str, features: int) -> None:
    plan = plan_of(shape, features, " -> bias -> add -> relu", dtype=dtype)
    assert_close(forced(plan, Planes, narrowed(width)), random_arrays(plan, 3))


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize(
    "before", ["", "relu -> ", "batch_norm -> gelu -> ", "batch_norm(per_activation) -> "]
)
@pytest.mark.parametrize(
    "after", ["batch_norm -> relu", "scale -> prelu", "add -> batch_norm(per_activation) -> silu"]
)
@pytest.mark.part(2)
def test_operators_before_and_after(dtype: str, before: str, after: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[2x13x9x7] -> {before}conv2d(21, kernel=1) -> {after}")
    assert_close(forced(plan, Planes, narrowed(32)), random_arrays(plan, 4), slack=40)


@pytest.mark.parametrize("before", ["", "relu -> "])
@pytest.mark.parametrize("strides", ["3000:300:12:1", "9000:120:12:1", "121:242:12:1", "1320:130:12:1"])
def test_planes_with_gaps_between_them(before: str, strides: str) -> None:
    plan = FusionPlan.parse(f"f32[2x9x10x12, strides={strides}] -> {before}conv2d(9, kernel=1) -> bias")
    assert_close(forced(plan, Planes, narrowed(32)), random_arrays(plan, 5))


@pytest.mark.parametrize(("shape", "features"), [SHAPES[1], ("1x20x28x28", 30), ("2x64x7x7", 64)])
def test_every_candidate_and_other_knobs(shape: str, features: int) -> None:
    plan = plan_of(shape, features, " -> batch_norm -> relu")
    target, arrays = narrowed(32, threads=2), random_arrays(plan, 6)
    candidates = list(Planes.candidates(lower(match(plan)), target, "default"))
    assert candidates
    for template in [*candidates, Planes(1, 1, 1, 1), Planes(5, 3, 2, 3), Planes(20, 2, 100, 100)]:
        assert_close(forced(plan, Planes, target, template), arrays, slack=16)


@pytest.mark.parametrize("shape", ["1x64x14x14", "3x40x7x7", "1x24x60x60"])
@pytest.mark.parametrize("threads", [2, 5, 16])
def test_any_number_of_threads(shape: str, threads: int) -> None:
    plan = plan_of(shape, 40, " -> bias -> relu")
    arrays = random_arrays(plan, 7)
    alone = forced(plan, Planes, narrowed(64))(**arrays)
    compiled = forced(plan, Planes, narrowed(64, threads))
    for _ in range(20):
        np.testing.assert_array_equal(compiled(**arrays), alone)


def test_sixteen_threads_have_work_at_batch_one() -> None:
    for shape, features in (("1x64x56x56", 256), ("1x512x28x28", 128), ("1x1024x14x14", 256)):
        plan = plan_of(shape, features)
        target = narrowed(64, threads=16)
        template = next(iter(Planes.candidates(lower(match(plan)), target, "default")))
        assert isinstance(template, Planes)
        positions = np.prod(plan.output.spatial) / (template.vectors * 16 * template.block)
        assert np.ceil(positions) * np.ceil(features / (template.rows * template.block_tiles)) >= 32


@pytest.mark.parametrize("shape", ["1x6x7x7", "1x6x30x40"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_what_they_touch(shape: str, bad: float) -> None:
    plan = plan_of(shape, 7, " -> relu")
    compiled = forced(plan, Planes, narrowed(32))
    for key in ("src", "weight"):
        arrays = random_arrays(plan, 8)
        arrays[key].flat[arrays[key].size // 2] = bad
        assert_same_exceptions(compiled, arrays)


@pytest.mark.part(2)
@WIDTHS
@pytest.mark.parametrize(("shape", "features"), SHAPES)
def test_nothing_outside_dst_is_written_nor_outside_src_read(
    width: int, shape: str, features: int, guarded: Any
) -> None:
    plan = plan_of(shape, features, " -> bias")
    arrays = random_arrays(plan, 9)
    compiled = forced(plan, Planes, narrowed(width))
    want = compiled(**arrays)
    src, dst = guarded(plan.src), guarded(plan.output)
    src[...] = arrays.pop("src")
    np.testing.assert_array_equal(compiled(src, out=dst, **arrays), want)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("f32[1x8x6x6] -> relu", Reason.NO_CONTRACTION),
        ("f32[1x8x6x6] -> conv2d(8, kernel=3)", Reason.NOT_POINT_CONVOLUTION),
        ("f32[1x8x6x6] -> conv2d(8, kernel=1, stride=2)", Reason.NOT_POINT_CONVOLUTION),
        ("f32[1x8x6x6] -> conv2d(8, kernel=1, padding=1)", Reason.NOT_POINT_CONVOLUTION),
        ("f32[1x8x6x6] -> conv2d(8, kernel=1, groups=2)", Reason.NOT_POINT_CONVOLUTION),
        ("f32[1x8x6x6, nhwc] -> conv2d(8, kernel=1)", Reason.CHANNELS_LAST),
        ("f32[1x8x1x1] -> conv2d(8, kernel=1)", Reason.NOT_POINT_CONVOLUTION),
        ("f32[1x8x6x6, strides=600:70:7:1] -> conv2d(8, kernel=1)", Reason.SCATTERED_POSITIONS),
        ("f32[1x8x6x6, strides=900:90:12:2] -> conv2d(8, kernel=1)", Reason.SCATTERED_POSITIONS),
    ],
)
def test_refusals(plan: str, reason: Reason) -> None:
    refusal = refusal_of(plan, Planes, narrowed(32))
    assert refusal is not None
    assert refusal.reason is reason
