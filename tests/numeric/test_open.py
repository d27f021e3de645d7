"""Open axes on CPUs: one compiled plan at many extents, beside float64 and the plans with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import assert_close
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import BuildError
from fuseplan.export.packings import exported_packings
from fuseplan.loaded import load
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact as wide
from fuseplan.plans.plan import FusionPlan
from numeric.conftest import Guarded

POINTWISE = (
    "f32[*x33] -> relu",
    "f32[*x6x5x4, nhwc] -> batch_norm -> add -> relu",
    "f32[*x6x5x4] -> batch_norm -> add -> relu",
    "f32[*x*x7] -> relu -> save(kept) -> add",
    "f16[*x8x3, strides=30:3:1] -> gelu",
    "bf16[*x3x5] -> relu",
    "f64[*x70] -> bias -> tanh",
    "f32[*x1] -> scale",
    "f32[*x3x5x4, nhwc] -> batch_norm(per_activation)",
    "f32[*x34] -> relu -> glu(silu) -> save(kept) -> bias",
    "f64[*x8x7x5] -> add -> glu(relu, axis=c, interleaved=True)",
    "bf16[*x3x16x8, bhsd] -> rotary(dims=6)",
)
CONTRACTIONS = (
    "f32[*x7] -> linear(6) -> bias -> gelu",
    "f16[*x70] -> add -> linear(65) -> bias",
    "f32[*x*x7] -> linear(10) -> add",
    "f32[*x33] -> linear(70) -> bias -> glu(silu) -> add",
    "f32[*x5x4x6, nhwc] -> conv2d(14, kernel=3) -> glu(axis=c, interleaved=True)",
    "f32[*x9x7, strides=100:9:1 of bsc] -> linear(10)",
    "f32[*x6x5x4, nhwc] -> conv2d(8, kernel=3, padding=1) -> batch_norm -> add -> relu",
    "bf16[*x6x5x4] -> relu -> conv2d(8, kernel=3, padding=1) -> save(kept) -> relu",
    "bf16[*x33] -> matmul(40) -> bias",
    "f32[*x16x9x9] -> conv2d(16, kernel=3, groups=4, stride=2) -> bias",
    "f64[*x3x2x2, nhwc] -> conv2d(8, kernel=2, padding=1)",
    "f32[*x6x5x4, nhwc] -> conv_transpose2d(8, kernel=3, stride=2, padding=1) -> bias -> add",
    "f16[*x6x5x4] -> relu -> conv_transpose2d(8, kernel=4, stride=2, padding=1) -> save(kept) -> relu",
)
STATISTICS = (
    "f32[*x77] -> layer_norm",
    "f16[*x33] -> add -> save(kept) -> layer_norm",
    "f32[*x5x7] -> layer_norm -> relu",
    "f64[*x2100] -> layer_norm",
    "bf16[*x*x70] -> rms_norm",
    "f32[*x70] -> softmax",
    "f16[*x5x33, bsc] -> scale -> log_softmax",
    "f32[*x5x7] -> sum(axes=1) -> relu",
    "f32[*x40x7, nwc] -> mean(w)",
    "f64[*x3x130] -> add -> amax(s)",
    "f32[*x40] -> sum(1) -> tanh",
    "f32[*x5x7] -> argmax((1, 2))",
)
# Packed for each extent: an element for each row, or for each place of an image.
PACKED = (
    "i8[*x40] -> linear(10) -> dequantize(per=row)",
    "i32[*x*x10] -> dequantize(f32, per=block, block=4) -> silu",
    "f32[*x3x40] -> rms_norm -> quantize(i8, per=block, block=8)",
    "f32[*x5x3x8, bshd] -> rotary(batched=True)",
    "f32[*x6x4x5, bshc of bhsc] -> add -> softmax -> add",
)
# By the template that is asked for: images or rows of tasks that follow from the extent.
TEMPLATES = (
    ("depthwise", "f32[*x33x9x9, nhwc] -> conv2d(33, kernel=3, padding=1, groups=33) -> bias -> relu"),
    ("depthwise", "f16[*x8x9x5, nhwc] -> gelu -> conv2d(8, kernel=3, padding=1, groups=8) -> add"),
    ("depthwise", "f32[*x8x9x9, nhwc] -> avg_pool2d(3, stride=2, padding=1)"),
    ("grouped", "f32[*x32x7x7, nhwc] -> conv2d(32, kernel=3, padding=1, groups=8) -> bias"),
    ("depthwise_planes", "f32[*x5x17x30] -> conv2d(5, kernel=3, padding=1, groups=5) -> relu"),
    ("depthwise_planes", "bf16[*x4x9x9] -> relu -> max_pool2d(3, stride=2, padding=1)"),
    ("grouped_planes", "f32[*x6x9x9] -> conv2d(6, kernel=3, padding=1, groups=2) -> save(kept) -> relu"),
    ("planes", "f32[*x33x9x9] -> conv2d(40, kernel=1) -> bias -> relu"),
    ("planes", "f32[*x16x12x16] -> relu -> conv2d(130, kernel=1) -> add"),
    ("attention", "f32[*x3x7x8, bhsd] -> attention(is_causal=True, return_lse=True) -> add"),
    ("attention", "f16[*x4x3x16, bshd of bhsd] -> attention(keys=9, key_heads=2, bias_axes=bhst)"),
    ("attention", "f64[*x2x3x8, bhsd] -> attention(keys=20, is_padded=True, mask_axes=bst)"),
    ("winograd", "f32[*x33x9x9, nhwc] -> conv2d(33, kernel=3, padding=1) -> bias -> relu"),
    ("winograd", "f16[*x16x5x6] -> relu -> conv2d(24, kernel=5, padding=2) -> add"),
)
# Of the largest result: a few roundings of the storage, or of sums of up to 70 products.
BOUNDS = {"f64": 1e-14, "f32": 1e-5, "f16": 2e-3, "bf16": 1e-2, "i8": 1e-5, "i32": 1e-5}


def at(compiled: CompiledPlan, rows: int) -> tuple[FusionPlan, dict[str, Any]]:
    """The plan with `rows` along its first open axis, and arrays for it."""
    plan = compiled.plan.with_extents(rows, *[3] * (len(compiled.plan.src.open_axes) - 1))
    return plan, random_arrays(plan, rows)


def outputs(made: Any) -> list[Any]:
    return [wide(each) for each in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("text", POINTWISE + CONTRACTIONS + STATISTICS + PACKED)
def test_one_kernel_serves_every_extent(text: str) -> None:
    compiled = compile_plan(text, threads=2)
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 64, 131, 1):
        plan, arrays = at(compiled, rows)
        got, want = outputs(compiled(**arrays))[0], evaluated(plan, arrays)[0]
        assert np.abs(got - want).max() <= np.abs(want).max() * BOUNDS[plan.src.dtype]


@pytest.mark.part(2)
@pytest.mark.parametrize(("template", "text"), TEMPLATES)
def test_each_template_serves_every_extent(template: str, text: str) -> None:
    compiled = compile_plan(text, threads=3, template=template)
    for rows in (1, 2, 3, 8, 41, 1):
        plan, arrays = at(compiled, rows)
        got, want = outputs(compiled(**arrays)), evaluated(plan, arrays)
        for made, right in zip(got, (want[0], *want[1].values()), strict=True):
            assert np.abs(made - right).max() <= np.abs(right).max() * BOUNDS[plan.src.dtype]
    if template == "winograd":  # whose tile may be another at another extent
        return
    numbered = compile_plan(plan, threads=3, template=template)
    np.testing.assert_array_equal(outputs(compiled(**arrays))[0], outputs(numbered(**arrays))[0])


@pytest.mark.parametrize("text", POINTWISE + CONTRACTIONS + STATISTICS)
def test_the_bits_are_those_of_the_plan_with_numbers(text: str) -> None:
    """Of `direct` where it is one of several templates: a Winograd tile may be another at another extent."""
    compiled = compile_plan(text, threads=2, template="direct" if text in CONTRACTIONS else None)
    name = compiled.choice.template.name
    for rows in (3, 37):
        plan, arrays = at(compiled, rows)
        numbered = compile_plan(plan, threads=2, template=name)
        for got, want in zip(outputs(compiled(**arrays)), outputs(numbered(**arrays)), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_images_than_a_tile_has_are_all_that_is_written(rows: int, guarded: Guarded) -> None:
    """Where each output of a transposed convolution is a residue of its own, positions are images."""
    compiled = compile_plan("f32[*x2x1] -> conv_transpose1d(2, kernel=3) -> relu", template="direct")
    plan, arrays = at(compiled, rows)
    out = guarded(plan.output)
    compiled(out=out, **arrays)
    np.testing.assert_allclose(out, evaluated(plan, arrays)[0], atol=1e-5)


@settings(max_examples=60)
@given(rows=st.integers(1, 3000), text=st.sampled_from((POINTWISE[1], CONTRACTIONS[0])))
def test_any_extent(rows: int, text: str) -> None:
    compiled = compile_plan(text, threads=2)
    _plan, arrays = at(compiled, rows)
    assert_close(compiled, arrays, slack=64)


def test_a_saved_plan_packs_operands_of_any_extent(tmp_path: Path) -> None:
    compiled = compile_plan(PACKED[0], threads=2)
    compiled.save(tmp_path / "rows.fpk")
    loaded = load(tmp_path / "rows.fpk")
    for rows in (1, 37, 2):
        _, arrays = at(compiled, rows)
        np.testing.assert_array_equal(loaded(**arrays), compiled(**arrays))
    with pytest.raises(BuildError, match="`scale` is packed, and has the open axis"):
        exported_packings(compiled.records)


def test_operands_are_packed_once() -> None:
    compiled = compile_plan(CONTRACTIONS[0])
    _, arrays = at(compiled, 5)
    weight = arrays["weight"].copy()
    bound = compiled.bind(weight=weight, bias=arrays["bias"])
    want = bound(arrays["src"]).copy()
    weight[...] = 0
    np.testing.assert_array_equal(bound(arrays["src"]), want)
    np.testing.assert_array_equal(bound(arrays["src"][:2]), want[:2])
