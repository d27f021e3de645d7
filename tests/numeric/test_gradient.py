"""Gradients of weights: both backends against float64, at every rank and dtype; torch's numbers."""

import numpy as np
import pytest
import torch

from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.grouped_gradient import GroupedGradient
from fuseplan.backends.cpu.templates.grouped_gradient_planes import GroupedGradientPlanes
from fuseplan.backends.triton.templates.product import Product
from fuseplan.compile import compile as compile_plan
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

PLANS = (
    "{d}[7x5] -> linear_weight_gradient(9)",
    "{d}[2x33x40] -> linear_weight_gradient(24)",
    "{d}[3x1] -> linear_weight_gradient(1)",
    "{d}[1x70] -> linear_weight_gradient(33)",
    "{d}[2x3x7x1] -> linear_weight_gradient(19)",
    "{d}[1x3x2x5x3] -> linear_weight_gradient(2)",
    "{d}[50x30, strides=64:1] -> linear_weight_gradient(5)",
    "{d}[3x17x40] -> relu -> linear_weight_gradient(9) -> clamp(min=-1, max=1)",
    "{d}[2x3x11] -> conv1d_weight_gradient(5, kernel=3)",
    "{d}[3x4x13, nwc] -> silu -> conv1d_weight_gradient(6, kernel=4, stride=3, padding=((2,1),), dilation=2, "
    "groups=2)",
    "{d}[17x5x6x7, nhwc] -> conv2d_weight_gradient(7, kernel=1, stride=3) -> clamp(min=-1, max=1)",
    "{d}[1x3x9x11] -> conv2d_weight_gradient(35, kernel=3, padding=1)",
    "{d}[2x3x9x8, nhwc] -> sigmoid -> conv2d_weight_gradient(4, kernel=(3,5), stride=2, padding=same)",
    "{d}[18x6x5x6] -> conv2d_weight_gradient(9, kernel=3, stride=(1,2), padding=((0,1),(2,1)), dilation=2, "
    "groups=3)",
    "{d}[2x7x5x6, nhwc] -> conv2d_weight_gradient(7, kernel=3, padding=1, groups=7)",
    "{d}[2x1x1x1] -> conv2d_weight_gradient(1, kernel=2, stride=10, padding=5)",
    "{d}[2x3x4x5x6] -> conv3d_weight_gradient(5, kernel=3, padding=1)",
    "{d}[2x4x5x3x7, ndhwc] -> conv3d_weight_gradient(6, kernel=(1,3,2), stride=(2,1,3), padding=1, groups=2)",
)

Kind = type[GroupedGradient] | type[GroupedGradientPlanes]

# Groups, their channels and features; shape without channels, and convolution.
OF_GROUPS = (
    (19, 1, 1, "2x{c}x9x11", "kernel=3, padding=1"),
    (3, 1, 1, "1x{c}x40x37", "kernel=3, stride=2, padding=1"),
    (8, 1, 2, "2x{c}x21x26", "kernel=(3, 5), stride=(2, 3), padding=(0, 2)"),
    (9, 2, 2, "1x{c}x17x33", "kernel=3, dilation=2, padding=2"),
    (12, 1, 1, "3x{c}x7x7", "kernel=7, padding=3"),
    (5, 3, 1, "2x{c}x6x20", "kernel=(2, 13), padding=((1, 0), (0, 9))"),
    (11, 1, 1, "2x{c}x64", "kernel=31, padding=15"),
    (6, 2, 2, "2x{c}x50", "kernel=4, padding=((3, 0),)"),
    (40, 1, 1, "1x{c}x1x90", "kernel=(1, 3), padding=(0, 1)"),
    (5, 1, 1, "1x{c}x9x3", "kernel=2, stride=2"),
    (9, 4, 2, "2x{c}x6x7", "kernel=1, padding=2"),
    (2, 1, 1, "40x{c}x3x5", "kernel=(3, 1), dilation=(4, 1), padding=(9, 3)"),
    (6, 1, 1, "2x{c}x3x7x9", "kernel=(2, 3, 3), stride=(1, 2, 1), padding=((0, 1), (1, 1), (2, 0))"),
)


