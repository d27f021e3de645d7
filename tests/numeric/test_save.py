"""Saved values on every template: on the CPU, in Triton's interpreter, against float64; files with them."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

import fuseplan
from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu import CPU
from fuseplan.backends.triton import TRITON
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.execution.stages import decide
from fuseplan.export.c import CObject
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

GELUS = " -> ".join(["gelu"] * 4)  # so many functions that the CPU's stages become one of their own
PLANS = (
    "3x70 -> add -> save(total) -> layer_norm -> add(other=total)",
    "5x3x17 -> save(first) -> rms_norm -> save(normal) -> sigmoid -> mul(normal)",
    "2x13x9x11{l} -> relu -> save(kept) -> batch_norm -> add(other=kept)",
    "4x6x3x5, strides=100:1:30:6 -> bias -> save(kept) -> sigmoid -> mul(kept)",
    "7x5x4x3{l} -> save(a) -> relu -> batch_norm_training -> save(b) -> add(other=a)",
    "7x5x4x3{l} -> bias -> save(a) -> relu -> batch_norm_backward(relu, input=a, statistics=recomputed)",
    "5x9x3x4{l} -> relu -> save(a) -> batch_norm_training(per_activation) -> mul(a)",
    "3x5x8 -> glu -> save(gated) -> relu -> mul(gated)",
    "3x5x7 -> relu -> save(a) -> softmax -> save(b) -> add(other=a)",
    "7x5x4x3, nhwc -> save(a) -> sum((1, 3)) -> save(b) -> sigmoid -> mul(b)",
    "6x9 -> save(a) -> mean((0, 1)) -> add -> save(b) -> relu",
    "33x40 -> linear(24) -> bias -> save(pre) -> gelu -> mul(pre)",
    "2x50x64 -> matmul(72, batched=True) -> save(pre) -> silu -> save(post)",
    "2x16x7x7{l} -> conv2d(24, kernel=3) -> batch_norm -> add -> save(pre) -> relu -> add(other=pre)",
    "2x16x7x7{l} -> relu -> conv2d(24, kernel=3, stride=2, padding=1) -> save(pre) -> relu",
    "2x16x7x7{l} -> conv2d(24, kernel=1) -> bias -> save(pre) -> " + GELUS + " -> add(other=pre)",
    "2x9x6x5{l} -> conv2d(9, kernel=3, padding=1, groups=9) -> bias -> save(pre) -> relu",
    "2x4x6x6{l} -> conv2d(8, kernel=3, groups=4) -> bias -> save(pre) -> relu",
)
TEXTS = [
    text.replace("{l}", layout) for text in PLANS for layout in (("", ", nhwc") if "{l}" in text else ("",))
]
CPU_CASES = list(zip(TEXTS, cycle(("f32", "bf16", "f64")), cycle((32, 64, 16, 32)), strict=False))
GPU_CASES = list(zip(TEXTS, cycle(("f16", "f32", "bf16")), strict=False))


def plan_of(dtype: str, text: str) -> FusionPlan:
    tensor, _, chain = text.partition(" -> ")
    return FusionPlan.parse(f"{dtype}[{tensor}] -> {chain}")


@pytest.mark.parametrize(("text", "dtype", "width"), CPU_CASES)
def test_every_template_of_the_cpu(text: str, dtype: str, width: int) -> None:
    plan, target = plan_of(dtype, text), narrowed(width)
    kinds = [kind for kind in CPU.templates if refusal_of(plan, kind, target) is None]
    assert kinds
    for kind in kinds:
        assert_close(forced(plan, kind, target), random_arrays(plan, 5), slack=256)


@pytest.mark.parametrize(("text", "dtype"), GPU_CASES)
def test_every_plain_template_of_gpus(text: str, dtype: str) -> None:
    plan, target = plan_of(dtype, text), parse_target("triton:sm_90")
    kernel = lower(match(plan))
    kinds = [kind for kind in TRITON.templates if refusal_of(plan, kind, target) is None]
    plain = [kind for kind in kinds if kind is not Hopper]  # in Gluon: `test_hopper` emulates it
    assert plain
    for kind in plain:
        listed = list(kind.candidates(kernel, target, "default"))
        for template in {listed[0], listed[-1]}:
            assert isinstance(template, GpuTemplate)
            assert_interpreted(plan, template, slack=256)


def test_hopper_leaves_saved_values_of_other_dtypes_to_others() -> None:
    text = "f16[1024x512] -> linear(512) -> cast(f32) -> save(pre) -> cast(f16)"
    records = decide(text, "triton:sm_90")
    assert records.choice.template.name == "product"
    assert "saved" in [each.refusal.code for each in records.choice.considered if each.refusal]


def test_a_file_has_the_values(tmp_path: Path) -> None:
    plan = FusionPlan.parse("f32[9x40] -> linear(24) -> bias -> save(pre) -> gelu")
    arrays, path = random_arrays(plan, 2), tmp_path / "layer.fpk"
    compiled = fuseplan.compile(plan)
    compiled.save(path)
    for got, want in zip(fuseplan.load(path)(**arrays), compiled(**arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_c_program_gets_the_values(tmp_path: Path) -> None:
    """The name of the value is a word of C; its parameter is not."""
    plan = FusionPlan.parse("f32[6x50] -> relu -> save(int) -> sigmoid -> mul(int)")
    made = CObject(decide(plan, "cpu:avx2"), "layer", {})
    assert [each.text for each in made.arguments] == ["const float *src", "float *dst", "float *int_saved"]
    (tmp_path / "layer.o").write_bytes(made.object)
    subprocess.run(["cc", "-shared", "-o", "layer.so", "layer.o"], cwd=tmp_path, check=True)
    src = random_arrays(plan, 1)["src"]
    dst, kept = np.zeros_like(src), np.zeros_like(src)
    library = ctypes.CDLL(str(tmp_path / "layer.so"))
    library.layer(*(ctypes.c_void_p(each.ctypes.data) for each in (src, dst, kept)))
    np.testing.assert_array_equal(kept, np.maximum(src, 0))
    np.testing.assert_allclose(dst, plan.reference(src, {}), rtol=1e-6)
