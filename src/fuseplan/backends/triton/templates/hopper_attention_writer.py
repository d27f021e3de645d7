"""Writes attention for Hopper: one warp copies keys and values, groups of four warps have 64 queries each.

A group begins the scores of the next block before it multiplies the weights of the last one, and computes the
next weights while the tensor cores have both products. Where groups take turns, one begins its products when
the group before it has, and computes weights while the others' products run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import ACROSS, Index, as_index, ceil_div, number, power_of_two
from fuseplan.backends.triton.shell import of_launch, programs_of
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.attention_scores import NOTHING, Scores
from fuseplan.backends.triton.templates.hopper_finishing import accumulator
from fuseplan.backends.triton.templates.hopper_schedule import (
    BARRIER_BYTES,
    IMPORTS,
    advance,
    counted,
    ring,
    specialized,
)
from fuseplan.backends.triton.templates.hopper_tiles import HALF, taken
from fuseplan.kernels.emit import Slot, TensorMap
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.attend import Attend

OWN = 64  # queries of a group: the rows of one product
LEAST = 16  # elements of a product's factor
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


def tensors(kernel: Kernel) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Extents and strides of what the copy engine moves: images, heads, rows, elements of a row."""
    made = kernel.attention
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for role, spec in (("src", kernel.src), ("dst", kernel.dst)):
        (b, d, h, s), (images, width, heads, rows) = spec.element_strides, spec.shape
        found[role] = (images, heads, rows, width), (b, h, s, d)
    widths = {"key": made.size, "value": made.features}
    for each in kernel.operands:
        if each.role in RINGS:
            found[each.role] = (made.batch, made.key_heads, made.keys, widths[each.role]), each.strides
    return found


def padded(size: int) -> int:
    """Elements of a row in shared memory; zeros follow its own."""
    return power_of_two(max(size, LEAST))


