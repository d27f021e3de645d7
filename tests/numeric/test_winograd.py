"""Winograd against the float64 reference: shapes, layouts, dtypes, widths, knobs, borders, IEEE's rules."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu import transforms
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.winograd import Winograd
from fuseplan.compile import CompiledPlan
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.packing import Product
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan

LAYOUTS = pytest.mark.parametrize("layout", ["nhwc", "nchw"])
BOTH = pytest.mark.parametrize("tile", [2, 4])
VARIANTS = pytest.mark.parametrize(("tile", "width"), [(2, 64), (4, 16), (4, 32), (4, 64)])

# Shape, features and padding.
SHAPES = (
    ("2x13x9x11", 37, "1"),
    ("1x16x14x14", 16, "1"),
    ("1x64x7x7", 33, "1"),
    ("3x5x1x1", 3, "1"),
    ("1x1x3x3", 1, "0"),
    ("1x3x5x70", 20, "0"),
    ("2x17x19x33", 48, "1"),
    ("1x20x6x53", 8, "(1, 0)"),
    ("1x8x10x17", 24, "((0, 3), (2, 1))"),
    ("1x4x4x4", 5, "5"),
    ("2x33x28x1", 18, "1"),
    ("1x7x1x40", 16, "1"),
)


def kernel_of(plan: FusionPlan) -> Kernel:
    plan.freeze()
    return lower(match(plan))


def plan_of(
    shape: str,
    features: int,
    padding: str,
    layout: str,
    tail: str = "",
    *,
    dtype: str = "f32",
    before: str = "",
) -> FusionPlan:
    conv = f"conv2d({features}, kernel=3, padding={padding})"
    return FusionPlan.parse(f"{dtype}[{shape}, {layout}] -> {before}{conv}{tail}")


def template_of(plan: FusionPlan, tile: int, width: int, threads: int = 1) -> Winograd:
    """The candidate with that tile."""
    candidates = Winograd.candidates(kernel_of(plan), narrowed(width, threads), "default")
    (found,) = (each for each in candidates if isinstance(each, Winograd) and each.tile == tile)
    return found


def compiled_with(plan: FusionPlan, tile: int, width: int, threads: int = 1) -> CompiledPlan:
    template = template_of(plan, tile, width, threads)
    return forced(plan, Winograd, narrowed(width, threads), template)


# ---- results


@pytest.mark.part(4)
@VARIANTS
@LAYOUTS
@pytest.mark.parametrize(("shape", "features", "padding"), SHAPES)
def test_any_shape(tile: int, layout: str, width: int, shape: str, features: int, padding: str) -> None:
    plan = plan_of(shape, features, padding, layout, " -> bias -> relu")
    assert_close(compiled_with(plan, tile, width), random_arrays(plan, 1), slack=24)


@BOTH
@LAYOUTS
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("shape", "features", "padding"), [SHAPES[0], SHAPES[8]])
@pytest.mark.part(3)
def test_half_storage(
    tile: int, layout: str, dtype: str, width: int, shape: str, features: int, padding: str
) -> None:
    plan = plan_of(shape, features, padding, layout, " -> bias -> add -> relu", dtype=dtype)
    assert_close(compiled_with(plan, tile, width), random_arrays(plan, 2), slack=24)


@BOTH
@LAYOUTS
@pytest.mark.parametrize("before", ["", "relu -> ", "batch_norm(per_activation) -> gelu -> "])
@pytest.mark.parametrize("after", ["add -> silu", "batch_norm(per_activation) -> add -> prelu"])
@pytest.mark.part(2)
def test_operators_before_and_after(tile: int, layout: str, before: str, after: str) -> None:
    plan = plan_of("2x13x10x23", 19, "1", layout, f" -> {after}", before=before)
    assert_close(compiled_with(plan, tile, 32), random_arrays(plan, 3), slack=60)


@BOTH
@pytest.mark.parametrize("strides", ["7000:1:700:20", "9000:1000:30:1", "9000:3:900:60"])
def test_strided_src(tile: int, strides: str) -> None:
    plan = FusionPlan.parse(f"f32[2x9x10x12, strides={strides}] -> conv2d(9, kernel=3, padding=1) -> bias")
    assert_close(compiled_with(plan, tile, 32), random_arrays(plan, 4), slack=24)


@BOTH
@LAYOUTS
@pytest.mark.parametrize("knobs", [(1, 1, 1, 1), (1, 3, 2, 1), (3, 2, 3, 2), (2, 1, 40, 100), (5, 3, 11, 1)])
def test_any_knobs(tile: int, layout: str, knobs: tuple[int, int, int, int]) -> None:
    plan = plan_of("2x10x22x37", 75, "1", layout, " -> bias")
    template = Winograd(tile, *knobs)
    assert_close(forced(plan, Winograd, narrowed(32, 2), template), random_arrays(plan, 5), slack=24)


@BOTH
@LAYOUTS
@pytest.mark.parametrize("shape", ["3x40x7x7", "1x24x60x60"])
@pytest.mark.parametrize("threads", [2, 16])
def test_any_number_of_threads(tile: int, layout: str, shape: str, threads: int) -> None:
    plan = plan_of(shape, 48, "1", layout, " -> bias -> relu")
    arrays = random_arrays(plan, 6)
    compiled = compiled_with(plan, tile, 64, threads)
    first = compiled(**arrays)
    assert_close(compiled, arrays, slack=24)
    for _ in range(10):
        np.testing.assert_array_equal(compiled(**arrays), first)


@BOTH
@LAYOUTS
@pytest.mark.parametrize(("shape", "features", "padding"), SHAPES)
@pytest.mark.part(3)
def test_nothing_outside_dst_is_written_nor_outside_src_read(
    tile: int, layout: str, shape: str, features: int, padding: str, guarded: Any
) -> None:
    plan = plan_of(shape, features, padding, layout, " -> bias")
    arrays = random_arrays(plan, 7)
    compiled = compiled_with(plan, tile, 64)
    want = compiled(**arrays)
    src, dst = guarded(plan.src), guarded(plan.output)
    src[...] = arrays.pop("src")
    np.testing.assert_array_equal(compiled(src, out=dst, **arrays), want)


# ---- accuracy


@BOTH
@LAYOUTS
@pytest.mark.parametrize(("shape", "features", "padding"), [SHAPES[0], SHAPES[6], ("1x256x9x9", 32, "1")])
def test_error_stays_within_the_bound_that_is_claimed(
    tile: int, layout: str, shape: str, features: int, padding: str
) -> None:
    plan = plan_of(shape, features, padding, layout)
    compiled = compiled_with(plan, tile, 32)
    bound = compiled.choice.template.error_bound(compiled.kernel)
    for arrays in various(plan):
        src, weight = (np.abs(arrays[key]).astype(np.float64) for key in ("src", "weight"))
        # No tile has larger elements than the whole channel.
        size = np.einsum("fc,nc->nf", weight.sum(axis=(2, 3)), src.max(axis=(2, 3)))
        error = np.abs(wide(compiled(**arrays)) - reference(plan, arrays)).max(axis=(2, 3))
        assert (error <= bound * size).all()
        assert error.max() > 0


def various(plan: FusionPlan) -> Iterator[dict[str, NDArray[Any]]]:
    """Normal data, as after relu, with a large mean, of a large range."""
    rng = np.random.default_rng(0)
    changes: tuple[Callable[[NDArray[Any]], NDArray[Any]], ...] = (
        lambda src: src,
        lambda src: np.maximum(src, 0),
        lambda src: src + np.float32(100),
        lambda src: src * 10.0 ** rng.uniform(-6, 6, src.shape),
    )
    for change in changes:
        arrays = random_arrays(plan, 8)
        arrays["src"][...] = change(arrays["src"])
        yield arrays


def test_tile_4_is_about_as_exact_as_direct() -> None:
    plan = plan_of("1x64x28x28", 64, "1", "nhwc")
    arrays = random_arrays(plan, 9)
    want = reference(plan, arrays)
    direct = np.abs(wide(forced(plan, Direct, narrowed(32))(**arrays)) - want).max()
    for tile, factor in ((4, 3.0), (2, 1.5)):
        assert np.abs(wide(compiled_with(plan, tile, 32)(**arrays)) - want).max() < factor * direct


def test_accuracy_decides_which_tiles_are_considered() -> None:
    kernel, target = kernel_of(plan_of("1x64x28x28", 64, "1", "nhwc")), narrowed(32)

    def tiles(accuracy: str | float) -> list[Any]:
        return [each.knobs["tile"] for each in Winograd.candidates(kernel, target, accuracy)]

    bounds = {tile: Winograd(tile, 1, 1, 1, 1).error_bound(kernel) for tile in (2, 4)}
    assert bounds[2] < bounds[4]
    assert tiles("default") == [4, 2]
    assert tiles("strict") == [2]
    assert tiles(bounds[4]) == [4, 2]
    assert tiles(bounds[4] * 0.99) == [2]
    refusal = first_refusal(Winograd.limits(kernel, target, bounds[2] * 0.99))
    assert refusal is not None
    assert refusal.reason is Reason.ACCURACY


# ---- IEEE's rules


@BOTH
@LAYOUTS
@pytest.mark.parametrize("shape", ["3x6x7x7", "2x18x30x40"])
def test_nan_and_infinity_reach_what_they_touch(tile: int, layout: str, shape: str) -> None:
    plan = plan_of(shape, 20, "1", layout)
    compiled = compiled_with(plan, tile, 32)
    for bad in (np.nan, np.inf, -np.inf):
        for place in ((0, 0), (3, 4), (-1, -1), (5, 0)):
            arrays = random_arrays(plan, 10)
            arrays["src"][1, 2, *place] = bad
            got, want = wide(compiled(**arrays)), reference(plan, arrays)
            finite = np.isfinite(want)
            assert not finite.all()
            np.testing.assert_array_equal(got[~finite], want[~finite])
            np.testing.assert_allclose(got[finite], want[finite], atol=1e-5 * np.abs(want[finite]).max())


@BOTH
@LAYOUTS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_reaches_its_feature(tile: int, layout: str, bad: float) -> None:
    plan = plan_of("1x6x9x11", 20, "1", layout)
    arrays = random_arrays(plan, 11)
    arrays["weight"][7, 3, 0, 2] = bad
    direct = forced(plan, Direct, narrowed(32))(**arrays)
    got = compiled_with(plan, tile, 32)(**arrays)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(direct))
    np.testing.assert_array_equal(got[:, 7], direct[:, 7])


@BOTH
@LAYOUTS
def test_overflow_is_what_direct_makes_of_it(tile: int, layout: str) -> None:
    """Inputs whose transforms overflow though no output does, and outputs that do overflow."""
    plan = plan_of("1x8x18x22", 24, "1", layout, " -> relu")
    arrays = random_arrays(plan, 12)
    arrays["src"][0, :, 4:7, 5:9] = 1e38
    arrays["weight"] *= 0.01
    arrays["weight"][3:5] *= 3000
    direct = forced(plan, Direct, narrowed(32))(**arrays)
    got = compiled_with(plan, tile, 32)(**arrays)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(direct))
    assert not np.isfinite(direct).all()
    far = direct[..., 13:, 14:]
    np.testing.assert_allclose(got[..., 13:, 14:], far, atol=1e-5 * np.abs(far).max())
    finite = np.isfinite(direct)
    np.testing.assert_allclose(
        got[finite], direct[finite], rtol=1e-3, atol=1e-5 * np.abs(direct[finite]).max()
    )


@LAYOUTS
def test_the_largest_finite_input_passes_unharmed(layout: str) -> None:
    plan = plan_of("1x1x12x12", 1, "1", layout)
    arrays = random_arrays(plan, 13)
    arrays["src"][...] = 3e38
    arrays["weight"][...] = 0
    arrays["weight"][0, 0, 1, 1] = 1
    np.testing.assert_array_equal(compiled_with(plan, 4, 32)(**arrays), arrays["src"])


# ---- the record


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("f32[1x8x6x6, nhwc] -> relu", Reason.NO_CONTRACTION),
        ("f32[1x8x6x6, nhwc] -> conv2d(8, kernel=4)", Reason.NO_TRANSFORM),
        ("f32[1x8x6x6, nhwc] -> conv2d(8, kernel=(3, 1))", Reason.NO_TRANSFORM),
        ("f32[1x8x9x9, nhwc] -> conv2d(8, kernel=3, stride=2)", Reason.NO_TRANSFORM),
        ("f32[1x8x9x9, nhwc] -> conv2d(8, kernel=3, dilation=(1, 2))", Reason.NO_TRANSFORM),
        ("f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3, groups=2)", Reason.NO_TRANSFORM),
        ("f32[1x8x6] -> conv1d(8, kernel=3)", Reason.NO_TRANSFORM),
        ("f32[1x8x6x6x6] -> conv3d(8, kernel=3)", Reason.NO_TRANSFORM),
        ("f64[1x8x6x6] -> conv2d(8, kernel=3)", Reason.FLOAT64),
    ],
)
def test_refusals(plan: str, reason: Reason) -> None:
    refusal = refusal_of(plan, Winograd, narrowed(32))
    assert refusal is not None
    assert refusal.reason is reason


def test_flops_and_weights_are_those_of_the_algorithm() -> None:
    plan = plan_of("1x64x56x56", 64, "1", "nhwc")
    kernel, target = kernel_of(plan), narrowed(64)
    four, two = template_of(plan, 4, 64), template_of(plan, 2, 64)
    assert kernel.flops / 4 < four.flops(kernel) < kernel.flops / 3
    assert kernel.flops / 2.25 < two.flops(kernel) < kernel.flops / 2
    packed = kernel.weight.nbytes * 36 // 9
    assert four.traffic(kernel, target).read == kernel.src.nbytes + packed


@pytest.mark.parametrize("plan", ["f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1)"])
@pytest.mark.parametrize("width", [32, 64])
def test_the_model_ranks_tile_4_before_tile_2_before_direct(plan: str, width: int) -> None:
    kernel, target = kernel_of(FusionPlan.parse(plan)), narrowed(width)
    four, two = Winograd.candidates(kernel, target, "default")
    direct = min(each.seconds(kernel, target) for each in Direct.candidates(kernel, target, "default"))
    assert four.seconds(kernel, target) < two.seconds(kernel, target) < direct


# ---- transforms


@BOTH
def test_transforms_convolve(tile: int) -> None:
    made, rng = transforms.transforms(tile), np.random.default_rng(14)
    src, weight = rng.standard_normal((made.size, made.size)), rng.standard_normal((3, 3))
    products = (made.weight @ weight @ made.weight.T) * (made.src @ src @ made.src.T)
    windows = np.lib.stride_tricks.sliding_window_view(src, (3, 3))
    np.testing.assert_allclose(
        made.dst @ products @ made.dst.T, np.einsum("ijkl,kl->ij", windows, weight), atol=1e-12
    )
    packed = Product(made.squared).of(weight.astype(np.float32).reshape(9, 1)).reshape(made.size, made.size)
    np.testing.assert_allclose(packed, made.weight @ weight @ made.weight.T, rtol=1e-6, atol=1e-7)


@BOTH
def test_evaluation_equals_the_matrix_products_with_fewer_operations(tile: int) -> None:
    made, rng = transforms.transforms(tile), np.random.default_rng(15)
    xs = list(rng.standard_normal(made.size))

    def fma(x: np.float64, factor: float, y: np.float64) -> np.float64:
        return x * factor + y

    for rows in ([0, 1, 2], [1, 2], [0, made.size - 1], list(range(made.size))):
        got = transforms.rows_of(made.src, xs, rows, fma)
        np.testing.assert_allclose(got, made.src[rows] @ xs, atol=1e-12)
    np.testing.assert_allclose(transforms.columns_of(made.dst, xs, fma), made.dst @ xs, atol=1e-12)
    cost = transforms.cost(tile)
    assert (cost.src_operations, cost.dst_operations) == {2: (4, 4), 4: (12, 12)}[tile]
