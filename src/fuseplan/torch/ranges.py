"""Rows of the table whose results are ranges of a value: views, as in torch."""

from __future__ import annotations

import torch

from fuseplan.graph.ops import Concat, Reshape, Slice
from fuseplan.graph.why import LeftError, Why
from fuseplan.ops.activation import Sigmoid
from fuseplan.torch.given import Given
from fuseplan.torch.windows import convolution_gradient

aten = torch.ops.aten


def sliced(given: Given) -> str:
    """A range along an axis."""
    src = given.tensor("self")
    shape, ends = given.shape(src), [given.argument(name) for name in ("dim", "start", "end", "step")]
    if not all(each is None or type(each) is int for each in ends):
        raise LeftError(Why.SHAPE, ends)
    dim, start, end, step = ends
    begin, stop, step = slice(start, end, step).indices(shape[dim])
    if (begin, stop, step) == (0, shape[dim], 1):
        return src
    return given.add(Slice(dim % len(shape), begin, max(begin, stop), step), src)


def selected(given: Given) -> str:
    """One place of an axis, which the result does not have."""
    return _without(given, given.tensor("self"), int(given.number("dim")), int(given.number("index")))


def _without(given: Given, src: str, dim: int, index: int) -> str:
    shape = given.shape(src)
    dim, index = dim % len(shape), index % shape[dim]
    made = given.add(Slice(dim, index, index + 1), src)
    return given.add(Reshape((*shape[:dim], *shape[dim + 1 :])), made)


def joined(given: Given) -> str:
    """Values one behind the other along the last axis, as rotations exchange halves."""
    tensors = given.argument("tensors")
    dtypes = {given.type_of(given.value(each)).dtype for each in tensors}
    rank = len(given.result.shape or ())
    if int(given.number("dim")) % max(1, rank) != rank - 1 or not given.result.is_float or len(dtypes) > 1:
        raise LeftError(Why.NOT_IN_TABLE, "a join of another axis, or of several dtypes")
    return given.add(Concat(rank - 1), *(given.value(each) for each in tensors))


def gated(given: Given) -> str:
    """torch's `glu`: the first half of an axis times the sigmoid of the second."""
    src = given.tensor("self")
    shape = given.shape(src)
    dim = int(given.number("dim")) % len(shape)
    half = shape[dim] // 2
    first, second = (given.add(Slice(dim, begin, begin + half), src) for begin in (0, half))
    return given.formula("a * b", first, given.activation(Sigmoid(), second))


def part(given: Given) -> str:
    """One of the results of an operator that splits a tensor."""
    maker, number = given.node.args
    split = given.of(maker)
    src, extents = split.tensor("self"), [each.shape for each in maker.meta["val"]]
    dim = int(split.number("dim")) % len(given.shape(src))
    if maker.target is aten.unbind.int:
        return _without(given, src, dim, number)
    if not all(type(each[dim]) is int for each in extents):
        raise LeftError(Why.SHAPE, extents)
    ends = [sum(int(each[dim]) for each in extents[: place + 1]) for place in range(len(extents))]
    return given.add(Slice(dim, ends[number] - int(extents[number][dim]), ends[number]), src)


SPLITS = (aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
# Rows of `getitem`, by the operator that makes several results.
PARTS = dict.fromkeys(SPLITS, part) | {aten.convolution_backward.default: convolution_gradient}
