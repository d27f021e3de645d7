"""Random arrays, float64 references, and the measure of a deviation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.data import INPUTS, deviation, evaluated, laid_out, random_arrays, reference, stored
from fuseplan.measure.ground import first_wrong, ground_of
from fuseplan.measure.spaces import torch_dtype
from fuseplan.op import Op
from fuseplan.ops import OPERATORS
from fuseplan.plans.plan import FusionPlan

PLAN = "[2x8x6x7, nhwc] -> conv2d(4, kernel=3) -> bias -> add -> batch_norm -> relu"


@pytest.mark.parametrize(
    "text",
    [
        "bf16[2x3x4x5, nhwc] -> conv2d(6, kernel=1) -> bias -> add -> relu",
        "f32[2x3x4x5] -> batch_norm_backward",
    ],
)
def test_arrays_from_a_file_lie_as_the_plan_says(text: str, tmp_path: Path) -> None:
    plan = FusionPlan.parse(text)
    drawn: dict[str, Any] = random_arrays(plan, seed=2)
    np.savez(tmp_path / "arrays.npz", **drawn)
    with np.load(tmp_path / "arrays.npz") as found:
        made = laid_out(plan, found)
    assert made.keys() == drawn.keys()
    for key, array in drawn.items():
        assert made[key].strides == array.strides
        assert made[key].dtype == array.dtype
        assert np.array_equal(made[key], array)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_arrays_are_what_the_plan_takes(dtype: str) -> None:
    plan = FusionPlan.parse(dtype + PLAN)
    arrays = random_arrays(plan, seed=1)
    assert list(arrays) == ["src", *(each.key for each in plan.operands)]
    assert arrays["src"].shape == plan.src.shape
    strides = tuple(step // plan.src.itemsize for step in arrays["src"].strides)
    assert plan.src.same_layout(strides)
    for each in plan.operands:
        assert arrays[each.key].shape == each.shape
    other = tuple(step // plan.src.itemsize for step in arrays["other"].strides)
    assert plan[2].src.same_layout(other)
    assert arrays["variance"].min() >= 0.5
    assert reference(plan, arrays).dtype == np.float64


def test_a_seed_gives_the_same_arrays_and_none_gives_others() -> None:
    plan = FusionPlan.parse("f32" + PLAN)
    first, again, other = (random_arrays(plan, seed) for seed in (1, 1, None))
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert not any(np.array_equal(first[key], other[key]) for key in first)


def test_weights_keep_the_variance_times_the_gain() -> None:
    plan = FusionPlan.parse("f64[1x64x20x20] -> conv2d(64, kernel=3)")
    assert reference(plan, random_arrays(plan, seed=1)).std() == pytest.approx(1.0, abs=0.1)
    assert reference(plan, random_arrays(plan, seed=1, gain=3.0)).std() == pytest.approx(3.0, abs=0.3)


def test_inputs_are_what_their_names_say() -> None:
    plan = FusionPlan.parse("f32[1x16x32x32] -> relu")
    src = {inputs: random_arrays(plan, seed=1, inputs=inputs)["src"] for inputs in INPUTS}
    assert abs(src["normal"].mean()) < 0.1
    assert src["after relu"].min() == 0
    assert 0.4 < (src["after relu"] > 0).mean() < 0.6
    assert src["large mean"].mean() == pytest.approx(100, abs=1)
    magnitudes = np.abs(src["large range"])
    assert magnitudes.max() / np.median(magnitudes) > 1e2
    below = np.abs(src["denormal"])
    assert 0 < np.median(below) < np.finfo(np.float32).tiny
    with pytest.raises(ArgumentError, match="Did you mean `normal`"):
        random_arrays(plan, inputs="norml")


EDGED = ("relu", "abs", "clamp(-0.5, max=1)")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mode", ["spatial", "per_activation"])
@pytest.mark.parametrize("statistics", ["saved", "recomputed"])
@pytest.mark.parametrize("activation", [*EDGED, "tanh", "elu"])
def test_gradients_are_nothing_where_rounding_decides(
    activation: str, statistics: str, mode: str, dtype: str
) -> None:
    operator = f"batch_norm_backward({activation}, mode={mode}, statistics={statistics})"
    plan = FusionPlan.parse(f"{dtype}[16x8x12x12] -> {operator}")
    arrays = random_arrays(plan, seed=1)
    moved = dict(arrays)
    moved["shift"] = arrays["shift"] + np.float32(1e-5)  # as rounding may
    assert deviation(reference(plan, moved), reference(plan, arrays)) < 1e-3
    drawn = random_arrays(plan, 1, device="cpu")["src"]
    shares = [float((arrays["src"] == 0).mean()), float((drawn == 0).double().mean())]
    assert max(shares) < 0.01
    if dtype == "f32":  # of bf16, few numbers are near an edge, and many elements are each
        assert all(share > 0 for share in shares) == (activation in EDGED)


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
def test_gradients_in_fp8_are_nothing_where_rounding_decides_too(dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[16x8x12x12] -> batch_norm_backward(relu)")
    drawn, own = random_arrays(plan, 1, device="cpu")["src"].double(), random_arrays(plan, 1)["src"]
    shares = float((drawn == 0).double().mean()), float((own.view(np.uint8) << 1 == 0).mean())
    assert 0 < max(shares) < 0.02


def test_stored_rounds_once() -> None:
    values = np.array([[1.0, 1 + 2.0**-9, -(1 + 3 * 2.0**-8)]])
    bits = stored(TensorSpec((1, 3), "bf16"), values).view(np.uint16)
    assert bits.tolist() == [[0x3F80, 0x3F80, 0xBF82]]
    assert stored(TensorSpec((1, 3), "f16"), values)[0, 1] == np.float16(1 + 2.0**-9)


def test_deviation_is_over_the_largest() -> None:
    want = np.array([1.0, -4.0])
    assert deviation(np.array([1.0, -4.0], np.float32), want) == 0
    assert deviation(np.array([1.5, -4.0], np.float32), want) == 0.125
    assert deviation(np.array([0x3FC0, 0xC080], np.uint16), want) == 0.125
    assert deviation(np.array([0.5]), np.array([0.0])) == 0.5


def test_deviation_sees_what_is_not_finite_and_another_shape() -> None:
    infinite = np.array([np.inf, 1.0])
    assert deviation(infinite, np.array([1.0, 1.0])) == np.inf
    assert deviation(np.array([1.0, 1.0]), infinite) == np.inf
    assert deviation(infinite, infinite) == 0
    assert deviation(-infinite, infinite) == np.inf
    unknown = np.array([np.nan, 1.0])
    assert deviation(unknown, infinite) == deviation(infinite, unknown) == np.inf
    assert deviation(unknown, unknown) == 0
    assert deviation(np.ones(3), np.ones(2)) == np.inf


@pytest.mark.parametrize(
    ("dtype", "want", "right", "wrong"),
    [
        ("f8e4m3", 1891.0, 448.0, 416.0),  # saturates
        ("f8e5m2", 1e6, np.inf, 57344.0),
        ("f16", 1e6, np.inf, 65504.0),
        ("f16", -1e6, -np.inf, np.inf),
        ("f16", 1.4e-6, 1.5e-6, 5e-6),  # its least number is 6e-8
        ("f32", 1e-140, 0.0, 1e-38),
        ("f32", 3.0, 3.0, 2.9),
    ],
)
def test_numbers_that_a_dtype_does_not_hold(dtype: str, want: float, right: float, wrong: float) -> None:
    """float64 holds them: right is what the dtype makes of them."""
    for value, least, most in ((right, 0.0, 1e-3), (wrong, 1e-2, np.inf)):
        made = stored(TensorSpec((2,), dtype), np.array([value, 0.0]))
        assert least <= deviation(made, np.array([want, 0.0]), dtype=dtype) <= most


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.name)
def test_the_meaning_on_torch_tensors_is_that_on_arrays(kind: type[Op]) -> None:
    for text, op in kind.samples():
        plan = FusionPlan(text, op)
        arrays = random_arrays(plan, 3)
        out, results = evaluated(plan, arrays)
        dtypes = {"src": plan.src.dtype} | {each.key: each.dtype for each in plan.operands}
        dtypes |= {each.key: each.dtype for each in plan.results}
        tensors = {
            key: torch.from_numpy(array.view(dtype_of(dtypes[key]).array)).view(torch_dtype(dtypes[key]))
            for key, array in arrays.items()
        }
        got, made = evaluated(plan, tensors)
        assert made.keys() == results.keys()
        for theirs, ours in zip((got, *made.values()), (out, *results.values()), strict=True):
            np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-12, atol=1e-12, err_msg=f"{plan}")


@pytest.mark.parametrize(
    "text",
    [
        "f32[16x64] -> quantize(f8e4m3) -> sum",  # of 1,024, saturated at 448
        'f16[9x300] -> elementwise("x * 2000") -> sum(-1)',
        "f32[4x500] -> prod(-1)",
    ],
)
def test_results_outside_of_the_range_of_their_dtype(text: str) -> None:
    plan = FusionPlan.parse(text)
    compiled = fuseplan.compile(plan, "cpu", cache=False, threads=1)
    ground, template = ground_of(plan, compiled.target, 1), compiled.choice.template
    made = np.asarray(ground.call(compiled.bind)())
    assert first_wrong(compiled.kernel, template, ground.deviations(made)) is None
    if "sum" in text:
        assert first_wrong(compiled.kernel, template, ground.deviations(0 * made)) is not None


def test_numbers_on_the_edge_of_a_rounding_before_a_sum() -> None:
    """They may fall to either side, each by a step: 2 of these 24 where the sum is 0. More is an error."""
    plan = FusionPlan.parse("f32[2x12] -> cast(f8e4m3) -> cast(f32) -> sum(-1)")
    compiled = fuseplan.compile(plan, "cpu", cache=False, threads=1)
    ground, template = ground_of(plan, compiled.target, 0), compiled.choice.template
    edge = 17 * (1 + 2.0**-21)  # between 16 and 18, and nearer to 18 by less than rounding moves
    ground.tensors["src"][...] = [[edge, -18, *[3] * 5, *[-3] * 5]] * 2
    for values, is_right in (
        ([0, 0], True),
        ([-2, 0], True),
        ([-2, -2], True),
        ([2, 0], True),
        ([4, 0], False),
    ):
        errors = ground.deviations(np.array([values], np.float32).reshape(2, 1)[:, 0])
        assert (first_wrong(compiled.kernel, template, errors) is None) == is_right


@pytest.mark.parametrize("by", ["query", "key"])
def test_weights_of_attention_stay_in_the_range_of_f16(by: str) -> None:
    """Whatever the scale: weights of 1e15 are infinite in f16, and so are the gradients."""
    plan = FusionPlan.parse(f"f16[1x3x70x70] -> attention_gradient(keys=70, scale=0.5, by={by})")
    out, results = evaluated(plan, random_arrays(plan, seed=1))
    assert all(np.abs(each).max() < 1e3 for each in (out, *results.values()))
