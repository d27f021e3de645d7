"""Locks over forks, and attributes that are made without one."""

import os
import threading
import time
from pathlib import Path

import pytest

from forked import holds_in_child
from fuseplan.stores import cache
from fuseplan.system import limits, locks
from fuseplan.system.locks import Lock, cached_property, held_across_forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forking with threads is what is tested
]


class Held:
    """A block of code that another thread is in until the test leaves it."""

    def __init__(self) -> None:
        self.entered, self.done = threading.Event(), threading.Event()

    def stay(self) -> int:
        self.entered.set()
        self.done.wait()
        return 1


def taken(lock: Lock) -> bool:
    with lock:
        return True


def test_a_child_finds_a_lock_free_that_another_thread_holds() -> None:
    lock, held = Lock(), Held()

    def hold() -> None:
        with lock:
            held.stay()

    other = threading.Thread(target=hold)
    other.start()
    held.entered.wait()
    assert holds_in_child(lambda: taken(lock))
    held.done.set()
    other.join()
    assert taken(lock)


def test_a_lock_is_one_threads_and_that_one_may_take_it_again() -> None:
    lock, inside, most = Lock(), 0, 0

    def count() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock, lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


class Foreign:
    """A lock as foreign code has it, whether it is held, and how often it was."""

    held, times = False, 0

    def __enter__(self) -> None:
        assert not self.held
        self.held = True
        self.times += 1

    def __exit__(self, *_: object) -> None:
        self.held = False


def test_a_fork_takes_a_foreign_lock_and_gives_it_back_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_across", [*locks._across])
    lock = Foreign()
    held_across_forks(lock)
    assert holds_in_child(lambda: lock.times == 1 and not lock.held)
    assert lock.times == 1
    assert not lock.held


class Slow:
    """Has an attribute whose making may be held up."""

    def __init__(self, held: Held | None = None) -> None:
        self.held, self.made = held, 0

    @cached_property
    def value(self) -> int:
        """The number of times that it was made."""
        if self.held is not None:
            self.held.stay()
        self.made += 1
        return self.made


def test_an_attribute_is_made_once() -> None:
    slow = Slow()
    assert (slow.value, slow.value, slow.made) == (1, 1, 1)
    assert Slow.value.__doc__ == "The number of times that it was made."


def test_an_attribute_that_another_thread_is_making_holds_nobody_up() -> None:
    held = Held()
    other = threading.Thread(target=lambda: Slow(held).value)
    other.start()
    held.entered.wait()
    assert Slow().value == 1
    assert holds_in_child(lambda: Slow().value == 1)
    held.done.set()
    other.join()


KEY = cache.key_of("one")


def test_a_lock_that_is_left_is_free_though_a_copy_of_its_descriptor_is_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forked child has such copies: one kept a lock for as long as it lived."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "kernels"))
    with cache.lock(KEY):
        (descriptor,) = cache._held
        copy = os.dup(descriptor)
    begin = time.monotonic()
    with cache.lock(KEY):
        assert len(cache._held) == 1
    assert time.monotonic() - begin < limits.LOCK_SECONDS / 2
    assert cache._held == set()
    os.close(copy)


def test_a_forked_child_has_no_lock_file_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "kernels"))
    with cache.lock(KEY):
        (descriptor,) = cache._held

        def is_closed() -> bool:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
            return cache._held == set()

        assert holds_in_child(is_closed)
        assert cache._held == {descriptor}
