"""Rows of the table for choices between two values by a comparison of elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuseplan.graph.ops import LEAVES
from fuseplan.graph.why import LeftError, Why
from fuseplan.torch.attending import hidden
from fuseplan.torch.given import Given

aten = torch.ops.aten
SIGNS = {
    getattr(getattr(aten, name), kind): sign
    for name, sign in {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items()
    for kind in ("Scalar", "Tensor")
}


def choice(condition: str, true: str, false: str) -> Callable[[Given], str]:
    """A row of a choice by a comparison: a number of two, and a formula that asks which; plans join both."""

    def row(given: Given) -> str:
        node = given.maker(condition)
        if node is None or node.target not in SIGNS:
            raise LeftError(Why.NOT_IN_TABLE, "a choice by another tensor than a comparison")
        inputs = {_compared(given, given.first(node)): "a"}
        chosen = [_term(given, each, inputs) for each in (true, false)]
        return given.formula(f"where(a > 0, {', '.join(chosen)})", *inputs)

    return row


def _compared(given: Given, node: fx.Node) -> str:
    """1 where a comparison holds, else 0: an operator of the comparison, which several choices share."""
    made, inputs = given.of(node), dict[str, str]()
    name = f"{node.name}.0"
    if given.is_made(name):
        return name
    terms = [_term(made, each, inputs) for each in ("self", "other")]
    found = made.formula(f"where({f' {SIGNS[node.target]} '.join(terms)}, 1, 0)", *inputs)
    given.added += made.added
    given.made |= made.made
    return found


def _term(given: Given, name: str, inputs: dict[str, str]) -> str:
    """An argument in a formula: the leaf of a tensor, or a number in the dtype that torch compares it in."""
    if isinstance(given.argument(name), fx.Node):
        return inputs.setdefault(given.tensor(name), LEAVES[len(inputs)])
    number = given.number(name)
    dtype = given.argument("self").meta["val"].dtype if given.node.target in SIGNS else torch.float32
    if dtype.itemsize == 2:  # plans compute in f32, where the number is not the nearest one of 16 bits
        number = torch.tensor(number, dtype=dtype).item()
    return f"({number!r})"


def _hidden_or_chosen(given: Given) -> str:
    """Scores that a mask hides, which attention is found by; else a choice."""
    try:
        return hidden(given)
    except LeftError:
        return choice("condition", "self", "other")(given)


CHOICES: dict[Any, Callable[[Given], str]] = {
    aten.where.self: choice("condition", "self", "other"),
    aten.where.ScalarSelf: choice("condition", "self", "other"),
    aten.where.ScalarOther: _hidden_or_chosen,
    aten.masked_fill.Scalar: choice("mask", "value", "self"),
}
