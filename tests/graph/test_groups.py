"""Group norms that a model spells by reshaping are found in its graph."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.graph.find import find
from fuseplan.graph.session import Session
from graph.test_find import texts
from graphs import graph_of, random_inputs

GROUPED = """
input x: f32[2x6x3x5]
constant scale: f32[6x1x1]
constant shift: f32[6x1x1]
g = reshape((2, 3, 30))(x)
{norm}
b = reshape((2, 6, 3, 5))(n)
h = map("a * b")(b, scale)
y = map("a + b")(h, shift)
output y
"""
IN_GROUPS = (
    "n = instance_norm(affine=False, epsilon=0.25)(g)",
    "n = layer_norm(affine=False, epsilon=0.25)(g)",
    """constant eps: f32[] = 0.25
m = reduce('mean', axes=(2,))(g)
d = map("a - b")(g, m)
s = map("a * a")(d)
v = reduce('mean', axes=(2,))(s)
e = map("a + b")(v, eps)
r = map("1 / sqrt(a)")(e)
n = map("a * b")(d, r)""",
)


@pytest.mark.parametrize("norm", IN_GROUPS)
def test_groups_between_reshapes_are_found(norm: str) -> None:
    graph = graph_of(GROUPED.format(norm=norm))
    cut = find(graph, threads=1)
    assert texts(cut) == ["f32[2x6x3x5] -> group_norm(3, affine=False, epsilon=0.25) -> scale -> bias"]
    assert not cut.left
    inputs = random_inputs(graph)
    np.testing.assert_allclose(Session(cut)(inputs)["y"], graph.evaluate(inputs)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [("output y", "output y\noutput g"), ("2, 3, 30", "3, 2, 30"), ("(2, 6, 3, 5)", "(2, 6, 5, 3)")],
)
def test_what_is_nearly_in_groups_is_none(old: str, new: str) -> None:
    text = GROUPED.format(norm=IN_GROUPS[0]).replace(old, new)
    cut = find(graph_of(text), threads=1)
    assert not [text for text in texts(cut) if "group_norm" in text]
