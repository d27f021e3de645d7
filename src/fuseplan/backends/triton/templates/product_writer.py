"""Writes the text of a product around its sum: where a tile lies, its tail, and a sum in parts.

A tile is rows x features. Rows are output positions over the whole batch. `product_sum` and `product_pairs`
write the sum and its reads of src.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from operator import attrgetter, mul

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    Index,
    Mask,
    arange,
    as_index,
    chosen,
    digits,
    divides,
    number,
    offset,
    total,
)
from fuseplan.backends.triton.shell import Writer, last_to_arrive
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.product_tiles import (
    Knobs,
    Tiles,
    image_axes,
    row_axes,
    rows_run,
    sum_dtype,
)
from fuseplan.kernels.emit import COUNTER_BYTES, Slot, TensorMap
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.transposed import Residue
from fuseplan.language.layouts import image_strides

AXES = "edhw"  # names of the spatial axes; the last ones where there are fewer


class ProductWriter(Writer):
    """Writes one kernel but for its sum.

    Attributes, of a tile in the text:
        row, has_row: the number of each row, and which there are.
        image, src_row: each row's image, and the offset in src of the first element that it reads.
        windows: the first coordinate under each row's window, along each spatial axis; none without windows.
        local, feature, has_feature: each feature's number in the tile's groups, and all; which exist.
        batch, group_block, row_tile, feature_tile: the tile's numbers.
        residue: of a transposed convolution with a stride, that of the tile's rows along each axis.
        over_rows, over_features: how a vector over rows, or over features, is an axis of the result's tile.
    """

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, title)
        self.options = (("num_warps", knobs.warps), ("num_stages", knobs.stages))
        self.knobs, self.tiles = knobs, Tiles(kernel, knobs)
        self.conv = self.tiles.conv
        self.programs, self.workspace_bytes = self.tiles.programs, self.tiles.workspace_bytes
        self.parts = knobs.split
        self.prologue = Elementwise(kernel, "prologue", self.text)
        self.between = Elementwise(kernel, "between", self.text)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        self.weight = argument(Slot("operand", kernel.weight.key))
        self.is_wide = self.tiles.is_wide
        self.image_step, self.channel_step, *self.spatial_steps = kernel.src.element_strides
        self.axes = AXES[len(AXES) - len(self.conv.kernel) :]
        # Where neither axis of a tile is known to be dense, the compiler gives neighbouring threads
        # neighbours along the first: gathered rows stand down a tile, and are turned for the product.
        self.joined = 1 if kernel.prologue else knobs.joined
        is_plain = self.tiles.is_matrix and self.joined == 1
        self.is_turned = knobs.swapped and not is_plain
        is_across = knobs.swapped and is_plain
        self.over_rows, self.over_features = (ACROSS, DOWN) if is_across else (DOWN, ACROSS)
        stages = (slot for each in (self.prologue, self.between, self.epilogue) for slot in each.slots)
        self.tensors = (*self._factors(), *stages, Slot("dst"))

    def _factors(self) -> tuple[Slot, Slot]:
        """src and the weight."""
        knobs, tiles, key = self.knobs, self.tiles, self.kernel.weight.key
        src, weight = Slot("src"), Slot("operand", key)
        if knobs.maps:
            ((_, stride),) = row_axes(self.kernel.src, 1) or ((1, tiles.channels),)
            mapped = self._map(self.conv.rows, tiles.channels, stride, knobs.rows)
            src = Slot("src", map=replace(mapped, per_extent=tiles.image_rows * tiles.is_open))
            rows, depth = tiles.batches * tiles.weight_rows * knobs.weights, tiles.weight_row
            weight = Slot("operand", key, self._map(rows, depth, depth, knobs.features))
        return src, weight

    def _map(self, rows: int, depth: int, stride: int, box: int) -> TensorMap:
        """Rows of so much depth, which the copy engine takes `box` at a time."""
        return TensorMap(self.kernel.src.dtype, (rows, depth), (stride, 1), (box, self.knobs.depth), (1, 1))

    def write_body(self) -> None:
        self._tile()
        self._rows()
        self._features()
        self._sum()
        if self.knobs.split > 1:
            self._arrive()
        else:
            self._finish()

    # ---- where the tile lies

    def _tile(self) -> None:
        """Which tile: in groups of row tiles, so that programs that run together share what they read."""
        text, tiles, across = self.text, self.tiles, self.tiles.across
        if self.is_wide:
            large = "as large as these may be" if tiles.is_open else "this large"
            text.line(f"# offsets of tensors {large} need 64 bits")
        launched = self._residue(number("tl.program_id(0)", tiles.count).wide(self.is_wide))
        self.launched = text.index("place" if tiles.batches > 1 else "program", launched)
        self.batch, program = as_index(0), self.launched
        if tiles.batches > 1:
            each = int(tiles.each.high)
            self.batch = text.index("batch", self.launched // each)
            program = text.index("program", self.launched % each)
        group = min(self.knobs.group, int(tiles.row_blocks.high))
        rows, within = program // (group * across) * group, program % (group * across)
        if group == 1 or across == 1:
            row_tile, column = program // across, program % across
        elif divides(group, tiles.row_blocks):
            row_tile, column = rows + within % group, within // group
        else:
            text.line(f"group_rows = tl.minimum({tiles.row_blocks - rows}, {group})")
            row_tile = number(f"{rows} + {within} % group_rows", tiles.row_blocks)
            column = number(f"{within} // group_rows", across)
        self.row_tile = text.index("row_tile", row_tile)
        column = text.index("column" if tiles.group_blocks > 1 else "feature_tile", column)
        self.group_block = text.index("group_block", column // tiles.feature_blocks)
        self.feature_tile = text.index("feature_tile", column % tiles.feature_blocks)
        if self.knobs.split > 1:
            text.line("part = tl.program_id(1)")

    def _residue(self, launched: Index) -> Index:
        """Which residue; programs that run together write neighbours, so that a cache joins their lines."""
        count, axes = self.tiles.parts, self.tiles.residues
        self.residue = digits(self.text.index("residue", launched % count), list(map(len, axes)))
        return launched // count

    def of_residue(self, axis: int, what: Callable[[Residue], int]) -> Index:
        """A number of the tile's residue along an axis; 0 without residues."""
        if not self.tiles.residues:
            return as_index(0)
        return chosen([what(each) for each in self.tiles.residues[axis]], self.residue[axis])

    def lying(self, tile: Index, run: int) -> Index:
        """Offsets of a tile, with the run that the compiler is told of where rows stand down the tile."""
        if run == 1 or self.over_rows != DOWN:
            return tile
        return tile.named(f"tl.max_contiguous({tile}, [{run}, 1])")

    def arange(self, size: int) -> Index:
        """The numbers from 0 to `size`, in the width of offsets."""
        return arange(size).wide(self.is_wide)

    def _rows(self) -> None:
        """The tile's rows, and where each begins in src."""
        text, tiles, block = self.text, self.tiles, self.knobs.rows
        self.row = text.index("row", self.row_tile * block + self.arange(block))
        self.has_row = text.mask("has_row", self.row < tiles.rows)
        self.windows: list[Index] = []
        self.image = self.row // tiles.image_rows if self.conv.batch > 1 else as_index(0)
        self.image = self.image if tiles.batches == 1 else self.batch
        if tiles.is_matrix:
            rows = offset(self.row, row_axes(self.kernel.src, tiles.batches))
            self.src_row = rows + self.batch * self.image_step
            return
        self.image = text.index("image", self.image)
        # The number of a program has the name `place` where there are several products.
        place = text.index("place" if tiles.batches == 1 else "position", self.row % tiles.image_rows)
        terms = [self.image * self.image_step]
        for axis, at in enumerate(digits(place, self.conv.dst_spatial)):
            low = as_index(self.conv.padding[axis][0])
            begin = at * self.conv.stride[axis] - (
                self.of_residue(axis, attrgetter("low")) if tiles.residues else low
            )
            self.windows.append(text.index(self.axes[axis], begin))
            terms.append(self.windows[-1] * self.spatial_steps[axis])
        begin = total([*terms, self.group_block * (tiles.channels * self.channel_step)])
        if not begin.is_vector:  # the same for all rows
            begin = Index(f"tl.zeros_like({self.row})", 0, 0, is_vector=True) + begin
        self.src_row = text.index("src_row", begin)

    def _features(self) -> None:
        """The tile's features."""
        text, tiles, block = self.text, self.tiles, self.knobs.features
        local = self.feature_tile * block + self.arange(block)
        self.local = text.index("local" if tiles.group_blocks > 1 else "feature", local)
        self.feature, self.has_feature = self._named_features(self.local)

    def _named_features(self, local: Index, ways: int = 1) -> tuple[Index, Mask]:
        """The numbers of features by those within the tile's groups, and which of them there are.

        Args:
            local: numbers within the groups.
            ways: features of the product that each stands for.
        """
        tiles = self.tiles
        feature = self.text.index("feature", self.group_block * tiles.features + local)
        ends = feature < self.conv.features if self.conv.groups % tiles.merged else ALL
        name = "has_feature" if ways == 1 else "has_made"
        return feature, self.text.mask(name, (local < tiles.features // ways) & ends)

    # ---- the sum

    @property
    def _extents(self) -> tuple[int, int]:
        """The tile of the sum."""
        rows, features = self.knobs.rows, self.knobs.features
        return (features, rows) if self.knobs.swapped else (rows, features)

    def _sum(self) -> None:
        """The sum of this program's part of the products, as `total`."""
        names = ("total", "small") if self.knobs.apart else ("total",)
        for name in names:
            self.text.line(
                f"{name} = tl.zeros({list(self._extents)}, {named(sum_dtype(self.knobs, self.kernel))})"
            )
        self.write_sum()
        if self.knobs.apart:
            self.text.line("total += small")

    @abstractmethod
    def write_sum(self) -> None:
        """Adds all products to `total`."""

    def _arrive(self) -> None:
        """Keeps this part; the last program of a tile adds them all, in their order, and goes on."""
        text, split, place = self.text, self.knobs.split, self.launched
        first, second = self._extents
        each = first * second
        counter = Index("workspace") + place
        sums = (place.wide() if place.constant is None else place) * (split * each)
        dtype = named(sum_dtype(self.knobs, self.kernel))
        text.line(
            f"within = {(arange(first) * second).at(DOWN) + arange(second).at(ACROSS)}",
            f"sums = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type({dtype}))",
        )
        tile_sums = text.index("tile_sums", Index("sums") + sums)
        text.line(f"tl.store({tile_sums} + part * {each} + within, total, cache_modifier='.cg')")
        with last_to_arrive(text, counter, split):
            text.line(f"total = tl.load({tile_sums} + within, cache_modifier='.cg')")
            with text.block(f"for other in range(1, {split})"):
                text.line(f"total += tl.load({tile_sums} + other * {each} + within, cache_modifier='.cg')")
            self._finish()

    # ---- the result

    def _finish(self) -> None:
        """The epilogue and the stores, of the whole tile or of its halves along the last axis."""
        text, summed, (first, second) = self.text, "total", self._extents
        compute = self.kernel.compute_dtype
        if sum_dtype(self.knobs, self.kernel) != compute:
            summed = text.let("exact", f"total.to({named(compute)})")
        if self.is_turned:  # a name keeps its shape in all of Triton's blocks
            text.line(f"turned = {summed}.trans(1, 0)")
            summed, (first, second) = "turned", (second, first)
        if self.kernel.between:
            axes = self.over_features
            lying = Place("", str(self.feature.at(axes)), "", "", str(self.has_feature.at(axes)))
            summed = self.between.apply(summed, lying)
        if self.knobs.parts == 1:
            made = self._gated(summed, first, second)
            self._store(made, self.row, self.has_row, *self._made_features())
            return
        half = second // 2
        halved = [text.name("half"), text.name("half")]
        text.line(f"{', '.join(halved)} = tl.split({summed}.reshape({first}, 2, {half}).permute(0, 2, 1))")
        for place, name in enumerate(halved):
            self._store_half(name, place, first, half)

    def _store_half(self, name: str, place: int, first: int, half: int) -> None:
        """Calls the function that finishes half number `place`, which has other rows or features."""
        is_row, ways = self.over_rows == ACROSS, self.tiles.ways
        whole, each, size = self.local, self.knobs.features // ways, half // ways
        stem = "made" if ways > 1 else whole.text
        if is_row:
            whole, each, size, stem = self.row, self.knobs.rows, half, "row"
        tile = self.row_tile if is_row else self.feature_tile
        vector = tile * each + place * size + self.arange(size)

        def write() -> tuple[str, ...]:
            made = self._gated("half", first, half)
            own = replace(vector.named(stem), high=whole.high)
            if is_row:
                has_row = self.text.mask("has_row", own < self.tiles.rows)
                self._store(made, own, has_row, *self._made_features())
            else:
                self._store(made, self.row, self.has_row, *self._named_features(own, ways))
            return ()

        self.text.call("finish", {"half": name, stem: str(vector)}, write)

    def _made_features(self) -> tuple[Index, Mask]:
        """The features of dst that the tile makes."""
        ways = self.tiles.ways
        if ways == 1:
            return self.feature, self.has_feature
        each = self.knobs.features // ways
        made = self.text.index("made", self.feature_tile * each + self.arange(each))
        return self._named_features(made, ways)

    def _gated(self, summed: str, first: int, second: int) -> str:
        """Gate and value of a gated product as parts of x: neighbours of one thread where rows stand down."""
        if self.tiles.ways == 1:
            return summed
        parts = [self.text.name("part") for _ in range(self.tiles.ways)]
        pairs = f"{first}, {second // 2}, 2)"
        if self.over_features == DOWN:
            pairs = f"{first // 2}, 2, {second}).permute(0, 2, 1)"
        self.text.line(f"{', '.join(parts)} = tl.split({summed}.reshape({pairs})")
        self.epilogue.given |= {f"x[{place}]": name for place, name in enumerate(parts)}
        return parts[0]

    def _store(self, summed: str, row: Index, has_row: Mask, feature: Index, has_feature: Mask) -> None:
        text, tiles, dst = self.text, self.tiles, self.kernel.dst
        over_rows, over_features = self.over_rows, self.over_features
        ends = has_feature.at(over_features)
        if tiles.whole.is_transposed:
            self._spread(summed, row, has_row, feature, ends)
            return
        mask = text.mask("mask", has_row.at(over_rows) & ends)
        axes = row_axes(dst, tiles.batches)
        rows = text.index("dst_row", offset(row, axes) + self.batch * dst.element_strides[0])
        element = rows.at(over_rows) + (feature * dst.element_strides[1]).at(over_features)
        element = text.index("element", self.lying(element, rows_run(axes)))
        axes, step = image_axes(dst)
        position = row % tiles.image_rows if tiles.batches == 1 else row
        inside = offset(position, axes).at(over_rows) + (feature * step).at(over_features)
        place = Place(str(element), str(feature.at(over_features)), f"({inside})", str(mask), str(ends))
        self.epilogue.store(summed, place)

    def _spread(self, summed: str, row: Index, has_row: Mask, feature: Index, ends: Mask) -> None:
        """The same of a transposed convolution: outputs of a residue lie a stride apart."""
        text, tiles, dst, whole = self.text, self.tiles, self.kernel.dst, self.tiles.whole
        channel, begins = (
            feature,
            [self.of_residue(axis, attrgetter("begin")) for axis in range(len(self.axes))],
        )
        if tiles.is_joint:
            channel, begins = self._residues_of(feature)
        at = digits(row % tiles.image_rows, self.conv.dst_spatial)
        tos = [
            text.index(f"{name}_to", place * step)
            for name, place, step in zip(self.axes, at, whole.stride, strict=True)
        ]
        mask = has_row.at(self.over_rows) & ends
        for to, begin, extent in zip(tos, begins, whole.dst_spatial, strict=True):
            spot = to.at(self.over_rows) + begin.at(self.over_features)
            mask = mask & (spot >= 0) & (spot < extent)
        mask = text.mask("mask", mask)

        def offsets(steps: Sequence[int], image: Index) -> Index:
            rows = total([image, *map(mul, tos, steps[1:])])
            rows = rows if rows.is_vector else Index(f"tl.zeros_like({row})", 0, 0, is_vector=True)
            columns = total([channel * steps[0], *map(mul, begins, steps[1:])])
            return rows.at(self.over_rows) + columns.at(self.over_features)

        image_step, *steps = dst.element_strides
        element = text.index("element", offsets(steps, row // tiles.image_rows * image_step))
        inside = offsets(image_strides(dst.shape, dst.element_strides)[1:], as_index(0))
        place = Place(str(element), str(channel.at(self.over_features)), f"({inside})", str(mask), str(ends))
        self.epilogue.store(summed, place)

    def _residues_of(self, feature: Index) -> tuple[Index, list[Index]]:
        """The features of dst that a joint tile's are, and where their residues begin along each axis."""
        text, whole = self.text, self.tiles.whole
        count = prod(whole.stride)
        channel, number = feature // count, feature % count
        if self.kernel.dst.element_strides[1] == 1:
            channel, number = feature % whole.features, feature // whole.features
        begins = zip(digits(text.index("residue", number), whole.stride), whole.padding, strict=True)
        return text.index("channel", channel), [at - low for at, (low, _) in begins]
