"""Transposed convolutions on CPUs against float64: residues, layouts, dtypes, widths, knobs, tails."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.planes import Planes
from fuseplan.backends.cpu.templates.winograd import Winograd
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import PlanError
from fuseplan.loaded import load
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.ops.conv import TRANSPOSED, ConvTranspose2d
from fuseplan.plans.plan import FusionPlan

LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
BOTH = pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])

SHAPES = (
    ("2x20x9x7", "conv_transpose2d(33, kernel=2, stride=2)"),
    ("1x33x16x18", "conv_transpose2d(18, kernel=4, stride=2, padding=1)"),
    ("2x5x6x7", "conv_transpose2d(39, kernel=3, stride=2, padding=1)"),
    ("2x5x6x7", "conv_transpose2d(19, kernel=3, stride=2, padding=1, output_padding=1)"),
    ("1x14x5x5", "conv_transpose2d(40, kernel=5, padding=1)"),
    ("1x10x5x6", "conv_transpose2d(20, kernel=1, stride=2)"),
    ("1x12x5x4", "conv_transpose2d(7, kernel=(5, 2), stride=(3, 2), padding=((0, 3), (1, 0)))"),
    ("1x20x7x6", "conv_transpose2d(8, kernel=3, stride=(4, 2), dilation=(2, 3), padding=2)"),
    ("2x12x5x4", "conv_transpose2d(18, kernel=3, stride=2, padding=1, groups=3)"),
    ("2x19x5x4", "conv_transpose2d(38, kernel=3, stride=2, padding=1, groups=19)"),
    ("1x6x4x7", "conv_transpose2d(6, kernel=2, stride=(3, 1), padding=((0, 1), 3), output_padding=(2, 0))"),
    ("1x9x3x3", "conv_transpose2d(5, kernel=8, stride=8)"),
    ("3x20x1x1", "conv_transpose2d(17, kernel=4)"),
    ("3x20x1x1", "conv_transpose2d(17, kernel=2, stride=2)"),
    ("1x6x2x2", "conv_transpose2d(5, kernel=2, stride=9, padding=4)"),
    ("2x3x20", "conv_transpose1d(7, kernel=9, stride=3, padding=4)"),
    ("1x5x3x4x5", "conv_transpose3d(9, kernel=3, stride=2, padding=1, output_padding=1)"),
    ("2x4x2x4x3", "conv_transpose3d(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding=0, groups=2)"),
)  # fmt: skip


def plan_of(shape: str, conv: str, last: bool, tail: str = "", dtype: str = "f32") -> FusionPlan:
    layout = LAYOUTS[shape.count("x") + 1][last]
    return FusionPlan.parse(f"{dtype}[{shape}, {layout}] -> {conv}{tail}")


@pytest.mark.part(3)
@BOTH
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_any_shape(shape: str, conv: str, width: int, last: bool) -> None:
    plan = plan_of(shape, conv, last, " -> bias -> relu")
    assert_close(forced(plan, Direct, narrowed(width, threads=2)), random_arrays(plan, 1), slack=16)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_error_stays_within_the_bound_that_is_claimed(shape: str, conv: str, last: bool) -> None:
    plan = plan_of(shape, conv, last)
    compiled = forced(plan, Direct, narrowed(32))
    arrays = random_arrays(plan, 2)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    assert (np.abs(got - want) <= compiled.choice.template.error_bound(compiled.kernel) * size).all()


@pytest.mark.part(3)
@BOTH
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize(("shape", "conv"), SHAPES[:4] + SHAPES[15:])
def test_any_dtype(shape: str, conv: str, dtype: str, last: bool) -> None:
    plan = plan_of(shape, conv, last, " -> bias -> add -> relu", dtype)
    assert_close(forced(plan, Direct, narrowed(64)), random_arrays(plan, 3), slack=16)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("before", ["relu", "batch_norm(per_activation) -> prelu"])
@pytest.mark.parametrize("after", ["batch_norm -> gelu", "batch_norm(per_activation) -> add -> prelu"])
def test_operators_before_and_after(before: str, after: str, dtype: str, last: bool) -> None:
    conv = f"{before} -> conv_transpose2d(21, kernel=3, stride=2, padding=1)"
    plan = plan_of("2x13x5x6", conv, last, f" -> {after}", dtype)
    assert_close(forced(plan, Direct, narrowed(64, threads=2)), random_arrays(plan, 4), slack=16)


@BOTH
@pytest.mark.parametrize("knobs", [(1, 1, 1, 1), (5, 2, 9, 4), (6, 1, 2, 1)], ids=str)
def test_any_knobs(knobs: tuple[int, int, int, int], last: bool) -> None:
    plan = plan_of("2x20x12x7", "conv_transpose2d(70, kernel=3, stride=2, padding=1)", last, " -> bias")
    assert_close(
        forced(plan, Direct, narrowed(64, threads=2), Direct(*knobs)), random_arrays(plan, 5), slack=16
    )


@pytest.mark.parametrize("tail", ["save(kept) -> relu", "bias -> glu(axis=c)", "gelu -> within(30)"])
def test_values_that_are_kept_parts_and_ranges(tail: str) -> None:
    plan = FusionPlan.parse(
        f"f32[2x9x4x5, nhwc] -> conv_transpose2d(12, kernel=4, stride=2, padding=1) -> {tail}"
    )
    assert_close(compile_plan(plan, "cpu"), random_arrays(plan, 6), slack=16)


SIZES = st.integers(1, 4)


@settings(max_examples=25, deadline=None)
@given(
    axes=st.integers(1, 3),
    extent=SIZES,
    kernel=SIZES,
    stride=SIZES,
    dilation=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    more=st.integers(0, 3),
    groups=st.integers(1, 2),
    last=st.booleans(),
)
def test_any_transposed_convolution(
    axes: int,
    extent: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: tuple[int, int],
    more: int,
    groups: int,
    last: bool,
) -> None:
    out = (extent - 1) * stride + (kernel - 1) * dilation + 1 - sum(padding) + more
    if out < 1 or more >= max(stride, dilation):
        return
    options: dict[str, Any] = {
        "stride": stride,
        "dilation": dilation,
        "output_padding": more,
        "groups": groups,
    }
    op = TRANSPOSED[axes - 1](3 * groups, kernel, padding=(padding,) * axes, **options)
    shape = "x".join(map(str, (2, 2 * groups, *(extent,) * axes)))
    plan = FusionPlan.parse(f"f32[{shape}, {LAYOUTS[axes + 2][last]}] -> relu").src
    made = FusionPlan(plan, op)
    assert made.output.spatial == (out,) * axes
    assert_close(compile_plan(made, "cpu"), random_arrays(made, 7), slack=16)


def test_an_infinite_element_reaches_the_outputs_that_have_a_tap_of_it_alone() -> None:
    plan = FusionPlan.parse("f32[1x1x5x5] -> conv_transpose2d(1, kernel=3, stride=2, padding=1)")
    src, weight = np.zeros((1, 1, 5, 5), np.float32), np.ones((1, 1, 3, 3), np.float32)
    src[0, 0, 2, 2] = np.inf
    got = compile_plan(plan, "cpu")(src, weight=weight)
    want = np.zeros((1, 1, 9, 9))
    want[0, 0, 3:6, 3:6] = np.inf
    np.testing.assert_array_equal(got, want)


def test_templates_of_convolutions_alone_refuse_a_stride() -> None:
    plan = FusionPlan.parse("f32[1x16x9x9] -> conv_transpose2d(16, kernel=3, stride=2)")
    for kind in (Winograd, Planes):
        assert (refusal := refusal_of(plan, kind, narrowed(64)))
        assert refusal.reason == Reason.TRANSPOSED
    turned = FusionPlan.parse("f32[1x64x30x30] -> conv_transpose2d(64, kernel=3, padding=1)")
    assert isinstance(compile_plan(turned, "cpu").choice.template, Winograd)


def test_a_file_packs_the_weight_as_the_plan_does(tmp_path: Path) -> None:
    plan = FusionPlan.parse("f32[2x6x5x4] -> conv_transpose2d(4, kernel=3, stride=2, groups=2) -> bias")
    compiled, arrays = compile_plan(plan, "cpu"), random_arrays(plan, 8)
    compiled.save(tmp_path / "plan.fuse")
    np.testing.assert_array_equal(load(tmp_path / "plan.fuse")(**arrays), compiled(**arrays))


@pytest.mark.parametrize(
    ("options", "is_taken"),
    [
        ({"stride": 2, "output_padding": 1}, True),
        ({"dilation": 2, "output_padding": 1}, True),
        ({"output_padding": 1}, False),
        ({"stride": 2, "dilation": 2, "output_padding": 2}, False),
        ({"stride": (3, 1), "dilation": (1, 2), "output_padding": (2, 2)}, False),
    ],
)
def test_the_output_is_longer_by_less_than_stride_or_dilation_as_torchs(
    options: dict[str, Any], is_taken: bool
) -> None:
    src, weight = torch.zeros(1, 2, 4, 5), torch.zeros(2, 3, 2, 2)
    with nullcontext() if is_taken else pytest.raises(RuntimeError, match="output padding must be smaller"):
        torch.nn.functional.conv_transpose2d(src, weight, **options)
    with (
        nullcontext() if is_taken else pytest.raises(PlanError, match="less than the stride or the dilation")
    ):
        ConvTranspose2d(3, kernel=2, **options)
