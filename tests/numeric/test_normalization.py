"""Kernels with statistics against the float64 reference: shapes, layouts, strides, dtypes, knobs, threads."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import fuseplan.backends.cpu.backend
import fuseplan.tensors.arrays
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.order import TEMPLATES
from fuseplan.backends.cpu.templates.pointwise import Pointwise
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.data import evaluated
from fuseplan.measure.peaks import bytes_of_passes
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan
from strategies import tensors
from training import CHAINS, STRIDES, TENSORS, assert_trained, training_arrays

WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])
FORWARD = "bias -> batch_norm_training(running=True) -> add -> relu"
BACKWARD = "batch_norm_backward(tanh, statistics=recomputed)"
# Rows of columns, runs shorter and longer than a vector and than a tile, several parts, folded positions.
LONG = (
    "40x70, nc",
    "700x3x9, nwc",
    "9x24x7x7",
    "3x5x41x67",
    "2x3x90x90",
    "1x2x190000",
    "12x1x30x30",
    "70000x2",
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New results and workspaces hold NaN, whatever their dtype."""
    honest = fuseplan.tensors.arrays.aligned_bytes

    def filled(nbytes: int) -> NDArray[np.uint8]:
        made = honest(nbytes)
        made[...] = 0xFF
        return made

    monkeypatch.setattr(fuseplan.tensors.arrays, "aligned_bytes", filled)
    monkeypatch.setattr(fuseplan.backends.cpu.backend, "lasting_bytes", filled)


def plan_of(text: str) -> FusionPlan:
    plan = FusionPlan.parse(text)
    plan.freeze()
    return plan


def kernel_of(text: str) -> Kernel:
    return lower(match(FusionPlan.parse(text)))


def knobs_of(text: str, width: int = 64, threads: int = 2) -> list[Reduction]:
    made = Reduction.candidates(kernel_of(text), narrowed(width, threads), "default")
    return [each for each in made if isinstance(each, Reduction)]


def every_knob(text: str, width: int, threads: int = 2) -> list[Reduction]:
    """Each way to run a plan, with large and small blocks, with stores past the caches and without."""
    found: dict[Reduction, None] = {}
    for l2_bytes in (1 << 20, 1 << 14):
        target = replace(narrowed(width, threads), l2_bytes=l2_bytes, l3_bytes=0)
        made = Reduction.candidates(kernel_of(text), target, "default")
        found |= dict.fromkeys(each for each in made if isinstance(each, Reduction))
    return list(found)


def preferred(text: str, threads: int = 1) -> Reduction:
    """The cut that the model prefers, of those of a core with 1 MB and a last cache of 32 MB."""
    target, kernel = replace(narrowed(64, threads), l2_bytes=1 << 20, l3_bytes=32 << 20), kernel_of(text)
    made = [each for each in Reduction.candidates(kernel, target, "default") if isinstance(each, Reduction)]
    return min(made, key=lambda each: each.seconds(kernel, target))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_channels_are_whole_where_going_on_at_many_places_costs_more_than_it_saves(
    threads: int,
) -> None:
    many = preferred("f32[2x2048x7x64, nhwc] -> batch_norm_backward(relu)", threads)
    assert (many.cells, many.split) == (2048, True)
    assert not preferred("f32[2x20480x6x6, nhwc] -> batch_norm_backward(relu)", threads).split


def test_blocks_of_columns_are_as_wide_as_each_other() -> None:
    """Of 4825 columns, 4000 and 825 kept one of two threads waiting."""
    cuts = knobs_of("f32[243x193x5x5] -> batch_norm_training")
    assert [each.cells for each in cuts if each.folded and each.split] == [2800]


def test_two_threads_take_rows_in_halves_only_where_parts_are_alike() -> None:
    """297 rows are parts of 256 and of 41."""
    assert not preferred("bf16[3x2432x33x3, nhwc] -> batch_norm_backward(relu)", 2).split
    assert preferred("bf16[4x2432x32x4, nhwc] -> batch_norm_backward(relu)", 2).split


@pytest.mark.part(6)
@WIDTHS
@pytest.mark.parametrize("chain", [FORWARD, BACKWARD])
@pytest.mark.parametrize("tensor", [*TENSORS, *LONG])
def test_any_shape_and_layout(tensor: str, chain: str, width: int) -> None:
    plan = plan_of(f"f32[{tensor}] -> {chain}")
    assert_trained(forced(plan, Reduction, narrowed(width, threads=2)), training_arrays(plan))


@pytest.mark.part(6)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("tensor", ["9x13x9x11", "9x13x9x11, nhwc", "4x5x17x19", "33x20"])
def test_any_chain_and_dtype(tensor: str, dtype: str, chain: str) -> None:
    plan = plan_of(f"{dtype}[{tensor}] -> {chain}")
    assert_trained(forced(plan, Reduction, narrowed(32, threads=2)), training_arrays(plan))


