"""Writes the gradients of attention for Hopper: one warp copies, groups of four warps have 64 rows each.

Rows are queries for the gradient of src, and keys for those of key and value; rows of the other kind come in
blocks. Where products lag, a group begins a block's scores, then the product with the last block's slopes,
and computes weights while the tensor cores have that and the products of value and gradient; slopes, while
they sum for value. Else the slopes' product comes with their own block, which takes fewer registers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from fuseplan.backends.attending import SIDES
from fuseplan.backends.triton.elementwise import Place, argument
from fuseplan.backends.triton.index import ACROSS, ALL, DOWN, Index, Mask, ceil_div, number
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.hopper_attention_rows import OWN, WARP, HopperRows, Lots
from fuseplan.backends.triton.templates.hopper_finishing import accumulator
from fuseplan.backends.triton.templates.hopper_schedule import (
    BARRIER_BYTES,
    advance,
    allocated,
    counted,
    ring,
    specialized,
)
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.scalar import fold

RINGS = ("first", "second")  # the factors of the scores, and those of the products with the gradient
TOLD = ("base", "delta")  # of each query
BARRIERS = ("full", "empty", "own_full", "own_empty")
SINGLE = 4  # bytes of an f32
PLAIN = "gl.SwizzledSharedLayout(1, 1, 1, [0])"


@dataclass(frozen=True)
class HopperGradientKnobs(GpuTemplate):
    """The fields of `HopperAttentionGradient`, which says what they mean."""

    groups: int
    keys: int
    stages: int
    persistent: bool
    in_turn: bool
    lagging: bool


class GradientLots(Lots):
    """What follows from a kernel and a choice.

    Attributes:
        shared_bytes: of shared memory that a program takes.
    """

    def __init__(self, knobs: HopperGradientKnobs, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, knobs.groups, knobs.keys, knobs.persistent, target)
        self.knobs, rows = knobs, self.rows + knobs.stages * self.keys
        told = len(TOLD) * knobs.stages * self.keys * SINGLE if self.is_rising else 0
        self.shared_bytes = HALF * rows * (self.size + self.features) + told + BARRIER_BYTES


class HopperGradientWriter(HopperRows):
    """Writes one kernel; `query` are the rows of a tile, which may be keys."""

    def __init__(self, lots: GradientLots, kernel: Kernel, title: str) -> None:
        super().__init__(lots, kernel, title)
        self.knobs, self.is_key = lots.knobs, lots.is_rising
        self.told = TOLD if self.is_key else ()
        self.widths = {"first": lots.size, "second": lots.features}
        own, across = SIDES[self.heads.by]
        self.own, self.across = dict(zip(RINGS, own, strict=True)), dict(zip(RINGS, across, strict=True))
        maps = {
            role: self.mapped("src" if role == "query" else role, OWN if role in own else self.keys)
            for role in (*own, *across)
        }
        self.tensors = (
            Slot("src", map=maps["query"]),
            *(Slot("operand", each.key, maps.get(role)) for role, each in self.beside.items()),
            *self.epilogue.slots,
            Slot("dst", map=self.mapped("dst", OWN)),
            *(Slot("result", each.key, self.mapped(each.key, OWN)) for each in kernel.results),
        )
        held = [*(f"{role}_own" for role in own), *(f"{role}_ring" for role in across)]
        held += [*BARRIERS, *(["order"] if self.knobs.in_turn else [])]
        held += [f"{each}_ring" for each in self.told]
        self.names = ", ".join([*self.arguments, *held])

    def write_body(self) -> None:
        self._produce()
        self._consume()
        self._allocate()
        specialized(self.text, [f"{self.names}, {group}" for group in range(self.knobs.groups)], self.names)

    # ---- the warp that copies

    def _produce(self) -> None:
        """Blocks in the order in which groups wait for them, and behind the first one the tile's rows."""
        text, through = self.text, self.heads.through
        with text.function(f"produce({self.names})"):
            if self.is_key:
                layout = f"gl.BlockedLayout([{self.keys // WARP}], [{WARP}], [1], [0])"
                text.line(f"told_layout: gl.constexpr = {layout}")
            text.line("turn_phase = 1", "stage = 0", "phase = 1")
            with self.each_tile():
                with text.block(f"for member in range({through})") if through > 1 else nullcontext():
                    self._copy_blocks()
                text.line("turn_phase ^= 1")

    def _copy_blocks(self) -> None:
        """The blocks of one head, and what is told of their queries."""
        text, through = self.text, self.heads.through
        head = self.key_head * through + number("member", through)
        head = text.index("other_head", head) if self.is_key else self.key_head
        with text.block(f"for start in range({self.low}, {self.high}, {self.keys})"):
            if self.is_key:  # it comes while the warp waits for the rings
                other = f"gl.arange(0, {self.keys}, layout=told_layout)"
                row = Index("start", 0, self.heads.others) + Index(other, 0, self.keys - 1, is_vector=True)
                row = text.index("other", row)
                self.load_told(head, row, text.mask("has_other", row < self.heads.others))
            self._copy(head)
            with text.block(f"if start{' + member' if through > 1 else ''} == {self.low}"):
                for group in range(self.knobs.groups):
                    self._copy_own(group)
            if self.is_key:
                self.write_base()
                text.line(*(f"{each}_ring.index(stage).store({each})" for each in TOLD))
                text.line("mbarrier.arrive(full.index(stage))")
            advance(text, self.knobs.stages)

    def _argument(self, role: str) -> str:
        return "src" if role == "query" else self.pointer(role)

    def _copy_own(self, group: int) -> None:
        text, width = self.text, sum(self.widths.values())
        at = f"{self.batch}, {self.head}, {self.rows_at(group)}, 0"
        text.line(
            f"mbarrier.wait(own_empty.index({group}), turn_phase)",
            f"ready = own_full.index({group})",
            f"mbarrier.expect(ready, {OWN * width * HALF})",
        )
        for role in self.own.values():
            text.line(f"tma.async_load({self._argument(role)}, [{at}], ready, {role}_own.index({group}))")

    def _copy(self, head: Index) -> None:
        """A block of both rings."""
        self.text.line(
            "mbarrier.wait(empty.index(stage), phase)",
            "ready = full.index(stage)",
            f"mbarrier.expect(ready, {self.keys * sum(self.widths.values()) * HALF})",
        )
        for role in self.across.values():
            at, into = f"{self.batch}, {head}, start, 0", f"{role}_ring.index(stage)"
            self.text.line(f"tma.async_load({self._argument(role)}, [{at}], ready, {into})")

    # ---- the groups that multiply

    def _consume(self) -> None:
        text, lots, is_key = self.text, self.lots, self.is_key
        with text.function(f"consume({self.names}, team: gl.constexpr)"):
            text.line(
                f"score_layout: gl.constexpr = {accumulator(self.keys)}",
                f"layout: gl.constexpr = {accumulator(lots.size)}",
                "factor_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)",
            )
            if is_key:
                text.line(f"value_layout: gl.constexpr = {accumulator(lots.features)}")
                text.line("weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)")
            text.line(*(f"{self.own[name]}_tile = {self._tile(name, 'own', 'team', OWN)}" for name in RINGS))
            text.line("turn_phase = 0", "stage = 0", "phase = 0")
            self.clear_layouts(self.across.values())
            if self.knobs.in_turn:
                text.line("mine = 1 if team == 0 else 0")
            with self.each_tile():
                row = self.rows_at(number("team", self.knobs.groups)) + self.vector(OWN, 1)
                self.query = text.index("row", row)
                if not is_key or self.is_beside:
                    self.has_row = text.mask("has_row", self.query < self.heads.rows)
                if not is_key:
                    self.load_told(self.head, self.query, self.has_row)
                    self.write_base()
                sums = (("made", lots.size, "layout"), ("value_made", lots.features, "value_layout"))
                text.line(f"none = gl.zeros([{OWN}, {self.keys}], gl.float32, layout=score_layout)")
                for name, width, layout in sums[: 1 + is_key]:
                    text.line(f"{name} = gl.zeros([{OWN}, {width}], gl.float32, layout={layout})")
                text.line("mbarrier.wait(own_full.index(team), turn_phase)", "turn_phase ^= 1")
                self._blocks()
                self._finish()
            text.line("tma.store_wait(pendings=0)")

    def _tile(self, name: str, of: str, at: str, rows: int) -> str:
        role = (self.own if of == "own" else self.across)[name]
        return f"{role}_{of}.index({at}).reshape([{rows}, {self.widths[name]}])"

    def _blocks(self) -> None:
        """Blocks, of the heads that read the same keys one after another."""
        text, low, high, keys, through = self.text, self.low, self.high, self.keys, self.heads.through
        done = int(self.knobs.lagging)
        self.other_head = self.key_head * through
        if done:
            self._block(is_first=True)
        if through == 1:
            loop, steps = f"for start in range({low + keys * done}, {high}, {keys})", []
        else:
            whole = f"{high} + {keys - 1}" if low.constant == 0 else f"{high} - {low} + {keys - 1}"
            is_known = high.constant is not None and low.constant is not None
            span = str(ceil_div(int(high.high - low.low), keys)) if is_known else "span"
            text.line(*([] if is_known else [f"span = ({whole}) // {keys}"]))
            steps = [f"start = {number(f'step % {span}', self.heads.others) * keys + low}"]
            loop = f"for step in range({done}, {int(span) * through if is_known else f'span * {through}'})"
            self.other_head = self.other_head + number(f"step // {span}", through)
        with text.block(loop):
            text.line(*steps)
            self._block(is_first=not done)
            if not done:
                self._sum()
        if done:
            self._sum()

    def _sum(self) -> None:
        """The product with a block's slopes; nothing is under way behind it."""
        self._begin_made()
        more = ("value_made", "weight_factor") if self.is_key and not self.knobs.lagging else ()
        self._end(0, "made", "slope_factor", *more)
        self.text.line("mbarrier.arrive(empty.index(last))")

    def _begin_made(self) -> None:
        tile = self._tile("first", "ring", "last", self.keys)
        self.text.line(f"made = warpgroup_mma(slope_factor, {tile}, made, is_async=True)")

    def _block(self, *, is_first: bool) -> None:
        """One block up to its slopes; but for a first one, the product with the last one's."""
        text, lagging = self.text, self.knobs.lagging
        in_turn = self.knobs.in_turn and not (is_first and lagging)
        others, behind = self.heads.others, self.low.low + self.keys * lagging
        start = self.low if is_first and lagging else Index("start", min(behind, others), others)
        self._await()
        self.clear("stage", start)
        if in_turn:
            text.line("mbarrier.wait(order.index(team), mine)", "mine ^= 1")
        self._begin_scores("scores", "first")
        if not is_first:
            self._begin_made()
        self._begin_scores("products", "second")
        if in_turn:
            text.line(f"mbarrier.arrive(order.index((team + 1) % {self.knobs.groups}))")
        other = start + self.vector(self.keys, 0)
        exists = self.has_key(other, self.limit)
        if self.is_beside and not self.is_key:  # on their way while the products run
            self.load_beside(self.head, other, self.has_row, exists)
        self._end(1 if is_first else 2, "scores")
        if self.is_beside and self.is_key:  # two sums leave no registers for them before
            self.load_beside(self.other_head, other, self.has_row, exists)
        self._weigh(start, other, exists)
        if self.is_key:
            # It takes the weights: their exponentials stand in front of the waits behind it.
            tile = self._tile("second", "ring", "stage", self.keys)
            text.line(f"value_made = warpgroup_mma(weight_factor, {tile}, value_made, is_async=True)")
        else:
            # It ends at once, and keeps the exponentials in front of the wait, as in the forward pass.
            self._await()
        self._end(int(self.is_key), "products", *(() if is_first else ("made", "slope_factor")))
        if not is_first:
            text.line("mbarrier.arrive(empty.index(last))")
        self._slopes()
        if self.is_key and lagging:
            self._await()
            self._end(0, "value_made", "weight_factor")
        text.line("last = stage")
        advance(text, self.knobs.stages)

    def _await(self) -> None:
        """Waits for the next block."""
        self.text.line("mbarrier.wait(full.index(stage), phase)")

    def _end(self, pending: int, *held: str) -> None:
        """Waits for all but the last products, with their sums and the factors that they read till then."""
        deps, more = ", ".join(held), "," if len(held) == 1 else ""
        self.text.line(f"{deps} = warpgroup_mma_wait({pending}, deps=({deps}{more}))")

    def _begin_scores(self, made: str, name: str) -> None:
        """The products of the tile's rows with a block's."""
        tile = self._tile(name, "ring", "stage", self.keys)
        self.text.line(
            f"{made} = warpgroup_mma({self.own[name]}_tile, {tile}.permute((1, 0)), none, use_acc=False, "
            "is_async=True)"
        )

    def _told(self, name: str) -> str:
        """What is told of queries, as an axis of the scores."""
        if not self.is_key:
            return f"{name}{DOWN}"
        return f"{name}_ring.index(stage).load(gl.SliceLayout(0, score_layout)){ACROSS}"

    def _weigh(self, start: Index, other: Index, exists: Mask) -> None:
        """Weights of the scores, and the steepness of their formula in them, as a factor of the slopes."""
        text, made = self.text, self.made
        known = self.known(self.other_head if self.is_key else self.head, other)
        if not made.is_scaled:
            text.line(f"steepness = {fold(made.slope, known, self.table)}")
        self.scale(known)
        self.add_beside()
        # No row is behind the others' end where these are queries: the sums told of such are infinite.
        self.hide(other, ALL if self.is_key else exists, self.begin, self.end, start)
        scaled = "" if self.factor == 1.0 else f" * {self.factor!r}"
        text.line(f"weights = gl.exp2(scores{scaled} - {self._told('base')})")
        if self.is_key:
            text.line(f"weight_factor = {self._factor('weights', 'weight_layout')}")
        if not made.is_scaled:
            text.line("weights = weights * steepness")

    def _slopes(self) -> None:
        self.text.line(
            f"slopes = weights * (products - {self._told('delta')})",
            f"slope_factor = {self._factor('slopes', 'factor_layout')}",
        )

    def _factor(self, name: str, layout: str) -> str:
        dtype = named(self.kernel.src.dtype, "gl")
        return f"gl.convert_layout({name}.to({dtype}), {layout}, assert_trivial=True)"

    def _finish(self) -> None:
        """Results by copies from shared memory, where the tile's rows were; dst through the epilogue."""
        text, lots, kernel = self.text, self.lots, self.kernel
        scaled = "" if not self.made.is_scaled else f" * {self.made.scale!r}"
        if self.is_key and self.made.is_padded:
            row = self.rows_at(number("team", self.knobs.groups))
            for name, layout in (("made", "layout"), ("value_made", "value_layout")):
                seen = (row + self.vector(OWN, 1, layout) < self.image_keys).at(DOWN)
                text.line(f"{name} = gl.where({seen}, {name}, 0.0)")
        text.line(f"result = made{scaled}")
        channel = self.vector(lots.size, 0, "layout").at(ACROSS)
        exists = str(channel < self.made.size) if self.epilogue.operands else ""
        result = self.epilogue.apply("result", Place("", str(channel), "", "", exists))
        stored = {"first": ("dst", self.epilogue.stored(result))}
        for each in kernel.results:
            made = self.epilogue.stored("value_made", each.dtype)
            stored["second"] = argument(Slot("result", each.key)), made
        at = f"{self.batch}, {self.head}, {self.rows_at(number('team', self.knobs.groups))}, 0"
        text.line("gl.barrier()")
        for name, (_, made) in stored.items():
            text.line(f"{self.own[name]}_tile.store({made})")
        text.line("fence_async_shared()")
        for name, (tensor, _) in stored.items():
            text.line(f"tma.async_store({tensor}, [{at}], {self.own[name]}_own.index(team))")
        text.line("tma.store_wait(pendings=0)", "mbarrier.arrive(own_empty.index(team))")

    # ---- the kernel

    def _allocate(self) -> None:
        """The tiles of the groups, the rings, and the barriers between the warps."""
        text, groups = self.text, self.knobs.groups
        for name in RINGS:
            own, across = self.own[name], self.across[name]
            ring(text, f"{own}_own", self._argument(own), groups)
            ring(text, f"{across}_ring", self._argument(across), self.knobs.stages)
        counted(text, "full", self.knobs.stages, 2 if self.is_key else 1)
        counted(text, "empty", self.knobs.stages, groups)
        for name in BARRIERS[2:]:
            counted(text, name, groups, 1)
        if self.knobs.in_turn:
            counted(text, "order", groups, 1)
        for each in self.told:
            shape = f"[{self.knobs.stages}, {self.keys}]"
            text.line(f"{each}_ring = {allocated('gl.float32', shape, PLAIN)}")
        text.line("fence_async_shared()")
