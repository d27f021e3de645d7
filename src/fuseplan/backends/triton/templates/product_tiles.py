"""Which tiles, parts and loads of a matrix product are worth considering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fuseplan.backends.triton.templates import product_cost
from fuseplan.backends.triton.templates.product_shape import Knobs, ProductShape, row_axes
from fuseplan.backends.triton.templates.three_products import FINE_DEPTH, FINE_STEP
from fuseplan.emit import COUNTER_BYTES
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.template import Accuracy

FEW = 4  # tiles of features that one row tile is kept in the second cache for
MOST_REGISTERS = 232  # of an estimate, of the 255 that a thread may have
MOST_LOADED = 256  # features: tiles this wide were never the fastest with channels first
LEAST_DEPTH = 64  # below it IEEE sums have less error on wide or positive data; one H100
ALIGNED = 16  # bytes: strides that the copy engine takes


def arithmetics(kernel: Kernel, target: Target, accuracy: Accuracy) -> tuple[str, ...]:
    """How the products may be computed, the fastest first: `strict` takes the most exact alone."""
    is_nvidia = target.name.startswith("sm_")
    if kernel.src.dtype == "f64":
        found = ["ieee" if is_nvidia else "summed"]  # Triton has no products of f64 tiles for AMD
    elif kernel.src.dtype == "f32":
        has_tf32 = is_nvidia or target.name == "gfx942"
        found = ["tf32"] * (kernel.contraction.precision == "tf32" and has_tf32)
        least = (
            LEAST_DEPTH if kernel.contraction.groups == 1 else FINE_DEPTH
        )  # groups share steps with others
        shown = kernel.contraction.depth >= least or accuracy != "default"
        found += [*["tf32x3"] * (is_nvidia and shown), "ieee"]
    else:
        found = ["native", *["ieee"] * bool(kernel.prologue)]
    if accuracy == "strict":
        return (found[-1],)
    if isinstance(accuracy, str):
        return tuple(found)
    return tuple(each for each in found if product_cost.bound(kernel, each) <= accuracy)


def choices(kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Knobs]:
    """The knobs of each candidate; where none is sure to fit the registers, the smallest tile."""
    found = [each for each in _considered(kernel, target, accuracy) if fits(each, kernel, target)]
    yield from found or list(_considered(kernel, target, accuracy))[-1:]


def _considered(kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Knobs]:
    arithmetic = arithmetics(kernel, target, accuracy)[0]
    shape = ProductShape.of(kernel)
    copies = (True, False) if arithmetic != "tf32x3" and mappable(kernel, target) else (False,)
    for rows, features, depth, warps, stages in _tiles(kernel, target, arithmetic):
        across = -(-shape.features // features)
        base = Knobs(rows, features, depth, arithmetic=arithmetic, warps=warps, stages=stages)
        is_deep = rows * features >= 128 * 32 * warps  # 128 sums a thread
        base = replace(base, group=1 if across <= FEW else 8, parts=2 if is_deep else 1)
        steps = -(-shape.depth // depth)
        ahead = (True, False) if product_cost.is_narrow(kernel) and steps > 1 else (False,)
        splits = _splits(base, shape, target)
        for split, maps, early in product(splits, copies, ahead):
            for swapped in _orders(base, kernel, len(splits) > 1):
                yield replace(base, split=split, maps=maps, swapped=swapped, ahead=early)


def fits(knobs: Knobs, kernel: Kernel, target: Target) -> bool:
    """Whether a program has the shared memory it takes, and most likely the registers."""
    if product_cost.shared_bytes(knobs, kernel) > target.l1_bytes:
        return False
    return product_cost.registers(knobs, kernel, target) <= MOST_REGISTERS


def mappable(kernel: Kernel, target: Target) -> bool:
    """Whether the copy engine can read src: rows one stride apart, channels side by side, 16 bytes.

    With a prologue src goes through registers on its way to the tensor cores, and so it does where it is
    split in halves: there Triton 3.6 gives a tile's place to the next copy too early, now and then (wrong
    sums under two streams on one H100, tests/device).
    """
    spec, size = kernel.src, kernel.src.itemsize
    axes = row_axes(spec, 1)
    aligned = all(stride * size % ALIGNED == 0 for _, stride in axes)
    is_matrix = len(axes) < 2 and spec.element_strides[1] == 1 and not kernel.prologue
    return target.name in ("sm_90", "sm_100", "sm_120") and is_matrix and aligned and spec.dtype != "f64"


def _splits(base: Knobs, shape: ProductShape, target: Target) -> tuple[int, ...]:
    """In how many parts the depth may be summed: more than one where tiles leave processors without work."""
    tiles = -(-shape.rows // base.rows) * -(-shape.features // base.features) * shape.batches
    if base.rows > 64 or 2 * tiles > target.processors or tiles * 4 > COUNTER_BYTES:
        return (1,)
    steps = -(-shape.depth // base.depth)
    return tuple(split for split in (1, 2, 4, 8) if split == 1 or steps >= 4 * split)


def _orders(base: Knobs, kernel: Kernel, is_few: bool) -> tuple[bool, ...]:
    """Whether features may stand first: where rows are too few for the instruction's 64, or tiles are few.

    In three products of TF32 the factor that stands first is split in registers, and so the weight is read
    once where it is that.
    """
    if base.rows < 64 <= base.features:
        return (True,)
    is_first = kernel.src.element_strides[1] != 1
    if base.arithmetic == "tf32x3":
        is_split = is_few and not is_first and base.rows == base.features and base.depth > FINE_STEP
        return (False, True) if is_split else (False,)
    return (False, True) if is_first and not product_cost.is_narrow(kernel) else (False,)


def _tiles(kernel: Kernel, target: Target, arithmetic: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows, features, depth, warps, stages."""
    shape = ProductShape.of(kernel)
    table = TILES[arithmetic]
    if not target.name.startswith("sm_"):
        table = TILES["summed" if arithmetic == "summed" else "amd"]
    elif arithmetic == "native" and product_cost.is_narrow(kernel):
        table = TILES["narrow"]
    elif arithmetic == "tf32x3" and shape.depth < FINE_DEPTH:
        table = TILES["fine"]
    if kernel.src.element_strides[1] != 1:
        table = tuple(each for each in table if each[1] < MOST_LOADED)
    fitting = [each for each in table if each[0] < 2 * max(16, shape.rows)]
    fitting = [each for each in fitting if each[1] < 2 * max(32, shape.features)]
    yield from fitting or table[-1:]