class Lots:
    """What follows from a kernel and a choice.

    Attributes:
        rows: queries of a tile.
        size, features: elements of a row of keys and of values in shared memory.
        tiles: of a head.
        is_folded: whether a program has two tiles of a head in turn, which see as many keys together as any
            other two: where queries see the keys up to their place, and programs go on to further tiles.
        lots: of a head, for programs to take: tiles, or pairs of them.
        heads: those whose tiles follow one another by length: the longest first, for the shortest to fill up
            the processors at the end, and few enough for their keys and values to stay in the L2.
        holds_dst: whether results have memory of their own; else they take the place of the queries.
        shared_bytes: of shared memory that a program takes.
    """

    def __init__(self, knobs: HopperAttentionKnobs, made: Attend, l1_bytes: int, l2_bytes: int) -> None:
        self.knobs, self.made, self.rows = knobs, made, OWN * knobs.groups
        self.size, self.features = padded(made.size), padded(made.features)
        self.tiles = ceil_div(made.queries, self.rows)
        self.is_folded = knobs.persistent and made.is_causal and self.tiles > 1
        self.lots = ceil_div(self.tiles, 2) if self.is_folded else self.tiles
        self.heads = 1
        if made.is_causal and not knobs.persistent:
            each = made.keys * (made.size + made.features) * HALF
            many = max(1, l2_bytes // 2 // each) * made.group
            self.heads = gcd(made.heads, 1 << (many.bit_length() - 1))
        own, rest = self.rows * self.features, self.rows * self.size
        rest += knobs.stages * knobs.keys * (self.size + self.features)
        fits = HALF * (own + rest) + BARRIER_BYTES <= l1_bytes
        self.holds_dst = self.size != self.features or (knobs.persistent and fits)
        self.shared_bytes = HALF * (rest + own * self.holds_dst) + BARRIER_BYTES

    @property
    def is_idle(self) -> bool:
        """Whether a group multiplies keys that none of its queries sees, as the kernel's text shows.

        ptxas drops such products, which cannot be told from those that it drops in error.
        """
        firsts = [range(group * OWN, self.tiles * self.rows, self.rows) for group in range(self.knobs.groups)]
        spans = [[self.made.seen(first, OWN) for first in each] for each in firsts]
        if self.tiles > 1:
            return not all(any(low < high for low, high in each) for each in spans)
        begin, end = self.made.seen(0, self.rows)
        blocks = range(begin // self.knobs.keys * self.knobs.keys, end, self.knobs.keys)
        return any(
            high <= first or first + self.knobs.keys <= low for ((low, high),) in spans for first in blocks
        )


class HopperAttentionWriter(Scores):
    """Writes one kernel."""

    language, imports = "gluon", IMPORTS
    options = (("num_warps", 4),)

    def __init__(self, lots: Lots, kernel: Kernel, processors: int, title: str) -> None:
        super().__init__(kernel, title, 0, lots.rows, lots.knobs.keys, "gl")
        self.lots, self.knobs = lots, lots.knobs
        self.total = of_launch(kernel, self.heads.groups) * lots.lots
        most = processors if self.knobs.persistent else 0
        self.programs = programs_of(kernel, self.heads.groups, 1, lots.lots, most)
        known = self.programs if isinstance(self.programs, int) else most
        self.grid: Index | int = known or self.total
        self.leaving = "dst_tiles" if lots.holds_dst else "queries"  # where dst is on its way
        self.tensors = (
            Slot("src", map=self._map("src", OWN)),
            *(Slot("operand", self.beside[each].key, self._map(each, self.keys)) for each in RINGS),
            *self.epilogue.slots,
            Slot("dst", map=self._map("dst", OWN)),
            *(Slot("result", each.key) for each in kernel.results),
        )
        turns = ["order"] if self.knobs.in_turn else []
        held = [*dict.fromkeys(("queries", "key_ring", "value_ring", self.leaving)), *BARRIERS, *turns]
        self.names = ", ".join([*self.arguments, *held])

    def vector(self, count: int, lacking: int, of: str = "score_layout") -> Index:
        layout = f"gl.SliceLayout({lacking}, {of})"
        return Index(f"gl.arange(0, {count}, layout={layout})", 0, count - 1, is_vector=True)

    def write_body(self) -> None:
        self._produce()
        self._consume()
        self._allocate()
        given = [f"{self.names}, {group}" for group in range(self.knobs.groups)]
        specialized(self.text, given, self.names)

    def _map(self, role: str, rows: int) -> TensorMap:
        """A tensor in boxes of rows of one head."""
        shape, strides = tensors(self.kernel)[role]
        steps = (*map(taken, shape[:3], strides, shape[3:] * 3), 1)
        box = (1, 1, rows, padded(shape[3]))
        opened = shape[0] // self.kernel.images if self.is_open else 0
        return TensorMap(self.kernel.src.dtype, shape, steps, box, (1,) * 4, opened)

    # ---- what all warps agree on

    @contextmanager
    def _tiles(self) -> Iterator[None]:
        """Lines for each tile of a program, behind those that say where it lies and which keys it sees."""
        text, lots, made = self.text, self.lots, self.made
        if self.is_open:
            text.line("extent = extent.to(gl.int32)")
        with text.block(f"for place in range(gl.program_id(0), {self.total}, {self.grid})"):
            place = number("place", self.total)
            if not lots.is_folded:
                chunk = self.tiles * lots.heads
                tile = place % chunk // lots.heads
                tile = (self.tiles - 1) - tile if made.is_causal else tile
                self._place(tile, place // chunk * lots.heads + place % lots.heads)
                yield
                return
            short = text.index("short", place % lots.lots)
            # The middle one of an odd number of tiles is in no pair.
            pair = f"gl.where({short} == {lots.lots - 1}, 1, 2)" if self.tiles % 2 else "2"
            with text.block(f"for turn in range(0, {pair})"):
                tile = number(f"gl.where(turn == 0, {self.tiles - 1} - {short.atom}, {short})", self.tiles)
                self._place(tile, place // lots.lots)
                yield

    def _place(self, tile: Index, group: Index) -> None:
        """Where a tile lies, and the keys that it sees: at least a block, if only of hidden scores."""
        text, keys = self.text, self.keys
        self.head = self.place_tile(tile, group)
        low, high, begin, end = self.seen(as_index(self.made.keys))
        low = self.least(low, as_index((self.made.keys - 1) // keys * keys))
        self.low = text.index("low", low)
        self.high = text.index("high", self.most(high, self.low + 1))
        self.begin, self.end = text.index("begin", begin), text.index("end", end)

    def _rows_at(self, team: Index | int) -> Index:
        """The first query of a group of warps."""
        return self.tile * self.rows + as_index(team) * OWN

    def _advance(self, role: str) -> None:
        advance(self.text, self.knobs.stages, f"{role}_stage", f"{role}_phase")

    # ---- the warp that copies

    def _produce(self) -> None:
        """Queries, and blocks in the order in which groups wait for them: a value after the next key."""
        text, lots, keys = self.text, self.lots, self.keys
        with text.function(f"produce({self.names})"):
            text.line("turn_phase = 1")
            text.line(*(f"{role}_stage = 0" for role in RINGS), *(f"{role}_phase = 1" for role in RINGS))
            with self._tiles():
                self._copy("key", str(self.low))
                for group in range(self.knobs.groups):
                    at = f"{self.batch}, {self.head}, {self._rows_at(group)}, 0"
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
            with self._tiles():
                row = self._rows_at(number("team", knobs.groups)) + self.vector(OWN, 1)
                self.query = text.index("row", row)
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
        if self.lots.holds_dst:
            text.line("mbarrier.arrive(query_empty.index(team))")
        self._await("value")
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
        self.text.line(
            f"scores = warpgroup_mma_wait({pending}, deps=(scores,))",
            "mbarrier.arrive(key_empty.index(key_stage))",
        )
        self._advance("key")
        self.scale()
        key, limit = Index("start", 0, self.made.keys) + self.vector(self.keys, 0), as_index(self.made.keys)
        self.hide(key, self.has_key(key, limit), self.begin, self.end)
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
        at = f"{self.batch}, {self.head}, {self._rows_at(number('team', self.knobs.groups))}, 0"
        text.line(
            "tma.store_wait(pendings=0)",
            "gl.barrier()",
            f"{tile}.store({self.epilogue.stored(result)})",
            "fence_async_shared()",
            f"tma.async_store(dst, [{at}], {self.leaving}.index(team))",
        )
        if not lots.holds_dst:
            text.line("tma.store_wait(pendings=0)", "mbarrier.arrive(query_empty.index(team))")

    # ---- the kernel

    def _allocate(self) -> None:
        """The tiles of the groups, the rings, and the barriers between the warps."""
        text, groups, stages = self.text, self.knobs.groups, self.knobs.stages
        ring(text, "queries", "src", groups)
        for role in RINGS:
            ring(text, f"{role}_ring", self.pointer(role), stages)
        if self.lots.holds_dst:
            ring(text, self.leaving, "dst", groups)
        for name in BARRIERS:
            is_query = name.startswith("query")
            arrivals = groups if name in ("key_empty", "value_empty") else 1
            counted(text, name, groups if is_query else stages, arrivals)
        if self.knobs.in_turn:
            counted(text, "order", groups, 1)
        text.line("fence_async_shared()")
