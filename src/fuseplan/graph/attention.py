"""Attention of models as the operator of plans: what the tables of torch and ONNX share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from fuseplan.errors import PlanError
from fuseplan.graph.ops import Reshape
from fuseplan.graph.type import Type
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op
from fuseplan.ops.attention import AXES, Attention

FEW = 4  # queries that read the same keys


class Adds(Protocol):
    """A node of a framework whose operators are being added to a graph."""

    def type_of(self, name: str) -> Type:
        """The type of a value."""

    def add(self, op: Any, *inputs: str) -> str:
        """Adds an operator."""

    def layer(self, op: Op, *inputs: str) -> str:
        """Adds an operator of plans."""


def attention(given: Adds, names: tuple[str, str, str], mask: str | None, op: Attention) -> str:
    """Adds attention of query, key and value, each (b, h, s, d), and gives its result's name.

    Args:
        given: the framework's node.
        names: of the three values.
        mask: added to the scores, or true where a query sees a key; of axes that broadcast to (b, h, s, t).
        op: the attributes besides the extents.

    Raises:
        PlanError: the tensors are not those of one attention.
    """
    query, key, value = (given.type_of(name).shape or () for name in names)
    if not len(query) == len(key) == len(value) == 4:
        raise PlanError("attention reads query, key and value of four axes", got=f"{query}, {key}, {value}")
    wanted = (query[0], key[1], key[2])
    if key[3] != query[3] or key[0] != query[0] or value[:3] != wanted:
        raise PlanError("key and value are no factors of the query", got=f"{query}, {key}, {value}")
    found = ("keys", key[2], query[2]), ("key_heads", key[1], query[1]), ("features", value[3], query[3])
    op = replace(op, **{name: extent for name, extent, usual in found if extent != usual})  # type: ignore[arg-type]
    if mask is None:
        return given.layer(op, *names)
    made = given.type_of(mask)
    extents = dict(zip(AXES, (*query[:3], key[2]), strict=True))
    axes = _axes(made.shape or (), extents)
    if axes is None or made.dtype not in ("bool", given.type_of(names[0]).dtype):
        raise PlanError("the mask is none of these scores", got=str(made), want=str(tuple(extents.values())))
    shape = tuple(extents[axis] for axis in axes)
    held = mask if made.shape == shape else given.add(Reshape(shape), mask)
    kind = "mask_axes" if made.dtype == "bool" else "bias_axes"
    return given.layer(replace(op, **{kind: axes}), *names, held)  # type: ignore[arg-type]


def has_few_queries(op: Op, src: TensorSpec, target: str) -> bool:
    """Whether an operator is attention for which a CPU's kernel would have few queries for its lanes.

    Measured on AVX-512, one thread, 2048 keys: 0.3 of torch's speed with one query, 1.4 times it with four.
    """
    if not isinstance(op, Attention) or not target.startswith("cpu"):
        return False
    made = op.attend(src)
    return made.queries * made.group < FEW


def _axes(shape: tuple[int, ...], extents: Mapping[str, int]) -> str | None:
    """The axes of the scores that a tensor has which broadcasts to them; None where it does not."""
    if not 1 <= len(shape) <= len(AXES):
        return None
    whole = dict(zip(AXES, (1,) * (len(AXES) - len(shape)) + shape, strict=True))
    if whole["t"] != extents["t"] or any(whole[axis] not in (1, extents[axis]) for axis in AXES):
        return None
    return "".join(axis for axis in AXES if whole[axis] > 1 or axis == "t")
