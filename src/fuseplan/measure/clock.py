"""Times callables against each other: one protocol for the demo, the command line and the benchmarks.

Variants take turns in blocks of calls, and the order rotates from round to round, so a machine that slows
down or another program that wakes up meets them all alike. On the host, a variant's first call of a block is
not timed: it brings back into the caches what the other variants pushed out.

On a GPU, CUDA events time each call. Before it, a buffer that is larger than the GPU's second cache is
overwritten, outside of the events, so a call finds none of its tensors there. The host is ahead of the GPU by
some such writes, by more where a call takes it longer than a write takes the GPU: the events see kernels, and
not the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from fuseplan.errors import ArgumentError
from fuseplan.measure.quiet import GpuWatch, HostWatch, Watch
from fuseplan.measure.stats import Timing, summarize

CLOCK, GPU_CLOCK = "perf_counter", "CUDA events, cold L2"
SHORTEST_SAMPLE = 20e-6  # seconds: several hundred times what reading the clock costs
FLUSH_BYTES = 256 << 20  # five times the L2 of an H100 or H200; writing it takes some 90 us
AHEAD = 5  # flushes before the first sample: half a millisecond
MOST_AHEAD = AHEAD << 8  # a tenth of a second
WALL_CALLS = 100  # fewer than a stream's queue holds: enqueuing them never waits for the GPU
WALL_BATCHES = 9
LATENCY_CALLS = 10  # of a block
REPLAYED = 20  # launches in a CUDA graph

Call = Callable[[], object]


@dataclass(frozen=True)
class Protocol:
    """How long and how often to measure.

    Attributes:
        rounds: blocks a variant gets.
        block_seconds: how long a block lasts: on the host at least, on a GPU at most, its flushes included.
        fewest_samples, most_samples: of a block.
    """

    rounds: int = 7
    block_seconds: float = 0.04
    fewest_samples: int = 3
    most_samples: int = 2000


GPU_PROTOCOL = Protocol(block_seconds=0.01, fewest_samples=5, most_samples=100)


def calls_a_sample(call: Call) -> int:
    """How many calls a sample needs to be long beside the clock's own cost; makes a few to find out."""
    call()
    count = 1
    while count < 1 << 16:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        taken = time.perf_counter() - begin
        if taken >= SHORTEST_SAMPLE:
            return count
        count = max(count * 2, int(count * SHORTEST_SAMPLE / max(taken, 1e-9)))
    return count


def block(call: Call, calls: int, protocol: Protocol) -> list[float]:
    """One block of samples, in seconds a call; the call before them is not timed."""
    samples: list[float] = []
    call()
    end = time.perf_counter() + protocol.block_seconds
    repeats = range(calls)
    while True:
        begin = time.perf_counter()
        for _ in repeats:
            call()
        now = time.perf_counter()
        samples.append((now - begin) / calls)
        enough = now > end or len(samples) >= protocol.most_samples
        if enough and len(samples) >= protocol.fewest_samples:
            return samples


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name) of every block: each name once a round, each round begins one further along."""
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def in_turns(names: Iterable[str], rounds: int, block: Callable[[str], Sequence[float]]) -> dict[str, Timing]:
    """A timing for each name, of the samples in seconds that `block` takes of it once a round."""
    blocks: dict[str, list[Sequence[float]]] = {name: [] for name in names}
    for _, name in turns(list(blocks), rounds) if blocks else ():
        blocks[name].append(block(name))
    return {name: summarize(taken) for name, taken in blocks.items()}


def rotating(calls: Sequence[Call]) -> Call:
    """One callable that makes each of the calls in turn: the same work on other buffers every time."""
    following = cycle(calls)

    def call() -> object:
        return next(following)()

    return call


def copies_past(cache_bytes: int, nbytes: int, most: int = 64) -> int:
    """How many copies of `nbytes` of buffers go past a cache of that size before the first comes again."""
    return max(1, min(most, -(-2 * cache_bytes // max(1, nbytes)) + 1))


class HostClock:
    """The host's own clock; calls return when their work is done."""

    def __init__(self, protocol: Protocol | None = None) -> None:
        self.protocol = protocol or Protocol()

    def interleave(self, variants: Mapping[str, Call]) -> dict[str, Timing]:
        """A timing of every variant beside the others; results are thrown away."""
        how = self.protocol
        calls = {name: calls_a_sample(call) for name, call in variants.items()}
        return in_turns(variants, how.rounds, lambda name: block(variants[name], calls[name], how))

    def block(self, call: Call, samples: int) -> list[float]:
        """Seconds of each of so many calls; one call before them is not timed."""
        return [self.waited(call) for _ in range(1 + samples)][1:]

    def waited(self, call: Call) -> float:
        """Seconds of one call."""
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def watch(self) -> Watch:
        """Looks from now on for other programs that use the processors."""
        return HostWatch()


