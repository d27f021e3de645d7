"""Steps of random models of ONNX that take several operators: quantized products, and control flow."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from drawn_onnx import Array, Drawing, element, is_float
from onnx_steps import Step, like

BODIES = ("Add", "Mul", "Sub", "Max")


def stepped(drawing: Drawing, name: str) -> str:
    """A value through a quantization to bytes of coarse steps."""
    kind = drawing.rng.choice((np.int8, np.uint8))
    scale = np.float32(max(1e-3, float(np.abs(drawing[name]).max(initial=0))) / 30)
    zero = np.array(drawing.rng.choice((0, 3)) + (100 if kind is np.uint8 else 0), kind)
    ends = (scale, zero)
    return drawing.add("DequantizeLinear", drawing.add("QuantizeLinear", name, *ends), *ends)


def stored_weight(drawing: Drawing, weight: Array, axis: int) -> str:
    """A constant weight as bytes with scales, one for all or one for each feature, dequantized."""
    axes = tuple(each for each in range(weight.ndim) if each != axis)
    is_per_axis = drawing.rng.random() < 0.6
    scale = np.abs(weight).max(axes if is_per_axis else None, keepdims=is_per_axis) / 127 + np.float32(1e-6)
    made = np.round(weight / scale).astype(np.int8)
    scales = scale.reshape(-1) if is_per_axis else scale
    zeros = np.zeros(scales.shape, np.int8)
    how = {"axis": axis} if is_per_axis else {}
    return drawing.add(
        "DequantizeLinear", made, scales.astype(np.float32), *[zeros] * drawing.rng.randint(0, 1), **how
    )


def quantized(drawing: Drawing) -> None:
    """A convolution or product of dequantized bytes, quantized again."""
    rng = drawing.rng
    if rng.random() < 0.4:
        made = drawing.pick(lambda each: each.dtype == np.float32)
        stepped(drawing, made)
        return
    if rng.random() < 0.5:
        name = stepped(
            drawing, drawing.pick(lambda each: each.dtype == np.float32 and each.ndim in (3, 4) and each.size)
        )
        channels, axes = drawing.shape(name)[1], len(drawing.shape(name)) - 2
        weight = drawing.values(rng.randint(1, 5), channels, *[rng.randint(1, 3)] * axes, fan=channels)
        bias = [like(drawing, name, weight.shape[0])] * rng.randint(0, 1)
        made = drawing.add("Conv", name, stored_weight(drawing, weight, 0), *bias, pads=[1] * (2 * axes))
    else:
        name = stepped(
            drawing, drawing.pick(lambda each: each.dtype == np.float32 and each.ndim > 1 and each.size)
        )
        inner = drawing.shape(name)[-1]
        weight = stored_weight(drawing, drawing.values(inner, rng.randint(1, 8), fan=inner), 1)
        made = drawing.add("MatMul", name, weight)
    if rng.random() < 0.4:
        made = drawing.add("Relu", made)
    if rng.random() < 0.6:
        stepped(drawing, made)


def integer(drawing: Drawing) -> None:
    """Products of bytes by ONNX's own operators for them."""
    rng = drawing.rng
    name = drawing.pick(
        lambda each: each.dtype in (np.uint8, np.int8, np.float32) and each.ndim > 1 and each.size > 0
    )
    if drawing[name].dtype == np.float32:
        scale, zero = np.float32(max(1e-3, float(np.abs(drawing[name]).max())) / 30), np.array(100, np.uint8)
        name = drawing.add("QuantizeLinear", name, scale, zero)
    zero, inner = np.array(3, drawing[name].dtype), drawing.shape(name)[-1]
    weight, none = drawing.values(inner, rng.randint(1, 6), dtype=np.int8), np.array(0, np.int8)
    if rng.random() < 0.5:
        made = drawing.add("MatMulInteger", name, weight, *rng.choice(((), (zero,), (zero, none))))
        drawing.add("Mul", drawing.add("Cast", made, to=TensorProto.FLOAT), np.float32(1 / 256))
    else:
        scale = np.float32(1 / 16)
        drawing.add("QLinearMatMul", name, scale, zero, weight, scale, none, np.float32(0.4), zero)


def scalar(drawing: Drawing) -> str:
    """A truth that a run tells, or a constant."""
    if drawing.rng.random() < 0.3:
        return drawing.constant(np.array(drawing.rng.random() < 0.5))
    name = drawing.pick(lambda each: is_float(each) and each.size > 0)
    flat = drawing.add("Reshape", name, np.array([-1]))
    first = drawing.add("Gather", flat, np.array(0))
    return drawing.add("Greater", first, np.array(0.1, drawing[name].dtype))


def body(drawing: Drawing, start: str, array: Array, steps: int) -> tuple[list[Any], str]:
    """Some elementwise nodes behind a value of an inner graph, on it and on values from outside."""
    nodes, last = list[Any](), start
    others = [
        name for name, each in drawing.found.items() if each.dtype == array.dtype and _fits(each, array)
    ]
    for _ in range(steps):
        name = drawing.named()
        if others and drawing.rng.random() < 0.5:
            nodes.append(
                helper.make_node(drawing.rng.choice(BODIES), [last, drawing.rng.choice(others)], [name])
            )
        elif is_float(array):
            nodes.append(
                helper.make_node(drawing.rng.choice(("Tanh", "Sigmoid", "Relu", "Neg")), [last], [name])
            )
        else:
            nodes.append(helper.make_node("Identity", [last], [name]))
        last = name
    return nodes, last


