"""Writes the sum of a product with few channels: taps and channels as one axis of pairs."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.backends.triton.index import Index, as_index, digits, total
from fuseplan.backends.triton.templates.product_sum import BlockedSum, Step, Sum
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles
from fuseplan.backends.triton.templates.product_writer import ProductWriter
from fuseplan.kernels.kernel import Kernel


class FlatSum(Sum):
    """Steps of `depth` pairs of tap and channel, channels fastest; each has its own place in src."""

    def write_sum(self) -> None:
        """The counters, and the loop where there is more than one step."""
        text, steps = self.text, self.tiles.steps
        self._begin()
        if steps == 1:
            self._step()
            return
        with text.block(f"for _ in range({steps})"):
            self._step()
            self._advance()

    def _begin(self) -> None:
        text, kernel = self.text, self.conv.kernel
        size, channels = self.knobs.depth, self.tiles.channels
        depth = text.index("depth", self.arange(size))
        pair = depth + self.before * size
        *places, channel = digits(pair, (*kernel, channels))
        self.pair = pair
        if self.tiles.steps > 1:
            self.pair = replace(pair.named("pair"), high=self.tiles.steps * self.knobs.split * size - 1)
            text.line(f"pair = {pair}")
        names = [*(f"tap_{axis}" for axis in self.axes), "channel"]
        extents = zip(names, (*kernel, channels), strict=True)
        self.counted = [(name, extent) for name, extent in extents if extent > 1]
        self.taps = [self._counter(f"tap_{axis}", at) for axis, at in zip(self.axes, places, strict=True)]
        self.channel = self._counter("channel", channel)
        row = (self.feature * self.conv.depth).at(self.by_features)
        batch = self.batch * (self.tiles.weight_rows * self.tiles.weight_row)
        self.weight_tile = text.index("weight_tile", row + batch)

    def _counter(self, name: str, at: Index) -> Index:
        """Writes a counter at its beginning, unless it has but one value."""
        extent = dict(self.counted).get(name)
        if extent is None:
            return as_index(0)
        self.text.line(f"{name} = {at if at.is_vector else f'tl.zeros_like({self.pair})'}")
        return Index(name, 0, extent - 1, is_vector=True)

    def _advance(self) -> None:
        counters, rest = [], self.knobs.depth
        for place, (name, extent) in enumerate(reversed(self.counted)):
            rest, step = divmod(rest, extent) if place < len(self.counted) - 1 else (0, rest)
            counters.append((name, extent, step, 1))
        self.count(counters)
        self.text.line(f"pair += {self.knobs.depth}")

    def _step(self) -> None:
        text, pair = self.text, self.pair
        start = [self.channel * self.channel_step]
        mask = self.has_row.at(self.src_rows) & (pair < self.conv.depth).at(self.src_depth)
        for axis, (window, tap) in enumerate(zip(self.windows, self.taps, strict=True)):
            dilation = self.conv.dilation[axis]
            start.append(tap * (dilation * self.spatial_steps[axis]))
            at = window.at(self.src_rows) + (tap * dilation).at(self.src_depth)
            mask = mask & self.within(axis, at)
        at = self.src_row.at(self.src_rows) + total(start).at(self.src_depth)
        at = text.index("at", self.lying(at, self.tiles.src_run))
        mask = text.mask("mask", mask)
        text.line(f"x = tl.load(src + {at}{mask.guard()})")
        self.finish("x", Step(as_index(0), at, self.channel, mask, mask))
        pairs = pair.at(self.by_depth)
        self.add_product(pairs, text.mask("has_pair", pairs < self.conv.depth))


def writer_of(knobs: Knobs, kernel: Kernel, title: str) -> ProductWriter:
    """The writer of a kernel with these knobs."""
    return (FlatSum if Tiles(kernel, knobs).is_flat else BlockedSum)(knobs, kernel, title)
