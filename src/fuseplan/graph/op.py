"""What an operator of a graph is: a record that prints, tells the types of its results, and has a meaning."""

from __future__ import annotations

import ast
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fuseplan.errors import PlanError, counted
from fuseplan.graph.type import Type
from fuseplan.language.syntax import python_expression, span_of

Tensor = NDArray[Any]


class GraphOp(ABC):
    """An operator of a graph: a frozen dataclass whose fields are its attributes.

    Attributes:
        name: its word in a graph's text.
        takes: how many inputs; None for one or more.
    """

    name: ClassVar[str]
    takes: ClassVar[int | None] = 1

    @property
    def word(self) -> str:
        """The word that its text begins with."""
        return self.name

    @property
    def text(self) -> str:
        """The word and the attributes that are not at their default; the first stands without its name."""
        fields = []
        for place, each in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if value != each.default:
                fields.append(repr(value) if place == 0 else f"{each.name}={value!r}")
        return f"{self.name}({', '.join(fields)})" if fields else self.name

    def count(self) -> int | None:
        """How many inputs it takes; None for one or more."""
        return self.takes

    @abstractmethod
    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """The types of its results; a PlanError where it does not take such values."""

    @abstractmethod
    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Its results, computed by NumPy in the dtype of what it is given."""

    def write(self, given: Sequence[Tensor], dst: Tensor) -> None:
        """Writes its only result."""
        np.copyto(dst, self.evaluate(given)[0])

    @classmethod
    def read(cls, values: Sequence[Any], named: dict[str, Any]) -> Self:
        """The operator with attributes as a text writes them.

        Raises:
            PlanError: they are not the operator's.
        """
        try:
            return cls(*values, **named)
        except TypeError as error:
            wanted = ", ".join(each.name for each in dataclasses.fields(cls))  # type: ignore[arg-type]
            raise PlanError(f"{cls.name}: {error}", want=wanted or "no attributes") from None


def check_count(op: GraphOp, given: Sequence[Any]) -> None:
    """Refuses another number of inputs than the operator takes; a PlanError where it is another."""
    wanted = op.count()
    if not given if wanted is None else len(given) != wanted:
        want = "one or more" if wanted is None else wanted
        raise PlanError(
            f"{op.word} takes another number of inputs", got=counted(len(given), "input"), want=want
        )


def float_type(op: GraphOp, given: Sequence[Type]) -> str:
    """The dtype that all inputs have, one of plans; a PlanError where one has another dtype."""
    for each in given:
        if not each.is_float or each.dtype != given[0].dtype:
            told = " and ".join(map(str, given))
            raise PlanError(f"{op.word} takes tensors of one dtype: f64, f32, f16 or bf16", got=told)
    return given[0].dtype


def call_of(text: str, what: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The dotted word, the values and the named values of a text such as `onnx.Resize(mode="linear")`.

    Raises:
        PlanError: it is no call of literals; carets stand under the piece to blame.
    """
    tree = python_expression(text, what, "such as permute((0, 2, 1))")
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    word = ast.unparse(call.func)
    if not all(piece.isidentifier() for piece in word.split(".")):
        raise PlanError(f"this is not {what}", text=text, span=span_of(text, tree))
    values = [_literal(text, node) for node in call.args]
    return word, values, {str(each.arg): _literal(text, each.value) for each in call.keywords}


def _literal(text: str, node: ast.expr) -> Any:
    """The value that a node of the text's tree writes."""
    match node:
        case ast.Tuple(elts=elements):
            return tuple(_literal(text, element) for element in elements)
        case ast.Name(id="inf" | "nan" as word):
            return float(word)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -math.inf
    try:
        return ast.literal_eval(node)
    except ValueError:
        want = "a number, a quoted text, bytes, or a tuple of them"
        raise PlanError("this is not a value", want=want, text=text, span=span_of(text, node)) from None


def wide(array: Tensor) -> Tensor:
    """The array in a dtype that NumPy computes in: 2-byte floats in f32."""
    is_half = array.dtype.name in ("float16", "bfloat16")
    return array.astype(np.float32) if is_half else array
