"""Plans with statistics as plain Triton, interpreted: every way to cut them, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.backends.triton.templates.normalization import GpuNormalization, Space
from fuseplan.backends.triton.templates.normalization_tiles import Cut
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import random_arrays
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan
from interpreted import Array, interpret_all

H100 = parse_target("triton:sm_90")
TRAINING = "batch_norm_training(running=True) -> relu"
BETWEEN = "bias -> batch_norm_training -> add -> leaky_relu"
BACKWARD = "batch_norm_backward(relu)"
RECOMPUTED = "batch_norm_backward(leaky_relu(0.1), statistics=recomputed)"
PLACES = "batch_norm_training(mode=per_activation, running=True) -> batch_norm -> relu"
PLACES_BACKWARD = "batch_norm_backward(tanh, mode=per_activation) -> batch_norm(mode=per_activation)"

# form, rows, columns, unrolled (0: kept), programs, groups: one program and several, tiles that are shared
# evenly, unevenly, in turns; blocks that end inside of a tile.
CHANNELS_LAST = (
    ("rows", 16, 32, 2, 1, 1),
    ("rows", 8, 16, 0, 1, 2),
    ("rows", 8, 16, 0, 3, 2),
    ("rows", 8, 16, 3, 3, 1),
)
CHANNELS_FIRST = (
    ("rows", 2, 128, 2, 1, 5),
    ("rows", 4, 256, 0, 2, 3),
    ("rows", 2, 256, 1, 3, 2),
    ("rows", 1, 32, 2, 2, 20),
    ("planes", 1, 64, 2, 1, 20),
    ("planes", 1, 32, 2, 2, 7),
    ("planes", 1, 16, 0, 2, 20),
)
BY_PLACE = (("rows", 4, 32, 2, 1, 3), ("rows", 4, 64, 0, 2, 2))


def cases() -> list[tuple[str, tuple[str, int, int, int, int, int]]]:
    made = []
    for dtype in ("f32", "f16"):
        for operators in (TRAINING, BETWEEN, BACKWARD, RECOMPUTED):
            made += [(f"{dtype}[5x20x5x7, nhwc] -> {operators}", knobs) for knobs in CHANNELS_LAST]
            made += [(f"{dtype}[5x20x5x6] -> {operators}", knobs) for knobs in CHANNELS_FIRST]
    for operators in (PLACES, PLACES_BACKWARD):
        for tensor in ("f32[9x6x3x5, nhwc]", "bf16[9x6x3x5]", "f64[9x6x3x5]", "f32[9x70]"):
            made += [(f"{tensor} -> {operators}", knobs) for knobs in BY_PLACE]
    return made


def lowered(text: str) -> tuple[FusionPlan, Kernel]:
    plan = FusionPlan.parse(text)
    return plan, lower(match(plan))


def assert_right(
    text: str, template: GpuNormalization, arrays: dict[str, Array] | None = None
) -> dict[str, Array]:
    """dst and every result are within a few roundings; the results."""
    plan, kernel = lowered(text)
    arrays = random_arrays(plan, 3) if arrays is None else arrays
    parameters = {each.key: each.value for each in plan.parameters}
    dst, results = interpret_all(template, kernel, H100, arrays, parameters)
    given = {key: wide(array) for key, array in arrays.items() if key != "src"}
    want, wanted = plan.evaluate(wide(arrays["src"]), given)
    epsilon = 16 * DTYPES[kernel.compute_dtype].epsilon
    rounding = DTYPES[kernel.dst.dtype].epsilon if kernel.dst.itemsize == 2 else 0.0
    largest = np.abs(want).max()
    np.testing.assert_allclose(wide(dst), want, rtol=rounding, atol=(epsilon + rounding / 8) * largest)
    assert results.keys() == wanted.keys()
    for key, made in results.items():
        np.testing.assert_allclose(made, wanted[key], rtol=epsilon, atol=epsilon * np.abs(wanted[key]).max())
    return results


@pytest.mark.part(12)
@pytest.mark.parametrize(("text", "knobs"), cases())
def test_every_cut(text: str, knobs: tuple[str, int, int, int, int, int]) -> None:
    assert_right(text, GpuNormalization(*knobs, warps=4, resident=1))


@pytest.mark.parametrize(
    "tensor",
    [
        "f32[6x5]",
        "bf16[3x7x9]",
        "f16[3x7x9, nwc]",
        "f32[2x5x3x2x5]",
        "f64[2x5x3x2x5, ndhwc]",
        "f32[1x1x1x2]",
        "f32[4x6x3x5, strides=150:1:30:6]",
        "f32[4x6x3x5, strides=200:20:6:1]",
        "f32[1x3x45x1]",
    ],
)
@pytest.mark.parametrize("operators", [BETWEEN, "relu -> batch_norm_backward(elu)"])
def test_the_first_choice_in_every_layout(tensor: str, operators: str) -> None:
    text = f"{tensor} -> {operators}"
    template = next(iter(GpuNormalization.candidates(lowered(text)[1], H100, "default")))
    assert isinstance(template, GpuNormalization)
    assert_right(text, template)


def test_a_single_channel_is_one_number_beside_places() -> None:
    assert_right(
        "f32[9x1x5x7, nhwc] -> batch_norm -> batch_norm_backward(mode=per_activation)",
        GpuNormalization("rows", 16, 16, 0, 1, 1, warps=4, resident=1),
    )


@pytest.mark.parametrize("knobs", [("planes", 1, 64, 2, 3, 5), ("planes", 1, 32, 0, 6, 5)])
def test_a_tile_that_meets_two_planes(knobs: tuple[str, int, int, int, int, int]) -> None:
    text = "f32[5x6x5x15] -> batch_norm_training -> batch_norm(mode=per_activation)"
    template = GpuNormalization(*knobs, warps=4, resident=1)
    assert Cut(lowered(text)[1], template).is_crossing
    assert_right(text, template)


@pytest.mark.parametrize(
    ("tensor", "knobs"),
    [
        ("f32[16x2x33x31]", ("planes", 1, 256, 2, 4, 2)),
        ("f32[16x2x33x31]", ("planes", 1, 256, 0, 8, 2)),
        ("f32[16x2x33x31, nhwc]", ("rows", 128, 2, 2, 3, 1)),
        ("f32[64x2x33x31]", ("rows", 2, 4096, 4, 4, 1)),
    ],
)
def test_the_variance_does_not_cancel(tensor: str, knobs: tuple[str, int, int, int, int, int]) -> None:
    """Mean 1000, deviation 1: the sum of squares minus the square of the sum would have no digit left."""
    text = f"{tensor} -> batch_norm_training"
    plan, _ = lowered(text)
    arrays = random_arrays(plan, 5)
    arrays["src"][...] = 1000 + np.random.default_rng(1).standard_normal(plan.src.shape)
    given = {key: wide(array) for key, array in arrays.items() if key != "src"}
    template = GpuNormalization(*knobs, warps=4, resident=1)
    _, kernel = lowered(text)
    dst, results = interpret_all(template, kernel, H100, arrays, {"epsilon": 1e-5})
    want, wanted = plan.evaluate(wide(arrays["src"]), given)
    np.testing.assert_allclose(results["saved_mean"], wanted["saved_mean"], rtol=1.2e-7)
    np.testing.assert_allclose(results["saved_inverse_variance"], wanted["saved_inverse_variance"], rtol=2e-6)
    np.testing.assert_allclose(dst, want, atol=3e-4)  # four times the rounding of the mean, times the scale


@pytest.mark.parametrize(("first", "rounded"), [(1e6, 5e-7), (0, 5e-6)])
@pytest.mark.parametrize(
    ("tensor", "knobs"),
    [
        ("f32[128x64]", ("rows", 8, 64, 0, 1, 1)),
        ("f32[16x8x5x5]", ("rows", 1, 1024, 0, 1, 1)),
        ("f32[16x5x5x9]", ("planes", 1, 64, 0, 1, 5)),
    ],
)
def test_what_one_program_keeps_has_its_variance_to_a_few_roundings(
    tensor: str, knobs: tuple[str, int, int, int, int, int], first: float, rounded: float
) -> None:
    """Whatever the mean, and whatever the first tile, of whose mean deviations are taken."""
    plan, kernel = lowered(f"{tensor} -> batch_norm_training")
    arrays = random_arrays(plan, 5)
    arrays["src"][...] = 1e6 + np.random.default_rng(1).standard_normal(plan.src.shape)
    arrays["src"][: plan.src.batch // 16] = first
    _, wanted = plan.evaluate(wide(arrays["src"]), {key: arrays[key] for key in ("scale", "shift")})
    template = GpuNormalization(*knobs, warps=4, resident=1)
    _, results = interpret_all(template, kernel, H100, arrays, {"epsilon": 1e-5})
    for key, want in wanted.items():
        np.testing.assert_allclose(results[key], want, rtol=rounded)


@pytest.mark.parametrize(
    ("tensor", "mode", "knobs"),
    [
        *(("5x20x5x7, nhwc", "spatial", knobs) for knobs in CHANNELS_LAST[2:]),
        *(("5x20x5x6", "spatial", knobs) for knobs in (*CHANNELS_FIRST[1:3], *CHANNELS_FIRST[5:])),
        ("9x6x3x5", "per_activation", BY_PLACE[1]),
    ],
)
def test_f64_keeps_its_digits_at_any_mean(
    tensor: str, mode: str, knobs: tuple[str, int, int, int, int, int]
) -> None:
    """The mean to a rounding, and the variance as exact as that of the same numbers around zero."""
    plan, kernel = lowered(f"f64[{tensor}] -> batch_norm_training({mode}, running=True, momentum=1)")
    arrays = random_arrays(plan, 5)
    arrays["src"] += 1e6
    arrays["running_variance"][...] = arrays["running_mean"][...] = 0
    template = GpuNormalization(*knobs, warps=4, resident=1)
    parameters = {each.key: each.value for each in plan.parameters}
    _, results = interpret_all(template, kernel, H100, arrays, parameters)
    near = arrays["src"] - 1e6  # without a rounding
    axes = (0, 2, 3) if mode == "spatial" else (0,)
    np.testing.assert_allclose(results["saved_mean"], near.mean(axis=axes) + 1e6, rtol=2.3e-16)
    np.testing.assert_allclose(results["running_variance"], near.var(axis=axes, ddof=1), rtol=1e-13)


def test_the_same_from_run_to_run() -> None:
    """Whatever the order in which programs arrive."""
    text = "f32[16x8x9x9] -> batch_norm_training"
    plan, kernel = lowered(text)
    arrays, template = random_arrays(plan, 1), GpuNormalization("planes", 1, 64, 1, 7, 2, 4, 1)
    runs = [interpret_all(template, kernel, H100, arrays, {"epsilon": 1e-5}) for _ in range(3)]
    for dst, results in runs[1:]:
        assert np.array_equal(dst, runs[0][0])
        assert all(np.array_equal(results[key], runs[0][1][key]) for key in results)


def test_only_programs_that_meet_are_launched_together() -> None:
    _, kernel = lowered("f32[64x256x28x28] -> batch_norm_training")
    alone = GpuNormalization("planes", 1, 1024, 2, 1, 256, 8, 1).emit(kernel, H100)
    assert "cooperative" not in dict(alone.options)
    assert alone.workspace_bytes == 0
    shared = GpuNormalization("planes", 1, 1024, 2, 4, 64, 8, 2).emit(kernel, H100)
    assert dict(shared.options) == {"num_warps": 8, "num_stages": 1, "cooperative": 1, "maxnreg": 128}
    assert shared.grid == (256, 1, 1)
    assert shared.workspace_bytes == 4096 + 2 * 64 * 2 * 4 * 4  # twice, groups, numbers, programs, floats


@pytest.mark.parametrize("kind", ["triton:sm_80", "triton:sm_90", "triton:sm_120", "triton:gfx942"])
@pytest.mark.parametrize(
    "text",
    [
        "f16[64x512x7x7, nhwc] -> batch_norm_training",
        "f32[64x2048x7x7] -> batch_norm_backward(relu)",
        "f32[64x3x224x224] -> batch_norm_training",
        "bf16[2x100000] -> batch_norm_training(mode=per_activation)",
    ],
)
def test_no_choice_waits_for_programs_that_do_not_run(kind: str, text: str) -> None:
    target = parse_target(kind)
    _, kernel = lowered(text)
    made = Space(kernel, target).choices()
    assert made
    for each in made:
        assert each.programs == 1 or each.programs * each.groups <= target.processors * each.resident
        cut = Cut(kernel, each)
        assert each.programs <= cut.blocks, "a program without rows"
        assert each.groups <= cut.tiles, "a group without tiles"


@pytest.mark.parametrize("operators", ["batch_norm_training", "relu -> batch_norm_backward(silu)"])
def test_a_tile_of_one_channel_s_positions(operators: str) -> None:
    """A tile of rows, whose columns are the positions of one channel: one number is for all of them."""
    for programs, unrolled in ((1, 2), (1, 0), (2, 2)):
        template = GpuNormalization("rows", 2, 256, unrolled, programs, 1, 4, 1)
        assert_right(f"f32[5x1x16x16] -> {operators}", template)


def test_a_plan_whose_tiles_fit_no_registers_has_a_candidate() -> None:
    _, kernel = lowered("f8e4m3[5x15] -> save(s0) -> minimum -> mish -> batch_norm_training(saved=False)")
    space = Space(kernel, H100)
    assert not any(map(space.fits, space.made()))
    assert len(space.choices()) == 1


def test_beyond_two_to_the_31_offsets_are_wide() -> None:
    _, kernel = lowered("f16[64x1024x256x256, nhwc] -> batch_norm_backward(relu)")
    text = GpuNormalization("rows", 16, 64, 2, 66, 2, 8, 1).emit(kernel, H100).text
    assert "column = (tl.full((), 0, tl.int64) + tile) * 64 + lane" in text
    assert "block_0 = tl.full((), 0, tl.int64) + (member + step * 66)" in text


def test_what_it_refuses() -> None:
    _, pointwise = lowered("f32[2x3] -> relu")
    refusal = first_refusal(GpuNormalization.limits(pointwise, H100, "default"))
    assert refusal is not None
    assert refusal.reason is Reason.NO_NORMALIZATION
    _, kernel = lowered("f32[64x64x55x55] -> batch_norm_training")
    refusal = first_refusal(GpuNormalization.limits(kernel, H100, 1e-9))
    assert refusal is not None
    assert refusal.reason is Reason.ACCURACY


def test_traffic_counts_passes_unless_tiles_are_kept() -> None:
    _, kernel = lowered("f32[64x64x56x56] -> batch_norm_backward(relu)")
    size, channel = kernel.src.nbytes, 4 * 64
    streamed = GpuNormalization("planes", 1, 1024, 2, 4, 64, 8, 2).traffic(kernel, H100)
    kept = GpuNormalization("planes", 1, 1024, 0, 66, 4, 8, 2).traffic(kernel, H100)
    assert streamed.read == 4 * size + 4 * channel
    assert kept.read == 2 * size + 4 * channel
    assert streamed.written == kept.written == size + 2 * channel
    assert streamed.workspace == 64 * 2 * 4 * 4  # channels, numbers, programs, bytes
