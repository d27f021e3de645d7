"""A product with its elementwise tail: `matmul` and every convolution, in Triton for any GPU.

Behind the template: which arithmetics, tiles, parts and loads are worth considering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from fuseplan.backends.parts import gates_beside
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates import product_cost
from fuseplan.backends.triton.templates.product_arithmetic import FINE_DEPTH, FINE_STEP
from fuseplan.backends.triton.templates.product_pairs import writer_of
from fuseplan.backends.triton.templates.product_tiles import (
    LEAST,
    MAP_BYTES,
    Knobs,
    Tiles,
    factor_dtype,
    power_of_two,
    row_axes,
)
from fuseplan.kernels.emit import COUNTER_BYTES, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Halves, Packing, Rounded
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, contraction_claims, layout_claims
from fuseplan.kernels.transposed import by_features, by_residue
from fuseplan.language.bounds import EXACT_IN_I32
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim


@dataclass(frozen=True)
class Product(Knobs, GpuTemplate):
    """Tiles of output positions x features, one per program; src as rows of a matrix, or gathered tap by tap.

    Any window, stride, groups, layout, strides of src and dtype, on any GPU; gated products of one group.

    reads:  src once for each block of features and each tap, unless a cache still holds it; weight likewise
        for each block of rows
    writes: dst once; with the sum in parts, each part's sums to the workspace and back
    chosen: for f32, few rows, channels first, groups, a prologue, or a GPU other than Hopper

    Each f32 is two numbers of 11 bits, multiplied in three products on tensor cores (`tf32x3`), on GPUs
    that have them. `strict` multiplies in IEEE f32.

    Attributes:
        rows: output positions of a tile, a run over the whole batch.
        features: features of a tile.
        depth: products summed in one step: channels of one tap, or pairs of tap and channel of few channels.
        split: programs that share a tile; each takes a part of the sum, the last adds the parts in order.
        swapped: the product's first axis holds the features, which suits few rows.
        maps: the copy engine reads src and weight (sm_90 and later).
        arithmetic: arithmetic of the products: `native` (f16, bf16, i8, and fp8 as f16), `tf32x3`, `tf32`,
            `ieee`, or `summed` element by element.
        apart: the small products of `tf32x3` have a sum of their own through all steps.
        group: row tiles in a group; a group goes through all features before the next group begins.
        parts: pieces of the tile that the epilogue takes one after another.
        warps: warps of a program.
        stages: steps whose loads are under way at once.
        ahead: src is loaded into registers one step ahead. Asynchronous copies do not support neighbours that
            are aligned to less than 4 bytes.
        joined: channels of a position that one thread loads and joins; 1 where memory has them side by side.
    """

    name: ClassVar[str] = "product"
    opens: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel, transposes=True)
        yield from layout_claims(kernel, gated=True)
        exact = arithmetics(kernel, target, "strict")[0]
        yield accuracy_claim(product_cost.bound(kernel, exact), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        has_counters = kernel.open_axis is None  # for all tiles of a call
        for knobs in choices(kernel.representative, target, accuracy):
            if has_counters or knobs.split == 1:
                yield cls(**vars(knobs))

    def packed_weight(self, kernel: Kernel) -> Packing:
        """The weight as [image][feature][tap][channel]: whole tiles of features, whole steps of channels.

        In a gated product, features of gates and of values take turns.
        """
        tiles, per_batch = Tiles(kernel, self), int(kernel.contraction.weight_per_batch)
        images, (features, channels, *taps) = kernel.weight.axes[:per_batch], kernel.weight.axes[per_batch:]
        sizes = tiles.weight_kernel if taps else ()  # a matrix product's weight has none for its one tap
        extents = (*(tiles.batches,) * per_batch, tiles.weight_rows, *sizes, tiles.weight_channels)
        axes, inner = (*images, features, *taps, channels), (*sizes, kernel.contraction.channels_per_group)
        gates = gates_beside(kernel.parts, kernel.contraction.features // 2, 1, inner)
        last = (Halves(),) if self.is_halved else (Rounded(),) if self.arithmetic == "tf32" else ()
        operand = replace(kernel.weight, shape=tiles.conv.weight_shape) if tiles.is_joint else kernel.weight
        packed = weight_packing(operand, axes, extents, gates=gates, last=last)
        if tiles.is_joint:
            is_last = kernel.dst.element_strides[1] == 1
            return packed.behind(by_features(kernel.weight, tiles.whole, last=is_last))
        return packed.behind(by_residue(kernel.weight, tiles.whole)) if tiles.residues else packed

    def kept_bytes(self, kernel: Kernel, target: Target) -> int:
        return Tiles(kernel, self).workspace_bytes

    def flops(self, kernel: Kernel) -> int:
        times = 3 if self.arithmetic == "tf32x3" else 1
        return kernel.flops + (times - 1) * kernel.contraction.flops

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return product_cost.seconds(self, kernel.representative, target)

    def error_bound(self, kernel: Kernel) -> float:
        """On tensor cores 2^-23 per product plus the factors' rounding; else one rounding per product."""
        return product_cost.bound(kernel, self.arithmetic)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return writer_of(self, kernel, self.text).source(target)


