"""Operators of ONNX that compute what an earlier one did."""

from __future__ import annotations

import numpy as np
from onnx import helper

import fuseplan.onnx
from from_onnx.test_model import check, plans
from onnx_models import model, weights


def test_a_norm_that_centres_twice_is_one_plan() -> None:
    """PyTorch's older exporter writes what a model computes twice as often."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], "mean"),
        helper.make_node("Sub", ["x", "mean"], ["centred"], "centred"),
        helper.make_node("Sub", ["x", "mean"], ["again"], "again"),
        helper.make_node("Mul", ["centred", "centred"], ["squares"], "squares"),
        helper.make_node("ReduceMean", ["squares", "axes"], ["variance"], "variance"),
        helper.make_node("Add", ["variance", "epsilon"], ["above"], "above"),
        helper.make_node("Sqrt", ["above"], ["root"], "root"),
        helper.make_node("Div", ["again", "root"], ["y"], "y"),
        helper.make_node("Sub", ["x", "mean"], ["z"], "z"),
    ]
    stored = {"axes": np.array([-1]), "epsilon": np.float32(2**-10)}
    arrays = {"x": weights(4, 16)}
    ours = check(model(nodes[:-1], {"x": ["batch", 16]}, ["y"], stored), arrays)
    assert [each.partition(" -> ")[2] for each in plans(ours, arrays)] == [
        "layer_norm(affine=False, epsilon=0.0009765625)"
    ]
    check(model(nodes, {"x": ["batch", 16]}, ["y", "z", "again"], stored), arrays)


def test_operators_with_chance_stay_apart() -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], [name], name) for name in "yz"]
    one, other = fuseplan.onnx.load(model(nodes, {"x": [3, 5]}, ["y", "z"], {})).run(
        None, {"x": weights(3, 5)}
    )
    assert (one != other).any()
