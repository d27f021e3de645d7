"""Quantized values: what reads them as integers, and products of integers in the place of those of floats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fuseplan.graph.fronts import Front
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node, unlike
from fuseplan.graph.ops import Foreign
from fuseplan.graph.write import Stage, dequantized
from fuseplan.ops.conversion import Dequantize
from fuseplan.ops.matmul import Matmul


def each_apart(nodes: Sequence[Node], outputs: Sequence[str]) -> Iterator[Node]:
    """The nodes, with a dequantization for each of its readers, whose plan has it in front.

    Outputs and other libraries' operators, whose inner graphs have its name, read the first.
    """
    ours = [node for node in nodes if not isinstance(node.op, Foreign)]
    others = {name for node in nodes if isinstance(node.op, Foreign) for name in node.inputs} | {*outputs}
    count, met = Counter(name for node in ours for name in {*node.inputs}), Counter(others)
    count.update(others)
    scaled = {node.outputs[0] for node in nodes if _dequantizes(node)}
    taken = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    for node in nodes:
        names = dict[str, str]()
        for name in () if isinstance(node.op, Foreign) else scaled.intersection(node.inputs):
            names[name] = unlike(taken, f"{name}.{met[name]}") if met[name] else name
            met[name] += 1
        yield replace(node, inputs=tuple(names.get(name, name) for name in node.inputs)) if names else node
        if _dequantizes(node):
            (name,) = node.outputs
            more = (unlike(taken, f"{name}.{place}") for place in range(1, count[name]))
            yield from (replace(node, outputs=(each,)) for each in more)


def _dequantizes(node: Node) -> bool:
    return isinstance(node.op, Layer) and isinstance(node.op.op, Dequantize)


def read_as_integers(graph: Graph, name: str, pieces: Sequence[Node]) -> Iterator[Front]:
    """The front of a contraction of a dequantized value, which reads the integers.

    Nothing where others than its pieces read the value.
    """
    node = dequantized(graph, name)
    if node is not None and not graph.leaves(name, pieces):
        keys = Layer(node.op.op).keys  # type: ignore[attr-defined]
        given = (graph.constants.get(each, each) for each in node.inputs[1:])
        stage = Stage(node.op.op, dict(zip(keys, given, strict=True)))  # type: ignore[attr-defined]
        yield node.inputs[0], (node,), [stage]


def of_integers(
    graph: Graph, node: Node, layer: Layer, pieces: Sequence[Node], plain: list[Stage]
) -> Iterator[Front]:
    """Operators behind a dequantized value with its integers and those of the weight as factors.

    before: dequantize -> conv2d -> ...
    after:  dequantize(i16) -> conv2d -> dequantize(per=channel) -> ...; without the first where there is no
            zero point.

    Nothing where the weight has none of i8, or scales along other axes than its features.

    Args:
        plain: the contraction, as it is without integers, and the operators behind it.
    """
    (centre, *behind), stored = plain, graph.stored.get(node.inputs[-1])
    for name, nodes, (front,) in read_as_integers(graph, node.inputs[0], pieces):
        src, scale = graph.types[name], front.operands["scale"]
        is_last = isinstance(layer.op, Matmul) and not layer.op.transposed
        if stored is None or src.dtype not in centre.op.integers or isinstance(scale, str):
            return
        each = stored.scale.swapaxes(-1, 0) if is_last and stored.scale.ndim else stored.scale
        if each.size != 1 and each.size != each.shape[0]:
            return
        features = stored.integers.shape[-1 if is_last else 0]
        scales = np.broadcast_to(each.reshape(-1).astype(np.float64), features) * np.asarray(
            scale, np.float64
        )
        weight = stored.integers.T if is_last else stored.integers
        points = {key: each for key, each in front.operands.items() if key == "zero_point"}
        moved = [Stage(Dequantize("i16", zero_points=True), points)] if points else []
        made = Dequantize(graph.types[node.outputs[0]].dtype, "channel")
        stages = [Stage(centre.op, {"weight": weight}), Stage(made, {"scale": scales}), *behind]
        yield name, nodes, [*moved, *stages]