@WIDTHS
@pytest.mark.parametrize("mode", ["spatial", "per_activation"])
@pytest.mark.parametrize("tensor", ["3x1", "41x1", "5x1x1x1", "4x1x3x3", "4x3x1x1"])
def test_images_of_one_element_share_their_operands(tensor: str, mode: str, width: int) -> None:
    around = "batch_norm(per_activation)"
    plan = plan_of(f"f64[{tensor}] -> {around} -> batch_norm_training({mode}, saved=False) -> {around}")
    arrays = training_arrays(plan)
    want, _ = evaluated(plan, arrays)
    got = forced(plan, Reduction, narrowed(width))(**arrays)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@WIDTHS
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.part(2)
def test_strided_src(strides: str, chain: str, width: int) -> None:
    plan = plan_of(f"f32[2x3x5x7, strides={strides}] -> {chain}")
    assert_trained(forced(plan, Reduction, narrowed(width)), training_arrays(plan))


@pytest.mark.part(6)
@pytest.mark.parametrize(
    "chain", [FORWARD, BACKWARD, "batch_norm_backward(relu, mode=per_activation) -> bias"]
)
@pytest.mark.parametrize("tensor", ["16x32x7x7", "3x16x40x40", "3x32x20x20, nhwc", "20x19x3x3", "2x3x300"])
@pytest.mark.parametrize("width", [16, 64])
def test_every_knob(tensor: str, chain: str, width: int) -> None:
    text = f"f32[{tensor}] -> {chain}"
    plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
    for template in every_knob(text, width):
        assert_trained(forced(plan, Reduction, narrowed(width, threads=2), template), arrays)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    src=tensors(),
    chain=st.sampled_from(CHAINS),
    width=st.sampled_from([16, 32, 64]),
    threads=st.integers(1, 3),
)
def test_any_small_tensor(src: Any, chain: str, width: int, threads: int) -> None:
    if (
        src.batch < 3
    ):  # two nearly equal numbers have a deviation that no digit of their mean can be spared for
        src = type(src)((3 + src.batch, *src.shape[1:]), src.dtype, src.layout)
    plan = plan_of(f"{src} -> {chain}")
    assert_trained(forced(plan, Reduction, narrowed(width, threads)), training_arrays(plan))


@pytest.mark.parametrize("chain", ["batch_norm_training(running=True) -> relu", BACKWARD])
@pytest.mark.parametrize("tensor", ["64x32x7x7", "5x6x70x70", "8x64x20x20, nhwc", "2x1x100000", "3000x24"])
@pytest.mark.part(2)
def test_the_same_numbers_on_any_number_of_threads(tensor: str, chain: str) -> None:
    """Whole sums and parts, on one thread and many: the same parts are combined in the same order."""
    text = f"f32[{tensor}] -> {chain}"
    plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
    updated = [each.key for each in plan.results if each.updated]

    def outcome(template: Reduction, threads: int) -> Any:
        own = {key: arrays[key].copy() for key in updated}
        return forced(plan, Reduction, narrowed(64, threads), template)(**{**arrays, **own})

    chosen = knobs_of(text)
    for folded in {each.folded for each in chosen}:
        alike = [each for each in chosen if each.folded == folded]
        want = outcome(alike[0], 1)
        for template, threads in product(alike, (1, 2, 5)):
            for got, expected in zip(outcome(template, threads), want, strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "tensor", ["10x1x1000000", "1x1x10000000", "10000x1000, nc", "2500x4x1000", "25x4x300x333"]
)
def test_a_large_mean_costs_no_digits_of_many_elements(tensor: str) -> None:
    """Of ten million numbers near 1000 with deviation 1: the mean to a rounding, the variance to a few."""
    plan = plan_of(f"f32[{tensor}] -> batch_norm_training(running=True, momentum=1)")
    generator = np.random.default_rng(11)
    src = (1000 + generator.standard_normal(plan.src.shape, np.float32)).astype(np.float32)
    channels = plan.src.channels
    ones, rest = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    compiled = forced(plan, Reduction, narrowed(64, threads=2))
    got = compiled(src, scale=ones, shift=rest, running_mean=rest.copy(), running_variance=ones.copy())
    axes = (0, *range(2, src.ndim))
    count = src.size / channels
    mean = src.mean(axis=axes, dtype=np.float64)
    variance = np.square(src - mean.reshape(-1, *[1] * (src.ndim - 2)), dtype=np.float64).mean(axis=axes)
    np.testing.assert_allclose(got.saved_mean, mean, rtol=1.2e-7)
    np.testing.assert_allclose(got.running_variance, variance * count / (count - 1), rtol=1e-6)


