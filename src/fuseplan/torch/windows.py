"""Rows of the table for operators whose window moves over spatial axes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from fuseplan.graph.ops import Pad
from fuseplan.graph.why import LeftError, Why
from fuseplan.ops.affine import Bias
from fuseplan.ops.conv import CONVOLUTIONS, TRANSPOSED
from fuseplan.ops.pool import AVG_POOLS, AvgPool, MaxPool
from fuseplan.ops.reductions import Mean
from fuseplan.torch.given import Given


def convolution(given: Given) -> str:
    """conv1d to conv3d, and the one operator for all of them that autograd's graphs have."""
    if "transposed" in given.names and given.argument("transposed"):
        return transposed(given)
    src, weight = given.tensor("input"), given.tensor("weight")
    spatial = len(given.shape(weight)) - 2
    if len(given.shape(src)) != spatial + 2:
        raise LeftError(Why.SHAPE, given.type_of(src))
    padding: Any = given.argument("padding")
    if not isinstance(padding, str):
        padding = _each(given.integers("padding"), spatial)
    op = CONVOLUTIONS[spatial - 1](
        given.shape(weight)[0],
        given.shape(weight)[2:],
        stride=_each(given.integers("stride"), spatial),
        padding=padding,
        dilation=_each(given.integers("dilation"), spatial),
        groups=given.argument("groups"),
        precision=given.precision("conv"),
    )
    made = given.layer(op, src, weight)
    return given.layer(Bias(), made, given.tensor("bias")) if given.has("bias") else made


def transposed(given: Given) -> str:
    """conv_transpose1d to conv_transpose3d."""
    src, weight = given.tensor("input"), given.tensor("weight")
    spatial, groups = len(given.shape(weight)) - 2, given.argument("groups")
    if len(given.shape(src)) != spatial + 2:
        raise LeftError(Why.SHAPE, given.type_of(src))
    op = TRANSPOSED[spatial - 1](
        given.shape(weight)[1] * groups,
        given.shape(weight)[2:],
        stride=_each(given.integers("stride"), spatial),
        padding=_each(given.integers("padding"), spatial),
        output_padding=_each(given.integers("output_padding"), spatial),
        dilation=_each(given.integers("dilation"), spatial),
        groups=groups,
        precision=given.precision("conv"),
    )
    made = given.layer(op, src, weight)
    return given.layer(Bias(), made, given.tensor("bias")) if given.has("bias") else made


def _each(values: tuple[int, ...], axes: int) -> tuple[int, ...]:
    return values * axes if len(values) == 1 else values


def pool(kinds: Sequence[type[MaxPool] | type[AvgPool]]) -> Callable[[Given], str]:
    """A pool of the kinds of one to three axes; of a largest element without its place."""

    def row(given: Given) -> str:
        src = given.tensor("self")
        spatial = len(given.shape(src)) - 2
        results = [user.args[1] for user in given.node.users if user.target is operator.getitem]
        if not 1 <= spatial <= len(kinds) or any(results):
            raise LeftError(Why.SHAPE, "a pool of another rank, or the places of its elements")
        options: dict[str, Any] = {"ceil_mode": given.argument("ceil_mode")}
        if "dilation" in given.names:
            options["dilation"] = _each(given.integers("dilation"), spatial)
        else:
            options["count_include_pad"] = given.argument("count_include_pad")
        if "divisor_override" in given.names and given.has("divisor_override"):
            raise LeftError(Why.NOT_IN_TABLE, "a mean over another number")
        kernel, stride, padding = map(given.integers, ("kernel_size", "stride", "padding"))
        extents = given.shape(src)[2:]
        holds_all = all(taps >= extent for taps, extent in zip(_each(kernel, spatial), extents, strict=True))
        if kinds is AVG_POOLS and holds_all and not any(padding):
            return given.layer(Mean(tuple(range(2, spatial + 2)), keepdim=True), src)
        options |= {"stride": _each(stride, spatial) or None, "padding": _each(padding, spatial)}
        return given.layer(kinds[spatial - 1](_each(kernel, spatial), **options), src)

    return row


def adaptive_mean(given: Given) -> str:
    """A mean over windows that divide the tensor: over all positions, or of a pool without padding."""
    src, wanted = given.tensor("self"), given.integers("output_size")
    spatial = given.shape(src)[2:]
    pairs = list(zip(spatial, wanted, strict=False))
    if len(spatial) != len(wanted) or any(count < 1 or extent % count for extent, count in pairs):
        raise LeftError(Why.SHAPE, f"{wanted} windows of {given.type_of(src)}")
    if set(wanted) == {1}:
        return given.layer(Mean(tuple(range(2, 2 + len(spatial))), keepdim=True), src)
    kernel = tuple(extent // count for extent, count in pairs)
    return given.layer(AVG_POOLS[len(spatial) - 1](kernel, stride=kernel), src)


def pad(given: Given) -> str:
    """Padding with a number; torch tells the sides of the last axis first."""
    src, sides = given.tensor("self"), given.integers("pad")
    if "mode" in given.names and given.argument("mode") != "constant":
        raise LeftError(Why.NOT_IN_TABLE, "padding with elements of the tensor")
    if any(side < 0 for side in sides):
        raise LeftError(Why.SHAPE, f"padding of {sides}")
    pairs = tuple(zip(sides[::2], sides[1::2], strict=True))[::-1]
    padding = ((0, 0),) * (len(given.shape(src)) - len(pairs)) + pairs
    value = given.number("value") if given.has("value") else 0.0
    return given.add(Pad(padding, value), src) if any(sides) else src
