"""Products of one input in ONNX's models, beside onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

import fuseplan.onnx
from from_onnx.test_model import RNG, check, plans
from fuseplan.graph.type import type_of
from onnx_models import model

SIZES = {"q": 12, "k": 4, "v": 20}


def test_projections_of_unequal_sizes_are_one_launch_and_stay_nodes_of_a_written_model() -> None:
    nodes, stored = list[Any](), dict[str, Any]()
    for name, size in SIZES.items():
        stored |= {
            f"w{name}": RNG.standard_normal((16, size), np.float32),
            f"b{name}": RNG.random(size, np.float32),
        }
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"], f"{name}0"),
            helper.make_node("Add", [f"{name}0", f"b{name}"], [name], name),
            helper.make_node("Softmax", [name], [f"y{name}"], f"y{name}"),
        ]
    proto = model(nodes, {"x": ("rows", 16)}, [f"y{name}" for name in SIZES], stored)
    given = {"x": RNG.standard_normal((3, 16), np.float32)}
    ours = check(proto, given)
    assert plans(ours, given)[0] == "f32[3x16] -> linear(36) -> bias"
    report = ours.report({"x": type_of(given["x"])})
    assert report.launches.kernels == 4
    assert [row.name for row in report.operators if 1 in row.sites] == ["q0", "q", "k0", "k", "v0", "v"]
    check(proto, {"x": RNG.standard_normal((5, 16), np.float32)})
    measured = fuseplan.onnx.load(proto, threads=1, choose="measured")
    for made, want in zip(measured.run(None, given), ours.run(None, given), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-6)
