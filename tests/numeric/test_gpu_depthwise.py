"""The depthwise kernel in Triton's interpreter: shapes, strides, layouts, dtypes, tails, tiles."""

import re
from dataclasses import replace

import pytest

from fuseplan.backends.triton.templates.depthwise import GpuDepthwise
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
BOTH = pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
SM_90 = parse_target("triton:sm_90")

SHAPES = (
    ("2x19x9x7", "conv2d(19, kernel=3, padding=1, groups=19)"),
    ("1x16x12x17", "conv2d(16, kernel=3, stride=2, padding=1, groups=16)"),
    ("1x40x11x9", "conv2d(40, kernel=5, stride=(1, 3), padding=((0, 3), (2, 1)), groups=40)"),
    ("1x6x13x12", "conv2d(18, kernel=3, dilation=(3, 2), padding=2, groups=6)"),
    ("1x3x4x21", "conv2d(6, kernel=(2, 4), groups=3)"),
    ("2x20x30", "conv1d(20, kernel=7, stride=2, padding=3, groups=20)"),
    ("1x5x4x6x7", "conv3d(10, kernel=(3, 2, 3), stride=(1, 2, 1), padding=1, dilation=(2, 1, 1), groups=5)"),
)


def kernel_of(plan: str) -> Kernel:
    return lower(match(FusionPlan.parse(plan)))


def plan_of(shape: str, conv: str, last: bool, tail: str = "", dtype: str = "f32") -> str:
    return f"{dtype}[{shape}, {LAYOUTS[shape.count('x') + 1][last]}] -> {conv}{tail}"


@pytest.mark.part(4)
@BOTH
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_any_shape_and_dtype(shape: str, conv: str, dtype: str, last: bool) -> None:
    assert_interpreted(plan_of(shape, conv, last, " -> bias -> add -> relu", dtype), GpuDepthwise)


@BOTH
@pytest.mark.parametrize("before", ["bias -> relu", "add", "batch_norm(per_activation) -> prelu"])
def test_operators_before_and_after(before: str, last: bool) -> None:
    for conv in ("conv2d(20, kernel=3, padding=1, groups=20)", "conv2d(40, kernel=3, stride=2, groups=20)"):
        plan = plan_of("2x20x7x9", f"{before} -> {conv}", last, " -> batch_norm(per_activation) -> gelu")
        assert_interpreted(plan, GpuDepthwise)


@pytest.mark.parametrize("strides", ["1200:1:170:24", "1300:2:250:40", "6:13000:1:2400"], ids=str)
def test_any_strides_of_src(strides: str) -> None:
    assert_interpreted(
        f"f32[2x3x4x5, strides={strides}] -> relu -> conv2d(3, kernel=2, groups=3)", GpuDepthwise
    )


@BOTH
def test_every_candidate(last: bool) -> None:
    plan = plan_of("1x20x7x9", "conv2d(20, kernel=3, padding=1, groups=20)", last, " -> bias -> relu", "f16")
    found = list(GpuDepthwise.candidates(kernel_of(plan), SM_90, "default"))
    assert len({each.text for each in found}) == len(found)
    for candidate in found:
        assert isinstance(candidate, GpuDepthwise)
        assert_interpreted(plan, candidate)


@BOTH
def test_offsets_of_64_bits(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tensors of 2^31 elements and more."""
    monkeypatch.setattr("fuseplan.backends.triton.templates.depthwise_writer.WIDE", 64)
    plan = plan_of("2x20x7x9", "conv2d(20, kernel=3, padding=1, groups=20)", last, " -> bias -> relu")
    first = next(iter(GpuDepthwise.candidates(kernel_of(plan), SM_90, "default")))
    assert "int64" in first.emit(kernel_of(plan), SM_90).text
    assert_interpreted(plan, GpuDepthwise)


def test_an_output_row_too_short_for_any_tile() -> None:
    assert_interpreted("f32[2x3x4x1] -> conv2d(3, kernel=(3, 1), padding=(1, 0), groups=3)", GpuDepthwise)


def test_elements_that_no_window_has_have_no_code() -> None:
    """ptxas loses the sign of -inf where it knows that nothing is loaded in its place."""
    plan = "f16[7x16x20x2, nhwc] -> max_pool2d(3, ceil_mode=True)"
    template = next(iter(GpuDepthwise.candidates(kernel_of(plan), SM_90, "default")))
    assert len(re.findall(r"has_src_w_\d+ =", template.emit(kernel_of(plan), SM_90).text)) == 2
    assert_interpreted(plan, GpuDepthwise)


@pytest.mark.parametrize(
    "plan",
    [
        "f32[7x48x16x48, nhwc] -> sigmoid -> gelu(tanh) -> softplus -> max_pool2d(1) -> tanh",
        "f16[7x2x2x80x96, ndhwc] -> minimum -> avg_pool3d((2, 4, 3))",
    ],
)
def test_long_formulas_have_few_outputs_a_thread(plan: str) -> None:
    """Each element has code of its own: these took 45 to 140 s to compile."""
    kernel = kernel_of(plan)
    for each in GpuDepthwise.candidates(kernel, SM_90, "default"):
        assert isinstance(each, GpuDepthwise)
        assert each.rows * each.span <= 4


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        ("conv2d(8, kernel=3, groups=4)", Reason.NOT_DEPTHWISE),
        ("conv2d(8, kernel=15, padding=7, groups=8)", Reason.MANY_TAPS),
    ],
)
def test_refusals(conv: str, reason: Reason) -> None:
    kernel = kernel_of(f"f32[1x8x9x9] -> {conv}")
    refusal = next(claim for claim in GpuDepthwise.limits(kernel, SM_90, "default") if not claim.holds)
    assert refusal.reason is reason


def test_more_rows_read_less() -> None:
    kernel = kernel_of("f16[64x512x14x14, nhwc] -> conv2d(512, kernel=5, padding=2, groups=512)")
    one = GpuDepthwise(256, 1, 1, 2)
    assert replace(one, rows=4).seconds(kernel, SM_90) < one.seconds(kernel, SM_90)
