"""Applies a plan's elementwise operators to vectors that are in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import mod

from fuseplan.backends import blocks
from fuseplan.backends.cpu import dialect, storage
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64, PTR
from fuseplan.backends.cpu.lanes import places_from, with_lane
from fuseplan.backends.dependence import Dependence, children
from fuseplan.backends.parts import End
from fuseplan.kernels.counted import Counted
from fuseplan.kernels.kernel import KernelOperand, Stage
from fuseplan.language.parts import part_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.scalar import Scalar, functions, leaf
from fuseplan.system.locks import cached_property

# Scalar functions that stages written out may have. A kernel has stages for 5 to 40 vectors in its code, so
# more become a function that is called for each vector. Behind a 1x1 convolution LLVM takes 23 s for 50 times
# `gelu` written out, and 0.3 s for them as a function; the kernel is as fast.
_WRITTEN_OUT = 48
_X = leaf("x")


@dataclass(frozen=True)
class Place:
    """Where the lanes of a vector lie in the tensor that the stages are applied to.

    Attributes:
        element: lane 0's place in storage, in elements.
        channel: lane 0's channel.
        along_channels: the next lane is the next channel; else the next position of the same channel.
        count: lanes that exist.
        inside: lane 0's place in its image, as an operand per activation is stored; unless told, what remains
            of `element`.
        step: elements from a lane's place in storage to the next lane's.
        others: lane 0's place in each operand with axes of its own, by key, and elements to the next lane's.
    """

    element: Index
    channel: Index
    along_channels: bool
    count: int
    inside: Index | None = None
    step: int = 1
    others: Mapping[str, tuple[Index, int]] = field(default_factory=dict)


class Formulas:
    """Formulas of one element, ready to be evaluated anywhere in a function.

    Args:
        stages: applied one after the other.
        expressions: of what the stages give; `values` has them.
        operands: what the leaves are, besides `x`, parameters and indices.
        parameters: keys, in the order in which they lie in memory.
        pointers: where each operand lies, by key; `parameters` for the parameters.
        spec: the tensor that the stages are applied to, for operands whose places follow from an element's.
        start: of the first place that a leaf means in an operand with axes of its own.
        indices: that the formulas read.
    """

    def __init__(
        self,
        builder: Builder,
        stages: Iterable[Stage],
        expressions: Iterable[Scalar],
        operands: Iterable[KernelOperand],
        parameters: Iterable[str],
        pointers: Mapping[str, Value],
        spec: TensorSpec,
        start: Callable[[KernelOperand, str], int] = lambda operand, name: 0,
        indices: Iterable[Counted] = (),
    ) -> None:
        self.b, self.lanes, self._start = builder, builder.lanes, start
        self.stages, self.expressions = tuple(stages), tuple(expressions)
        self._operands = {operand.key: operand for operand in operands}
        self._saved = tuple(stage.saves for stage in self.stages if stage.saves)
        self._indices = {index.key: index for index in indices}
        self._depends = Dependence(self._operands, (*self._saved, *self._indices))
        self._parameters = {key: index for index, key in enumerate(parameters)}
        self._spec, self._pointers = spec, pointers
        self._table = dialect.table(builder)

    def apply(
        self, x: Value, place: Place, known: dict[object, Value], saved: dict[str, Value] | None = None
    ) -> Value:
        """The vector after all stages.

        `known` keeps what depends on the channel alone; give the same dictionary for vectors written in the
        same stretch of straight code, or begun before a loop with `prepare`. `saved` has parts of src, and
        takes the values of stages that have names.
        """
        kept = {} if saved is None else saved
        if self._is_long:
            return self._call(x, place, known, kept)
        return self._applied(x, place, known, {}, kept)

    def _applied(
        self,
        x: Value,
        place: Place,
        known: dict[object, Value],
        given: Mapping[object, Value],
        saved: dict[str, Value],
    ) -> Value:
        """The stages written out; `given` are operands per element and activation that are at hand."""
        for stage in self.stages:
            self.b.comment(stage.op_text)
            x = self._value(stage.expression, x, place, known, {**given, **_leaves(saved)})
            if stage.saves:
                saved[stage.saves] = x
        return x

    # ---- many stages

    @cached_property
    def _is_long(self) -> bool:
        return sum(functions(stage.expression) for stage in self.stages) > _WRITTEN_OUT

    @cached_property
    def _inputs(self) -> list[Scalar]:
        """All that the stages are made of: x, operands that vary with the position, what does not vary."""
        parts = (part for stage in self.stages for part in self._depends.inputs(stage.expression))
        made = set(map(leaf, self._saved))
        return list(dict.fromkeys((_X, *(part for part in parts if part not in made))))

    @cached_property
    def _room(self) -> Value:
        """Where a call finds its inputs, and puts its result and behind the inputs the values with names."""
        return self.b.buffer(self.lanes * (len(self._inputs) + len(self._saved)))

    def _call(self, x: Value, place: Place, known: dict[object, Value], saved: dict[str, Value]) -> Value:
        b = self.b
        for index, node in enumerate(self._inputs):
            b.store(self._value(node, x, place, known, _leaves(saved)), b.at(self._room, index * self.lanes))
        b.line(f"call void @{self._function}(ptr {self._room.name}) noinline")
        saved |= {key: b.load(b.at(self._room, at)) for key, at in self._kept()}
        return b.load(self._room)

    def _kept(self) -> Iterator[tuple[str, int]]:
        """Where in the room a call puts each value with a name."""
        behind = range(len(self._inputs), len(self._inputs) + len(self._saved))
        yield from ((key, place * self.lanes) for key, place in zip(self._saved, behind, strict=True))

    @cached_property
    def _function(self) -> str:
        """The name of the function of all stages, which is written when it is first called."""
        module = self.b.module
        name = f"stages{len(module.functions)}"
        b = Builder(
            module, name, [(PTR, "room")], element=self.b.element, lanes=self.lanes, linkage="internal"
        )
        (room,) = b.parameters
        x, *others = (b.load(b.at(room, index * self.lanes)) for index in range(len(self._inputs)))
        operands, indices = self._operands.values(), self._indices.values()
        inside = Formulas(b, self.stages, (), operands, self._parameters, {}, self._spec, indices=indices)
        place, known, given = Place(0, 0, False, self.lanes), dict[object, Value](), dict[object, Value]()
        for node, value in zip(self._inputs[1:], others, strict=True):
            (given if self._depends.varies(node) else known)[self._key(node, place)] = value
        saved: dict[str, Value] = {}
        b.store(inside._applied(x, place, known, given, saved), room)
        for key, at in self._kept():
            b.store(saved[key], b.at(room, at))
        b.finish()
        return name

    def values(self, x: Value | None, place: Place, known: dict[object, Value]) -> list[Value]:
        """What each of the expressions makes of the vector that the stages give."""
        saved: dict[str, Value] = {}
        if x is not None:
            x = self.apply(x, place, known, saved)
        local = _leaves(saved)
        return [self._value(expression, x, place, known, local) for expression in self.expressions]

    def prepare(self, place: Place, known: dict[object, Value]) -> None:
        """Evaluates what depends on the channel alone, so that a loop over positions need not."""
        for node in self.invariants():
            self.evaluate(node, place, known)

    def invariants(self, *, channel: bool | None = None) -> list[Scalar]:
        """The largest parts that are the same for all positions of a channel, each once.

        `channel` asks for those that differ between channels, or for those that do not.
        """
        formulas = (*(stage.expression for stage in self.stages), *self.expressions)
        parts = (part for formula in formulas for part in self._depends.invariants(formula))
        found = dict.fromkeys(parts)
        return [node for node in found if channel is None or self._depends.channelled(node) == channel]

    def evaluate(self, node: Scalar, place: Place, known: dict[object, Value]) -> Value:
        """The value of one of the `invariants` at a place, kept in `known`."""
        return self._value(node, None, place, known, {})

    def keep(self, node: Scalar, place: Place, value: Value, known: dict[object, Value]) -> None:
        """Puts the value of one of the `invariants`, evaluated elsewhere, into `known`."""
        known[self._key(node, place)] = value

    def _key(self, node: Scalar, place: Place) -> object:
        is_of_channel = self._depends.channelled(node)
        return (node, _written(place.channel), place.along_channels) if is_of_channel else node

    def _value(
        self,
        node: Scalar,
        x: Value | None,
        place: Place,
        known: dict[object, Value],
        local: dict[object, Value],
    ) -> Value:
        """The value of a tree: parts that vary are shared within this stage, the others within `known`."""
        scope = local if self._depends.varies(node) else known
        key = self._key(node, place)
        if key in scope:
            return scope[key]
        if node.fn == "leaf":
            value = self._leaf(str(node.args[0]), x, place)
        elif node.fn == "const":
            value = self._table["const"](node.args[0])
        else:
            arguments = [self._value(child, x, place, known, local) for child in children(node)]
            value = self._table[node.fn](*arguments)
        scope[key] = value
        return value

    def _leaf(self, name: str, x: Value | None, place: Place) -> Value:
        b = self.b
        if name == "x":
            if x is None:
                raise ValueError("x is not known before the loop over positions")
            return x
        if name in self._parameters:
            return b.broadcast(self._pointers["parameters"], self._parameters[name])
        return self._index(name, place) if name in self._indices else self._operand(name, place)

    def _index(self, name: str, place: Place) -> Value:
        """The indices of the lanes, from their places in storage."""
        element = places_from(self.b, place.element, place.step)
        found = self.b.const(0, element.type)
        for outer, inner, step in blocks.counting(self._indices[name], self._spec):
            at = reduce(mod, outer, element)
            found = found + (at // inner if inner > 1 else at) * step
        return found

    def _operand(self, name: str, place: Place) -> Value:
        """The elements that a leaf names in an operand."""
        b, (key, _) = self.b, part_of(name)
        operand, pointer = self._operands[key], self._pointers[key]
        computed = next(name for name, element in storage.COMPUTED.items() if element == b.element)
        dtype = computed if operand.packed else operand.dtype
        if operand.strides:
            where, step = place.others[key]
            where = where + self._start(operand, name)
            if not step:
                return b.broadcast(pointer, where)
            return storage.read_at(b, dtype, pointer, where, place.count, step)
        if not operand.packed:
            return storage.read_at(b, dtype, pointer, place.element, place.count, place.step)
        if operand.is_scattered:
            return self._gathered(operand, pointer, place)
        if operand.is_inside:
            inside = place.element if place.inside is None else place.inside
            is_whole = 1 in operand.axes and place.inside is not None
            inside = inside if is_whole else inside % operand.size
            return storage.read_at(b, dtype, pointer, inside, place.count, place.step)
        if not operand.axes:
            return b.broadcast(pointer)
        if place.along_channels:
            return b.load_first(b.at(pointer, place.channel), place.count, b.vector)
        return b.broadcast(pointer, place.channel)

    def _gathered(self, operand: KernelOperand, pointer: Value, place: Place) -> Value:
        """An operand that has some axes, or blocks of them: each lane's element from its place in storage."""
        b, places = self.b, blocks.places(operand, self._spec)
        made = Value(b, b.vector, "zeroinitializer")
        for number in range(place.count):
            element, at = place.element + number * place.step, b.const(0, I64)
            for outer, inner, step in places:
                at = at + reduce(mod, outer, element) // inner * step
            made = with_lane(b, made, number, b.load(b.at(pointer, at), b.element))
        return made