FEW = 4  # tiles of features that one row tile is kept in the second cache for
MOST_REGISTERS = 232  # of an estimate, of the 255 that a thread may have
MOST_LOADED = 256  # features: tiles this wide were never the fastest with channels first
MOST_HELD = 64  # elements of a gathered tile of src that one thread has in registers
MAPPED = ("f32", "f16", "bf16", "i8")
LEAST_OF_I8 = 32  # products of a sum of i8: of the instruction
LEAST_DEPTH = 64  # below it IEEE sums have less error on wide or positive data; one H100


def arithmetics(kernel: Kernel, target: Target, accuracy: Accuracy) -> tuple[str, ...]:
    """How the products may be computed, the fastest first: `strict` takes the most exact alone."""
    is_nvidia = target.name.startswith("sm_")
    factor = factor_dtype(kernel)
    if factor == "i8" and kernel.largest_sum < EXACT_IN_I32:
        found = ["summed" if kernel.contraction.factor else "native"]
    elif kernel.compute_dtype == "f64":
        # Triton has no products of f64 tiles for AMD, and 3.6 none for NVIDIA of elements that were widened.
        found = ["ieee" if is_nvidia and kernel.src.dtype == factor == "f64" else "summed"]
    elif factor == "f32":
        has_tf32 = is_nvidia or target.name == "gfx942"
        found = ["tf32"] * (kernel.contraction.precision == "tf32" and has_tf32)
        # Groups share steps with others.
        least = LEAST_DEPTH if kernel.contraction.groups == 1 else FINE_DEPTH
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
    arithmetic = arithmetics(kernel, target, accuracy)[0]
    considered = dict.fromkeys([*_plain(kernel, target, arithmetic), *_gathered(kernel, target, arithmetic)])
    found = [each for each in considered if fits(each, kernel, target)]
    yield from found or [min(considered, key=lambda each: each.rows * each.features)]


def fits(knobs: Knobs, kernel: Kernel, target: Target) -> bool:
    """Whether a program has the shared memory it takes, and most likely the registers."""
    if product_cost.shared_bytes(knobs, kernel) > target.l1_bytes:
        return False
    return Tiles(kernel, knobs).is_gathered or product_cost.registers(knobs, kernel, target) <= MOST_REGISTERS


