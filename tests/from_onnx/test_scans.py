"""CumSum of ONNX's models, beside onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from from_onnx.test_model import RNG, check, plans
from onnx_models import model

SHAPE = (3, 7, 20)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_axis_and_attributes(axis: int, exclusive: int, reverse: int) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("CumSum", ["r", "axis"], ["s"], exclusive=exclusive, reverse=reverse),
        helper.make_node("Tanh", ["s"], ["y"]),
    ]
    given = {"x": RNG.standard_normal(SHAPE, np.float32)}
    ours = check(model(nodes, {"x": SHAPE}, ["y"], {"axis": np.array(axis, np.int64)}, 17), given)
    (plan,) = plans(ours, given)
    assert " -> relu -> cumsum" in plan
    assert ("exclusive=True" in plan, "reverse=True" in plan) == (bool(exclusive), bool(reverse))


def test_an_axis_of_the_run_is_onnxs() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("CumSum", ["r", "axis"], ["y"])]
    proto = model(nodes, {"x": SHAPE}, ["y"], {}, 17)
    proto.graph.input.append(helper.make_tensor_value_info("axis", TensorProto.INT64, []))
    given = {"x": RNG.standard_normal(SHAPE, np.float32), "axis": np.array(1, np.int64)}
    ours = check(proto, given)
    assert {row.code for row in ours.report().left} == {"not-in-table"}
