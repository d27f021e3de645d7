"""Gather of rows of a table, beside NumPy: negative indices, errors, and what is left to ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import fuseplan.onnx
from from_onnx.test_model import RNG, plans
from fuseplan.errors import ArgumentError
from fuseplan.stores import sites
from onnx_models import model

TABLE = RNG.standard_normal((11, 7)).astype(np.float32)
ADDED = RNG.standard_normal((1, 5, 7)).astype(np.float32)


@pytest.fixture(autouse=True)
def _no_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: None) -> None:
    """Measured choices of other runs are not seen, and none are left."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})


def proto(shape: tuple[Any, ...], table: Any = TABLE, dtype: int = TensorProto.INT64, axis: int = 0) -> Any:
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"], "rows", axis=axis),
        helper.make_node("Add", ["rows", "added"], ["y"], "y"),
    ]
    added = ADDED.astype(table.dtype) if axis == 0 else np.zeros((), table.dtype)
    made = model(nodes, {"x": shape}, ["y"], {"table": table, "added": added})
    made.graph.input[0].type.tensor_type.elem_type = dtype
    return made


@pytest.mark.parametrize(
    ("kind", "dtype"), [(TensorProto.INT64, "f32"), (TensorProto.INT32, "f32"), (TensorProto.INT64, "f64")]
)
def test_rows_of_a_table(kind: int, dtype: str) -> None:
    table = TABLE.astype({"f32": np.float32, "f64": np.float64}[dtype])
    ours = fuseplan.onnx.load(proto(("batch", 5), table, kind), threads=1)
    for batch in (2, 3):
        x = RNG.integers(-11, 11, (batch, 5)).astype(np.int64 if kind == TensorProto.INT64 else np.int32)
        (made,) = ours.run(None, {"x": x})
        assert made.dtype == table.dtype
        np.testing.assert_array_equal(made, table[x] + ADDED.astype(table.dtype))
        word = "i64" if kind == TensorProto.INT64 else "i32"
        told = "" if dtype == "f32" else ", dtype=f64"
        text = f"{word}[{batch}x5] -> embedding(11, features=7{told}, from_end=True)"
        assert plans(ours, {"x": x})[0].startswith(text)


def test_rows_that_are_measured_are_right_whoever_wins() -> None:
    table = RNG.standard_normal((13, 7)).astype(np.float32)
    x = RNG.integers(-13, 13, (2, 5))
    (made,) = fuseplan.onnx.load(proto((2, 5), table), threads=1, choose="measured").run(None, {"x": x})
    np.testing.assert_array_equal(made, table[x] + ADDED)


@pytest.mark.parametrize("index", [11, -12])
def test_an_index_that_is_no_row_is_an_error(index: int) -> None:
    x = RNG.integers(0, 11, (3, 5))
    x[1, 2] = index
    with pytest.raises(ArgumentError, match=rf"got {index} at \(1, 2\); want an index from -11 to 10"):
        fuseplan.onnx.load(proto((3, 5)), threads=1).run(None, {"x": x})


def test_columns_are_left_to_onnx() -> None:
    ours = fuseplan.onnx.load(proto((2, 5), axis=1), threads=1)
    x = RNG.integers(0, 7, (2, 5))
    np.testing.assert_array_equal(ours.run(None, {"x": x})[0], TABLE[:, x])
    assert not [plan for plan in plans(ours, {"x": x}) if "embedding" in plan]


@pytest.mark.parametrize("rows", [7, 9])
def test_factors_of_features_are_not_those_of_rows(rows: int) -> None:
    """A product takes a factor of its features into its weight; a table's first axis has rows."""
    table, factor = RNG.standard_normal((rows, 7)).astype(np.float32), ADDED[0, 0]
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"], "rows"),
        helper.make_node("Mul", ["rows", "factor"], ["scaled"], "scaled"),
        helper.make_node("Add", ["scaled", "factor"], ["y"], "y"),
    ]
    made = model(nodes, {"x": (2, 5)}, ["y"], {"table": table, "factor": factor})
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    x = RNG.integers(0, rows, (2, 5))
    ours = fuseplan.onnx.load(made, threads=1)
    np.testing.assert_allclose(ours.run(None, {"x": x})[0], table[x] * factor + factor, rtol=1e-6, atol=1e-6)
    assert plans(ours, {"x": x})[0].endswith("-> scale -> bias")


def test_rows_are_normalized_in_the_kernel_that_reads_them() -> None:
    nodes = [
        *proto((2, 5)).graph.node,
        helper.make_node("LayerNormalization", ["y", "scale"], ["z"], "z"),
    ]
    added = np.broadcast_to(ADDED, (2, 5, 7)).copy()
    scale = RNG.standard_normal(7).astype(np.float32)
    made = model(nodes, {"x": (2, 5), "w": (2, 5, 7)}, ["z"], {"table": TABLE, "scale": scale})
    made.graph.node[1].input[1] = "w"
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    x, (mean, spread) = RNG.integers(0, 11, (2, 5)), (np.mean, np.std)
    want = (TABLE[x] + added).astype(np.float64)
    want = (want - mean(want, -1, keepdims=True)) / np.sqrt(spread(want, -1, keepdims=True) ** 2 + 1e-5)
    ours = fuseplan.onnx.load(made, threads=1)
    (got,) = ours.run(None, {"x": x, "w": added})
    np.testing.assert_allclose(got, want * scale, rtol=1e-5, atol=1e-5)
    (plan,) = plans(ours, {"x": x, "w": added})
    assert plan.startswith("i64[2x5] -> embedding(11, features=7, from_end=True) -> add -> layer_norm")
