"""Writes the sum of a convolution: which taps and channels each step takes, and what one step loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.backends.triton.elementwise import Elementwise, Place
from fuseplan.backends.triton.templates.convolution_tiles import Knobs, Tiles
from fuseplan.backends.triton.templates.three_products import halves, write_factors
from fuseplan.backends.triton.text import Text

AXES = "dhw"  # names of the spatial axes; the last ones where there are fewer
STORED = {"f16": "tl.float16", "bf16": "tl.bfloat16"}


@dataclass(frozen=True)
class Frame:
    """What a sum is written into.

    In the text before it are `h`, `w`, .. (the first coordinate under the window of each position, along each
    spatial axis), `first` (the element there), `image`, `has_position`; `local`, `feature`, `has_feature`;
    `group_block` where there are several; and `total`, the sum so far.

    Attributes:
        text, tiles: the kernel's.
        prologue: what is applied to src.
        weight: the pointer to the weight.
        knobs: the template's.
    """

    text: Text
    tiles: Tiles
    prologue: Elementwise
    weight: str
    knobs: Knobs

    def weight_features(self, vector: str) -> str:
        """A vector over features as an axis of the weight's tile."""
        return f"{vector}[:, None]" if self.knobs.swapped else f"{vector}[None, :]"

    def weight_depth(self, vector: str) -> str:
        """A vector over what is summed, as an axis of the weight's tile."""
        return f"{vector}[None, :]" if self.knobs.swapped else f"{vector}[:, None]"