TILES = {
    "native": (
        (128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3),
        (128, 64, 64, 4, 3), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 64, 64, 4, 4),
        (64, 32, 256, 4, 4), (32, 128, 64, 4, 4), (32, 64, 128, 4, 3), (16, 64, 128, 4, 4),
        (16, 32, 64, 2, 3),
    ),
    "tf32": (
        (128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 3), (64, 32, 32, 4, 3), (16, 32, 32, 2, 3),
    ),
    "narrow": ((64, 128, 64, 4, 2), (64, 64, 64, 4, 3), (64, 32, 64, 4, 3), (16, 32, 64, 2, 3)),
    "tf32x3": (
        (64, 64, 32, 4, 3), (64, 64, 32, 4, 4), (64, 32, 32, 4, 3), (32, 64, 32, 4, 4), (16, 64, 64, 4, 3),
        (16, 64, 32, 4, 4), (16, 128, 32, 4, 4),
    ),
    "fine": ((64, 64, 16, 4, 3), (64, 64, 16, 4, 2), (64, 32, 16, 4, 3)),
    "ieee": ((64, 64, 16, 4, 2), (128, 64, 16, 8, 3), (32, 32, 16, 2, 3), (16, 32, 16, 1, 2)),
    "summed": ((16, 16, 16, 4, 1),),
    "amd": ((128, 128, 32, 8, 2), (64, 64, 32, 4, 2), (64, 32, 32, 4, 2), (16, 32, 32, 2, 2)),
}  # fmt: skip
