"""Dropout: known words of the generator, Triton's own numbers, the same zeros everywhere, statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fuseplan
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.product import Product
from fuseplan.errors import PlanError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.words import philox, uniform
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact
from fuseplan.ops.dropout import Dropout
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import NUMPY
from interpreted import ask, interpret

# Of Random123's kat_vectors: counter, key, and the first word of the answer.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
)
TRITON = """
import triton
import triton.language as tl


@triton.jit
def draw(dst, seed):
    index = tl.arange(0, 1024)
    tl.store(dst + index, tl.rand(seed.to(tl.int64), index * 4194301))
"""


def zeros(plan: str | FusionPlan, **given: Any) -> NDArray[Any]:
    """Where a plan of ones is 0."""
    known = FusionPlan.parse(plan) if isinstance(plan, str) else plan
    made = fuseplan.compile(known)(np.ones(known.src.shape, np.float32), **given)
    return np.asarray(made == 0)


@pytest.mark.parametrize(("counter", "key", "word"), KNOWN)
def test_the_generator_has_the_words_that_are_known(counter: Any, key: Any, word: int) -> None:
    made = [[np.uint64(each) for each in words] for words in (counter, key)]
    assert philox(NUMPY, *map(tuple, made)) == word  # type: ignore[arg-type]


def test_numbers_are_tritons() -> None:
    dst, seed = np.zeros(1024, np.float32), 12345
    reply = ask(
        {
            "text": TRITON, "entry": "draw", "types": ["*fp32", "i32"], "values": [dst, seed],
            "grid": [1, 1, 1], "writes": [0], "cooperative": False,
        }
    )  # fmt: skip
    assert "error" not in reply, reply
    indices = np.arange(1024, dtype=np.float64) * 4194301
    indices %= 2.0**32
    own = uniform(NUMPY, indices, np.uint64(seed), np.uint64(0))
    np.testing.assert_array_equal(reply[0], own.astype(np.float32))


CHAINS = (
    "dropout(0.3, seed=5, offset=2)",
    "dropout(0.5) -> bias -> add -> relu",
    "linear(24) -> dropout(0.2)",
)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_the_zeros_are_the_same_on_every_target(chain: str, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[33x40] -> {chain}")
    arrays = random_arrays(plan, 1)
    arrays |= {key: abs(array) + 1 for key, array in arrays.items() if key != "weight"}  # no other zeros
    if "add" in chain:
        arrays |= {key: array * 0 for key, array in arrays.items() if key not in ("src", "weight")}
    want = evaluated(plan, arrays)[0] == 0
    target, kernel = parse_target("triton:sm_90"), lower(match(plan))
    kind = Product if "linear" in chain else GpuPointwise
    template = next(iter(kind.candidates(kernel, target, "default")))
    numbers = {each.key: each.value for each in plan.parameters}
    gpu = interpret(template, kernel, target, arrays, numbers)  # type: ignore[arg-type]
    for made in (exact(fuseplan.compile(plan)(**arrays), dtype), exact(gpu, dtype)):
        np.testing.assert_array_equal(made == 0, want)
    assert 0 < want.mean() < 1


def test_a_layout_does_not_change_the_zeros() -> None:
    first = zeros("f32[2x5x3x7] -> dropout(seed=3)")
    src = np.ones((2, 3, 7, 5), np.float32).transpose(0, 3, 1, 2)
    last = fuseplan.compile("f32[2x5x3x7, nhwc] -> dropout(seed=3)")(src) == 0
    np.testing.assert_array_equal(first, last)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_frequency_and_independence(p: float) -> None:
    """Of 2^18 elements with fixed seeds: within five standard deviations of the chance."""
    plan = f"f32[512x512] -> dropout({p})"
    first = zeros(plan, seed=1)
    others = [zeros(plan, seed=2), zeros(plan, seed=1, offset=1), np.roll(first, 1), np.roll(first, 512)]
    assert abs(first.mean() - p) < 5 * (p * (1 - p) / first.size) ** 0.5
    both = p * p
    for other in others:
        assert abs((first & other).mean() - both) < 5 * (both * (1 - both) / first.size) ** 0.5
    np.testing.assert_array_equal(first, zeros(plan, seed=1))


def test_none_and_all() -> None:
    src = np.ones((64, 64), np.float32)
    compiled = fuseplan.compile("f32[64x64] -> dropout(0)")
    np.testing.assert_array_equal(compiled(src), src)
    np.testing.assert_array_equal(compiled(src, p=1), src * 0)
    np.testing.assert_array_equal(compiled(src * np.inf, p=1), src * 0)


def test_what_is_kept_is_scaled_and_zeroed_infinities_are_zero() -> None:
    made = fuseplan.compile("f32[64x64] -> dropout(0.2, seed=9)")(np.full((64, 64), np.inf, np.float32))
    assert set(np.unique(made)) == {0, np.inf}
    kept = fuseplan.compile("f32[64x64] -> dropout(0.2, seed=9)")(np.ones((64, 64), np.float32))
    assert set(np.unique(kept)) == {np.float32(0), np.float32(1) / (1 - np.float32(0.2))}


def test_the_backward_pass_draws_the_same_zeros() -> None:
    chain = "[8x40] -> linear(24) -> bias -> gelu -> dropout(0.4, seed=7, offset=3)"
    plan = FusionPlan.parse("f64" + chain)
    backward = plan.backward(["src", "weight", "bias"])
    arrays, grad = random_arrays(plan, 1), np.random.default_rng(2).standard_normal((8, 24))
    exactly, step = backward.evaluate({**arrays, "grad": grad}), 1e-6
    for key in ("src", "bias"):
        way = np.random.default_rng(3).standard_normal(arrays[key].shape)
        ahead, behind = (
            evaluated(plan, {**arrays, key: arrays[key] + sign * step * way})[0] for sign in (1, -1)
        )
        slope = ((ahead - behind) * grad).sum() / (2 * step)
        np.testing.assert_allclose((exactly[key] * way).sum(), slope, rtol=1e-6)
    narrow = FusionPlan.parse("f32" + chain).backward(["src", "weight", "bias"])
    assert len(narrow.saved) == 1, "the input of gelu alone: zeros are not stored"
    given = {key: each.astype(np.float32) for key, each in arrays.items()}
    _, saved = fuseplan.compile(narrow.forward)(**given)
    compiled = narrow.compile()
    read = {"grad": grad.astype(np.float32), narrow.saved[0].name: saved} | given
    made = compiled(**{key: read[key] for key in ("grad", *compiled.reads)})
    for key, want in exactly.items():
        np.testing.assert_allclose(getattr(made, key), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fields", [{"p": 1.5}, {"p": -0.1}, {"seed": 0.5}, {"offset": 2**25}, {"seed": -1}])
def test_wrong_numbers_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=f"dropout: {next(iter(fields))} must be a"):
        Dropout(**fields)