def _splits(base: Knobs, kernel: Kernel, target: Target) -> tuple[int, ...]:
    """In how many parts a sum may be made: more than one where tiles leave processors without work."""
    tiles = Tiles(kernel, base)
    if base.rows > 64 or tiles.whole.is_transposed or tiles.merged > 1 or tiles.count * 4 > COUNTER_BYTES:
        return (1,)
    # Few rows wait for the weight: a processor asks for more of it in several programs.
    most = target.processors * (4 if 2 * tiles.count <= target.processors or base.rows < 64 else 0)
    parts = (split for split in (2, 4, 8) if tiles.whole_steps >= 4 * split and tiles.count * split <= most)
    return 1, *parts


# ---- rows of a matrix


def mappable(kernel: Kernel, target: Target) -> bool:
    """Whether the copy engine can read src: rows one stride apart, channels side by side, 16 bytes.

    With a prologue src goes through registers on its way to the tensor cores, and so it does where it is
    split in halves: there Triton 3.6 gives a tile's place to the next copy too early, now and then (wrong
    sums under two streams on one H100, tests/device).
    """
    spec, size = kernel.src, kernel.src.itemsize
    axes = row_axes(spec, 1)
    aligned = all(stride * size % MAP_BYTES == 0 for _, stride in axes or ((1, spec.channels),))
    is_matrix = len(axes) < 2 and spec.element_strides[1] == 1 and not kernel.prologue
    return target.name in ("sm_90", "sm_100", "sm_120") and is_matrix and aligned and spec.dtype in MAPPED


def _plain(kernel: Kernel, target: Target, arithmetic: str) -> Iterator[Knobs]:
    """Tiles of rows that are multiplied as they lie."""
    probe = Tiles(kernel, Knobs(LEAST, LEAST, LEAST))
    if not probe.is_matrix:
        return
    copies = (True, False) if arithmetic != "tf32x3" and mappable(kernel, target) else (False,)
    for rows, features, depth, warps, stages in _tiles(kernel, target, arithmetic, probe):
        base = Knobs(rows, features, depth, arithmetic=arithmetic, warps=warps, stages=stages)
        group = 1 if Tiles(kernel, base).across <= FEW else 8
        is_deep = rows * features >= 128 * 32 * warps  # 128 sums a thread
        base = replace(base, group=group, parts=2 if is_deep else 1, apart=arithmetic == "tf32x3")
        steps = ceil_div(probe.channels, depth)
        ahead = (True, False) if product_cost.is_narrow(kernel) and steps > 1 else (False,)
        splits = _splits(base, kernel, target)
        for split, maps, early in product(splits, copies, ahead):
            for swapped in _orders(base, kernel, len(splits) > 1):
                yield replace(base, split=split, maps=maps, swapped=swapped, ahead=early)


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