class Elementwise(Formulas):
    """The stages before or after a contraction.

    Args:
        role: `prologue`, `between` or `epilogue`.
        builder: the function they are applied in; the frame's body unless told.
        pointers: what the operands' slots hold in that function, by key; `parameters` for the parameters.
        number: of the part that they are applied to, or make.
    """

    def __init__(
        self,
        frame: Frame,
        role: str,
        builder: Builder | None = None,
        pointers: Mapping[str, Value] | None = None,
        number: int = 0,
    ) -> None:
        kernel, end = frame.kernel, End.of(frame.kernel, role)
        spec = kernel.dst if role == "epilogue" else kernel.src
        stages = kernel.stages(role)
        super().__init__(
            builder or frame.body,
            [stage.of_part(number) for stage in stages],
            (),
            (operand for operand in kernel.operands if operand.role == role),
            kernel.parameters,
            pointers or frame.operand_pointers,
            spec,
            lambda operand, name: end.start(operand, name, number),
            (index for index in kernel.indices if index.role == role),
        )


class Kept:
    """Values of the stages that depend on the feature alone: made for features side by side, then spread.

    Sixteen square roots at a time take as long as one. An operand as it is lies in memory already.
    """

    def __init__(self, stages: Formulas, features: int) -> None:
        self.b, self.stages = stages.b, stages
        nodes = [node for node in stages.invariants(channel=True) if node.fn != "leaf"]
        room = -(-features // stages.lanes) * stages.lanes
        self._rooms = {node: self.b.buffer(room) for node in nodes}

    def fill(self, feature: Index, count: int) -> None:
        """Makes the values of `count` features from `feature` on."""
        lanes = self.stages.lanes
        for start in range(0, count, lanes) if self._rooms else ():
            known: dict[object, Value] = {}
            place = Place(0, feature + start, True, min(lanes, count - start))
            for node, room in self._rooms.items():
                self.b.store(self.stages.evaluate(node, place, known), self.b.at(room, start))

    def spread(self, number: int, place: Place, known: dict[object, Value]) -> None:
        """Puts the values of one of those features, that of `place`, into `known`."""
        for node, room in self._rooms.items():
            self.stages.keep(node, place, self.b.broadcast(room, number), known)


def finish(
    frame: Frame,
    stages: Formulas,
    value: Value,
    place: Place,
    known: dict[object, Value],
    *,
    stream: bool = False,
    parts: Mapping[str, Value] | None = None,
) -> None:
    """Applies the stages to a vector, and writes it and what is saved.

    `stream`: dst past the caches; `parts`: of src, by the names of their leaves.
    """
    b, dtype, saved = stages.b, frame.kernel.dst.dtype, dict(parts or {})
    value = stages.apply(value, place, known, saved)
    lies = (place.element, place.count, place.step)
    storage.write_at(b, dtype, value, frame.pointer("dst"), *lies, stream=stream)
    for output in frame.kernel.saved.values():
        pointer = frame.pointer("result", output.key)
        storage.write_at(b, output.dtype, saved[output.key], pointer, *lies)


def _leaves(saved: Mapping[str, Value]) -> dict[object, Value]:
    """Values with names as formulas look for them."""
    return {leaf(key): value for key, value in saved.items()}


def _written(index: Index) -> object:
    return index if isinstance(index, int) else index.name
