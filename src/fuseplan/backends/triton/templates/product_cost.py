"""How exact the matrix product is, and how long it takes."""

from __future__ import annotations

from math import gcd, sqrt

from fuseplan.backends.triton import model
from fuseplan.backends.triton.templates.product_shape import Knobs, ProductShape, is_halved
from fuseplan.dtypes import dtype_of
from fuseplan.kernel import Kernel
from fuseplan.target import Target

STEP = 32  # the most products that a tensor core adds before their sum leaves it, in `tf32x3`


def bound(kernel: Kernel, arithmetic: str) -> float:
    """The error bound of a sum of products, in units of the sum of |src||weight|.

    native: products are exact; a tensor core cuts what is below the 23rd bit of a sum: two units a product.
    tf32: the same, and each factor loses what is below its 11th bit.
    tf32x3: factors keep 22 bits or more; a step's sum is cut as above, sums of steps are rounded.
    ieee: each product and sum is rounded: one unit a product (Higham 2002, section 3.1).
    A prologue's results are rounded to src's dtype where that is what is multiplied.
    """
    depth = kernel.contraction.depth
    if arithmetic == "summed" or kernel.compute_dtype == "f64":
        return depth * 2.0**-53
    rounded = kernel.prologue and arithmetic == "native"
    before = dtype_of(kernel.src.dtype).epsilon / 2 if rounded else 0.0
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


# Measured over estimated seconds, geometric mean over the tuned suites on one H100.
_MEASURED = {"half": 1.2, "single": 1.1}
# What the products reach of the GPU's rate on full tiles, and one H100's second cache; measured there.
_REACHED = {"native": 0.85, "tf32": 0.75, "tf32x3": 0.75, "ieee": 0.6, "summed": 0.05}
_L2_BYTES = 5.5e12 / 132  # a second and processor
_TILE = 1.5e-6  # a program's first loads and last stores
_STEP = 0.7e-6  # from a load's issue to its use
_ARRIVING = 10e-6  # sums to the second cache, and the last program's way there and back


def seconds(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """The estimate of one launch: waves of programs, each as long as what it waits for; or memory."""
    shape = ProductShape.of(kernel)
    row_tiles, feature_tiles = -(-shape.rows // knobs.rows), -(-shape.features // knobs.features)
    programs = row_tiles * feature_tiles * knobs.split * shape.batches
    steps = -(-shape.depth // (knobs.depth * knobs.split))
    processors = max(1, target.processors)
    together = min(resident(knobs, kernel, target), -(-programs // processors))
    itemsize = kernel.src.itemsize
    times = 3 if knobs.arithmetic == "tf32x3" else 1
    products = (
        2 * knobs.rows * knobs.features * knobs.depth * times * processors / _rate(knobs, kernel, target)
    )
    weights = knobs.features * (2 if is_halved(knobs) else 1)
    moved = (knobs.rows + weights) * knobs.depth * itemsize / _L2_BYTES
    under_way = knobs.stages - 1
    if is_narrow(kernel):
        under_way = 1 if knobs.ahead else 0
    waiting = _STEP / under_way if under_way else _STEP + (products + moved) * together
    step = max(products * together, moved * together, waiting)
    wave = steps * step + _TILE
    waves = max(1.0, programs / (processors * together))
    whole = -(-programs // (processors * together))
    kept = 2 * programs * knobs.rows * knobs.features * 4 if knobs.split > 1 else 0
    memory = kernel.minimum_bytes / model.rates(target).memory + kept / (_L2_BYTES * processors)
    arriving = _ARRIVING if knobs.split > 1 else 0.0
    estimate = model.LAUNCH_SECONDS + max((waves + whole) / 2 * wave, memory) + arriving
    return estimate * _MEASURED["half" if itemsize == 2 else "single"]


def _rate(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """Operations a second of all processors; tiles below 64x64 wait for what they load from shared memory."""
    rates = model.rates(target)
    at_most = {"native": rates.half, "tf32": rates.tf32, "tf32x3": rates.tf32}
    most = rates.double if kernel.compute_dtype == "f64" else at_most.get(knobs.arithmetic, rates.single)
    return most * _REACHED[knobs.arithmetic] * min(1.0, sqrt(knobs.rows * knobs.features) / 64)


def resident(knobs: Knobs, kernel: Kernel, target: Target) -> int:
    """Programs that one processor holds at once."""
    threads = knobs.warps * (target.warp or 32)
    by_registers = 65536 // (min(255, registers(knobs, kernel, target)) * threads)
    return max(1, min(by_registers, target.l1_bytes // shared_bytes(knobs, kernel), 16))


def registers(knobs: Knobs, kernel: Kernel, target: Target) -> int:
    """Registers of a thread, estimated: its sums, what it loads past shared memory, and some besides.

    Compiled for sm_90: where neighbours are not 4 bytes aligned, elements come by themselves and pass through
    registers, each in one of its own, with its address.
    """
    threads = knobs.warps * (target.warp or 32)
    from_shared = target.name == "sm_90"  # the weight goes to the products without passing registers
    triple = 2.5 if from_shared else 3.5
    sums = (
        2.0 if kernel.compute_dtype == "f64" else {"tf32x3": triple, "ieee": 1.5}.get(knobs.arithmetic, 1.0)
    )
    passing = 0.0
    fixed = (56 if from_shared else 112) + (0 if knobs.maps or knobs.arithmetic != "tf32x3" else 20)
    if kernel.prologue:
        passing = 1.0
    if is_narrow(kernel):
        passing = 3.0 if knobs.ahead else 2.5
    tile, loaded = knobs.rows * knobs.features, knobs.rows * knobs.depth
    return int(sums * tile / threads + passing * loaded / threads) + fixed


def is_narrow(kernel: Kernel) -> bool:
    """Whether src's neighbours are aligned to less than 4 bytes, which asynchronous copies do not take."""
    others = [step for step in kernel.src.element_strides if step != 1]
    is_together = len(others) < kernel.src.rank
    return (gcd(*others, 16) if is_together else 1) * kernel.src.itemsize < 4


def shared_bytes(knobs: Knobs, kernel: Kernel) -> int:
    """Shared memory of one program: the tiles under way."""
    weights = knobs.features * (2 if is_halved(knobs) else 1)
    stages = max(1, knobs.stages)
    return max(1024, (knobs.rows + weights) * knobs.depth * kernel.src.itemsize * stages) + 1024
