"""Writes attention for Hopper: one warp copies keys and values, groups of four warps have 64 queries each.

A group begins the scores of the next block before it multiplies the weights of the last one, and computes the
next weights while the tensor cores have both products. Where groups take turns, one begins its products when
the group before it has, and computes weights while the others' products run.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import ACROSS, ALL, Index, number
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.attention_scores import NOTHING
from fuseplan.backends.triton.templates.hopper_attention_rows import OWN, HopperRows, Lots
from fuseplan.backends.triton.templates.hopper_finishing import accumulator
from fuseplan.backends.triton.templates.hopper_schedule import (
    BARRIER_BYTES,
    advance,
    counted,
    ring,
    specialized,
)
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target

RINGS = ("key", "value")
BARRIERS = ("query_full", "query_empty", "key_full", "key_empty", "value_full", "value_empty")


@dataclass(frozen=True)
class HopperAttentionKnobs(GpuTemplate):
    """The fields of `HopperAttention`, which says what they mean."""

    groups: int
    keys: int
    stages: int
    persistent: bool
    in_turn: bool


class AttentionLots(Lots):
    """What follows from a kernel and a choice.

    Attributes:
        holds_dst: whether results have memory of their own; else they take the place of the queries.
        shared_bytes: of shared memory that a program takes.
    """

    def __init__(self, knobs: HopperAttentionKnobs, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, knobs.groups, knobs.keys, knobs.persistent, target)
        self.knobs = knobs
        own, rest = self.rows * self.features, self.rows * self.size
        rest += knobs.stages * knobs.keys * (self.size + self.features)
        fits = HALF * (own + rest) + BARRIER_BYTES <= target.l1_bytes
        self.holds_dst = self.size != self.features or (knobs.persistent and fits)
        self.shared_bytes = HALF * (rest + own * self.holds_dst) + BARRIER_BYTES


class HopperAttentionWriter(HopperRows):
    """Writes one kernel."""

    def __init__(self, lots: AttentionLots, kernel: Kernel, title: str) -> None:
        super().__init__(lots, kernel, title)
        self.holds_dst, self.knobs = lots.holds_dst, lots.knobs
        self.leaving = "dst_tiles" if self.holds_dst else "queries"  # where dst is on its way
        maps = {each: self.mapped(each, self.keys) for each in RINGS}
        self.tensors = (
            Slot("src", map=self.mapped("src", OWN)),
            *(Slot("operand", each.key, maps.get(role)) for role, each in self.beside.items()),
            *self.epilogue.slots,
            Slot("dst", map=self.mapped("dst", OWN)),
            *(Slot("result", each.key) for each in kernel.results),
        )
        turns = ["order"] if self.knobs.in_turn else []
        held = [*dict.fromkeys(("queries", "key_ring", "value_ring", self.leaving)), *BARRIERS, *turns]
        self.names = ", ".join([*self.arguments, *held])

    def write_body(self) -> None:
        self._produce()
        self._consume()
        self._allocate()
        given = [f"{self.names}, {group}" for group in range(self.knobs.groups)]
        specialized(self.text, given, self.names)

    def _advance(self, role: str) -> None:
        advance(self.text, self.knobs.stages, f"{role}_stage", f"{role}_phase")

    # ---- the warp that copies

    def _produce(self) -> None:
        """Queries, and blocks in the order in which groups wait for them: a value after the next key."""
        text, lots, keys = self.text, self.lots, self.keys
        with text.function(f"produce({self.names})"):
            text.line("turn_phase = 1")
            text.line(*(f"{role}_stage = 0" for role in RINGS), *(f"{role}_phase = 1" for role in RINGS))
            with self.each_tile():
                self._copy("key", str(self.low))
                for group in range(self.knobs.groups):
                    at = f"{self.batch}, {self.head}, {self.rows_at(group)}, 0"
                    text.line(
                        f"mbarrier.wait(query_empty.index({group}), turn_phase)",
                        f"ready = query_full.index({group})",
                        f"mbarrier.expect(ready, {OWN * lots.size * HALF})",
                        f"tma.async_load(src, [{at}], ready, queries.index({group}))",
                    )
                text.line("turn_phase ^= 1", f"last = {self.low}")
                with text.block(f"for start in range({self.low + keys}, {self.high}, {keys})"):
                    self._copy("key", "start")
                    self._copy("value", "last")
                    text.line("last = start")
                self._copy("value", "last")

    def _copy(self, role: str, start: str) -> None:
        width = self.lots.size if role == "key" else self.lots.features
        at = f"{self.batch}, {self.key_head}, {start}, 0"
        self.text.line(
            f"mbarrier.wait({role}_empty.index({role}_stage), {role}_phase)",
            f"ready = {role}_full.index({role}_stage)",
            f"mbarrier.expect(ready, {self.keys * width * HALF})",
            f"tma.async_load({self.pointer(role)}, [{at}], ready, {role}_ring.index({role}_stage))",
        )
        self._advance(role)

    # ---- the groups that multiply

    def _consume(self) -> None:
        text, knobs, lots, keys = self.text, self.knobs, self.lots, self.keys
        with text.function(f"consume({self.names}, team: gl.constexpr)"):
            text.line(
                f"score_layout: gl.constexpr = {accumulator(keys)}",
                f"layout: gl.constexpr = {accumulator(lots.features)}",
                "row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)",
                "made_layout: gl.constexpr = gl.SliceLayout(1, layout)",
                "factor_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)",
                f"query = queries.index(team).reshape([{OWN}, {lots.size}])",
                "turn_phase = 0",
                *(f"{role}_stage = 0" for role in RINGS),
                *(f"{role}_phase = 0" for role in RINGS),
                *(["mine = 1 if team == 0 else 0"] if knobs.in_turn else ()),
            )
            self.clear_layouts(["value"])
            with self.each_tile():
                row = self.rows_at(number("team", knobs.groups)) + self.vector(OWN, 1)
                self.query = text.index("row", row)
                is_by_row = "s" in self.made.bias_axes + self.made.mask_axes
                self.has_row = text.mask("has_row", self.query < self.made.queries) if is_by_row else ALL
                text.line(
                    f"top = gl.full([{OWN}], {NOTHING}, gl.float32, layout=row_layout)",
                    f"sums = gl.zeros([{OWN}], gl.float32, layout=row_layout)",
                    f"none = gl.zeros([{OWN}, {keys}], gl.float32, layout=score_layout)",
                    f"made = gl.zeros([{OWN}, {lots.features}], gl.float32, layout=layout)",
                    "mbarrier.wait(query_full.index(team), turn_phase)",
                    "turn_phase ^= 1",
                )
                self._blocks()
                self._finish()
            text.line("tma.store_wait(pendings=0)")

    def _blocks(self) -> None:
        """Products and weights; between two products of a block there are those of the next one's scores."""
        text, keys, in_turn = self.text, self.keys, self.knobs.in_turn
        text.line(f"start = {self.low}")
        self._await("key")
        self._begin_scores()
        self._weights(pending=0)
        text.line(f"factor = {self._factor}")
        with text.block(f"for start in range({self.low + keys}, {self.high}, {keys})"):
            self._await("key")
            self._await("value")
            if in_turn:
                text.line("mbarrier.wait(order.index(team), mine)", "mine ^= 1")
            self._begin_scores()
            self._begin_results()
            if in_turn:
                text.line(f"mbarrier.arrive(order.index((team + 1) % {self.knobs.groups}))")
            self._weights(pending=1)
            # It ended long ago; a block of instructions does, too. Else ptxas waits for the results before it
            # computes the exponentials, and these run beside nothing.
            self._await("value")
            self._end_results()
            text.line(
                "corrected = gl.convert_layout(correction, made_layout, assert_trivial=True)",
                "made = made * corrected[:, None]",
                f"factor = {self._factor}",
            )
        if self.holds_dst:
            text.line("mbarrier.arrive(query_empty.index(team))")
        self._await("value")
        self.clear("value_stage", (self.high - 1) // self.keys * self.keys)
        self._begin_results()
        self._end_results()

    @property
    def _factor(self) -> str:
        dtype = named(self.kernel.src.dtype, "gl")
        return f"gl.convert_layout(weights.to({dtype}), factor_layout, assert_trivial=True)"

    def _await(self, role: str) -> None:
        self.text.line(f"mbarrier.wait({role}_full.index({role}_stage), {role}_phase)")

    def _begin_scores(self) -> None:
        shape = f"[{self.keys}, {self.lots.size}]"
        self.text.line(
            f"key_tile = key_ring.index(key_stage).reshape({shape}).permute((1, 0))",
            "scores = warpgroup_mma(query, key_tile, none, use_acc=False, is_async=True)",
        )

    def _weights(self, *, pending: int) -> None:
        """Waits for the scores, gives their keys back, and makes weights of them."""
        key = Index("start", 0, self.made.keys) + self.vector(self.keys, 0)
        has_key = self.has_key(key, self.limit)
        if self.is_beside:  # on the way while the products run
            self.load_beside(self.head, key, self.has_row, has_key)
        self.text.line(
            f"scores = warpgroup_mma_wait({pending}, deps=(scores,))",
            "mbarrier.arrive(key_empty.index(key_stage))",
        )
        self._advance("key")
        self.scale(self.known(self.head, key))
        self.add_beside()
        self.hide(key, has_key, self.begin, self.end)
        self.weigh()

    def _begin_results(self) -> None:
        shape = f"[{self.keys}, {self.lots.features}]"
        self.text.line(
            f"value_tile = value_ring.index(value_stage).reshape({shape})",
            "made = warpgroup_mma(factor, value_tile, made, is_async=True)",
        )

    def _end_results(self) -> None:
        """The wait has the weights, too: their registers are read until it ends."""
        self.text.line(
            "made, factor = warpgroup_mma_wait(0, deps=(made, factor))",
            "mbarrier.arrive(value_empty.index(value_stage))",
        )
        self._advance("value")

    def _finish(self) -> None:
        """Results, divided by the sums, through the epilogue, and by a copy from shared memory to dst."""
        text, made, lots = self.text, self.made, self.lots
        self.store_sums(self.query < made.queries)
        sums = "sums" if made.nan_unseen else "gl.where(sums == 0, 1.0, sums)"
        text.line(
            f"inverse = 1.0 / {sums}",
            "inverse = gl.convert_layout(inverse, made_layout, assert_trivial=True)",
            "result = made * inverse[:, None]",
        )
        channel = self.vector(lots.features, 0, "layout").at(ACROSS)
        exists = str(channel < made.features) if self.epilogue.operands else ""
        result = self.epilogue.apply("result", Place("", str(channel), "", "", exists))
        tile = f"{self.leaving}.index(team).reshape([{OWN}, {lots.features}])"
        at = f"{self.batch}, {self.head}, {self.rows_at(number('team', self.knobs.groups))}, 0"
        text.line(
            "tma.store_wait(pendings=0)",
            "gl.barrier()",
            f"{tile}.store({self.epilogue.stored(result)})",
            "fence_async_shared()",
            f"tma.async_store(dst, [{at}], {self.leaving}.index(team))",
        )
        if not self.holds_dst:
            text.line("tma.store_wait(pendings=0)", "mbarrier.arrive(query_empty.index(team))")

    # ---- the kernel

    def _allocate(self) -> None:
        """The tiles of the groups, the rings, and the barriers between the warps."""
        text, groups, stages = self.text, self.knobs.groups, self.knobs.stages
        ring(text, "queries", "src", groups)
        for role in RINGS:
            ring(text, f"{role}_ring", self.pointer(role), stages)
        if self.holds_dst:
            ring(text, self.leaving, "dst", groups)
        for name in BARRIERS:
            is_query = name.startswith("query")
            arrivals = groups if name in ("key_empty", "value_empty") else 1
            counted(text, name, groups if is_query else stages, arrivals)
        if self.knobs.in_turn:
            counted(text, "order", groups, 1)
        text.line("fence_async_shared()")
