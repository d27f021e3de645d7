"""Where attention's tasks, rows and blocks lie: the workspace, the queries turned, keys and values in f32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from fuseplan.backends.attending import Heads
from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import with_lane
from fuseplan.backends.cpu.loops import larger, pieces
from fuseplan.backends.cpu.model import itemsize
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target

MOST = 12  # rows of accumulators in a tile
LINE = 16  # elements: parts of the workspace begin on a cache line


@dataclass(frozen=True)
class AttentionKnobs(CpuTemplate):
    """The fields of `Attention`, which says what they mean."""

    vectors: int
    tiles: int
    keys: int


@dataclass(frozen=True)
class Task:
    """Where a task's queries and keys are.

    Attributes:
        batch, head, key_head: its image, the first of its heads, and the head of its keys.
        row: the first of its rows.
        low, high: the first key that it sees, and the one past the last.
        first, last: the places of its first and last query among the keys.
    """

    batch: Index
    head: Index
    key_head: Index
    row: Index
    low: Index
    high: Index
    first: Index
    last: Index


@dataclass(frozen=True)
class Rows:
    """A tensor of rows: where it lies, and elements from an image, head, row and element to the next."""

    pointer: Value
    dtype: str
    strides: tuple[int, ...]
    size: int


class AttentionTiles:
    """The tasks of one kernel, and a thread's own memory.

    Attributes:
        by: what a gradient is by; "" for attention.
        tensors: those that have rows, by their names.
        width: queries of a tile.
        block: queries of a task, of which there are `blocks` for each group of heads.
        sums: rows of accumulators.
        beside: the operands by their names in the operator.
        padded: elements of a row of results in the workspace.
        rooms: the parts of the workspace by their names; `size` elements in all.
    """

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, target: Target) -> None:
        self.frame = Frame(knobs, kernel, target, workspace=True)
        self.knobs, self.kernel, self.made = knobs, self.frame.kernel, self.frame.kernel.attention
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.heads = Heads.of(self.kernel, self.lanes)
        self.by = self.heads.by
        self.width = knobs.vectors * self.lanes  # queries of a tile
        self.block = knobs.tiles * self.width
        self.blocks = -(-self.heads.rows // self.block)
        self.sums = min(MOST, (target.vector_registers - 1) // knobs.vectors - 1)
        self.beside = {each.role: each for each in kernel.operands if each.strides}
        self.padded = -(-max(self.made.features, self.made.size) // self.lanes) * self.lanes
        self.tensors = self._tensors()
        self.rooms, self.size = self._rooms()

    # ---- the workspace

    def _tensors(self) -> dict[str, Rows]:
        n, c, h, s = self.kernel.src.element_strides
        src = Rows(self.frame.pointer("src"), self.kernel.src.dtype, (n, h, s, c), self.made.size)
        beside = {
            role: Rows(self.pointer(role), each.dtype, each.strides, each.shape[-1])
            for role, each in self.beside.items()
            if role in ("key", "value", "grad")
        }
        return {"query": src, **beside}

    def parts(self) -> dict[str, int]:
        """Elements of the parts of a thread's own memory that depend on what the kernel computes."""
        made = self.made
        return {
            "query": self.block * made.size,
            "results": self.block * made.features,
            "scores": (self.knobs.keys + self.sums) * self.width,
            **dict.fromkeys(("top", "total", "lse"), self.block),
        }

    def _rooms(self) -> tuple[dict[str, Value], int]:
        """A thread's own memory: parts by their names, and elements in all."""
        knobs, per_element = self.knobs, 8 // itemsize(self.kernel)
        sizes = {**self.parts(), "rows": self.lanes * self.padded, "place": self.block}
        sizes |= {"head": self.block} if "h" in self.made.places else {}
        sizes |= {
            f"{role}_rows": self.block * per_element for role in ("bias", "mask") if role in self.beside
        }
        for role, rows in self.tensors.items():
            if role not in sizes and self.is_copied(role):
                sizes[role] = (knobs.keys + self.sums) * rows.size
        padded = {name: -(-size // LINE) * LINE for name, size in sizes.items()}
        total, rooms = sum(padded.values()), dict[str, Value]()
        own = self.b.at(self.frame.pointer("workspace"), self.frame.thread * total)
        start = 0
        for name, size in padded.items():
            rooms[name] = self.b.at(own, start)
            start += size
        return rooms, total

    def is_copied(self, role: str) -> bool:
        """Whether a block of the tensor is widened, or its rows made dense, before it is multiplied."""
        return self.tensors[role].dtype != self.kernel.compute_dtype or self.is_moved(role)

    def is_moved(self, role: str) -> bool:
        """Whether the elements of a row lie apart, or are turned."""
        return self.tensors[role].strides[-1] != 1 or (role == "key" and self.made.rotary > 0)

    def room(self, name: str, index: Index = 0) -> Value:
        """The address of an element of a part of the workspace."""
        return self.b.at(self.rooms[name], index)

    def task(self, number: Value) -> Task:
        """The task of a number: blocks of queries one after another, each for all groups of heads."""
        b, made, heads = self.b, self.made, self.heads
        per_image, is_key = heads.per_image, self.by == "key"
        block, group = number // heads.groups, number % heads.groups
        block = self.blocks - 1 - block if made.is_causal and not is_key else block
        head = group % per_image * heads.members
        batch, row = group // per_image, block * self.block
        low, high = b.const(0, I64), b.const(heads.others, I64)
        first: Index = row + heads.offset
        last: Index = b.smaller(row + self.block, heads.rows) + (heads.offset - 1)
        if heads.members > 1:
            first, last = made.offset, made.queries - 1 + made.offset
        if made.is_padded and not is_key:
            high = self._smaller(high, self.length(batch))
        if heads.front:
            high = self._smaller(high, last + heads.front)
        if heads.back:
            low = larger(self.b, low, first - (heads.back - 1))
        key_head = head if is_key else head // made.group
        return Task(batch, head, key_head, row, low, high, first, last)

    def length(self, batch: Index) -> Value:
        """How many keys an image has."""
        b = self.b
        return b.convert("sext", b.load(b.at(self.pointer("lengths"), batch, "i32"), "i32"), I64)

    def _smaller(self, a: Index, other: Index) -> Value:
        return self.b.const(self.b.smaller(a, other), I64)

    def pointer(self, role: str) -> Value:
        """The address that an operand lies at."""
        return self.frame.pointer("operand", self.beside[role].key)

    def begin(self, task: Task) -> None:
        """The queries of all tiles, turned and scaled; where their rows begin in other tensors."""
        b, made = self.b, self.made
        with b.loop(0, self.block, self.lanes, name="group") as group:
            self.turn(task, group, {"query": made.scale if made.is_scaled else 1.0})
            self._rotate_queries(task, group)
            for name, value in (("top", -inf), ("total", 0.0)):
                b.store(b.number(value), self.room(name, group))
        self.clear("results")

    def clear(self, *names: str) -> None:
        """Zero in all of some parts."""
        for name in names:
            with self.b.loop(0, self.parts()[name], self.lanes, name="element") as element:
                self.b.store(self.b.number(0.0), self.room(name, element))

    def turn(self, task: Task, group: Value, scales: Mapping[str, float]) -> None:
        """As many rows of some tensors as a vector has lanes, turned and scaled."""
        b, lanes = self.b, self.lanes
        places = [self.head_and_query(task, group + lane) for lane in range(lanes)]
        for lane, (head, query) in enumerate(places):
            self._note(task, group + lane, head, query)
        for role, scale in scales.items():
            tensor = self.tensors[role]
            kind, (n, h, s, c) = storage.element_type(tensor.dtype), tensor.strides
            begins = [
                b.at(tensor.pointer, task.batch * n + head * h + query * s, kind) for head, query in places
            ]
            for start in range(0, tensor.size, lanes):
                count = min(lanes, tensor.size - start)
                rows = [storage.read_at(b, tensor.dtype, each, start * c, count, c) for each in begins]
                for place, column in enumerate(transposed(b, rows)[:count]):
                    b.store(column * scale, self.turned(role, tensor.size, group, start + place))

    def _angles(self, place: Index) -> list[Value]:
        """Where the cosines and the sines of a place begin."""
        cos = self.beside["cos"]
        kind, begin = storage.element_type(cos.dtype), place * cos.strides[0]
        return [self.b.at(self.pointer(name), begin, kind) for name in ("cos", "sin")]

    def _rotate_queries(self, task: Task, group: Value) -> None:
        """Turns the pairs of some queries by the angles of their places."""
        b, made, (step, apart) = self.b, self.made, self.made.pair_steps
        if not made.rotary:
            return
        dtype = self.kernel.src.dtype
        kind = storage.element_type(dtype)
        queries = [self.head_and_query(task, group + lane)[1] for lane in range(self.lanes)]
        begins = [self._angles(query + made.offset) for query in queries]
        with b.loop(0, made.rotary // 2, name="pair") as pair:
            angles = [Value(b, b.vector, "zeroinitializer")] * 2
            for lane, begin in enumerate(begins):
                one = [storage.read_one(b, dtype, b.at(each, pair, kind)) for each in begin]
                angles = [with_lane(b, known, lane, each) for known, each in zip(angles, one, strict=True)]
            first = pair * step
            places = [self.turned("query", made.size, group, at) for at in (first, first + apart)]
            for value, place in zip(rotated(*map(b.load, places), *angles), places, strict=True):
                b.store(value, place)

    def _rotate_key(self, row: Value, place: Index) -> None:
        """Turns the pairs of a key in the workspace by the angles of its place."""
        b, made, (step, apart), own = self.b, self.made, self.made.pair_steps, self.kernel.compute_dtype
        begins, key = self._angles(place), self.room("key", row * made.size)

        def turn(at: Index, count: int) -> None:
            angles = [storage.read_at(b, self.kernel.src.dtype, each, at, count) for each in begins]
            places = [at * step, at * step + apart]
            pair = [storage.read_at(b, own, key, each, count, step) for each in places]
            for value, each in zip(rotated(*pair, *angles), places, strict=True):
                storage.write_at(b, own, value, key, each, count, step)

        pieces(b, made.rotary // 2, self.lanes, turn, name="pair")

    def turned(self, name: str, size: int, group: Value, element: Index) -> Value:
        """The place of one element of some queries: tiles, elements, queries."""
        tile, within = group // self.width, group % self.width
        return self.room(name, (tile * size + element) * self.width + within)

    def head_and_query(self, task: Task, row: Value) -> tuple[Index, Index]:
        """Of a row of the task; rows past the end are the last one."""
        row = self._smaller(task.row + row, self.heads.rows - 1)
        if self.heads.members == 1:
            return task.head, row
        return task.head + row // self.made.queries, row % self.made.queries

    def _note(self, task: Task, row: Value, head: Index, query: Index) -> None:
        """Keeps a row's place among the keys, its head, and where it begins in bias and mask."""
        b, made = self.b, self.made
        b.store(self.real(query + self.heads.offset), self.room("place", row))
        if "head" in self.rooms:
            b.store(self.real(head), self.room("head", row))
        at = {"b": task.batch, "h": head, "s": query, "t": 0}
        if self.by == "key":
            at |= {"h": 0, "s": 0, "t": query}
        for role, axes in (("bias", made.bias_axes), ("mask", made.mask_axes)):
            if axes:
                steps = zip(axes, self.beside[role].strides, strict=True)
                where: Index = 0
                for axis, step in steps:
                    where = where + at[axis] * step
                b.store(b.const(where, I64), b.at(self.rooms[f"{role}_rows"], row, I64))

    def real(self, number: Index) -> Value:
        """A whole number as an element."""
        b = self.b
        return b.op(b.element, f"sitofp i64 {b.const(number, I64).name} to {b.element}")

    def rows(self, role: str, task: Task, head: Index, first: Value, count: Index) -> tuple[Value, int, bool]:
        """The rows of a block: where they begin, elements from one to the next, and if more may be read."""
        b, tensor = self.b, self.tensors[role]
        n, h, t, step = tensor.strides
        kind, size = storage.element_type(tensor.dtype), tensor.size
        begin = b.at(tensor.pointer, task.batch * n + head * h + first * t, kind)
        if not self.is_copied(role):
            return begin, t, False
        with b.loop(0, count, name="row") as row:
            source = b.at(begin, row * t, kind)

            def copy(at: Index, width: int) -> None:
                value = storage.read_at(b, tensor.dtype, source, at * step, width, step)
                b.store_first(value, self.room(role, row * size + at), width)

            pieces(b, size, self.lanes, copy, name="element")
            if role == "key" and self.made.rotary:
                self._rotate_key(row, first + row)
        return self.rooms[role], size, True


def rotated(one: Value, other: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Two elements of a pair, turned by an angle."""
    return one * cos - other * sin, other * cos + one * sin
