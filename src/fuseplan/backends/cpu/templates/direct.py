"""Convolution as many small matrix products, with the elementwise tail applied in registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fuseplan.backends.cpu import model, staging, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame, slots_of
from fuseplan.backends.cpu.ir import Index, Value, Variable
from fuseplan.backends.cpu.transpose import transposed
from fuseplan.emit import Source
from fuseplan.kernel import Convolution, Kernel, KernelOperand
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, lanes

UNROLL = 4


@dataclass(frozen=True)
class Direct(Template):
    """Tiles of output positions x features in registers; every kernel size, stride, dilation, group and rank.

    reads:  src once for each block of features that does not fit beside it in the second cache; weight once
        for each
            block of positions
    writes: dst once
    chosen: where no algorithm with fewer multiplications fits; a 1x1 kernel is a plain matrix product here

    Attributes:
        rows: output positions in a tile.
        vectors: vectors of features in a tile.
        block_rows: positions in a task.
        block_panels: tile widths of features in a task.
    """

    name: ClassVar[str] = "direct"

    rows: int
    vectors: int
    block_rows: int
    block_panels: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        yield from model.layout_claims(kernel)
        yield model.accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        conv = _convolution(kernel)
        width = lanes(kernel, target)
        tiles = sorted(_tiles(kernel, target), key=lambda tile: _waste(conv, kernel, width, *tile))
        for rows, vectors in tiles[:2]:
            yield cls(rows, vectors, *_blocks(conv, kernel, target, rows, vectors * width))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        plan = staging.staged(kernel)
        return model.traffic(kernel, target, workspace=plan.elements)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        conv = _convolution(kernel)
        width = lanes(kernel, target)
        work = conv.flops * _waste(conv, kernel, width, self.rows, self.vectors)
        return model.seconds(kernel, target, flops=work, traffic=self.traffic(kernel, target), efficiency=0.9)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding a product in a sum of `depth` of them: depth * u (Higham, 2002, section 3.1)."""
        return _convolution(kernel).depth * model.unit_roundoff(kernel)

    def error_bound(self, kernel: Kernel) -> float:
        return self.bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return _Writer(self, kernel, target).source()

    def pack(
        self, kernel: Kernel, target: Target, operand: KernelOperand, array: NDArray[Any]
    ) -> NDArray[Any]:
        """The weight as [group][panel][tap, channel][feature of the panel], zeros after the last feature."""
        if operand.role != "weight":
            return super().pack(kernel, target, operand, array)
        conv = _convolution(kernel)
        panel = self.vectors * lanes(kernel, target)
        features, depth = conv.features_per_group, conv.depth
        panels = -(-features // panel)
        last = np.moveaxis(array, 1, -1).reshape(conv.groups, features, depth)
        if features != panels * panel:
            last = np.pad(last, ((0, 0), (0, panels * panel - features), (0, 0)))
        return np.ascontiguousarray(last.reshape(conv.groups, panels, panel, depth).swapaxes(2, 3))


def _convolution(kernel: Kernel) -> Convolution:
    if kernel.convolution is None:
        raise ValueError("a kernel without a contraction has no convolution")
    return kernel.convolution


def _positions(conv: Convolution, kernel: Kernel) -> int:
    """Positions that one sequence of tiles runs over: the batch, or one image where pixels are innermost."""
    image = prod(conv.dst_spatial)
    return conv.batch * image if _features_innermost(kernel) else image


def _features_innermost(kernel: Kernel) -> bool:
    return kernel.dst.is_channels_last or prod(kernel.dst.shape[2:]) == 1


def _tiles(kernel: Kernel, target: Target) -> Iterator[tuple[int, int]]:
    """Tiles whose accumulators, one row of weights and one spread element fit the registers."""
    conv = _convolution(kernel)
    width, positions = lanes(kernel, target), _positions(conv, kernel)
    most_rows = positions if _features_innermost(kernel) else min(positions, width)
    for vectors in range(1, min(4, -(-conv.features_per_group // width)) + 1):
        top = min(most_rows, (target.vector_registers - 1 - vectors) // vectors)
        for rows in range(max(1, top // 2), top + 1):
            yield rows, vectors


def _waste(conv: Convolution, kernel: Kernel, width: int, rows: int, vectors: int) -> float:
    """Time of the tiles over time of the same products without a loss."""
    positions = _positions(conv, kernel)
    panel = vectors * width
    edge_rows = -(-positions // rows) * rows / positions
    used = -(-conv.features_per_group // width) * width
    edge_features = max(used, 1) / conv.features_per_group
    if vectors * width > used:
        edge_features = panel / conv.features_per_group
    # Two loads and two products a cycle are what current cores do; a vector of weights is read once for
    # `rows` products, and mostly from the second cache, so few rows cost bandwidth. Measured on Zen 5: 14x2
    # 0.98 of peak, 9x3 0.97, 6x4 0.92.
    products = rows * vectors
    loads = (rows + vectors) / products
    latency = 10 / products
    return edge_rows * edge_features * max(1.0, loads, latency) * (1 + 0.6 / rows)


def _blocks(conv: Convolution, kernel: Kernel, target: Target, rows: int, panel: int) -> tuple[int, int]:
    """Positions and panels of a task: their data stays in the second cache, and each thread gets several."""
    positions = _positions(conv, kernel)
    panels = -(-conv.features_per_group // panel)
    itemsize = 8 if kernel.compute_dtype == "f64" else 4
    depth_bytes = max(1, conv.channels_per_group * prod(conv.stride) * itemsize)
    fitting = max(rows, int(target.l2_bytes * 0.4) // depth_bytes)
    block = min(fitting, 192 if positions > 2000 else 96, positions)
    block = max(rows, block // rows * rows)
    sheets = conv.groups * (1 if _features_innermost(kernel) else conv.batch)
    blocks = sheets * -(-positions // block)
    wanted = 4 * target.threads
    parts = min(panels, -(-wanted // blocks))
    return block, -(-panels // parts)


class _Writer:
    """Writes one kernel."""

    def __init__(self, knobs: Direct, kernel: Kernel, target: Target) -> None:
        self.knobs, self.kernel = knobs, kernel
        self.conv = _convolution(kernel)
        self.staged = staging.staged(kernel)
        slots = slots_of(kernel, workspace=self.staged.copies)
        self.frame = Frame(kernel, target, slots, f"{knobs.text}\n{kernel.text}")
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.panel = knobs.vectors * self.lanes
        self.panels = -(-self.conv.features_per_group // self.panel)
        self.innermost = _features_innermost(kernel)
        self.positions = _positions(self.conv, kernel)
        self.tail = Elementwise(self.frame, "epilogue")
        self.dst = self.frame.pointer("dst")
        self.weight = self.frame.pointer("operand", kernel.weight.key)

    def source(self) -> Source:
        """The whole kernel: phase 0 where src must be copied, then one phase of tiles."""
        workspace = self.frame.pointer("workspace") if self.staged.copies else self.b.parameters[0]
        self.src = staging.emit(self.frame, self.staged, workspace)
        knobs, conv, b = self.knobs, self.conv, self.b
        sheets = 1 if self.innermost else conv.batch
        row_blocks = -(-self.positions // knobs.block_rows)
        panel_blocks = -(-self.panels // knobs.block_panels)
        with self.frame.tasks(sheets * row_blocks * conv.groups * panel_blocks) as task:
            panel_block = task % panel_blocks
            rest = task // panel_blocks
            group, rest = rest % conv.groups, rest // conv.groups
            row_block, sheet = rest % row_blocks, rest // row_blocks
            first = row_block * knobs.block_rows
            last = b.smaller(first + knobs.block_rows, self.positions)
            begin = panel_block * knobs.block_panels
            self._block(sheet, group, first, last, begin, b.smaller(begin + knobs.block_panels, self.panels))
        itemsize = 8 if self.kernel.compute_dtype == "f64" else 4
        return self.frame.source(workspace=self.staged.elements * itemsize)

    def _block(self, sheet: Value, group: Value, first: Index, last: Index, begin: Index, end: Index) -> None:
        """All tiles of one task: each panel of weights passes over the positions while a cache holds it."""
        b, whole = self.b, self.conv.features_per_group // self.panel
        left = self.conv.features_per_group - whole * self.panel
        if whole:
            with b.loop(begin, b.smaller(end, whole), name="panel") as panel:
                self._rows(sheet, group, first, last, panel, self.panel)
        if left:
            with b.when(b.compare("sgt", b.const(end, "i64"), whole)):
                self._rows(sheet, group, first, last, whole, left)

    def _rows(
        self, sheet: Value, group: Value, first: Index, last: Index, panel: Index, features: int
    ) -> None:
        rows = self.knobs.rows
        with self.b.loop(first, last, rows, name="row") as start:
            # The last tile starts early and computes some positions twice instead of needing a second shape.
            row = self.b.smaller(start, self.positions - rows) if self.positions % rows else start
            self._tile(sheet, group, row, panel, features)

    # ---- one tile

    def _tile(self, sheet: Value, group: Value, row: Index, panel: Index, features: int) -> None:
        """`knobs.rows` positions from `row` on, `features` features of one panel."""
        b = self.b
        vectors = -(-features // self.lanes)
        sums = [[b.variable(b.vector, b.number(0.0)) for _ in range(vectors)] for _ in range(self.knobs.rows)]
        starts = self._starts(sheet, group, row)
        where = (group * self.panels + panel) * (self.conv.depth * self.panel)
        self._products(sums, starts, b.at(self.weight, where))
        feature = group * self.conv.features_per_group + panel * self.panel
        values = [[place.get() for place in line] for line in sums]
        if self.innermost:
            self._store_features(values, row, feature, features)
        else:
            self._store_positions(values, sheet, row, feature, features)

    def _starts(self, sheet: Value, group: Value, row: Index) -> list[Value]:
        """Where in src the first tap of each of the tile's positions lies."""
        b, conv, step = self.b, self.conv, self._step()
        channel = group * conv.channels_per_group
        if step is not None:
            first = b.at(self.src, self._offset(sheet, row) + channel)
            return [b.at(first, i * step) for i in range(self.knobs.rows)]
        return [b.at(self.src, self._offset(sheet, row + i) + channel) for i in range(self.knobs.rows)]

    def _step(self) -> int | None:
        """Elements from one position of a tile to the next, where that is the same for all of them."""
        conv, width = self.conv, self.conv.dst_spatial[-1]
        along = conv.stride[-1] * self.staged.strides[-1]
        dense = conv.dst_spatial == self.staged.extents and conv.taps == 1 and set(conv.stride) == {1}
        return along if dense or width % self.knobs.rows == 0 else None

    def _offset(self, sheet: Value, row: Index) -> Index:
        """The element of src under the first tap of output position `row`."""
        conv = self.conv
        strides = self.staged.strides
        if conv.dst_spatial == self.staged.extents and conv.taps == 1 and set(conv.stride) == {1}:
            return sheet * self.staged.image + row * conv.channels
        offset: Index = 0
        rest = row
        for axis in reversed(range(len(strides))):
            outermost = axis == 0 and not self.innermost
            position = rest if outermost else rest % conv.dst_spatial[axis]
            rest = rest // conv.dst_spatial[axis]
            offset = position * (conv.stride[axis] * strides[axis]) + offset
        image = rest if self.innermost else sheet
        return image * self.staged.image + offset

    def _products(self, sums: Sequence[Sequence[Variable]], starts: Sequence[Value], weight: Value) -> None:
        """Adds src times weight over all taps and channels."""
        conv, b = self.conv, self.b
        merged = conv.groups == 1 and conv.dilation[-1] == 1
        axes = len(conv.kernel) - 1 if merged else len(conv.kernel)
        run = conv.channels_per_group * (conv.kernel[-1] if merged else 1)
        with ExitStack() as nest:
            tap: Index = 0
            offset: Index = 0
            for axis in range(axes):
                if conv.kernel[axis] == 1:
                    continue
                index = nest.enter_context(b.loop(0, conv.kernel[axis], name="tap"))
                tap = tap * conv.kernel[axis] + index
                offset = offset + index * (conv.dilation[axis] * self.staged.strides[axis])
            rows = [b.at(start, offset) for start in starts]
            self._run(sums, rows, b.at(weight, tap * (run * self.panel)), run)

    def _run(
        self, sums: Sequence[Sequence[Variable]], rows: Sequence[Value], weight: Value, run: int
    ) -> None:
        """Products along `run` elements that follow one another in src and in weight."""
        b, whole = self.b, run - run % UNROLL
        if whole:
            with b.loop(0, whole, UNROLL, name="k") as k:
                self._step_products(
                    sums, [b.at(row, k) for row in rows], b.at(weight, k * self.panel), UNROLL
                )
        if whole < run:
            tails = [b.at(row, whole) for row in rows]
            self._step_products(sums, tails, b.at(weight, whole * self.panel), run - whole)

    def _step_products(
        self, sums: Sequence[Sequence[Variable]], rows: Sequence[Value], weight: Value, count: int
    ) -> None:
        b = self.b
        values = [[place.get() for place in line] for line in sums]
        for k in range(count):
            line = [b.load(b.at(weight, k * self.panel + j * self.lanes)) for j in range(len(sums[0]))]
            for r, row in enumerate(rows):
                x = b.broadcast(row, k)
                values[r] = [b.fma(x, w, value) for w, value in zip(line, values[r], strict=True)]
        for places, line in zip(sums, values, strict=True):
            for place, value in zip(places, line, strict=True):
                place.set(value)

    # ---- results

    def _store_features(self, values: list[list[Value]], row: Index, feature: Index, features: int) -> None:
        known: dict[object, Value] = {}
        for r, line in enumerate(values):
            for j, value in enumerate(line):
                count = min(self.lanes, features - j * self.lanes)
                channel = feature + j * self.lanes
                element = (row + r) * self.conv.features + channel
                self._store(value, Place(element, channel, True, count), known)

    def _store_positions(
        self, values: list[list[Value]], sheet: Value, row: Index, feature: Index, features: int
    ) -> None:
        """Features lie apart in dst and positions side by side: the tile is transposed in registers first."""
        b, image = self.b, prod(self.conv.dst_spatial)
        nothing = Value(b, b.vector, "poison")
        known: dict[object, Value] = {}
        for j in range(len(values[0])):
            square = [line[j] for line in values] + [nothing] * (self.lanes - len(values))
            count = min(self.lanes, features - j * self.lanes)
            for i, column in enumerate(transposed(b, square)[:count]):
                channel = feature + (j * self.lanes + i)
                element = (sheet * self.conv.features + channel) * image + row
                self._store(column, Place(element, channel, False, self.knobs.rows), known)

    def _store(self, value: Value, place: Place, known: dict[object, Value]) -> None:
        dtype = self.kernel.dst.dtype
        value = self.tail.apply(value, place, known)
        where = self.b.at(self.dst, place.element, storage.element_type(dtype))
        storage.write(self.b, dtype, value, where, count=place.count)
