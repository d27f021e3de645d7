"""Scans: sums of the elements up to each along an axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.triton import dialect, model
from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    DOWN,
    WIDE,
    Axis,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    counted,
    merged,
    number,
    offset,
    power_of_two,
)
from fuseplan.backends.triton.shell import Writer, of_launch, programs_of
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.kernels.centre import Unary
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, unary_claims, unit_roundoff
from fuseplan.messages.reasons import Claim
from fuseplan.ops.scan import Cumsum

_ACROSS = 64  # lines side by side in a tile, where these are innermost
# An H200, a program of four warps on a processor: 0.9 to 1.1 us a step of 1024 elements, 1.5 to 2.4 of 4096.
_STEP_SECONDS, _ELEMENT_SECONDS = 0.7e-6, 0.3e-9


@dataclass(frozen=True)
class GpuScan(GpuTemplate):
    """Sums along an axis: those of a block of a few lines, which go on over further blocks.

    reads:  src and every operand once
    writes: dst and saved values once
    chosen: for every plan with a scan

    Attributes:
        lines: along the axis, in a tile.
        block: elements of each in a tile.
        warps: warps of a program.
    """

    name: ClassVar[str] = "scan"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = Cumsum.error_scale

    lines: int
    block: int
    warps: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from unary_claims(kernel, Cumsum)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        tiles = Tiles(kernel)
        extent, count = power_of_two(tiles.extent), power_of_two(tiles.count)
        for size in (2048, 4096, 1024):
            elements = size // 2 if kernel.compute_dtype == "f64" else size
            lines = 1 if tiles.is_inner else min(count, _ACROSS)
            block = min(extent, elements // lines)
            yield cls(max(lines, min(count, elements // block)), block, 4)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The bytes, and the steps of one program: each waits for the sums of the step before it."""
        tiles = Tiles(kernel)
        used = min(1.0, ceil_div(tiles.count, self.lines) / target.processors)
        step = _STEP_SECONDS + self.lines * self.block * _ELEMENT_SECONDS
        moving = model.seconds(target, self.traffic(kernel, target), used=used)
        return moving + ceil_div(tiles.extent, self.block) * step

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per element of the axis, in any order, and the errors of the functions."""
        stages = (*kernel.prologue, *kernel.epilogue)
        made = (dialect.relative_errors([stage.expression], kernel.dst.dtype) for stage in stages)
        return kernel.reduced_count * unit_roundoff(kernel) + sum(made)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return ScanWriter(self, kernel, self.text).source(target)


class Tiles:
    """The lines of a kernel along the axis of its sums.

    Attributes:
        scan, axis: the operator, and the axis of its sums.
        axes: the other axes, as they lie in src.
        extent, count: elements of a line, and lines.
        is_inner: whether the axis is innermost in src.
    """

    def __init__(self, kernel: Kernel) -> None:
        centre, src = kernel.centre, kernel.src
        assert isinstance(centre, Unary)  # by the template's limits
        assert isinstance(centre.op, Cumsum)
        self.scan, self.axis, steps = centre.op, centre.op.axis, src.element_strides
        others = (axis for axis in range(src.rank) if axis != self.axis and src.shape[axis] > 1)
        self.axes = sorted(others, key=lambda axis: -steps[axis])
        self.extent, self.count = src.shape[self.axis], prod(src.shape[axis] for axis in self.axes)
        self.is_inner = not self.axes or steps[self.axis] < steps[self.axes[-1]]


@dataclass(frozen=True)
class _Lying:
    """Where the lines of a tile begin in a tensor, and the elements of a step along them."""

    start: Index
    mask: Mask
    step: int


class ScanWriter(Writer):
    """Writes one kernel."""

    entry = "scan"

    def __init__(self, knobs: GpuScan, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, title)
        self.knobs, self.tiles = knobs, Tiles(kernel)
        self.options = (("num_warps", knobs.warps), ("num_stages", 1))
        self.over_lines, self.over_axis = (DOWN, ACROSS) if self.tiles.is_inner else (ACROSS, DOWN)
        self.is_wide = self.is_open or max(kernel.src.span, kernel.dst.span) + knobs.block >= WIDE
        self.before, self.behind = (Elementwise(kernel, role, self.text) for role in ("prologue", "epilogue"))
        self.tensors = (Slot("src"), *self.before.slots, *self.behind.slots, Slot("dst"))
        self.lines = of_launch(kernel, self.tiles.count)
        self.programs = programs_of(kernel, self.tiles.count, knobs.lines)

    def write_body(self) -> None:
        text, knobs, kernel = self.text, self.knobs, self.kernel
        blocks = ceil_div(self.tiles.extent, knobs.block)
        program = number("tl.program_id(0)", ceil_div(self.lines, knobs.lines)).wide(self.is_wide)
        line = text.index("line", program * knobs.lines + arange(knobs.lines))
        has_line = text.mask("has_line", line < self.lines).at(self.over_lines)
        strides = {"src": kernel.src.element_strides, "dst": kernel.dst.element_strides}
        for each in (each for each in kernel.operands if each.strides):
            found = dict(zip(each.axes, each.strides, strict=True))
            strides[each.key] = tuple(found.get(axis, 0) for axis in range(kernel.src.rank))
        lying = {key: self._lying(key, line, has_line, steps) for key, steps in strides.items()}
        if blocks == 1:
            self._tile(lying, arange(knobs.block), goes_on=False)
            return
        text.line(f"carry = tl.zeros(({knobs.lines},), {named(kernel.compute_dtype)})")
        with text.block(f"for step in range({blocks})"):
            block = counted("step", blocks, self.is_wide)
            first = (blocks - 1 - block if self.tiles.scan.reverse else block) * knobs.block
            self._tile(lying, text.index("element", first + arange(knobs.block)), goes_on=True)

    def _lying(self, key: str, line: Index, has_line: Mask, strides: Sequence[int]) -> _Lying:
        shape = self.kernel.src.shape
        axes: list[Axis] = [(shape[axis], strides[axis]) for axis in self.tiles.axes]
        step = strides[self.tiles.axis] if self.tiles.extent > 1 else int(key in ("src", "dst"))  # two axes
        if not any(stride for _, stride in axes):
            return _Lying(as_index(0), Mask(), step)
        start = self.text.index(f"{key}_start", offset(line, merged(axes)))
        return _Lying(start.at(self.over_lines), has_line, step)

    def _tile(self, lying: dict[str, _Lying], element: Index, *, goes_on: bool) -> None:
        """The sums of a block of lines: of the elements there, or of those in front of them."""
        text, scan, axis = self.text, self.tiles.scan, 1 if self.tiles.is_inner else 0
        written, read = [self._existing(element)] * 2
        if scan.exclusive:
            read = self._existing(text.index("neighbour", element + (1 if scan.reverse else -1)))
        src, place = self._place(lying, "src", *read, self.before)
        x = self.before.source(src, place.mask and f", mask={place.mask}, other=0.0")
        x = self.before.apply(self.before.widened(x, self.kernel.src.dtype), place)
        if place.mask:
            x = text.let("x", f"tl.where({place.mask}, {x}, 0.0)")
        made = text.let("total", f"tl.cumsum({x}, {axis}{', reverse=True' if scan.reverse else ''})")
        if goes_on:
            made = text.let("total", f"{made} + carry{self.over_lines}")
            # Not a sum of x beside it: Triton 3.6 cannot compile a loop that adds sums up and reads them.
            at_end = f"tl.arange(0, {self.knobs.block}) == {0 if scan.reverse else self.knobs.block - 1}"
            at_end = text.let("at_end", f"({at_end}){self.over_axis}")
            text.line(f"carry = tl.sum(tl.where({at_end}, {made}, 0.0), {axis})")
        _, place = self._place(lying, "dst", *written, self.behind)
        self.behind.store(made, place)

    def _existing(self, element: Index) -> tuple[Index, Mask]:
        """Elements of lines as an axis of a tile, and which of them there are."""
        exists = (element >= 0) & (element < self.tiles.extent)
        exists = self.text.mask(self.text.name("exists"), exists) if exists else exists
        return element.wide(self.is_wide).at(self.over_axis), exists.at(self.over_axis)

    def _place(
        self, lying: dict[str, _Lying], key: str, along: Index, exists: Mask, stages: Elementwise
    ) -> tuple[str, Place]:
        """A tile of src or dst, with the operands of its stages in registers."""
        text = self.text

        def at(name: str) -> tuple[str, Mask]:
            tensor = lying[name]
            mask = tensor.mask & (exists if tensor.step else Mask())
            return str(tensor.start + along * tensor.step), text.both(mask)

        held = {}
        for each in (each for each in stages.operands if each.key in lying):
            where, mask = at(each.key)
            pointer = argument(Slot("operand", each.key))
            held[each.key] = text.let(each.key, f"tl.load({pointer} + {where}{mask.guard()})")
        where, mask = at(key)
        name = text.let("at", where)
        return name, Place(name, "", "", str(mask), "", held=held)
