"""Places for the values of a scheduled graph, and the steps of a run with the copies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fuseplan.graph.cut import Cut, Range, Site
from fuseplan.graph.graph import Graph
from fuseplan.graph.layouts import strides_of
from fuseplan.graph.memory import Buffer, Span, are_beside
from fuseplan.graph.node import Node
from fuseplan.graph.op import GraphOp, Tensor
from fuseplan.graph.ops import Concat, Reshape, Slice
from fuseplan.graph.schedule import Unit
from fuseplan.graph.type import Type, numpy_dtype
from fuseplan.graph.write import Joined, names_in
from fuseplan.language.layouts import same_strides
from fuseplan.language.tensor import Dense, TensorSpec


@dataclass(frozen=True)
class Placed:
    """A value in the arena: a buffer, or views of one."""

    buffer: Buffer
    views: tuple[GraphOp | Span, ...] = ()

    def array(self, memory: Tensor) -> Tensor:
        """The tensor in the arena."""
        return self.viewed(self.buffer.array(memory))

    def viewed(self, array: Tensor) -> Tensor:
        """The views of a tensor in the place of the buffer's."""
        for op in self.views:
            (array,) = op.evaluate([array])
        return array


GPU_LINE = 16  # bytes: what threads of a GPU move at once, and what its copy engines take
Held = Placed | str  # a value in the arena, or the name of one that a run holds wherever it is


@dataclass(frozen=True)
class Copy:
    """Puts a value into a buffer."""

    src: Held
    dst: Placed
    value: str


@dataclass(frozen=True)
class Launch:
    """Runs a site's kernel; operands in memory that stays are bound once."""

    site: Site
    src: Placed
    dst: Placed
    bound: Mapping[str, Placed]
    given: Mapping[str, Held]


@dataclass(frozen=True)
class Compute:
    """Runs an operator of ours by NumPy; its result is a buffer's, or held."""

    node: Node
    inputs: tuple[Held, ...]
    dst: Placed | None


@dataclass(frozen=True)
class Call:
    """Runs another library's operators; the results are held."""

    unit: Unit
    inputs: tuple[Held, ...]


Step = Copy | Launch | Compute | Call


