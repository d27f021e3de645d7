"""Rows of the table for operators whose window moves over spatial axes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from fuseplan.graph.ops import Pad
from fuseplan.graph.why import LeftError, Why
from fuseplan.ops.affine import Bias
from fuseplan.ops.conv import CONVOLUTIONS, TRANSPOSED
from fuseplan.ops.gradient import WEIGHT_GRADIENTS
from fuseplan.ops.pool import AVG_POOLS, AvgPool, MaxPool
from fuseplan.ops.reductions import Amax, Mean, Sum
from fuseplan.torch.given import Given

Row = Callable[[Given], str]


def convolution(given: Given) -> str:
    """conv1d to conv3d, those transposed, and the one operator for all that autograd's graphs have."""
    src, weight, fields = _read(given)
    axes, is_any = len(fields["kernel"]), "transposed" in given.names
    is_transposed = given.argument("transposed") if is_any else "output_padding" in given.names
    if is_transposed:
        fields["output_padding"] = _each(given.integers("output_padding"), axes)
    kinds = TRANSPOSED if is_transposed else CONVOLUTIONS
    features = given.shape(weight)[1] * fields["groups"] if is_transposed else given.shape(weight)[0]
    made = given.layer(kinds[axes - 1](features, **fields), src, weight)
    return given.layer(Bias(), made, given.tensor("bias")) if given.has("bias") else made


def convolution_gradient(given: Given) -> str:
    """A result of torch's `convolution_backward` on a CPU: the gradient of src, of the weight or of the bias.

    On a Zen 3 core torch took of the time of 50 random plans of f32 by src 0.7 to 5, with strides and
    channels last 1.3 to 3.7, and by the weight 0.7 to 6. Torch 2.13's gradient by the weight of a convolution
    of one tap and strides, with few channels that lie last, writes behind its memory.

    Raises:
        LeftError: the tensors lie on a GPU.
    """
    maker, number = given.node.args
    of = given.of(maker)
    (src, weight, fields), grad = _read(of), of.tensor("grad_output")
    is_transposed = bool(of.argument("transposed"))
    if given.node.meta["val"].device.type != "cpu":
        raise LeftError(Why.NOT_IN_TABLE, "a gradient of a convolution on a GPU")
    axes = len(fields["kernel"])
    if number == 2:
        return given.layer(Sum((0, *range(2, axes + 2))), grad)
    if number == 1:
        op = WEIGHT_GRADIENTS[axes - 1](given.shape(weight)[0], **fields)
        return given.layer(op, *((grad, src) if is_transposed else (src, grad)))
    kinds = CONVOLUTIONS if is_transposed else TRANSPOSED
    if not is_transposed:  # what lies behind the last windows has a gradient too, which is 0
        names = ("kernel", "stride", "padding", "dilation")
        ends = zip(
            given.shape(src)[2:], given.shape(grad)[2:], *(fields[name] for name in names), strict=True
        )
        fields["output_padding"] = tuple(
            extent + 2 * padding - (count - 1) * stride - (taps - 1) * dilation - 1
            for extent, count, taps, stride, padding, dilation in ends
        )
    return given.layer(kinds[axes - 1](given.shape(src)[1], **fields), grad, weight)


def _read(given: Given) -> tuple[str, str, dict[str, Any]]:
    """src, the weight, and the fields that all convolutions have."""
    src, weight = given.tensor("input"), given.tensor("weight")
    kernel = given.shape(weight)[2:]
    if len(given.shape(src)) != len(kernel) + 2:
        raise LeftError(Why.SHAPE, given.type_of(src))
    fields = {name: given.argument(name) for name in ("stride", "padding", "dilation")}
    for name in (name for name, value in fields.items() if not isinstance(value, str)):
        fields[name] = _each(given.integers(name), len(kernel))
    more = {"kernel": kernel, "groups": given.argument("groups"), "precision": given.precision("conv")}
    return src, weight, fields | more


def _each(values: tuple[int, ...], axes: int) -> tuple[int, ...]:
    return values * axes if len(values) == 1 else values


def pool(kinds: Sequence[type[MaxPool] | type[AvgPool]]) -> Row:
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


def adaptive(whole: type[Mean] | type[Amax], kinds: Sequence[type[MaxPool] | type[AvgPool]]) -> Row:
    """A statistic of windows that divide the tensor: of all positions, or a pool without padding."""

    def row(given: Given) -> str:
        src, wanted = given.tensor("self"), given.integers("output_size")
        spatial = given.shape(src)[2:]
        pairs = list(zip(spatial, wanted, strict=False))
        if len(spatial) != len(wanted) or any(count < 1 or extent % count for extent, count in pairs):
            raise LeftError(Why.SHAPE, f"{wanted} windows of {given.type_of(src)}")
        if set(wanted) == {1}:
            return given.layer(whole(tuple(range(2, 2 + len(spatial))), keepdim=True), src)
        kernel = tuple(extent // count for extent, count in pairs)
        return given.layer(kinds[len(spatial) - 1](kernel, stride=kernel), src)

    return row


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