def _tiles(
    kernel: Kernel, target: Target, arithmetic: str, probe: Tiles
) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows, features, depth, warps, stages."""
    table = TILES[arithmetic]
    if not target.name.startswith("sm_"):
        table = TILES["summed" if arithmetic == "summed" else "amd"]
    elif arithmetic == "native" and product_cost.is_narrow(kernel):
        table = TILES["narrow"]
    elif arithmetic == "tf32x3" and probe.channels < FINE_DEPTH:
        table = TILES["fine"]
    if kernel.src.element_strides[1] != 1:
        table = tuple(each for each in table if each[1] < MOST_LOADED)
    fitting = [each for each in table if each[0] < 2 * max(16, probe.rows.high)]
    fitting = [each for each in fitting if each[1] < 2 * max(32, probe.features)]
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


# ---- elements gathered tap by tap, and matrices in the same tiles


def _gathered(kernel: Kernel, target: Target, arithmetic: str) -> Iterator[Knobs]:
    """Tiles whose elements of src have an address each, the best guess first."""
    probe = Tiles(kernel, Knobs(LEAST, LEAST, LEAST))
    depth = _depth(kernel, probe, arithmetic)
    is_half_first = kernel.src.itemsize == 2 and kernel.dst.element_strides[1] != 1
    for most, features, warps in _extents(kernel, target, probe, arithmetic):
        fitting = min(features, power_of_two(probe.features, 256))
        rows = min(most, power_of_two(int(probe.rows.high), 512))
        # All channels of groups side by side are in one step.
        is_held = probe.merged > 1 or rows * depth <= MOST_HELD * 32 * warps
        step = depth if is_held else depth // 2
        joined = _joined(kernel, probe, step)
        base = Knobs(
            rows,
            fitting,
            step,
            swapped=(is_half_first and fitting < 128) or most < 64 <= fitting,
            arithmetic=arithmetic,
            parts=2 if probe.is_joint and rows * fitting >= 128 * 32 * warps else 1,
            warps=warps,
            stages=3 if joined == 1 else 2,
            ahead=joined > 1,
            joined=joined,
        )
        if probe.is_flat and rows * base.depth > MOST_HELD // 4 * 32 * warps:
            continue  # each element has an address and a mask of its own
        yield from (replace(base, split=split) for split in _splits(base, kernel, target))


def _depth(kernel: Kernel, probe: Tiles, arithmetic: str) -> int:
    """Products that one step adds to a sum: of channels, of channels and taps where these are one axis."""
    least = LEAST_OF_I8 if kernel.weight.dtype == "i8" and arithmetic == "native" else 1
    if probe.merged > 1:
        return max(least, power_of_two(probe.channels, 64))
    size = max(kernel.src.itemsize, dtype_of(kernel.weight.dtype).itemsize)
    most = 32 if size > 2 or probe.is_flat else 64
    if least > 1:
        return max(least, power_of_two(probe.channels, most))
    if arithmetic in ("ieee", "summed"):
        most = min(most, LEAST)
    if arithmetic == "tf32x3" and kernel.contraction.depth < FINE_DEPTH:
        most = min(most, FINE_STEP)
    return power_of_two(probe.conv.depth if probe.is_flat else probe.channels, most)


def _joined(kernel: Kernel, probe: Tiles, depth: int) -> int:
    """Channels loaded by one thread: what fills 16 bytes, where 16-bit channels are far apart in src.

    Copies of 4 bytes go past the registers, and are faster: 153 us for 181 (128-28-28-128, H100).
    Triton 3.6 gives each of a product's four lanes eight joined bytes: those of a step of 16 count twice.
    """
    if kernel.dst.element_strides[1] == 1 or kernel.prologue or probe.is_flat or kernel.src.itemsize > 2:
        return 1
    if kernel.src.itemsize == 1 and depth < LEAST_OF_I8:
        return 1
    return min(16 // kernel.src.itemsize, depth)


def _extents(
    kernel: Kernel, target: Target, probe: Tiles, arithmetic: str
) -> tuple[tuple[int, int, int], ...]:
    """Rows, features and warps of tiles, the best guess first."""
    if arithmetic == "summed":
        return ((16, 16, 4),)
    if kernel.compute_dtype == "f64" and arithmetic != "native":
        return ((32, 32, 4), (64, 32, 4), (16, 16, 4))
    if arithmetic == "ieee":
        return ((64, 64, 4), (128, 64, 8), (32, 32, 4), (16, 16, 4))
    large = () if kernel.weight.dtype == "f32" else ((256, 64, 4),)  # f32 has sums in twice the registers
    joint = ((128, 256, 8),) * probe.is_joint
    usual = (*joint, (64, 128, 4), (128, 128, 8), (128, 64, 4), *large, (64, 64, 4), (32, 32, 4), (64, 16, 4))
    # Where tiles leave processors without work, tiles of few rows, their features first.
    has_few = 2 * Tiles(kernel, Knobs(64, 64, LEAST)).count <= target.processors
    is_short = arithmetic == "tf32x3" and kernel.contraction.depth < FINE_DEPTH  # the weight is split finely
    is_small = has_few and not is_short and probe.features >= 64 and probe.merged == 1
    return (*usual, (32, 64, 4), (16, 64, 4)) if is_small and not probe.is_matrix else usual
