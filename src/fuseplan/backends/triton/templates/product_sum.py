"""Writes the sum of a product: which taps and channels each step takes, and what one step loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    Index,
    Mask,
    as_index,
    condition,
    digits,
    number,
    total,
)
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.product_arithmetic import halves, multiply
from fuseplan.backends.triton.templates.product_tiles import Knobs, factor_dtype
from fuseplan.backends.triton.templates.product_writer import ProductWriter
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.transposed import Residue
from fuseplan.language.dtypes import FP8


@dataclass(frozen=True)
class Step:
    """Where a step's tile of src lies.

    Attributes:
        begin, tile: where the step begins, and the offsets of its elements from there.
        channel: their channels among those of the tile.
        mask: which elements there are.
        kept: which of them are no zeros behind the prologue; rows that do not exist are not asked for.
    """

    begin: Index
    tile: Index
    channel: Index
    mask: Mask
    kept: Mask

    @property
    def at(self) -> Index:
        """Offsets of its elements."""
        return self.begin + self.tile


class Sum(ProductWriter):
    """What both kinds of sum share: the factors and the product.

    Attributes:
        weight_tile: offsets of the weight's elements at the first step.
        src_rows, src_depth: how a vector over rows, and one over the depth, is an axis of src's tile.
        by_depth: how one over the depth is an axis of the weight's tile; `by_features`, one over features.
    """

    weight_tile: Index

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title)
        self.width = "tl.int64" if self.is_wide else "tl.int32"
        self.src_rows, self.src_depth = self.over_rows, self.over_features
        self.by_features, self.by_depth = (DOWN, ACROSS) if knobs.swapped else (ACROSS, DOWN)
        self.before = number("part", knobs.split) * self.tiles.steps  # steps of the parts before this one

    def finish(self, x: str, step: Step) -> None:
        """Makes the tile `x` of src a factor: after the prologue, padding zero again, as it is multiplied."""
        kernel, text = self.kernel, self.text
        if kernel.prologue:
            self._apply_prologue(x, step)
        elif kernel.src.dtype in FP8:
            self._widen_fp8(x)
        if self.is_turned and self.joined == 1:
            text.line(f"{x} = {x}.trans(1, 0)")

    def _apply_prologue(self, x: str, step: Step) -> None:
        kernel, text = self.kernel, self.text
        channel = step.channel + self.group_block * self.tiles.channels
        known = (channel < self.conv.channels).at(self.src_depth)
        inside = f"({step.at} - {(self.image * self.image_step).at(self.src_rows).atom})"
        element = text.index("element", step.at)
        place = Place(str(element), str(channel.at(self.src_depth)), inside, str(step.mask), str(known))
        if kernel.src.dtype in FP8:
            made = self.prologue.apply(self.prologue.widened(x, kernel.src.dtype, "wide"), place)
        else:
            if kernel.compute_dtype != kernel.src.dtype:
                text.line(f"{x} = {x}.to({named(kernel.compute_dtype)})")
            made = self.prologue.apply(x, place)
        text.line(f"{x} = tl.where({step.kept}, {made}, 0.0)" if step.kept else f"{x} = {made}")
        if self.knobs.arithmetic == "native":
            text.line(f"{x} = {x}.to({named(factor_dtype(kernel))})")

    def _widen_fp8(self, name: str) -> None:
        """Elements of the weight's dtype as a factor has them."""
        kernel = self.kernel
        wide = self.prologue.widened(name, kernel.weight.dtype, "wide")
        self.text.line(f"{name} = {wide}.to({named(factor_dtype(kernel))})")

    def add_product(self, at: Index, own: Mask = ALL) -> None:
        """Adds the product of the tile of src, `x`, and that of the weight, which it loads.

        Args:
            at: where the step begins in each feature's row of the packed weight.
            own: the elements of the weight that exist.
        """
        text, tiles, behind = self.text, self.tiles, self.tiles.weight_rows * self.tiles.batches
        names = ["weight", "weight_left"][: self.knobs.weights]
        at = text.index("weight_at", at) if self.knobs.is_halved else at
        for place, name in enumerate(names):
            if self.knobs.maps:
                features = self.feature_tile * self.knobs.features
                row = (self.batch * tiles.weight_rows + features).narrow(self.is_wide) + place * behind
                turn = "" if self.knobs.swapped else ".T"
                text.line(f"{name} = {self.weight}.load([{row}, {at}]){turn}")
            else:
                self._load_weight(name, place * behind * tiles.weight_row, at, own)
        for place, half in enumerate(halves(self.knobs)):
            names.append(f"weight_{place}")
            self._load_weight(names[-1], 0, at, condition(f"{half}{self.by_depth}") & own)
        multiply(text, self.knobs, self.kernel, "x", names)

    def _load_weight(self, name: str, behind: int, at: Index, mask: Mask) -> None:
        pointer = total([Index(self.weight), as_index(behind), at, self.weight_tile])
        self.text.line(f"{name} = tl.load({pointer}{mask.guard()})")
        if self.kernel.weight.dtype in FP8:
            self._widen_fp8(name)

    def within(self, axis: int, at: Index) -> Mask:
        """That a coordinate is one of src; where its range says so, nothing is written."""
        size = self.conv.src_spatial[axis]
        if not (at >= 0) and not (at < size):
            return ALL
        at = self.text.index(f"{self.axes[axis]}_at", at)
        return (at >= 0) & (at < size)

    def count(self, counters: Sequence[tuple[str, Index | int, int, int]]) -> None:
        """Counts on: (name, extent, step, carried) of each counter, the fastest first; the last has no end.

        A counter moves by its step, and by what is carried where the one before it passes its end. There is
        no division in the loop: with it, code for eight warps is known to be wrong.
        """
        done = as_index(0)
        for place, (name, extent, step, carried) in enumerate(counters):
            self.text.line(f"{name} += {done * carried + step}")
            if place < len(counters) - 1:
                done = Index(self.text.let("done", f"({name} >= {extent}).to({self.width})"), 0, 1)
                self.text.line(f"{name} -= {done * extent}")


