"""Writes the text of a matrix product: a tile of rows x features, its tail, and its sum in parts."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    DOWN,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    condition,
    number,
    offset,
    total,
)
from fuseplan.backends.triton.names import named
from fuseplan.backends.triton.shell import Shell
from fuseplan.backends.triton.templates.product_arithmetic import multiply
from fuseplan.backends.triton.templates.product_shape import (
    Knobs,
    ProductShape,
    image_axes,
    is_halved,
    row_axes,
    steps_of,
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
        self.compute = named(kernel.compute_dtype)
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
        self.batch_step = kernel.src.element_strides[0]

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
        knobs = self.knobs
        shell = Shell(self.kernel, self.title, self.text, self.slots)
        with shell.body():
            self._tile()
            self._sum()
            if knobs.split > 1:
                self._arrive()
            else:
                self._finish()
        return shell.source(
            self.tiles * self.shape.batches,
            (("num_warps", knobs.warps), ("num_stages", knobs.stages)),
            workspace_bytes=self.workspace_bytes,
            parts=knobs.split,
        )

    @property
    def workspace_bytes(self) -> int:
        """Counters and every part's sums, where the depth is in parts."""
        if self.knobs.split == 1:
            return 0
        size = 8 if self.kernel.compute_dtype == "f64" else 4
        each = self.knobs.rows * self.knobs.features * size
        return COUNTER_BYTES + self.tiles * self.shape.batches * self.knobs.split * each

    # ---- where the tile lies

    def _tile(self) -> None:
        """Which tile: in groups of row tiles, so that programs that run together share what they read."""
        text, knobs, shape, across = self.text, self.knobs, self.shape, self.feature_tiles
        place = text.index(self.place, number("tl.program_id(0)", self.tiles * shape.batches))
        self.launched = place  # its number in the workspace
        batch = text.index("batch", place // self.tiles)
        program = text.index("program", place % self.tiles)
        group = min(knobs.group, self.row_tiles)
        rows, within = program // (group * across) * group, program % (group * across)
        if group == 1 or across == 1:
            row_tile, feature_tile = program // across, program % across
        elif self.row_tiles % group == 0:
            row_tile, feature_tile = rows + within % group, within // group
        else:
            text.line(f"group_rows = tl.minimum({self.row_tiles - rows}, {group})")
            inside = f"{within} % group_rows"
            row_tile = number(f"{rows} + {inside}", self.row_tiles)
            feature_tile = number(f"{within} // group_rows", across)
        self.row_tile, self.feature_tile = (
            text.index("row_tile", row_tile),
            text.index("feature_tile", feature_tile),
        )
        if knobs.split > 1:
            text.line("part = tl.program_id(1)")
        if self.is_wide:
            text.line("# offsets of tensors this large need 64 bits")
        if knobs.maps:  # the copy engine counts in 32 bits
            rows, features = self.row_tile * knobs.rows, self.feature_tile * knobs.features
            self.src_row = text.index("src_row", batch * shape.rows + rows)
            self.weight_row = text.index("weight_row", batch * self.extents[0] + features)
        self.batch = batch.wide(self.is_wide)
        self.row_first = self.row_tile.wide(self.is_wide) * knobs.rows
        self.feature_first = self.feature_tile.wide(self.is_wide) * knobs.features
        self.row = text.index("row", self.row_first + arange(knobs.rows))
        self.feature = text.index("feature", self.feature_first + arange(knobs.features))
        self.has_row = text.mask("has_row", self.row < shape.rows)

    @property
    def _over_rows(self) -> str:
        """How a vector over rows is an axis of the result's tile, and of src's."""
        return ACROSS if self.knobs.swapped else DOWN

    @property
    def _over_features(self) -> str:
        """How a vector over features, or over the depth of src, is an axis of its tile."""
        return DOWN if self.knobs.swapped else ACROSS

    @property
    def _extents(self) -> tuple[int, int]:
        """The result's tile."""
        rows, features = self.knobs.rows, self.knobs.features
        return (features, rows) if self.knobs.swapped else (rows, features)

    # ---- the sum

    def _sum(self) -> None:
        """The sum of products over this program's part of the depth, as `total`."""
        text, knobs = self.text, self.knobs
        text.line(f"total = tl.zeros({list(self._extents)}, {self.compute})")
        if self.is_in_three:
            text.line(f"small = tl.zeros({list(self._extents)}, {self.compute})")
        if not knobs.maps or self.kernel.prologue:
            self.depth = text.index("depth", arange(knobs.depth))
        if not knobs.maps:
            self._offsets()
        self._steps(steps_of(knobs, self.shape.depth))
        if self.is_in_three:
            text.line("total += small")

    def _offsets(self) -> None:
        """Where the tiles of src and of the weight lie when they begin at channel 0."""
        text, depth = self.text, self.extents[1]
        rows = offset(self.row, row_axes(self.kernel.src, self.shape.batches))
        self.src_row = text.index("src_row", rows + self.batch * self.batch_step)
        inner = (self.depth * self.src_channel).at(self._over_features)
        self.src_tile = text.index("src_tile", self.src_row.at(self._over_rows) + inner)
        weight = (self.feature * depth).at(self._over_features) + self.depth.at(self._over_rows)
        self.weight_tile = text.index("weight_tile", weight + self.batch * (self.extents[0] * depth))

    def _steps(self, steps: int) -> None:
        """The loop over the depth; a src tile that loads `ahead` bring is in registers for a step."""
        text, depth, split = self.text, self.knobs.depth, self.knobs.split
        before = number("part", split) * steps
        step = Index("step", 0, steps - 1)
        last = (steps * split - 1) * depth
        if self.knobs.ahead:
            start = text.index("start", before * depth)
            text.line(f"coming = {self._src_tile(start)}")
        with text.block(f"for step in range({steps})"):
            if self.knobs.ahead:
                x = text.let("x", "coming")
                following = Index(text.name("start"), 0, last + depth)
                text.line(f"{following} = {(before + (step + 1)) * depth}")
                text.line(f"coming = {self._src_tile(following)}")
            start = text.index("start", (before + step) * depth)
            made = self._prepared(x if self.knobs.ahead else self._src_tile(start), start)
            multiply(text, self.knobs, self.kernel, made, self._weight_tiles(start), small="small")

    def _src_tile(self, start: Index) -> str:
        """The src tile of the step whose first channel is `start`."""
        if self.knobs.maps:
            loaded = self.text.let("x", f"src.load([{self.src_row}, {start}])")
            return self.text.let("x", f"{loaded}.T") if self.knobs.swapped else loaded
        ends = self.depth < self.shape.depth - start
        mask = self.has_row.at(self._over_rows) & ends.at(self._over_features)
        step = start
        if self.is_wide:  # a number in the interpreter, which has no method that widens
            step = Index(f"(tl.full((), 0, tl.int64) + {start})", start.low, start.high)
        at = total([Index("src"), step * self.src_channel, self.src_tile])
        return self.text.let("x", f"tl.load({at}{mask.guard('0')})")

    def _prepared(self, x: str, start: Index) -> str:
        """The prologue's result in the dtype that is multiplied; past the last channel it is zero."""
        if not self.kernel.prologue:
            return x
        text, shape, src = self.text, self.shape, self.kernel.src
        channel = text.index("channel", start + self.depth)
        axes, step = image_axes(src)
        row = self.row % shape.image_rows if shape.batches == 1 else self.row
        inside = offset(row, axes).at(self._over_rows) + (channel * step).at(self._over_features)
        rows = offset(self.row, row_axes(src, shape.batches)) + self.batch * self.batch_step
        element = rows.at(self._over_rows) + (channel * self.src_channel).at(self._over_features)
        ends = text.mask("has_channel", channel < shape.depth).at(self._over_features)
        mask = text.mask("mask", self.has_row.at(self._over_rows) & ends)
        place = Place(
            str(text.index("element", element)),
            str(channel.at(self._over_features)),
            f"({inside})",
            str(mask),
            str(ends),
        )
        made = self.prologue.apply(self._widened(x), place)
        kept = f"tl.where({ends}, {made}, 0)" if ends else made
        return (
            text.let("x", f"{kept}.to({named(src.dtype)})")
            if src.dtype != self.kernel.compute_dtype
            else kept
        )

    def _widened(self, x: str) -> str:
        is_compute = self.kernel.src.dtype == self.kernel.compute_dtype
        return x if is_compute else self.text.let("x", f"{x}.to({self.compute})")

    def _weight_tiles(self, start: Index) -> list[str]:
        """The weight's tiles of this step, depth against features.

        Where it is packed in two: the rounded one, what is left of it, and the parts of the rounded one that
        are summed apart.
        """
        features, depth = self.extents
        text, batches, over_depth = self.text, self.shape.batches, self._over_rows
        tiles = []
        for place in range(self.packed):
            if self.knobs.maps:
                row = self.weight_row + place * features * batches
                loaded = text.let("w", f"{self.weight}.load([{row}, {start}])")
                tiles.append(loaded if self.knobs.swapped else text.let("w", f"{loaded}.T"))
                continue
            behind = as_index(place * features * depth * batches)
            at = total([Index(self.weight), behind, start, self.weight_tile])
            tiles.append(text.let("w", f"tl.load({at})"))
        for half in halves(self.knobs.depth) if self.packed == 2 and not self.knobs.maps else ():
            at = total([Index(self.weight), start, self.weight_tile])
            tiles.append(text.let("w", f"tl.load({at}{condition(half).at(over_depth).guard()})"))
        return tiles

    # ---- the parts of a sum

    def _arrive(self) -> None:
        """Keeps this part; the last program of a tile adds them all, in their order, and goes on."""
        text, split, place = self.text, self.knobs.split, self.launched
        first, second = self._extents
        each = first * second
        counter = Index("workspace") + place
        sums = (place.wide() if place.constant is None else place) * (split * each)
        text.line(
            f"within = {(arange(first) * second).at(DOWN) + arange(second).at(ACROSS)}",
            f"sums = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type({self.compute}))",
        )
        tile_sums = text.index("tile_sums", Index("sums") + sums)
        text.line(
            f"tl.store({tile_sums} + part * {each} + within, total, cache_modifier='.cg')",
            "tl.debug_barrier()",
            f"arrived = tl.atomic_add({counter}, 1, sem='acq_rel', scope='gpu')",
        )
        with text.block(f"if arrived == {split - 1}"):
            text.line("tl.debug_barrier()", f"tl.store({counter}, 0)")
            text.line(f"total = tl.load({tile_sums} + within, cache_modifier='.cg')")
            with text.block(f"for other in range(1, {split})"):
                text.line(f"total += tl.load({tile_sums} + other * {each} + within, cache_modifier='.cg')")
            self._finish()

    # ---- the result

    def _finish(self) -> None:
        """The epilogue and the stores, of the whole tile or of its halves along the last axis."""
        text, knobs = self.text, self.knobs
        if knobs.parts == 1:
            self._store("total", self.row, self.feature, self.has_row)
            return
        first, second = self._extents
        half = second // 2
        halved = [text.name("half"), text.name("half")]
        text.line(f"{', '.join(halved)} = tl.split(total.reshape({first}, 2, {half}).permute(0, 2, 1))")
        for place, name in enumerate(halved):
            begin = self.row_first if knobs.swapped else self.feature_first
            self._store_half(name, "row" if knobs.swapped else "feature", begin + place * half + arange(half))

    def _store_half(self, half: str, stem: str, vector: Index) -> None:
        """Calls the function that finishes a half, whose rows or features are `vector`."""

        def write() -> tuple[str, ...]:
            own = replace(vector.named(stem), high=(self.row if stem == "row" else self.feature).high)
            if stem == "row":
                self._store("half", own, self.feature, self.text.mask("has_row", own < self.shape.rows))
            else:
                self._store("half", self.row, own, self.has_row)
            return ()

        self.text.call("finish", {"half": half, stem: str(vector)}, write)

    def _store(self, summed: str, row: Index, feature: Index, has_row: Mask) -> None:
        text, shape, dst = self.text, self.shape, self.kernel.dst
        over_rows, over_features = self._over_rows, self._over_features
        ends = text.mask("has_feature", feature < shape.features).at(over_features)
        mask = text.mask("mask", has_row.at(over_rows) & ends)
        rows = offset(row, row_axes(dst, shape.batches)) + self.batch * dst.element_strides[0]
        rows = text.index("dst_row", rows)
        element = rows.at(over_rows) + (feature * self.dst_feature).at(over_features)
        image, step = image_axes(dst)
        position = row % shape.image_rows if shape.batches == 1 else row
        inside = offset(position, image).at(over_rows) + (feature * step).at(over_features)
        element = text.index("element", element)
        place = Place(str(element), str(feature.at(over_features)), f"({inside})", str(mask), str(ends))
        self.epilogue.store(summed, place)
