"""Random plans of the whole language: every template that takes one computes it, within its stated bound.

python -m pytest tests/properties/test_random_plans.py --cases 5000 --first 100000
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import random_checks
from forced import REGISTERS
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import Unsupported
from fuseplan.execution.stages import decide
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import host_target, parse_target
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import random_arrays
from fuseplan.measure.ground import allowed_deviation
from fuseplan.messages.reasons import Reason
from fuseplan.op import Elementwise, operand, operator
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import Scalar, where
from fuseplan.tensors import arrays
from fuseplan.tensors.arrays import Array
from interpreted import assert_interpreted
from random_plans import drawn
from unsteady import OutOfRangeError, motion

# Plans that were computed wrongly, or not built, when such a test first drew their kind.
FOUND = (
    "f32[70] -> add",
    "f32[31] -> activation_backward(relu) -> bias",
    "f64[70] -> activation_backward(softsign) -> mul_along((0,)) -> bias",
    "f32[5x16x8x8, nhwc] -> mul_along((0, 1)) -> conv2d(16, kernel=3, groups=16)",
    "f32[5x2x64, nwc] -> mul_along((0, 2)) -> conv1d(2, kernel=1, groups=2)",
    "i8[33x64] -> dequantize(bf16, per=channel, zero_points=True) -> cumsum",
    "f64[33x64] -> cast(f32) -> scale -> cumsum",
    "f32[17x15x1, strides=1:18:271] -> conv_transpose1d(15, kernel=2, stride=3, dilation=2, groups=15)",
    "f32[*x2x1] -> conv_transpose1d(2, kernel=3) -> relu",
    "f32[3x5x6x64] -> rotary -> quantize(i8, per=channel, zero_points=True)",
)


FOUND_ON_GPUS = (
    "f32[3x31x3x15, bshd of bhsd] -> bias -> bias",
    "f32[2x3x40x7, dbhs of bhsd] -> bias",
    "f32[2x3x5x7, bhds of bhsd] -> bias",
    "f32[4x3x5x8, sbhd of bhsd] -> mul_along((1, 2, 3))",
    "f32[6x5x8, sbc of bsc] -> scale -> add_along((1, 2))",
    "f8e4m3[4x6] -> glu(relu)",
    "f8e4m3[2x5x9x3, nhwc] -> conv2d(10, kernel=3, padding=1, groups=5)",
    "f32[300] -> quantize(i8, per=block)",
    "f32[3] -> quantize(i8, per=block) -> dequantize -> linear(2)",
    "f32[8x1] -> cross_entropy -> add",
    "f32[1x1] -> rms_norm_backward -> add",
    "bf16[16x7x5] -> dropout(0.25, seed=3) -> batch_norm_training",
    "bf16[5x4x4x3, nhwc] -> batch_norm_backward(gelu) -> cast(f8e5m2)",
    "f64[2x4x6] -> mul -> group_norm_backward(2)",
    "f32[*x1x1, ncw] -> mul_along((0,)) -> batch_norm(per_activation)",
    "f64[70x70, strides=1:70] -> dropout(0.25, seed=3) -> batch_norm_backward(abs, mode=per_activation)",
)


WALL, MARK = 256, 0xA7  # bytes beside each array, and what they hold


def check(plan: FusionPlan, seed: int) -> None:
    """On this machine, as if its vectors were narrower, by one thread or two."""
    rng = random.Random(seed)
    width = rng.choice((*REGISTERS, host_target().vector_bytes))
    target = replace(
        host_target(), threads=rng.randint(1, 2), vector_bytes=width, vector_registers=REGISTERS[width]
    )
    random_checks.check(plan, target, rng, seed)


@pytest.fixture
def walls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be written in front of an array or behind it."""
    made = list[tuple[Array, int, int]]()

    def walled(nbytes: int) -> Array:
        area = np.full(nbytes + 4 * WALL, MARK, np.uint8)
        begin = WALL + -arrays.address_of(area) % WALL
        made.append((area, begin, begin + nbytes))
        return area[begin : begin + nbytes]

    monkeypatch.setattr(arrays, "aligned_bytes", walled)
    yield
    for area, begin, end in made:
        assert (area[:begin] == MARK).all()
        assert (area[end:] == MARK).all()


@pytest.mark.usefixtures("walls")
@pytest.mark.parametrize("text", FOUND)
def test_plans_that_were_wrong(text: str) -> None:
    check(FusionPlan.parse(text), 1)


