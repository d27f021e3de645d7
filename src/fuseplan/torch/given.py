"""A node of a torch graph as the rows of the table see it: its arguments, and what it becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fuseplan.graph.formulas import unchanged
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node, Origin, line_of
from fuseplan.graph.op import GraphOp
from fuseplan.graph.ops import LEAVES, Map
from fuseplan.graph.type import FLOATS, WORDS, Type
from fuseplan.graph.why import LeftError, Why
from fuseplan.op import Op
from fuseplan.scalar import REBUILD, const, fold, leaf
from fuseplan.torch.masks import number_of


def type_of(value: Any) -> Type:
    """The type of a node's value, by the tensor without elements that torch keeps with it."""
    if not isinstance(value, torch.Tensor):
        return Type(None, "?")
    name = str(value.dtype).removeprefix("torch.")
    is_known = all(type(extent) is int for extent in value.shape) and value.layout is torch.strided
    return Type(tuple(value.shape) if is_known else None, WORDS.get(name, name))


class Given:
    """A node, and the graph that its operators are added to.

    Attributes:
        names: of the arguments of torch's operator.
        added: its operators so far.
        made: the types of their results.
    """

    def __init__(self, node: fx.Node, values: dict[fx.Node, str], types: dict[str, Type]) -> None:
        self.node, self._values, self._types = node, values, types
        self.added: list[Node] = []
        self.made: dict[str, Type] = {}
        schema = getattr(node.target, "_schema", None)
        self.names = [each.name for each in schema.arguments] if schema else []
        self._defaults = {each.name: each.default_value for each in schema.arguments} if schema else {}

    def argument(self, name: str) -> Any:
        """The value of an argument of torch's operator."""
        place = self.names.index(name)
        if place < len(self.node.args):
            return self.node.args[place]
        return self.node.kwargs.get(name, self._defaults[name])

    def tensor(self, name: str) -> str:
        """The name of the value of an argument.

        Raises:
            LeftError: the argument is no tensor of a dtype of plans.
        """
        value = self.argument(name)
        if not isinstance(value, fx.Node) or not self.type_of(self._values[value]).is_float:
            raise LeftError(Why.DTYPE, value)
        return self._values[value]

    def has(self, name: str) -> bool:
        """Whether an optional argument is given."""
        return name in self.names and self.argument(name) is not None

    def number(self, name: str) -> float:
        """An argument that is a number; a LeftError where it is a tensor, or open."""
        value = self.argument(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LeftError(Why.FORMULA, value)
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """An argument that is a list of numbers; a LeftError where one is open."""
        values = tuple(self.argument(name))
        if not all(type(each) is int for each in values):
            raise LeftError(Why.SHAPE, values)
        return values

    def type_of(self, name: str) -> Type:
        """The type of a value."""
        return self.made.get(name) or self._types[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The extents of a value; a LeftError where they are open."""
        shape = self.type_of(name).shape
        if shape is None:
            raise LeftError(Why.SHAPE, name)
        return shape

    @property
    def result(self) -> Type:
        """The type of the node's own value."""
        return type_of(self.node.meta.get("val"))

    def maker(self, name: str) -> fx.Node | None:
        """The node that an argument is the value of."""
        value = self.argument(name)
        return value if isinstance(value, fx.Node) else None

    def first(self, node: fx.Node) -> fx.Node:
        """The first node of a node's value."""
        return next(each for each, name in self._values.items() if name == self._values[node])

    def is_read(self, node: object) -> bool:
        """Whether the graph has the node's value."""
        return node in self._values

    def is_made(self, name: str) -> bool:
        """Whether the graph has a value of the name, which is a tensor."""
        return name in self._types and self._types[name].dtype != "?"

    def of(self, node: fx.Node) -> Given:
        """Another node, whose result this node takes a part of."""
        return Given(node, self._values, self._types)

    def value(self, node: fx.Node) -> str:
        """The name of a node's value."""
        return self._values[node]

    def precision(self, factors: str) -> str:
        """`tf32` where torch's settings let a GPU round the factors of f32, which is `conv` or `matmul`."""
        made = self.node.meta.get("val")
        on_gpu = isinstance(made, torch.Tensor) and made.device.type == "cuda"
        return "tf32" if on_gpu and self.result.dtype == "f32" and _rounds(factors) else "full"

    def add(self, op: GraphOp, *inputs: str) -> str:
        """Adds an operator on values, and gives its result's name.

        Raises:
            LeftError: the inputs have different dtypes, masks and indices aside.
        """
        types = [self.type_of(each) for each in inputs]
        if len({each.dtype for each in types if each.dtype in FLOATS}) > 1:
            raise LeftError(Why.DTYPE, " and ".join(map(str, types)))
        name = f"{self.node.name}.{len(self.added)}"
        (self.made[name], *_) = op.infer(types)
        self.added.append(Node(op, inputs, (name,), origin_of(self.node)))
        return name

    def layer(self, op: Op, *inputs: str) -> str:
        """Adds an operator of plans; a LeftError where a plan has no such tensor."""
        if not self.type_of(inputs[0]).is_spec:
            raise LeftError(Why.SHAPE, self.type_of(inputs[0]))
        return self.add(Layer(op), *inputs)

    @staticmethod
    def result_name(name: str, place: int) -> str:
        """The name of a further result of the operator that makes a value."""
        return f"{name}:{place}" if place else name

    def several(self, op: Op, *inputs: str) -> str:
        """Adds an operator of plans whose further results are those of torch's operator, in its order.

        Raises:
            LeftError: a result that is read has another shape or dtype than torch's.
        """
        name, read = self.layer(op, *inputs), {user.args[1] for user in self.node.users if user.users}
        _, *types = Layer(op).infer([self.type_of(each) for each in inputs])
        outputs = [name]
        for place, made in enumerate(types, 1):
            outputs.append(self.result_name(name, place) if place in read else "")
            if place not in read:
                continue
            wanted, self.made[outputs[-1]] = type_of(self.node.meta["val"][place]), made
            if (made.shape, made.dtype) != (wanted.shape, wanted.dtype):
                raise LeftError(Why.REFUSED, f"{self.node.target} makes {wanted}, not {made}")
        self.added[-1] = replace(self.added[-1], outputs=tuple(outputs))
        return name

    def formula(self, text: str, *inputs: str) -> str:
        """Adds a formula of leaves a, b, c, ..; nothing where one of the inputs can stand for its value.

        An input that is the same number in each call is part of the formula.
        """
        op, inputs = self._with_numbers(Map(text), inputs)
        types = [self.type_of(each) for each in inputs]
        same = unchanged(op, inputs, types, {})
        givers = (each for each in self.node.all_input_nodes if self._values[each] == same)
        return same if same and any(stands_for(each, self.node) for each in givers) else self.add(op, *inputs)

    def _with_numbers(self, op: Map, inputs: tuple[str, ...]) -> tuple[Map, tuple[str, ...]]:
        nodes = {self._values[each]: each for each in self.node.all_input_nodes}
        found = {each: number_of(nodes[each]) for each in inputs if each in nodes}
        numbers = {name: value for name, value in found.items() if value is not None}
        left = tuple(each for each in inputs if each not in numbers)
        if not numbers or not left:
            return op, inputs
        letters = dict(zip(left, map(leaf, LEAVES), strict=False))
        meanings = {
            letter: const(numbers[name]) if name in numbers else letters[name]
            for letter, name in zip(LEAVES, inputs, strict=False)
        }
        return Map.of(fold(op.expression, meanings, REBUILD)), left

    def activation(self, op: Op, name: str) -> str:
        """Adds an elementwise operator of one value; its formula, where plans lack the rank."""
        if self.type_of(name).is_spec:
            return self.layer(op, name)
        meanings = {"x": leaf("a")} | {each.name: const(each.value) for each in op.parameters()}
        return self.add(Map.of(fold(op.formula(), meanings, REBUILD)), name)  # type: ignore[attr-defined]


def stands_for(other: fx.Node, node: fx.Node) -> bool:
    """Whether a node of the same elements can take a node's place: nothing sees whose memory it is."""
    one, same = (each.meta.get("val") for each in (other, node))
    if not isinstance(one, torch.Tensor) or not isinstance(same, torch.Tensor):
        return False
    return one.stride() == same.stride() and not _is_returned(node)


def _is_returned(node: fx.Node) -> bool:
    """Whether an output of the graph may be a node's memory."""
    held = (user for user in node.users if not _makes_new(user))
    return any(user.op == "output" or _is_returned(user) for user in held)


def _makes_new(node: fx.Node) -> bool:
    """Whether a node's results are new memory."""
    returned = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else None
    return returned is not None and not any(each.alias_info for each in returned)


def _rounds(factors: str) -> bool:
    """Whether torch rounds the factors of f32 to TF32; torch has the settings by operator from 2.9 on."""
    library = torch.backends.cudnn if factors == "conv" else torch.backends.cuda
    precision = getattr(getattr(library, factors, None), "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(getattr(library, "matmul", library).allow_tf32)


def origin_of(node: fx.Node) -> Origin:
    """One of torch's nodes in reports."""
    return Origin(node.name, str(node.target), line_of(node.meta.get("stack_trace")))
