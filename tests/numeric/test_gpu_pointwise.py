"""Pointwise kernels for GPUs, interpreted, against the float64 reference; every operator by its samples."""

import math
from dataclasses import replace

import numpy as np
import pytest

from forced import refusal_of
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.layouts import LAYOUTS
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.ops.affine import AFFINE
from fuseplan.ops.expression import Expression
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret

TARGET = parse_target("triton:sm_90")
SHAPES = (
    "1x1",
    "4x100",
    "1x1x1",
    "3x37x5",
    "2x13x9x11",
    "2x3x5x7",
    "5x3x1x1",
    "1x1x33x3",
    "1x64x31x33",
    "2x6x3x5x7",
    "1x33x2x1x9",
)
TENSORS = [f"{shape}, {layout}" for shape in SHAPES for layout in LAYOUTS[shape.count("x") + 1]]

# Every way in which an operand may be indexed, and none.
CHAINS = (
    "relu",
    "batch_norm -> relu",
    "batch_norm(per_activation) -> gelu",
    "bias -> add -> silu",
    "scale -> prelu(shared=True) -> elu(1.5)",
    "add -> batch_norm -> add -> batch_norm(per_activation)",
    "elementwise('x * 2 + 1') -> leaky_relu(0.1)",
)

# nchw and nhwc with gaps, slices of every other element, orders of axes that have no name.
STRIDES = (
    "900:90:10:1",
    "700:1:70:7",
    "2000:2:200:20",
    "1:1000:100:10",
    "90:1:900:9",
    "10000:2:20:1000",
)


def kernel_of(plan: FusionPlan | str) -> Kernel:
    return lower(match(FusionPlan.parse(plan) if isinstance(plan, str) else plan))


@pytest.mark.parametrize("tensor", TENSORS)
def test_any_shape_and_layout(tensor: str) -> None:
    assert_interpreted(f"f32[{tensor}] -> batch_norm -> relu", GpuPointwise, slack=40)


@pytest.mark.part(2)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("tensor", ["2x13x9x11", "2x13x9x11, nhwc", "4x20", "7x1x3x3x3"])
def test_any_chain_and_dtype(chain: str, dtype: str, tensor: str) -> None:
    assert_interpreted(f"{dtype}[{tensor}] -> {chain}", GpuPointwise, slack=80)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("chain", ["add -> batch_norm -> relu", "batch_norm(per_activation) -> bias"])
def test_strided_src_in_every_form(strides: str, chain: str) -> None:
    plan = FusionPlan.parse(f"f16[3x7x8x9, strides={strides}] -> {chain}")
    for template in GpuPointwise.candidates(kernel_of(plan), TARGET, "default"):
        assert isinstance(template, GpuPointwise)
        assert_interpreted(plan, template, slack=40)


KNOBS = (
    GpuPointwise("rows", 4, 16, 0, 4),
    GpuPointwise("rows", 8, 64, 3, 4),
    GpuPointwise("planes", 4, 32, 0, 4),
    GpuPointwise("planes", 2, 128, 5, 4),
    GpuPointwise("flat", 1, 64, 0, 4),
    GpuPointwise("flat", 1, 256, 0, 4),
    GpuPointwise("flat", 1, 4096, 0, 4),
)


def suits(knobs: GpuPointwise, kernel: Kernel) -> bool:
    """Whether dst is stored as the form's rows need it."""
    if knobs.form == "flat":
        return knobs.outer == 1
    area = math.prod(kernel.dst.spatial)
    return area == 1 or kernel.dst.is_channels_last == (knobs.form == "rows")


@pytest.mark.part(12)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("tensor", ["2x20x9x11", "2x20x9x11, nhwc", "64x5", "1x3x40x40, nhwc"])
def test_every_candidate_and_other_knobs(chain: str, tensor: str) -> None:
    plan = FusionPlan.parse(f"f32[{tensor}] -> {chain}")
    candidates = list(GpuPointwise.candidates(kernel_of(plan), TARGET, "default"))
    for template in dict.fromkeys(
        [*candidates, *(knobs for knobs in KNOBS if suits(knobs, kernel_of(plan)))]
    ):
        assert isinstance(template, GpuPointwise)
        assert_interpreted(plan, template, slack=80)


