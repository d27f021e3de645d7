"""ONNX's Slice and Split as views, beside onnxruntime."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from from_onnx.test_model import RNG, check, plans
from fuseplan.graph.place import Call, Compute, Copy, Launch
from fuseplan.graph.type import type_of
from onnx_models import model


def kinds(ours: Any, given: dict[str, Any]) -> list[type]:
    prepared = ours.prepare({name: type_of(each) for name, each in given.items()})
    return [type(step) for step in prepared.session.placement.steps]


def test_attention_reads_ranges() -> None:
    parts = ["q", "k", "v"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Split", ["p"], parts, axis=-1, num_outputs=3),
        helper.make_node("Attention", parts, ["y"], q_num_heads=4, kv_num_heads=4, is_causal=1),
    ]
    constants = {"w": RNG.standard_normal((32, 96)).astype(np.float32) / 6}
    given = {"x": RNG.standard_normal((2, 9, 32)).astype(np.float32)}
    ours = check(model(nodes, {"x": (2, 9, 32)}, ["y"], constants, 23), given)
    (row,) = (each for each in ours.report().operators if each.kind == "Split")
    assert row.state == "view"
    assert plans(ours, given) == [
        "f32[2x9x32] -> linear(96)",
        "f32[2x4x9x8, strides=864:8:96:1 of bhsc] -> attention(is_causal=True)",
    ]
    assert kinds(ours, given) == [Copy, Launch, Launch]  # the input is copied once, into aligned memory


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([1], [3], [1], None),
        ([0, -3], [2**31, -1], [0, 2], None),
        ([1, 0], [100, 4], [2, 1], [2, 3]),
        ([0], [100], [1], [1]),
    ],
)
@pytest.mark.parametrize("opset", [9, 13])
def test_slices(
    starts: list[int], ends: list[int], axes: list[int], steps: list[int] | None, opset: int
) -> None:
    told = {"starts": starts, "ends": ends, "axes": axes, **({"steps": steps} if steps else {})}
    if opset < 10 and steps:
        return  # steps came later
    named: dict[str, Any] = {key: np.array(each) for key, each in told.items()} if opset >= 10 else {}
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["a"]),
        helper.make_node("Slice", ["a", *named], ["b"], **({} if named else told)),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    given = {"x": RNG.standard_normal((2, 5, 7)).astype(np.float32)}
    ours = check(model(nodes, {"x": (2, 5, 7)}, ["y"], named, opset), given)
    assert Call not in kinds(ours, given)
    is_whole = (starts, steps) == ([0], [1])  # and the operator changes nothing
    assert kinds(ours, given).count(Launch) == 2 - is_whole


@pytest.mark.parametrize(
    ("fields", "sizes", "outputs"),
    [
        ({"axis": 1}, [2, 3], ["a", "b"]),
        ({"axis": -1, "num_outputs": 3}, None, ["a", "b", "c"]),  # 3, 3 and 1
        ({"axis": 1}, [1, 3, 1], ["a", "unread", "c"]),
    ],
)
def test_splits(fields: dict[str, Any], sizes: list[int] | None, outputs: list[str]) -> None:
    named = {"sizes": np.array(sizes)} if sizes else {}
    wanted = [name for name in outputs if name != "unread"]
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"]),
        helper.make_node("Split", ["s", *named], outputs, **fields),
        *(helper.make_node("Exp", [name], [f"{name}1"]) for name in wanted),
    ]
    given = {"x": RNG.standard_normal((2, 5, 7)).astype(np.float32)}
    ours = check(model(nodes, {"x": (2, 5, 7)}, [f"{name}1" for name in wanted], named, 18), given)
    assert not {Call, Compute} & {*kinds(ours, given)}
