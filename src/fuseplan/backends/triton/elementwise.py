"""Applies a plan's elementwise operators to a tile that is in registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fuseplan.backends import blocks
from fuseplan.backends.dependence import Dependence, children, largest
from fuseplan.backends.parts import End
from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import CHANNEL, Kernel, KernelOperand, Stage
from fuseplan.language.parts import part_of
from fuseplan.scalar import Scalar, leaves_of

_PREFIXES = {"operand": "op_", "parameter": "par_", "result": "res_"}


def argument(slot: Slot) -> str:
    """The name of the kernel's argument: `src`, `op_bias`, `par_alpha`, `dst`, `res_mean`, `workspace`."""
    return _PREFIXES[slot.kind] + slot.key if slot.kind in _PREFIXES else slot.kind


@dataclass
class Known:
    """Names of what is computed already and does not depend on the position; see `Elementwise.prepare`."""

    channel: str = ""
    values: dict[Scalar, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """How a tile lies: texts of index tensors, each broadcastable to the tile.

    Attributes:
        element: offset of each element in the storage of the tensor that the stages are applied to.
        channel: its channel, such as `cols[None, :]`.
        inside: its offset within one image in storage order; "" where no operand is per activation.
        mask: which elements exist; "" for all.
        channel_mask: which channels exist; "" for all.
        others: its offset in each operand with axes of its own, by key.
        held: operands whose tile is in registers already, by key: its name, of any dtype.
        known: what `Elementwise.prepare` gave for its channels.
    """

    element: str
    channel: str
    inside: str
    mask: str
    channel_mask: str
    others: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    known: Known | None = None


def load_src(text: Text, kernel: Kernel, where: object, guard: str = "", hint: str = "") -> str:
    """Loads src's elements at places, `guard` being the arguments of their mask; the name of the tile.

    Where src is the rows of a table, elements of a row that it does not have are NaN.
    """
    lookup = kernel.lookup
    if lookup is None:
        return text.let("x", f"tl.load(src + {where}{guard}{hint})")
    place = text.let("place", f"{where}")
    index = text.let("index", f"tl.load(src + {place} // {lookup.pitch}{guard})")
    if lookup.from_end:
        index = text.let("index", f"tl.where({index} < 0, {index} + {lookup.rows}, {index})")
    is_row = text.let("is_row", f"({index} >= 0) & ({index} < {lookup.rows})")
    begin = f"tl.where({is_row}, {index}, 0).to(tl.int64) * {lookup.features}"
    pointer = argument(Slot("operand", lookup.key))
    loaded = text.let("x", f"tl.load({pointer} + {begin} + {place} % {lookup.pitch}{guard})")
    nan = f"tl.full((), float('nan'), tl.float32).to({named(kernel.src.dtype)})"  # where() makes no bf16
    return text.let("x", f"tl.where({is_row}, {loaded}, {nan})")


def simplified(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages with formulas that take fewer functions."""
    return tuple(replace(stage, expression=dialect.simplified(stage.expression)) for stage in stages)


def formulas_of(kernel: Kernel) -> tuple[Scalar, ...]:
    """All formulas of a kernel with reductions: all its operands lie as dst does, whichever reads them."""
    reduced = (formula for reduction in kernel.statistics for formula in reduction.expressions)
    made = (result.expression for result in kernel.results)
    return (*(stage.expression for stage in (*kernel.prologue, *kernel.epilogue)), *reduced, *made)


class Elementwise:
    """The stages before or after a contraction, ready to be applied anywhere in the kernel's text.

    Args:
        role: `prologue`, `between` or `epilogue`.
        namespace: what the text calls the language: `tl` or `gl`.
        number: of the part that they are applied to, or make.

    Attributes:
        slots: of the operands, parameters and saved values of that role, in the kernel's order.
        given: leaves whose values are at hand, by name: numbers that reductions made, operands that were
            read before, each of them the same at all positions of a channel; parts of x.
    """

    def __init__(self, kernel: Kernel, role: str, text: Text, namespace: str = "tl", number: int = 0) -> None:
        stages = kernel.stages(role)
        self.stages = simplified([stage.of_part(number) for stage in stages])
        self._end, self._number = End.of(kernel, role), number
        self.text, self.namespace = text, namespace
        self.compute = named(kernel.compute_dtype, namespace)
        self.given: dict[str, str] = {}
        self._values: dict[str, str] = {}  # names of the tiles of values that stages saved
        self._storage = Storage(text, namespace, kernel.compute_dtype)
        self._kernel = kernel
        self._numbered = kernel.src if role == "prologue" else kernel.dst  # a place's element counts in it
        self._operands = {op.key: op for op in kernel.operands if op.role == role}
        self._indices = {index.key: index for index in kernel.indices}
        self._saved = tuple(kernel.saved.values()) if role == "epilogue" else ()
        self._depends = Dependence(
            self._operands | _numbers(kernel),
            [*(output.key for output in kernel.saved.values()), *self._indices],
        )
        own = tuple(formula for stage in stages for formula in stage.expressions)
        formulas = formulas_of(kernel) if kernel.statistics else own
        used = frozenset().union(*map(leaves_of, formulas))
        self._parameters = tuple(key for key in kernel.parameters if key in used)
        self._table = dialect.table(text, namespace, kernel.dst.dtype, kernel.compute_dtype)
        lookup = kernel.lookup if role == "epilogue" else None
        self.slots = (
            *((Slot("operand", lookup.key),) if lookup else ()),
            *(Slot("operand", key) for key in self._operands),
            *(Slot("parameter", key) for key in self._parameters),
            *(Slot("result", output.key) for output in self._saved),
        )

    def source(self, where: object, guard: str = "", hint: str = "") -> str:
        """Loads elements of src from their places: its own, or those of the rows of a table that it is."""
        return load_src(self.text, self._kernel, where, guard, hint)

    @property
    def operands(self) -> tuple[KernelOperand, ...]:
        """The operands that the stages read."""
        return tuple(self._operands.values())

    @property
    def counts(self) -> bool:
        """Whether the stages read an element's index."""
        return bool(self._indices)

    def read(self, place: Place) -> Place:
        """Begins reading the operands per element; the place holds them."""
        held = {
            key: self.text.let(key, self._load(argument(Slot("operand", key)), place.element, place.mask))
            for key, operand in self._operands.items()
            if not operand.packed
        }
        return replace(place, held=held)

    def prepare(self, channel: str, channel_mask: str = "", stages: Sequence[Stage] | None = None) -> Known:
        """Evaluates what depends on the channel alone, before a loop over its positions.

        Args:
            channel: as in the `Place` of each later `apply`, and naming the same tensor.
            channel_mask: likewise.
            stages: others than the role's.
        """
        known = Known(channel)
        place = Place("", channel, "", "", channel_mask)
        for stage in self.stages if stages is None else stages:
            found = self._depends.invariants(stage.expression)
            parts = [node for node in found if self._is_written(node)]
            leaves = (leaf for part in parts for leaf in largest(part, lambda node: node.fn == "leaf"))
            loaded = [leaf for leaf in leaves if self._is_written(leaf)]
            with self.text.headed(f"{stage.op_text}: what does not depend on the position"):
                for node in [*loaded, *parts]:  # all are on their way before one is waited for
                    self._value(node, "", place, known.values, {})
        return known

    @property
    def has_channels(self) -> bool:
        """Whether an operand is per channel."""
        return any(operand.is_channel for operand in self._operands.values())

    def spread(self, known: Known, which: str, stages: Sequence[Stage] | None = None) -> Known:
        """What `prepare` made of a vector of channels, for elements whose channel is `which` of them.

        Args:
            known: of a channel text that is a plain vector.
            which: index tensor of the tile's shape into that vector.
            stages: as `prepare` was given them.
        """

        def gathered(node: Scalar) -> str:
            return f"{self.namespace}.gather({known.values[node]}, {which}, 0)"

        return self._merged(known, gathered, self.stages if stages is None else stages)

    def select(self, condition: str, first: Known, second: Known) -> Known:
        """What `prepare` made of two channels, for elements that are of the first where `condition` holds."""

        def selected(node: Scalar) -> str:
            return f"{self.namespace}.where({condition}, {first.values[node]}, {second.values[node]})"

        return self._merged(first, selected, self.stages)

    def _merged(self, known: Known, value: Callable[[Scalar], str], stages: Sequence[Stage]) -> Known:
        """`known` with `value` in the place of all that differs between channels."""
        values: dict[Scalar, str] = {}
        for stage in stages:
            for node in self._depends.invariants(stage.expression):
                if self._depends.channelled(node) and node not in values:
                    values[node] = self.text.let("spread", value(node))
        return Known("", known.values | values)

    def apply(self, x: str, place: Place, stages: Sequence[Stage] | None = None) -> str:
        """Writes the stages; the name of the result, in the compute dtype.

        Args:
            x: name of the tile they are applied to, in the compute dtype.
            place: how it lies.
            stages: others than the role's.
        """
        for stage in self.stages if stages is None else stages:
            self.text.line(f"# {stage.op_text}")
            (x,) = self.values([stage.expression], x, place)
            if stage.saves:
                self._values[stage.saves] = x
        return x

    def store(self, x: str, place: Place, hint: str = "") -> None:
        """Writes the stages, and the stores of their result to `dst` and of what is saved.

        Args:
            x: as `apply` is given it, and so is `place`.
            place: see `x`.
            hint: of the store, such as `, eviction_policy="evict_first"`.
        """
        guard = f", mask={place.mask}" if place.mask else ""
        for pointer, stored in self.outputs(self.apply(x, place)).items():
            self.text.line(f"{self.namespace}.store({pointer} + {place.element}, {stored}{guard}{hint})")

    def outputs(self, x: str) -> dict[str, str]:
        """What is stored, by the arguments that take it: the stages' result, and what they saved."""
        saved = {
            argument(Slot("result", each.key)): (self._values[each.key], each.dtype) for each in self._saved
        }
        made = {"dst": (x, ""), **saved}
        return {pointer: self.stored(*each) for pointer, each in made.items()}

    def stored(self, x: str, dtype: str = "") -> str:
        """A result as dst has it, or in another dtype."""
        return self._storage.narrow(dtype or self._kernel.dst.dtype, x)

    def widened(self, x: str, dtype: str, name: str = "x") -> str:
        """Loaded elements of a dtype in the compute dtype; `name` begins the result's name."""
        return self._storage.widen(dtype, x, name)

    def shared(
        self,
        name: str,
        x: str,
        place: Place,
        *,
        write: Callable[[str, Place], Sequence[str]],
        more: Mapping[str, str] | None = None,
        into: Sequence[str] = (),
    ) -> list[str]:
        """Calls a function that has the stages once for many tiles of the same channels; its results.

        Args:
            name: of the function.
            x: as `apply` is given it, and so is `place`; a tile whose elements all exist has the mask `True`
                where another one's do not.
            place: see `x`.
            write: writes the body, given both by their names there; the names of the results.
            more: other values that differ from tile to tile, by their names there.
            into: names that take the results; new ones without it.
        """
        lying = {each: text for each in ("element", "inside", "mask") if (text := getattr(place, each))}
        held = {key: f"{key}_read" for key in place.held}
        given = {"x": x} if x else {}
        given |= {**lying, **(more or {}), **{held[key]: value for key, value in place.held.items()}}
        own: dict[str, Any] = {each: each for each in lying}
        spot = replace(place, **own, held=held)
        return self.text.call(name, given, lambda: write("x" if x else "", spot), into)

    def values(self, formulas: Sequence[Scalar], x: str, place: Place) -> list[str]:
        """Names of what several simplified formulas come to; what they share is computed once."""
        known = place.known
        # A copy: the lines may be of a function, whose names nothing outside of it knows.
        channelled = dict(known.values) if known and known.channel in ("", place.channel) else {}
        local: dict[Scalar, str] = {}
        return [self._named(self._value(each, x, place, channelled, local), x) for each in formulas]

    def _named(self, value: str, like: str) -> str:
        """A tensor even of a formula that comes to a number, such as x**0."""
        if value.isidentifier():
            return value
        return self.text.let("constant", f"{self.namespace}.zeros_like({like}) + {value}")

    def _is_written(self, node: Scalar) -> bool:
        """Whether a value takes a line: a number and a parameter have their names already."""
        return node.fn != "const" and not (node.fn == "leaf" and node.args[0] in self._parameters)

    def _value(
        self, node: Scalar, x: str, place: Place, known: dict[Scalar, str], local: dict[Scalar, str]
    ) -> str:
        """The value of a tree: parts that vary are shared within this stage, the others within `known`."""
        scope = local if self._depends.varies(node) else known
        if node not in scope:
            if node.fn == "leaf":
                scope[node] = self._leaf(str(node.args[0]), x, place)
            elif node.fn == "const":
                scope[node] = self._table["const"](node.args[0])
            else:
                values = [self._value(child, x, place, known, local) for child in children(node)]
                scope[node] = self._table[node.fn](*values)
        return scope[node]

    def _leaf(self, name: str, x: str, place: Place) -> str:
        if name == "x":
            return x
        if name in self.given:
            return self.given[name]
        if name in self._values:
            return self._values[name]
        if name in self._parameters:
            return argument(Slot("parameter", name))
        if name in self._indices:
            return self.text.let(
                "index", _sum(blocks.counting(self._indices[name], self._numbered), place.element)
            )
        return self._operand(name, place)

    def _operand(self, name: str, place: Place) -> str:
        """The elements that a leaf names in an operand."""
        key, _ = part_of(name)
        operand = self._operands[key]
        if name in place.held:
            return self._storage.widen(operand.dtype, place.held[name], name)
        pointer = argument(Slot("operand", key))
        if operand.strides:
            start = self._end.start(operand, name, self._number)
            at = f"{place.others[key]} + {start}" if start else place.others[key]
            made = self.text.let(key, self._load(pointer, at, place.mask))
            if key != name:
                self.given[name] = made  # all parts that are made read the same
            return made
        if not operand.axes:
            return self.text.let(name, f"{self.namespace}.load({pointer})")
        mask = place.channel_mask if operand.is_channel else place.mask
        loaded = self.text.let(name, self._load(pointer, self._at(operand, place), mask))
        return loaded if operand.packed else self._storage.widen(operand.dtype, loaded, name)

    def _at(self, operand: KernelOperand, place: Place) -> str:
        """Where an operand's element lies from its first."""
        if operand.is_channel:
            return place.channel
        if operand.is_inside:
            return place.inside if 1 in operand.axes else f"({place.inside}) % {operand.size}"
        if not operand.is_scattered:
            return place.element
        return _sum(blocks.places(operand, self._kernel.shape_of(operand)), place.element)

    def _load(self, pointer: str, at: str, mask: str) -> str:
        masked = f", mask={mask}, other=0.0" if mask and at != "0" else ""  # one element takes no tile's
        return f"{self.namespace}.load({pointer} + {at}{masked})"


def _sum(places: Sequence[blocks.Term], element: str) -> str:
    """The place that follows from an element's, by `blocks`."""
    terms = []
    for outer, inner, step in places:
        at = f"({element})" + "".join(f" % {each}" for each in outer)
        at += f" // {inner}" if inner > 1 else ""
        terms.append(f"{at} * {step}" if step > 1 else at)
    return f"({' + '.join(terms)})" if terms else f"({element}) * 0"


def _numbers(kernel: Kernel) -> dict[str, KernelOperand]:
    """What reductions make, as if each were an operand per channel: it differs between channels alone."""
    names = [name for reduction in kernel.statistics for name in reduction.names]
    return {name: KernelOperand(name, CHANNEL, (), kernel.compute_dtype, "epilogue") for name in names}
