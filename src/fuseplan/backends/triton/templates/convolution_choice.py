"""What the implicit matrix product may cost: arithmetics, tiles worth trying, time, and its error."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.backends.triton import model
from fuseplan.backends.triton.templates.convolution_tiles import LEAST, Knobs, Tiles, power_of_two
from fuseplan.kernel import Kernel
from fuseplan.target import Target

_STEP = 0.4e-6  # seconds from the first load of a step to its last product


def choices(kernel: Kernel, target: Target, arithmetic: str) -> Iterator[Knobs]:
    """Knobs worth trying, the best guess first."""
    probe = Tiles(kernel, LEAST, LEAST, LEAST)
    widest = 32 if kernel.src.itemsize > 2 else 64
    depth = power_of_two(probe.conv.depth if probe.is_flat else probe.channels, widest)
    if arithmetic in ("ieee", "summed"):
        depth = min(depth, LEAST)
    if probe.merged > 1:
        depth = power_of_two(probe.channels, 64)
    joined = _joined(kernel, probe, depth)
    swapped = not kernel.dst.is_channels_last
    seen = set()
    for positions, features, warps in _extents(kernel, target, arithmetic):
        fitting = min(features, power_of_two(probe.features, 256))
        fewer = min(positions, power_of_two(kernel.contraction.rows, 512))
        stages = 3 if joined == 1 else 2
        knobs = Knobs(fewer, fitting, depth, joined, joined > 1, swapped, arithmetic, warps, stages)
        if knobs not in seen:
            seen.add(knobs)
            yield knobs


def _joined(kernel: Kernel, probe: Tiles, depth: int) -> int:
    """Channels loaded by one thread: what fills 16 bytes, where channels are far apart in src."""
    if kernel.dst.is_channels_last or kernel.prologue or probe.is_flat or kernel.src.itemsize == 8:
        return 1
    return min(16 // kernel.src.itemsize, depth)


def _extents(kernel: Kernel, target: Target, arithmetic: str) -> tuple[tuple[int, int, int], ...]:
    """Positions, features and warps of tiles, the best guess first."""
    if arithmetic == "summed":
        return ((16, 16, 4),)
    if kernel.src.dtype == "f64":
        return ((32, 32, 4), (64, 32, 4), (16, 16, 4))
    if arithmetic == "ieee":
        return ((64, 64, 4), (128, 64, 8), (32, 32, 4), (16, 16, 4))
    return ((128, 128, 8), (128, 64, 4), (64, 128, 4), (256, 64, 4), (64, 64, 4), (32, 32, 4), (64, 16, 4))


def seconds(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """The tiles' products in waves over the GPU, or the bytes in memory, whichever takes longer."""
    tiles = Tiles(kernel, knobs.positions, knobs.features, knobs.depth)
    places = max(1, target.processors) * max(1, 16 // knobs.warps)
    used = model.fill(tiles.programs, places)
    rate = _rate(target, kernel, knobs.arithmetic)
    # A step takes no less than its loads' latency, however few products it has.
    latency = tiles.steps * _STEP * -(-tiles.programs // places)
    moved = model.traffic(kernel)
    return max(model.seconds(target, moved, flops=2.0 * tiles.products, rate=rate, used=used), latency)


def _rate(target: Target, kernel: Kernel, arithmetic: str) -> float:
    """Operations a second: the share of the GPU's that gathered tiles reach."""
    rates = model.rates(target)
    if kernel.src.dtype == "f64":
        return 0.3 * rates.double
    if arithmetic == "native":
        return 0.35 * rates.half
    return {"tf32": 0.4 * rates.tf32, "tf32x3": 0.15 * rates.tf32, "ieee": 0.5 * rates.single}[arithmetic]