OPERATORS: tuple[type[Op], ...] = (*ACTIVATIONS, *AFFINE, Expression)
SAMPLES = [(text, op) for kind in OPERATORS for text, op in kind.samples()]


@pytest.mark.parametrize(("text", "op"), SAMPLES, ids=[f"{op.name}-{text}" for text, op in SAMPLES])
def test_every_operator_by_its_samples(text: str, op: Op) -> None:
    assert_interpreted(FusionPlan(text, op), GpuPointwise, slack=80)


@pytest.mark.parametrize(
    "operator",
    ["relu", "clamp(min=-1, max=1)", "gelu", "gelu(tanh)", "silu", "softplus", "elu", "mish", "hardswish",
     "sigmoid", "tanh", "clipped_relu", "leaky_relu", "softsign", "power(gamma=2)"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_exceptions_stand_where_they_do_in_the_reference(operator: str, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[1x8] -> {operator}")
    arrays = random_arrays(plan, 5)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 9.0, -9.0, 1.0], np.float64)
    if dtype == "bf16":
        bits = (special.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        arrays["src"].view(np.uint16)[...] = bits
    else:
        arrays["src"][...] = special
    parameters = {each.key: each.value for each in plan.parameters}
    template = next(iter(GpuPointwise.candidates(kernel_of(plan), TARGET, "default")))
    assert isinstance(template, GpuPointwise)
    got = wide(interpret(template, kernel_of(plan), TARGET, arrays, parameters))
    with np.errstate(all="ignore"):
        want = reference(plan, arrays)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(got), test(want))


def test_a_contraction_is_refused() -> None:
    refusal = refusal_of("f32[1x8x6x6] -> relu -> conv2d(8, kernel=1)", GpuPointwise, TARGET)
    assert refusal is not None
    assert refusal.reason is Reason.CENTRE_IN_POINTWISE
    assert refusal.operator == 1


def test_what_depends_on_the_channel_is_computed_before_the_loop() -> None:
    kernel = kernel_of("f32[64x64x9x9, nhwc] -> batch_norm -> relu")
    source = GpuPointwise("rows", 16, 64, 8, 4).emit(kernel, TARGET)
    before, _, inside = source.text.partition("for block in range")
    assert "sqrt" in before
    assert "sqrt" not in inside
    assert "op_" not in inside
    assert source.grid == (8, 1, 1)


def test_large_tensors_have_64_bit_offsets() -> None:
    small = kernel_of("f16[2x64x1024x1024] -> bias")
    large = kernel_of("f16[64x64x1024x1024] -> bias")
    for form in (GpuPointwise("flat", 1, 1024, 0, 4), GpuPointwise("planes", 1, 1024, 0, 4)):
        assert "int64" not in form.emit(small, TARGET).text
        assert "int64" in form.emit(large, TARGET).text


def test_the_first_candidate_is_the_cheapest() -> None:
    kernel = kernel_of("f16[64x512x7x7, nhwc] -> batch_norm -> relu")
    first, *others = GpuPointwise.candidates(kernel, TARGET, "default")
    assert all(first.seconds(kernel, TARGET) <= other.seconds(kernel, TARGET) for other in others)
    slower = replace(TARGET, name="gfx1100", cpu="")
    assert first.seconds(kernel, slower) > first.seconds(kernel, TARGET)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ("bf16[1x48x96x64, bhsd] -> rotary(6, interleaved=True)", 64),
        ("bf16[1x16x2048x256, bhsd] -> rotary(64, interleaved=True)", 8),
        ("bf16[4096x11008] -> glu(silu)", 2),
    ],
)
def test_threads_hold_few_elements_of_all_parts(plan: str, parts: int) -> None:
    """Of 1,024 elements a thread, a kernel took 156 s to compile."""
    target, kernel = parse_target("triton:sm_90"), lower(match(FusionPlan.parse(plan)))
    for each in GpuPointwise.candidates(kernel, target, "default"):
        assert isinstance(each, GpuPointwise)
        assert each.outer * each.inner * parts <= 128 * 32 * each.warps
