"""The order in which GPU kernels read operands, and f32 in halves that a tensor core multiplies."""

import numpy as np
import pytest

from fuseplan.backends.triton.template import Packing, in_halves


def test_halves_add_up_to_the_whole() -> None:
    generator = np.random.default_rng(1)
    whole = generator.standard_normal(1000).astype(np.float32) * np.exp2(generator.integers(-60, 60, 1000))
    whole = whole.astype(np.float32)
    high, left = in_halves(whole)
    np.testing.assert_array_equal(high + left, whole)
    assert not (high.view(np.int32) & 0x1FFF).any(), "the first half has at most 11 bits"
    assert (np.abs(left) <= np.abs(whole) * 2.0**-11).all()


def test_what_is_no_number_stays_none() -> None:
    every_bit = np.array([0x7FFFFFFF, 0x7FC00000], np.int32).view(np.float32)
    assert np.isnan(in_halves(every_bit)[0]).all()
    np.testing.assert_array_equal(in_halves(np.array([-np.inf], np.float32)), [[0.0], [-np.inf]])


@pytest.mark.parametrize("halves", [False, True])
def test_extents_count_the_halves(halves: bool) -> None:
    assert Packing((0, 1), (3, 4), "f32", halves).extents == ((2, 3, 4) if halves else (3, 4))


def test_torch_makes_the_same_halves() -> None:
    torch = pytest.importorskip("torch")
    from fuseplan.backends.triton.memory import packed

    whole = np.random.default_rng(2).standard_normal((5, 7)).astype(np.float32)
    made = packed(torch.from_numpy(whole), (5, 7), Packing((1, 0), (8, 5), "f32", True), keep=False)
    padded = np.pad(whole.T, ((0, 1), (0, 0)))
    np.testing.assert_array_equal(made.numpy(), in_halves(padded))
