"""Rows of the table that take more than a formula: windows, normalizations, attention and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fuseplan.graph.attention import attention as joined
from fuseplan.graph.ops import Expand, Pad, Permute, Reshape, Slice
from fuseplan.graph.type import Type
from fuseplan.graph.why import LeftError, Why
from fuseplan.onnx.given import Given
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.attention import Attention
from fuseplan.ops.conv import CONVOLUTIONS, TRANSPOSED
from fuseplan.ops.embedding import INDICES, MOST_AXES, Embedding
from fuseplan.ops.normalization import GroupNorm, InstanceNorm
from fuseplan.ops.pool import AVG_POOLS, MAX_POOLS, Pool
from fuseplan.ops.reductions import Mean
from fuseplan.ops.windows import Pair, Window


def window_of(given: Given, kernel: tuple[int, ...]) -> Window:
    """The window that a node's attributes tell; a LeftError where they are no window of plans."""
    spatial = given.shape()[2:]
    if not spatial or len(spatial) != len(kernel):
        raise LeftError(Why.SHAPE, given.type())
    found = _window(given, kernel)
    if min(found.dst) < 1 or any(side < 0 for pair in found.padding for side in pair):
        raise LeftError(Why.SHAPE, f"pads={found.padding} of {given.type()}")
    return found


def rounded_up(given: Given, results: tuple[Type, ...]) -> tuple[Type, ...]:
    """The types of the results of a pool with `ceil_mode` that ONNX runs.

    No window begins behind src and its low padding; ONNX 1.23's own inference counts such windows too.
    """
    shape, kernel = given.type().shape, tuple(given.attribute("kernel_shape", ()))
    if shape is None or len(shape) != len(kernel) + 2:
        return results
    counts = (max(0, count) for count in _window(given, kernel).dst)
    made = (*shape[:2], *counts)
    return tuple(each if each.shape is None else replace(each, shape=made) for each in results)


def _window(given: Given, kernel: tuple[int, ...]) -> Window:
    """The window of a node's attributes, of any numbers."""
    ones = (1,) * len(kernel)
    stride, dilation = (tuple(given.attribute(name, ones)) for name in ("strides", "dilations"))
    reach = tuple((taps - 1) * step + 1 for taps, step in zip(kernel, dilation, strict=True))
    sides = enumerate(zip(given.shape()[2:], reach, stride, strict=True))
    padding, dst = zip(*(_along(given, axis, *each) for axis, each in sides), strict=True)
    return Window(kernel, stride, dilation, padding, dst)


