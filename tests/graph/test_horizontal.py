"""Horizontal products: products and convolutions of one input are one launch, each result a range of it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.graph import horizontal
from fuseplan.graph.cut import Cut
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.horizontal import DIFFERENT
from fuseplan.graph.opened import OpenKernels
from fuseplan.graph.place import Copy, Launch
from fuseplan.graph.session import Session
from fuseplan.reports.books import books
from fuseplan.reports.tried import tried
from graphs import graph_of, random_inputs

HEADS = """
input x: f32[2x32x64]
constant wq: f32[64x64]
constant wk: f32[64x64]
constant wv: f32[64x64]
constant bq: f32[64]
constant bk: f32[64]
constant bv: f32[64]
q0 = linear(64)(x, wq)
q1 = bias(q0, bq)
k0 = linear(64)(x, wk)
k1 = bias(k0, bk)
v0 = linear(64)(x, wv)
v1 = bias(v0, bv)
q2 = reshape((2, 32, 4, 16))(q1)
k2 = reshape((2, 32, 4, 16))(k1)
v2 = reshape((2, 32, 4, 16))(v1)
q = permute((0, 2, 1, 3))(q2)
k = permute((0, 2, 1, 3))(k2)
v = permute((0, 2, 1, 3))(v2)
a = attention(q, k, v)
b = permute((0, 2, 1, 3))(a)
y = reshape((2, 32, 64))(b)
output y
"""
INCEPTION = """
input x: f32[2x48x9x9]
constant w1: f32[16x48x1x1]
constant w2: f32[24x48x1x1]
constant w3: f32[8x48x1x1]
constant v2: f32[32x24x3x3]
constant v3: f32[16x8x5x5]
a1 = conv2d(16, kernel=1)(x, w1)
a = relu(a1)
b1 = conv2d(24, kernel=1)(x, w2)
b2 = relu(b1)
b3 = conv2d(32, kernel=3, padding=1)(b2, v2)
b = relu(b3)
c1 = conv2d(8, kernel=1)(x, w3)
c2 = relu(c1)
c3 = conv2d(16, kernel=5, padding=2)(c2, v3)
c = relu(c3)
y = concat(1)(a, b, c)
output y
"""
TWO = """
input x: f32[6x16]
constant w: f32[24x16]
constant v: f32[8x16]
p = linear(24)(x, w)
q = linear(8)(x, v)
r = tanh(p)
s = tanh(q)
m = softmax(r)
n = softmax(s)
output m
output n
"""


def check(graph: Graph, cut: Cut) -> Session:
    """Every operator is in one row, each launch is counted, and a run is right."""
    report = books(cut, "cpu", libraries={})
    assert {row.state for row in report.operators} <= {"fused", "view"}
    assert len({row.name for row in report.operators}) == len(report.operators) == len(graph.nodes)
    session = check_run(graph, cut)
    launched = [step for step in session.placement.steps if isinstance(step, Launch)]
    assert report.launches.kernels == len(launched) == len(cut.sites)
    return session


def check_run(graph: Graph, cut: Cut) -> Session:
    """A run is right."""
    session, inputs = Session(cut), random_inputs(graph)
    made, exact = session(inputs), graph.evaluate(inputs)
    for name, want in exact.items():
        np.testing.assert_allclose(made[name], want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    return session


def test_projections_of_attention_are_one_launch_and_it_reads_them_where_they_lie() -> None:
    graph = graph_of(HEADS)
    cut = find(graph, threads=1)
    assert [(str(site.plan), site.results) for site in cut.sites] == [
        ("f32[2x32x64] -> linear(192) -> bias", ("q1", "k1", "v1")),
        ("f32[2x4x32x16, strides=6144:16:192:1 of bhsc] -> attention", ("a",)),
    ]
    session = check(graph, cut)
    assert [step.value for step in session.placement.steps if isinstance(step, Copy)] == ["x"]
    assert [row.sites for row in books(cut, "cpu", libraries={}).operators if row.name[0] in "qkv"] == [
        *[(1,)] * 6, *[()] * 6
    ]  # fmt: skip


def turned(name: str) -> str:
    """The pieces of a rotation of heads of 16 elements, by the angles of 32 places."""
    return f"""
        {name}a = slice(3, 0, 8)({name})
        {name}b = slice(3, 8, 16)({name})
        {name}n = map("-a")({name}b)
        {name}h = concat(3)({name}n, {name}a)
        {name}c = map("a * b")({name}, cos)
        {name}s = map("a * b")({name}h, sin)
        {name}r = map("a + b")({name}c, {name}s)
    """.replace("        ", "")


def test_queries_and_keys_are_turned_in_one_launch_where_they_lie() -> None:
    angles = "input cos: f32[1x1x32x16]\ninput sin: f32[1x1x32x16]\n"
    text = HEADS.replace(
        "v = permute((0, 2, 1, 3))(v2)\n", "v = permute((0, 2, 1, 3))(v2)\n" + turned("q") + turned("k")
    )
    text = re.sub(r"bias\((\w+), \w+\)", r"relu(\1)", text).replace("(q, k, v)", "(qr, kr, v)")
    graph = graph_of(text.replace("constant wq", angles + "constant wq"))
    cut = find(graph, threads=1)
    assert [(str(site.plan), site.results) for site in cut.sites] == [
        ("f32[2x32x64] -> linear(192) -> relu", ("q1", "k1", "v1")),
        ("f32[2x8x32x16, strides=6144:16:192:1 of bhsd] -> rotary(whole=True)", ("qr", "kr")),
        (
            "f32[2x4x32x16, strides=4096:16:128:1 of bhsc] -> attention(value_strides=(6144, 16, 192, 1))",
            ("a",),
        ),
    ]
    session = check(graph, cut)
    assert {step.value for step in session.placement.steps if isinstance(step, Copy)} <= {"x", "cos", "sin"}
    # Where the projections are the library's, and lie anywhere.
    left = replace(
        cut, sites=cut.sites[1:], left=dict(cut.left) | {id(node): DIFFERENT for node in cut.sites[0].nodes}
    )
    check_run(graph, left)


def test_branches_that_convolutions_read_are_one_launch_and_the_result_in_place_is_none_of_it() -> None:
    graph = graph_of(INCEPTION)
    cut = find(graph, threads=1)
    found = {site.results: site for site in cut.sites}
    assert str(found["b2", "c2"].plan) == "f32[2x48x9x9, nhwc] -> conv2d(32, kernel=1) -> relu"
    assert str(found["b",].plan.src) == "f32[2x24x9x9, strides=2592:1:288:32]"
    (row,) = (each for each in books(cut, "cpu", libraries={}).sites if each.operators == ("a1", "a"))
    assert row.apart.startswith("apart: ")
    check(graph, cut)
    apart = find(graph, threads=1, ranges=False)
    assert len(apart.sites) == len(cut.sites) + 1
    check(graph, apart)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("s = tanh(q)", "s = relu(q)"),  # another activation
        ("s = tanh(q)", "input t: f32[6x8]\ns = map('a + b')(q, t)"),  # an element for each of the result's
    ],
)
def test_other_operators_stay_apart_and_the_report_says_so(old: str, new: str) -> None:
    graph = graph_of(TWO.replace(old, new))
    cut = find(graph, threads=1)
    assert all(site.results == (site.dst,) for site in cut.sites)
    assert "not joined with other products of its input: apart" in str(books(cut, "cpu", libraries={}))
    check(graph, cut)


def test_what_takes_longer_stays_apart_and_all_that_was_tried_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(sites: horizontal._Sites, made: object, members: object) -> horizontal._Trial:
        return horizontal._Trial({}, -1.0, {"r": 0.0, "s": 1.0}, "")

    monkeypatch.setattr(horizontal._Sites, "_tried", slow)
    cut = find(graph_of(TWO), threads=1)
    assert all(site.results == (site.dst,) for site in cut.sites)
    assert "f32[6x16] -> linear(32) -> tanh: 1000 ms more  [apart]" in str(tried(cut, "p"))


def test_weights_of_a_call_are_joined_and_constants_are_not_joined_with_them() -> None:
    graph = graph_of(TWO.replace("constant", "input"))
    cut = find(graph, threads=1, weights=("w", "v"))
    assert cut.sites[0].joins == {"weight": (2, 0)}
    check(graph, cut)
    mixed = find(graph_of(TWO.replace("constant v", "input v")), threads=1, weights=("v",))
    assert [str(site.apart).rpartition(": ")[2] for site in mixed.sites if site.apart] == [
        "an operand is computed, or of another dtype or shape than the others'"
    ] * 2


def test_a_kernel_of_ranges_serves_every_batch() -> None:
    graph = graph_of(HEADS)
    cut = OpenKernels({*graph.types}, {*graph.types}).serve(find(graph, threads=1))
    assert [str(site.built.plan.src) for site in cut.sites] == [
        "f32[*x32x64, bsc]",
        "f32[*x4x32x16, strides=6144:16:192:1 of bhsc]",
    ]
    check(graph, cut)


@settings(max_examples=4, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    rows=st.integers(1, 9),
    is_image=st.booleans(),
    has_bias=st.booleans(),
    act=st.sampled_from(("relu", "silu", "identity")),
)
def test_random_branches_are_one_launch(
    sizes: list[int], rows: int, is_image: bool, has_bias: bool, act: str
) -> None:
    taps, op = ("x1x1", "conv2d({}, kernel=1)") if is_image else ("", "linear({})")
    lines = [f"input x: f32[{rows}x12{'x3x5' if is_image else ''}]"]
    for place, size in enumerate(sizes):
        lines += [f"constant w{place}: f32[{size}x12{taps}]", f"p{place} = {op.format(size)}(x, w{place})"]
        lines += [f"constant b{place}: f32[{size}]", f"q{place} = bias(p{place}, b{place})"] * has_bias
        lines += [f"r{place} = {act}({'q' if has_bias else 'p'}{place})", f"y{place} = softmax(r{place})"]
        lines += [f"output y{place}"]
    graph = graph_of("\n".join(lines) + "\n")
    cut = find(graph, threads=1)
    assert cut.sites[0].results == tuple(f"r{place}" for place in range(len(sizes)))
    check(graph, cut)
