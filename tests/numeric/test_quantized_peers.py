"""Peers on plans of integers: each gives the plan's result, or says why it does not take the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.peers.quantized_peers import ON_INTEGERS, FuseplanF32, Integer, Qdq, QdqExact, QLinear
from benchmarks.suite import load
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.layers import CannotRunError
from fuseplan.plans.plan import FusionPlan

MOVED = "dequantize(i16, zero_points=True) -> "
PRODUCT = (
    f"u8[9x40] -> {MOVED}linear(12) -> dequantize(per=channel) -> bias -> quantize(u8, zero_points=True)"
)
IMAGE = (
    f"u8[2x5x9x8, nhwc] -> {MOVED}conv2d(6, kernel=(3, 1), stride=(1, 2), padding=((1, 0), (0, 0))) -> "
    "dequantize(per=channel) -> bias -> hardswish"
)
OF_I8 = "i8[9x40] -> linear(12) -> dequantize -> bias -> quantize(i8, zero_points=True)"
FIRST = (
    "u8[2x6x9x8] -> conv2d(6, kernel=3, groups=3) -> dequantize(per=channel) -> bias -> relu -> quantize(u8)"
)


def numbers(plan: FusionPlan) -> dict[str, Any]:
    """Random arrays with zero points, and with weights whose sums do not saturate anywhere."""
    arrays = random_arrays(plan, 2)
    arrays["weight"] //= 4
    for key in (each for each in arrays if each.startswith("zero_point")):
        arrays[key] = arrays[key] + np.asarray(11, arrays[key].dtype)
    return arrays


@pytest.mark.parametrize("peer", ON_INTEGERS)
@pytest.mark.parametrize("text", [PRODUCT, OF_I8, IMAGE, FIRST])
def test_each_peer_gives_the_result_of_the_plan(peer: type[Any], text: str) -> None:
    plan = FusionPlan.parse(text)
    if peer is QLinear and plan.output.dtype == "f32":
        pytest.skip("its results are integers")
    arrays = numbers(plan)
    got, want = peer(1).prepare(plan, [arrays]).result(), reference(plan, arrays)
    assert got.dtype == np.dtype({"u8": np.uint8, "i8": np.int8, "f32": np.float32}[plan.output.dtype])
    spread = np.abs(np.asarray(got, np.float64) - want)
    if plan.output.dtype == "f32":
        assert spread.max() <= 1e-3 * np.abs(want).max()  # biases are whole numbers of sums
    else:
        assert len(np.unique(got)) > 9
        assert spread.max() <= 1
        assert (spread > 0).mean() < 0.02


@pytest.mark.parametrize(
    ("peer", "text", "told"),
    [
        (Qdq, "f32[3x4] -> linear(5)", "of i8 and u8 with scales behind"),
        (Integer, "u8[3x4] -> linear(5)", "of i8 and u8 with scales behind"),
        (FuseplanF32, "u8[3x4] -> dequantize -> linear(5)", "of i8 and u8 with scales behind"),
        (QLinear, IMAGE, "no operators behind the sum"),
        (QLinear, PRODUCT.replace("-> bias", "-> bias -> relu"), "a relu is the least integer"),
    ],
)
def test_what_a_peer_does_not_take(peer: type[Any], text: str, told: str) -> None:
    plan = FusionPlan.parse(text)
    with pytest.raises(CannotRunError, match=told):
        peer(1).prepare(plan, [numbers(plan)])


def test_a_suite_says_its_peers() -> None:
    suite = load("integers")
    assert suite.peers == "fuseplan:f32,qdq,qlinear,integer"
    assert QdqExact.name.startswith("qdq")
