"""Writes the statistics of a product's rows: of a tile's features, of all tiles', and what is made of them.

Each tile leaves the state of its rows in the workspace. Who finds those of all features there merges them, in
the order of the features, and writes the rows of dst.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial, reduce

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import DOWN, Index, Mask, as_index, ceil_div, merged, offset
from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.templates.reduction_tiles import (
    JOINED,
    Leaves,
    State,
    name_of,
    once,
    write_pairs,
)
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel, KernelOperand, Stage
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import INDEX, Part
from fuseplan.scalar import Scalar, fold, leaves_of

Extents = tuple[int, ...]
STATES = 32  # tiles of features whose states are merged at a time


def state_bytes(kernel: Kernel, rows: int, across: int) -> int:
    """Bytes of the states of so many rows, `across` for each."""
    return rows * across * len(kernel.reduction.parts) * dtype_of(kernel.compute_dtype).itemsize


class RowStatistics(ABC):
    """Lines that a writer has in the place of stores to dst; the writer says where a tile lies.

    Attributes:
        namespace: what the text calls the language.
        row, has_row, row_tile, feature_tile: the tile's rows, and its numbers.
        over_rows, over_features: how a vector over rows, or over features, is an axis of the tile.
        tile_rows, across: rows of a tile, and tiles of the features.
    """

    text: Text
    kernel: Kernel
    namespace = "tl"
    row: Index
    has_row: Mask
    row_tile: Index
    feature_tile: Index
    over_rows: str
    over_features: str
    tile_rows: int
    across: int

    def summarize(self, kernel: Kernel) -> None:
        """Reads which statistics there are."""
        self.statistics = kernel.reduction.statistics
        self.state = kernel.reduction.parts
        self.compute = named(kernel.compute_dtype, self.namespace)
        self.storage = Storage(self.text, self.namespace, kernel.compute_dtype)
        self.table = dialect.table(self.text, self.namespace, kernel.dst.dtype, kernel.compute_dtype)
        formulas = [stage.expression for stage in kernel.epilogue]
        formulas += [each.expression for each in kernel.results]
        formulas += [part.term for part in self.state]
        used = frozenset().union(*map(leaves_of, formulas))
        parameters = [key for key in kernel.parameters if key in used]
        self.known = {key: argument(Slot("parameter", key)) for key in parameters}
        self.row_slots = (
            *(Slot("operand", each.key) for each in kernel.operands if each.role == "epilogue"),
            *(Slot("parameter", key) for key in parameters),
        )
        write_pairs(self.text, self.state, self.namespace)
        self.result_slots = [Slot("result", each.key) for each in kernel.outputs]

    @abstractmethod
    def arange(self, size: int) -> Index:
        """The numbers from 0 to `size` along the rows of a tile."""

    @abstractmethod
    def along(self, size: int) -> Index:
        """The numbers from 0 to `size` along its features."""

    # ---- a tile

    def reduced(self, pieces: Sequence[tuple[str, Index, str]], rows: Mapping[str, str]) -> State:
        """The state of the tile's rows.

        Args:
            pieces: tiles of some features each: names of the elements, the features, which of them exist.
            rows: leaves of the rows.
        """

        def load(feature: Index, key: str) -> str:
            return self._index(feature) if key == INDEX else rows[key]

        told = [Leaves(partial(load, feature), {"x": x}) for x, feature, _ in pieces]
        made: State = {}
        for statistic in self.statistics:
            self.text.line(f"# {statistic.text}")
            exact = once(self.table)
            brief = {**exact, "exp": exact["brief_exp"]}
            for part in statistic.parts:
                # a sum of exponentials by their largest is 1 at least: what is below 2^-126 is nothing to it
                table, term, terms = exact if part.moved is None else brief, dialect.simplified(part.term), []
                for leaves, (x, _, exists) in zip(told, pieces, strict=True):
                    leaves.update(made)
                    terms.append(self._term(part, fold(term, leaves, table), x, exists))
                made[part.name] = self._joined(part, reduce(self.table[part.join], terms))
        return made

    def _index(self, feature: Index) -> str:
        return self.text.let("index", f"({feature.at(self.over_features)}).to({self.compute})")

    def _term(self, part: Part, term: str, like: str, exists: str) -> str:
        """A term of each element, of those that do not exist the identity."""
        if "x" not in leaves_of(part.term):
            term = self.text.let("term", f"{self.namespace}.zeros_like({like}) + {term}")
        if not exists:
            return term
        identity = self.table["const"](part.identity)
        return self.text.let("term", f"{self.namespace}.where({exists}, {term}, {identity})")

    def _joined(self, part: Part, term: str) -> str:
        """One number of each row of a tile, its axis of features left with extent 1."""
        axis = 1 if self.over_rows == DOWN else 0
        joined = JOINED[part.join].format(ns=self.namespace, term=term, axis=axis)
        return self.text.let(name_of(part), joined + self.over_rows)

    # ---- all tiles of a row

    def begin_states(self, begin: str) -> None:
        """The place of the states in the workspace."""
        self.text.line(f"states = ({begin}).to({self.namespace}.pointer_type({self.compute}))")

    def leave(self, made: Mapping[str, str]) -> None:
        """Leaves the states of a tile's rows."""
        lane = self.arange(self.tile_rows).at(self.over_rows)
        for place, part in enumerate(self.state):
            at = self._states(place) + self.feature_tile * self.tile_rows + lane
            self.text.line(f"{self.namespace}.store(states + {at}, {made[part.name]}, cache_modifier='.cg')")

    def merge(self, most: int) -> None:
        """Merges the states of a tile's rows where those of all features are there, and writes dst."""
        self._merge(self.arange(self.tile_rows).at(self.over_rows), most)
        self._write_rows()

    def _states(self, place: int) -> Index:
        """Where one part's states of the tile's rows begin, a row of them for each tile of features."""
        each = self.across * self.tile_rows
        return (self.row_tile * len(self.state) + place) * each

    def _merge(self, lane: Index, most: int) -> None:
        """The numbers of all features: states of some tiles at a time, joined to those before."""
        text, across, ns, rows = self.text, self.across, self.namespace, self.tile_rows
        shape = f"({rows}, 1)" if self.over_rows == DOWN else f"(1, {rows})"
        state: State = {}
        for part in self.state:
            identity = self.table["const"](part.identity)
            like = ", layout=layout" if ns == "gl" else ""
            state[part.name] = text.let("all", f"{ns}.full({shape}, {identity}, {self.compute}{like})")
        with text.block(f"for block in range({ceil_div(across, most)})"):
            block = Index("block", 0, ceil_div(across, most) - 1)
            tile = text.index(text.name("tile"), block * most + self.along(most))
            exists = text.mask("has_tile", tile < across).at(self.over_features)
            shares: State = {}
            for place, part in enumerate(self.state):
                at = self._states(place) + (tile * rows).at(self.over_features) + lane
                guard = exists.guard(self.table["const"](part.identity))
                loaded = f"{ns}.load(states + {at}{guard}, cache_modifier='.cg')"
                shares[part.name] = text.let("share", loaded)
            made, table = State(), once(self.table)
            for part in self.state:
                own = part.corrected(state, made, table)
                joined = self._joined(part, part.corrected(shares, made, table))
                made[part.name] = table[part.join](own, joined)
            text.line(*(f"{name} = {made[part]}" for part, name in state.items()))
        for statistic in self.statistics:
            for name, formula in zip(statistic.names, statistic.numbers, strict=True):
                self.known[name] = fold(dialect.simplified(formula), state, self.table)

    # ---- dst

    def _write_rows(self) -> None:
        """dst and all results of the tile's rows."""
        self.table = dict(once(self.table))
        leaves = self.leaves()
        like = self.known[self.statistics[0].names[0]]
        for stage in self.kernel.epilogue:
            leaves["x"] = self._value(stage, stage.expression, leaves, like)
        dst = self.kernel.dst
        self._store_rows("dst", dst.dtype, leaves["x"], dst.shape, dst.element_strides)
        for each in self.kernel.results:
            value = self._value(None, each.expression, leaves, like)
            self._store_rows(argument(Slot("result", each.key)), each.dtype, value, each.shape, each.strides)

    def _value(self, stage: Stage | None, formula: Scalar, leaves: Mapping[str, str], like: str) -> str:
        if stage is not None:
            self.text.line(f"# {stage.op_text}")
        value = fold(dialect.simplified(formula), leaves, self.table)
        spread = f"{self.namespace}.zeros_like({like}) + {value}"
        return value if value.isidentifier() else self.text.let("made", spread)

    def _store_rows(self, pointer: str, dtype: str, x: str, shape: Extents, strides: Extents) -> None:
        where, mask = self._at_rows(shape, strides)
        stored = self.storage.narrow(dtype, x)
        self.text.line(f"{self.namespace}.store({pointer} + {where}, {stored}{mask.guard(other='')})")

    def _at_rows(self, shape: Extents, strides: Extents) -> tuple[Index, Mask]:
        """Offsets of the rows' elements in a tensor with the kernel's axes, and which rows there are."""
        extents = self.kernel.src.shape
        steps = [step * (extent > 1) for step, extent in zip(strides, shape, strict=True)]
        axes = merged((extents[axis], step) for axis, step in enumerate(steps) if axis != 1)
        where = offset(self.row, axes) if axes else as_index(0)
        where = self.text.index(self.text.name("at"), where.at(self.over_rows))
        return where, self.has_row.at(self.over_rows)

    def leaves(self) -> Leaves:
        """Leaves of the tile's rows: a load is written where a formula asks for it."""
        return Leaves(self._row_of, self.known)

    def _row_of(self, key: str) -> str:
        operand = self.kernel.operand(key)
        pointer, dtype = argument(Slot("operand", key)), operand.dtype
        where, mask = self._at_rows(*_spread(operand, self.kernel.src.rank))
        if operand.packed:
            dtype = self.kernel.compute_dtype
        loaded = self.text.let(key, f"{self.namespace}.load({pointer} + {where}{mask.guard()})")
        return self.storage.widen(dtype, loaded, key)


def _spread(operand: KernelOperand, rank: int) -> tuple[Extents, Extents]:
    """Extents and strides of an operand along all axes of the kernel."""
    shape, strides = [1] * rank, [0] * rank
    for axis, extent, step in zip(operand.axes, operand.shape, operand.strides, strict=False):
        shape[axis], strides[axis] = extent, step
    return tuple(shape), tuple(strides)
