"""What a gradient is multiplied by behind an elementwise operator, as operators of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from fuseplan.kernels.match import alone
from fuseplan.language.derivative import ONE, derivative, times
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.affine import Mul, Scale
from fuseplan.ops.expression import Expression
from fuseplan.ops.training import ActivationBackward
from fuseplan.plans.step import Step
from fuseplan.scalar import NUMPY, Scalar, fold, leaf, leaves_of, text


@dataclass(frozen=True)
class Piece:
    """An operator of a gradient's plan, and the values that its operands are, by the operator's names.

    `gives` are the operands of the forward plan whose gradients its results are, by the operator's names.
    """

    op: Op
    given: tuple[tuple[str, str], ...] = ()
    gives: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Chain:
    """A value that a plan computes: operators applied to a value of the graph.

    Attributes:
        start: the value that the plan begins with.
        spec: the tensor that it is.
        pieces: the operators; none where the value is `start` itself.
        again: those of the forward plan among them, which compute a value again; "" for none.
    """

    start: str
    spec: TensorSpec
    pieces: tuple[Piece, ...] = ()
    again: str = ""

    @property
    def is_full(self) -> bool:
        """Whether its kernel holds no operator with statistics, products or parts any more."""
        return any(piece.op.kind != "elementwise" or piece.op.has_parts for piece in self.pieces)

    def then(self, pieces: Sequence[Piece]) -> Chain:
        """The value behind further operators."""
        return replace(self, pieces=(*self.pieces, *pieces))


def slope_of(step: Step, by: str) -> Scalar:
    """The derivative of an elementwise operator's formula, over its own names of its leaves."""
    assert isinstance(step.op, Elementwise)  # by its kind
    return derivative(step.op.formula(), by)


def reads_input(step: Step, by: str = "x") -> bool:
    """Whether the derivative depends on the operator's input."""
    return "x" in leaves_of(slope_of(step, by))


def is_free(op: Op) -> bool:
    """Whether an operator is a formula of one element without tensors."""
    return isinstance(op, Elementwise) and not (
        op.has_parts
        or op.again
        or op.results_made
        or any(each.when(op) for each in op.operand_fields.values())
    )


def factor(step: Step, by: str, at: str, values: dict[str, str]) -> tuple[Piece, ...]:
    """The operators that multiply a gradient by the derivative of an elementwise operator.

    Args:
        by: `x`, or the operator's name of an operand.
        at: the value that is the operator's input, where the derivative reads it.
        values: the graph's names of the operator's operands, by the operator's own.
    """
    slope, op = slope_of(step, by), cast(Elementwise, step.op)
    numbers = {each.name: each.value for each in op.parameters()}
    read = leaves_of(slope)
    if slope == ONE:
        return ()
    if read <= numbers.keys():
        if fold(slope, {name: np.float64(value) for name, value in numbers.items()}, NUMPY) == 1:
            return ()
        product = text(times(leaf("x"), slope))
        return (Piece(Expression(product, **{name: numbers[name] for name in sorted(read)})),)
    if slope == leaf("x"):
        return (Piece(Mul(), (("other", at),)),)
    per = {each.name: each.per for each in step.operands} | dict.fromkeys(op.again, "element")
    for name, word in per.items():
        if slope == leaf(name) and word in ("element", "channel"):
            made, key = (Mul(), "other") if word == "element" else (Scale(), "scale")
            return (Piece(made, ((key, values[name]),)),)
    backward = ActivationBackward(alone(op), by)
    return (Piece(backward, tuple((key, values.get(key, at)) for key in backward.operand_fields)),)