def _along(given: Given, axis: int, extent: int, reach: int, stride: int) -> tuple[Pair, int]:
    """Padding and number of windows along an axis."""
    pads = tuple(given.attribute("pads", (0,) * 2 * (len(given.shape()) - 2)))
    mode = given.attribute("auto_pad", "NOTSET")
    low, high = (0, 0) if mode == "VALID" else (pads[axis], pads[axis + len(pads) // 2])
    if mode.startswith("SAME"):
        count = -(-extent // stride)
        total = max(0, (count - 1) * stride + reach - extent)
        least = total // 2
        return ((least, total - least) if mode == "SAME_UPPER" else (total - least, least)), count
    room = extent + low + high - reach
    count = room // stride + 1
    if given.attribute("ceil_mode", 0) and room % stride:
        begin = count * stride
        count += begin < extent + low  # the last window begins inside src or its low padding
    return (low, high), count


def convolution(given: Given) -> str:
    """Conv: a convolution, and a bias."""
    given.floats()
    weight = given.known(1, Why.WEIGHT_NOT_CONSTANT)
    window = window_of(given, tuple(weight.shape[2:]))
    if tuple(given.attribute("kernel_shape", window.kernel)) != window.kernel:
        raise LeftError(Why.UNREADABLE, f"kernel_shape beside a weight of {'x'.join(map(str, weight.shape))}")
    if not given.type().is_spec or len(window.kernel) > len(CONVOLUTIONS):
        raise LeftError(Why.SHAPE, given.type())
    op = CONVOLUTIONS[len(window.kernel) - 1](
        weight.shape[0],
        window.kernel,
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
        groups=given.attribute("group", 1),
    )
    made = given.layer(op, *given.inputs[:2])
    return given.layer(Bias(), made, given.inputs[2]) if given.has(2) else made


def transposed(given: Given) -> str:
    """ConvTranspose: a transposed convolution, and a bias."""
    given.floats()
    weight = given.known(1, Why.WEIGHT_NOT_CONSTANT)
    kernel, group = tuple(weight.shape[2:]), given.attribute("group", 1)
    if not given.type().is_spec or len(given.shape()) != len(kernel) + 2 or len(kernel) > len(TRANSPOSED):
        raise LeftError(Why.SHAPE, given.type())
    if tuple(given.attribute("kernel_shape", kernel)) != kernel:
        raise LeftError(Why.UNREADABLE, f"kernel_shape beside a weight of {'x'.join(map(str, weight.shape))}")
    ones, none = (1,) * len(kernel), (0,) * len(kernel)
    stride, dilation = (tuple(given.attribute(name, ones)) for name in ("strides", "dilations"))
    ends = tuple(given.attribute("output_padding", none))
    whole = (
        (extent - 1) * step + end + (taps - 1) * apart + 1
        for extent, step, end, taps, apart in zip(
            given.shape()[2:], stride, ends, kernel, dilation, strict=True
        )
    )
    padding = tuple(_taken(given, axis, extent, stride[axis]) for axis, extent in enumerate(whole))
    if any(side < 0 for pair in padding for side in pair):
        raise LeftError(Why.SHAPE, f"an output that is longer than all windows, of {given.type()}")
    op = TRANSPOSED[len(kernel) - 1](
        weight.shape[1] * group,
        kernel,
        stride=stride,
        padding=padding,
        output_padding=ends,
        dilation=dilation,
        groups=group,
    )
    made = given.layer(op, *given.inputs[:2])
    return given.layer(Bias(), made, given.inputs[2]) if given.has(2) else made


def _taken(given: Given, axis: int, whole: int, stride: int) -> Pair:
    """What padding takes away at both ends of an axis, of the output without it."""
    mode, spatial = given.attribute("auto_pad", "NOTSET"), given.shape()[2:]
    wanted = tuple(given.attribute("output_shape", ()))
    if not wanted and not mode.startswith("SAME"):
        pads = (0, 0) if mode == "VALID" else tuple(given.attribute("pads", ()))[axis :: len(spatial)]
        return pads or (0, 0)
    total = whole - (wanted[len(wanted) - len(spatial) + axis] if wanted else spatial[axis] * stride)
    less = total // 2
    return (less, total - less) if mode == "SAME_UPPER" else (total - less, less)


def max_pool(given: Given) -> str:
    """MaxPool without its indices."""
    given.wants(1)
    return _pool(given, MAX_POOLS)


def average_pool(given: Given) -> str:
    """AveragePool; the mean of all positions, where one window holds them and no padding."""
    kernel, spatial = tuple(given.attribute("kernel_shape", ())), given.shape()[2:]
    window = window_of(given, kernel)
    reach = zip(window.kernel, window.dilation, spatial, strict=True)
    holds_all = all(taps >= extent and step == 1 for taps, step, extent in reach)
    if holds_all and not any(map(any, window.padding)) and given.type().is_spec:
        given.floats()
        return given.layer(Mean(tuple(range(2, len(spatial) + 2)), keepdim=True), given.inputs[0])
    return _pool(given, AVG_POOLS, count_include_pad=bool(given.attribute("count_include_pad", 0)))


def _pool(given: Given, kinds: Sequence[Callable[..., Pool]], **attributes: bool) -> str:
    given.floats()
    window = window_of(given, tuple(given.attribute("kernel_shape", ())))
    if not given.type().is_spec or len(window.kernel) > len(kinds):
        raise LeftError(Why.SHAPE, given.type())
    op = kinds[len(window.kernel) - 1](
        window.kernel,
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
        ceil_mode=bool(given.attribute("ceil_mode", 0)),
        **attributes,
    )
    if op.window(given.type().spec()).dst != window.dst:
        raise LeftError(Why.SHAPE, f"ceil_mode and auto_pad of {given.type()}")
    return given.layer(op, given.inputs[0])


def pad(given: Given) -> str:
    """Pad with a number."""
    given.floats_of_first()
    if given.attribute("mode", "constant") != "constant":
        raise LeftError(Why.NOT_IN_TABLE, "Pad with elements of the tensor")
    rank = len(given.shape())
    axes = given.integers(3, "") if given.has(3) else None
    listed = [axis % rank for axis in axes or range(rank)]
    sides = given.integers(1, "pads") or ()
    value = float(given.known(2, Why.FORMULA).reshape(())) if given.has(2) else 0.0
    padding = [(0, 0)] * rank
    for place, axis in enumerate(listed):
        padding[axis] = sides[place], sides[place + len(listed)]
    if not any(map(any, padding)):
        return given.inputs[0]
    return given.add(Pad(tuple(padding), value), given.inputs[0])


def batch_norm(given: Given) -> str:
    """BatchNormalization by the statistics that the model has."""
    given.floats()
    given.wants(1)
    if given.attribute("training_mode", 0) or not given.type().is_spec:
        raise LeftError(Why.NOT_IN_TABLE, f"BatchNormalization of {given.type()}, or in training")
    src, scale, shift, mean, variance = given.inputs
    return given.layer(BatchNorm(epsilon=given.attribute("epsilon", 1e-5)), src, mean, variance, scale, shift)


def rows(given: Given, make: Any, operands: int) -> str:
    """A normalization of all axes from one on, as rows of a matrix."""
    given.floats()
    given.wants(1)
    shape = given.shape()
    axis = given.attribute("axis", -1) % len(shape)
    inner = shape[axis:]
    if any(given.shape(place) != inner for place in range(1, operands + 1) if given.has(place)):
        raise LeftError(Why.BROADCAST, given.type(1))
    is_last = axis == len(shape) - 1 and given.type().is_spec
    rows = (math.prod(shape[:axis]), math.prod(inner))
    if not all(rows):
        raise LeftError(Why.SHAPE, given.type())
    src = given.inputs[0] if is_last else given.add(Reshape(rows), given.inputs[0])
    kept = []
    for place in range(1, operands + 1):
        value = np.zeros(rows[1], given.numpy_dtype()) if not given.has(place) else given.constant(place)
        flat = given.inputs[place] if value is None else given.store(value.reshape(-1))
        kept.append(given.add(Reshape((rows[1],)), flat) if value is None and len(inner) > 1 else flat)
    made = given.layer(make(epsilon=given.attribute("epsilon", 1e-5)), src, *kept)
    return made if is_last else given.add(Reshape(shape), made)


def groups(given: Given) -> str:
    """InstanceNormalization, and GroupNormalization, whose numbers before opset 21 are one a group."""
    given.floats()
    shape, epsilon = given.shape(), given.attribute("epsilon", 1e-5)
    if not given.type().is_spec:
        raise LeftError(Why.SHAPE, given.type())
    count = given.attribute("num_groups", None)
    make = InstanceNorm if count is None else partial(GroupNorm, count)
    if shape[1] % (count or 1):
        raise LeftError(Why.SHAPE, f"{count} groups of {given.type()}")
    stored = [given.constant(place) for place in (1, 2)]
    if all(each is not None and (each == plain).all() for each, plain in zip(stored, (1, 0), strict=True)):
        return given.layer(make(affine=False, epsilon=epsilon), given.inputs[0])
    operands = given.inputs[1:]
    if given.shape(1) != shape[1:2]:
        each = shape[1] // given.shape(1)[0]
        operands = [given.store(given.known(place).repeat(each)) for place in (1, 2)]
    return given.layer(make(epsilon=epsilon), given.inputs[0], *operands)


def attention(given: Given) -> str:
    """Of three or four axes; past keys and values, and results besides the output, are left to ONNX."""
    given.wants(1)
    names = list(given.inputs[:3])
    if any(given.has(place) for place in range(4, len(given.inputs))):
        raise LeftError(Why.NOT_IN_TABLE, "Attention with past keys, or lengths")
    softcap, is_causal = given.attribute("softcap", 0.0), bool(given.attribute("is_causal", 0))
    mask = given.inputs[3] if given.has(3) else None
    if softcap and (mask or is_causal):
        raise LeftError(Why.FORMULA, "Attention whose mask is added before its softcap")
    is_flat = len(given.shape()) == 3
    for place, count in enumerate(("q_num_heads", "kv_num_heads", "kv_num_heads")) if is_flat else ():
        batch, rows, whole = given.shape(place)
        heads = given.attribute(count, 0)
        if heads < 1 or whole % heads:
            raise LeftError(Why.SHAPE, f"{whole} elements of {heads} heads")
        split = given.add(Reshape((batch, rows, heads, whole // heads)), names[place])
        names[place] = given.add(Permute((0, 2, 1, 3)), split)
    op = Attention(is_causal=is_causal, scale=given.attribute("scale", 0.0), softcap=softcap)
    query, key, value = names
    made = joined(given, (query, key, value), mask, op)
    if not is_flat:
        return made
    turned = given.add(Permute((0, 2, 1, 3)), made)
    batch, rows, heads, size = given.type_of(turned).shape or (0, 0, 0, 0)
    return given.add(Reshape((batch, rows, heads * size)), turned)


def slices(given: Given) -> str:
    """A range along each of some axes."""
    given.floats_of_first()
    shape, name = given.shape(), given.inputs[0]
    starts, ends = given.integers(1, "starts") or (), given.integers(2, "ends") or ()
    axes = given.integers(3, "axes") or tuple(range(len(starts)))
    steps = given.integers(4) or (1,) * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            raise LeftError(Why.NOT_IN_TABLE, f"Slice with a step of {step}")
        begin, stop, _ = slice(start, end, step).indices(shape[axis])
        if (begin, stop, step) != (0, shape[axis], 1):
            name = given.add(Slice(axis % len(shape), begin, max(begin, stop), step), name)
    return name


def split(given: Given) -> tuple[str, ...]:
    """Ranges that follow one another: of the sizes that are told, else of one, the last perhaps shorter."""
    given.floats_of_first()
    shape, count = given.shape(), len(given.node.output)
    axis = given.attribute("axis", 0) % len(shape)
    extent = shape[axis]
    most = -(-extent // count)
    sizes = given.integers(1, "split") or tuple(max(0, min(most, extent - i * most)) for i in range(count))
    ends = [sum(sizes[: place + 1]) for place in range(count)]
    return tuple(
        given.add(Slice(axis, end - size, end), given.inputs[0])
        for size, end in zip(sizes, ends, strict=True)
    )


def expanded(given: Given) -> str:
    """Of five axes, as heads of keys are repeated: others are ONNX Runtime's, which reads what they make."""
    given.floats_of_first()
    shape = np.broadcast_shapes(given.shape(), given.integers(1) or ())
    if len(shape) != 5 or len(given.shape()) != 5:
        raise LeftError(Why.NOT_IN_TABLE, f"Expand of {given.type()}")
    return given.inputs[0] if shape == given.shape() else given.add(Expand(shape), given.inputs[0])


def gather(given: Given) -> str:
    """Rows of a constant table; other gathers are ONNX's. Negative indices count from the end."""
    table, made = given.known(0, Why.NOT_IN_TABLE), given.type(1)
    rank = len(made.shape or ())
    is_rows = table.ndim == 2 and given.attribute("axis", 0) % 2 == 0 and given.type().is_spec
    if not is_rows or made.dtype not in INDICES or not 1 < rank <= MOST_AXES or not made.size:
        raise LeftError(Why.NOT_IN_TABLE, f"Gather of {made} from {given.type()}")
    rows, features = table.shape
    op = Embedding(rows, features, dtype=given.type().dtype, from_end=True)
    return given.layer(op, given.inputs[1], given.inputs[0])
