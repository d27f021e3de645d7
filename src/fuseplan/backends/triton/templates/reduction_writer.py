"""The text of kernels with statistics over any axes.

A tile has cells as rows and their elements as columns. Programs of a group share the blocks of their cells
and merge their states when they meet. A program with one block reads it once and keeps it in registers. With
several, it joins each block's numbers to its state, which is corrected when the numbers before it change.
Lanes have states of their own where the columns are an axis of lanes and one of each lane's neighbours: no
thread waits for another before the loop's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from itertools import chain

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import ALL, WIDE, Index, arange, as_index, ceil_div, counted, number
from fuseplan.backends.triton.shell import of_launch, programs_of
from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.templates.meeting import Meeting
from fuseplan.backends.triton.templates.reduction_cost import Cost
from fuseplan.backends.triton.templates.reduction_picks import picks
from fuseplan.backends.triton.templates.reduction_places import PlacedWriter, hinted
from fuseplan.backends.triton.templates.reduction_sums import ColumnSums, shared_columns, shares
from fuseplan.backends.triton.templates.reduction_tiles import (
    JOINED,
    VECTOR,
    Functions,
    ReductionKnobs,
    State,
    Tile,
    name_of,
    neighbours,
    once,
    write_pairs,
)
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel, Stage
from fuseplan.kernels.target import Target
from fuseplan.language.parts import part_of
from fuseplan.language.reduction import Part, Statistic
from fuseplan.scalar import Scalar, const, fold, leaves_of

ONE = const(1)


class ReductionWriter(PlacedWriter):
    """Writes one kernel."""

    entry = "reduction"

    def __init__(self, knobs: ReductionKnobs, kernel: Kernel, target: Target, title: str) -> None:
        super().__init__(kernel, title)
        self.knobs, self.lattice = knobs, Lattice(kernel)
        self.compute = named(kernel.compute_dtype, "tl")
        self.storage = Storage(self.text, "tl", kernel.compute_dtype)
        self.table = dialect.table(self.text, "tl", kernel.dst.dtype, kernel.compute_dtype)
        self.blocks = ceil_div(self.lattice.element_count, knobs.elements)
        self.cells = of_launch(kernel, self.lattice.cell_count)
        self.groups = ceil_div(self.cells, knobs.cells)
        self.is_held = knobs.holds(self.lattice.element_count)
        self.is_cut, self.fixed = self.is_held and knobs.programs < self.blocks, []
        keys = {each.key: self.lattice.tensors.index(each.key) for each in kernel.operands}
        self.own = [key for key, at in keys.items() if any(axis.steps[at] for axis in self.lattice.cells)]
        self.all_own = len(self.own) == len(keys)
        self.tile = self._tile(max(kernel.src.itemsize, kernel.dst.itemsize * self.is_cut))
        none = ", None" * (len(self.tile) - 1)
        self.down, self.across = f"[:, None{none}]", f"[None, :{', :' * (len(self.tile) - 1)}]"
        self.shared = shared_columns(kernel, self.lattice)
        self.reads_again = not self.lattice.is_reduced and not self.is_held
        reach = max(kernel.src.span, kernel.dst.span) + knobs.cells * knobs.elements
        self.is_wide = self.is_open or reach >= WIDE
        self.picks, self.picked = picks(kernel, self.lattice), dict[str, str]()
        most = max((len(self._parts(each)) for each in kernel.statistics), default=0)
        group = knobs.programs, int(self.groups.high), knobs.cells * (knobs.cells > 1), most, self.compute
        self.meeting = Meeting(self.text, *group, repeats=False, exchanges=bool(kernel.statistics))
        self.sums = ColumnSums(self.text, knobs, kernel, target, self.tile)
        formulas = [stage.expression for stage in (*kernel.prologue, *kernel.epilogue)]
        formulas += [each.expression for each in (*kernel.results, *kernel.sums)]
        formulas += [part.term for each in (*kernel.statistics, *self.lattice.inner) for part in each.parts]
        used = frozenset().union(*map(leaves_of, formulas))
        parameters = [Slot("parameter", key) for key in kernel.parameters if key in used]
        self.of_cells = [each for each in kernel.results if each not in self.lattice.of_runs]
        self.first = self._read_first()
        self.known = {slot.key: argument(slot) for slot in parameters}
        self.workspace_bytes = self.meeting.workspace_bytes + self.sums.workspace_bytes
        meets = self.meeting.is_needed or bool(kernel.sums)
        room = Cost(kernel, target).room(knobs)
        self.options = (("num_warps", knobs.warps), ("num_stages", 1), *[("cooperative", 1)] * meets, *room)
        self.shares = shares(kernel, target, knobs) if knobs.resident else 0
        self.programs = programs_of(kernel, self.lattice.cell_count, knobs.cells, knobs.programs, self.shares)
        read = (*(Slot("operand", each.key) for each in kernel.operands), *parameters)
        results = (Slot("result", each.key) for each in kernel.outputs)
        self.tensors = (Slot("src"), *read, Slot("dst"), *results)

    def write_body(self) -> None:
        listed = (*self.kernel.statistics, *self.lattice.inner)
        write_pairs(self.text, (part for each in listed for part in each.parts))
        if self.shares:
            self._write_share()
            return
        self.member, group = self.meeting.begin(self.groups)
        self._write_group(group)
        self.meeting.end()

    def _write_share(self) -> None:
        """A program goes through its share of the tiles; sums of all cells are made when all have."""
        self.member, self.has_cell = as_index(0), ALL
        self.at_cell = dict.fromkeys(self.lattice.tensors, as_index(0))
        program = number("tl.program_id(0)", self.shares)
        if self.is_held or self.sums.is_held:
            self.fixed = [self._place(as_index(block)) for block in range(self.blocks)]
        if self.kernel.sums:
            program = self.sums.begin(self.fixed)
        if self.is_held and self.blocks == 1:
            for key in self.shared:
                self.known[key] = self._made(*self.fixed[0]).leaves[key]
        ahead = f", num_stages={self.knobs.ahead}" if self.knobs.ahead else ""
        with self.text.block(f"for group in tl.range({program}, {self.groups}, {self.shares}{ahead})"):
            self._write_group(counted("group", self.groups, self.is_wide))
            if not self.fixed:
                self.text.line("tl.debug_barrier()")
        if self.kernel.sums:
            self.sums.end()

    def _write_group(self, group: Index) -> None:
        """All passes over a tile of cells."""
        text, knobs = self.text, self.knobs
        cell = group.wide(self.is_wide) * knobs.cells + arange(knobs.cells)
        self.cell = text.index("cell", cell)
        self.has_cell = text.mask("has_cell", self.cell < self.cells).at(self.down)
        self.at_cell = self._steps("cell", self.lattice.cells, self.cell, self.down)
        self._read_picks()
        if self.is_settled:
            self.table = dict(once(self.table))
        is_read_once = self.lattice.is_reduced and (self.is_held or len(self.kernel.statistics) == 1)
        self.hint = hinted("evict_last" if self.reads_again else "evict_first" * is_read_once)
        held = [self._tiles(block, keeps=True) for block in self._held_blocks()] if self.is_held else []
        for statistic in self.kernel.statistics:
            text.line(f"# {statistic.text}")
            self._numbers(statistic, self._met(statistic, self._state(statistic, held)))
        if self.lattice.is_reduced:
            self._write_cells()
        else:
            self._write(held)

    # ---- formulas

    def _tiles(self, block: Index, *, keeps: bool) -> list[Tile]:
        """The elements of a block behind the prologue, by parts; `keeps`: values with names are written."""
        place = block.constant
        along, exists = self._place(block) if place is None or not self.fixed else self.fixed[place]
        tiles = [self._made(along, exists, part) for part in range(len(self.lattice.starts))]
        for tile in tiles:
            tile.leaves["x"] = tile.leaves["src"]
            for leaf in self.first:
                tile.leaves[leaf]
        return self._behind(self.kernel.prologue, tiles, keeps=keeps)

    def _tile(self, itemsize: int) -> tuple[int, ...]:
        """The extents of a program's elements of a row; the last one has those a lane joins at a time."""
        if not self.knobs.lanes and not self.lattice.inner:
            return (self.knobs.elements,)
        vector = VECTOR // itemsize if self.lattice.is_along else 1
        vector = neighbours(vector, self.lattice.element_count) if self.all_own else vector
        vector = self.lattice.inner_extent or vector
        return self.knobs.elements // vector, vector

    def _read_first(self) -> list[str]:
        """The leaves of statistics that are read before the first of them is made, of cells that are held.

        Where cells have operands of their own, those that all share come with them: gradients of a layer norm
        of 2048 elements took 56.6 us in the place of 62.0 on an H200, of an RMS norm of 8192 190 for 218.
        Elsewhere their registers keep other programs away: RMS norm and fp8 took 74.3 us for 66.4.
        """
        if not self.own or not self.is_held:
            return []
        keys = [each.key for each in self.kernel.operands]
        terms = (part.term for each in self.kernel.statistics for part in self._parts(each))
        used = frozenset[str]().union(*map(leaves_of, terms))
        return sorted(each for each in used if part_of(each)[0] in (self.own if self.is_cut else keys))

    def _value(
        self, formula: Scalar, leaves: Mapping[str, str], like: str, table: Functions | None = None
    ) -> str:
        """A tensor even of a formula that comes to a number."""
        value = fold(dialect.simplified(formula), leaves, table or self.table)
        if value.isidentifier() and not value.startswith(argument(Slot("parameter"))):
            return value
        return self.text.let("constant", f"tl.zeros_like({like}) + {value}")

    def _behind(self, stages: Sequence[Stage], tiles: list[Tile], *, keeps: bool) -> list[Tile]:
        """The tiles with `x` behind the stages: of an axis in parts as many as the stages leave."""
        place = next((at for at, stage in enumerate(stages) if stage.reads_parts), None)
        for tile in tiles:
            tile.leaves["x"] = self._applied(stages[:place], tile.leaves["x"], tile, keeps=keeps)
        if place is None:
            return tiles
        parts = {f"x[{number}]": tile.leaves["x"] for number, tile in enumerate(tiles)}
        made = list(zip(tiles, stages[place].expressions, strict=False))
        self.text.line(f"# {stages[place].op_text}")
        for tile, formula in made:
            tile.leaves.update(parts)
            x = self._value(formula, tile.leaves, tile.leaves["x"])
            tile.leaves["x"] = self._applied(stages[place + 1 :], x, tile, keeps=keeps)
        return [tile for tile, _ in made]

    def _applied(self, stages: Sequence[Stage], x: str, tile: Tile, *, keeps: bool) -> str:
        for stage in stages:
            self.text.line(f"# {stage.op_text}")
            tile.leaves["x"] = x
            x = self._value(stage.expression, tile.leaves, x)
            if stage.saves:
                tile.leaves[stage.saves] = x
                if keeps:
                    saved = self.kernel.saved[stage.step]
                    self._store(saved.key, argument(Slot("result", saved.key)), saved.dtype, x, tile)
        return x

    # ---- statistics

    @property
    def is_settled(self) -> bool:
        """Whether terms are as dst has them: its exponentials are then those of the statistic."""
        is_held = self.is_held and not self.meeting.is_needed and len(self.tile) == 1
        settled = (part.settled for each in self.kernel.statistics for part in each.parts)
        return is_held and not self.lattice.is_reduced and any(each is not None for each in settled)

    def _parts(self, statistic: Statistic) -> list[Part]:
        """The parts of a statistic's state."""
        return [part for part in statistic.parts if part not in self.picks]

    def _read_picks(self) -> None:
        """The parts that are one element's, which is on its way while the others are read."""
        known = {key: name for key, name in self.known.items() if key in self.kernel.parameters}
        last = self.lattice.element_count - 1
        for part, key in self.picks.items():
            place = self._made({}, ALL, known=known).leaves[key]
            at = self.text.let("picked", f"tl.minimum(tl.maximum({place}, 0.0), {last}.0).to(tl.int32)")
            along = self._steps("picked", self.lattice.elements, Index(at, 0, last, is_vector=True), "")
            tile = self._made(along, ALL, known=known)
            tile.leaves["x"] = tile.leaves["src"]
            (tile,) = self._behind(self.kernel.prologue, [tile], keeps=False)
            self.picked[part.name] = self._value(part.term, tile.leaves, tile.leaves["x"])

    def _state(self, statistic: Statistic, held: list[list[Tile]]) -> State:
        """The state of a program's elements: names of columns with a row for each cell."""
        if held:
            own = self._joined(statistic, list(chain(*held)), {})
            return self._merged(statistic, own, 1, "[:, :, None]") if len(self.tile) > 1 else own
        text, shape = self.text, (self.knobs.cells, *self.tile[:-1], 1)
        state: State = {}
        for part in self._parts(statistic):
            identity = self.table["const"](part.identity)
            state[part.name] = text.let(name_of(part), f"tl.full({shape}, {identity}, {self.compute})")
        keeps = statistic is self.kernel.statistics[0] and self.lattice.is_reduced
        with self._program_blocks() as block:
            made = self._joined(statistic, self._tiles(block, keeps=keeps), state)
            self.text.line(*(f"{name} = {made[part]}" for part, name in state.items()))
        return self._merged(statistic, state, 1, "[:, :, None]") if len(self.tile) > 1 else state

    def _merged(self, statistic: Statistic, states: State, axis: int, behind: str) -> State:
        """States along an axis as one."""
        made: State = {}
        for part in self._parts(statistic):
            own = part.corrected(states, made, self.table)
            joined = JOINED[part.join].format(ns="tl", term=own, axis=axis)
            made[part.name] = self.text.let(name_of(part), f"{joined}{behind}")
        return made

    def _joined(self, statistic: Statistic, tiles: list[Tile], state: State) -> State:
        """The numbers of tiles, joined to a state where there is one."""
        made: State = {}
        exact = once(self.table)
        brief = {**exact, "exp": exact["brief_exp"]}
        for tile in tiles:
            tile.leaves.update(self.known)
        for part in self._parts(statistic):
            # A sum of exponentials by their largest is 1 at least: terms below 2^-126 are nothing to it.
            table = exact if part.moved is None or self.is_settled else brief
            joined = reduce(self.table[part.join], (self._term(part, tile, made, table) for tile in tiles))
            if state:
                own = part.corrected(state, made, table)
                joined = self.table[part.join](own, joined)
            made[part.name] = joined
        return made

    def _term(self, part: Part, tile: Tile, made: State, table: Functions) -> str:
        """One part of the state of a tile's elements."""
        count = self._count(tile)
        if count and (part.join, part.term) == ("add", ONE):
            number = self.table["const"](count)
            is_merged = self.meeting.is_needed or len(self.tile) > 1
            if not self.is_held or not is_merged:
                return number
            shape = (self.knobs.cells, *self.tile[:-1], 1)
            return self.text.let(name_of(part), f"tl.full({shape}, {number}, {self.compute})")
        exists = self.text.both(self.has_cell & tile.exists)
        if self.has_whole_vectors and (part.join, part.term) == ("add", ONE):
            return self.text.let(name_of(part), f"tl.where({exists}, {self.tile[-1]}.0, 0.0)")
        tile.leaves.update(made)
        formula = part.settled if self.is_settled and part.settled is not None else part.term
        term = self._value(formula, tile.leaves, tile.leaves["x"], table)
        if exists:
            identity = self.table["const"](part.identity)
            term = self.text.let("term", f"tl.where({exists}, {term}, {identity})")
        joined = JOINED[part.join].format(ns="tl", term=term, axis=len(self.tile))
        return self.text.let(name_of(part), f"{joined}[{':, ' * len(self.tile)}None]")

    def _met(self, statistic: Statistic, state: State) -> State:
        """The state of all programs of a group."""
        if not self.meeting.is_needed:
            return state
        # One cell's are scalars: Triton spreads columns by 2,048 stores; 4 rows of 131,072 took 42 us for 8.
        cells, shape = self.knobs.cells, (self.knobs.cells, *(1 for _ in self.tile))
        told = f"tl.reshape({{}}, ({cells},))" if cells > 1 else "tl.sum({})"
        spread = f"tl.reshape({{}}, {shape})" if cells > 1 else f"tl.full({shape}, {{}}, {self.compute})"
        found = [self.text.let("own", told.format(name)) for name in state.values()]
        shares = dict(zip(state, self.meeting.exchange(found), strict=True))
        made = self._merged(statistic, shares, 0, "[None, :]" * (cells > 1))
        return {name: self.text.let("all", spread.format(value)) for name, value in made.items()}

    def _numbers(self, statistic: Statistic, state: State) -> None:
        """The finished numbers, leaves of all formulas behind."""
        for name, formula in zip(statistic.names, statistic.numbers, strict=True):
            self.known[name] = fold(dialect.simplified(formula), {**self.picked, **state}, self.table)

    # ---- dst

    def _write_cells(self) -> None:
        """One element of each cell; the first program of a group writes it."""
        tile = self._made({}, ALL)
        with self.meeting.first():
            if self.kernel.results:  # they share logarithms with dst
                self.table = dict(once(self.table))
            x = self._applied(self.kernel.epilogue, self._of_cells, tile, keeps=True)
            self._store("dst", "dst", self.kernel.dst.dtype, x, tile)
            self._write_results(tile)

    @property
    def _of_cells(self) -> str:
        """A number of the cells: formulas that come to a number have its shape."""
        return self.known[self.kernel.statistics[0].names[0]]

    def _write_results(self, tile: Tile) -> None:
        """The outputs that are made of statistics."""
        for result in self.of_cells:
            value = self._value(result.expression, tile.leaves, self._of_cells)
            self._store(result.key, argument(Slot("result", result.key)), result.dtype, value, tile)

    def _write(self, held: list[list[Tile]]) -> None:
        """All elements: those at hand, or read once more."""
        self.hint = hinted("evict_first" * self.reads_again)
        with self.meeting.first() if self.of_cells else nullcontext():
            self._write_results(self._made({}, ALL))
        self.text.line("# dst")
        if held or self.fixed:
            for number, block in enumerate(self._held_blocks()):
                self._finish(held[number] if held else self._tiles(block, keeps=True), block)
            return
        # Softmax's gradients of 2048 rows of 131,072 took 509 us going back on an H200, and 559 going on.
        with self._program_blocks(goes_back=self.all_own) as block:
            self._finish(self._tiles(block, keeps=True), block)

    def _of_runs(self, tile: Tile, block: Index) -> None:
        """The numbers of the runs of a tile, leaves of all formulas behind, and the results that are such."""
        for statistic in self.lattice.inner:
            self.text.line(f"# {statistic.text}")
            state = self._joined(statistic, [tile], {})
            for name, formula in zip(statistic.names, statistic.numbers, strict=True):
                tile.leaves[name] = fold(dialect.simplified(formula), state, self.table)
        run = block * self.knobs.elements + (arange(self.tile[0]) * self.lattice.inner_extent).wide(
            self.is_wide
        )
        run, at = self.text.index(self.text.name("run"), run), "[None, :, None]"
        exists = self.text.mask(self.text.name("has_run"), run < self.lattice.element_count).at(at)
        along = self._steps("run", self.lattice.elements, run, at)
        for result in self.lattice.of_runs:
            value = self._value(result.expression, tile.leaves, next(iter(state.values())))
            where = Tile(along, exists, 0, tile.leaves)
            self._store(result.key, argument(Slot("result", result.key)), result.dtype, value, where)

    def _finish(self, tiles: list[Tile], block: Index) -> None:
        for tile in tiles:
            for key in self.shared if self.is_cut else ():  # read again: they would take many registers
                tile.leaves.pop(key, None)
            tile.leaves.update(self.known)
            if self.lattice.inner:
                self._of_runs(tile, block)
            for each in self.kernel.sums:
                term = self._value(each.expression, tile.leaves, tile.leaves["x"])
                self.sums.add(each.key, term, self.has_cell, tile.along[each.key], tile.exists, block)
        for tile in self._behind(self.kernel.epilogue, tiles, keeps=True):
            self._store("dst", "dst", self.kernel.dst.dtype, tile.leaves["x"], tile)
