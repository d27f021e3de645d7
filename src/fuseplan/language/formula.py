"""Expressions read from text: `x * sigmoid(k * x)`.

Numbers, names, `inf`, + - * / **, comparisons inside `where`, the functions of `scalar.py`: FUNCTIONS and
DERIVED, and `index(c)`, `index()` and `random(seed, offset)`. The text is read by Python's grammar and never
run.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fuseplan.errors import PlanError, did_you_mean
from fuseplan.language.syntax import number, python_expression, span_of
from fuseplan.messages.excerpt import shown
from fuseplan.scalar import DERIVED, FUNCTIONS, SPLIT, Scalar, call, const, index, leaf, neg, random, where

# Functions that do more than build their node.
MEANINGS: dict[str, Callable[..., Scalar]] = {"where": where, "neg": neg, "random": random, **DERIVED}
ARGUMENTS = {**FUNCTIONS, **dict.fromkeys(DERIVED, 1), "random": 2}  # how many; `index` is given a letter

_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_ORDER = {ast.Gt: ("gt", 1), ast.GtE: ("ge", 1), ast.Lt: ("gt", -1), ast.LtE: ("ge", -1)}


def parse_expression(source: str, known: Collection[str] | None = None) -> Scalar:
    """The expression that `source` writes.

    Args:
        known: the names that may stand in it; None allows any.

    Raises:
        PlanError: it is none; carets stand under the piece to blame.
    """
    tree = python_expression(source, "an expression", "x * sigmoid(k * x)")
    try:
        return _Reader(source, known).read(tree)
    except RecursionError:
        raise PlanError(
            "the expression is too large for one element", got=f"{len(source)} characters", remedy=SPLIT
        ) from None


@dataclass(frozen=True)
class _Reader:
    """Turns a syntax tree into an expression; the piece to blame is the innermost that cannot be read."""

    source: str
    known: Collection[str] | None

    def read(self, node: ast.expr) -> Scalar:
        try:
            return self.meaning(node)
        except PlanError as error:
            if error.span is not None:
                raise
            raise error.located(self.source, span=span_of(self.source, node)) from None

    def meaning(self, node: ast.expr) -> Scalar:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return const(number(value))
            case ast.Name(id=name):
                return self.named(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return neg(self.read(operand))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return +self.read(operand)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
                return call(_BINARY[type(sign)], self.read(left), self.read(right))
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _ORDER:
                fn, step = _ORDER[type(sign)]
                return call(fn, *(self.read(left), self.read(right))[::step])
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.called(name, args, node)
        raise PlanError(
            "this is not supported in an expression",
            want="numbers, names, + - * / **, functions, and > >= < <= in where(condition, a, b)",
        )

    def named(self, name: str) -> Scalar:
        if name == "inf":
            return const(math.inf)
        if self.known is None or name in self.known:
            return leaf(name)
        raise PlanError(f"there is no {shown(name)} here", remedy=did_you_mean(name, self.known))

    def called(self, name: str, args: list[ast.expr], node: ast.expr) -> Scalar:
        if name == "index":
            return self.indexed(args)
        if name not in ARGUMENTS:
            span = span_of(self.source, node)
            raise PlanError(
                f"there is no function {shown(name)}",
                remedy=did_you_mean(name, [*ARGUMENTS, "index"]),
                text=self.source,
                span=(span[0], span[0] + len(name)),
            )
        if len(args) != ARGUMENTS[name]:
            raise PlanError(
                f"`{name}` takes another number of arguments", got=len(args), want=ARGUMENTS[name]
            )
        values = [self.read(arg) for arg in args]
        return MEANINGS[name](*values) if name in MEANINGS else call(name, *values)

    def indexed(self, args: list[ast.expr]) -> Scalar:
        match args:
            case []:
                return index()
            case [ast.Name(id=axis)] if len(axis) == 1:
                return index(axis)
        raise PlanError("`index` takes the letter of an axis, or nothing", want="such as index(c)")
