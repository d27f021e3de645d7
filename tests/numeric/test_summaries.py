"""Statistics of a product's rows as one kernel: nothing writes the product's result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseplan.backends.triton.templates import summary_writer
from fuseplan.backends.triton.templates.summary import ProductSummary
from fuseplan.errors import Unsupported
from fuseplan.execution.stages import decide
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

PLANS = (
    "f32[5x19] -> linear(37) -> cross_entropy(index_dtype=i64)",
    "bf16[37x40] -> linear(301) -> cross_entropy",
    "f16[130x24] -> linear(65) -> bias -> cross_entropy(label_smoothing=0.1, z_loss=0.001)",
    "f16[3x7x24, bsc] -> linear(67) -> cross_entropy(ignore_index=2)",
    "f64[9x12] -> linear(20) -> cross_entropy",
    "f16[70x32] -> matmul(513) -> logsumexp(axes=-1)",
    "f32[33x17] -> linear(45) -> amax(axes=-1, keepdim=True)",
    "f16[33x16] -> linear(129) -> argmax(axes=-1)",
    "f32[21x8] -> relu -> linear(33) -> sum(axes=-1) -> relu",
    "f32[21x8] -> linear(33) -> bias -> gelu -> mean(axes=-1)",
    "f32[21x8] -> linear(33) -> bias -> var(axes=-1)",
    "f32[21x8] -> linear(33) -> prod(axes=-1)",
    "bf16[21x8] -> linear(33) -> amin(axes=-1) -> add",
    "f32[2x6x5x3, nhwc] -> conv2d(9, kernel=1) -> amax(axes=1)",
)
SMALL = ProductSummary(rows=16, features=16, depth=16, warps=1, stages=1)


@pytest.mark.parametrize("plan", PLANS)
def test_numbers_of_a_product(plan: str) -> None:
    assert_interpreted(plan, ProductSummary, slack=64.0)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("plan", PLANS[1:3])
def test_states_of_more_tiles_than_are_merged_at_a_time(
    plan: str, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_writer, "STATES", 2)
    assert_interpreted(plan, replace(SMALL, swapped=swapped), slack=64.0)


def test_the_kernel_has_no_tensor_of_the_result() -> None:
    kernel = lower(match(FusionPlan.parse("bf16[8192x2048] -> linear(32000) -> cross_entropy")))
    assert isinstance(kernel.centre, Summary)
    assert kernel.reduced_count == 32000
    assert kernel.flops >= 2 * 8192 * 2048 * 32000
    target = parse_target("triton:sm_90")
    made = next(iter(ProductSummary.candidates(kernel, target, "default")))
    logits = 8192 * 32000 * 2
    assert made.traffic(kernel, target).total < logits
    assert made.emit(kernel, target).workspace_bytes < logits / 20


@pytest.mark.parametrize("plan", PLANS)
def test_the_reference_computes_them(plan: str) -> None:
    from closeness import assert_close
    from fuseplan.compile import compile as compile_plan
    from fuseplan.measure.data import random_arrays

    compiled = compile_plan(plan, "reference")
    assert_close(compiled, random_arrays(FusionPlan.parse(plan), 1))


@pytest.mark.parametrize("behind", ["softmax", "layer_norm", "log_softmax(axes=-1)"])
def test_a_result_that_is_read_again_is_refused_with_its_size(behind: str) -> None:
    with pytest.raises(Unsupported) as refused:
        decide(f"bf16[8192x4096] -> linear(128256) -> {behind}", "triton:sm_90")
    first = refused.value.refusals[0]
    assert (first.code, first.operator) == ("result-again", 1)
    assert "8192 x 128256 elements, 2.1 GB" in str(refused.value)
