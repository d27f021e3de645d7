"""What the implicit matrix product may cost: arithmetics, tiles worth trying, time, and its error."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from fuseplan.backends.triton import model
from fuseplan.backends.triton.templates.convolution_tiles import LEAST, Knobs, Tiles, power_of_two
from fuseplan.backends.triton.templates.three_products import FINE_DEPTH, FINE_STEP
from fuseplan.kernel import Kernel
from fuseplan.target import Target

_STEP = 0.8e-6  # seconds from the first load of a step to its last product
_TILE = 1.5e-6  # of a tile's first indices and last stores
_CLOCK = 1.7e9
_L2_BYTES = 80e9  # a second, of one processor
# Measured over estimated seconds, geometric mean over the tuned suites on one H100.
_MEASURED = {"half": 1.6, "single": 1.3}
_HELD = 64  # elements of src that one thread has in registers at most


def choices(kernel: Kernel, target: Target, arithmetic: str) -> Iterator[Knobs]:
    """Knobs worth trying, the best guess first."""
    probe = Tiles(kernel, LEAST, LEAST, LEAST)
    depth = _depth(kernel, probe, arithmetic)
    joined = _joined(kernel, probe, depth)
    is_half_first = kernel.src.itemsize == 2 and not kernel.dst.is_channels_last
    seen = set()
    stages = 3 if joined == 1 else 2
    for positions, features, warps in _extents(kernel, target, arithmetic):
        fitting = min(features, power_of_two(probe.features, 256))
        fewer = min(positions, power_of_two(kernel.contraction.rows, 512))
        # All channels of groups side by side are in one step.
        is_held = probe.merged > 1 or fewer * depth <= _HELD * 32 * warps
        step = depth if is_held else depth // 2
        swapped = is_half_first and fitting < 128
        knobs = Knobs(fewer, fitting, step, joined, joined > 1, swapped, arithmetic, warps, stages)
        if probe.is_flat and fewer * step > _HELD // 4 * 32 * warps:
            continue  # each element has an address and a mask of its own
        if knobs not in seen and shared_bytes(knobs, kernel) <= target.l1_bytes:
            seen.add(knobs)
            yield knobs


def _depth(kernel: Kernel, probe: Tiles, arithmetic: str) -> int:
    """Products that one step adds to a sum: of channels, of channels and taps where these are one axis."""
    if probe.merged > 1:
        return power_of_two(probe.channels, 64)
    most = 32 if kernel.src.itemsize > 2 or probe.is_flat else 64
    if arithmetic in ("ieee", "summed"):
        most = min(most, LEAST)
    if arithmetic == "tf32x3" and kernel.contraction.depth < FINE_DEPTH:
        most = min(most, FINE_STEP)
    return power_of_two(probe.conv.depth if probe.is_flat else probe.channels, most)


def _joined(kernel: Kernel, probe: Tiles, depth: int) -> int:
    """Channels loaded by one thread: what fills 16 bytes, where 16-bit channels are far apart in src.

    Copies of 4 bytes go past the registers, and are faster: 153 us for 181 (128-28-28-128, H100).
    """
    if kernel.dst.is_channels_last or kernel.prologue or probe.is_flat or kernel.src.itemsize > 2:
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
    large = () if kernel.src.dtype == "f32" else ((256, 64, 4),)  # f32 has sums in twice the registers
    return ((64, 128, 4), (128, 128, 8), (128, 64, 4), *large, (64, 64, 4), (32, 32, 4), (64, 16, 4))


def seconds(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """Waves of tiles, a step as long as its products, its loads or their latency; or the bytes in memory."""
    tiles = Tiles(kernel, knobs.positions, knobs.features, knobs.depth)
    processors = max(1, target.processors)
    together = min(resident(knobs, kernel, target), -(-tiles.programs // processors))
    products = 2 * knobs.positions * knobs.features * knobs.depth * processors / _rate(knobs, kernel, target)
    step = max(together * max(products, _loading(knobs, tiles)), _STEP / max(1, knobs.stages - 1))
    places = processors * together
    waves = (-(-tiles.programs // places) + tiles.programs / places) / 2  # the last one is not always whole
    moving = model.seconds(target, model.traffic(kernel))
    estimate = max(moving, model.LAUNCH_SECONDS + waves * (tiles.steps * step + _TILE))
    return estimate * _MEASURED["half" if kernel.src.itemsize == 2 else "single"]


def resident(knobs: Knobs, kernel: Kernel, target: Target) -> int:
    """Programs that one processor holds at once."""
    threads = knobs.warps * (target.warp or 32)
    sums = 2 if knobs.arithmetic == "tf32x3" else 1
    held = sums * knobs.positions * knobs.features + knobs.positions * knobs.depth * knobs.ahead
    registers = min(255, held // threads + 64)
    shared = target.l1_bytes // shared_bytes(knobs, kernel)
    return max(1, min(65536 // (registers * threads), shared, 16))


def shared_bytes(knobs: Knobs, kernel: Kernel) -> int:
    """Shared memory of one program: the tiles under way, and 1 KiB that is not the program's."""
    parts = 2 if knobs.arithmetic == "tf32x3" else 1
    src = knobs.positions * (parts if knobs.joined > 1 else knobs.stages)
    return (src + parts * knobs.features * knobs.stages) * knobs.depth * kernel.src.itemsize + 1024


def _loading(knobs: Knobs, tiles: Tiles) -> float:
    """Seconds in which a processor loads one step's tiles: instructions of src, bytes of the weight.

    Or what the second cache takes: src once, for all taps find it in the first.
    """
    kernel, itemsize = tiles.kernel, tiles.kernel.src.itemsize
    wide = gcd(tiles.channels, 16 // itemsize) if kernel.src.element_strides[1] == 1 else 1
    cycles = 3 if tiles.is_flat else 1  # where each element has a mask of its own
    loads = knobs.positions * knobs.depth / wide / 32 * cycles * max(2, wide * itemsize / 4)
    parts = 2 if knobs.arithmetic == "tf32x3" else 1
    weight = parts * knobs.features * knobs.depth * itemsize
    moved = knobs.positions / tiles.conv.taps * knobs.depth * itemsize + weight
    return max((loads + weight / 64) / _CLOCK, moved / _L2_BYTES)


def _rate(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """Operations a second in products of the whole GPU, as far as these tiles reach it."""
    rates = model.rates(target)
    if kernel.src.dtype == "f64":
        return (0.05 if knobs.arithmetic == "summed" else 0.3) * rates.double
    if knobs.arithmetic == "ieee":
        return 0.5 * rates.single
    rate = {"native": 0.8 * rates.half, "tf32": 0.8 * rates.tf32, "tf32x3": 0.25 * rates.tf32}
    # The instructions for large tiles take 64 rows.
    is_large = (knobs.features if knobs.swapped else knobs.positions) >= 64
    return rate[knobs.arithmetic] * (1.0 if is_large else 0.4)
