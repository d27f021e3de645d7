"""Statistics of a product's rows as one kernel: nothing writes the product's result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.summary import ProductSummary as CpuSummary
from fuseplan.backends.triton.templates import summary_writer
from fuseplan.backends.triton.templates.summary import ProductSummary
from fuseplan.errors import Unsupported
from fuseplan.execution.stages import decide
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.data import random_arrays
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
    from fuseplan.compile import compile as compile_plan

    compiled = compile_plan(plan, "reference")
    assert_close(compiled, random_arrays(FusionPlan.parse(plan), 1))


@pytest.mark.parametrize("behind", ["softmax", "layer_norm", "log_softmax(axes=-1)"])
def test_a_result_that_is_read_again_is_refused_with_its_size(behind: str) -> None:
    with pytest.raises(Unsupported) as refused:
        decide(f"bf16[8192x4096] -> linear(128256) -> {behind}", "triton:sm_90")
    first = refused.value.refusals[0]
    assert (first.code, first.operator) == ("result-again", 1)
    assert "8192 x 128256 elements, 2.1 GB" in str(refused.value)


CPU_PLANS = (
    *PLANS,
    "f32[1x7] -> linear(2) -> cross_entropy",
    "f32[31x200] -> linear(150) -> cross_entropy(label_smoothing=0.1, z_loss=0.01, ignore_index=3)",
    "bf16[29x33] -> linear(75) -> bias -> cross_entropy -> cast(f32)",
    "f32[40x16] -> linear(64) -> scale -> bias -> logsumexp(-1)",
    "f32[2x6x5x3] -> conv2d(9, kernel=1) -> bias -> logsumexp(1)",
    "f64[3x6x5, ncw] -> conv1d(33, kernel=1) -> argmax(1)",
    "f32[5x9x16, bsc] -> linear(70) -> var(-1) -> mul",
    "f32[6x16] -> linear(70) -> cross_entropy -> cast(f64)",
)


@pytest.mark.part(2)
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("plan", CPU_PLANS)
def test_numbers_of_a_product_on_a_cpu(plan: str, width: int) -> None:
    made = FusionPlan.parse(plan)
    assert_close(forced(made, CpuSummary, narrowed(width, threads=2)), random_arrays(made, 1))


KNOBS = (
    CpuSummary(rows=4, vectors=1, block=2, block_panels=1),
    CpuSummary(rows=7, vectors=2, block=1, block_panels=2, group=2),
    CpuSummary(rows=5, vectors=1, block=3, block_panels=6, group=3),
    CpuSummary(rows=3, vectors=3, block=9, block_panels=4, group=4),
)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("knobs", KNOBS)
def test_states_of_many_tiles_groups_and_blocks(knobs: CpuSummary, threads: int) -> None:
    """Last tiles, panels and vectors that are no whole ones; the ignored class and all options."""
    plan = FusionPlan.parse(
        "f32[23x17] -> linear(203) -> bias -> cross_entropy(label_smoothing=0.1, z_loss=0.01, ignore_index=2)"
    )
    arrays = random_arrays(plan, 3)
    arrays["target"][4] = 2
    assert_close(forced(plan, CpuSummary, narrowed(32, threads=threads), knobs), arrays)


def test_a_maximum_that_grows_and_logits_of_any_size() -> None:
    """The maximum moves in every group, over a range in which an exponential alone would overflow."""
    plan = FusionPlan.parse("f32[9x4] -> linear(300) -> logsumexp(-1)")
    arrays = random_arrays(plan, 1)
    arrays["src"][...] = 1.0
    arrays["weight"][...] = np.linspace(-500, 500, 300, dtype=np.float32)[:, None]
    arrays["src"][1::2] *= -1
    knobs = CpuSummary(rows=4, vectors=1, block=2, block_panels=4, group=2)
    assert_close(forced(plan, CpuSummary, narrowed(32, threads=2), knobs), arrays)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("behind", ["sum(-1)", "logsumexp(-1)", "amax(-1)"])
def test_logits_that_are_no_numbers(behind: str, value: float) -> None:
    plan = FusionPlan.parse(f"f32[11x3] -> linear(77) -> bias -> {behind}")
    arrays = random_arrays(plan, 1)
    arrays["bias"][40] = value
    knobs = CpuSummary(rows=4, vectors=1, block=2, block_panels=2, group=2)
    assert_same_exceptions(forced(plan, CpuSummary, narrowed(32, threads=2), knobs), arrays)


def test_rows_of_infinite_logits_alone() -> None:
    plan = FusionPlan.parse("f32[5x3] -> linear(40) -> bias -> logsumexp(-1)")
    arrays = random_arrays(plan, 1)
    arrays["bias"][...] = -np.inf
    np.testing.assert_array_equal(forced(plan, CpuSummary, narrowed(32))(**arrays), -np.inf)


def test_targets_that_are_no_classes() -> None:
    plan = FusionPlan.parse("f32[4x3] -> linear(40) -> cross_entropy")
    arrays = random_arrays(plan, 1)
    arrays["target"][...] = 0, 40, -1, -100
    got = forced(plan, CpuSummary, narrowed(32))(**arrays)[0]
    np.testing.assert_array_equal(np.isnan(got).ravel(), [False, True, True, False])
    assert got.ravel()[3] == 0


def test_the_same_bits_on_any_number_of_threads() -> None:
    plan = FusionPlan.parse("f32[70x40] -> linear(500) -> cross_entropy")
    arrays, knobs = random_arrays(plan, 1), CpuSummary(rows=6, vectors=2, block=3, block_panels=4, group=2)
    made: list[Any] = [
        forced(plan, CpuSummary, narrowed(32, threads=threads), knobs)(**arrays) for threads in (1, 2, 2)
    ]
    for other in made[1:]:
        for one, each in zip(made[0], other, strict=True):
            np.testing.assert_array_equal(one, each)


def test_no_memory_of_a_cpu_has_the_result() -> None:
    kernel, target = (
        lower(match(FusionPlan.parse("f32[2048x1024] -> linear(50257) -> cross_entropy"))),
        narrowed(64),
    )
    for made in CpuSummary.candidates(kernel, target, "default"):
        assert isinstance(made, CpuSummary)
        logits = 2048 * 50257 * 4
        assert made.traffic(kernel, target).total < logits
        assert made.emit(kernel, target).workspace_bytes < logits / 50
        assert made.rows * made.group * made.vectors * 64 <= target.l1_bytes
        assert made.seconds(kernel, target) > 0


def test_panels_of_a_task_are_whole_groups() -> None:
    plan = FusionPlan.parse("f32[4x3] -> linear(40) -> amax(-1)")
    with pytest.raises(ValueError, match="a task's 3 panels are no whole groups of 2"):
        forced(plan, CpuSummary, narrowed(32), CpuSummary(4, 1, 1, 3, group=2))


def test_what_a_cpu_refuses_beside_a_product_with_statistics() -> None:
    def code(plan: str) -> str | None:
        refusal = refusal_of(plan, CpuSummary, narrowed(32))
        return None if refusal is None else refusal.code

    assert code("f32[4x8] -> linear(5) -> bias") == "no-summary"
    assert code("f32[1x3x8x8] -> conv2d(4, kernel=3) -> amax(1)") == "summed-product"
    assert code("f32[4x8] -> linear(5) -> add -> amax(-1)") == "operands-between"
    assert code("f32[4x8] -> linear(5) -> amax(-1)") is None


@pytest.mark.parametrize("chain", ["amax(-1)", "logsumexp(-1)", "bias -> argmax(-1)"])
@pytest.mark.parametrize("src", ["f32[6x4]", "bf16[33x7]", "f32[2x9x4, bsc]"])
def test_statistics_of_one_feature_are_refused(src: str, chain: str) -> None:
    with pytest.raises(Unsupported, match="one-feature"):
        match(FusionPlan.parse(f"{src} -> linear(1) -> {chain}"))
