"""How a contraction lies in tiles that Hopper's copy engine moves: boxes of rows, columns of features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.templates.product_tiles import MAP_BYTES, SECTOR_BYTES, joint_of
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import COUNTER_BYTES, TensorMap
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.tensor import TensorSpec
from fuseplan.scalar import functions
from fuseplan.system.locks import cached_property

ALIGNED = 8  # two-byte elements in the 16 bytes that the copy engine's addresses and strides are multiples of
HALF = 2  # bytes of an f16 or bf16
MOST_BOX = 256  # positions that a box spans along one axis
MOST_STEP = 8  # positions from one element of a box to the next
LONG = 512  # elements of a row: to fill its lines takes few more
LINE, SECTOR = 64, 16  # two-byte elements of a line of the L2, and of a sector of it
READ_OFTEN = 16384  # features: with rows of whole lines, products and the copy took 0.92 to 0.96 of the time
MOST_AXES = 5  # of a tensor that the copy engine reads
ROW_BYTES = 128  # of a row of src in shared memory, at most
SHORT = 4.0  # positions side by side that take as long to begin as to move, where src passes registers
LOADED, STORED = 180.0, 140.0  # products of TF32 that take as long as an element of src, and one of dst
BROKEN = 56.0  # positions: a run that begins and ends inside of sectors takes as much longer to store


@dataclass(frozen=True)
class Axis:
    """An axis of the positions: of dst's, which are the rows, and of src's.

    Attributes:
        letter: what coordinates are called in generated code.
        rows, dst_stride: positions of dst, and elements from one to the next.
        positions, src_stride: of src.
        taps, step, dilation, low: of the convolution along it.
        stride, begin, extent: of a transposed convolution: outputs from a row to the next, that of the first
            row and residue, and how many there are.
    """

    letter: str
    rows: int
    dst_stride: int
    positions: int
    src_stride: int
    taps: int = 1
    step: int = 1
    dilation: int = 1
    low: int = 0
    stride: int = 1
    begin: int = 0
    extent: int = 0

    @property
    def reach(self) -> int:
        """Positions from the one that the first tap reads to the last tap's."""
        return (self.taps - 1) * self.dilation