@dataclass
class Placement:
    """The steps of a run, and where each value is.

    Attributes:
        cut: the graph and its plans.
        steps: in order.
        buffers: of the arena.
        at: the values in the arena; all others are held by the run.
        dropped: the held values that no step needs any more, by the last step that reads them.
    """

    cut: Cut
    steps: list[Step] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    at: dict[str, Placed] = field(default_factory=dict)
    dropped: dict[int, list[str]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.cut.graph


def place(cut: Cut, units: Sequence[Unit]) -> Placement:
    """The steps of the units, with copies where a value lies in another way than its reader takes."""
    placer = _Placer(Placement(cut))
    for unit in units:
        placer.add(unit)
    return placer.finish()


@dataclass
class _Placer:
    made: Placement
    copies: dict[tuple[str, tuple[int, ...]], Placed] = field(default_factory=dict)

    def add(self, unit: Unit) -> None:
        """The steps of a unit."""
        if unit.site is not None:
            self._launch(unit.site)
        elif unit.library:
            self._step(Call(unit, tuple(map(self._held, unit.reads))))
        elif unit.is_view and self._view(unit.nodes[0]):
            return
        elif self.made.cut.joined & {*unit.nodes[0].outputs}:
            self._join(unit.nodes[0])
        else:
            self._compute(unit.nodes[0])

    def finish(self) -> Placement:
        """All steps; outputs live until the end, and held values until their last reader."""
        end = len(self.made.steps)
        for name in self.made.graph.outputs:
            if name in self.made.at:
                self.made.at[name].buffer.last = end
        last: dict[str, int] = {}
        for index, step in enumerate(self.made.steps):
            last |= {each: index for each in inputs_of(step) if isinstance(each, str)}
        for name, index in last.items():
            if name not in self.made.graph.outputs and name not in self.made.graph.constants:
                self.made.dropped.setdefault(index, []).append(name)
        return self.made

    def _step(self, step: Step) -> None:
        index = len(self.made.steps)
        for each in (*inputs_of(step), getattr(step, "dst", None)):
            if isinstance(each, Placed):
                each.buffer.last = max(each.buffer.last, index)
        self.made.steps.append(step)

    def _held(self, name: str) -> Held:
        return self.made.at.get(name, name)

    def _new(self, made: Type | TensorSpec, strides: Sequence[int]) -> Placed:
        index = len(self.made.steps)
        buffer = Buffer(made.shape or (), tuple(strides), numpy_dtype(made.dtype), index, index)
        self.made.buffers.append(buffer)
        return Placed(buffer)

    def _launch(self, site: Site) -> None:
        line = line_of(site)
        src = self._beside(site) if site.beside else self._as(site.src, site.plan.src, line)
        named = {key: each for key, each in site.operands.items() if names_in(each)}
        declared = {each.key: each for each in site.plan.operands}
        bound, given = dict[str, Placed](), dict[str, Held]()
        for key, each in named.items():
            spec = declared[key].spec
            if isinstance(each, Joined):
                given[key] = self._joined(each)
            elif spec is not None and isinstance(each, str):
                bound[key] = self._as(each, spec, line)
            else:
                given[key] = self._held(str(each))
        made = site.plan.output
        dst = self._range(site.into) if site.into else None
        if dst is None or not _begins(dst, line):
            dst = self._new(made, made.element_strides)
        self.made.at[site.dst] = dst
        self.made.at |= {name: replace(dst, views=(op,)) for name, op in site.ranges.items()}
        self._step(Launch(site, src, dst, bound, given))

    def _joined(self, joined: Joined, strides: Sequence[int] = ()) -> Placed:
        """Values that a plan reads as one tensor, copied into one."""
        op = Concat(joined.axis)
        (made,) = op.infer([self.made.graph.types[each] for each in joined.names])
        dst = self._new(made, strides or strides_of(made))
        inputs = tuple(map(self._held, joined.names))
        self._step(Compute(Node(op, joined.names, (" ".join(joined.names),)), inputs, dst))
        return dst

    def _beside(self, site: Site) -> Placed:
        """The tensor that values make which lie side by side in one buffer; else copies of them."""
        assert site.beside is not None  # by the caller
        axis, parts = site.beside.axis, [self.made.at.get(name) for name in site.beside.names]
        first, placed = parts[0], [each for each in parts if each is not None]
        if first is not None and len(placed) == len(parts):
            memories = {id(each.buffer): each.buffer.alone() for each in placed}
            arrays = [each.viewed(memories[id(each.buffer)]) for each in placed]
            if are_beside(arrays, axis) and _begins(first, line_of(site)):
                span = Span(axis, site.plan.src.shape[axis])
                return replace(first, views=(*first.views, span))
        return self._joined(site.beside, site.plan.src.element_strides)

    def _as(self, name: str, spec: TensorSpec | Dense, line: int) -> Placed:
        """A value as an operator of plans takes it: a copy where it lies in another way, or anywhere.

        It begins at a multiple of `line` bytes.

        The value may lack axes of extent 1 that the operator's tensor has.
        """
        held, made = self._held(name), self.made.graph.types[name]
        if made.shape != spec.shape and isinstance(held, Placed):
            held = replace(held, views=(*held.views, Reshape(spec.shape)))
        strides = spec.element_strides
        if isinstance(held, Placed) and _lies(held, strides) and _begins(held, line):
            return held
        known = self.copies.get((name, strides))
        if known is None:
            known = self.copies[name, strides] = self._new(replace(made, shape=spec.shape), strides)
            self._step(Copy(self._held(name), known, name))
        return known

    def _view(self, node: Node) -> bool:
        """Places a view of a value in the arena; False where the value's elements do not lie so."""
        held = self._held(node.inputs[0])
        if isinstance(held, str):
            return False
        made = replace(held, views=(*held.views, node.op))
        memory = held.buffer.alone()
        if not _shares(memory, made.viewed(memory)):
            return False
        self.made.at[node.outputs[0]] = made
        return True

    def _range(self, into: Range) -> Placed:
        """A part of a joined value, which has its place from its first part on."""
        name, *where = into
        if name not in self.made.at:
            made = self.made.graph.types[name]
            self.made.at[name] = self._new(made, strides_of(made))
        return replace(self.made.at[name], views=(Slice(*where),))

    def _join(self, node: Node) -> None:
        """Copies the parts of a joined value that no plan wrote in place."""
        assert isinstance(node.op, Concat)  # by the cut
        axis, first = node.op.axis, 0
        for name in node.inputs:
            end = first + (self.made.graph.types[name].shape or ())[axis]
            held, part = self._held(name), self._range(Range(node.outputs[0], axis, first, end))
            if not isinstance(held, Placed) or held.buffer is not part.buffer or held.views != part.views:
                self._step(Copy(held, part, name))
            first = end

    def _compute(self, node: Node) -> None:
        inputs = tuple(map(self._held, node.inputs))
        made = self.made.graph.types[node.outputs[0]]
        dst = None
        if (made.is_float or made.is_quantized) and not any(node.outputs[1:]):
            dst = self.made.at[node.outputs[0]] = self._new(made, strides_of(made))
        self._step(Compute(node, inputs, dst))


def inputs_of(step: Step) -> tuple[Held, ...]:
    """The values that a step reads."""
    if isinstance(step, Launch):
        return (step.src, *step.bound.values(), *step.given.values())
    return (step.src,) if isinstance(step, Copy) else step.inputs


def made_by(step: Step) -> tuple[str, ...]:
    """The values that a step makes; a copy makes none."""
    if isinstance(step, Launch):
        return step.site.results
    if isinstance(step, Compute):
        return tuple(filter(None, step.node.outputs))
    return step.unit.writes if isinstance(step, Call) else ()


def line_of(site: Site) -> int:
    """Bytes that tensors of a site begin at a multiple of."""
    return GPU_LINE if site.records.target.processors else 1


def _begins(held: Placed, line: int) -> bool:
    """Whether a value begins at a multiple of so many bytes, as its buffer does."""
    memory = held.buffer.alone() if line > 1 else None
    return memory is None or (held.viewed(memory).ctypes.data - memory.ctypes.data) % line == 0


def _lies(held: Placed, strides: Sequence[int]) -> bool:
    """Whether a value has these strides, in the memory of its buffer."""
    memory = held.buffer.alone()
    array = held.viewed(memory)
    own = [step // array.itemsize for step in array.strides]
    return _shares(memory, array) and same_strides(array.shape, own, strides)


def _shares(array: Tensor, viewed: Tensor) -> bool:
    return np.may_share_memory(viewed, array)  # a copy's memory lies elsewhere as a whole
