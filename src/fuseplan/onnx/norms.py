"""ONNX's normalizations: of a batch, of rows, of an image's channels and of groups of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from fuseplan.graph.ops import Reshape
from fuseplan.graph.why import Why
from fuseplan.onnx.given import Given, LeftError
from fuseplan.ops.affine import BatchNorm
from fuseplan.ops.groups import GroupNorm, InstanceNorm


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