@pytest.mark.parametrize("kind", [GroupedGradient, GroupedGradientPlanes], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize(("groups", "own", "many", "shape", "conv"), OF_GROUPS)
@pytest.mark.part(3)
def test_of_groups(kind: Kind, dtype: str, groups: int, own: int, many: int, shape: str, conv: str) -> None:
    """Each by vectors of another width and another number of threads."""
    axes = shape.count("x") - 1
    layout = ("nwc nhwc ndhwc" if kind is GroupedGradient else "ncw nchw ncdhw").split()[axes - 1]
    op = f"conv{axes}d_weight_gradient({groups * many}, {conv}, groups={groups})"
    ends = " -> sigmoid", " -> clamp(min=-2, max=3)"
    plan = FusionPlan.parse(f"{dtype}[{shape.format(c=groups * own)}, {layout}]{ends[0]} -> {op}{ends[1]}")
    for width, threads in ((16, 1), (64, 2)) if dtype == "f32" else ((32, 3),):
        assert_close(forced(plan, kind, narrowed(width, threads)), random_arrays(plan, 2), slack=80)


@pytest.mark.parametrize("kind", [GroupedGradient, GroupedGradientPlanes], ids=lambda kind: kind.name)
def test_sums_of_groups_in_parts(kind: Kind) -> None:
    """Lines that are no multiple of those that are summed at once, in parts of unlike length."""
    layout = ", nhwc" if kind is GroupedGradient else ""
    plan = FusionPlan.parse(f"f32[3x21x9x10{layout}] -> conv2d_weight_gradient(21, kernel=3, groups=21)")
    for columns, lines, parts, block in ((1, 2, 4, 2), (2, 21, 1, 3), (3, 1, 5, 1)):
        template = kind(columns, lines, parts, block)
        compiled = forced(plan, kind, narrowed(32, 2), template)
        arrays = random_arrays(plan, 3)
        assert_close(compiled, arrays)
        np.testing.assert_array_equal(compiled(**arrays), compiled(**arrays))


def test_a_nan_of_one_channel_is_in_its_gradient_alone() -> None:
    for layout, kind in (("nhwc", GroupedGradient), ("nchw", GroupedGradientPlanes)):
        plan = FusionPlan.parse(f"f32[2x11x5x6, {layout}] -> conv2d_weight_gradient(11, kernel=3, groups=11)")
        arrays = random_arrays(plan, 3)
        arrays["src"][0, 4, 0, 0] = np.nan
        made = np.asarray(forced(plan, kind, narrowed(32, 1))(**arrays))
        want = np.zeros(made.shape, bool)
        want[4, 0, 0, 0] = True  # the first tap alone meets the first element
        np.testing.assert_array_equal(np.isnan(made), want)


def test_what_gradients_of_groups_refuse() -> None:
    def code(kind: Kind, text: str) -> str | None:
        found = refusal_of(text, kind, narrowed(32))
        return found.code if found else None

    both: tuple[Kind, ...] = (GroupedGradient, GroupedGradientPlanes)
    plan = "f32[2x6x9x9{layout}] -> conv2d_weight_gradient({features}, kernel=3, groups={groups})"
    for kind, layout, other in zip(both, (", nhwc", ""), ("", ", nhwc"), strict=True):
        assert code(kind, plan.format(layout=layout, features=6, groups=3)) is None
        assert code(kind, plan.format(layout=layout, features=6, groups=1)) == "no-gradient-of-groups"
        assert code(kind, "f32[2x6x9x9] -> conv2d(6, kernel=3, groups=6)") == "no-gradient-of-groups"
        axis = layout.replace("h", "")
        wide = f"f32[2x6x400{axis}] -> gelu -> conv1d_weight_gradient(6, kernel=150, padding=149, groups=6)"
        assert code(kind, wide) == "many-taps"
        lies = code(kind, plan.format(layout=other, features=6, groups=6))
        assert lies == ("channels-first" if kind is GroupedGradient else "scattered-positions")
    assert code(GroupedGradient, plan.format(layout=", nhwc", features=27, groups=3)) == "group-width"


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.part(3)
def test_cpu(text: str, dtype: str) -> None:
    plan = FusionPlan.parse(text.format(d=dtype))
    for width in (16, 64):
        assert_close(forced(plan, Direct, narrowed(width, 2)), random_arrays(plan, 2), slack=80)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("text", PLANS)
def test_triton(text: str, dtype: str) -> None:
    assert_interpreted(text.format(d=dtype), Product, slack=80)


@pytest.mark.parametrize("channels_last", [False, True])
def test_torchs_gradient_of_a_convolution(channels_last: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = torch.nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3, bias=False)
    x, grad = (torch.randn(shape, generator=generator) for shape in ((4, 6, 11, 12), (4, 9, 6, 6)))
    layer(x.relu()).backward(grad)
    layout = ", nhwc" if channels_last else ""
    if channels_last:
        x, grad = (each.to(memory_format=torch.channels_last) for each in (x, grad))
    operator = "conv2d_weight_gradient(9, kernel=3, stride=2, padding=1, groups=3)"
    made = compile_plan(f"f32[4x6x11x12{layout}] -> relu -> {operator}")(x, grad=grad)
    torch.testing.assert_close(made, layer.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_long_sum_in_parts_is_right() -> None:
    plan = FusionPlan.parse("f32[2x5x40x40] -> conv2d_weight_gradient(7, kernel=3, padding=1)")
    kernel, target = lower(match(plan)), parse_target("triton:sm_90")
    candidates = Product.candidates(kernel, target, "default")
    split = [each for each in candidates if isinstance(each, Product) and each.split > 1]
    assert split, "1600 positions of each image are summed by several programs"
    assert_interpreted(plan, split[0], slack=80)


@pytest.mark.parametrize("groups", [1, 2])
def test_float64_on_tensors_is_that_on_arrays(groups: int) -> None:
    plan = FusionPlan.parse(f"f32[3x4x7x8] -> conv2d_weight_gradient(6, kernel=3, stride=2, groups={groups})")
    arrays = random_arrays(plan, 5)
    want, _ = plan.evaluate(arrays["src"], {"grad": arrays["grad"]})
    got, _ = evaluated(plan, {key: torch.from_numpy(each) for key, each in arrays.items()})
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)


def test_torchs_gradient_and_the_same_bits_each_time() -> None:
    generator = torch.Generator().manual_seed(3)
    layer, x = torch.nn.Linear(40, 24, bias=False), torch.randn(3, 50, 40, generator=generator)
    grad = torch.randn(3, 50, 24, generator=generator)
    layer(x).backward(grad)
    compiled = compile_plan("f32[3x50x40] -> linear_weight_gradient(24)")
    made = compiled(x, grad=grad)
    torch.testing.assert_close(made, layer.weight.grad, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(made, compiled(x, grad=grad))
