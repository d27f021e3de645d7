"""Convolution as many small matrix products, the elementwise tail applied in registers."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, prod
from typing import ClassVar

from fuseplan.backends.cpu import dots, model, staging
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.staging import Staged
from fuseplan.backends.cpu.templates import direct_residues
from fuseplan.backends.cpu.templates.direct_residues import by_residues, largest, rows_fit
from fuseplan.backends.cpu.templates.direct_writer import DirectKnobs, DirectWriter
from fuseplan.backends.cpu.tiling import MOST_ADDRESSES, Tiling, is_per_image, room, sheet, tiling
from fuseplan.backends.parts import gates_beside
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing, Pad, Reshape, Step, Transpose
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, lanes, moved_once
from fuseplan.kernels.transposed import every, of_residues
from fuseplan.messages.reasons import Claim, Reason

_PAGE, _LINE = 4096, 64  # bytes
_FEWEST_POSITIONS = 48  # of a block, where there are more blocks than fit
_LINE_COUNTS = 512  # about as many numbers of lines are compared
_OF_HALVES = 0.8  # speed of products in vectors of half the length: two in a cycle need two loads and more


@dataclass(frozen=True)
class Direct(DirectKnobs):
    """Tiles of output positions x features in registers; every kernel size, stride, dilation, group and rank.

    reads:  src once for each block of features that does not fit beside it in the second cache; weight once
            for each block of positions
    writes: dst once
    chosen: where no algorithm with fewer multiplications fits; a 1x1 kernel is a plain matrix product here

    Attributes:
        rows: output positions in a tile.
        vectors: vectors of features in a tile.
        block: tiles of positions in a task, at most; tasks differ by one.
        block_panels: tile widths of features in a task.
        lines: output lines (of the first spatial axis) for which a task copies src into its thread's own part
            of the workspace; 0 where src is copied whole, or not copied.
        dots: several products of integers, or of bf16, are one instruction, as `dots` says.
    """

    name: ClassVar[str] = "direct"
    opens: ClassVar[bool] = True
    efficiency: ClassVar[float] = 0.95
    gated: ClassVar[bool] = True
    ranges: ClassVar[bool] = True
    sums_integers: ClassVar[bool] = True
    transposes: ClassVar[bool] = True

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield model.padding_claim(kernel)
        is_last = kernel.parts is None or model.features_innermost(kernel)
        yield model.about(kernel, is_last, Reason.CHANNELS_FIRST, str(kernel.dst))

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        target, whole = _narrowed(kernel, target), as_rows(kernel)
        kernel = largest(whole)
        conv, width, dot = kernel.contraction, _width(kernel, target), dots.of(kernel, target)
        whole_numbers = dot is not None and dot.sums == "i32"
        is_spread = whole.contraction.is_transposed
        tiles = sorted(_tiles(kernel, target, whole), key=lambda tile: _waste(kernel, target, *tile))
        tiles = [tile for tile in tiles if not is_spread or rows_fit(whole, tile[0])]
        for rows, vectors in tiles[:2]:
            panels = -(-conv.features_per_group // (vectors * width))
            lines = 0 if is_spread else _lines(kernel, target, rows)
            if lines:
                covering = tiling(_staged(kernel, target), rows, lines * prod(conv.dst_spatial[1:]))
                yield cls(rows, vectors, covering.count, panels, lines, whole_numbers)
            blocked = cls(rows, vectors, *_blocks(kernel, target, rows, panels), dots=whole_numbers)
            if accuracy == "default" and dot and not whole_numbers:
                yield replace(blocked, dots=True)
            yield blocked

    def _dot(self, kernel: Kernel, target: Target) -> dots.Dot | None:
        """The instruction that adds several products to a sum; None where each is added alone."""
        return dots.of(kernel, target) if self.dots else None

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        kernel = as_rows(kernel)
        dot = self._dot(kernel, target)
        plan = staging.staged(largest(kernel), held=dots.held(dot, kernel) if dot else None)
        # A thread's own part stays in its caches.
        return moved_once(kernel, 0 if self.lines else plan.elements * plan.itemsize)

    def waste(self, kernel: Kernel, target: Target) -> float:
        taken, kernel = _narrowed(kernel, target), largest(as_rows(kernel))
        dot = self._dot(kernel, target)
        speed = 1 if taken == target else _OF_HALVES
        if dot:
            speed = dots.speed(dot, target) * dot.lanes / lanes(kernel, target)
        return _waste(kernel, taken, self.rows, self.vectors) * _transposing(kernel, target) / speed

    def emit(self, kernel: Kernel, target: Target) -> Source:
        target = _narrowed(kernel, target)
        if kernel.contraction.is_transposed:
            return direct_residues.source(self, kernel, target)
        writer = DirectWriter(self, kernel, target)
        return writer.by_lines() if self.lines else writer.by_blocks()

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        packed = super().packing(kernel, _narrowed(kernel, target), operand)
        return replace(packed, dtype=operand.dtype) if self.dots and operand.role == "weight" else packed

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The weight as [image][group][panel][tap, channel][feature of the panel].

        Zeros follow the last feature. There is one image unless each has a weight of its own. Vectors of
        gates and of values take turns. With `dots`, some channels of a feature follow one another.
        """
        conv = kernel.contraction
        if conv.is_transposed:
            parts = (of_residues(conv, [run[0] for run in runs]) for runs in every(conv))
            return by_residues(conv, [self._panels(part, kernel, target) for part in parts])
        return self._panels(conv, kernel, target)

    def _panels(self, conv: Contraction, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        dot = self._dot(kernel, target)
        panel = self.vectors * (dot.lanes if dot else lanes(kernel, target))
        panels = -(-conv.features_per_group // panel)
        groups = conv.groups * (conv.batch if conv.weight_per_batch else 1)
        inner = conv.channels_per_group, conv.taps
        gates = gates_beside(kernel.parts, panels * panel // 2, lanes(kernel, target), inner)
        features = panels * panel if gates else conv.features_per_group
        return (
            *gates,
            Reshape((groups, features, *inner)),
            Pad((groups, panels * panel, *inner)),
            Reshape((groups, panels, panel, *inner)),
            Transpose((0, 1, 4, 3, 2)),
            *(dots.packed(dot, conv, (groups, panels), panel) if dot else ()),
        )


def _narrowed(kernel: Kernel, target: Target) -> Target:
    """The target, with vectors of half the length where these hold all features of a group.

    Only where the processor computes halves: on a Zen 4 core, 936 rows of 1596 channels to 8 features took
    446 us in whole vectors, and take 241.
    """
    is_plain = isinstance(kernel.centre, Contraction) and kernel.parts is None
    if not is_plain or not model.in_halves(target) or dots.of(kernel, target):
        return target
    fills = 2 * kernel.contraction.features_per_group > lanes(kernel, target)
    return target if fills else replace(target, vector_bytes=target.vector_bytes // 2)


def _transposing(kernel: Kernel, target: Target) -> float:
    """Time with transpositions over time without.

    Measured on Zen 5 with 1x1 kernels: channels-first results cost 14 floating-point operations' time an
    element, the channels-last copy of a channels-first src 20, or 40 where it leaves the near caches.
    """
    results = 0 if model.features_innermost(kernel) else 14 * kernel.dst.size
    near = kernel.src.size * model.itemsize(kernel) <= target.l2_bytes * target.threads
    _, channel, *_, last = kernel.src.element_strides
    is_strided = channel > 1 < last and kernel.src.shape[-1] > 1 < kernel.src.channels
    unused = -kernel.src.channels % lanes(kernel, target) / kernel.src.channels  # of the squares' lines
    each = 200 if is_strided else (20 if near else 40) * (1 + unused)
    copied = 0 if staging.channels_last(kernel) else each * kernel.src.size
    return 1 + (results + copied) / kernel.contraction.flops


def _width(kernel: Kernel, target: Target) -> int:
    """Features of a vector."""
    dot = dots.of(kernel, target)
    return dot.lanes if dot else lanes(kernel, target)


def _staged(kernel: Kernel, target: Target) -> Staged:
    """The elements that the loops read; bf16 of which an instruction multiplies several is not copied."""
    dot = dots.of(kernel, target)
    is_held = dot is not None and dot.sums == "i32"
    return staging.staged(kernel, held=dots.held(dot, kernel) if dot and is_held else None)


def _covering(kernel: Kernel, target: Target, rows: int) -> Tiling:
    return tiling(_staged(kernel, target), rows, sheet(kernel))


def _tiles(kernel: Kernel, target: Target, whole: Kernel) -> Iterator[tuple[int, int]]:
    """Tiles whose accumulators and row of weights fit the registers; LLVM wants an eighth to move in.

    Of each width the larger half, or any of a residue's. Features lie in dst as those of the whole kernel do.
    """
    conv = kernel.contraction
    width, positions = _width(kernel, target), sheet(kernel)
    most = positions if model.features_innermost(whole) else min(positions, lanes(kernel, target))
    counts = range(1, min(4, -(-conv.features_per_group // width)) + 1)
    for vectors in (2, 4) if kernel.parts else counts:
        top = min(most, 16, (target.vector_registers * 7 // 8 - vectors) // vectors)
        for rows in range(1 if whole.contraction.is_transposed else max(1, top // 2), top + 1):
            yield rows, vectors


def _waste(kernel: Kernel, target: Target, rows: int, vectors: int) -> float:
    """Time of the tiles over time of the same products without a loss."""
    conv, width = kernel.contraction, _width(kernel, target)
    features = conv.features_per_group
    whole, left = divmod(features, vectors * width)
    edge_features = (whole * vectors + -(-left // width)) * width / features
    # Two loads and two products a cycle are what current cores do, and a product takes 4 cycles. A vector of
    # weights is read once for `rows` products, mostly from the second cache: more than 16 bytes a cycle from
    # there cost time. Measured on Zen 5 with 64-byte vectors: 14x2, 8x2 and 7x2 0.98 of peak, 9x3 0.97, 6x4
    # 0.92. On Zen 3, 480 rows of 100 channels take 1.01 times as long by 4x2 as by 5x2, 1.16 to 1.2 by 8x1 to
    # 13x1, 1.3 by 3x2.
    products = rows * vectors
    dot = dots.of(kernel, target)
    waits = 2 if dot and dot.is_apart else 8.5
    loads, latency = 1.08 * (rows + vectors) / products, waits / products
    streaming = 1 + 0.015 * max(0.0, 2 * target.vector_bytes / rows - 16)
    covering = _covering(kernel, target, rows)
    addresses = 1.2 if covering.kind == "scattered" and rows > MOST_ADDRESSES else 1.0
    small = 1 + 0.001 * products  # of equals the smaller: less code, less to compile
    itemsize = dots.held(dot, kernel).itemsize if dot else model.itemsize(kernel)
    paid = streaming * addresses * small * _crowding(covering, itemsize, target)
    return covering.waste * edge_features * max(1.0, loads, latency) * paid


def _crowding(covering: Tiling, itemsize: int, target: Target) -> float:
    """Time of a tile whose positions share sets of the first cache over time of another tile's.

    Lines whole pages apart share a set, and a set has a line of each of the cache's pages: more lines drive
    one another out before their last element is read. Measured on Zen 4, of 8 pages, with 1x1 kernels of 3072
    channels: 10 positions 1.04, 12 positions 1.16, 14 positions 1.37.
    """
    places = Counter(at * itemsize % _PAGE // _LINE for at in covering.distances() or ())
    over = max(0, max(places.values(), default=0) - target.l1_bytes // _PAGE)
    return 1 + 0.01 * over * over


def _blocks(kernel: Kernel, target: Target, rows: int, panels: int) -> tuple[int, int]:
    """Tiles and panels of a task: threads end together, and read few weights and lines that others hold.

    A task's part of src stays in the second cache. Measured on a Xeon with weights out of memory and two
    threads: 128 rows of 3072 channels to 768 features took 2216 us with all rows in a task, and 2557 in two
    blocks; 1x1 kernels at 14x14 365 us in two equal blocks, and 423 in three of unlike size.
    """
    conv, covering, threads = kernel.contraction, _covering(kernel, target, rows), target.threads
    position_bytes = max(1, conv.channels_per_group * prod(conv.stride) * covering.staged.itemsize)
    fitting = max(1, int(target.l2_bytes * 0.75) // (position_bytes * rows))
    sheets = conv.groups * (conv.batch if is_per_image(kernel) else 1)
    count, weights = covering.count, kernel.weight.nbytes
    rate, stays = model.arrival(target, weights), weights <= 0.4 * target.l2_bytes
    fewest, cycles = -(-count // fitting), conv.flops / (4 * _width(kernel, target) * threads)
    written = kernel.dst.nbytes + sum(each.nbytes for each in kernel.operands if not each.packed)

    def cost(blocks: int, parts: int) -> float:
        tasks = sheets * blocks * parts
        largest = -(-count // blocks) * -(-panels // parts)
        uneven = -(-tasks // threads) * threads * largest / (sheets * count * panels)
        # Parts of a block follow one another: a thread takes blocks with all weights, or some of the weights.
        share = sheets * blocks / threads
        read = weights / conv.groups * (min(1.0, share) if stays else share)
        read += kernel.src.nbytes / min(sheets * blocks, threads)
        waits = tasks / threads * weights / (conv.groups * panels)  # the first panel was not fetched ahead
        # Each panel writes a few lines of every position: the more positions, the further apart.
        spread = 0.06 * min(3.0, written / (sheets * blocks * target.l2_bytes))
        few = 0.1 * min(1.0, (threads - 1) / tasks)
        return cycles * (uneven + spread + few) + (0.2 * read + 0.5 * waits) / rate

    def cuts() -> Iterator[tuple[int, int]]:
        """The fewest blocks that fit, and more, so many that each thread has as many tasks."""
        for parts in sorted({1, *(min(panels, threads * each) for each in (1, 2, 4))}):
            even, blocks = threads // gcd(threads, sheets * parts), fewest
            while True:
                yield min(count, -(-blocks // even) * even), parts
                if count < 2 * blocks * max(1, _FEWEST_POSITIONS // rows):
                    break
                blocks *= 2

    blocks, parts = min(cuts(), key=lambda each: cost(*each))
    return -(-count // blocks), -(-panels // parts)


def _lines(kernel: Kernel, target: Target, rows: int) -> int:
    """Output lines a task: their part of src fits the second cache and every thread gets several; 0 for none.

    A thread's own copy is written again and again to the same place, so it never leaves the near caches; one
    copy for all costs nothing more while it fits them.
    """
    conv, plan = kernel.contraction, _staged(kernel, target)
    is_large = plan.elements * plan.itemsize > target.l2_bytes * target.threads
    if not is_large or len(conv.dst_spatial) == 1 or conv.groups > 1:
        return 0
    height, inner = conv.dst_spatial[0], prod(conv.dst_spatial[1:])

    def loss(lines: int) -> float:
        blocks = -(-height // lines) * lines / height
        copied = plan.lines_under(lines) / (lines * conv.stride[0] * prod(plan.extents[1:-1]))
        return tiling(plan, rows, lines * inner).waste * blocks * (1 + 0.03 * copied)

    most = target.l2_bytes // 4 // plan.itemsize
    fitting = bisect_right(range(1, height + 1), most, key=partial(room, plan))
    shared = height // -(-3 * target.threads // conv.batch)
    counts = range(-(-rows // inner), min(fitting, shared) + 1)
    best = min(counts[:: max(1, len(counts) // _LINE_COUNTS)], key=loss, default=0)
    return best if best and loss(best) < 1.2 * _covering(kernel, target, rows).waste else 0
