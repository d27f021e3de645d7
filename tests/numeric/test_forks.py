"""Forks while other threads compile and launch: the child compiles and computes as its parent does."""

import ctypes
import os
import threading
from functools import partial

import numpy as np
import pytest

import fuseplan
from forked import holds_in_child
from fuseplan.backends.cpu.runtime import Pool

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forking with threads is what is tested
]
FORKS = 6  # of forty children, 38 hung once


def is_right(channels: int) -> bool:
    """Whether a plan that is compiled now computes a sum of `channels` ones."""
    compiled = fuseplan.compile(f"f32[5x{channels}] -> matmul(7) -> relu", threads=2, cache=False)
    weight = np.ones(compiled.plan.operands[0].shape, np.float32)
    return bool((compiled(np.ones((5, channels), np.float32), weight=weight) == channels).all())


def test_a_child_compiles_while_a_thread_of_its_parent_does() -> None:
    done = threading.Event()

    def compile_on() -> None:
        while not done.is_set():
            assert is_right(3)

    other = threading.Thread(target=compile_on)
    other.start()
    try:
        for _ in range(FORKS):
            assert holds_in_child(partial(is_right, 4))
    finally:
        done.set()
        other.join()


def test_a_child_calls_what_its_parent_bound() -> None:
    layer = fuseplan.compile("f32[64x33] -> bias -> relu", threads=2).bind(bias=np.ones(33, np.float32))
    src = np.ones((64, 33), np.float32)
    assert (layer(src) == 2).all()
    assert holds_in_child(lambda: bool((layer(src) == 2).all()) and is_right(5))


ENTERED, TAKEN = 8, 32  # words of a pool's state


def test_a_launch_that_a_fork_cuts_off_is_forgotten_in_the_child() -> None:
    """As the child finds it: another thread's launch has the workers, and a worker is inside."""
    made = Pool(most=2)
    words = (ctypes.c_int64 * 40).from_address(made._state)
    words[ENTERED] = words[TAKEN] = 1

    def is_at_rest() -> bool:
        return not any(words) and made.workers == 0

    assert holds_in_child(is_at_rest)
    words[ENTERED] = words[TAKEN] = 0
    made.stop()
