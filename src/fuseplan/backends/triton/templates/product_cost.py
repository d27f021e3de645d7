"""How exact a product is, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, sqrt

from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.templates.product_tiles import SECTOR_BYTES, Knobs, Tiles, factor_dtype
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of

STEP = 32  # the most products that a tensor core adds before their sum leaves it, in `tf32x3`


def bound(kernel: Kernel, arithmetic: str) -> float:
    """The error bound of a sum of products, in units of the sum of |src||weight|.

    native: products are exact; a tensor core cuts what is below the 23rd bit of a sum: two units a product.
    tf32: the same, and each factor loses what is below its 11th bit.
    tf32x3: factors keep 22 bits or more; a step's sum is cut as above, sums of steps are rounded.
    ieee: each product and sum is rounded: one unit a product (Higham 2002, section 3.1).
    A prologue's results are rounded to the factors' dtype where that is what is multiplied.
    Sums of i8 are exact.
    """
    depth = kernel.contraction.depth
    if arithmetic == "summed" or kernel.compute_dtype == "f64":
        return depth * 2.0**-53
    rounded = kernel.prologue and arithmetic == "native"
    before = dtype_of(factor_dtype(kernel)).epsilon / 2 if rounded else 0.0
    cut = depth * 2.0**-23
    return (
        before
        + {
            "native": cut,
            "tf32": cut + 2.0**-9,
            "tf32x3": min(depth, STEP) * 2.0**-23 + -(-depth // STEP) * 2.0**-24 + 2.0**-21,
            "ieee": depth * 2.0**-24,
        }[arithmetic]
    )


@dataclass(frozen=True)
class Fit:
    """What one kind of source reaches on an H100.

    Attributes:
        step: seconds from a load's issue to its use.
        l2_bytes: from the second cache, a second and processor.
        between: seconds of a step besides the copies from there.
        reached: the share of the GPU's rate that products reach on full tiles, by arithmetic.
        half, single: measured over estimated seconds of 16-bit and of longer dtypes, geometric mean.
        arriving: seconds of a sum in parts: to the second cache, and the last program's way there and back.
        finishing: seconds in which a warp finishes an element of a tile.
        reading: of an element of a tensor that is read for it.
        tile: seconds of a program's first loads and last stores.
        splitting: of a processor, to make two numbers of an element, and of a warp that waits for it.
        last: how far a last wave that is not whole counts as one.
        broken: copies of a weight's rows that begin inside of sectors, over those of whole sectors.
    """

    step: float
    l2_bytes: float
    between: float
    reached: Mapping[str, float]
    half: float
    single: float
    arriving: float = 12e-6
    finishing: float = 0.0
    reading: float = 0.0
    tile: float = 1.5e-6
    splitting: tuple[float, float] = (0.0, 0.0)
    last: float = 0.5
    broken: float = 1.0


# The numbers of 16 bits were fitted on an H200: those of rows, with Hopper's, to 2,000 times of 114 products
# and convolutions, most of them random; those of gathered elements to 1,400 times of 37 others. Rows of f32:
# 1,250 times of 64 random products, of which choices take 1.05 of the best time; they took 1.19 of 42 before.
_ROWS = Fit(
    0.755e-6, 55.5e9, 0.0218e-6, {"native": 0.85, "tf32": 0.75, "tf32x3": 0.92, "ieee": 0.6, "summed": 0.05},
    half=1.1, single=0.843, arriving=0.958e-6, finishing=2.51e-9, reading=4.12e-9, tile=2.475e-6,
    splitting=(28.5e-12, 0.53e-9), last=0.687,
)  # fmt: skip
_HALF_ROWS = replace(
    _ROWS, step=1.62e-6, l2_bytes=95e9, between=0.127e-6, half=0.86, arriving=3.92e-6,
    finishing=1.18e-9, reading=1.89e-9, tile=2.39e-6, broken=2.22, last=0.87,
)  # fmt: skip
_GATHERED = Fit(
    0.8e-6, 80e9, 0.0, {"native": 0.8, "tf32": 0.8, "tf32x3": 0.75, "ieee": 0.5, "summed": 0.05},
    half=1.6, single=1.3,
)  # fmt: skip
_HALF_GATHERED = replace(
    _GATHERED, step=0.45e-6, half=1.12, arriving=7.6e-6, finishing=1.0e-9, reading=1.6e-9
)  # fmt: skip
_CLOCK = 1.7e9
_KEPT = 1.6e12  # bytes a second of sums in parts, to the second cache and back
_APART = 1.6  # channels apart in memory, over channels side by side: four convolutions of f32, geometric mean


def seconds(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """The estimate of one launch: waves of programs, each as long as what it waits for; or memory."""
    tiles = Tiles(kernel, knobs)
    is_half = kernel.src.itemsize == 2
    of_rows, gathered = (_HALF_ROWS, _HALF_GATHERED) if is_half else (_ROWS, _GATHERED)
    fit = gathered if tiles.is_gathered else of_rows
    programs, processors = tiles.count * knobs.split, max(1, target.processors)
    together = min(resident(knobs, kernel, target), ceil_div(programs, processors))
    times = 3 if knobs.arithmetic == "tf32x3" else 1
    flops = 2 * knobs.rows * knobs.features * knobs.depth * times
    products = flops * processors / _rate(knobs, tiles, target, fit)
    loading = _loading(knobs, tiles, fit)
    under_way = knobs.stages - 1
    if fit is of_rows and is_narrow(kernel):
        under_way = 1 if knobs.ahead else 0
    waiting = fit.step / under_way if under_way else fit.step + (products + loading) * together
    split = (knobs.rows + knobs.features * knobs.weights) * knobs.depth * (times > 1)
    waiting += fit.splitting[1] * split / knobs.warps
    step = max((products + fit.splitting[0] * split) * together, loading * together, waiting)
    places = processors * together
    waves = max(1.0, programs / places)
    waves += fit.last * (ceil_div(programs, places) - waves)
    kept = 2 * programs * knobs.rows * knobs.features * 4 if knobs.split > 1 else 0
    memory = kernel.minimum_bytes / model.rates(target).memory + kept / _KEPT
    arriving = fit.arriving if knobs.split > 1 else 0.0
    read = sum(op.role == "epilogue" and not op.packed for op in kernel.operands)
    finishing = (fit.finishing + fit.reading * read) * knobs.rows * knobs.features / knobs.warps
    working = waves * (tiles.steps * step + fit.tile + finishing)
    apart = _APART if tiles.is_gathered and kernel.src.element_strides[1] != 1 else 1.0
    estimate = model.LAUNCH_SECONDS + max(working * apart, memory) + arriving
    return estimate * (fit.half if is_half else fit.single)


def _loading(knobs: Knobs, tiles: Tiles, fit: Fit) -> float:
    """Seconds in which a processor loads one step's tiles from the second cache.

    Gathered elements take instructions of their own, and all taps find src in the first cache.
    """
    kernel, itemsize = tiles.kernel, tiles.kernel.src.itemsize
    weight = float(knobs.weights * knobs.features * knobs.depth * itemsize)
    if not tiles.is_gathered and tiles.channels * itemsize % SECTOR_BYTES:
        weight *= fit.broken
    moved = (knobs.rows / tiles.conv.taps * knobs.depth * itemsize + weight) / fit.l2_bytes + fit.between
    if not tiles.is_gathered:
        return moved
    wide = gcd(tiles.channels, 16 // itemsize) if kernel.src.element_strides[1] == 1 else 1
    cycles = 3 if tiles.is_flat else 1  # where each element has a mask of its own
    loads = knobs.rows * knobs.depth / wide / 32 * cycles * max(2, wide * itemsize / 4)
    return max((loads + weight / 64) / _CLOCK, moved)


def _rate(knobs: Knobs, tiles: Tiles, target: Target, fit: Fit) -> float:
    """Operations a second of all processors; small tiles wait for what they load from shared memory."""
    rates, arithmetic, kernel = model.rates(target), knobs.arithmetic, tiles.kernel
    at_most = {"native": rates.half, "tf32": rates.tf32, "tf32x3": rates.tf32}
    most = rates.double if kernel.compute_dtype == "f64" else at_most.get(arithmetic, rates.single)
    if not tiles.is_gathered:
        used = min(1.0, sqrt(knobs.rows * knobs.features) / 64)
    else:  # the instructions for large tiles take 64 rows
        is_large = (knobs.features if knobs.swapped else knobs.rows) >= 64
        used = 1.0 if is_large or arithmetic not in at_most else 0.4
    return most * fit.reached[arithmetic] * used


def resident(knobs: Knobs, kernel: Kernel, target: Target) -> int:
    """Programs that one processor holds at once."""
    threads = knobs.warps * (target.warp or 32)
    by_registers = 65536 // (min(255, registers(knobs, kernel, target)) * threads)
    return max(1, min(by_registers, target.l1_bytes // shared_bytes(knobs, kernel), 16))


def registers(knobs: Knobs, kernel: Kernel, target: Target) -> int:
    """Registers of a thread, estimated: its sums, what it loads past shared memory, and some besides.

    Compiled for sm_90: where neighbours are not 4 bytes aligned, elements come by themselves and pass through
    registers, each in one of its own, with its address; joined ones share registers and addresses.
    """
    threads = knobs.warps * (target.warp or 32)
    from_shared = target.name == "sm_90"  # the weight goes to the products without passing registers
    sums = {"ieee": 1.5, "tf32x3": 2.0}.get(knobs.arithmetic, 1.0)
    if knobs.apart:
        sums = 2.5 if from_shared else 3.5
    sums = 2.0 if kernel.compute_dtype == "f64" else sums
    fixed = (56 if from_shared else 112) + (0 if knobs.maps or knobs.arithmetic != "tf32x3" else 20)
    passing = 1.0 if kernel.prologue else 0.0
    if is_narrow(kernel):
        passing = 3.0 if knobs.ahead else 2.5
    if knobs.joined > 1:
        passing = 1.0
    tile, loaded = knobs.rows * knobs.features, knobs.rows * knobs.depth
    return int(sums * tile / threads + passing * loaded / threads) + fixed


def is_narrow(kernel: Kernel) -> bool:
    """Whether src's neighbours are aligned to less than 4 bytes, which asynchronous copies do not take."""
    others = [step for step in kernel.src.element_strides if step != 1]
    is_together = len(others) < kernel.src.rank
    return (gcd(*others, 16) if is_together else 1) * kernel.src.itemsize < 4


def shared_bytes(knobs: Knobs, kernel: Kernel) -> int:
    """Shared memory of one program: the tiles under way, of joined elements one, and 1 KiB besides.

    What a prologue reads for each element comes with src, numbers of rows too.
    """
    stages = max(1, knobs.stages)
    rows = knobs.rows * (1 if knobs.joined > 1 else stages)
    weights = knobs.features * knobs.weights * stages
    beside = (op for op in kernel.operands if op.role == "prologue" and op.axes and not op.is_channel)
    element = kernel.src.itemsize + sum(dtype_of(each.dtype).itemsize for each in beside)
    held = rows * element + weights * dtype_of(kernel.weight.dtype).itemsize
    return max(1024, held * knobs.depth) + 1024
