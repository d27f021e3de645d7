"""Attention that a model of ONNX spells in pieces, beside onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from from_onnx.test_model import RNG, check, plans
from fuseplan.graph.type import type_of
from onnx_models import model

HEADS = ("batch", 4, 5, 8)
QKV = {"q": HEADS, "k": HEADS, "v": HEADS}
CAUSAL = np.where(np.tri(5, dtype=bool), 0, -np.inf).astype(np.float32).reshape(1, 1, 5, 5)
LOWEST = np.where(np.tri(5, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
RAGGED = RNG.standard_normal((5, 5), np.float32)
ROOT = np.float32(8**-0.25)


def node(kind: str, inputs: str, output: str, **fields: Any) -> Any:
    return helper.make_node(kind, inputs.split(), [output], output, **fields)


def turned(key: str = "k", *, flat: bool = False) -> list[Any]:
    """The keys with their last two axes swapped, as `kt`."""
    if not flat:
        return [node("Transpose", key, "kt", perm=[0, 1, 3, 2])]
    return [
        node("Reshape", f"{key} three", "k3"),
        node("Transpose", "k3", "kt3", perm=[0, 2, 1]),
        node("Reshape", "kt3 four", "kt"),
    ]


def scaled_twice() -> list[Any]:
    return [node("Mul", "q root", "qs"), node("Mul", "kt root", "ks"), node("MatMul", "qs ks", "scores")]


def scaled_behind(kind: str, factor: str) -> list[Any]:
    return [node("MatMul", "q kt", "product"), node(kind, f"product {factor}", "scores")]


def weighed(scores: str, *, zeros: bool, value: str = "v") -> list[Any]:
    """Softmax, zeros in the place of NaN, and the product with the values."""
    found = [node("Softmax", scores, "weights", axis=-1)]
    if zeros:
        found += [node("IsNaN", "weights", "is_nan"), node("Where", "is_nan zero weights", "kept")]
    return [*found, node("MatMul", f"{'kept' if zeros else 'weights'} {value}", "y")]


STORED = {
    "root": ROOT,
    "two": np.float32(2),
    "scale": np.float32(8**-0.5),
    "zero": np.float32(0),
    "none": np.zeros((1, 1, 5, 5), np.float32),
    "causal": CAUSAL,
    "lowest": LOWEST,
    "ragged": RAGGED,
    "three": np.array([-1, 5, 8]),
    "four": np.array([-1, 4, 8, 5]),
}
MASKED = [node("Add", "scores none", "masked")]
FOUND = {
    "no mask": ([*turned(), *scaled_twice(), *weighed("scores", zeros=False)], "attention"),
    "zeros": ([*turned(flat=True), *scaled_twice(), *MASKED, *weighed("masked", zeros=True)], "attention"),
    "divided": (
        [*turned(), *scaled_behind("Div", "two"), *weighed("scores", zeros=False)],
        "attention(scale=0.5)",
    ),
    "causal": (
        [
            *turned(),
            *scaled_behind("Mul", "scale"),
            node("Add", "causal scores", "masked"),
            *weighed("masked", zeros=False),
        ],
        "attention(is_causal=True)",
    ),
    "lowest": (
        [*turned(), *scaled_twice(), node("Add", "scores lowest", "masked"), *weighed("masked", zeros=True)],
        "attention(is_causal=True)",
    ),
    "bias": (
        [*turned(), *scaled_twice(), node("Add", "scores ragged", "masked"), *weighed("masked", zeros=True)],
        "attention(bias_axes=st)",
    ),
}


def given(shapes: Mapping[str, Any], batch: int = 2) -> dict[str, Any]:
    sized = {name: (batch, *shape[1:]) for name, shape in shapes.items()}
    return {name: RNG.standard_normal(shape, np.float32) for name, shape in sized.items()}


@pytest.mark.parametrize("case", FOUND)
def test_attention_in_pieces_is_one_plan(case: str) -> None:
    nodes, plan = FOUND[case]
    proto = model(nodes, QKV, ["y"], STORED)
    arrays = given(QKV)
    (made,) = plans(check(proto, arrays), arrays)
    assert made.partition(" -> ")[2] == plan


@pytest.mark.parametrize("flat", [False, True])
def test_heads_of_keys_that_views_repeat_are_read_once(flat: bool) -> None:
    shapes = QKV | {"k": ("batch", 2, 5, 8), "v": ("batch", 2, 5, 8)}
    stored = STORED | {"one": np.array([2, 2, 1, 5, 8]), "wide": np.array([2, 2, 2, 5, 8])}
    stored |= {"heads": np.array([2, 4, 5, 8])}
    nodes = [
        node("Reshape", "k one", "k1"),
        node("Expand", "k1 wide", "k5"),
        *([] if flat else [node("Reshape", "k5 heads", "k4")]),
        *turned("k5" if flat else "k4", flat=flat),
        node("Reshape", "v one", "v1"),
        node("Expand", "v1 wide", "v5"),
        node("Reshape", "v5 heads", "v4"),
        *scaled_twice(),
        *MASKED,
        *weighed("masked", zeros=True, value="v4"),
    ]
    arrays = given(shapes)
    (made,) = plans(check(model(nodes, shapes, ["y"], stored), arrays), arrays)
    assert made.endswith("attention(key_heads=2)")


PLAIN = [*turned(), *scaled_twice(), *weighed("scores", zeros=False)]
LEFT = {
    "scores are read elsewhere": (
        [*turned(), *scaled_twice(), *weighed("scores", zeros=False), node("Relu", "scores", "z")],
        ["y", "z"],
    ),
    "weights are an output": (
        [*turned(), *scaled_twice(), *weighed("scores", zeros=False)],
        ["y", "weights"],
    ),
    "keys are not turned": (
        [node("MatMul", "q w", "scores"), *weighed("scores", zeros=False)],
        ["y"],
    ),
    "a softmax of other axes": (
        [
            *turned(),
            *scaled_twice(),
            node("Softmax", "scores", "weights", axis=2),
            node("MatMul", "weights v", "y"),
        ],
        ["y"],
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_attention_stays_in_pieces(case: str) -> None:
    nodes, outputs = LEFT[case]
    shapes = QKV | {"m": (5, 5), "w": ("batch", 4, 8, 5)}
    used = {name for each in nodes for name in each.input}
    shapes = {name: shape for name, shape in shapes.items() if name in used}
    arrays = {
        name: each[0] if name == "m" else each for name, each in given(shapes | {"m": (1, 5, 5)}).items()
    }
    arrays = {name: arrays[name] for name in shapes}
    ours = check(model(nodes, shapes, outputs, STORED), arrays)
    assert not any("attention" in each for each in plans(ours, arrays))


@pytest.mark.parametrize("zeros", [True, False])
def test_rows_without_a_key_are_zeros_or_nan(zeros: bool) -> None:
    mask = np.where(np.tri(5, k=-1, dtype=bool), 0, -np.inf).astype(np.float32)
    nodes = [*turned(), *scaled_twice(), node("Add", "scores m", "masked"), *weighed("masked", zeros=zeros)]
    shapes = QKV | {"m": (5, 5)}
    arrays = given(QKV) | {"m": mask}
    ours = check(model(nodes, shapes, ["y"], STORED), arrays)
    end = "attention(bias_axes=st)" if zeros else "attention(bias_axes=st, nan_unseen=True)"
    assert plans(ours, arrays)[0].endswith(end)
    (made,) = ours.run(None, arrays)
    assert (np.isnan(made[:, :, 0]).all(), made[:, :, 0].any()) == (not zeros, not zeros)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e4, -np.inf])
def test_a_choice_between_finite_numbers_hides_no_query(lowest: float) -> None:
    """A query whose scores are all moved to the lowest number sees all keys alike, as ONNX's softmax does."""
    stored = STORED | {"far": np.float32(lowest).reshape(1), "near": np.zeros(1, np.float32)}
    nodes = [
        node("Where", "seen near far", "chosen"),
        node("Unsqueeze", "chosen first", "m"),
        *turned(),
        *scaled_twice(),
        node("Add", "scores m", "masked"),
        *weighed("masked", zeros=False),
    ]
    made = model(nodes, QKV | {"seen": (5, 5)}, ["y"], stored | {"first": np.zeros(1, np.int64)})
    (seen,) = (each for each in made.graph.input if each.name == "seen")
    seen.type.tensor_type.elem_type = TensorProto.BOOL
    is_hidden = np.tri(5, k=-1, dtype=bool)  # the first query sees nothing
    arrays = given(QKV) | {"seen": is_hidden if np.isfinite(lowest) else np.tri(5, dtype=bool)}
    ours = check(made, arrays)
    (plan,) = (each for each in plans(ours, arrays) if "attention" in each)
    assert ("nan_unseen" in plan) is not bool(np.isfinite(lowest))
    (got,) = ours.run(None, arrays)
    if lowest == np.finfo(np.float32).min:
        mean = arrays["v"].mean(2)
        np.testing.assert_allclose(got[:, :, 0], mean, rtol=1e-4, atol=1e-5)


def test_keys_that_one_view_turns_from_rows_are_read_by_attention() -> None:
    """As PyTorch's exporter writes two transposes in turn."""
    nodes = [
        node("Transpose", "rows", "kt", perm=[0, 2, 3, 1]),
        *scaled_twice(),
        *weighed("scores", zeros=False),
    ]
    shapes, own = {"q": HEADS, "rows": ("batch", 5, 4, 8), "v": HEADS}, np.random.default_rng(7)
    arrays = {name: own.standard_normal((2, *shape[1:]), np.float32) for name, shape in shapes.items()}
    ours = check(model(nodes, shapes, ["y"], STORED), arrays)
    assert [each.partition(" -> ")[2] for each in plans(ours, arrays)] == ["attention"]
    assert ours.report({name: type_of(each) for name, each in arrays.items()}).left == ()
