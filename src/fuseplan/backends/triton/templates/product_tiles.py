"""How a product is cut into tiles: rows x features, each summed over taps and channels, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fuseplan.backends.triton.index import WIDE, Axis, ceil_div, merged
from fuseplan.backends.triton.shell import of_launch, programs_of
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import COUNTER_BYTES, Programs
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.transposed import joined, residues, widest
from fuseplan.language.bounds import EXACT_IN_I32
from fuseplan.language.dtypes import FP8, dtype_of
from fuseplan.language.layouts import image_strides
from fuseplan.language.tensor import TensorSpec

LEAST = 16  # a matrix unit's tile has at least so many features, rows, and products in a sum
NARROW = 16  # with fewer channels a group, taps and channels are summed over as one axis
MAP_BYTES = 16  # what the copy engine's strides are multiples of
SECTOR_BYTES = 32  # what memory reads and writes at a time
MOST_RUN = 16  # elements: no vector has more


@dataclass(frozen=True)
class Knobs:
    """The fields of `Product`, which says what they mean."""

    rows: int
    features: int
    depth: int
    split: int = 1
    swapped: bool = False
    maps: bool = False
    arithmetic: str = "native"
    apart: bool = False
    group: int = 1
    parts: int = 1
    warps: int = 4
    stages: int = 3
    ahead: bool = False
    joined: int = 1

    @property
    def is_halved(self) -> bool:
        """Whether the weight is packed as its two factors: where src is the factor that passes registers."""
        return self.arithmetic == "tf32x3" and not self.swapped

    @property
    def weights(self) -> int:
        """Tiles of the weight: the rounded one, and what is left of it."""
        return 2 if self.is_halved else 1


class Tiles:
    """The sizes that follow from a kernel and the knobs.

    Rows are output positions over the whole batch, or over one image where each has a weight of its own: a
    batch of products then. Several groups that are too narrow for a tile alone stand side by side in one:
    `merged` of them have `channels` channels and `features` features together, and weights between different
    groups are zero.

    Attributes:
        whole, conv: the kernel's contraction, and the convolution whose products tiles are.
        is_joint: `whole` is a transposed convolution with a stride, and `conv` has the features of all
            residues.
        residues: of one where residues have taps of their own, along each axis; () of any other. Each is a
            product of its own then, and `conv` is as large as that of any.
        weight_kernel: taps of a feature in the packed weight, along each axis.
        is_matrix: whether rows of src are multiplied as they are: no windows, no groups.
        is_open: whether the extent that rows follow from is open.
        batches: products side by side.
        rows, image_rows: rows of one product, and of one image.
        merged: groups that stand side by side in a tile: as many as fill the least one, at most 64 channels.
        channels, features: channels that a tile's features read; features of the groups side by side.
        ways: features that one of dst is made of: gate and value of a gated product, which are neighbours.
        group_blocks, feature_blocks: tiles along the groups, and along the features of one block of groups.
        row_blocks, across: tiles along the rows, and tiles of one block of rows.
        parts: products of residues; 1 without.
        each, count: tiles of one product, and all tiles; with an open extent, the most there can be.
        is_flat: taps and channels are summed over as one axis, because there are so few channels.
        whole_steps, steps: steps of the sum, and those that one program takes.
        channel_blocks: steps of the sum for one tap, those behind the last part's end too; not asked where
            `is_flat`.
    """

    def __init__(self, kernel: Kernel, knobs: Knobs) -> None:
        self.kernel, self.knobs = kernel, knobs
        self.whole = kernel.contraction
        joint = joint_of(kernel)
        self.is_joint = joint is not None
        self.residues = residues(self.whole) if self.whole.is_transposed and joint is None else ()
        conv = self.conv = widest(self.whole) if self.residues else joint or self.whole
        self.weight_kernel = self.whole.kernel if self.residues else conv.kernel
        self.is_matrix, self.is_open = is_matrix(conv) and not self.is_shifted, kernel.open_axis is not None
        self.batches = conv.batch if conv.weight_per_batch else 1
        self.rows = of_launch(kernel, conv.rows // self.batches)
        self.image_rows = prod(conv.dst_spatial)
        filling, allowed = -(-LEAST // conv.features_per_group), max(1, 64 // conv.channels_per_group)
        self.merged = min(filling, allowed, conv.groups)
        self.channels = self.merged * conv.channels_per_group
        self.features = self.merged * conv.features_per_group
        self.ways = kernel.parts.reads if kernel.parts else 1
        self.group_blocks = ceil_div(conv.groups, self.merged)
        self.feature_blocks = ceil_div(self.features, knobs.features)
        self.across = self.feature_blocks * self.group_blocks
        self.row_blocks = ceil_div(self.rows, knobs.rows)
        self.each = self.row_blocks * self.across
        self.parts = prod(map(len, self.residues))
        self.count = int(self.each.high) * self.batches * self.parts
        self.is_flat = self.merged == 1 and not self.residues and self.channels < NARROW and conv.taps > 1
        self.whole_steps = conv.taps * ceil_div(self.channels, knobs.depth)
        if self.is_flat:
            self.whole_steps = ceil_div(conv.depth, knobs.depth)
        self.steps = ceil_div(self.whole_steps, knobs.split)
        self.channel_blocks = ceil_div(self.steps * knobs.split, conv.taps)

    @property
    def is_shifted(self) -> bool:
        """Whether the rows of a residue begin at another place of src than those of another one."""
        return any(each.low for axis in self.residues for each in axis)

    @property
    def is_gathered(self) -> bool:
        """Whether addresses in src are made in each step; else those of the first step stay in registers.

        With joined channels, or one sum of three products over large tiles, they have no room there: compiled
        for sm_90, up to 58 registers more.
        """
        is_full = self.knobs.arithmetic == "tf32x3" and not self.knobs.apart
        return self.knobs.joined > 1 or is_full or not self.is_matrix

    @property
    def programs(self) -> int | Programs:
        """Programs of a launch; with an open extent, how they follow from it."""
        rows, across = self.conv.rows // self.batches, self.across * self.batches * self.parts
        return programs_of(self.kernel, rows, self.knobs.rows, across)

    @property
    def weight_channels(self) -> int:
        """Channels of one tap in a packed row of the weight: whole steps where one tap has many."""
        if self.knobs.maps:
            unit = MAP_BYTES // self.kernel.src.itemsize
            return ceil_div(self.channels, unit) * unit
        if self.is_flat or self.merged > 1:
            return self.conv.channels_per_group
        return self.channel_blocks * self.knobs.depth

    @property
    def weight_row(self) -> int:
        """Elements of a packed row of the weight."""
        return prod(self.weight_kernel) * self.weight_channels

    @property
    def weight_rows(self) -> int:
        """Packed rows of one product: every tile reads whole ones, but for the copy engine."""
        if self.knobs.maps:
            return self.features
        return (self.group_blocks - 1) * self.features + self.feature_blocks * self.knobs.features

    @property
    def workspace_bytes(self) -> int:
        """Counters and every part's sums, where the sum is in parts."""
        if self.knobs.split == 1:
            return 0
        size = dtype_of(sum_dtype(self.knobs, self.kernel)).itemsize
        return COUNTER_BYTES + self.count * self.knobs.split * self.knobs.rows * self.knobs.features * size

    @property
    def src_run(self) -> int:
        """`told_run` of src's rows."""
        if self.is_matrix:
            return rows_run(row_axes(self.kernel.src, self.batches))
        extent, step = self.conv.dst_spatial[-1], self.conv.stride[-1] * self.kernel.src.element_strides[-1]
        return told_run(int(self.rows.high) // extent, extent, step, is_moved=self.conv.kernel[-1] > 1)

    @property
    def is_wide(self) -> bool:
        """Whether any offset needs 64 bits."""
        weight = self.batches * self.weight_rows * self.weight_row * self.knobs.weights
        rows = (self.row_blocks.high + 1) * self.knobs.rows
        reach = max(self.kernel.src.span, self.kernel.dst.span) + self._overhang
        return max(weight, rows, reach) >= WIDE

    @property
    def _overhang(self) -> int:
        """How far offsets of elements that are masked out may lie outside of src."""
        steps = self.kernel.src.element_strides[2:]
        around = (low + high for low, high in self.conv.padding)
        return sum(map(prod, zip(steps, around, strict=False)))


def factor_dtype(kernel: Kernel) -> str:
    """The dtype in which both factors are multiplied: the weight's, or f16, which has all numbers of fp8."""
    return "f16" if kernel.weight.dtype in FP8 else kernel.weight.dtype


def sum_dtype(knobs: Knobs, kernel: Kernel) -> str:
    """The dtype of a tile's sum: i32 of products of integers, which are exact, else the compute dtype."""
    is_exact = kernel.weight.dtype == "i8" and kernel.largest_sum < EXACT_IN_I32
    return "i32" if is_exact else kernel.compute_dtype


def joint_of(kernel: Kernel) -> Contraction | None:
    """The convolution with the features of all residues of a transposed one, where it takes less time.

    It gathers src once for all of them, which pays where elements come one at a time: on an H200, f32 with
    channels first takes 0.68 to 0.74 of the time of residues apart, and f16 1.1 to 1.2.
    """
    whole = kernel.contraction
    made = joined(whole) if whole.is_transposed and not kernel.parts else None
    if made is None or made.rows * made.features > 1.1 * whole.rows * whole.features:
        return None
    is_slow = kernel.src.itemsize > 2 and kernel.src.element_strides[1] != 1
    return made if made.taps == 1 or is_slow else None


def is_matrix(conv: Contraction) -> bool:
    """Whether rows of src are multiplied as they are: no windows, no groups."""
    return conv.is_matrix_product and conv.groups == 1


def row_axes(spec: TensorSpec, batches: int) -> tuple[Axis, ...]:
    """The axes that make up the rows of one product, outermost first, merged where one continues another."""
    return _row_axes(spec, spec.element_strides, 0 if batches == 1 else 2)


def rows_run(axes: Sequence[Axis]) -> int:
    """`told_run` of rows along these axes."""
    return told_run(len(axes), *axes[-1]) if axes else 1


def image_axes(spec: TensorSpec) -> tuple[tuple[Axis, ...], int]:
    """One image without gaps, in storage order: its positions' axes, merged, and its channels' stride."""
    steps = image_strides(spec.shape, spec.element_strides)
    return _row_axes(spec, steps, 2), steps[1]


def _row_axes(spec: TensorSpec, steps: Iterable[int], first: int) -> tuple[Axis, ...]:
    axes = list(zip(spec.shape, steps, strict=True))
    return merged(axis for place, axis in enumerate(axes) if place >= first and place != 1)


def told_run(outer: int, extent: int, step: int, *, is_moved: bool = False) -> int:
    """How many neighbouring rows lie side by side, where the compiler has to be told; else 1.

    Triton derives the run from the extent, unless a tap moves it or the extent is odd. From 3.7 on it then
    gives neighbouring threads neighbours along the last axis of a tile, which lie far apart: convolutions
    with channels first reached 0.11 to 0.75 of their speed. A run of an even extent is true. In one of an odd
    extent a pair may cross an image's end; there the remainder by that extent is a summand of each offset, so
    no alignment above one element follows, no vector is loaded or stored, and the run orders threads alone.

    Args:
        outer: runs; a single one needs no remainder.
        extent: elements of a run.
        step: between them.
        is_moved: whether a tap is added.
    """
    if step != 1 or outer == 1 or extent == 1 or not (extent % 2 or is_moved):
        return 1
    return max(2, min(extent & -extent, MOST_RUN))


def power_of_two(size: int, most: int) -> int:
    """The least power of two that holds `size`, from LEAST to `most`."""
    return max(LEAST, min(most, 1 << (size - 1).bit_length()))
