"""Regions: every run of formulas from a value that one value leaves, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.graph.graph import Graph
from fuseplan.graph.region import regions

NODES = 12


def _drawn(seed: int) -> Graph:
    """A graph of sums whose nodes read any two earlier values; some results leave it."""
    rng = np.random.default_rng(seed)
    values, lines = ["x", "z"], ["input x: f32[4x8]", "input z: f32[4x8]"]
    for place in range(NODES):
        one, two = rng.choice(values[-4:], 2)
        lines.append(f'y{place} = map("a + {place} * b")({one}, {two})')
        values.append(f"y{place}")
    left = [name for name in values[2:-1] if rng.random() < 0.1]
    return Graph.parse("\n".join([*lines, *(f"output {name}" for name in (*left, values[-1]))]))


def _before(graph: Graph, head: str) -> set[str]:
    """The values from x to head, with head and without x."""
    node = graph.made_by.get(head)
    found = set().union(*(_before(graph, name) for name in node.inputs)) if node else set()
    return found | {head} if node and (found or "x" in node.inputs) else set()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_inside", [False, True])
def test_regions_are_all_that_one_value_leaves(seed: int, is_inside: bool) -> None:
    graph = _drawn(seed)
    want = set()
    for head in graph.made_by:
        inside = _before(graph, head)
        closed = (inside - {head}) | ({"x"} if is_inside and head != "x" else set())
        read = {each.outputs[0] for name in closed for each in graph.readers[name]}
        if inside and read <= inside and closed.isdisjoint(graph.outputs):
            want.add((head, frozenset(inside)))
    found = [*regions(graph, "x", (), is_inside=is_inside)]
    got = [(each.head, frozenset(node.outputs[0] for node in each.nodes)) for each in found[:-1]]
    assert {*got} == want
    assert len(got) == len(want)
    assert found[-1].head == "x"


def test_formulas_of_a_long_chain_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 800 sites took 16 s: each region looked at all nodes of the graph."""
    from fuseplan.graph import formulas

    made = []
    formula = formulas._formula
    monkeypatch.setattr(formulas, "_formula", lambda *given: made.append(given) or formula(*given))  # type: ignore[func-returns-value]
    graph = _drawn(0)
    for name in ("x", "y0", "y1"):
        [*regions(graph, name, (), is_inside=False)]
    assert len(made) <= NODES
