"""Normalizations of rows: torch's numbers, every candidate on a CPU, Triton's interpreter, refusals."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import pytest
import torch

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import PlanError
from fuseplan.execution.stages import decide
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret_all

SHAPES = (
    "1x300",
    "700x7",
    "3x5x17",
    "2x3x5x33",
    "3x5x1",
    "1x1",
    "2x2x2x3x64",
    "3x5x7, strides=80:16:2 of bsc",
)
CHAINS = (
    "layer_norm",
    "layer_norm(affine=False) -> relu",
    "rms_norm -> bias -> add",
    "add -> gelu -> layer_norm -> scale",
)


@pytest.mark.part(4)
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [16, 32, 64])
def test_any_shape_and_dtype(dtype: str, chain: str, shape: str, width: int) -> None:
    plan = FusionPlan.parse(f"{dtype}[{shape}] -> {chain}")
    assert_close(forced(plan, Reduction, narrowed(width)), random_arrays(plan, 5), slack=64)


@pytest.mark.parametrize("chain", CHAINS)
def test_every_candidate(chain: str) -> None:
    plan, target = FusionPlan.parse(f"f32[37x70] -> {chain}"), narrowed(32)
    found = list(Reduction.candidates(lower(match(plan)), target, "default"))
    assert found
    for candidate in found:
        assert_close(forced(plan, Reduction, target, candidate), random_arrays(plan, 5), slack=64)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("shape", ["37x70", "5x1000", "3x4x7"])
def test_triton_computes_the_plan(dtype: str, chain: str, shape: str) -> None:
    assert_interpreted(f"{dtype}[{shape}] -> {chain}", GpuReduction, slack=64)


@pytest.mark.parametrize("shape", [(4, 6, 32), (5, 32), (2, 3, 4, 32)])
@pytest.mark.parametrize(
    ("word", "layer"),
    [
        ("layer_norm", torch.nn.LayerNorm(32)),
        ("layer_norm(affine=False)", torch.nn.LayerNorm(32, elementwise_affine=False)),
        ("rms_norm", torch.nn.RMSNorm(32, eps=1e-5)),
    ],
)
def test_torchs_layer(word: str, layer: Any, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) * 3 + 1
    names = {"weight": "scale", "bias": "shift"}
    given = {
        names[name]: torch.randn(value.shape, generator=generator) for name, value in layer.named_parameters()
    }
    layer.load_state_dict({name: given[names[name]] for name, _ in layer.named_parameters()})
    with torch.no_grad():
        want = layer(x)
    made = compile_plan(f"f32[{'x'.join(map(str, shape))}] -> {word}")(x, **given)
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)


def test_a_row_of_large_mean_keeps_its_digits() -> None:
    x = np.random.default_rng(2).standard_normal((3, 400)).astype(np.float32) + np.float32(1e4)
    wide = x.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    made = compile_plan("f32[3x400] -> layer_norm(affine=False)")(x)
    np.testing.assert_allclose(made, want, atol=2e-3)


@pytest.mark.parametrize(
    "text",
    [
        "f32[3x5x7, bcs of bsc] -> relu -> layer_norm",
        "f32[3x5x7] -> layer_norm -> batch_norm(per_activation)",
    ],
)
def test_uneven_rows_and_operands_of_an_image(text: str) -> None:
    plan = FusionPlan.parse(text)
    assert_close(compile_plan(plan), random_arrays(plan, 5), slack=64)


def test_channels_at_axis_1_are_not_rows() -> None:
    with pytest.raises(PlanError, match="layer_norm: it reads the last axis"):
        FusionPlan.parse("f32[2x5x7, ncw] -> layer_norm")


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    "template",
    [
        GpuReduction(1, 64, 1, 4),
        GpuReduction(1, 16, 1, 4, lanes=True),
        GpuReduction(1, 16, 1, 4, lanes=True, ahead=1),
    ],
)
def test_a_gpus_softmax_of_infinities_and_nan(dtype: str, template: GpuReduction) -> None:
    """Where a row is held, dst has the exponentials of the sum, which is 0 of nothing but -inf."""
    kernel = lower(match(FusionPlan.parse(f"{dtype}[5x40] -> softmax")))
    src = np.random.default_rng(1).standard_normal((5, 40)).astype(dtype_of(dtype).array)
    src[0, 3], src[1, 9], src[2, 7], src[3] = -np.inf, np.inf, np.nan, -np.inf
    got, _ = interpret_all(template, kernel, parse_target("triton:sm_90"), {"src": src})
    want = torch.softmax(torch.from_numpy(src.astype(np.float64)), 1).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == "f16" else 1e-5, atol=1e-7)


def test_two_rows_share_what_the_first_cache_does_not_hold() -> None:
    """Scale and shift of 65,536 elements each, and no less; where there is a row besides."""
    for plan, cells in (
        ("bf16[4096x65536] -> layer_norm", 2),
        ("bf16[4096x65536] -> rms_norm", 1),
        ("bf16[8192x32768] -> layer_norm", 1),
        ("bf16[1x65536] -> layer_norm", 1),
    ):
        chosen = decide(plan, "triton:sm_90").choice.template
        assert isinstance(chosen, GpuReduction)
        assert chosen.cells == cells, plan


def test_a_gpus_small_rows_share_programs() -> None:
    """6,836 programs of 4 rows take longer to start than to run, and those that stay wait for their loads."""
    for plan, cells in (("bf16[27344x64] -> sum(-1)", 16), ("bf16[16384x2048] -> cross_entropy", 1)):
        chosen = decide(plan, "triton:sm_90").choice.template
        assert isinstance(chosen, GpuReduction)
        assert chosen.cells >= cells, plan
        assert not chosen.resident, plan


def test_a_gpus_uneven_rows_are_few_elements_of_each_lane() -> None:
    """In a loop over blocks, lanes that lie side by side have 16 elements, at most."""
    records = decide("bf16[8192x50257] -> cross_entropy", "triton:sm_90")
    listed = GpuReduction.candidates(records.kernel, records.target, "default")
    loops = [each for each in listed if isinstance(each, GpuReduction) and each.elements < 50257]
    assert loops
    assert all(each.lanes and each.elements <= each.warps * 32 * 16 for each in loops)


@pytest.mark.parametrize("width", [144, 150])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "chain",
    [
        "layer_norm -> gelu",
        "add -> save(sum) -> rms_norm -> dynamic_quantize(i8)",
        "scale -> log_softmax",
        "layer_norm(affine=False) -> mul -> cast(f32)",
        "layer_norm_backward",
        "cross_entropy_backward",
    ],
)
def test_a_gpu_keeps_rows_in_pieces(chain: str, dtype: str, width: int) -> None:
    """Where a row is whole vectors a lane has all of one or nothing; the row is read once in any case.

    Vectors have 16 bytes of the widest that lies along rows, src or dst.
    """
    plan, template = f"{dtype}[5x{width}] -> {chain}", GpuReduction(1, 64, 1, 4, lanes=True, ahead=1)
    assert_interpreted(plan, template, slack=64)
    text = template.emit(lower(match(FusionPlan.parse(plan))), parse_target("triton:sm_90")).text
    assert "for block" not in text
    assert ("* 4) < 144" in text) == (
        width == 144 and "f32" in (dtype, str(lower(match(FusionPlan.parse(plan))).dst.dtype))
    )


@pytest.mark.parametrize("width", [144, 150, 151])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("chain", "again", "once", "goes_back"),
    [
        ("cross_entropy", 0, 1, False),
        ("logsumexp(-1)", 0, 1, False),
        ("softmax_backward", 2, 3, True),
        ("add -> save(sum) -> softmax", 2, 4, True),
        ("add -> save(sum) -> rms_norm", 3, 4, False),
    ],
)
def test_a_gpus_caches_are_told_what_is_read_again(
    chain: str, again: int, once: int, goes_back: bool, dtype: str, width: int
) -> None:
    """Loads of the first pass stay in the caches, those of the last one and its stores do not.

    Rows whose loads are short lie across lanes, unless they meet vectors of operands that all share.
    """
    plan, template = f"{dtype}[5x{width}] -> {chain}", GpuReduction(1, 64, 1, 4, lanes=True)
    assert_interpreted(plan, template, slack=64)
    text = template.emit(lower(match(FusionPlan.parse(plan))), parse_target("triton:sm_90")).text
    of_elements = [line for line in text.splitlines() if "element_" in line]
    counts = [sum(policy in line for line in of_elements) for policy in ("evict_last", "evict_first")]
    assert counts == [again, once]
    assert ("-1, -1)" in text) == goes_back
    vector = 4 if dtype == "f32" else 8
    loaded = gcd(vector, width)  # elements of a load: two of rows of 150
    is_across = vector // loaded > loaded and "norm" not in chain
    assert (f"[None, :] * {64 * loaded // vector})" in text) == is_across