@dataclass(frozen=True)
class Geometry:
    """A contraction as dst rows times features.

    A row is one position of dst. Where the positions of src lie evenly and each is read once, for the row of
    the same index, they are one axis; else batch, then the spatial axes.

    Attributes:
        reaching: whether the first spatial axis comes before the batch. Then the lines of a box along it lie
            one behind the other, and those that a tap needs are where the tap before it has its own, but one.
        whole_lines, padded: as `Hopper` says.
    """

    kernel: Kernel
    reaching: bool = False
    whole_lines: bool = False
    padded: bool = False

    @property
    def gathers(self) -> bool:
        """Whether src goes through registers: f32, which is rounded to TF32 there."""
        return self.kernel.src.dtype == "f32"

    def _breaks(self, unit: int) -> bool:
        """Whether rows of src that the copy engine moves begin inside of so many elements."""
        src = self.kernel.src
        stepped = zip((src.batch, *src.spatial), _strides(src), strict=True)
        return not self.gathers and any(extent > 1 and stride % unit for extent, stride in stepped)

    @cached_property
    def src(self) -> TensorSpec:
        """src as boxes of it are read: where it is padded, dense, with rows of whole units."""
        src = self.kernel.src
        if not self.padded:
            return src
        extents = (src.batch, *src.spatial, self.pitch)
        image, *steps = (prod(extents[place:]) for place in range(1, len(extents)))
        return TensorSpec(src.shape, src.dtype, strides=(image, 1, *steps))

    @property
    def pitch(self) -> int:
        """Elements from a row of src to the next, as boxes of it are read."""
        return row_of(self.conv.channels)

    @cached_property
    def scatters(self) -> bool:
        """Whether dst is written from registers: its channels lie apart, or rows at no whole units."""
        return self.is_summed or not self.is_beside or self.features % self.aligned > 0

    @property
    def is_summed(self) -> bool:
        """Whether rows have statistics, which are written in the place of the products."""
        return isinstance(self.kernel.centre, Summary)

    @property
    def is_beside(self) -> bool:
        """Whether the channels of a position of dst lie side by side."""
        dst = self.kernel.dst
        return self.is_summed or dst.is_channels_last or dst.element_strides[1] == 1

    @cached_property
    def joint(self) -> Contraction | None:
        """Of a transposed convolution with a stride: that with the features of all residues."""
        whole = self.kernel.contraction
        return joint_of(self.kernel) if whole.is_transposed and self.gathers and not self.is_beside else None

    @cached_property
    def conv(self) -> Contraction:
        """The convolution whose products tiles are."""
        return self.joint or self.kernel.contraction

    @cached_property
    def along(self) -> int:
        """Taps of the last axis that are summed over as channels are, because there are so few of these."""
        conv, last = self.conv, self.conv.kernel[-1:]
        is_few = conv.groups == 1 and prod(last) * conv.channels * self.kernel.src.itemsize <= ROW_BYTES
        return prod(last) if self.gathers and is_few else 1

    @property
    def taps(self) -> int:
        """Taps that are not summed over as channels are."""
        return self.conv.taps // self.along

    @property
    def residues(self) -> int:
        """Features of the convolution that are one of dst's."""
        return self.conv.features // self.kernel.contraction.features

    @property
    def aligned(self) -> int:
        """Elements in the unit of the copy engine."""
        return MAP_BYTES // self.kernel.src.itemsize

    @cached_property
    def is_flat(self) -> bool:
        """Whether rows are one axis: those of a transposed convolution lie a stride apart in dst."""
        contraction = self.conv
        is_plain = not (contraction.weight_per_batch or self.joint)
        return contraction.is_matrix_product and is_plain and _even(self.src) and _even(self.kernel.dst)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the rows, as tiles have them, outermost first."""
        src, dst, conv, whole = self.src, self.kernel.dst, self.conv, self.kernel.contraction
        src_strides, dst_strides = _strides(src), _strides(dst)
        if self.is_flat:
            return (Axis("m", conv.rows, min(dst_strides), conv.rows, min(src_strides)),)
        found = [Axis("n", dst.batch, dst_strides[0], src.batch, src_strides[0])]
        sizes = conv.dst_spatial, dst_strides[1:], src.spatial, src_strides[1:]
        taps = (*conv.kernel[:-1], *(each // self.along for each in conv.kernel[-1:]))
        windows = taps, conv.stride, conv.dilation, [low for low, _ in conv.padding]
        letters = "zyx"[3 - len(src.spatial) :]
        found += [Axis(*each) for each in zip(letters, *sizes, *windows, strict=True)]
        if self.joint:
            spread = zip(found[1:], whole.stride, whole.padding, dst.spatial, strict=True)
            found[1:] = [
                replace(axis, stride=stride, begin=-low, extent=extent)
                for axis, stride, (low, _), extent in spread
            ]
        if self.reaching:
            found[:2] = found[1::-1]
        return tuple(found)

    @cached_property
    def opened(self) -> dict[str, int]:
        """Which axis of the rows is open, and its positions for each element along it; {} where none is."""
        if self.kernel.open_axis is None:
            return {}
        place = next(place for place, axis in enumerate(self.axes) if axis.letter in "nm")
        return {"per_extent": self.axes[place].rows // self.kernel.images, "axis": place}

    @property
    def can_reach(self) -> bool:
        """Whether several taps read lines along the first spatial axis that are one box's."""
        if self.is_flat or len(self.axes) == 1:
            return False
        axis = next(axis for axis in self.axes if axis.letter != "n")
        return axis.taps > 1 and axis.step == 1

    @cached_property
    def functions(self) -> int:
        """Scalar functions that come after the sum, for each element."""
        formulas = [stage.expression for stage in self.kernel.epilogue]
        if self.is_summed:
            formulas = [part.term for part in self.kernel.reduction.parts]
        return sum(map(functions, formulas))

    @property
    def channels(self) -> int:
        """Channels that one feature reads at one position, and those of taps beside it."""
        return self.conv.channels_per_group * self.along

    @property
    def ways(self) -> int:
        """Features of the weight that one of dst is made of: gate and value of a gated product."""
        return self.kernel.parts.reads if self.kernel.parts else 1

    @property
    def features(self) -> int:
        """Features of dst, or of the convolution that has those of all residues."""
        return self.conv.features // self.ways

    @property
    def packings(self) -> tuple[tuple[bool, bool], ...]:
        """The choices of `whole_lines` and `padded`: rows that begin inside of sectors come in whole lines.

        On an H200 that took 0.76 to 0.94 of the time. An image's own weight is seldom a constant. src is
        copied in any case where the copy engine does not take its strides, or many features read it.
        """
        is_long, is_kept = self.conv.channels >= LONG, self._row % ALIGNED == 0 and self.conv.weight_per_batch
        whole = self._row >= LONG and self._row % SECTOR > 0 and not (self.gathers or is_kept)
        is_read_often = self.is_summed and self.features >= READ_OFTEN and is_long
        must, may = self._breaks(LINE if is_read_often else ALIGNED), is_long and self._breaks(SECTOR)
        return (*[(whole, False)] * (not must), *[(whole, True)] * (must or (may and self.is_flat)))

    @property
    def _row(self) -> int:
        """Elements of a row of the weight: channels of a tap, or features of a turned one."""
        return self.features if self.is_turned else self.channels

    @property
    def weight_row(self) -> int:
        """Elements of a row of the packed weight: whole units of the copy engine, whole sectors if gated."""
        if self.whole_lines:
            return row_of(self._row)
        return whole_units(self._row, SECTOR if self.ways > 1 else self.aligned)

    def counts(self, box: tuple[int, ...]) -> tuple[int, ...]:
        """How many tiles there are along each axis of the rows."""
        return tuple(ceil_div(axis.rows, size) for axis, size in zip(self.axes, box, strict=True))

    def products(self, depth: int) -> int:
        """Products of blocks that make one tile of dst, `depth` channels each."""
        return self.taps * ceil_div(self.channels, depth)

    def boxes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Boxes of so many rows, those first that cover dst with the fewest, and of these the roundest."""
        size = rows.bit_length() - 1
        if rows > 1 << size:
            return ((rows,),) if self.is_flat and not self.gathers else ()
        cuts = product(range(size + 1), repeat=len(self.axes))
        boxes = [tuple(1 << cut for cut in each) for each in cuts if sum(each) == size]
        return tuple(sorted(filter(self._fits, boxes), key=self._cost))

    def _fits(self, box: tuple[int, ...]) -> bool:
        first, *inner = box
        images = box[1] if self.reaching else first
        if images > 1 and self.conv.weight_per_batch:
            return False
        if self.reaching and (first == 1 or prod(inner) < SWIZZLED_ROWS):
            return False
        return all(size * axis.step <= MOST_BOX for size, axis in zip(box, self.axes, strict=True))

    def _cost(self, box: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        """What all boxes copy, and how many src positions one of them needs over all taps."""
        both = list(zip(box, self.axes, strict=True))
        reach = prod((size - 1) * axis.step + axis.reach + 1 for size, axis in both)
        copied = (box[0] + self.axes[0].reach) / box[0] if self.reaching else 1.0
        tiles = prod(self.counts(box))
        return tiles * (self._passing(box, copied) if self.gathers else copied), reach, box

    def _passing(self, box: tuple[int, ...], copied: float) -> float:
        """What a row of a box takes that passes registers: as many products of a feature take as long."""
        lines = self.axes[0].taps if self.reaching else 1
        depth = self.channels * self.taps
        loaded = depth / lines * copied * (1 + SHORT / box[-1]) * LOADED
        stored = self.features * self.broken(box) * STORED if self.scatters else 0.0
        return max(loaded, float(depth * self.features)) + stored

    def broken(self, box: tuple[int, ...]) -> float:
        """How much longer the stores of a box take than those of whole sectors of memory."""
        last, *outer = self.axes[::-1]
        size = SECTOR_BYTES // self.kernel.dst.itemsize
        strides = [axis.dst_stride for axis in outer if axis.rows > 1]
        if not any(stride % size for stride in strides) and box[-1] % size == 0:
            return 1.0
        run = box[-1] * (box[-2] if len(box) > 1 and box[-1] >= last.rows else 1) * last.stride
        return 1 + BROKEN / run

    # ---- tensor maps

    def src_map(self, box: tuple[int, ...], depth: int) -> TensorMap:
        """src, or its copy, in boxes of rows x `depth` channels: pieces that are powers of two."""
        lying = [(axis.positions, axis.src_stride, axis.step) for axis in self.axes]
        made = self._map(lying, self.kernel.src.channels, (*map(even, box), depth))
        return replace(made, begin=COUNTER_BYTES * self.padded)

    def dst_map(self, box: tuple[int, ...], columns: int) -> TensorMap:
        """dst, and what is stored as dst is, in boxes of rows x features."""
        lying = [(axis.rows, axis.dst_stride, 1) for axis in self.axes]
        return self._map(lying, self.features, (*box, columns))

    def _map(self, lying: list[tuple[int, int, int]], channels: int, box: tuple[int, ...]) -> TensorMap:
        """Channels along axes that have those extents, strides and steps."""
        extents, strides, steps = zip(*lying, strict=True)
        strides = *(taken(*each, channels, self.aligned) for each in zip(extents, strides, strict=True)), 1
        shape, dtype = (*extents, channels), self.kernel.src.dtype
        return TensorMap(dtype, shape, strides, box, (*steps, 1), **self.opened)

    @cached_property
    def is_turned(self) -> bool:
        """Whether the weight lies as (channel, feature), and is read so.

        One of f32 is rounded, and one with gates and values put in order, so that it is packed in any case.
        """
        is_packed = self.gathers or self.ways > 1
        return self.kernel.weight.axes == (1, 0) and not is_packed

    def weight_map(self, columns: int, depth: int) -> TensorMap:
        """The packed weight, (feature, tap, channel), in boxes of `columns` x 1 x `depth`, or pieces of them.

        Images with a weight of their own have their features one after the other. Of a gated product, each
        tile has its gates and then its values. A turned weight is (channel, feature), in boxes of `depth` x
        `columns`.
        """
        contraction, piece = self.conv, even(columns)
        if self.is_turned:
            turned = self.channels, self.features
            return TensorMap(self.kernel.weight.dtype, turned, (self.weight_row, 1), (depth, piece), (1, 1))
        images = contraction.batch if contraction.weight_per_batch else 1
        features = self.features
        if self.ways > 1:
            features = ceil_div(features, columns // self.ways) * columns
        shape = (images * features, self.taps, self.weight_row)
        strides = (shape[1] * shape[2], shape[2], 1)
        return TensorMap(self.kernel.weight.dtype, shape, strides, (piece, 1, depth), (1, 1, 1))


SWIZZLED_ROWS = 8  # rows of a block after which the order of their bytes in shared memory repeats


def even(extent: int) -> int:
    """The largest power of two that divides an extent."""
    return extent & -extent


def _even(spec: TensorSpec) -> bool:
    """Whether the positions of a channels-last tensor lie at one distance from each other."""
    extents = (spec.batch, *spec.spatial)
    outer = [pair for pair in zip(extents, _strides(spec), strict=True) if pair[0] > 1]
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(outer))


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    """Strides of all axes but the channel's: batch first, then the spatial ones.

    Along an axis of one position nothing is stepped: its stride is the largest, for it to be passed over.
    """
    strides = spec.element_strides
    extents = (spec.batch, *spec.spatial)
    both = list(zip(extents, (strides[0], *strides[2:]), strict=True))
    largest = max((stride for extent, stride in both if extent > 1), default=spec.channels)
    return tuple(stride if extent > 1 else largest for extent, stride in both)


def taken(extent: int, stride: int, channels: int, aligned: int = ALIGNED) -> int:
    """A stride that the engine takes: any will do along an axis of one position."""
    return stride if extent > 1 else whole_units(channels, aligned)


def whole_units(count: int, aligned: int = ALIGNED) -> int:
    """So many elements, and those up to the end of the copy engine's last unit."""
    return ceil_div(count, aligned) * aligned


def row_of(count: int) -> int:
    """Two-byte elements of a row of whole lines, an odd number if padded; of whole units if it is short."""
    if count % LINE == 0 or count < LONG:
        return whole_units(count)
    return (ceil_div(count, LINE) | 1) * LINE
