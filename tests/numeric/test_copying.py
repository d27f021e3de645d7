"""Operands that each call packs: views copied by code of our own, other orders element by element."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fuseplan import FusionPlan
from fuseplan.backends.cpu.copying import copier
from fuseplan.backends.host import HostMemory
from fuseplan.backends.packers import MOST_KEPT, Room
from fuseplan.execution.select import select
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.packing import Packing, Pad, Reshape, Step, Tiles, Transpose
from fuseplan.kernels.target import parse_target
from fuseplan.tensors.arrays import address_of, view

BEHIND = 8  # elements that no copy writes


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("seed", range(8))
def test_views_are_copied_in_their_order(dtype: type, seed: int) -> None:
    draws, copied = Random(seed), 0
    for _ in range(60):
        shape = [draws.choice((1, 2, 3, 5, 8, 9, 16, 17, 33)) for _ in range(draws.randint(1, 4))]
        wide = [each + 2 for each in shape]
        room: NDArray[Any] = np.arange(np.prod(wide)).astype(dtype).reshape(wide)
        cut = draws.choice((slice(None), slice(1, -1), slice(None, None, -1)))
        array = room[(cut,) * len(shape)].transpose(draws.sample(range(len(shape)), len(shape)))
        steps = [step // array.itemsize for step in array.strides]
        copy = copier(array.shape, steps, array.itemsize)
        if copy is None:
            continue
        made: NDArray[Any] = np.full(array.size + BEHIND, -1, dtype)
        copy(address_of(made), address_of(array))
        np.testing.assert_array_equal(made[: array.size].reshape(array.shape), array)
        assert (made[array.size :] == -1).all()
        copied += 1
    assert copied > 40


def test_other_views_are_numpys() -> None:
    assert copier((3, 5), (5, 1), 2) is None
    assert copier((0, 5), (5, 1), 4) is None
    assert copier((2, 3, 4, 5, 6), (1, 2, 60, 13, 360), 4) is None


@pytest.mark.parametrize(
    "steps",
    [
        (Transpose((1, 0)), Tiles(0, 6), Transpose((0, 2, 1))),
        (Reshape((1, 10, 16)), Pad((1, 16, 16)), Transpose((0, 2, 1))),
        (Transpose((1, 0)),),
    ],
)
@pytest.mark.parametrize("order", ["C", "F", "gaps", "backwards"])
def test_a_packer_packs_as_packed_does(steps: tuple[Step, ...], order: str) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 30, 16)).astype(np.float32)
    ways = {"gaps": slice(None, None, 3), "backwards": slice(9, None, -1)}
    one, other = rows[:, ways[order]] if order in ways else rows[:, :10]
    if order == "F":
        one, other = (np.asfortranarray(each) for each in (one, other))
    packing = Packing((10, 16), "f32", steps)
    pack = HostMemory(copier).packer(packing, view(one, "weight"))
    for each in (other, one):
        address, owner = pack(each, address_of(each))
        want = packing.of(each)
        got: NDArray[np.float32] = np.ctypeslib.as_array((ctypes.c_float * want.size).from_address(address))
        np.testing.assert_array_equal(got.reshape(want.shape), want)
        del owner


def test_calls_at_once_have_rooms_of_their_own() -> None:
    one, other = Room(1000), Room(1024)
    places = {one.address, other.address}
    assert len(places) == 2
    assert all(each % 64 == 0 for each in places)
    del one, other
    assert {each.address for each in [Room(1000), Room(513)]} <= places


def test_large_rooms_are_given_back() -> None:
    room = Room(MOST_KEPT + 1)
    memory = weakref.ref(room._memory)
    del room
    assert memory() is None


def test_packing_counts_where_weights_are_others_in_each_launch() -> None:
    """Filters of Winograd's take three times as long as its products of few positions."""
    target = replace(parse_target("cpu:avx2"), threads=1)
    kernel = lower(match(FusionPlan.parse("f32[2x64x16x16, nhwc] -> conv2d(64, kernel=3, padding=1)")))
    assert select(kernel, target, tuned=False).template.name == "winograd"
    again = select(kernel, replace(target, repacks=True), tuned=False)
    assert again.template.name == "direct"
    (weight,) = kernel.operands
    lone = select(kernel, target, template=again.template.text)
    packed = again.template.packing(kernel, target, weight).seconds
    assert again.seconds == pytest.approx(lone.seconds + packed)