class BlockedSum(Sum):
    """Steps of one tap and `depth` channels: all taps of some channels, then the next channels.

    So what is read of src stays in the first cache from tap to tap. Counters say where a gathered tile lies,
    the step's number where rows do.
    """

    def write_sum(self) -> None:
        """The counters, and the loop where there is more than one step."""
        text, tiles = self.text, self.tiles
        self._begin()
        if self.steps.constant == 1:
            self._step(as_index(0))
        elif self.knobs.ahead and tiles.steps > 1:
            self._steps_ahead()
        else:
            with text.block(f"for {'_' if tiles.is_gathered else 'step'} in range({self.steps})"):
                self._step(Index("step", 0, tiles.steps - 1))
                self._advance()

    # ---- before the loop

    def _begin(self) -> None:
        text, tiles, joined = self.text, self.tiles, self.joined
        counted = [axis for axis, taps in enumerate(self.conv.kernel) if taps > 1]
        if not self.knobs.maps or self.kernel.prologue:
            self.depth = text.index("depth", self.arange(tiles.knobs.depth))
            self.src_row = text.index("src_row", self.src_row)
            self.lead = self.depth
        if joined > 1:  # the first of the channels that a thread loads side by side
            self.lead = text.index("lead", self.arange(tiles.knobs.depth // joined) * joined)
        if not tiles.is_gathered and (not self.knobs.maps or self.kernel.prologue):
            tile = self.src_row.at(self.src_rows) + (self.lead * self.channel_step).at(self.src_depth)
            self.src_tile = text.index("src_tile", self.lying(tile, tiles.src_run))
        self.own = ALL
        if not self.knobs.maps:
            self._begin_weight()
        self._begin_counters(counted)

    def _begin_weight(self) -> None:
        text, tiles, channels = self.text, self.tiles, self.conv.channels_per_group
        row = (self.feature * tiles.weight_row).at(self.by_features)
        depth = self.depth if tiles.merged == 1 else self.depth % channels
        batch = self.batch * (tiles.weight_rows * tiles.weight_row)
        self.weight_tile = text.index("weight_tile", row + depth.at(self.by_depth) + batch)
        if tiles.merged > 1:
            group = (self.local // self.conv.features_per_group).at(self.by_features)
            other = (self.depth // channels).at(self.by_depth)
            text.line("# the weight between different groups is zero")
            own = condition(f"{group} == {other}") & self.has_feature.at(self.by_features)
            self.own = text.mask("own", own)

    def _begin_counters(self, counted: Sequence[int]) -> None:
        """Counters of taps and channels at the part's first step; without counted taps there are none."""
        kernel = self.conv.kernel
        self.extents = [self._taps(axis) for axis in range(len(kernel))]
        self.first = [self.of_residue(axis, self._before(axis)) for axis in range(len(kernel))]
        self.steps = as_index(self.tiles.steps)
        if any(extent.constant != taps for extent, taps in zip(self.extents, kernel, strict=True)):
            taps = functools.reduce(mul, self.extents)
            self.steps = self.text.index("steps", taps * (self.tiles.steps // self.conv.taps))
        first = digits(self.before % self.conv.taps, kernel)
        self.taps = {
            axis: self._counter(f"tap_{self.axes[axis]}", kernel[axis], first[axis]) for axis in counted
        }
        self.first_taps = {axis: replace(tap, high=first[axis].high) for axis, tap in self.taps.items()}
        self.channel = as_index(0)
        if self.tiles.is_gathered and self.tiles.channel_blocks > 1:
            depth, begin = self.knobs.depth, self.before // self.conv.taps
            channel = self._counter("channel", self.tiles.channel_blocks * depth, begin * depth)
            self.channel = replace(channel, high=(self.tiles.channel_blocks - 1) * depth)

    def _taps(self, axis: int) -> Index:
        """Taps along an axis; residues may have fewer than others."""
        if not self.tiles.residues:
            return as_index(self.conv.kernel[axis])
        return self.text.index(f"taps_{self.axes[axis]}", self.of_residue(axis, lambda each: len(each.taps)))

    def _before(self, axis: int) -> Callable[[Residue], int]:
        """How many taps of other residues lie in front of those of one in the packed weight."""
        listed = self.tiles.residues[axis] if self.tiles.residues else ()
        return lambda own: sum(len(each.taps) for each in listed[: own.begin])

    def _counter(self, name: str, extent: int, begin: Index) -> Index:
        start = (
            f"tl.full((), {begin}, {self.width})" if begin.constant is not None else begin.wide(self.is_wide)
        )
        self.text.line(f"{name} = {start}")
        return number(name, extent)

    # ---- a step

    def _channel(self, step: Index, name: str = "channel") -> Index:
        """The first channel of a step: the counter, or told by the step's number."""
        if self.tiles.is_gathered:
            return self.channel
        channel = (self.before + step).widened(self.is_wide and not self.knobs.maps) * self.knobs.depth
        return self.text.index(name, channel)

    def _step(self, step: Index) -> None:
        channel = self._channel(step)
        if self.knobs.maps:
            row = (self.batch * self.tiles.rows + self.row_tile * self.knobs.rows).narrow(self.is_wide)
            self.text.line(f"x = src.load([{row}, {channel}]){'.T' if self.knobs.swapped else ''}")
            if self.kernel.prologue:
                self.finish("x", self._where(channel))
        else:
            lying = self._where(channel)
            self._load("x", lying, channel)
            self.finish("x", lying)
        self.add_product(self._weight_at(channel), self.own)

    def _steps_ahead(self) -> None:
        """The loop in which a tile of src is loaded while the one before it is multiplied.

        With counters, which have moved on by then, a tile goes through the prologue where it is loaded.
        """
        text, is_gathered = self.text, self.tiles.is_gathered
        is_late = bool(self.kernel.prologue) and not is_gathered
        first, taps = self._channel(as_index(0), "first"), self.taps
        self.taps = self.first_taps
        self._load_whole("x", first, self._where(first), is_late)
        self.taps = taps
        with text.block(f"for {'_' if is_gathered else 'step'} in range({self.steps})"):
            step = Index("step", 0, self.tiles.steps - 1)
            channel = self._channel(step)
            if is_late:
                self.finish("x", self._where(channel))
            at = self._weight_at(channel)
            if is_gathered:
                text.line(f"weight_at = {at}")
                at = Index("weight_at")
                self._advance()
            coming = self._channel(step + 1, "coming")
            self._load_whole("following", coming, self._where(coming, may_end=True), is_late)
            self.add_product(at, self.own)
            text.line("x = following")

    def _load_whole(self, name: str, channel: Index, step: Step, is_late: bool) -> None:
        self._load(name, step, channel)
        if not is_late:
            self.finish(name, step)

    def _advance(self) -> None:
        if not self.tiles.is_gathered:
            return
        taps = [(tap.text, self.extents[axis], 0, 1) for axis, tap in reversed(self.taps.items())]
        channels = [("channel", as_index(0), 0, self.knobs.depth)] if self.tiles.channel_blocks > 1 else []
        counted = [*taps, *channels]
        if counted:
            (name, extent, _, unit), *others = counted
            self.count([(name, extent, unit, 0), *others])

    def _weight_at(self, channel: Index) -> Index:
        """Where a step's weights begin in a row of the packed weight."""
        row = as_index(0)
        for axis, extent in enumerate(self.tiles.weight_kernel):
            row = row * extent + self.first[axis] + self.taps.get(axis, as_index(0))
        return row * self.tiles.weight_channels + channel

    # ---- the tile of src

    def _where(self, channel: Index, may_end: bool = False) -> Step:
        """The tile of the step that begins at `channel`; `may_end` behind the last: then there is nothing."""
        starts, inside = [self.src_row], ALL
        for axis, window in enumerate(self.windows):
            tap, dilation = self.taps.get(axis, as_index(0)), self.conv.dilation[axis]
            starts.append(tap * (dilation * self.spatial_steps[axis]))
            inside = inside & self.within(axis, window + tap * dilation)
        exists = self.has_row & inside
        if may_end:
            exists = exists & self._goes_on(channel)
            if not self.tiles.is_gathered:
                channel = replace(channel, high=channel.high - self.knobs.depth)
        exists = self.text.mask("has_element", exists).at(self.src_rows)
        if self.tiles.is_gathered:
            start = self.text.index("start", total([*starts, channel * self.channel_step]))
            tile = start.at(self.src_rows) + (self.lead * self.channel_step).at(self.src_depth)
            begin, tile = as_index(0), self.text.index("at", self.lying(tile, self.tiles.src_run))
        else:
            begin, tile = channel * self.channel_step, self.src_tile
        self.exists = exists
        ends = self._ends(channel).at(self.src_depth)
        mask = exists & ends
        if self.joined == 1:
            # before a loop and inside, masks of a tile that is loaded ahead have other shapes: other names
            mask = self.text.mask(self.text.name("mask") if self.knobs.ahead else "mask", mask)
        return Step(begin, tile, channel + self.depth, mask, mask if inside else ends)

    def _goes_on(self, channel: Index) -> Mask:
        """That a step is one of the sum's."""
        if not self.tiles.is_gathered:
            return channel < self.tiles.channels
        if self.tiles.channel_blocks > 1:
            return condition(f"channel < {self.tiles.channels}", is_vector=False)
        axis, tap = next(iter(self.taps.items()))
        return condition(f"{tap} < {self.extents[axis]}", is_vector=False)

    def _ends(self, channel: Index, place: int = 0) -> Mask:
        """Which channels of a step there are, those `place` behind the ones that a thread reads first."""
        tiles = self.tiles
        if not self.conv.groups % tiles.merged:
            return self.lead < tiles.channels - place - channel
        left = self.conv.channels - self.group_block * tiles.channels
        end = Index(f"tl.minimum({tiles.channels}, {left})", left.low, tiles.channels)
        return self.lead < end - place  # all channels are in one step

    def _load(self, name: str, step: Step, channel: Index) -> None:
        """Loads the tile; in parts, where several channels of a thread are joined.

        Neighbouring threads load neighbouring rows, and each several channels of its own, which it then has
        side by side: they go to shared memory in one store, in the order that the matrix unit reads best.
        """
        text, joined, knobs = self.text, self.joined, self.knobs
        if joined == 1:
            pointer = total([Index("src"), step.begin, step.tile])
            text.line(f"{name} = tl.load({pointer}{step.mask.guard()})")
            return
        for place in range(joined):
            pointer = total([Index("src"), step.begin + place * self.channel_step, step.tile])
            mask = self.exists & self._ends(channel, place).at(self.src_depth)
            text.line(f"{name}_{place} = tl.load({pointer}{mask.guard()})")
        text.line(f"{name} = {_side_by_side([f'{name}_{place}' for place in range(joined)])}")
        shape, order = f"{knobs.rows}, {knobs.depth}", ""
        if knobs.swapped:
            axes = ", ".join(map(str, range(1, joined.bit_length() + 1)))
            shape, order = f"{knobs.depth}, {knobs.rows}", f".permute({axes}, 0)"
        text.line(f"{name} = {name}{order}.reshape({shape})")


def _side_by_side(tiles: Sequence[str]) -> str:
    """Tiles along new last axes, which together count them."""
    if len(tiles) == 1:
        return tiles[0]
    return f"tl.join({_side_by_side(tiles[::2])}, {_side_by_side(tiles[1::2])})"
