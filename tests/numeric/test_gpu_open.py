"""Open axes on GPUs: one text at many extents, interpreted, beside float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.order import TEMPLATES
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

TARGET = parse_target("triton:sm_90")
PLANS = (
    ("pointwise", "f32[*x33] -> bias -> relu"),
    ("pointwise", "f32[*x6x5x4, nhwc] -> batch_norm -> add -> relu"),
    ("pointwise", "f16[*x64x5x5] -> batch_norm -> relu"),
    ("pointwise", "f32[*x*x7] -> relu -> save(kept) -> add"),
    ("pointwise", "bf16[*x8x3, strides=30:3:1] -> gelu"),
    ("pointwise", "f32[*x1] -> scale"),
    ("pointwise", "f16[*x2048] -> bias -> relu"),
    ("pointwise", "f32[*x3x5x4, nhwc] -> batch_norm(per_activation)"),
    ("pointwise", "f32[*x34] -> relu -> glu(silu) -> save(kept) -> bias"),
    ("pointwise", "bf16[*x3x6x8, bhsd] -> rotary(dims=6)"),
    ("pointwise", "i32[*x10] -> dequantize(f32, per=row) -> silu"),
    ("product", "f32[*x7] -> linear(6) -> bias -> gelu"),
    ("product", "f32[*x70] -> add -> linear(65) -> bias"),
    ("product", "f16[*x33] -> linear(70) -> bias -> glu(silu) -> add"),
    ("product", "i8[*x48] -> linear(24) -> dequantize(f16) -> bias"),
    ("product", "i8[*x40] -> linear(10) -> dequantize(per=row)"),
    ("product", "f16[*x64] -> linear(136) -> bias -> save(pre) -> gelu"),
    ("product", "bf16[*x5x64, strides=400:64:1 of bsc] -> linear(96) -> add"),
    ("product", "f32[*x6x3x2, nhwc] -> conv2d(8, kernel=3, padding=1) -> batch_norm -> add -> relu"),
    ("product", "f16[*x16x3x3] -> conv2d(16, kernel=3, groups=4, stride=2) -> bias"),
    ("reduction", "f16[*x33] -> add -> save(kept) -> layer_norm"),
    ("reduction", "bf16[*x*x70] -> rms_norm -> bias"),
    ("reduction", "f32[*x1] -> layer_norm"),
    ("normalization", "f32[*x3x40] -> rms_norm -> quantize(i8, per=block, block=8)"),
    ("reduction", "f32[*x70] -> softmax"),
    ("reduction", "f16[*x5x3x7, nhwc] -> relu -> save(a) -> mean(hw) -> save(b) -> bias"),
    ("reduction", "f32[*x5x7] -> sum(axes=1) -> relu"),
    ("reduction", "f32[*x40] -> argmax(1)"),
    ("depthwise", "f32[*x5x6x4, nhwc] -> conv2d(5, kernel=2, groups=5) -> bias -> relu"),
    ("depthwise", "f16[*x3x6x6] -> relu -> max_pool2d(3, stride=2, padding=1)"),
    ("attention", "f32[*x2x5x8, bhsd] -> attention(is_causal=True, return_lse=True) -> add"),
    ("attention", "f16[*x4x3x16, bshd of bhsd] -> attention(keys=9, key_heads=2, bias_axes=bhst)"),
    ("attention", "f32[*x2x3x8, bhsd] -> attention(keys=20, is_padded=True, mask_axes=hst)"),
)
EXTENTS = (1, 3, 130)  # one; odd; more than a tile, and no whole number of them
# Fewer where a tile has fewer rows, or elements of one image alone.
FEWER = {"depthwise": (1, 3), "attention": (1, 3), "normalization": (1, 3, 33), "reduction": (1, 3, 33)}


def opened(name: str, text: str) -> tuple[Kernel, list[Template]]:
    """The kernel of a plan with open axes, and a template's candidates for it."""
    kernel = lower(match(FusionPlan.parse(text)))
    template = next(each for each in TEMPLATES if each.name == name)
    return kernel, list(template.candidates(kernel, TARGET, "default"))


@pytest.mark.parametrize(("name", "text"), PLANS)
@pytest.mark.part(3)
def test_one_kernel_serves_every_extent(name: str, text: str) -> None:
    _, found = opened(name, text)
    most = FEWER.get(name, EXTENTS)
    for template, extents in ((found[0], most), (found[-1], most[-1:])):
        assert isinstance(template, GpuTemplate)
        for extent in extents:
            assert_interpreted(text, template, TARGET, slack=200, extent=extent)


@pytest.mark.parametrize(("name", "text"), PLANS)
def test_no_text_depends_on_the_representative(name: str, text: str) -> None:
    """Its number is odd here, and larger than that of any plan."""
    kernel, found = opened(name, text)
    other = kernel.with_extent(40961)
    for template in found:
        source = template.emit(kernel, TARGET)
        assert template.emit(other, TARGET).text == source.text
        assert source.at(3).grid == template.emit(other, TARGET).at(3).grid


def test_more_programs_than_a_part_has_go_on() -> None:
    kernel, found = opened("pointwise", "f16[*x64] -> bias -> relu")
    fewer = next(
        replace(each, programs=2) for each in found if isinstance(each, GpuPointwise) and each.programs
    )
    for extent in EXTENTS:
        assert_interpreted("f16[*x64] -> bias -> relu", fewer, TARGET, extent=extent)
    assert fewer.emit(kernel, TARGET).at(10**6).grid == (2, 1, 1)


@pytest.mark.parametrize("plan", ["f32[*x60] -> layer_norm", "f32[*x60] -> rms_norm_backward"])
def test_programs_share_the_tiles_of_an_open_axis(plan: str) -> None:
    assert_interpreted(plan, GpuReduction(2, 64, 1, 4, resident=1, ahead=3), TARGET, slack=64, extent=301)
