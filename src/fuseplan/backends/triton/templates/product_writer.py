"""Writes the text of a matrix product: a tile of rows x features, its tail, and its sum in parts."""

from __future__ import annotations

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.templates.product_arithmetic import TRITON_TYPES, multiply
from fuseplan.backends.triton.templates.product_shape import (
    WIDE,
    Knobs,
    ProductShape,
    image_axes,
    is_halved,
    offset_text,
    row_axes,
    steps_of,
    times,
    weight_extents,
)
from fuseplan.backends.triton.templates.three_products import halves
from fuseplan.backends.triton.text import Text
from fuseplan.emit import COUNTER_BYTES, Slot, Source, TensorMap
from fuseplan.kernel import Kernel


class ProductWriter:
    """Writes one kernel."""

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        self.knobs, self.kernel, self.title = knobs, kernel, title
        self.shape = ProductShape.of(kernel)
        self.text = Text()
        self.prologue = Elementwise(kernel, "prologue", self.text)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        self.compute = TRITON_TYPES[kernel.compute_dtype]
        self.weight = argument(Slot("operand", kernel.weight.key))
        self.row_tiles = -(-self.shape.rows // knobs.rows)
        self.feature_tiles = -(-self.shape.features // knobs.features)
        self.tiles = self.row_tiles * self.feature_tiles
        self.src_channel = kernel.src.element_strides[1]
        self.dst_feature = kernel.dst.element_strides[1]
        self.is_wide = max(kernel.src.span, kernel.dst.span, kernel.weight.size) >= WIDE
        self.extents = weight_extents(knobs, self.shape, kernel.src.itemsize)
        self.place = "place" if self.shape.batches > 1 else "program"  # the name of the launch's place
        self.is_in_three = knobs.arithmetic == "tf32x3"
        self.packed = 2 if is_halved(knobs) else 1  # weights: the rounded one, and what is left of it
        steps = steps_of(knobs, self.shape.depth)
        self.has_depth_tail = steps * knobs.split * knobs.depth != self.shape.depth
        self.has_row_tail = self.shape.rows % knobs.rows != 0
        self.has_feature_tail = self.shape.features % knobs.features != 0

    # ---- arguments

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The kernel's arguments."""
        weight = self.kernel.weight.key
        src = Slot("src", map=self._src_map()) if self.knobs.maps else Slot("src")
        read = Slot("operand", weight, self._weight_map()) if self.knobs.maps else Slot("operand", weight)
        extra = () if self.knobs.split == 1 else (Slot("workspace"),)
        return (src, read, *self.prologue.slots, *self.epilogue.slots, Slot("dst"), *extra)

    def _src_map(self) -> TensorMap:
        shape, knobs = self.shape, self.knobs
        ((_, stride),) = row_axes(self.kernel.src, 1) or ((1, shape.depth),)
        rows = shape.batches * shape.rows
        box = (knobs.rows, knobs.depth)
        return TensorMap(self.kernel.src.dtype, (rows, shape.depth), (stride, 1), box, (1, 1))

    def _weight_map(self) -> TensorMap:
        features, depth = self.extents
        rows = self.shape.batches * features * self.packed
        box = (self.knobs.features, self.knobs.depth)
        return TensorMap(self.kernel.src.dtype, (rows, depth), (depth, 1), box, (1, 1))

    # ---- the kernel

    def source(self) -> Source:
        """The whole kernel."""
        text, knobs = self.text, self.knobs
        text.line("import triton", "import triton.language as tl", "", "")
        text.line(*(f"# {line}" for line in [self.title, *self.kernel.text.splitlines()]))
        text.line("@triton.jit")
        with text.block(f"def fused({', '.join(argument(slot) for slot in self.slots)})"):
            self._tile()
            self._indices()
            self._sum()
            if knobs.split > 1:
                self._arrive()
            else:
                self._finish()
        return Source(
            str(text),
            "fused",
            self.slots,
            workspace_bytes=self.workspace_bytes,
            language="triton",
            grid=(self.tiles * self.shape.batches, knobs.split, 1),
            options=(("num_warps", knobs.warps), ("num_stages", knobs.stages)),
        )

    @property
    def workspace_bytes(self) -> int:
        """The counters, and behind them each program's part of its tile's sum."""
        if self.knobs.split == 1:
            return 0
        size = 8 if self.kernel.compute_dtype == "f64" else 4
        each = self.knobs.rows * self.knobs.features * size
        return COUNTER_BYTES + self.tiles * self.shape.batches * self.knobs.split * each

    # ---- where the tile lies

    def _tile(self) -> None:
        """Which tile: in groups of row tiles, so that programs that run together share what they read."""
        text, group = self.text, min(self.knobs.group, self.row_tiles)
        text.line(f"{self.place} = tl.program_id(0)")
        if self.shape.batches > 1:
            text.line(f"batch = place // {self.tiles}", f"program = place % {self.tiles}")
        if self.feature_tiles == 1:
            text.line("row_tile = program", "feature_tile = 0")
        elif group == 1:
            text.line(
                f"row_tile = program // {self.feature_tiles}",
                f"feature_tile = program % {self.feature_tiles}",
            )
        else:
            whole = group * self.feature_tiles
            left = self.row_tiles % group
            size = (
                f"tl.minimum({self.row_tiles} - program // {whole} * {group}, {group})"
                if left
                else str(group)
            )
            text.line(
                f"group_rows = {size}",
                f"row_tile = program // {whole} * {group} + program % {whole} % group_rows",
                f"feature_tile = program % {whole} // group_rows",
            )
        if self.knobs.split > 1:
            text.line("part = tl.program_id(1)")

    def _indices(self) -> None:
        text, knobs, shape = self.text, self.knobs, self.shape
        row_tile = "row_tile"
        if self.is_wide:
            row_tile = "row_tile.to(tl.int64)"
            text.line("# offsets of tensors this large need 64 bits")
        text.line(
            f"row = {row_tile} * {knobs.rows} + tl.arange(0, {knobs.rows})",
            f"feature = feature_tile * {knobs.features} + tl.arange(0, {knobs.features})",
        )
        if self.has_row_tail:
            text.line(f"row_ok = row < {shape.rows}")
        if self.is_wide:
            text.line("feature = feature.to(tl.int64)")
            if shape.batches > 1:
                text.line("batch = batch.to(tl.int64)")

    def _rows(self, vector: str) -> str:
        """A vector over rows as its axis of the result's tile."""
        return f"{vector}[None, :]" if self.knobs.swapped else f"{vector}[:, None]"

    def _features(self, vector: str) -> str:
        return f"{vector}[:, None]" if self.knobs.swapped else f"{vector}[None, :]"

    @property
    def _extents(self) -> tuple[int, int]:
        """The result's tile."""
        rows, features = self.knobs.rows, self.knobs.features
        return (features, rows) if self.knobs.swapped else (rows, features)

    def _batch(self, stride: int) -> str:
        """What a product's place in the batch adds to an offset."""
        return f" + batch * {stride}" if self.shape.batches > 1 else ""

    # ---- the sum

    def _sum(self) -> None:
        """The sum of products over this program's part of the depth, as `total`."""
        text, knobs = self.text, self.knobs
        text.line(f"total = tl.zeros({list(self._extents)}, {self.compute})")
        if self.is_in_three:
            text.line(f"small = tl.zeros({list(self._extents)}, {self.compute})")
        if not knobs.maps:
            self._src_offsets()
            self._weight_offsets()
        elif self.shape.batches > 1:
            text.line(f"src_row = place // {self.tiles} * {self.shape.rows} + row_tile * {knobs.rows}")
            text.line(
                f"weight_row = place // {self.tiles} * {self.extents[0]} + feature_tile * {knobs.features}"
            )
        else:
            text.line(f"src_row = row_tile * {knobs.rows}", f"weight_row = feature_tile * {knobs.features}")
        self._steps(steps_of(knobs, self.shape.depth))
        if self.is_in_three:
            text.line("total += small")

    def _steps(self, steps: int) -> None:
        """The loop over the depth; a src tile that loads `ahead` bring is in registers for a step."""
        text, depth = self.text, self.knobs.depth
        before = f"part * {steps} + " if self.knobs.split > 1 else ""
        if self.knobs.ahead:
            text.line(f"start = part * {steps * depth}" if before else "start = 0")
            text.line(f"coming = {self._src_tile()}")
        with text.block(f"for step in range({steps})"):
            if self.knobs.ahead:
                x = text.let("x", "coming")
                text.line(f"start = ({before}step + 1) * {depth}")
                text.line(f"coming = {self._src_tile()}")
            text.line(f"start = ({before}step) * {depth}" if before else f"start = step * {depth}")
            made = self._prepared(x if self.knobs.ahead else self._src_tile())
            multiply(text, self.knobs, self.kernel, made, self._weight_tiles())

    def _src_offsets(self) -> None:
        """Where the src tile lies when it begins at channel 0."""
        text, batches = self.text, self.shape.batches
        axes = row_axes(self.kernel.src, batches)
        base = self._batch(self.kernel.src.element_strides[0])
        text.line(
            f"depth = tl.arange(0, {self.knobs.depth})",
            f"src_row = {offset_text('row', axes)}{base}",
            *["far = tl.full((), 0, tl.int64)"] * self.is_wide,
            f"src_tile = {self._src_rows('src_row')} + {times(self._src_depth('depth'), self.src_channel)}",
        )

    def _src_rows(self, vector: str) -> str:
        """A vector over rows as its axis of the src tile."""
        return f"{vector}[None, :]" if self.knobs.swapped else f"{vector}[:, None]"

    def _src_depth(self, vector: str) -> str:
        return f"{vector}[:, None]" if self.knobs.swapped else f"{vector}[None, :]"

    def _weight_offsets(self) -> None:
        features, depth = self.extents
        base = self._batch(features * depth)
        inner = self._weight_depth("depth")
        self.text.line(f"weight_tile = {self._features('feature')} * {depth} + {inner}{base}")

    def _src_tile(self) -> str:
        """The src tile of this step."""
        if self.knobs.maps:
            loaded = self.text.let("x", "src.load([src_row, start])")
            return self.text.let("x", f"{loaded}.T") if self.knobs.swapped else loaded
        mask = self._src_mask()
        guarded = f", mask={mask}, other=0" if mask else ""
        start = "(far + start)" if self.is_wide else "start"
        return self.text.let("x", f"tl.load(src + {times(start, self.src_channel)} + src_tile{guarded})")

    def _src_mask(self) -> str:
        """Which elements of the src tile exist; "" for all."""
        terms = [self._src_rows("row_ok")] if self.has_row_tail else []
        if self.has_depth_tail or self.knobs.ahead:
            terms.append(self._src_depth(f"(depth < {self.shape.depth} - start)"))
        return " & ".join(terms)

    def _prepared(self, x: str) -> str:
        """The prologue's result in the dtype that is multiplied; past the last channel it is zero."""
        if not self.kernel.prologue:
            return x
        text, shape = self.text, self.shape
        if self.knobs.maps:
            text.line(f"depth = tl.arange(0, {self.knobs.depth})")
        text.line("channel = start + depth")
        axes, step = image_axes(self.kernel.src)
        row = f"(row % {shape.image_rows})" if shape.batches == 1 else "row"
        inside = (
            f"{self._src_rows(f'({offset_text(row, axes)})')} + {times(self._src_depth('channel'), step)}"
        )
        base = self._batch(self.kernel.src.element_strides[0])
        src_row = self._src_rows(f"({offset_text('row', row_axes(self.kernel.src, shape.batches))}{base})")
        element = f"{src_row} + {times(self._src_depth('channel'), self.src_channel)}"
        terms = [self._src_rows(f"(row < {shape.rows})")] if self.has_row_tail else []
        ends = self._src_depth(f"(channel < {shape.depth})") if self.has_depth_tail else ""
        place = Place(
            text.let("element", element),
            self._src_depth("channel"),
            text.let("inside", inside),
            " & ".join([*terms, *([ends] if ends else [])]),
            ends,
        )
        made = self.prologue.apply(text.let("x", f"{x}.to({self.compute})"), place)
        kept = f"tl.where({ends}, {made}, 0)" if ends else made
        return text.let("x", f"{kept}.to({TRITON_TYPES[self.kernel.src.dtype]})")

    def _weight_tiles(self) -> list[str]:
        """The weight's tiles of this step, depth against features.

        Where it is packed in two: the rounded one, what is left of it, and the parts of the rounded one that
        are summed apart.
        """
        features, depth = self.extents
        tiles = []
        for place in range(self.packed):
            if self.knobs.maps:
                behind = f" + {place * features * self.shape.batches}" if place else ""
                loaded = self.text.let("w", f"{self.weight}.load([weight_row{behind}, start])")
                tiles.append(loaded if self.knobs.swapped else self.text.let("w", f"{loaded}.T"))
            else:
                behind = f" + {place * features * depth * self.shape.batches}" if place else ""
                tiles.append(self.text.let("w", f"tl.load({self.weight}{behind} + start + weight_tile)"))
        for half in halves(self.knobs.depth) if self.packed == 2 and not self.knobs.maps else ():
            guarded = f"mask={self._weight_depth(half)}, other=0.0"
            tiles.append(self.text.let("w", f"tl.load({self.weight} + start + weight_tile, {guarded})"))
        return tiles

    def _weight_depth(self, vector: str) -> str:
        return f"{vector}[None, :]" if self.knobs.swapped else f"{vector}[:, None]"

    # ---- the parts of a sum

    def _arrive(self) -> None:
        """Keeps this part; the last program of a tile adds them all, in their order, and goes on."""
        text, split = self.text, self.knobs.split
        first, second = self._extents
        each = first * second
        text.line(
            f"within = tl.arange(0, {first})[:, None] * {second} + tl.arange(0, {second})[None, :]",
            f"sums = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type({self.compute}))",
            f"tile_sums = sums + {self.place}.to(tl.int64) * {split * each}",
            f"tl.store(tile_sums + part * {each} + within, total, cache_modifier='.cg')",
            "tl.debug_barrier()",
            f"arrived = tl.atomic_add(workspace + {self.place}, 1, sem='acq_rel', scope='gpu')",
        )
        with text.block(f"if arrived == {split - 1}"):
            text.line("tl.debug_barrier()", f"tl.store(workspace + {self.place}, 0)")
            text.line("total = tl.load(tile_sums + within, cache_modifier='.cg')")
            with text.block(f"for other in range(1, {split})"):
                text.line(f"total += tl.load(tile_sums + other * {each} + within, cache_modifier='.cg')")
            self._finish()

    # ---- the result

    def _finish(self) -> None:
        """The epilogue and the stores, of the whole tile or of its halves along the last axis."""
        text, knobs = self.text, self.knobs
        if knobs.parts == 1:
            self._store("total", "row", "feature")
            return
        first, second = self._extents
        half = second // 2
        halves = [text.name("half"), text.name("half")]
        text.line(f"{', '.join(halves)} = tl.split(total.reshape({first}, 2, {half}).permute(0, 2, 1))")
        split_vector, count = ("row", knobs.rows) if knobs.swapped else ("feature", knobs.features)
        for place, name in enumerate(halves):
            first_of = f"{split_vector}_tile{'.to(tl.int64)' * self.is_wide} * {count} + {place * half}"
            vector = text.let(split_vector, f"{first_of} + tl.arange(0, {half})")
            row, feature = (vector, "feature") if knobs.swapped else ("row", vector)
            self._store(name, row, feature)

    def _store(self, total: str, row: str, feature: str) -> None:
        text, shape, dst = self.text, self.shape, self.kernel.dst
        terms = [self._rows(f"({row} < {shape.rows})")] if self.has_row_tail else []
        ends = self._features(f"({feature} < {shape.features})") if self.has_feature_tail else ""
        mask = " & ".join([*terms, *([ends] if ends else [])])
        base = self._batch(dst.element_strides[0])
        axes = row_axes(dst, shape.batches)
        row_offset = text.let("dst_row", f"{offset_text(row, axes)}{base}")
        offset = f"{self._rows(row_offset)} + {times(self._features(feature), self.dst_feature)}"
        element = text.let("element", offset)
        inside = ""
        if any(each.per == "activation" and each.role == "epilogue" for each in self.kernel.operands):
            image, step = image_axes(dst)
            position = f"({row} % {shape.image_rows})" if shape.batches == 1 else row
            inside = (
                f"{self._rows(f'({offset_text(position, image)})')} + {times(self._features(feature), step)}"
            )
            inside = text.let("inside", inside)
        place = Place(element, self._features(feature), inside, mask, ends)
        result = self.epilogue.apply(total, place)
        guarded = f", mask={mask}" if mask else ""
        text.line(f"tl.store(dst + {element}, {result}.to({TRITON_TYPES[dst.dtype]}){guarded})")