@pytest.mark.parametrize("mode", ["spatial", "per_activation"])
@pytest.mark.parametrize("tensor", ["9x24x7x7", "3x5x41x67", "2x2x95000", "40x70, nc", "16x64x7x7, nhwc"])
def test_f64_keeps_its_digits_at_any_mean(tensor: str, mode: str) -> None:
    """The mean to a rounding, and the variance as exact as that of the same numbers around zero."""
    text = f"f64[{tensor}] -> bias -> batch_norm_training({mode}, running=True, momentum=1)"
    plan = plan_of(text)
    arrays = training_arrays(plan, 3)
    for mean in (1e6, -1e9):
        src, bias = arrays["src"] + mean, arrays["bias"].reshape(-1, *[1] * (arrays["src"].ndim - 2))
        near = (src + bias) - mean  # without a rounding
        axes = (0,) if mode == "per_activation" else (0, *range(2, src.ndim))
        center, variance = near.mean(axis=axes), near.var(axis=axes, ddof=1)
        for template in knobs_of(text):
            given = {key: array.copy() for key, array in arrays.items()} | {"src": src}
            given["running_variance"][...] = 0
            got = forced(plan, Reduction, narrowed(64, threads=2), template)(**given)
            np.testing.assert_allclose(got.saved_mean, center + mean, rtol=2.3e-16)
            np.testing.assert_allclose(got.running_variance, variance, rtol=1e-13)


@pytest.mark.parametrize("tensor", ["8x2x64x64", "64x128x8x8, nhwc", "128x64x5x5"])
def test_sums_keep_the_stated_bound(tensor: str) -> None:
    """Terms of one sign, so that the sum of |terms| is the sum: the bound is relative to it."""
    text = f"f32[{tensor}] -> batch_norm_backward"
    plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
    arrays["src"] = np.abs(arrays["src"])
    bound = knobs_of(text)[0].error_bound(kernel_of(text))
    assert bound < 1e-5
    for template in knobs_of(text):
        got = forced(plan, Reduction, narrowed(64, threads=2), template)(**arrays)
        want = wide(arrays["src"]).sum((0, 2, 3))
        np.testing.assert_allclose(got.shift_gradient, want, rtol=bound)


@pytest.mark.parametrize("tensor", ["6x5x7x9", "6x5x40x9", "6x17x3x5, nhwc", "30x19, nc", "8x16x6x6, nhwc"])
@pytest.mark.parametrize("width", [16, 64])
def test_nothing_outside_dst_is_written_nor_outside_src_read(tensor: str, width: int, guarded: Any) -> None:
    text = f"f32[{tensor}] -> batch_norm_backward(relu)"
    plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
    for template in every_knob(text, width):
        compiled = forced(plan, Reduction, narrowed(width), template)
        want = compiled(**arrays)[0]
        src, x, dst = guarded(plan.src), guarded(plan.src), guarded(plan.output)
        src[...], x[...] = arrays["src"], arrays["input"]
        compiled(**{**arrays, "src": src, "input": x}, out=dst)
        np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize("tensor", ["24x64x5x6, nhwc", "24x64x5x6", "6x16x24x24", "48x96, nc"])
@pytest.mark.parametrize("ahead", [0, 1, 5, 16])
@pytest.mark.part(3)
def test_stores_past_the_caches_from_any_address(tensor: str, ahead: int) -> None:
    text = f"f32[{tensor}] -> batch_norm_training -> relu"
    plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
    for template in every_knob(text, 32):
        compiled = forced(plan, Reduction, narrowed(32, threads=2), template)
        want = compiled(**arrays).out
        room = np.full(plan.output.size + 80, 7, np.float32)
        steps = [step * 4 for step in plan.output.element_strides]
        out = np.lib.stride_tricks.as_strided(room[ahead + 16 :], plan.output.shape, steps)
        compiled(**arrays, out=out)
        np.testing.assert_array_equal(out, want)
        around = np.concatenate([room[: ahead + 16], room[ahead + 16 + plan.output.size :]])
        np.testing.assert_array_equal(around, 7)


def test_rows_that_begin_anywhere_are_not_written_past_the_caches() -> None:
    kernel = kernel_of("f32[6x17x3x5, nhwc] -> batch_norm_training")
    with pytest.raises(ValueError, match="whole vectors"):
        Reduction(17, split=True, stream=True).emit(kernel, narrowed(64))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("tensor", ["4x5x3x3", "4x5x30x20", "4x5x3x3, nhwc"])
