"""Operands that each call gives: checked once, then by how they look."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.execution.run import BoundPlan
from fuseplan.measure.data import deviation, random_arrays
from fuseplan.tensors.arrays import aligned_bytes, empty

TEXT = "f32[2x5x9x7, nhwc] -> conv2d(6, kernel=3, padding=1) -> bias -> add -> leaky_relu(0.1)"


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_operands_that_look_like_those_before_are_read_anew(target: str) -> None:
    compiled = fuseplan.compile(TEXT, target, threads=2)
    arrays = random_arrays(compiled.plan, seed=5)
    given = {key: value for key, value in arrays.items() if key not in ("src", "other")}
    src, other, bound = arrays["src"], arrays["other"], compiled.bind(**given)
    out = np.empty((2, 9, 7, 6), np.float32).transpose(0, 3, 1, 2)
    strided = np.zeros((*other.shape[:-1], 2 * other.shape[-1]), other.dtype)[..., ::2]
    exact = {key: np.asarray(value, np.float64) for key, value in given.items()}

    def right(factor: float) -> np.ndarray:
        return compiled.plan.reference(np.float64(src), exact | {"other": factor * np.float64(other)})

    def refused(*ends: object, **named: object) -> str:
        with pytest.raises(ArgumentError) as met:
            bound(*ends, **named)
        return str(met.value)

    for factor in (1.0, -2.0):  # the first call checks all, later ones how tensors look
        assert deviation(bound(src, other=np.float32(factor) * other), right(factor)) < 1e-5
        assert "`other`" in refused(src, other=other[:1])
        assert "`other`" in refused(src, other=strided)
        assert "`other`" in refused(src, other=other.astype(np.float64))
        assert "1 operand missing" in refused(src)
        assert "overlap" in refused(src, other=other, out=other)
        assert deviation(bound(src, other=np.float32(factor) * other, out=out), right(factor)) < 1e-5
    tensors = torch.from_numpy(src), torch.from_numpy(other)
    for _ in range(2):
        assert deviation(bound(tensors[0], other=tensors[1]).numpy(), right(1.0)) < 1e-5
    assert "gradient" in refused(tensors[0], other=tensors[1].requires_grad_())


def test_an_operand_along_an_axis_is_read_where_it_lies_if_it_is_aligned() -> None:
    bound = fuseplan.compile("f32[3x64] -> scale", "cpu").bind()
    src, memory = torch.randn(3, 64), torch.randn(4, 80)
    for begin in (0, 0, 1, 16, 0, 3):
        for given in (memory[0, begin : begin + 64], memory.t()[begin : begin + 64, 0].clone()):
            torch.testing.assert_close(bound(src, scale=given), src * given)
            out = torch.empty_like(src)
            torch.testing.assert_close(bound(src, scale=given, out=out), src * given)
        with pytest.raises(ArgumentError, match="overlap"):
            bound(src, scale=out[0], out=out)


PACKED = (
    "f32[6x20] -> linear(10) -> bias -> relu",
    "f32[6x20] -> linear(64) -> bias",
    "f32[6x40] -> linear_weight_gradient(24)",
    "f32[6x40] -> linear_weight_gradient(7)",
    "f32[1x16x12x12, nhwc] -> conv2d(32, kernel=3, padding=1) -> bias",
    "f16[6x40] -> linear(10) -> bias",
    "f32[6x20] -> linear(10) -> bias -> save(sums) -> relu",
)


def at_element(value: np.ndarray, begin: int) -> np.ndarray:
    """A copy that begins at an element of new memory."""
    memory = aligned_bytes(value.nbytes + begin * value.itemsize).view(value.dtype)
    made = memory[begin:].reshape(value.shape)
    made[...] = value
    return made


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("text", PACKED)
def test_operands_that_each_call_packs_are_checked_once(
    text: str, kind: Callable[[np.ndarray], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = fuseplan.compile(text, "cpu", threads=2)
    bound, plan = compiled.bind(), compiled.plan

    def is_right(seed: int, begin: int = 0) -> bool:
        arrays = random_arrays(plan, seed)
        src = empty(plan.src)
        src[...] = arrays.pop("src")
        want, results = plan.evaluate(
            np.float64(src), {key: np.float64(each) for key, each in arrays.items()}
        )
        made = bound(kind(src), **{key: kind(at_element(each, begin)) for key, each in arrays.items()})
        pairs = zip(made, (want, *results.values()), strict=True) if plan.results else [(made, want)]
        return all(deviation(np.asarray(one), other) < 1e-3 for one, other in pairs)

    assert is_right(seed=3)
    monkeypatch.delattr(BoundPlan, "_checked")
    for begin in (0, 1, 16, 3):
        assert is_right(4, begin)
        assert is_right(3, begin)


def test_a_packed_operand_that_looks_otherwise_is_checked_anew() -> None:
    bound = fuseplan.compile("f32[6x20] -> linear(32) -> bias", "cpu").bind()
    src, weight, bias = (torch.ones(shape) for shape in ((6, 20), (32, 20), (32,)))
    turned, wide = torch.randn(20, 32).t(), torch.randn(32, 40)[:, ::2]
    for given in (weight, turned, wide, weight.clone(), turned, weight):
        want = torch.nn.functional.linear(src, given, bias)
        for _ in range(2):
            torch.testing.assert_close(bound(src, weight=given, bias=bias), want)
        weight.mul_(2.0)  # written in place
    for _ in range(2):
        with pytest.raises(ArgumentError, match="overlap"):
            bound(src, weight=weight, bias=bias, out=weight.view(-1)[:192].view(6, 32))
        with pytest.raises(ArgumentError, match="wrong shape"):
            bound(src, weight=weight[:31], bias=bias)
        with pytest.raises(ArgumentError, match="gradient"):
            bound(src, weight=torch.nn.Parameter(weight), bias=bias)
        with torch.no_grad():
            bound(src, weight=torch.nn.Parameter(weight), bias=bias)
        with torch.inference_mode():
            got = bound(src, weight=weight.clone(), bias=bias)
        torch.testing.assert_close(got, torch.nn.functional.linear(src, weight, bias))


@pytest.mark.parametrize("text", PACKED)
def test_no_operand_of_a_call_is_kept_alive(text: str) -> None:
    bound = fuseplan.compile(text, "cpu", threads=2).bind()
    arrays = {key: torch.from_numpy(value) for key, value in random_arrays(bound._runner.plan, 3).items()}
    src = torch.from_numpy(empty(bound._runner.plan.src)).copy_(arrays.pop("src"))
    for _ in range(2):
        bound(src, **arrays)
    alive = [weakref.ref(each) for each in arrays.values()]
    arrays.clear()
    gc.collect()
    assert not any(each() is not None for each in alive)
