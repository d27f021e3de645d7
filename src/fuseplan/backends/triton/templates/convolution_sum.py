"""Writes the sum of a convolution: which taps and channels each step takes, and what one step loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    Index,
    Mask,
    arange,
    as_index,
    condition,
    digits,
    number,
    total,
)
from fuseplan.backends.triton.names import named
from fuseplan.backends.triton.templates.convolution_tiles import Knobs, Tiles
from fuseplan.backends.triton.templates.convolution_writer import ConvolutionWriter
from fuseplan.backends.triton.templates.product_arithmetic import multiply
from fuseplan.backends.triton.templates.three_products import halves
from fuseplan.kernel import Kernel


class Sum(ConvolutionWriter):
    """What both kinds of sum share: the tile of src and the product."""

    weights: Index  # where each feature's row begins in the packed weight

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title)
        self.image_step, self.channel_step, *self.steps = kernel.src.element_strides
        self.index = "tl.int64" if self.tiles.is_wide else "tl.int32"
        # how a vector over features, and one over what is summed, is an axis of the weight's tile
        axes = (DOWN, ACROSS) if knobs.swapped else (ACROSS, DOWN)
        self.over_features, self.over_depth = axes

    def write_sum(self) -> None:
        """The counters, and the loop where there is more than one step."""
        self.begin()
        if self.tiles.steps == 1:
            self.step()
        elif self.knobs.ahead and not self.tiles.is_flat:  # pairs are summed in few steps
            self.step_ahead()
        else:
            with self.text.block(f"for _ in range({self.tiles.steps})"):
                self.step()
                self.advance()

    def begin(self) -> None:
        """Writes what is the same in all steps, and the counters."""
        raise NotImplementedError

    def step(self) -> None:
        """Writes what is added to `total`."""
        raise NotImplementedError

    def step_ahead(self) -> None:
        """Writes the loop in which a tile of src is loaded while the one before it is multiplied."""
        raise NotImplementedError

    def advance(self) -> None:
        """Writes the counters of the next step."""
        raise NotImplementedError

    def arange(self, size: int) -> Index:
        """The numbers from 0 to `size`, in the width of offsets."""
        return arange(size).wide(self.tiles.is_wide)

    def zero(self, name: str, extent: int) -> Index:
        """Writes a counter of so many steps, at its beginning; none where there is but one."""
        if extent > 1:
            self.text.line(f"{name} = tl.full((), 0, {self.index})")
        return number(name, extent)

    def within(self, axis: int, at: Index) -> Mask:
        """That a coordinate is one of src; where its range says so, nothing is written."""
        size = self.conv.src_spatial[axis]
        if not (at >= 0) and not (at < size):
            return ALL
        at = self.text.index(f"{self.axes[axis]}_at", at)
        return (at >= 0) & (at < size)

    @property
    def channels_end(self) -> Index:
        """The channel after the last one that a tile's features read."""
        tiles, channels = self.tiles, self.conv.channels
        if not self.conv.groups % tiles.merged:
            return as_index(tiles.channels)
        left = channels - self.group_block * tiles.channels
        return Index(f"tl.minimum({tiles.channels}, {left})", left.low, tiles.channels)

    def finish(self, x: str, at: Index, local: Index, mask: Mask) -> None:
        """Makes the tile `x` of src a factor: after the prologue, padding zero again, as it is multiplied."""
        kernel, text = self.kernel, self.text
        if kernel.prologue:
            channel = local + self.group_block * self.tiles.channels
            known = (channel < self.conv.channels).at(ACROSS)
            inside = f"({at} - {(self.image * self.image_step).at(DOWN).atom})"
            place = Place(str(at), str(channel.at(ACROSS)), inside, str(mask), str(known))
            if kernel.compute_dtype != kernel.src.dtype:
                text.line(f"{x} = {x}.to(tl.float32)")
            made = self.prologue.apply(x, place)
            text.line(f"{x} = tl.where({mask}, {made}, 0.0)" if mask else f"{x} = {made}")
            if self.knobs.arithmetic == "native":
                text.line(f"{x} = {x}.to({named(kernel.src.dtype)})")
        if self.knobs.swapped:
            text.line(f"{x} = {x}.trans(1, 0)")

    def add_product(self, row: Index, own: Mask = ALL) -> None:
        """Adds the product of the tile of src, `x`, and that of the weight, which it loads.

        Args:
            row: where the step begins in each feature's row of the packed weight.
            own: the elements of the weight that exist.
        """
        text, tiles, arithmetic = self.text, self.tiles, self.knobs.arithmetic
        row = text.index("row", row) if arithmetic == "tf32x3" else row
        wanted = [("weight", 0, own)]
        if arithmetic == "tf32x3":
            behind = tiles.weight_rows * self.conv.taps * tiles.weight_channels
            wanted.append(("weight_left", behind, own))
            for place, half in enumerate(halves(self.knobs.depth)):
                wanted.append((f"weight_{place}", 0, condition(f"{half}{self.over_depth}") & own))
        for name, behind, mask in wanted:
            pointer = total([Index(self.weight), as_index(behind), self.weights, row])
            text.line(f"{name} = tl.load({pointer}{mask.guard()})")
        multiply(text, self.knobs, self.kernel, "x", [name for name, _, _ in wanted])

    def count(self, counters: Sequence[tuple[str, int, int, int]]) -> None:
        """Counts on: (name, extent, step, carried) of each counter, the fastest first; the last has no end.

        A counter moves by its step, and by what is carried where the one before it passes its end. There is
        no division in the loop: with it, code for eight warps is known to be wrong.
        """
        done = as_index(0)
        for place, (name, extent, step, carried) in enumerate(counters):
            self.text.line(f"{name} += {done * carried + step}")
            if place < len(counters) - 1:
                done = Index(self.text.let("done", f"({name} >= {extent}).to({self.index})"), 0, 1)
                self.text.line(f"{name} -= {done * extent}")


