"""Writes the text of the implicit matrix product: output positions x features, summed over taps and channels.

A tile's positions are a run of output positions over the whole batch; its factors are gathered from src where
they lie. Positions are the first axis of what is loaded and stored: where neither axis is known to be dense,
the compiler gives neighbouring threads neighbours along the first.
"""

from __future__ import annotations

from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.templates.convolution_sum import (
    AXES,
    BlockedSum,
    FlatSum,
    Frame,
    scaled,
)
from fuseplan.backends.triton.templates.convolution_tiles import Knobs, Tiles
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel

COMPUTE = {"f64": "tl.float64", "f32": "tl.float32"}


class ConvolutionWriter:
    """Writes one kernel."""

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        self.knobs, self.kernel, self.title = knobs, kernel, title
        self.conv = kernel.contraction
        self.tiles = Tiles(kernel, knobs.positions, knobs.features, knobs.depth)
        self.is_last = kernel.dst.is_channels_last
        self.text = Text()
        self.prologue = Elementwise(kernel, "prologue", self.text)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        self.axes = AXES[3 - len(self.conv.kernel) :]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The kernel's arguments."""
        weight = Slot("operand", self.kernel.weight.key)
        return (Slot("src"), weight, *self.prologue.slots, *self.epilogue.slots, Slot("dst"))

    def source(self) -> Source:
        """The whole kernel."""
        text, knobs = self.text, self.knobs
        text.line("import triton", "import triton.language as tl", "", "")
        text.line(*(f"# {line}" for line in [self.title, *self.kernel.text.splitlines()]))
        text.line("@triton.jit")
        with text.block(f"def fused({', '.join(argument(slot) for slot in self.slots)})"):
            self._tile()
            self._positions()
            self._features()
            self._sum()
            self._results()
        options = (("num_warps", knobs.warps), ("num_stages", knobs.stages))
        grid = (self.tiles.programs, 1, 1)
        return Source(str(text), "fused", self.slots, language="triton", grid=grid, options=options)

    def _tile(self) -> None:
        """The tile's number along each axis; neighbours in time read the same of src, other features."""
        text, tiles = self.text, self.tiles
        if tiles.is_wide:
            text.line("# offsets of tensors this large need 64 bits")
        number = "tl.program_id(0)" + (".to(tl.int64)" if tiles.is_wide else "")
        for name, blocks in (("feature_block", tiles.feature_blocks), ("group_block", tiles.group_blocks)):
            if blocks > 1:
                text.line(f"program = {number}", f"{name} = program % {blocks}")
                number = f"program // {blocks}"
        text.line(f"position_block = {number}")

    def _positions(self) -> None:
        """Image and place of each position, and where its window begins in src."""
        text, conv, block = self.text, self.conv, self.knobs.positions
        image, strides = prod(conv.dst_spatial), self.kernel.src.element_strides
        text.line(
            f"position = position_block * {block} + tl.arange(0, {block})",
            f"has_position = position < {conv.rows}",
            f"image = position // {image}",
            f"place = position % {image}",
        )
        inner, terms = image, [f"image * {strides[0]}"]
        for number, axis in enumerate(self.axes):
            outer, inner = inner, inner // conv.dst_spatial[number]
            index = "place" if inner == 1 else f"place // {inner}"
            index = index if outer == image else f"{index} % {conv.dst_spatial[number]}"
            low, stride = conv.padding[number][0], conv.stride[number]
            text.line(f"{axis} = {scaled(index, stride)}" + (f" - {low}" if low else ""))
            terms.append(scaled(axis, strides[2 + number]))
        if self.tiles.group_blocks > 1:
            terms.append(f"group_block * {self.tiles.channels * strides[1]}")
        text.line(f"first = {' + '.join(terms)}")

    def _features(self) -> None:
        """The tile's features."""
        text, tiles, block = self.text, self.tiles, self.knobs.features
        first = f"feature_block * {block} + " if tiles.feature_blocks > 1 else ""
        text.line(f"local = {first}tl.arange(0, {block})")
        text.line(f"has_feature = local < {tiles.features}")
        if tiles.group_blocks == 1:
            text.line("feature = local")
            return
        text.line(f"feature = group_block * {tiles.features} + local")
        if self.conv.groups % tiles.merged:
            text.line(f"has_feature = has_feature & (feature < {self.conv.features})")

    def _sum(self) -> None:
        knobs, weight = self.knobs, argument(Slot("operand", self.kernel.weight.key))
        shape = [knobs.positions, knobs.features]
        compute = COMPUTE[self.kernel.compute_dtype]
        self.text.line(f"total = tl.zeros({shape[::-1] if knobs.swapped else shape}, {compute})")
        frame = Frame(self.text, self.tiles, self.prologue, weight, knobs)
        (FlatSum if self.tiles.is_flat else BlockedSum)(frame).write()
        if knobs.swapped:
            self.text.line("total = total.trans(1, 0)")

    def _results(self) -> None:
        """The epilogue, and the store."""
        text, conv = self.text, self.conv
        image = prod(conv.dst_spatial)
        if self.is_last:
            inside = f"((place * {conv.features})[:, None] + feature[None, :])"
            text.line(f"at = (position * {conv.features})[:, None] + feature[None, :]")
        else:
            inside = f"(place[:, None] + (feature * {image})[None, :])"
            text.line(
                f"at = (image * {conv.features * image} + place)[:, None] + (feature * {image})[None, :]"
            )
        text.line("mask = has_position[:, None] & has_feature[None, :]")
        x = self.epilogue.apply(
            "total", Place("at", "feature[None, :]", inside, "mask", "has_feature[None, :]")
        )
        text.line(f"tl.store(dst + at, {x}.to(dst.dtype.element_ty), mask=mask)")
