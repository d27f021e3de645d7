"""Reads the tiles of a kernel with reductions: in a loop, or all that a program has, at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Elementwise, Known, Stages, argument
from fuseplan.backends.triton.templates.normalization_tiles import Cut, Knobs, Tile
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot
from fuseplan.kernel import Kernel, Stage
from fuseplan.scalar import Scalar, leaves_of

ONCE = ', eviction_policy="evict_first"'  # of what is not read or written again


@dataclass
class Held:
    """A tile that was read: names of src, as it is stored, and of the operands per element by key."""

    tile: Tile
    x: str
    operands: dict[str, str] = field(default_factory=dict)


class Reader:
    """The elements of a program's tiles, as a kernel's formulas want them.

    Attributes:
        cut: the tensors.
        text: takes the lines.
        elements: the formulas.
        compute: Triton's name of the compute dtype.
        shape: text of a tile's shape.
        member: text of which program of its group this is.
    """

    def __init__(self, kernel: Kernel, knobs: Knobs, text: Text) -> None:
        self.kernel, self.knobs, self.text = kernel, knobs, text
        self.cut = Cut(kernel, knobs)
        self.elements = Elementwise(kernel, "epilogue", text)
        self.compute = f"tl.{dialect.COMPUTE[kernel.src.dtype]}"
        self.shape = f"({knobs.columns},)" if self.cut.is_planes else f"({knobs.rows}, {knobs.columns})"
        self.member = "member" if knobs.programs > 1 else "0"
        self._stages = simplified(kernel.prologue)
        self._before = Known()

    def begin(self) -> None:
        """Begins a tile: what is per channel is on its way before anything else."""
        self.elements.given.clear()
        self.cut.columns(self.text)
        self._preload()
        self._before = self.known(self._stages)

    def _preload(self) -> None:
        """Reads what is per channel or shared; per place too, where that is what the numbers are per."""
        channel, mask = self.cut.channel
        masked = f", mask={mask}, other=0.0" if mask else ""
        for operand in self.elements.operands:
            pointer = argument(Slot("operand", operand.key))
            if operand.per == "shared":
                where = ""
            elif operand.per == "channel":
                where = f" + {channel}{masked}"
            elif operand.per == "activation" and self.cut.per_place:
                where = f" + column{masked}"
            else:
                continue
            self.elements.given[operand.key] = self.text.let(operand.key, f"tl.load({pointer}{where})")

    def known(self, stages: Stages) -> Known:
        """What stages need that depends on the channel alone."""
        known = self.elements.prepare(*self.cut.channel, stages)
        return self.elements.spread(known, "which", stages) if self.cut.segment > 1 else known

    @contextmanager
    def blocks(self, is_backward: bool) -> Iterator[list[str]]:
        """A loop over the program's blocks; the texts of its tiles' places."""
        text, cut, programs = self.text, self.cut, self.knobs.programs
        steps = str(cut.steps)
        if cut.blocks % programs:
            steps = text.let("steps", f"({cut.blocks + programs - 1} - {self.member}) // {programs}")
        with text.block(f"for step in range(0, {steps})"):
            step = f"({steps} - 1 - step)" if is_backward else "step"
            block = text.let("block", f"{self.member} + {step} * {programs}" if programs > 1 else step)
            many = self.knobs.unrolled
            yield [f"({block} * {many} + {each})" if many > 1 else block for each in range(many)]

    def read_all(self) -> list[Held]:
        """Reads all tiles of the program, and what any pass needs of them."""
        cut, programs, held = self.cut, self.knobs.programs, []
        formulas = [formula for reduction in self.kernel.reductions for formula in reduction.expressions]
        formulas += [stage.expression for stage in self.kernel.epilogue]
        for step in range(cut.steps):
            is_last = step == cut.steps - 1
            is_cut = is_last and cut.extent < cut.steps * programs * cut.block
            tile = cut.tile(self.text, f"({self.member} + {step * programs})", is_cut)
            held.append(self._read(tile, formulas, ONCE))
        return held

    def read_next(self, places: Sequence[str], formulas: Sequence[Scalar], hint: str = "") -> list[Held]:
        """Begins reading what formulas need of the tiles at some places, all before one is waited for."""
        tiles = [self.cut.tile(self.text, place, not self.cut.is_even) for place in places]
        return [self._read(tile, formulas, hint) for tile in tiles]

    def _read(self, tile: Tile, formulas: Sequence[Scalar], hint: str) -> Held:
        """Begins reading what formulas need of a tile."""
        used = frozenset().union(*map(leaves_of, formulas))
        if "x" in used:
            used |= frozenset().union(*(leaves_of(formula) for _, formula in self._stages))
        mask = f", mask={tile.place.mask}, other=0.0" if tile.place.mask else ""
        x = self.text.let("x", f"tl.load(src + {tile.source}{mask}{hint})") if "x" in used else ""
        operands = {
            operand.key: self.text.let(
                operand.key,
                f"tl.load({argument(Slot('operand', operand.key))} + {tile.place.element}{mask}{hint})",
            )
            for operand in self.elements.operands
            if operand.per == "element" and operand.key in used
        }
        return Held(tile, x, operands)

    def element(self, held: Held) -> str:
        """What the prologue gives of a tile, in the compute dtype."""
        if not held.x:
            return ""
        is_compute = self.kernel.src.dtype == self.kernel.compute_dtype
        x = held.x if is_compute else self.text.let("x", f"{held.x}.to({self.compute})")
        return self.elements.apply(x, held.tile.place, held.operands, self._before, self._stages)


def simplified(stages: Sequence[Stage]) -> Stages:
    """Stages as `Elementwise` takes them."""
    return tuple((stage.op_text, dialect.simplified(stage.expression)) for stage in stages)