class Sum:
    """What both kinds of sum share: the tile of src and the product."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.text, self.tiles, self.knobs = frame, frame.text, frame.tiles, frame.knobs
        self.kernel, self.conv = frame.tiles.kernel, frame.tiles.conv
        self.axes = AXES[3 - len(self.conv.kernel) :]
        strides = self.kernel.src.element_strides
        self.image_step, self.channel_step, self.steps = strides[0], strides[1], strides[2:]
        self.index = "tl.int64" if self.tiles.is_wide else "tl.int32"

    def write(self) -> None:
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

    def arange(self, size: int) -> str:
        """The numbers from 0 to `size`, in the width of offsets."""
        return f"tl.arange(0, {size})" + (".to(tl.int64)" if self.tiles.is_wide else "")

    def leaves(self, axis: int) -> bool:
        """Whether the window may stand outside of src along the axis."""
        conv, low = self.conv, self.conv.padding[axis][0]
        reach = (conv.dst_spatial[axis] - 1) * conv.stride[axis]
        last = reach + (conv.kernel[axis] - 1) * conv.dilation[axis] - low
        return low > 0 or last >= conv.src_spatial[axis]

    def within(self, axis: int, at: str) -> str:
        """That a coordinate, written as `at`, is one of src."""
        name = f"{self.axes[axis]}_at"
        self.text.line(f"{name} = {at}")
        return f"({name} >= 0) & ({name} < {self.conv.src_spatial[axis]})"

    @property
    def channels_end(self) -> str:
        """The channel after the last one that a tile's features read."""
        tiles, channels = self.tiles, self.conv.channels
        if self.conv.groups % tiles.merged:
            return f"tl.minimum({tiles.channels}, {channels} - group_block * {tiles.channels})"
        return str(tiles.channels)

    def channel_number(self, local: str) -> str:
        """A channel of src, of its number among those of the tile."""
        tiles = self.tiles
        return f"({local} + group_block * {tiles.channels})" if tiles.group_blocks > 1 else f"({local})"

    def finish(self, x: str, at: str, channel: str, mask: str) -> None:
        """Makes the tile `x` of src a factor: after the prologue, padding zero again, as it is multiplied."""
        kernel, text = self.kernel, self.text
        if kernel.prologue:
            known = f"({channel} < {self.conv.channels})[None, :]"
            inside = f"({at} - image[:, None] * {self.image_step})"
            place = Place(at, f"{channel}[None, :]", inside, mask, known)
            if kernel.compute_dtype != kernel.src.dtype:
                text.line(f"{x} = {x}.to(tl.float32)")
            text.line(f"{x} = tl.where({mask}, {self.frame.prologue.apply(x, place)}, 0.0)")
            if self.knobs.arithmetic == "native":
                text.line(f"{x} = {x}.to({STORED[kernel.src.dtype]})")
        if self.knobs.swapped:
            text.line(f"{x} = {x}.trans(1, 0)")

    def multiply(self, x: str) -> None:
        """Adds the product of `weight` and the tile of src, which fits it, to the sum."""
        arithmetic = self.knobs.arithmetic
        if arithmetic == "tf32x3":
            self._multiply_in_three(x)
            return
        left, right = self._pair(x, "weight")
        if arithmetic == "summed":
            product = f"tl.expand_dims({left}, 2) * tl.expand_dims({right}, 0)"
            self.text.line(f"total += tl.sum({product}, axis=1)")
            return
        if arithmetic == "ieee" and self.kernel.src.itemsize == 2:
            left, right = f"{left}.to(tl.float32)", f"{right}.to(tl.float32)"
        how = {"native": "", "ieee": ", input_precision='ieee', out_dtype=total.dtype"}
        known = how.get(arithmetic, f", input_precision={arithmetic!r}")
        self.text.line(f"total = tl.dot({left}, {right}, total{known})")

    def _multiply_in_three(self, x: str) -> None:
        """Three products of factors of 11 bits; the fourth, of what both leave, is below f32's bits.

        What the weight leaves is `weight_left`. Sums of one step are added outside of the tensor core, which
        cuts off instead of rounding: where `weight` is taken in parts, each has one of the small products.
        """
        write_factors(self.text, x, "x")
        parts = [f"weight_{place}" for place, _ in enumerate(halves(self.knobs.depth))] or ["weight"]
        sums = ["part", "rest"][: len(parts)]
        pairs = [("x_left", "weight"), ("x_high", "weight_left"), *(("x_high", part) for part in parts)]
        for place, factors in enumerate(pairs):
            name = sums[place % len(sums)]
            before = f", {name}" if place >= len(sums) else ""
            self.text.line(
                f"{name} = tl.dot({', '.join(self._pair(*factors))}{before}, input_precision='tf32')"
            )
        self.text.line(*(f"total += {name}" for name in sums))

    def _pair(self, x: str, weight: str) -> tuple[str, str]:
        """The factors of a product in their order."""
        return (weight, x) if self.knobs.swapped else (x, weight)

    def load_weight(self, at: str, own: str = "") -> None:
        """Loads the tile of the weight, where `own` holds, and what `multiply` takes besides."""
        weight = self.frame.weight
        guarded = f", mask={own}, other=0.0" if own else ""
        self.text.line(f"weight = tl.load({weight} + {at}{guarded})")
        if self.knobs.arithmetic != "tf32x3":
            return
        behind = self.tiles.weight_rows * self.conv.taps * self.tiles.weight_channels
        self.text.line(f"weight_left = tl.load({weight} + {behind} + {at}{guarded})")
        for place, half in enumerate(halves(self.knobs.depth)):
            mask = self.frame.weight_depth(half) + (f" & {own}" if own else "")
            self.text.line(f"weight_{place} = tl.load({weight} + {at}, mask={mask}, other=0.0)")

    def count(self, counters: Sequence[tuple[str, int, int, int]]) -> None:
        """Counts on: (name, extent, step, carried) of each counter, the fastest first; the last has no end.

        A counter moves by its step, and by what is carried where the one before it passes its end. There is
        no division in the loop: with it, code for eight warps is known to be wrong.
        """
        done = ""
        for number, (name, extent, step, carried) in enumerate(counters):
            terms = [str(step)] * (step > 0 or not done) + [scaled(done, carried)] * bool(done)
            self.text.line(f"{name} += {' + '.join(terms)}")
            if number < len(counters) - 1:
                done = self.text.let("done", f"({name} >= {extent}).to({self.index})")
                self.text.line(f"{name} -= {scaled(done, extent)}")


