"""Writes what a product does with a tile whose rows have statistics, in the place of stores to dst.

Each tile leaves the state of its rows in the workspace. The program that comes last to a tile of rows merges
the states of all its tiles, in the order of the features, and writes the rows of dst.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    DOWN,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    merged,
    offset,
)
from fuseplan.backends.triton.shell import last_to_arrive
from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.templates.product_sum import BlockedSum
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles, sum_dtype
from fuseplan.backends.triton.templates.reduction_tiles import (
    JOINED,
    Leaves,
    State,
    name_of,
    once,
    write_pairs,
)
from fuseplan.kernels.emit import COUNTER_BYTES, Slot
from fuseplan.kernels.kernel import Kernel, KernelOperand, Stage
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import INDEX, Part
from fuseplan.scalar import Scalar, fold, leaves_of

Extents = tuple[int, ...]
STATES = 32  # tiles of features whose states are merged at a time


def state_bytes(kernel: Kernel, knobs: Knobs) -> int:
    """Bytes of the states of all tiles."""
    tiles, parts = Tiles(kernel, knobs), sum(len(each.parts) for each in kernel.reduction.statistics)
    return tiles.count * knobs.rows * parts * dtype_of(kernel.compute_dtype).itemsize


class SummaryWriter(BlockedSum):
    """Writes one kernel."""

    entry = "summary"

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title)
        self.statistics = kernel.reduction.statistics
        self.state = [part for each in self.statistics for part in each.parts]
        self.compute = named(kernel.compute_dtype)
        self.storage = Storage(self.text, "tl", kernel.compute_dtype)
        self.table = dialect.table(self.text, "tl", kernel.dst.dtype, kernel.compute_dtype)
        self.workspace_bytes = COUNTER_BYTES + state_bytes(kernel, knobs)
        self.is_wide = self.is_wide or self.workspace_bytes >= WIDE
        self.width = "tl.int64" if self.is_wide else "tl.int32"
        formulas = [stage.expression for stage in kernel.epilogue]
        formulas += [each.expression for each in kernel.results]
        formulas += [part.term for part in self.state]
        used = frozenset().union(*map(leaves_of, formulas))
        parameters = [key for key in kernel.parameters if key in used]
        self.known = {key: argument(Slot("parameter", key)) for key in parameters}
        self.tensors = (
            *self._factors(),
            *self.prologue.slots,
            *self.between.slots,
            *(Slot("operand", each.key) for each in kernel.operands if each.role == "epilogue"),
            *(Slot("parameter", key) for key in parameters),
            Slot("dst"),
            *(Slot("result", each.key) for each in kernel.outputs),
        )

    def write_body(self) -> None:
        write_pairs(self.text, self.state)
        super().write_body()

    # ---- a tile

    def _finish(self) -> None:
        """The statistics of the tile's rows; and of whole rows, in the program that comes last to them."""
        x = self._finished_sum()
        leaves = self._leaves({"x": x, INDEX: self._index()})
        made: State = {}
        for statistic in self.statistics:
            self.text.line(f"# {statistic.text}")
            table = once(self.table)
            for part in statistic.parts:
                leaves.update(made)
                made[part.name] = self._reduced(part, fold(dialect.simplified(part.term), leaves, table), x)
        self._leave(made)

    def _finished_sum(self) -> str:
        """The tile of the product behind the stages between."""
        text, summed = self.text, "total"
        if sum_dtype(self.knobs, self.kernel) != self.kernel.compute_dtype:
            text.line(f"total = total.to({self.compute})")
        if self.is_turned:
            text.line("turned = total.trans(1, 0)")
            summed = "turned"
        axes = self.over_features
        lying = Place("", str(self.feature.at(axes)), "", "", str(self.has_feature.at(axes)))
        return self.between.apply(summed, lying)

    def _index(self) -> str:
        if not any(each.reads_index for each in self.statistics):
            return ""
        return self.text.let("index", f"({self.feature.at(self.over_features)}).to({self.compute})")

    def _reduced(self, part: Part, term: str, like: str) -> str:
        """One number of each row of a tile, its axis of features left with extent 1."""
        if "x" not in leaves_of(part.term):
            term = self.text.let("term", f"tl.zeros_like({like}) + {term}")
        exists = self.has_feature.at(self.over_features)
        if exists:
            term = self.text.let("term", f"tl.where({exists}, {term}, {self.table['const'](part.identity)})")
        return self._joined(part, term)

    def _joined(self, part: Part, term: str) -> str:
        axis = 1 if self.over_features == ACROSS else 0
        return self.text.let(name_of(part), JOINED[part.join].format(term=term, axis=axis) + self.over_rows)

    # ---- all tiles of a row

    def _leave(self, made: Mapping[str, str]) -> None:
        """Leaves the states in the workspace, and goes on where those of all features are there."""
        text, tiles = self.text, self.tiles
        text.line(f"states = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type({self.compute}))")
        lane = self.arange(self.knobs.rows).at(self.over_rows)
        for place, part in enumerate(self.state):
            at = self._states(place) + self.feature_tile * self.knobs.rows + lane
            text.line(f"tl.store(states + {at}, {made[part.name]}, cache_modifier='.cg')")
        counter = Index("workspace") + self.row_tile
        with last_to_arrive(text, counter, tiles.across):
            self._merge(lane)
            self._write_rows()

    def _states(self, place: int) -> Index:
        """Where one part's states of the tile's rows begin, a row of them for each tile of features."""
        each = self.tiles.across * self.knobs.rows
        return (self.row_tile * len(self.state) + place) * each

    def _merge(self, lane: Index) -> None:
        """The numbers of all features: states of some tiles at a time, joined to those before."""
        text, across = self.text, self.tiles.across
        most = min(STATES, 1 << (across - 1).bit_length())
        shape = f"({self.knobs.rows}, 1)" if self.over_rows == DOWN else f"(1, {self.knobs.rows})"
        state: State = {}
        for part in self.state:
            identity = self.table["const"](part.identity)
            state[part.name] = text.let("all", f"tl.full({shape}, {identity}, {self.compute})")
        with text.block(f"for block in range({ceil_div(across, most)})"):
            block = Index("block", 0, ceil_div(across, most) - 1)
            tile = text.index("tile", block * most + arange(most))
            exists = text.mask("has_tile", tile < across).at(self.over_features)
            shares: State = {}
            for place, part in enumerate(self.state):
                at = self._states(place) + (tile * self.knobs.rows).at(self.over_features) + lane
                guard = exists.guard(self.table["const"](part.identity))
                shares[part.name] = text.let("share", f"tl.load(states + {at}{guard}, cache_modifier='.cg')")
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
        leaves = self._leaves({})
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
        return value if value.isidentifier() else self.text.let("made", f"tl.zeros_like({like}) + {value}")

    def _store_rows(self, pointer: str, dtype: str, x: str, shape: Extents, strides: Extents) -> None:
        where, mask = self._at_rows(shape, strides)
        stored = self.storage.narrow(dtype, x)
        self.text.line(f"tl.store({pointer} + {where}, {stored}{mask.guard(other='')})")

    def _at_rows(self, shape: Extents, strides: Extents) -> tuple[Index, Mask]:
        """Offsets of the rows' elements in a tensor with the kernel's axes, and which rows there are."""
        extents = self.kernel.src.shape
        steps = [step * (extent > 1) for step, extent in zip(strides, shape, strict=True)]
        axes = merged((extents[axis], step) for axis, step in enumerate(steps) if axis != 1)
        where = offset(self.row, axes) if axes else as_index(0)
        where = self.text.index(self.text.name("at"), where.at(self.over_rows))
        return where, self.has_row.at(self.over_rows)

    def _leaves(self, known: Mapping[str, str]) -> Leaves:
        """Leaves of a tile of rows: a load is written where a formula asks for it."""
        return Leaves(self._row_of, {**self.known, **known})

    def _row_of(self, key: str) -> str:
        operand = self.kernel.operand(key)
        pointer, dtype = argument(Slot("operand", key)), operand.dtype
        where, mask = self._at_rows(*_spread(operand, self.kernel.src.rank))
        if operand.packed:
            dtype = self.kernel.compute_dtype
        loaded = self.text.let(key, f"tl.load({pointer} + {where}{mask.guard()})")
        return self.storage.widen(dtype, loaded, key)


def _spread(operand: KernelOperand, rank: int) -> tuple[Extents, Extents]:
    """Extents and strides of an operand along all axes of the kernel."""
    shape, strides = [1] * rank, [0] * rank
    for axis, extent, step in zip(operand.axes, operand.shape, operand.strides, strict=False):
        shape[axis], strides[axis] = extent, step
    return tuple(shape), tuple(strides)
