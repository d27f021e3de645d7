"""Reads the tiles of a kernel with reductions: in a loop, or all that a program has, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, argument, simplified
from fuseplan.backends.triton.index import ALL, ATOM, SUM, Index, as_index, condition, number
from fuseplan.backends.triton.templates.normalization_tiles import Cut, Knobs, Tile
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel, Stage
from fuseplan.scalar import Scalar, leaves_of

ONCE = ', eviction_policy="evict_first"'  # of what is not read or written again


class Reader:
    """The elements of a program's tiles, as a kernel's formulas want them.

    Attributes:
        compute: Triton's name of the compute dtype.
        shape: text of a tile's shape.
        member: which program of its group this is.
    """

    def __init__(self, kernel: Kernel, knobs: Knobs, text: Text) -> None:
        self.kernel, self.knobs, self.text = kernel, knobs, text
        self.cut = Cut(kernel, knobs)
        self.elements = Elementwise(kernel, "epilogue", text)
        self.compute = self.elements.compute
        self.shape = f"({knobs.columns},)" if self.cut.is_planes else f"({knobs.rows}, {knobs.columns})"
        self.member = number("member", knobs.programs)
        self._stages = simplified(kernel.prologue)
        self._before = Known()
        self._made = {"x"} | {output.key for output in kernel.saved.values()}  # of src

    def begin(self, tile: Index) -> None:
        """Begins a tile: what is per channel is on its way before anything else."""
        self.elements.given.clear()
        self.cut.begin(self.text, tile)
        self._preload()
        self._before = self.known(self._stages)

    def _preload(self) -> None:
        """Reads what is per channel or shared; per place too, where that is what the numbers are per."""
        cut = self.cut
        for operand in self.elements.operands:
            pointer = Index(argument(Slot("operand", operand.key)))
            if not operand.axes:
                where = str(pointer)
            elif operand.is_channel:
                exists = ALL if cut.channel.constant is not None else cut.has_channel  # one number
                where = f"{pointer + cut.channel}{exists.guard()}"
            elif operand.is_inside and cut.per_place:
                where = f"{pointer + cut.column}{cut.has_column.guard()}"
            else:
                continue
            self.elements.given[operand.key] = self.text.let(operand.key, f"tl.load({where})")

    def known(self, stages: Sequence[Stage]) -> Known:
        """What stages need that depends on the channel alone."""
        known = self.elements.prepare(str(self.cut.channel), str(self.cut.has_channel), stages)
        return self.elements.spread(known, "which", stages) if self.cut.spreads else known

    @contextmanager
    def blocks(self, is_backward: bool) -> Iterator[list[Index]]:
        """A loop over the program's blocks; its tiles' places."""
        text, cut, programs = self.text, self.cut, self.knobs.programs
        steps = (cut.blocks + programs - 1 - self.member) // programs
        steps = text.index(text.name("steps"), steps) if cut.blocks % programs else as_index(cut.steps)
        with text.block(f"for step in range({steps})"):
            step = f"{steps - 1} - step" if is_backward else "step"
            place = self.member + Index(step, 0, cut.steps - 1, SUM if is_backward else ATOM) * programs
            block = replace(place, high=cut.blocks - 1).widened(cut.is_wide)
            if (
                cut.blocks % programs and not cut.is_even
            ):  # the range of a program's last step is not that of all its blocks
                block = replace(block, high=inf)
            block = text.index(text.name("block"), block)
            many = self.knobs.unrolled
            yield [block * many + each for each in range(many)]

    def read_all(self) -> list[Tile]:
        """Reads all tiles of the program, and what any pass needs of them."""
        cut, programs, held = self.cut, self.knobs.programs, []
        formulas = [formula for reduction in self.kernel.statistics for formula in reduction.expressions]
        formulas += self.kernel.last_formulas
        member = self.member.wide(cut.is_wide)
        for step in range(cut.steps):
            held.append(self._read(cut.tile(self.text, member + step * programs), formulas, ONCE))
        return held

    def read_next(self, places: Sequence[Index], formulas: Sequence[Scalar], hint: str = "") -> list[Tile]:
        """Begins reading what formulas need of the tiles at some places, all before one is waited for."""
        tiles = [self.cut.tile(self.text, place) for place in places]
        return [self._read(tile, formulas, hint) for tile in tiles]

    def each(
        self, name: str, tiles: Sequence[Tile], write: Callable[[Tile], None], into: Sequence[str] = ()
    ) -> None:
        """Does the same with each tile: a function does, where there are several.

        Args:
            into: names that the lines count on.
        """
        if len(tiles) == 1:
            write(tiles[0])
            return
        is_masked, is_cut = any(tile.place.mask for tile in tiles), any(tile.exists for tile in tiles)

        def body(x: str, place: Place) -> Sequence[str]:
            write(replace(tiles[0], place=place, x=x, exists=condition("exists") if is_cut else ALL))
            return into

        for tile in tiles:
            place = replace(tile.place, mask=tile.place.mask or "True" * is_masked)
            exists = {"exists": str(tile.exists) or "True"} if is_cut else {}
            self.elements.shared(name, tile.x, place, write=body, more=exists, into=into)

    def _read(self, tile: Tile, formulas: Sequence[Scalar], hint: str) -> Tile:
        """Begins reading what formulas need of a tile."""
        used = frozenset().union(*map(leaves_of, formulas))
        if used & self._made:
            used |= {"x"}.union(*(leaves_of(stage.expression) for stage in self._stages))
        place = tile.place
        guard = f", mask={place.mask}, other=0.0" if place.mask else ""

        def loaded(name: str, pointer: str, at: object) -> str:
            return self.text.let(name, f"tl.load({pointer} + {at}{guard}{hint})")

        x = self.elements.source(tile.source, guard, hint) if "x" in used else ""
        operands = {
            operand.key: loaded(operand.key, argument(Slot("operand", operand.key)), place.element)
            for operand in self.elements.operands
            if not operand.packed and operand.key in used
        }
        return replace(tile, place=replace(place, held=operands), x=x)

    def element(self, tile: Tile) -> str:
        """What the prologue gives of a tile, in the compute dtype."""
        if not tile.x:
            return ""
        x = self.elements.widened(tile.x, self.kernel.src.dtype)
        return self.elements.apply(x, replace(tile.place, known=self._before), self._stages)