class BlockedSum(Sum):
    """Steps of one tap and `depth` channels: all taps of some channels, then the next channels.

    So what is read of src stays in the first cache from tap to tap.
    """

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.counted = [axis for axis, taps in enumerate(self.conv.kernel) if taps > 1]
        self.has_blocks = self.tiles.channel_blocks > 1

    def begin(self) -> None:
        text, tiles, frame = self.text, self.tiles, self.frame
        text.line(f"depth = {self.arange(tiles.depth)}")
        if self.knobs.joined > 1:
            # the first of the channels that a thread loads side by side
            text.line(f"lead = {self.arange(tiles.depth // self.knobs.joined)} * {self.knobs.joined}")
        row = frame.weight_features(f"(feature * {self.conv.taps * tiles.weight_channels})")
        if tiles.merged == 1:
            text.line(f"weights = {row} + {frame.weight_depth('depth')}")
        else:
            channels, features = self.conv.channels_per_group, self.conv.features_per_group
            group, other = f"(local // {features})", f"(depth // {channels})"
            text.line(
                f"weights = {row} + {frame.weight_depth(f'(depth % {channels})')}",
                "# the weight between different groups is zero",
                f"own = {frame.weight_features(group)} == {frame.weight_depth(other)}",
                f"own = own & {frame.weight_features('has_feature')}",
            )
        text.line(*(f"tap_{self.axes[axis]} = tl.full((), 0, {self.index})" for axis in self.counted))
        if self.has_blocks:
            text.line(f"channel = tl.full((), 0, {self.index})")

    def advance(self) -> None:
        taps = [(f"tap_{self.axes[axis]}", self.conv.kernel[axis], 0, 1) for axis in reversed(self.counted)]
        channels = [("channel", 0, 0, self.tiles.depth)] if self.has_blocks else []
        (name, extent, _, unit), *others = [*taps, *channels]
        self.count([(name, extent, unit, unit), *others])

    @property
    def _taps(self) -> dict[int, str]:
        """The counter of each axis that has one."""
        return {axis: f"tap_{self.axes[axis]}" for axis in self.counted}

    def step(self) -> None:
        self._load("x")
        self._load_weight(self._row())
        self.multiply("x")

    def step_ahead(self) -> None:
        text = self.text
        self._load("x")
        with text.block(f"for _ in range({self.tiles.steps})"):
            text.line(f"row = {self._row()}")
            self.advance()
            self._load("following", may_end=True)
            self._load_weight("row")
            self.multiply("x")
            text.line("x = following")

    def _row(self) -> str:
        """Where a step's weights begin in a row of the packed weight."""
        tap = ""
        for axis, name in self._taps.items():
            tap = f"{_grouped(tap)} * {self.conv.kernel[axis]} + {name}" if tap else name
        terms = [scaled(_grouped(tap), self.tiles.weight_channels)] * bool(tap) + [
            "channel"
        ] * self.has_blocks
        return " + ".join(terms)

    def _load_weight(self, row: str) -> None:
        own = "own" if self.tiles.merged > 1 else ""
        self.load_weight(f"weights + ({row})" if row else "weights", own)

    def _load(self, name: str, may_end: bool = False) -> None:
        """Loads the tile of src at the counters, which `may_end` behind the last step: then nothing."""
        start = ["first"]
        for axis, tap in self._taps.items():
            start.append(scaled(tap, self.conv.dilation[axis] * self.steps[axis]))
        start += [scaled("channel", self.channel_step)] * self.has_blocks
        exists = self._exists()
        if may_end:
            slowest, extent = ("channel", self.tiles.channels) if self.has_blocks else self._slowest
            exists += f" & ({slowest} < {extent})"
        self.text.line(f"has_element = {exists}", f"start = {' + '.join(start)}")
        block = "channel + " if self.has_blocks else ""
        if self.knobs.joined > 1 and not self.kernel.prologue:
            self._load_joined(name, block)
        else:
            self._load_tile(name, block)

    @property
    def _slowest(self) -> tuple[str, int]:
        """The counter that ends last, of those of taps, and its end."""
        return self._taps[self.counted[0]], self.conv.kernel[self.counted[0]]

    def _exists(self) -> str:
        """Whether the tap stands on an element of src, for each position."""
        terms, taps = ["has_position"], self._taps
        for axis in range(len(self.axes)):
            if self.leaves(axis):
                tap = f" + {scaled(taps[axis], self.conv.dilation[axis])}" if axis in taps else ""
                terms.append(self.within(axis, self.axes[axis] + tap))
        return " & ".join(terms)

    def _mask(self, local: str) -> str:
        """Which elements of a tile of src exist, whose channels among those of the tile are `local`."""
        tiles, conv = self.tiles, self.conv
        if tiles.channels % tiles.depth or conv.groups % tiles.merged:
            return f"has_element[:, None] & ({local} < {self.channels_end})[None, :]"
        return "has_element[:, None]"

    def _load_tile(self, name: str, block: str) -> None:
        text = self.text
        text.line(f"at = start[:, None] + ({scaled('depth', self.channel_step)})[None, :]")
        text.line(
            f"mask = {self._mask(f'{block}depth')}", f"{name} = tl.load(src + at, mask=mask, other=0.0)"
        )
        self.finish(name, "at", self.channel_number(f"{block}depth"), "mask")

    def _load_joined(self, name: str, block: str) -> None:
        """Loads the tile in parts.

        Neighbouring threads load neighbouring positions, and each several channels of its own, which it then
        has side by side: they go to shared memory in one store, in the order that the matrix unit reads best.
        """
        text, joined = self.text, self.knobs.joined
        text.line(f"at = start[:, None] + ({scaled('lead', self.channel_step)})[None, :]")
        for place in range(joined):
            step, mask = f" + {place * self.channel_step}" * (place > 0), self._mask(f"{block}lead + {place}")
            text.line(f"{name}_{place} = tl.load(src{step} + at, mask={mask}, other=0.0)")
        text.line(f"{name} = {_side_by_side([f'{name}_{place}' for place in range(joined)])}")
        shape, order = f"{self.tiles.positions}, {self.tiles.depth}", ""
        if self.knobs.swapped:
            axes = ", ".join(map(str, range(1, joined.bit_length() + 1)))
            shape, order = f"{self.tiles.depth}, {self.tiles.positions}", f".permute({axes}, 0)"
        text.line(f"{name} = {name}{order}.reshape({shape})")