def _fits(array: Array, other: Array) -> bool:
    try:
        return bool(np.broadcast_shapes(array.shape, other.shape) == other.shape)
    except ValueError:
        return False


def result(name: str, array: Array | None = None) -> Any:
    kind = TensorProto.FLOAT if array is None else element(array)
    return helper.make_tensor_value_info(name, kind, None if array is None else array.shape)


def branched(drawing: Drawing) -> None:
    """If: both branches read values from outside; one may be another If."""
    name = drawing.pick(lambda each: each.dtype != np.bool_)
    truth, graphs = scalar(drawing), list[Any]()
    for place in range(2):
        nodes, last = body(drawing, name, drawing[name], drawing.rng.randint(1, 3))
        weight = drawing.named()
        nodes.append(helper.make_node("Add", [last, weight], [drawing.named()]))
        stored = [numpy_helper.from_array(like(drawing, name), weight)]
        graphs.append(
            helper.make_graph(
                nodes, f"branch{place}", [], [result(nodes[-1].output[0], drawing[name])], stored
            )
        )
    if drawing.rng.random() < 0.3:
        inner = helper.make_node(
            "If", [truth], [drawing.named()], then_branch=graphs[0], else_branch=graphs[1]
        )
        last = drawing.named()
        behind = helper.make_node("Add", [inner.output[0], name], [last])
        graphs[drawing.rng.randint(0, 1)] = helper.make_graph(
            [inner, behind], "deep", [], [result(last, drawing[name])]
        )
        graphs[0], graphs[1] = (_renamed(drawing, each) for each in graphs)
    drawing.add("If", truth, then_branch=graphs[0], else_branch=graphs[1])


def _renamed(drawing: Drawing, graph: Any) -> Any:
    """A graph with names of its own: no name stands twice in nested graphs."""
    made = {name for node in graph.node for name in node.output} | {each.name for each in graph.initializer}
    names = {name: drawing.named() for name in sorted(made)}
    text = type(graph)()
    text.CopyFrom(graph)
    for node in text.node:
        node.input[:] = [names.get(each, each) for each in node.input]
        node.output[:] = [names.get(each, each) for each in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                attribute.g.CopyFrom(_renamed(drawing, attribute.g))
    for each in (*text.initializer, *text.output):
        each.name = names.get(each.name, each.name)
    return text


def looped(drawing: Drawing) -> None:
    """Loop: a carried value, another collected, both by values from outside; it may end early."""
    rng, name = drawing.rng, drawing.pick(lambda each: each.dtype != np.bool_)
    array = drawing[name]
    turn, go, carried, kept = (drawing.named() for _ in range(4))
    nodes, last = body(drawing, carried, array, rng.randint(1, 3))
    seen = drawing.named()
    nodes.append(helper.make_node("Identity", [rng.choice((carried, last))], [seen]))
    stored = []
    if rng.random() < 0.5:
        nodes.append(helper.make_node("Identity", [go], [kept]))
    else:
        stored.append(numpy_helper.from_array(np.array(1), limit := drawing.named()))
        nodes.append(helper.make_node("Less", [turn, limit], [kept]))
    inputs = [
        helper.make_tensor_value_info(turn, TensorProto.INT64, []),
        helper.make_tensor_value_info(go, TensorProto.BOOL, []),
    ]
    outputs = [
        helper.make_tensor_value_info(kept, TensorProto.BOOL, []),
        result(last, array),
        result(seen, array),
    ]
    graph = helper.make_graph(nodes, "loop", [*inputs, result(carried, array)], outputs, stored)
    truth = rng.choice((None, drawing.constant(np.array(True))))
    drawing.add("Loop", drawing.constant(np.array(rng.randint(0, 3))), truth, name, count=2, body=graph)


def scanned(drawing: Drawing) -> None:
    """Scan: a state along an axis of a value, and what each turn makes."""
    rng = drawing.rng
    name = drawing.pick(lambda each: is_float(each) and each.ndim > 1 and each.size > 0)
    axis, array = rng.randrange(drawing[name].ndim), drawing[name]
    part = array.take(0, axis)
    state, given = drawing.named(), drawing.named()
    total = drawing.named()
    nodes, last = body(drawing, total, part, rng.randint(1, 2))
    nodes.insert(0, helper.make_node(rng.choice(("Add", "Max")), [state, given], [total]))
    seen = drawing.named()
    nodes.append(helper.make_node("Tanh", [last], [seen]))
    graph = helper.make_graph(
        nodes, "scan", [result(state, part), result(given, part)], [result(last, part), result(seen, part)]
    )
    start = like(drawing, name, *part.shape)
    how: dict[str, Any] = {"scan_input_axes": [axis], "scan_output_axes": [rng.choice((0, axis))]}
    if rng.random() < 0.5:
        how["scan_input_directions"] = [1]
    drawing.add("Scan", start, name, count=2, body=graph, num_scan_inputs=1, **how)


def recurrent(drawing: Drawing) -> None:
    rng, name = (
        drawing.rng,
        drawing.pick(lambda each: each.dtype == np.float32 and each.ndim == 3 and each.size > 0),
    )
    inner, size, (kind, gates) = (
        drawing.shape(name)[2],
        rng.randint(1, 4),
        rng.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1))),
    )
    weights = [drawing.values(1, gates * size, each, fan=each) for each in (inner, size)]
    drawing.add(kind, name, *weights, count=2, hidden_size=size)


DEEP: tuple[Step, ...] = (quantized, quantized, quantized, integer, branched, looped, scanned, recurrent)
