"""Rotations and repeated heads of ONNX's models, beside onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from from_onnx.test_model import RNG, check, plans
from onnx_models import model


def node(kind: str, read: str, made: str, **fields: Any) -> helper.NodeProto:
    return helper.make_node(kind, read.split(), made.split(), **fields)


def test_rotated_and_repeated_keys() -> None:
    nodes = [
        node("Mul", "k cos", "c"),
        node("Split", "k", "a b", axis=-1, num_outputs=2),
        node("Neg", "b", "n"),
        node("Concat", "n a", "r", axis=-1),
        node("Mul", "r sin", "s"),
        node("Add", "c s", "t"),
        *(
            each
            for name, made in (("t", "key"), ("v", "value"))
            for each in (
                node("Unsqueeze", f"{name} two", f"{made}.1"),
                node("Expand", f"{made}.1 wide", f"{made}.2"),
                node("Reshape", f"{made}.2 whole", made),
            )
        ),
        node("Attention", "q key value mask", "y"),
    ]
    shapes = {"q": (2, 6, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8), "cos": (5, 8), "sin": (5, 8)}
    constants = {
        "two": np.array([2]),
        "wide": np.array([2, 2, 3, 5, 8]),
        "whole": np.array([2, 6, 5, 8]),
        "mask": np.tri(5, 5, dtype=bool),
    }
    given = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    ours = check(model(nodes, shapes, ["y"], constants, 23), given)
    attention = "f32[2x6x5x8] -> attention(is_causal=True, key_heads=2)"
    assert plans(ours, given) == ["f32[2x2x5x8, bhsd] -> rotary(whole=True)", attention]


def test_attention_that_an_export_writes_out() -> None:
    """PyTorch's exporter scales both factors by a root, and puts zeros in the place of NaN."""
    nodes = [
        node("Unsqueeze", "k two", "k.1"),
        node("Expand", "k.1 wide", "k.2"),
        node("Reshape", "k.2 stack", "k.3"),
        node("Transpose", "k.3", "k.4", perm=[0, 2, 1]),
        node("Reshape", "k.4 turned", "k.5"),
        node("Unsqueeze", "v two", "v.1"),
        node("Expand", "v.1 wide", "v.2"),
        node("Reshape", "v.2 whole", "value"),
        node("Mul", "q root", "query"),
        node("Mul", "k.5 root", "key"),
        node("MatMul", "query key", "s"),
        node("Add", "s mask", "m"),
        node("Softmax", "m", "p", axis=-1),
        node("IsNaN", "p", "n"),
        node("Where", "n zero p", "g"),
        node("MatMul", "g value", "y"),
    ]
    constants = {
        "two": np.array([2]),
        "wide": np.array([2, 2, 3, 5, 8]),
        "stack": np.array([12, 5, 8]),
        "turned": np.array([2, 6, 8, 5]),
        "whole": np.array([2, 6, 5, 8]),
        "root": np.array(8**-0.25, np.float32),
        "zero": np.array(0, np.float32),
    }
    shapes = {"q": (2, 6, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)}
    causal = np.where(np.tri(5), 0, -np.inf).astype(np.float32)[None, None]
    random = RNG.standard_normal((2, 1, 1, 5)).astype(np.float32)
    random[1] = -np.inf
    given = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    ours = check(model(nodes, shapes, ["y"], {**constants, "mask": causal}), given)
    assert plans(ours, given) == ["f32[2x6x5x8] -> attention(is_causal=True, key_heads=2)"]
    shapes["mask"], given["mask"] = random.shape, random
    ours = check(model(nodes, shapes, ["y"], constants), given)
    assert plans(ours, given) == ["f32[2x6x5x8] -> attention(key_heads=2, bias_axes=bt)"]
