"""Writes the text of the implicit matrix product: output positions x features, summed over taps and channels.

A tile's positions are a run of output positions over the whole batch; its factors are gathered from src where
they lie. Positions are the first axis of what is loaded and stored: where neither axis is known to be dense,
the compiler gives neighbouring threads neighbours along the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.index import ACROSS, ALL, DOWN, Index, arange, as_index, digits, number, total
from fuseplan.backends.triton.names import named
from fuseplan.backends.triton.shell import Shell
from fuseplan.backends.triton.templates.convolution_tiles import Knobs, Tiles
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel

AXES = "dhw"  # names of the spatial axes; the last ones where there are fewer


class ConvolutionWriter(ABC):
    """Writes one kernel but for its sum.

    Attributes, of a tile in the text:
        windows: the first coordinate under the window of each position, along each spatial axis.
        src_first: the offset of the element there.
        position, image, place: number of each position, its image, its place in the image.
        has_position, has_feature: which positions and features there are.
        local, feature: the number of each feature among those of the tile's groups, and among all.
        feature_block, group_block, position_block: the tile's numbers.
    """

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        self.knobs, self.kernel, self.title = knobs, kernel, title
        self.conv = kernel.contraction
        self.tiles = Tiles(kernel, knobs.positions, knobs.features, knobs.depth)
        self.is_last = kernel.dst.is_channels_last
        self.text = Text()
        self.prologue = Elementwise(kernel, "prologue", self.text)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        self.weight = argument(Slot("operand", kernel.weight.key))
        self.axes = AXES[3 - len(self.conv.kernel) :]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The kernel's arguments."""
        weight = Slot("operand", self.kernel.weight.key)
        return (Slot("src"), weight, *self.prologue.slots, *self.epilogue.slots, Slot("dst"))

    def source(self) -> Source:
        """The whole kernel."""
        shell = Shell(self.kernel, self.title, self.text, self.slots)
        with shell.body():
            self._tile()
            self._positions()
            self._features()
            self._sum()
            self._results()
        options = (("num_warps", self.knobs.warps), ("num_stages", self.knobs.stages))
        return shell.source(self.tiles.programs, options)

    def _tile(self) -> None:
        """The tile's number along each axis; neighbours in time read the same of src, other features."""
        text, tiles = self.text, self.tiles
        if tiles.is_wide:
            text.line("# offsets of tensors this large need 64 bits")
        program = text.index("program", number("tl.program_id(0)", tiles.programs).wide(tiles.is_wide))
        rest = program // tiles.feature_blocks
        self.feature_block = text.index("feature_block", program % tiles.feature_blocks)
        self.group_block = text.index("group_block", rest % tiles.group_blocks)
        self.position_block = text.index("position_block", rest // tiles.group_blocks)

    def _positions(self) -> None:
        """Image and place of each position, and where its window begins in src."""
        text, conv, block = self.text, self.conv, self.knobs.positions
        area, (image_step, channel_step, *steps) = prod(conv.dst_spatial), self.kernel.src.element_strides
        self.position = text.index("position", self.position_block * block + arange(block))
        self.has_position = text.mask("has_position", self.position < conv.rows)
        image = self.position // area if conv.batch > 1 else as_index(0)
        self.image = text.index("image", image)
        self.place = text.index("place", self.position % area)
        windows, terms = [], [self.image * image_step]
        for axis, at in enumerate(digits(self.place, conv.dst_spatial)):
            begin = at * conv.stride[axis] - conv.padding[axis][0]
            windows.append(text.index(self.axes[axis], begin))
            terms.append(windows[-1] * steps[axis])
        terms.append(self.group_block * (self.tiles.channels * channel_step))
        self.windows, self.src_first = windows, text.index("src_first", self._whole(total(terms)))

    def _whole(self, offset: Index) -> Index:
        """The offset as a vector over positions, even where it is the same for all."""
        if offset.is_vector:
            return offset
        return Index(f"tl.zeros_like({self.position})", 0, 0, is_vector=True) + offset

    def _features(self) -> None:
        """The tile's features."""
        text, tiles, block = self.text, self.tiles, self.knobs.features
        local = "local" if tiles.group_blocks > 1 else "feature"
        self.local = text.index(local, self.feature_block * block + arange(block))
        self.feature = text.index("feature", self.group_block * tiles.features + self.local)
        ends = self.feature < self.conv.features if self.conv.groups % tiles.merged else ALL
        self.has_feature = text.mask("has_feature", (self.local < tiles.features) & ends)

    def _sum(self) -> None:
        shape = [self.knobs.positions, self.knobs.features]
        compute = named(self.kernel.compute_dtype)
        self.text.line(f"total = tl.zeros({shape[::-1] if self.knobs.swapped else shape}, {compute})")
        self.write_sum()
        if self.knobs.swapped:
            self.text.line("total = total.trans(1, 0)")

    @abstractmethod
    def write_sum(self) -> None:
        """Adds all products to `total`."""

    def _results(self) -> None:
        """The epilogue, and the store."""
        text, conv, area = self.text, self.conv, prod(self.conv.dst_spatial)
        place, feature = self.place.at(DOWN), self.feature.at(ACROSS)
        if self.is_last:
            inside = place * conv.features + feature
            at = (self.position * conv.features).at(DOWN) + feature
        else:
            inside = place + (self.feature * area).at(ACROSS)
            at = (self.image * (conv.features * area) + self.place).at(DOWN) + (self.feature * area).at(
                ACROSS
            )
        has_feature = self.has_feature.at(ACROSS)
        mask = text.mask("mask", self.has_position.at(DOWN) & has_feature)
        at = text.index("at", at)
        self.epilogue.store("total", Place(str(at), str(feature), str(inside), str(mask), str(has_feature)))