def test_a_plan_whose_axes_an_embedding_makes_prints() -> None:
    """The text asks which operators have channels: one reads an axis that src has not."""
    text = "i64[9x16] -> embedding(15, features=2) -> glu_backward(silu, axis=s) -> layer_norm"
    assert str(FusionPlan.parse(text)) == text


def test_nan_beside_infinity_is_in_the_logarithm_of_a_sum() -> None:
    compiled = compile_plan("f32[2x3] -> logsumexp(1)", cache=False)
    made = compiled(np.array([[np.inf, np.nan, 1], [np.inf, 0, -np.inf]], np.float32))
    np.testing.assert_array_equal(made, [np.nan, np.inf])


def test_a_condition_of_a_channel_is_no_number(registries: None) -> None:
    @operator
    class Gated(Elementwise):
        """x where gate > 0, else 0"""

        gate = operand("channel")

        def apply(self, x: Scalar, gate: Scalar) -> Scalar:
            return where(gate > 0, x, 0)

    for src in ("f32[3x33]", "f32[2x3x5x5]", "f32[2x33x5, nwc]"):
        check(FusionPlan(src, Gated()), 1)


def check_on_gpus(plan: FusionPlan, seed: int) -> None:
    """The first candidate of every template whose source is plain Triton, interpreted, beside float64."""
    target, extent = parse_target("triton:sm_90"), random.Random(seed).randint(1, 5) if plan.is_open else 0
    numbers = plan.with_extents(extent, *[1] * (len(plan.src.open_axes) - 1)) if extent else plan
    try:
        kernel = lower(match(plan))
        with np.errstate(all="ignore"):
            want, far = motion(numbers, random_arrays(numbers, seed))
    except (Unsupported, OutOfRangeError):
        return
    sizes = {key: abs(value).max(initial=0.0) for key, value in want.items()}
    is_known = all(np.isfinite(each).all() for each in far.values())
    largest = dtype_of(kernel.dst.dtype).largest
    if plan.views or not is_known or not all(1e-3 < size <= largest for size in sizes.values()):
        return  # smaller numbers of 8 and 16 bits lose bits; larger ones are the largest, or infinite
    moved = max(each.max(initial=0.0) / sizes[key] for key, each in far.items())
    for kind in random_checks.templates(kernel, target):
        template = next(iter(kind.candidates(kernel, target, "default")))
        if isinstance(template, GpuTemplate) and template.emit(kernel, target).language == "triton":
            slack = (allowed_deviation(kernel, template) + moved) / dtype_of(kernel.compute_dtype).epsilon
            assert_interpreted(plan, template, target, seed=seed, slack=slack, extent=extent)


@pytest.mark.parametrize("target", ["cpu:avx2", "triton:sm_90"])
@pytest.mark.parametrize("axes", ["(0, 1)", "(0, 3)"])
def test_rows_of_an_image_that_read_other_elements_are_no_rows_of_one_image(axes: str, target: str) -> None:
    text = f"f32[2x7x3x8, bshd] -> layer_norm -> add_along({axes}) -> quantize(i8, per=block, block=4)"
    with pytest.raises(Unsupported, match="one element for a block"):
        decide(text, target)


@pytest.mark.parametrize(
    "text",
    [
        "f32[3x1] -> linear(1)",
        "f32[3x1] -> linear_weight_gradient(17)",
        "f64[64x2] -> linear_weight_gradient(5)",
        "f32[6x40] -> linear_weight_gradient(40)",
        "f32[3x1x9x16] -> group_norm(1)",
        "f32[2x2x17x3] -> conv2d_weight_gradient(2, kernel=3, stride=3, groups=2, precision=tf32)",
    ],
)
def test_a_range_lies_as_no_template_writes_it(text: str) -> None:
    """Where features are one, or those of a weight gradient: its rows are the features that are computed."""
    layout = ", layout=nhwc" if "norm" in text else ""
    for target in ("cpu", "triton:sm_90"):
        with pytest.raises(Unsupported) as refused:
            decide(f"{text} -> within(50{layout})", target)
        assert Reason.RANGE in {each.reason for each in refused.value.refusals}


@pytest.mark.parametrize("text", FOUND_ON_GPUS)
def test_plans_that_were_wrong_on_gpus(text: str) -> None:
    check_on_gpus(FusionPlan.parse(text), 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, cases = map(metafunc.config.getoption, ("first", "cases"))
    for name, count in (("case", cases), ("small_case", cases // 4)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(first, first + count))


@pytest.mark.usefixtures("walls")
def test_random_plans(case: int) -> None:
    check(drawn(case), case)


def test_random_plans_on_gpus(small_case: int) -> None:
    check_on_gpus(drawn(small_case, 400), small_case)