class GpuClock:
    """Measures on one GPU of this process, on its current stream.

    Raises:
        ImportError: torch is not installed.
        RuntimeError: the GPU's memory has no room for the buffer that is overwritten.
        ArgumentError: a CUDA graph is being captured.
    """

    def __init__(self, device: int = 0, protocol: Protocol = GPU_PROTOCOL) -> None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise ArgumentError("a CUDA graph is being captured: measure, or compile, before")
        self._torch: Any = torch
        self.device = torch.device("cuda", device)
        self.protocol = protocol
        self._flushed = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def interleave(self, variants: Mapping[str, Call]) -> dict[str, Timing]:
        """Times every variant beside the others: seconds of the GPU a call."""
        samples = {name: self._samples(call) for name, call in variants.items()}
        ahead = {name: self._ahead(call, samples[name]) for name, call in variants.items()}
        return in_turns(
            variants,
            self.protocol.rounds,
            lambda name: self._timed(variants[name], samples[name], calls=2, ahead=ahead[name])[0],
        )

    def block(self, call: Call, samples: int) -> list[float]:
        """One block of samples, in seconds; two calls before them are not timed.

        The call is one that the host enqueues in less time than a flush takes the GPU.
        """
        return self._timed(call, samples, calls=2, ahead=AHEAD)[0]

    def _timed(
        self, call: Call, samples: int, *, calls: int = 0, ahead: int = 0, is_cold: bool = True
    ) -> tuple[list[float], bool]:
        """Seconds of the GPU of each call, and whether the host stayed ahead of the GPU to the end.

        So many calls and flushes are enqueued before; where it `is_cold`, a flush before each timed call.
        """
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(samples)]
        for _ in range(calls):
            call()
        for _ in range(ahead):
            self._flushed.zero_()
        is_ahead = True
        for begin, end in pairs:
            if is_cold:
                self._flushed.zero_()
            begin.record()
            call()
            end.record()
            is_ahead &= not begin.query()  # else the GPU may have waited for what the host had not enqueued
        self._torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs], is_ahead

    def _ahead(self, call: Call, samples: int) -> int:
        """How many flushes the host has to be ahead by, to stay ahead for a block."""
        ahead = AHEAD
        while ahead < MOST_AHEAD and not self._timed(call, samples, calls=2, ahead=ahead)[1]:
            ahead *= 2
        return ahead

    def _samples(self, call: Call) -> int:
        """How many samples fill a block; makes a few calls to find out."""
        for _ in range(3):
            call()
        self._torch.cuda.synchronize(self.device)
        fewest, most = self.protocol.fewest_samples, self.protocol.most_samples
        begin = time.perf_counter()
        self.block(call, fewest)
        each = (time.perf_counter() - begin) / (fewest + 2)
        return max(fewest, min(most, int(self.protocol.block_seconds / each)))

    def wall(self, variants: Mapping[str, Call], calls: int = WALL_CALLS) -> dict[str, Timing]:
        """Seconds of the host that each variant takes to enqueue its work; the GPU's queue never fills.

        Args:
            calls: in a row: few where each has many launches.
        """

        def batch(name: str) -> list[float]:
            call = variants[name]
            call()
            self._torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            taken = time.perf_counter() - begin
            self._torch.cuda.synchronize(self.device)
            return [taken / calls]

        return in_turns(variants, WALL_BATCHES, batch)

    def latency(self, variants: Mapping[str, Call]) -> dict[str, Timing]:
        """Seconds of the host's clock from a call until its result is there, the second cache cold."""

        def waits(name: str) -> list[float]:
            variants[name]()
            return [self.waited(variants[name]) for _ in range(LATENCY_CALLS)]

        return in_turns(variants, self.protocol.rounds, waits)

    def waited(self, call: Call) -> float:
        """Seconds of the host's clock that one call takes, from an idle GPU to an idle GPU."""
        self._flushed.zero_()
        self._torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        call()
        self._torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def replay(self, calls: Sequence[Call]) -> float:
        """Seconds a launch of a CUDA graph of many calls takes, over the number of calls.

        Args:
            calls: the same work on other buffers each; taken in turn, so their tensors' total size says
                whether they come from the cache.

        Raises:
            RuntimeError: the calls cannot be captured.
        """
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(REPLAYED):
                calls[index % len(calls)]()
        graph.replay()
        taken = [self._timed(graph.replay, 1)[0][0] / REPLAYED for _ in range(self.protocol.rounds)]
        return float(np.median(taken))

    def least(self, call: Call, samples: int = 16) -> float:
        """Seconds of the GPU of the best of many calls; nothing is flushed between them."""
        return min(self._timed(call, samples, calls=3, is_cold=False)[0])

    def watch(self) -> Watch:
        """Looks at the GPU, before anything is measured, for other programs that use it."""
        return GpuWatch(self.device.index)


Clock = HostClock | GpuClock
