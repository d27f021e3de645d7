"""Where the tiles of kernels with statistics over any axes lie in each tensor, and their loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fuseplan.backends.lattice import Axis, Lattice
from fuseplan.backends.triton.elementwise import argument, load_src
from fuseplan.backends.triton.index import ALL, Index, Mask, arange, as_index, counted, merged, offset
from fuseplan.backends.triton.shell import Writer
from fuseplan.backends.triton.storage import Storage
from fuseplan.backends.triton.templates.reduction_tiles import Leaves, ReductionKnobs, Tile
from fuseplan.kernels.emit import Slot
from fuseplan.language.parts import part_of
from fuseplan.language.reduction import INDEX

Place = tuple[dict[str, Index], Mask]


def hinted(policy: str) -> str:
    """The argument of a load or store that tells the caches what to keep; none without a policy.

    Of 8192 rows of 32,768 elements that are read twice, RMS norm took 359 us in the place of 380 on an H100.
    On an H200 a sum's RMS norm of 4096 rows of 65,536 took 652 us for 712, and cross-entropy 37.7 for 42.1.
    """
    return f', eviction_policy="{policy}"' if policy else ""


class PlacedWriter(Writer):
    """A writer of tiles that have cells as rows and elements as columns.

    Attributes:
        lattice: the loops of all tensors.
        tile: the elements of a tile: columns, or an axis of lanes and one of each lane's neighbours.
        at_cell, has_cell: the cells' offsets in each tensor, and which of them exist.
        known: values of leaves that are the same for all tiles.
        member: which program of a group.
        blocks: of a cell's elements; `is_cut` where a program holds several of them.
        fixed: where the blocks lie, of programs that hold them, or their sums, of all tiles.
        own: operands of which each cell reads elements of its own; `all_own` where there are no others.
        reads_again: whether the elements are read once more for dst.
        hint: to the caches, of loads of the cells' own elements, and of stores where these are read again.
    """

    knobs: ReductionKnobs
    lattice: Lattice
    storage: Storage
    compute: str
    tile: tuple[int, ...]
    across: str
    at_cell: dict[str, Index]
    has_cell: Mask
    known: dict[str, str]
    is_wide: bool
    member: Index
    blocks: int
    is_cut: bool
    fixed: list[Place]
    own: list[str]
    all_own: bool
    reads_again: bool
    hint: str = ""

    def _steps(self, stem: str, axes: Sequence[Axis], index: Index, at: str) -> dict[str, Index]:
        """Offsets along cells or elements in each tensor; equal ones have one name."""
        found: dict[tuple[tuple[int, int], ...], Index] = {}
        made: dict[str, Index] = {}
        for place, name in enumerate(self.lattice.tensors):
            listed = tuple((axis.extent, axis.steps[place]) for axis in axes)
            listed = merged(listed) if self.lattice.inner else listed
            if not any(step for _, step in listed):
                made[name] = as_index(0)
                continue
            if listed not in found:
                word = f"{stem}_in_{name.partition('(')[0]}" if found else f"{stem}_at"
                found[listed] = self.text.index(self.text.name(word), offset(index, listed)).at(at)
            made[name] = found[listed]
        return made

    def _where(self, leaf: str, along: Mapping[str, Index], tile: Mask, part: int) -> tuple[Index, Mask]:
        """The offset of a tensor's elements in the tile, and which of them exist."""
        name = part_of(leaf)[0]
        down, across = self.at_cell[name], along.get(name, as_index(0))
        start = self.lattice.starts[part][self.lattice.tensors.index(name)] + self.lattice.start(leaf, part)
        exists = self.has_cell if down.constant is None else ALL
        return down + across + start, self.text.both(exists & tile) if across.constant is None else exists

    def _held_blocks(self) -> list[Index]:
        """The blocks of a program that are in its registers."""
        every = [as_index(block) for block in range(self.blocks)]
        return every if self.is_cut or self.fixed else [self.member]

    @contextmanager
    def _program_blocks(self, *, goes_back: bool = False) -> Iterator[Index]:
        """A loop over the program's blocks; one that goes back begins with those that the caches have yet."""
        turns = f"{self.blocks - 1}, -1, -1" if goes_back else str(self.blocks)
        if self.knobs.programs > 1:
            turns = f"{self.member}, {self.blocks}, {self.knobs.programs}"
        with self.text.block(f"for block in range({turns})"):
            yield counted("block", self.blocks, self.is_wide)

    def _place(self, block: Index) -> Place:
        """Where the elements of a block lie along each tensor, and which there are."""
        text = self.text
        start = block * self.knobs.elements
        element = text.index(text.name("element"), start + self._columns().wide(self.is_wide))
        known = start + self._vectors().wide(self.is_wide) if self.has_whole_vectors else element
        exists = text.mask(text.name("has_element"), known < self.lattice.element_count).at(self.across)
        return self._steps("element", self.lattice.elements, element, self.across), exists

    @property
    def has_whole_vectors(self) -> bool:
        """Whether lanes have all of their neighbours or none: then a lane has one mask.

        Layer norm of 21568 rows of 4120 in blocks of 1024 took 116 us on an H200, with a mask for each 166.
        """
        return len(self.tile) > 1 and self.lattice.element_count % self.tile[-1] == 0

    def _vectors(self) -> Index:
        """The first element of each lane of a tile."""
        vector, lane = self.tile[-1], f"tl.arange(0, {self.tile[0]})[:, None]"
        text = f"{lane} * {vector}" if vector > 1 else lane
        return Index(f"({text})", 0, self.knobs.elements - vector, is_vector=True)

    def _columns(self) -> Index:
        """The elements of a tile."""
        if len(self.tile) == 1:
            return arange(self.knobs.elements)
        (lanes, vector), first = self.tile, self._vectors()
        text = f"({first} + tl.arange(0, {vector})[None, :])" if vector > 1 else str(first)
        # Lanes lie side by side if no load takes a vector: cross-entropy of 8192 rows of 50,257 took 265 us
        # for 520 on an H200. Beside vectors of scale and shift, layer norms took twice the time that way.
        if not self.has_whole_vectors and self.all_own:
            text = f"(tl.arange(0, {lanes})[:, None] + tl.arange(0, {vector})[None, :] * {lanes})"
        return Index(text, 0, self.knobs.elements - 1, is_vector=True)

    def _count(self, tile: Tile) -> int:
        """How many elements a state of the tile has; 0 where only the GPU knows."""
        if self.blocks == 1 and len(self.tile) == 1:
            return self.lattice.element_count
        return 0 if tile.exists else self.tile[-1]

    def _made(
        self, along: Mapping[str, Index], exists: Mask, part: int = 0, known: Mapping[str, str] | None = None
    ) -> Tile:
        def load(leaf: str) -> str:
            name, (where, mask) = part_of(leaf)[0], self._where(leaf, along, exists, part)
            if name == INDEX or any(each.key == name for each in self.kernel.indices):
                index = where.widened(where.constant is not None)  # a number is no tensor
                made = f"({index}).to({self.compute})" if name == INDEX else str(index)
                return self.text.let("index", made)
            slot = Slot(name) if name == "src" else Slot("operand", name)
            hint = self.hint if name in ("src", *self.own) else hinted("evict_last")
            return self._loaded(name, argument(slot), where, mask, hint)

        return Tile(along, exists, part, Leaves(load, self.known if known is None else known))

    def _loaded(self, name: str, pointer: str, where: Index, mask: Mask, hint: str) -> str:
        is_src = name == "src"
        operand = None if is_src else self.kernel.operand(name)
        dtype = self.kernel.src.dtype if operand is None else operand.dtype
        if operand and operand.packed:
            dtype = self.kernel.compute_dtype
        elif where.constant is not None and (is_src or self.lattice.element_count == 1):
            zeros = f"tl.zeros({(self.knobs.cells, *self.tile)}, tl.int32)"
            where = Index(f"{zeros} + {where}" if where.constant else zeros)
        address = pointer if where.constant == 0 else f"{pointer} + {where}"
        is_row = is_src and self.kernel.lookup
        loaded = (
            load_src(self.text, self.kernel, where, mask.guard())
            if is_row
            else self.text.let(name, f"tl.load({address}{mask.guard()}{hint})")
        )
        return self.storage.widen(dtype, loaded, name)

    def _store(self, name: str, pointer: str, dtype: str, x: str, tile: Tile) -> None:
        where, mask = self._where(name, tile.along, tile.exists, tile.part)
        stored = self.storage.narrow(dtype, x)
        address = pointer if where.constant == 0 else f"{pointer} + {where}"
        one = where.constant is not None  # a tile of one number is stored at one address
        value = f"tl.sum({stored})" if one else stored
        hint = self.hint if self.reads_again else ""
        self.text.line(f"tl.store({address}, {value}{mask.guard(other='')}{hint})")
