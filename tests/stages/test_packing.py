"""How kernels read operands: the steps of a packing, their shapes and text, and the same steps by torch."""

import json

import numpy as np
import pytest
import torch

import fuseplan.kernels.packing
from fuseplan.backends.triton.memory import packed
from fuseplan.execution.runner import packings_of
from fuseplan.execution.select import select
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.packing import (
    Halves,
    Join,
    Packing,
    Pad,
    Product,
    Reshape,
    Rounded,
    Step,
    Thirds,
    Tiles,
    Transpose,
)
from fuseplan.kernels.target import parse_target
from fuseplan.language.dtypes import widen
from fuseplan.plans.plan import FusionPlan

STEPS: tuple[tuple[Step, ...], ...] = (
    (),
    (Reshape((20,)), Pad((24,))),
    (Transpose((1, 0)), Pad((8, 5)), Halves()),
    (Tiles(1, 3), Transpose((1, 0, 2))),
    (Product(((1.0, 0.0, -1.0, 0.5), (0.1, 0.2, 0.3, 0.4))),),
    (
        Join(
            ((Transpose((1, 0)),), (Pad((4, 8)), Join(((), (Reshape((32,)),))))),
        ),
    ),
)
PLANS = (
    "f32[1x64x14x14, nhwc] -> conv2d(70, kernel=3, padding=1) -> bias -> relu",
    "f32[1x32x14x14] -> conv2d(32, kernel=3, groups=32) -> batch_norm(per_activation)",
    "f32[1x32x14x14, nhwc] -> conv2d(32, kernel=3, groups=8) -> prelu(shared=True)",
    "f32[8x96] -> matmul(50, transposed=True) -> bias",
    "f16[1x64x14x14, nhwc] -> conv2d(70, kernel=3, padding=1) -> bias -> relu",
)


@pytest.mark.parametrize("steps", STEPS)
def test_extents_are_the_packed_arrays_and_a_packing_survives_its_text(steps: tuple[Step, ...]) -> None:
    packing = Packing((4, 5), "f32", steps)
    array = np.random.default_rng(3).standard_normal((4, 5)).astype(np.float32)
    assert packing.of(array).shape == packing.extents
    assert packing.of(array).dtype == array.dtype
    assert Packing.from_json(json.loads(json.dumps(packing.to_json()))) == packing


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("target", ["cpu:avx2", "cpu:avx512", "triton:sm_90"])
def test_every_element_of_a_weight_is_packed(text: str, target: str) -> None:
    """A packing in its text, of whole numbers that float32 holds: all of them are there, or their halves."""
    kernel, machine = lower(match(FusionPlan.parse(text))), parse_target(target)
    template = select(kernel, machine).template
    packings = packings_of(kernel, template, machine)
    assert packings.keys() == {operand.key for operand in kernel.operands}
    for packing in packings.values():
        assert packing is not None
        again = Packing.from_json(json.loads(json.dumps(packing.to_json())))
        values = 1 + np.arange(np.prod(packing.shape), dtype=np.float32).reshape(packing.shape)
        packed = again.of(values)
        assert packed.shape == packing.extents
        is_halved = Halves() in again.steps
        assert set(values.flat) <= set((packed.sum(0) if is_halved else packed).flat)


EDGES = np.array(
    [1.0, 1 + 2**-11, -1 - 2**-11 - 2**-12, 2**-140, np.finfo(np.float32).max, -np.inf, np.nan, 0.0],
    np.float32,
)


def test_factors_are_rounded_to_the_bits_that_are_multiplied() -> None:
    rounded = Packing((8,), "f32", (Rounded(),)).of(EDGES)
    np.testing.assert_array_equal(rounded[:3], np.array([1.0, 1 + 2**-10, -1 - 2**-10], np.float32))
    np.testing.assert_array_equal(rounded[4:], EDGES[4:])  # the largest would become infinite
    random = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    off = (Packing((1000,), "f32", (Rounded(),)).of(random) - random) / random
    assert np.abs(off).max() <= 2.0**-11 < 1.1 * np.abs(off).max()
    assert abs(off.mean()) < 0.05 * 2.0**-11  # to nearest: errors of both signs


@pytest.mark.parametrize(
    "steps", [(Reshape((2, 4)), Transpose((1, 0)), Pad((8, 5))), (Rounded(),), (Halves(),)]
)
def test_torch_packs_as_numpy_does(steps: tuple[Step, ...]) -> None:
    packing = Packing((8,), "f32", steps)
    made = packed(torch.from_numpy(EDGES), packing, keep=False)
    np.testing.assert_array_equal(made.numpy(), packing.of(EDGES))