def test_infinity_and_nan_reach_the_numbers_that_they_reach_in_float64(tensor: str, dtype: str) -> None:
    text = f"{dtype}[{tensor}] -> batch_norm_training"
    for bad, knobs, place in product((np.nan, np.inf, -np.inf), knobs_of(text), ((1, 2, 0, 1), (0, 2, 0, 0))):
        plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
        arrays["src"][place] = bad
        got = forced(plan, Reduction, narrowed(64), knobs)(**arrays)
        with np.errstate(all="ignore"):
            out, results = evaluated(plan, arrays)
        for one, want in zip(got, (out, *results.values()), strict=True):
            for test in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(test(one), test(want))


def test_a_result_given_is_written_and_only_an_updated_one_read() -> None:
    text = "f32[8x5x6x6] -> batch_norm_training(running=True, momentum=0.25)"
    plan, arrays = plan_of(text), training_arrays(FusionPlan.parse(text))
    old = {key: arrays[key].copy() for key in ("running_mean", "running_variance")}
    given_ = {key: np.full(5, np.nan, np.float32) for key in ("saved_mean", "saved_inverse_variance")}
    got = forced(plan, Reduction, narrowed(32, threads=2))(**arrays, **given_)
    x = wide(arrays["src"])
    assert got.saved_mean is given_["saved_mean"]
    np.testing.assert_allclose(given_["saved_mean"], x.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    want = 0.75 * old["running_mean"] + 0.25 * x.mean((0, 2, 3))
    np.testing.assert_allclose(got.running_mean, want, rtol=1e-5, atol=1e-6)


def test_what_a_cache_holds_is_read_once_from_memory() -> None:
    text = "f32[64x512x14x14] -> batch_norm_training -> relu"
    kernel, target = kernel_of(text), narrowed(64, threads=2)
    whole, split = (next(each for each in knobs_of(text) if each.split == kept) for kept in (False, True))
    src = kernel.src.nbytes
    assert src <= whole.traffic(kernel, target).read < 1.01 * src
    assert 2 * src <= split.traffic(kernel, target).read < 2.01 * src
    assert whole.seconds(kernel, target) < split.seconds(kernel, target)


def test_a_pass_that_does_not_need_src_does_not_read_it() -> None:
    kernel = kernel_of("f32[64x512x14x14, nhwc] -> batch_norm_backward(statistics=recomputed)")
    knobs = next(iter(Reduction.candidates(kernel, narrowed(64), "default")))
    moved = knobs.traffic(kernel, narrowed(64)).read / kernel.src.nbytes
    assert 5 <= moved < 5.01  # input for its moments, then both, twice


def test_each_pass_reads_again_what_the_prologue_reads() -> None:
    kernel = kernel_of("f32[8x16x6x6] -> add -> batch_norm_training -> add")
    size = kernel.src.nbytes
    assert kernel.read_in_passes == (
        {"src": size, "other": size},
        {"src": size, "other": size, "other_2": size},
    )
    assert bytes_of_passes(kernel) == kernel.minimum_bytes + 2 * size


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("bf16[8x131072] -> add -> save(sum) -> rms_norm", 0),
        ("bf16[8x131073] -> add -> rms_norm", 2),
        ("bf16[8x131072] -> layer_norm_backward", 0),
        ("bf16[8x1024x512] -> softmax((1, 2))", 1),
        ("bf16[4x1024x4] -> softmax(0)", 1),
        ("bf16[8x131072] -> cross_entropy", 0),
        ("f32[1048576x4] -> sum(0)", 0),
        ("f32[8x1048576] -> dynamic_quantize(f8e4m3, each=block)", 0),
    ],
)
def test_a_row_is_read_again_where_no_multiprocessor_holds_it(text: str, again: int) -> None:
    kernel = kernel_of(text)
    assert bytes_of_passes(kernel) == kernel.minimum_bytes + again * kernel.src.nbytes


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
@pytest.mark.parametrize("chain", [FORWARD, BACKWARD])
def test_no_other_template_takes_statistics(chain: str, template: Any) -> None:
    kernel = kernel_of(f"f32[4x8x6x6, nhwc] -> {chain}")
    refusal = first_refusal(template.limits(kernel, narrowed(32), "default"))
    assert (refusal is None) == (template is Reduction)


def test_a_plan_without_statistics_is_refused_and_pointwise_names_the_operator() -> None:
    for chain in ("relu", "conv2d(8, kernel=1)"):
        refusal = refusal_of(f"f32[1x8x6x6] -> {chain}", Reduction, narrowed(32))
        assert refusal is not None
        assert refusal.reason is Reason.NO_REDUCTION
    refusal = refusal_of("f32[1x8x6x6] -> relu -> batch_norm_training", Pointwise, narrowed(32))
    assert refusal is not None
    assert refusal.reason is Reason.CENTRE_IN_POINTWISE
    assert refusal.operator == 1
