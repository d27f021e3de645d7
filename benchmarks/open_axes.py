"""Plans with open axes beside the same plans with numbers, on the machine's CPU or GPU, in turns.

    python -m benchmarks.open_axes [--target cuda] [--seconds 20]

Each line has the time of both, the ratio of their medians, and the ratio that an equal pair has here. On a
CPU the time is that of one thread's own processor, which other programs disturb least.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from statistics import median
from time import monotonic, thread_time

import fuseplan
from fuseplan.measure.ground import ground_of

# A plan and the extents that are measured: few, as many as choices are made for, more.
CASES = {
    "f32[*x512x768] -> linear(768) -> bias -> gelu": (1, 4),
    "f16[*x1024] -> linear(4096) -> bias -> gelu": (64, 1024, 4096),
    "f32[*x768] -> layer_norm": (64, 1024, 8192),
    "f32[*x1024] -> softmax": (64, 1024, 8192),
    "f32[*x64x56x56, nhwc] -> batch_norm -> add -> relu": (1, 8, 32),
    "f16[*x3072] -> bias -> gelu": (64, 1024, 8192),
    "f32[*x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu": (1, 8),
    "f16[*x128x28x28, nhwc] -> conv2d(128, kernel=3, padding=1) -> bias -> relu": (8, 64),
    "f32[*x64x56x56] -> conv2d(64, kernel=1) -> bias -> relu": (1, 8),
    "f32[*x96x28x28, nhwc] -> conv2d(96, kernel=3, padding=1, groups=96) -> bias -> relu": (1, 8, 64),
    "f32[*x96x28x28] -> conv2d(96, kernel=3, padding=1, groups=96) -> bias -> relu": (1, 8, 64),
    "f32[*x64x56x56, nhwc] -> max_pool2d(3, stride=2, padding=1)": (1, 8),
    "f32[*x12x128x64, bhsd] -> attention": (1, 8),
    "f32[*x2048] -> glu(silu)": (64, 1024, 8192),
}


def measured(text: str, extent: int, target: str, seconds: float) -> tuple[str, list[float]]:
    """The open plan's template, and medians: of the open plan, of the one with a number, of that one again.

    The plan with a number has the open plan's template; a Winograd kernel or a sum in parts is another plan's
    choice. Each round is a turn of all three.
    """
    threads = 1 if target.startswith("cpu") else None
    opened = fuseplan.compile(text, target, threads=threads)
    plan = opened.plan.with_extents(extent)
    known = fuseplan.compile(plan, target, threads=threads, template=opened.choice.template.name)
    ground = ground_of(plan, known.target, 0)
    calls = {
        "open": ground.call(opened.bind),
        "known": ground.call(known.bind),
        "again": ground.call(known.bind),
    }

    def turn() -> dict[str, float]:
        if threads is not None:
            return one_turn(calls)
        return {name: each.median for name, each in ground.times(calls, rounds=3).items()}

    found: dict[str, list[float]] = {name: [] for name in calls}
    turn()  # packs, and takes the memory that calls keep
    end = monotonic() + seconds
    while monotonic() < end or not found["open"]:
        for name, took in turn().items():
            found[name].append(took)
    return opened.choice.template.name, [median(found[name]) for name in calls]


def one_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of this thread's processor in each call."""
    took: dict[str, float] = {}
    for name, call in calls.items():
        begin = thread_time()
        call()
        took[name] = thread_time() - begin
    return took


def main() -> None:
    """Prints a line for each plan and extent that the target has a kernel for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    for text, extents in CASES.items():
        for extent in extents:
            try:
                name, (opened, known, again) = measured(text, extent, given.target, given.seconds)
            except fuseplan.Unsupported as error:
                print(f"{text}: {error.what}")
                break
            both = f"{opened * 1e6:9.1f} us, {known * 1e6:9.1f} us with a number"
            print(
                f"{text} * = {extent}: {name}, {both}: {opened / known:.3f}, noise {again / known:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
