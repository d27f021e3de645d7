"""Times calls on a GPU against each other: CUDA events, a cold second cache, variants in turns.

Before each timed call a buffer that is larger than the GPU's second cache is overwritten, outside of the
events, so a call finds none of its tensors there. The host is ahead of the GPU by some such writes, by more
where a call takes it longer than a write takes the GPU: the events see kernels, and not the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuseplan.measure.clock import Call, turns
from fuseplan.measure.stats import Timing, summarize

CLOCK = "CUDA events, cold L2"
FLUSH_BYTES = 256 << 20  # five times the L2 of an H100 or H200; writing it takes some 90 us
AHEAD = 5  # flushes before the first sample: half a millisecond
MOST_AHEAD = AHEAD << 8  # a tenth of a second
WALL_CALLS = 100  # fewer than a stream's queue holds: enqueuing them never waits for the GPU
WALL_BATCHES = 9
LATENCY_CALLS = 10  # of a block
REPLAYED = 20  # launches in a CUDA graph


@dataclass(frozen=True)
class GpuProtocol:
    """How long and how often to measure.

    Attributes:
        rounds: blocks a variant gets.
        block_seconds: how long a block lasts at most, its flushes included.
        fewest_samples, most_samples: of a block.
    """

    rounds: int = 7
    block_seconds: float = 0.01
    fewest_samples: int = 5
    most_samples: int = 100


class GpuClock:
    """Measures on one GPU of this process, on its current stream.

    Args:
        device: the GPU's index.
        protocol: how long and how often.

    Raises:
        ImportError: torch is not installed.
        RuntimeError: the GPU's memory has no room for the buffer that is overwritten.
    """

    def __init__(self, device: int = 0, protocol: GpuProtocol | None = None) -> None:
        import torch

        self._torch: Any = torch
        self.device = torch.device("cuda", device)
        self.protocol = protocol or GpuProtocol()
        self._flushed = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def interleave(self, variants: Mapping[str, Call]) -> dict[str, Timing]:
        """Times every variant beside the others.

        Args:
            variants: what to call, by name. Results are thrown away.

        Returns:
            A timing for each name, seconds of the GPU a call.
        """
        samples = {name: self._samples(call) for name, call in variants.items()}
        ahead = {name: self._ahead(call, samples[name]) for name, call in variants.items()}
        blocks: dict[str, list[list[float]]] = {name: [] for name in variants}
        for _, name in turns(list(variants), self.protocol.rounds) if variants else ():
            blocks[name].append(self._block(variants[name], samples[name], ahead[name])[0])
        return {name: summarize(taken) for name, taken in blocks.items()}

    def block(self, call: Call, samples: int) -> list[float]:
        """One block of samples, in seconds; two calls before them are not timed.

        The call is one that the host enqueues in less time than a flush takes the GPU.
        """
        return self._block(call, samples, AHEAD)[0]

    def _block(self, call: Call, samples: int, ahead: int) -> tuple[list[float], bool]:
        """The same behind so many flushes, and whether the host stayed ahead of the GPU to the end."""
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(samples)]
        for _ in range(2):
            call()
        for _ in range(ahead):
            self._flushed.zero_()
        is_ahead = True
        for begin, end in pairs:
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
        while ahead < MOST_AHEAD and not self._block(call, samples, ahead)[1]:
            ahead *= 2
        return ahead

    def _samples(self, call: Call) -> int:
        """How many samples fill a block; makes a few calls to find out."""
        for _ in range(3):
            call()
        self._torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        self.block(call, self.protocol.fewest_samples)
        each = (time.perf_counter() - begin) / (self.protocol.fewest_samples + 2)
        fitting = int(self.protocol.block_seconds / each)
        return max(self.protocol.fewest_samples, min(self.protocol.most_samples, fitting))

    def wall(self, variants: Mapping[str, Call]) -> dict[str, Timing]:
        """Seconds of the host that each variant takes to enqueue its work; the GPU's queue never fills."""
        blocks: dict[str, list[list[float]]] = {name: [] for name in variants}
        for _, name in turns(list(variants), WALL_BATCHES) if variants else ():
            call = variants[name]
            call()
            self._torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            for _ in range(WALL_CALLS):
                call()
            blocks[name].append([(time.perf_counter() - begin) / WALL_CALLS])
            self._torch.cuda.synchronize(self.device)
        return {name: summarize(taken) for name, taken in blocks.items()}

    def latency(self, variants: Mapping[str, Call]) -> dict[str, Timing]:
        """Seconds of the host's clock from a call until its result is there, the second cache cold."""
        blocks: dict[str, list[list[float]]] = {name: [] for name in variants}
        for _, name in turns(list(variants), self.protocol.rounds) if variants else ():
            call = variants[name]
            call()
            blocks[name].append([self.waited(call) for _ in range(LATENCY_CALLS)])
        return {name: summarize(taken) for name, taken in blocks.items()}

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
        taken = []
        for _ in range(self.protocol.rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flushed.zero_()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(self.device)
            taken.append(begin.elapsed_time(end) * 1e-3 / REPLAYED)
        return float(np.median(taken))


def rate_of(clock: GpuClock, call: Callable[[], object], amount: float, launches: int = 16) -> float:
    """`amount` a second at the best of many calls; nothing is flushed between them."""
    torch = clock._torch
    for _ in range(3):
        call()
    event = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(launches)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(clock.device)
    return float(amount / min(begin.elapsed_time(end) * 1e-3 for begin, end in pairs))
