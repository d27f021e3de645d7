"""Gated products: gate and value are halves of one product, as two products or as ranges of one."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.graph.cut import Cut
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.session import Session
from fuseplan.reports.books import books
from graphs import graph_of, random_inputs

TWO = """
input x: f32[3x16]
constant w: f32[24x16]
constant v: f32[24x16]
constant b: f32[24]
constant c: f32[24]
g = linear(24)(x, w)
h = bias(g, b)
s = silu(h)
u = linear(24)(x, v)
t = bias(u, c)
y = map("a * b")(s, t)
output y
"""
PACKED = """
input x: f32[3x16]
constant w: f32[48x16]
constant b: f32[48]
p = linear(48)(x, w)
q = bias(p, b)
g = slice(1, 0, 24)(q)
u = slice(1, 24, 48)(q)
s = gelu(g)
y = map("a * b")(s, u)
output y
"""
GATES = {
    "two": (TWO, "linear(48) -> bias -> glu(silu, gate=first)"),
    "without biases": (
        TWO.replace("h = bias(g, b)\n", "").replace("silu(h)", "silu(g)").replace("t = bias(u, c)\n", "")
        .replace("(s, t)", "(u, s)"),
        "linear(48) -> glu(silu, gate=first)",
    ),
    "spelled": (
        TWO.replace("s = silu(h)", "r = sigmoid(h)\ns = map('b * a')(r, h)"),
        "linear(48) -> bias -> glu(silu, gate=first)",
    ),
    "value first": (
        TWO.replace("silu(h)", "identity(h)").replace("y = map", "z = tanh(t)\ny = map")
        .replace("(s, t)", "(s, z)"),
        "linear(48) -> bias -> glu(tanh)",
    ),
    "and on": (
        TWO.replace("output y", "input r: f32[3x24]\nz = map('a * 2 + b')(y, r)\noutput z"),
        'linear(48) -> bias -> glu(silu, gate=first) -> elementwise("x * 2") -> add',
    ),
    "batch norms": (
        TWO.replace("bias(g, b)", "scale(g, b)").replace("bias(u, c)", "scale(u, c)"),
        "linear(48) -> glu(silu, gate=first)",
    ),
    "columns": (
        TWO.replace("24x16", "16x24").replace("linear(24)", "matmul(24)"),
        "linear(48) -> bias -> glu(silu, gate=first)",
    ),
    "packed": (PACKED, "linear(48) -> bias -> glu(gelu, gate=first)"),
    "packed, gate behind": (PACKED.replace("gelu(g)", "gelu(u)").replace("(s, u)", "(g, s)"),
                            "linear(48) -> bias -> glu(gelu)"),
    "interleaved": (PACKED.replace("1, 0, 24", "1, 0, 48, 2").replace("1, 24, 48", "1, 1, 48, 2"),
                    "linear(48) -> bias -> glu(gelu, gate=first, interleaved=True)"),
}  # fmt: skip


def check(graph: Graph, cut: Cut) -> None:
    """Every operator is in one row, and a run is right."""
    assert {row.state for row in books(cut, "cpu", libraries={}).operators} <= {"fused", "left", "view"}
    inputs = random_inputs(graph)
    made, exact = Session(cut)(inputs), graph.evaluate(inputs)
    for name, want in exact.items():
        np.testing.assert_allclose(made[name], want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("case", GATES)
def test_a_gated_product_is_one_plan(case: str) -> None:
    text, plan = GATES[case]
    graph = graph_of(text)
    cut = find(graph, threads=1)
    assert [str(site.plan) for site in cut.sites] == [f"f32[3x16] -> {plan}"]
    assert not cut.left
    check(graph, cut)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (TWO, "output y", "output y\noutput h"),  # the gate is needed elsewhere
        (TWO, "output y", "z = map('a + b')(y, t)\noutput z"),  # the value is read twice
        (TWO, "output y", "z = map('a + b')(y, h)\noutput z"),  # the gate is
        (TWO, "u = linear(24)(x, v)", "n = relu(x)\nu = linear(24)(n, v)"),  # of another input
        (TWO, "t = bias(u, c)", "t = tanh(u)"),  # both have an activation, and one has no bias
        (TWO, 'map("a * b")(s, t)', 'map("a + b")(s, t)'),
        (TWO, 'map("a * b")(s, t)', 'map("a / b")(s, t)'),
        (PACKED, "1, 24, 48", "1, 23, 47"),  # the halves overlap
        (PACKED, "1, 24, 48", "1, 0, 24"),  # one half twice
        (PACKED, "slice(1, 24, 48)(q)", "slice(1, 1, 48, 2)(q)"),
        (PACKED, "output y", "output y\noutput q"),
        (PACKED, "output y", "z = linear(48)(x, w)\nr = slice(1, 0, 24)(q)\noutput y\noutput r\noutput z"),
    ],
)
def test_what_is_nearly_a_gated_product_is_none(text: str, old: str, new: str) -> None:
    assert old in text
    graph = graph_of(text.replace(old, new))
    cut = find(graph, threads=1)
    assert not [site for site in cut.sites if "glu" in str(site.plan).replace("gelu", "")]
    check(graph, cut)


def test_weights_of_different_dtypes_are_two_products() -> None:
    graph = graph_of(TWO)
    constants = {**graph.constants, "v": graph.constants["v"].astype(np.float64)}
    graph = Graph(graph.inputs, graph.nodes, graph.outputs, constants)
    cut = find(graph, threads=1)
    assert [str(site.plan).count("linear(24)") for site in cut.sites] == [1, 1]
    check(graph, cut)


def test_weights_that_calls_give_are_joined_in_each() -> None:
    graph = graph_of(TWO.replace("constant", "input"))
    cut = find(graph, threads=1, weights=("w", "v"))
    (site,) = cut.sites
    assert str(site.plan) == f"f32[3x16] -> {GATES['two'][1]}"
    assert site.reads == ("x", "w", "v", "b", "c")
    for seed in (1, 2):
        inputs = random_inputs(graph, seed)
        np.testing.assert_allclose(Session(cut)(inputs)["y"], graph.evaluate(inputs)["y"], 2e-5, 2e-5)
