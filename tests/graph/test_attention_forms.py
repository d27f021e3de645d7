"""Attention as models spell it: rotations in pieces, repeated heads, and masks that places tell."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.execution.run import BoundPlan
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.session import Session
from fuseplan.reports.books import books
from graphs import random_inputs

ROTATED = """
input x: f32[2x5x3x8]
input cos: f32[1x1x5x8]
input sin: f32[1x1x5x8]
t = permute((0, 2, 1, 3))(x)
c = map("a * b")(t, cos)
a = slice(3, 0, 4)(t)
b = slice(3, 4, 8)(t)
n = map("-a")(b)
r = concat(3)(n, a)
s = map("a * b")(r, sin)
y = map("a + b")(c, s)
output y
"""
ROTATIONS = {
    "llama": (ROTATED, "rotary(whole=True)"),
    "one formula": (
        ROTATED.replace('s = map("a * b")(r, sin)\n', "")
        .replace('y = map("a + b")(c, s)', 'y = map("b * a + d * c")(t, cos, r, sin)')
        .replace('c = map("a * b")(t, cos)\n', ""),
        "rotary(whole=True)",
    ),
    "turned back": (ROTATED.replace('"a + b"', '"a - b"'), "rotary(inverse=True, whole=True)"),
    "the other half negated": (
        ROTATED.replace('("-a")(b)', '("a * -1")(a)').replace("(n, a)", "(b, n)"),
        "rotary(inverse=True, whole=True)",
    ),
    "images": (ROTATED.replace("1x1x5x8", "2x1x5x8"), "rotary(batched=True, whole=True)"),
    "positions outside": (
        ROTATED.replace("t = permute((0, 2, 1, 3))(x)", "t = reshape((2, 3, 5, 8))(x)")
        .replace("1x1x5x8", "3x1x8"),
        "rotary(whole=True)",
    ),
}  # fmt: skip
NEARLY = (
    ("output y", "output y\noutput r"),
    ("output y", "output y\noutput n"),
    ("slice(3, 0, 4)(t)", "slice(3, 1, 5)(t)"),
    ("(n, a)", "(a, n)\nq = relu(r)\noutput q"),
    ("(n, a)", "(n, b)"),
    ('("-a")(b)', '("-a - 0.5")(b)'),
    ("(r, sin)", "(r, cos)"),
    ("sin: f32[1x1x5x8]", "sin: f32[1x1x1x8]"),
    ("sin: f32[1x1x5x8]", "sin: f32[1x3x5x8]"),
    ("sin: f32[1x1x5x8]", "sin: f32[1x1x5x1]"),
    ('("a * b")(r, sin)', '("a / b")(r, sin)'),
    ('("a + b")(c, s)', '("b - a")(c, s)'),
    ('("a + b")(c, s)', '("a + b")(t, s)'),
)


def graph_of(text: str, **constants: np.ndarray) -> Graph:
    return Graph.parse(text, constants)


def check(graph: Graph) -> list[str]:
    """The plans, which are right; each operator is in one row."""
    cut = find(graph, threads=1)
    books(cut, "cpu", libraries={})
    inputs = random_inputs(graph)
    made, exact = Session(cut)(inputs), graph.evaluate(inputs)
    for name, want in exact.items():
        np.testing.assert_allclose(made[name], want, rtol=1e-5, atol=2e-5)
    return [str(site.plan).partition(" -> ")[2] for site in cut.sites]


@pytest.mark.parametrize("case", ROTATIONS)
def test_a_rotation_in_pieces_is_one_plan(case: str) -> None:
    text, plan = ROTATIONS[case]
    assert check(graph_of(text)) == [plan]


@pytest.mark.parametrize(("old", "new"), NEARLY)
def test_what_is_nearly_a_rotation_is_none(old: str, new: str) -> None:
    assert old in ROTATED
    assert not [plan for plan in check(graph_of(ROTATED.replace(old, new))) if "rotary" in plan]


GROUPED = """
input q: f32[2x6x5x8]
input k: f32[2x2x7x8]
input v: f32[2x2x7x8]
u = reshape((2, 2, 1, 7, 8))(k)
e = expand((2, 2, 3, 7, 8))(u)
h = reshape((2, 6, 7, 8))(e)
w = reshape((2, 2, 1, 7, 8))(v)
f = expand((2, 2, 3, 7, 8))(w)
z = reshape((2, 6, 7, 8))(f)
y = attention(keys=7)(q, h, z)
output y
"""


def test_repeated_heads_are_read_once() -> None:
    graph = graph_of(GROUPED)
    assert check(graph) == ["attention(keys=7, key_heads=2)"]
    (site,) = find(graph, threads=1).sites
    assert site.reads == ("q", "k", "v")
    assert check(graph_of(GROUPED.replace("output y", "output y\noutput h"))) == [
        "attention(keys=7, key_heads=2)"
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("w = reshape((2, 2, 1, 7, 8))(v)\nf = expand((2, 2, 3, 7, 8))", "w = reshape((2, 1, 2, 7, 8))(v)\n"
         "f = expand((2, 3, 2, 7, 8))"),  # the heads as a whole are repeated
        ("z = reshape((2, 6, 7, 8))(f)", "g = map('a * 2')(f)\nz = reshape((2, 6, 7, 8))(g)"),
        ("u = reshape((2, 2, 1, 7, 8))(k)\ne = expand((2, 2, 3, 7, 8))(u)\nh = reshape((2, 6, 7, 8))(e)",
         "u = slice(1, 0, 1)(k)\nh = expand((2, 6, 7, 8))(u)"),
    ],
)  # fmt: skip
def test_what_is_nearly_repeated_heads_is_read_as_it_is(old: str, new: str) -> None:
    assert old in GROUPED
    assert check(graph_of(GROUPED.replace(old, new)))[-1] == "attention(keys=7)"


MASKED = """
input q: f32[2x3x5x8]
input k: f32[2x3x7x8]
input v: f32[2x3x7x8]
constant m: {type}
y = attention(keys=7, {axes})(q, k, v, m)
output y
"""
LOWEST = np.finfo(np.float32).min


def masked(mask: np.ndarray) -> list[str]:
    axes = {2: "st", 3: "hst", 4: "bhst"}[mask.ndim]
    kind, word = ("mask_axes", "bool") if mask.dtype == bool else ("bias_axes", "f32")
    shape = "x".join(map(str, mask.shape))
    text = MASKED.format(type=f"{word}[{shape}]", axes=f"{kind}={axes!r}")
    return check(graph_of(text, m=mask))


@pytest.mark.parametrize(("offset", "window"), [(0, 0), (2, 0), (2, 3), (1, 1)])
@pytest.mark.parametrize("hidden", [False, -np.inf, LOWEST])
@pytest.mark.parametrize("axes", [(), (3,), (2, 3)])
def test_a_mask_of_places_is_none(offset: int, window: int, hidden: float, axes: tuple[int, ...]) -> None:
    seen = np.tri(5, 7, offset, dtype=bool) & ~(np.tri(5, 7, offset - window, dtype=bool) & bool(window))
    mask = seen if hidden is False else np.where(seen, np.float32(0), np.float32(hidden))
    told = {"offset": offset, "window": window}
    fields = "".join(f", {name}={value}" for name, value in told.items() if value)
    (plan,) = masked(np.broadcast_to(mask, (*axes, 5, 7)))
    assert sorted(plan[10:-1].split(", ")) == sorted(f"is_causal=True, keys=7{fields}".split(", "))


def test_a_mask_that_hides_nothing_is_none() -> None:
    assert masked(np.ones((5, 7), bool)) == masked(np.zeros((3, 5, 7), np.float32)) == ["attention(keys=7)"]


@pytest.mark.parametrize("place", [(0, 1), (3, 0), (2, 2), (4, 6)])
def test_a_mask_that_is_causal_but_for_one_element_stays(place: tuple[int, int]) -> None:
    mask = np.tri(5, 7, 1, dtype=bool)
    mask[place] ^= True
    assert masked(mask) == ["attention(keys=7, mask_axes=st)"]
    added = np.where(np.tri(5, 7, 1), np.float32(0), np.float32(-np.inf))
    added[place] = -3.0
    assert masked(added) == ["attention(keys=7, bias_axes=st)"]


def test_masks_that_hide_all_or_differ_between_heads_stay() -> None:
    heads = np.stack([np.tri(5, 7, offset, dtype=bool) for offset in (0, 0, 1)])
    assert masked(heads) == ["attention(keys=7, mask_axes=hst)"]
    for hidden in (np.tri(5, 7, -1, dtype=bool), np.tri(5, 7, 4, dtype=bool) & ~np.tri(5, 7, 3, dtype=bool)):
        assert masked(hidden) == ["attention(keys=7, mask_axes=st)"]


def test_a_rotations_constants_are_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = {name: np.random.default_rng(0).random((1, 1, 5, 8), np.float32) for name in ("cos", "sin")}
    text = ROTATED.replace("input cos", "constant cos").replace("input sin", "constant sin")
    graph = graph_of(text, **angles)
    session, given = Session(find(graph, threads=1)), random_inputs(graph)
    assert [str(each.plan) for each in session.compiled if "rotary" in str(each.plan)]
    monkeypatch.setattr(BoundPlan, "__call__", None)  # launches are bound
    np.testing.assert_allclose(session(given)["y"], graph.evaluate(given)["y"], rtol=1e-5, atol=1e-6)