class BlockedSum(Sum):
    """Steps of one tap and `depth` channels: all taps of some channels, then the next channels.

    So what is read of src stays in the first cache from tap to tap.
    """

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title)
        self.counted = [axis for axis, taps in enumerate(self.conv.kernel) if taps > 1]
        self.has_blocks = self.tiles.channel_blocks > 1

    def begin(self) -> None:
        text, tiles, joined = self.text, self.tiles, self.knobs.joined
        self.depth = text.index("depth", self.arange(tiles.depth))
        if joined > 1:  # the first of the channels that a thread loads side by side
            self.lead = text.index("lead", self.arange(tiles.depth // joined) * joined)
        row = (self.feature * (self.conv.taps * tiles.weight_channels)).at(self.over_features)
        channels, features = self.conv.channels_per_group, self.conv.features_per_group
        depth = self.depth if tiles.merged == 1 else self.depth % channels
        self.weights = text.index("weights", row + depth.at(self.over_depth))
        self.own = ALL
        if tiles.merged > 1:
            group = (self.local // features).at(self.over_features)
            other = (self.depth // channels).at(self.over_depth)
            text.line("# the weight between different groups is zero")
            own = condition(f"{group} == {other}") & self.has_feature.at(self.over_features)
            self.own = text.mask("own", own)
        self.taps = {
            axis: self.zero(f"tap_{self.axes[axis]}", self.conv.kernel[axis]) for axis in self.counted
        }
        self.channel = as_index(0)
        if self.has_blocks:
            last = (tiles.channel_blocks - 1) * tiles.depth
            self.channel = replace(self.zero("channel", tiles.channels), high=last)

    def advance(self) -> None:
        taps = [(tap.text, self.conv.kernel[axis], 0, 1) for axis, tap in reversed(self.taps.items())]
        channels = [("channel", 0, 0, self.tiles.depth)] if self.has_blocks else []
        (name, extent, _, unit), *others = [*taps, *channels]
        self.count([(name, extent, unit, 0), *others])

    def step(self) -> None:
        self._load("x")
        self.add_product(self._row(), self.own)

    def step_ahead(self) -> None:
        text = self.text
        self._load("x")
        with text.block(f"for _ in range({self.tiles.steps})"):
            text.line(f"row = {self._row()}")
            self.advance()
            self._load("following", may_end=True)
            self.add_product(Index("row"), self.own)
            text.line("x = following")

    def _row(self) -> Index:
        """Where a step's weights begin in a row of the packed weight."""
        row = as_index(0)
        for axis, tap in self.taps.items():
            row = row * self.conv.kernel[axis] + tap
        return row * self.tiles.weight_channels + self.channel

    def _load(self, name: str, may_end: bool = False) -> None:
        """Loads the tile of src at the counters, which `may_end` behind the last step: then nothing."""
        start, exists = [self.src_first], self.has_position
        for axis, window in enumerate(self.windows):
            tap, dilation = self.taps.get(axis, as_index(0)), self.conv.dilation[axis]
            start.append(tap * (dilation * self.steps[axis]))
            exists = exists & self.within(axis, window + tap * dilation)
        if may_end:
            counted = [("channel", self.tiles.channels)] if self.has_blocks else []
            counted += [(tap.text, self.conv.kernel[axis]) for axis, tap in self.taps.items()]
            exists = exists & condition("{} < {}".format(*counted[0]), is_vector=False)
        exists = self.text.mask("has_element", exists)
        first = self.text.index("start", total([*start, self.channel * self.channel_step]))
        if self.knobs.joined > 1 and not self.kernel.prologue:
            self._load_joined(name, first, exists)
        else:
            self._load_tile(name, first, exists)

    def _mask(self, local: Index, exists: Mask) -> Mask:
        """Which elements of a tile of src exist, whose channels among those of the tile are `local`."""
        return exists.at(DOWN) & (local < self.channels_end).at(ACROSS)

    def _load_tile(self, name: str, first: Index, exists: Mask) -> None:
        text, local = self.text, self.channel + self.depth
        at = text.index("at", first.at(DOWN) + (self.depth * self.channel_step).at(ACROSS))
        mask = text.mask("mask", self._mask(local, exists))
        text.line(f"{name} = tl.load(src + {at}{mask.guard()})")
        self.finish(name, at, local, mask)

    def _load_joined(self, name: str, first: Index, exists: Mask) -> None:
        """Loads the tile in parts.

        Neighbouring threads load neighbouring positions, and each several channels of its own, which it then
        has side by side: they go to shared memory in one store, in the order that the matrix unit reads best.
        """
        text, joined = self.text, self.knobs.joined
        at = text.index("at", first.at(DOWN) + (self.lead * self.channel_step).at(ACROSS))
        for place in range(joined):
            pointer = Index("src") + place * self.channel_step
            mask = self._mask(self.channel + self.lead + place, exists)
            text.line(f"{name}_{place} = tl.load({pointer + at}{mask.guard()})")
        text.line(f"{name} = {_side_by_side([f'{name}_{place}' for place in range(joined)])}")
        shape, order = f"{self.tiles.positions}, {self.tiles.depth}", ""
        if self.knobs.swapped:
            axes = ", ".join(map(str, range(1, joined.bit_length() + 1)))
            shape, order = f"{self.tiles.depth}, {self.tiles.positions}", f".permute({axes}, 0)"
        text.line(f"{name} = {name}{order}.reshape({shape})")


class FlatSum(Sum):
    """Steps of `depth` pairs of tap and channel, channels fastest; each has its own place in src."""

    def begin(self) -> None:
        text, conv = self.text, self.conv
        depth = text.index("depth", self.arange(self.tiles.depth))
        self.pair = depth
        if self.tiles.steps > 1:
            self.pair = replace(depth.named("pair"), high=self.tiles.steps * self.tiles.depth - 1)
            text.line(f"pair = {depth}")
        *places, channel = digits(depth, (*conv.kernel, self.tiles.channels))
        names = [*(f"tap_{axis}" for axis in self.axes), "channel"]
        extents = zip(names, (*conv.kernel, self.tiles.channels), strict=True)
        self.counted = [(name, extent) for name, extent in extents if extent > 1]
        self.taps = [self._counter(f"tap_{axis}", at) for axis, at in zip(self.axes, places, strict=True)]
        self.channel = self._counter("channel", channel)
        row = (self.feature * conv.depth).at(self.over_features)
        self.weights = text.index("weights", row)

    def _counter(self, name: str, at: Index) -> Index:
        """Writes a counter at its beginning, unless it has but one value."""
        extent = dict(self.counted).get(name)
        if extent is None:
            return as_index(0)
        self.text.line(f"{name} = {at if at.is_vector else f'tl.zeros_like({self.pair})'}")
        return Index(name, 0, extent - 1, is_vector=True)

    def advance(self) -> None:
        counters, rest = [], self.tiles.depth
        for place, (name, extent) in enumerate(reversed(self.counted)):
            rest, step = divmod(rest, extent) if place < len(self.counted) - 1 else (0, rest)
            counters.append((name, extent, step, 1))
        self.count(counters)
        self.text.line(f"pair += {self.tiles.depth}")

    def step(self) -> None:
        text = self.text
        pair = self.pair
        start = [self.channel * self.channel_step]
        mask = self.has_position.at(DOWN) & (pair < self.conv.depth).at(ACROSS)
        for axis, (window, tap) in enumerate(zip(self.windows, self.taps, strict=True)):
            start.append(tap * (self.conv.dilation[axis] * self.steps[axis]))
            mask = mask & self.within(axis, window.at(DOWN) + (tap * self.conv.dilation[axis]).at(ACROSS))
        element = text.index("at", self.src_first.at(DOWN) + total(start).at(ACROSS))
        mask = text.mask("mask", mask)
        text.line(f"x = tl.load(src + {element}{mask.guard()})")
        self.finish("x", element, self.channel, mask)
        pairs = pair.at(self.over_depth)
        self.add_product(pairs, text.mask("has_pair", pairs < self.conv.depth))


def _side_by_side(tiles: Sequence[str]) -> str:
    """Tiles along new last axes, which together count them."""
    if len(tiles) == 1:
        return tiles[0]
    return f"tl.join({_side_by_side(tiles[::2])}, {_side_by_side(tiles[1::2])})"


def writer_of(knobs: Knobs, kernel: Kernel, title: str) -> ConvolutionWriter:
    """The writer of a kernel with these knobs."""
    is_flat = Tiles(kernel, knobs.positions, knobs.features, knobs.depth).is_flat
    return (FlatSum if is_flat else BlockedSum)(knobs, kernel, title)
