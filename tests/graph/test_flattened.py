"""Products that a framework writes on rows, between two views."""

from __future__ import annotations

import pytest

from fuseplan.graph.find import find
from fuseplan.graph.flattened import with_axes
from fuseplan.graph.session import Session
from graphs import graph_of, random_inputs

ROWS = """
input x: f32[3x4x16]
constant w: f32[24x16]
constant b: f32[24]
r = reshape((12, 16))(x)
l = linear(24)(r, w)
z = bias(l, b)
v = reshape((3, 4, 24))(z)
y = relu(v)
output y
"""


def test_plans_go_on_behind_views_of_rows() -> None:
    graph = graph_of(ROWS)
    made = with_axes(graph)
    assert [node.op.text for node in made.nodes] == ["linear(24)", "bias", "relu"]
    (site,) = find(made, threads=1).sites
    assert str(site.plan) == "f32[3x4x16] -> linear(24) -> bias -> relu"
    inputs = random_inputs(graph)
    assert abs(Session(find(made, threads=1))(inputs)["y"] - graph.evaluate(inputs)["y"]).max() < 1e-5


def test_a_view_that_others_read_stays() -> None:
    others = "m = linear(24)(r, w)\nn = reshape((3, 4, 24))(m)\nt = tanh(r)"
    text = ROWS.replace("output y", f"{others}\noutput y\noutput n\noutput t")
    made = with_axes(graph_of(text))
    assert [node.op.name for node in made.nodes] == ["reshape", "layer", "layer", "layer", "layer", "layer"]
    assert {made.types[name].shape for name in "vn"} == {(3, 4, 24)}
    assert "r" not in with_axes(graph_of(text.replace("t = tanh(r)\n", "").replace("\noutput t", ""))).types


@pytest.mark.parametrize(
    ("old", "new"), [("(3, 4, 24)", "(4, 3, 24)"), ("x: f32[3x4x16]", "x: f32[3x4x2x8]")]
)
def test_a_view_of_other_axes_gives_the_products(old: str, new: str) -> None:
    graph = graph_of(ROWS.replace(old, new))
    made = with_axes(graph)
    assert [node.op.name for node in made.nodes] == ["reshape", "layer", "layer", "layer"]
    (site,) = find(made, threads=1).sites
    assert str(site.plan).endswith("linear(24) -> bias -> relu")
    inputs = random_inputs(graph)
    assert abs(Session(find(made, threads=1))(inputs)["y"] - graph.evaluate(inputs)["y"]).max() < 1e-5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("output y", "output y\noutput z"),  # the rows are wanted
        ("(3, 4, 24)", "(12, 24)"),  # they are rows behind it too
        ("output y", "t = tanh(z)\noutput y\noutput t"),
        ("output y", "t = tanh(l)\noutput y\noutput t"),
        ("z = bias(l, b)", "z = tanh(l)"),
    ],
)
def test_other_products_stay_as_they_are(old: str, new: str) -> None:
    graph = graph_of(ROWS.replace(old, new))
    assert with_axes(graph) is graph
