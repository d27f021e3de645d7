"""A node of ONNX as the rows of the table see it: its inputs, attributes, and what it becomes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from onnx import helper

from fuseplan.graph.formulas import unchanged
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node, Origin, Parts, unlike
from fuseplan.graph.op import GraphOp, Tensor
from fuseplan.graph.ops import Map
from fuseplan.graph.type import Type, numpy_dtype, type_of
from fuseplan.graph.why import LeftError, Why
from fuseplan.op import Op
from fuseplan.scalar import REBUILD, const, fold, leaf

NODE = Origin("", "")  # of what is added for the node itself


class Given:
    """A node, and the graph that its operators are added to.

    Attributes:
        inputs: names of values; empty where an optional one is left out.
        added: the nodes so far.
        taken: names of the model's values, which nothing that is added has.
    """

    def __init__(
        self,
        node: Any,
        parts: Parts,
        types: dict[str, Type],
        inputs: list[str],
        taken: Collection[str] = (),
    ) -> None:
        self.node, self.inputs, self._parts, self._types = node, inputs, parts, types
        self._taken = taken
        self.added: list[Node] = []
        self.made: dict[str, Type] = {}
        self.constants: dict[str, Tensor] = {}
        self._attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}

    def has(self, place: int) -> bool:
        """Whether an input is given."""
        return place < len(self.inputs) and bool(self.inputs[place])

    def type(self, place: int = 0) -> Type:
        """The type of an input."""
        return self.type_of(self.inputs[place])

    def type_of(self, name: str) -> Type:
        """The type of a value."""
        return self.made.get(name) or self._types[name]

    def shape(self, place: int = 0) -> tuple[int, ...]:
        """The shape of an input; a LeftError where it is known at run time alone."""
        shape = self.type(place).shape
        if shape is None:
            raise LeftError(Why.SHAPE, f"{self.inputs[place]}: {self.type(place)}")
        return shape

    def floats(self) -> str:
        """The dtype that all inputs have; a LeftError where one has none of plans', or another."""
        types = [self.type_of(name) for name in self.inputs if name]
        if len({each.dtype for each in types}) != 1 or not all(each.is_float for each in types):
            raise LeftError(Why.DTYPE, " and ".join(map(str, types)))
        return types[0].dtype

    def floats_of_first(self) -> None:
        """Refuses a first input that is no tensor of a dtype of plans; a LeftError where it is none."""
        if not self.type().is_float:
            raise LeftError(Why.DTYPE, self.type())

    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of the first input."""
        return numpy_dtype(self.type().dtype)

    def constant(self, place: int) -> Tensor | None:
        """The elements of an input that is known before the model runs; None where it is not."""
        return self._parts.constants.get(self.inputs[place]) if self.has(place) else None

    def known(self, place: int, why: Why = Why.SHAPE) -> Tensor:
        """The elements of an input; a LeftError where they are known at run time alone."""
        found = self.constant(place)
        if found is None:
            raise LeftError(why, self.inputs[place])
        return found

    def maker(self, place: int = 0) -> Node | None:
        """The node that makes an input; None for inputs of the model and constants."""
        return self.maker_of(self.inputs[place])

    def maker_of(self, name: str) -> Node | None:
        """The node that makes a value of the graph so far."""
        return next((each for each in reversed(self._parts.nodes) if name in each.outputs), None)

    def number(self, name: str) -> float:
        """A constant of one element; a LeftError where the value is none."""
        found = self._parts.constants.get(name)
        if found is None or found.size != 1:
            raise LeftError(Why.NOT_IN_TABLE, f"{name}, which is not one constant number")
        return float(str(found.reshape(())[()]))  # the shortest decimal that is the number in its dtype

    def integers(self, place: int, name: str = "") -> tuple[int, ...] | None:
        """The whole numbers of an input, or of the attribute that an older opset has; None for neither."""
        if self.has(place):
            return tuple(int(each) for each in self.known(place).reshape(-1))
        values = self._attributes.get(name)
        return None if values is None else tuple(values)

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute's value; a text as such; a number of f32, by its shortest decimal unless for f64."""
        value = self._attributes.get(name, default)
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, float) and np.isfinite(value):
            number = np.float32(value)  # as files hold it, and as ONNX's defaults are
            return float(number) if self.type().dtype == "f64" else float(str(number))
        return value

    def wants(self, count: int) -> None:
        """Refuses a node of which more results are wanted; a LeftError where more are."""
        if any(self.node.output[count:]):
            raise LeftError(Why.NOT_IN_TABLE, f"{self.node.op_type} with {len(self.node.output)} results")

    def store(self, array: Tensor) -> str:
        """A constant of the graph."""
        name = unlike(self._taken, f"{self.node.output[0]}.constant{len(self.constants)}")
        self.constants[name] = array
        self.made[name] = type_of(array)
        return name

    def add(self, op: GraphOp, *inputs: str, origin: Origin = NODE) -> str:
        """Adds an operator on values, of this node unless another one is told; gives its result's name."""
        name = unlike(self._taken, f"{self.node.output[0]}.{len(self.added)}")
        (self.made[name], *_) = op.infer([self.type_of(each) for each in inputs])
        self.added.append(Node(op, inputs, (name,), origin))
        return name

    def layer(self, op: Op, *inputs: str) -> str:
        """Adds an operator of plans."""
        return self.add(Layer(op), *inputs)

    def formula(self, text: str, *inputs: str) -> str:
        """Adds a formula of leaves a, b, c, ..; nothing where it gives one of the inputs as it is."""
        op = Map(text)
        types = [self.type_of(each) for each in inputs]
        return unchanged(op, inputs, types, self._parts.constants) or self.add(op, *inputs)

    def activation(self, op: Op) -> str:
        """Adds an elementwise operator on the first input; its formula, where plans lack the rank."""
        if self.type().is_spec:
            return self.layer(op, self.inputs[0])
        meanings = {"x": leaf("a")} | {each.name: const(each.value) for each in op.parameters()}
        return self.add(Map.of(fold(op.formula(), meanings, REBUILD)), self.inputs[0])  # type: ignore[attr-defined]
