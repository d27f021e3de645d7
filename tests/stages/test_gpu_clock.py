"""The GPU's clock, on a GPU whose work is a list of what was enqueued and how long each piece takes."""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fuseplan.errors import ArgumentError
from fuseplan.measure import quiet
from fuseplan.measure.clock import (
    AHEAD,
    FLUSH_BYTES,
    LATENCY_CALLS,
    MOST_AHEAD,
    REPLAYED,
    GpuClock,
    Protocol,
)

FLUSH = 1e-4  # seconds


class Queue:
    """A stream: pieces of work with their seconds, done one after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_capturing = False
        self.done: list[str] = []
        self.needed = 0  # flushes that the host has to be ahead by, or the GPU catches up
        self.ahead = self.row = (
            0  # flushes before the first sample of this block; just now, one after the other
        )

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.done.append(name)
            self.now += seconds
            if name == "flush":
                self.row += 1
                self.ahead = max(self.ahead, self.row - 1)
                return
            if not self.row:  # two calls, one after the other: a block begins
                self.ahead = 0
            self.row = 0

        return call

    def torch(self) -> Any:
        """As much of torch as the clock uses."""
        queue = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = queue.now

            def query(self) -> bool:
                return queue.ahead < queue.needed

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) * 1e3

        def empty(size: int, dtype: object, device: object) -> Any:
            assert size * 4 == FLUSH_BYTES
            return SimpleNamespace(zero_=queue.work("flush", FLUSH))

        cuda = SimpleNamespace(
            Event=Event,
            synchronize=lambda device: None,
            is_current_stream_capturing=lambda: queue.is_capturing,
            get_device_properties=lambda device: SimpleNamespace(uuid="aa-1"),
        )
        return SimpleNamespace(
            device=lambda kind, index: (kind, index), empty=empty, int32="int32", cuda=cuda
        )


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setitem(sys.modules, "torch", made.torch())
    return made


def test_a_time_is_the_calls_own_and_each_call_finds_the_cache_overwritten(queue: Queue) -> None:
    clock = GpuClock(0, Protocol(rounds=3, block_seconds=1e-9, fewest_samples=4))
    timed = clock.interleave({"a": queue.work("a", 2e-5), "b": queue.work("b", 3e-5)})
    assert timed["a"].median == pytest.approx(2e-5)
    assert timed["b"].median == pytest.approx(3e-5)
    assert (timed["a"].blocks, timed["a"].n) == (3, 12)
    block = ["a", "a", *["flush"] * AHEAD, *["flush", "a"] * 4]
    assert queue.done[-2 * len(block) : -len(block)] in (block, [name.replace("a", "b") for name in block])


@pytest.mark.parametrize(("needed", "wanted"), [(1, AHEAD), (3 * AHEAD, 4 * AHEAD), (1 << 20, MOST_AHEAD)])
def test_the_host_gets_as_far_ahead_as_a_slow_call_needs(queue: Queue, needed: int, wanted: int) -> None:
    queue.needed = needed
    clock = GpuClock(0, Protocol(rounds=1, block_seconds=1e-9, fewest_samples=2))
    clock.interleave({"a": queue.work("a", 1e-5)})
    assert queue.done[-wanted - 6 :] == ["a", "a", *["flush"] * wanted, *["flush", "a"] * 2]


def test_the_order_rotates(queue: Queue) -> None:
    clock = GpuClock(0, Protocol(rounds=2, block_seconds=1e-9, fewest_samples=1))
    clock.interleave({name: queue.work(name, 1e-6) for name in "ab"})
    blocks = " ".join(queue.done).split(" ".join(["flush"] * (AHEAD + 1)))
    assert [timed.split()[0] for timed in blocks[-4:]] == ["a", "b", "b", "a"]


def test_nothing_is_measured_while_a_graph_is_captured(queue: Queue) -> None:
    queue.is_capturing = True
    with pytest.raises(ArgumentError, match="a CUDA graph is being captured"):
        GpuClock(0)


def test_a_quiet_gpu_is_looked_at_once_a_minute(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, slept = [0.64, 0.03, 0.9], list[float]()
    monkeypatch.setattr(quiet, "gpu_share", lambda uuid: shares.pop(0))
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(quiet.GpuWatch, "_quiet", {})
    told = [quiet.GpuWatch(0).disturbance() for _ in range(4)]
    assert told == ["other programs used the GPU for 64% of the time", None, None, None]
    assert len(slept) == 2
    assert quiet.GpuWatch(1).disturbance() is not None, "another GPU"


def test_nothing_to_time(queue: Queue) -> None:
    clock = GpuClock(0)
    assert clock.interleave({}) == {}
    assert clock.wall({}) == {}


def test_samples_fill_a_block_within_limits(queue: Queue) -> None:
    clock = GpuClock(0, Protocol(rounds=1, block_seconds=1e3, most_samples=7))
    assert clock.interleave({"a": queue.work("a", 1e-6)})["a"].n == 7


def test_wall_is_the_hosts(queue: Queue) -> None:
    assert 0 < GpuClock(0).wall({"a": queue.work("a", 5.0)})["a"].median < 1e-3


def test_latency_is_the_hosts_wait_for_one_call(queue: Queue) -> None:
    clock = GpuClock(0, Protocol(rounds=2))
    waited = clock.latency({"a": queue.work("a", 1e-5)})["a"]
    assert (waited.blocks, waited.n) == (2, 2 * LATENCY_CALLS)
    assert queue.done == ["a", *["flush", "a"] * LATENCY_CALLS] * 2
    assert clock.latency({}) == {}


def test_the_best_call(queue: Queue) -> None:
    assert GpuClock(0).least(queue.work("a", 2e-3)) == pytest.approx(2e-3)


def test_a_graph_is_timed_by_the_call(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, captured = sys.modules["torch"], list[int]()

    class Nothing:
        def __enter__(self) -> None:
            captured.append(len(queue.done))

        def __exit__(self, *_: object) -> None:
            captured.append(len(queue.done))

    cuda: Any = torch.cuda
    cuda.CUDAGraph = lambda: SimpleNamespace(replay=queue.work("replay", REPLAYED * 4e-6))
    cuda.Stream = lambda device: SimpleNamespace(synchronize=lambda: None)
    cuda.stream = lambda stream: Nothing()
    cuda.graph = lambda graph, stream: Nothing()
    calls = [queue.work("a", 1.0), queue.work("b", 1.0)]
    assert GpuClock(0).replay(calls) == pytest.approx(4e-6)
    assert queue.done[captured[2] : captured[3]] == ["a", "b"] * (REPLAYED // 2)