@pytest.mark.parametrize("told", [[], [[4], "f32"], [[4], "f32", [["turn", [1]]]], [[4], "f32", [["pad"]]]])
def test_a_text_that_is_no_packing_is_refused(told: list[object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Packing.from_json(told)


def test_tiles_begin_early_where_the_last_would_be_short() -> None:
    tiles = Packing((7,), "f32", (Tiles(0, 3),)).of(np.arange(7, dtype=np.float32))
    np.testing.assert_array_equal(tiles, [[0, 1, 2], [3, 4, 5], [4, 5, 6]])


def test_a_product_is_summed_in_float64_and_says_where_it_is_too_large() -> None:
    columns = np.array([[2.0**24, 3e38], [1, 3e38], [-(2.0**24), 0]], np.float32)
    made = Product(((1.0, 1.0, 1.0),)).of(columns)
    np.testing.assert_array_equal(made, [[1, np.inf]])


def test_a_product_of_many_columns_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(1).standard_normal((3, 5, 7)).astype(np.float32)
    product = Product(((1.0, 2.0, 3.0), (0.1, 0.2, 0.3)))
    whole = product.of(columns)
    monkeypatch.setattr(fuseplan.kernels.packing, "PRODUCTS", 4 * 6)
    np.testing.assert_array_equal(product.of(columns), whole)


def test_halves_add_up_to_the_whole() -> None:
    generator = np.random.default_rng(1)
    whole = generator.standard_normal(1000).astype(np.float32) * np.exp2(generator.integers(-60, 60, 1000))
    whole = whole.astype(np.float32)
    high, left = Halves().of(whole)
    np.testing.assert_array_equal(high + left, whole)
    assert not (high.view(np.int32) & 0x1FFF).any(), "the first half has at most 11 bits"
    assert (np.abs(left) <= np.abs(whole) * 2.0**-11).all()


@pytest.mark.parametrize(("shape", "axis"), [((1000,), 0), ((1000,), 1), ((40, 25), 1), ((2, 5, 100), 2)])
def test_thirds_add_up_to_the_whole(shape: tuple[int, ...], axis: int) -> None:
    generator = np.random.default_rng(1)
    whole = generator.standard_normal(shape) * np.exp2(generator.integers(-90, 90, shape))
    whole = whole.astype(np.float32)
    step = Thirds(axis)
    parts = step.of(whole)
    assert parts.shape == step.after(shape)
    assert parts.dtype == np.uint16
    np.testing.assert_array_equal(widen(parts, "bf16").astype(np.float64).sum(axis), whole)


def test_the_last_third_has_what_is_not_finite() -> None:
    first, second, last = widen(Thirds(0).of(EDGES), "bf16")
    np.testing.assert_array_equal(last[4:7], [np.inf, -np.inf, np.nan])  # the largest would become infinite
    assert not first[4:].any()
    assert not second[4:].any()
    every_bit = np.array([0x7FFFFFFF, 0x7F800001], np.int32).view(np.float32)
    assert np.isnan(widen(Thirds(0).of(every_bit), "bf16")[2]).all()


def test_what_is_no_number_stays_none() -> None:
    every_bit = np.array([0x7FFFFFFF, 0x7FC00000], np.int32).view(np.float32)
    assert np.isnan(Halves().of(every_bit)[0]).all()
    np.testing.assert_array_equal(Halves().of(np.array([-np.inf], np.float32)), [[0.0], [-np.inf]])


@pytest.mark.parametrize(
    "steps", [(), (Transpose((1, 0)),), (Transpose((1, 0)), Pad((8, 5))), STEPS[2], (Halves(),)]
)
@pytest.mark.parametrize("keep", [False, True])
def test_torch_packs_the_same_bytes(steps: tuple[Step, ...], keep: bool) -> None:
    torch = pytest.importorskip("torch")
    from fuseplan.backends.triton.memory import packed

    whole = np.random.default_rng(2).standard_normal((4, 5)).astype(np.float32)
    made = packed(torch.from_numpy(whole), Packing((4, 5), "f32", steps), keep=keep)
    np.testing.assert_array_equal(made.numpy(), Packing((4, 5), "f32", steps).of(whole))
