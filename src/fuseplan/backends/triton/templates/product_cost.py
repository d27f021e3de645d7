"""How exact the matrix product is, and how long it takes."""

from __future__ import annotations

from fuseplan.backends.triton.templates.product_shape import Knobs, ProductShape
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.tensor import dtype_of

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


# One H100, measured: see docs/measured.md. Other GPUs are taken to be as balanced.
_FLOPS = {"native": 650e12, "tf32": 300e12, "tf32x3": 300e12, "ieee": 30e12, "summed": 2e12}
_FLOPS_F64 = 20e12
_BYTES = 2.9e12  # a second, memory
_L2_BYTES = 5.5e12  # a second, all processors together
_PROCESSORS = 132
_LAUNCH = 3.0e-6
_TILE = 1.5e-6  # a program's first loads and last stores
_STEP = 0.7e-6  # from a load's issue to its use


def seconds(knobs: Knobs, kernel: Kernel, target: Target) -> float:
    """The estimate of one launch: waves of programs, each as long as what it waits for; or memory."""
    shape = ProductShape.of(kernel)
    row_tiles, feature_tiles = -(-shape.rows // knobs.rows), -(-shape.features // knobs.features)
    programs = row_tiles * feature_tiles * knobs.split * shape.batches
    steps = -(-shape.depth // (knobs.depth * knobs.split))
    processors = target.processors or _PROCESSORS
    together = min(resident(knobs, kernel, target), -(-programs // processors))
    itemsize = kernel.src.itemsize
    times = 3 if knobs.arithmetic == "tf32x3" else 1
    rate = (_FLOPS_F64 if kernel.compute_dtype == "f64" else _FLOPS[knobs.arithmetic]) / _PROCESSORS
    products = 2 * knobs.rows * knobs.features * knobs.depth * times / rate
    weights = knobs.features * (2 if times == 3 else 1)
    moved = (knobs.rows + weights) * knobs.depth * itemsize / (_L2_BYTES / _PROCESSORS)
    step = max(products * together, moved * together, _STEP / max(1, knobs.stages - 1))
    wave = steps * step + _TILE
    waves = programs / (processors * together)
    whole = -(-programs // (processors * together))
    kept = 2 * programs * knobs.rows * knobs.features * 4 if knobs.split > 1 else 0
    memory = kernel.minimum_bytes / _BYTES + kept / _L2_BYTES
    arriving = 1.5e-6 if knobs.split > 1 else 0.0
    return _LAUNCH + max((waves + whole) / 2 * wave, memory) + arriving


def resident(knobs: Knobs, kernel: Kernel, target: Target) -> int:
    """Programs that one processor holds at once."""
    threads = knobs.warps * (target.warp or 32)
    sums = 3 if knobs.arithmetic == "tf32x3" else 1
    registers = min(255, sums * knobs.rows * knobs.features // threads + 56)
    return max(1, min(65536 // (registers * threads), target.l1_bytes // shared_bytes(knobs, kernel), 16))


def shared_bytes(knobs: Knobs, kernel: Kernel) -> int:
    """Shared memory of one program: the tiles under way."""
    weights = knobs.features * (2 if knobs.arithmetic == "tf32x3" else 1)
    stages = max(1, knobs.stages)
    return max(1024, (knobs.rows + weights) * knobs.depth * kernel.src.itemsize * stages) + 1024
