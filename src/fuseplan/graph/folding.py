"""A contraction as an operator of a plan, and constant weights that take up what is linear behind it."""

from __future__ import annotations

from functools import partial

import numpy as np

from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.op import Tensor
from fuseplan.graph.write import Constant, Late, Stage, names_in
from fuseplan.ops.affine import BatchNorm, Bias, Scale
from fuseplan.ops.conv import ConvTranspose
from fuseplan.ops.matmul import Linear, Matmul, Product

LINEAR = (Bias, Scale, BatchNorm)  # operators that are linear in x, a factor and a summand a channel


def centre_of(graph: Graph, node: Node, layer: Layer) -> Stage:
    """The anchor with its operands; a product with a weight whose features come first."""
    operands = {
        key: graph.constants.get(name, name) for key, name in zip(layer.keys, node.inputs[1:], strict=True)
    }
    op = layer.op
    weight = operands.get("weight")
    is_matrix = isinstance(op, Matmul) and not op.transposed and not op.batched
    if isinstance(op, Matmul) and is_matrix and weight is not None and not isinstance(weight, str):
        return Stage(Linear(op.features, precision=op.precision), {"weight": weight.T})
    return Stage(op, operands)


def _scaled(weight: Tensor, factor: Tensor, groups: int) -> Tensor:
    """A weight times a number for each of its features.

    These are its first axis; with `groups`, its second, of one group.
    """
    grouped = weight.reshape(groups, -1, *weight.shape[1:]) if groups else weight[None]
    spread = factor.reshape(len(grouped), *(1,) * bool(groups), -1, *(1,) * (weight.ndim - 1 - bool(groups)))
    made = np.empty(grouped.shape, weight.dtype)
    np.multiply(grouped, spread, out=made, casting="same_kind")  # in float64, rounded once
    return made.reshape(weight.shape)


def folded(
    stages: list[Stage], weight: Tensor, features: int, groups: int = 0
) -> tuple[Constant, Tensor | None, list[Stage]]:
    """The weight and bias that take up the linear stages behind a contraction, and the other stages.

    Args:
        stages: the operators behind the contraction.
        weight: the features along the first axis.
        groups: of a transposed convolution, whose weight has the features of one along its second axis.
    """
    factor, summand = np.ones(features), np.zeros(features)
    count = 0
    for stage in stages:
        if not isinstance(stage.op, LINEAR) or any(map(names_in, stage.operands.values())):
            break
        operands = {key: np.asarray(each, np.float64) for key, each in stage.operands.items()}
        numbers = {each.name: each.value for each in stage.op.parameters()}
        ends = [stage.op.reference(np.full((1, features), x), operands, numbers)[0] for x in (0.0, 1.0)]
        slope = ends[1] - ends[0]
        factor, summand, count = factor * slope, summand * slope + ends[0], count + 1
    if not count:
        return weight, None, stages
    made: Constant = weight
    if (factor != 1).any():
        made = Late(weight.dtype, weight.shape, partial(_scaled, weight, factor, groups))
    return made, summand, stages[count:]


def taken_up(stages: list[Stage]) -> list[Stage]:
    """A contraction whose constant weight, and a bias, have taken up the linear stages behind it."""
    centre, *behind = stages
    weight = centre.operands.get("weight")
    is_shared = centre.op.kind == "contraction" and not (isinstance(centre.op, Product) and centre.op.batched)
    if not isinstance(weight, np.ndarray) or not is_shared:
        return stages
    features, groups = weight.shape[0], 0
    if isinstance(centre.op, ConvTranspose):
        features, groups = centre.op.features, centre.op.groups
    made, bias, rest = folded(behind, weight, features, groups)
    front = [] if bias is None or not np.any(bias) else [Stage(Bias(), {"bias": bias})]
    return [Stage(centre.op, {"weight": made}), *front, *rest]