class FlatSum(Sum):
    """Steps of `depth` pairs of tap and channel, channels fastest; each has its own place in src."""

    def begin(self) -> None:
        text, channels = self.text, self.tiles.channels
        text.line(f"depth = {self.arange(self.tiles.depth)}", "pair = depth", f"channel = pair % {channels}")
        inner = channels
        for axis in reversed(range(len(self.axes))):
            place = f"pair // {inner}"
            text.line(f"tap_{self.axes[axis]} = {place}" + (f" % {self.conv.kernel[axis]}" if axis else ""))
            inner *= self.conv.kernel[axis]
        row = self.frame.weight_features(f"(feature * {self.conv.depth})")
        text.line(f"weights = {row}")

    def advance(self) -> None:
        rest, channels = divmod(self.tiles.depth, self.tiles.channels)
        counters = [("channel", self.tiles.channels, channels, 1)]
        for axis in reversed(range(len(self.axes))):
            extent = self.conv.kernel[axis]
            rest, step = divmod(rest, extent) if axis else (0, rest)
            counters.append((f"tap_{self.axes[axis]}", extent, step, 1))
        self.count(counters)
        self.text.line(f"pair += {self.tiles.depth}")

    def step(self) -> None:
        text, frame = self.text, self.frame
        start = [scaled("channel", self.channel_step)]
        mask = ["has_position[:, None]", f"(pair < {self.conv.depth})[None, :]"]
        for axis, name in enumerate(self.axes):
            start.append(scaled(f"tap_{name}", self.conv.dilation[axis] * self.steps[axis]))
            if self.leaves(axis):
                tap = f"({scaled(f'tap_{name}', self.conv.dilation[axis])})[None, :]"
                mask.append(self.within(axis, f"{name}[:, None] + {tap}"))
        text.line(f"at = first[:, None] + ({' + '.join(start)})[None, :]")
        text.line(f"mask = {' & '.join(mask)}", "x = tl.load(src + at, mask=mask, other=0.0)")
        self.finish("x", "at", self.channel_number("channel"), "mask")
        pairs = frame.weight_depth("pair")
        self.load_weight(f"weights + {pairs}", f"({pairs} < {self.conv.depth})")
        self.multiply("x")


def scaled(text: str, factor: int) -> str:
    """A product, as short as it can be written."""
    return text if factor == 1 else f"{text} * {factor}"


def _grouped(text: str) -> str:
    """As a factor."""
    return f"({text})" if " " in text else text


def _side_by_side(tiles: Sequence[str]) -> str:
    """Tiles along new last axes, which together count them."""
    if len(tiles) == 1:
        return tiles[0]
    return f"tl.join({_side_by_side(tiles[::2])}, {_side_by_side(tiles[1::2])})"
