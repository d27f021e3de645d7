"""Times callables against each other: one protocol for the demo, the command line and the benchmarks.

Variants take turns in blocks of calls, and the order rotates from round to round, so a machine that slows
down or another program that wakes up meets them all alike. A variant's first call of a block is not timed: it
brings back into the caches what the other variants pushed out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from fuseplan.measure.stats import Timing, summarize

CLOCK = "perf_counter"
SHORTEST_SAMPLE = 20e-6  # seconds: several hundred times what reading the clock costs
FEWEST_SAMPLES = 3

Call = Callable[[], object]


@dataclass(frozen=True)
class Protocol:
    """How long and how often to measure.

    Attributes:
        rounds: blocks a variant gets.
        block_seconds: how long a block lasts at least.
        most_samples: samples after which a block ends early.
    """

    rounds: int = 7
    block_seconds: float = 0.04
    most_samples: int = 2000


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
        if enough and len(samples) >= FEWEST_SAMPLES:
            return samples


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name) of every block: each name once a round, each round begins one further along."""
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def interleave(
    variants: Mapping[str, Call],
    protocol: Protocol | None = None,
    *,
    progress: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times every variant beside the others.

    Args:
        variants: what to call, by name. Results are thrown away.
        protocol: how long and how often.
        progress: called after every block.

    Returns:
        A timing for each name.
    """
    protocol = protocol or Protocol()
    calls = {name: calls_a_sample(call) for name, call in variants.items()}
    blocks: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _, name in turns(list(variants), protocol.rounds):
        blocks[name].append(block(variants[name], calls[name], protocol))
        if progress:
            progress()
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
