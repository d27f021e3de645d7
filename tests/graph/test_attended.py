"""Attention that models write out, as plans: products, a softmax, views, masks and scales."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.session import Session
from fuseplan.graph.trial import meaning
from fuseplan.graph.why import Why
from graphs import random_inputs

PLAIN = """
input q: f32[2x6x5x8]
input k: f32[2x6x7x8]
input v: f32[2x6x7x3]
input m: f32[2x1x1x7]
constant half: f32[] = 0.5
constant zero: f32[] = 0.0
t = permute((0, 1, 3, 2))(k)
a = map("a * b")(q, half)
b = map("a * b")(t, half)
s: f32[2x6x5x7] = onnx.MatMul(a, b)
w = map("a + b")(s, m)
p = softmax(w)
n: bool[2x6x5x7] = onnx.IsNaN(p)
g: f32[2x6x5x7] = onnx.Where(n, zero, p)
y: f32[2x6x5x3] = onnx.MatMul(g, v)
output y
"""
BARE = [
    ("n: bool[2x6x5x7] = onnx.IsNaN(p)\n", ""),
    ("g: f32[2x6x5x7] = onnx.Where(n, zero, p)\n", ""),
    ("onnx.MatMul(g, v)", "onnx.MatMul(p, v)"),
]
ADDED = ('w = map("a + b")(s, m)\n', "")
HIDDEN = [
    ("input m: f32[2x1x1x7]", "input m: bool[2x1x1x7]"),
    ('w = map("a + b")(s, m)', "w: f32[2x6x5x7] = torch.aten.where.hidden(s, m)"),
]
MASKED = "attention(keys=7, features=3, scale=0.25, bias_axes=bt)"
FORMS = {
    "torch's export": ([], MASKED),
    "no mask": ([("softmax(w)", "softmax(s)"), ADDED], "attention(keys=7, features=3, scale=0.25)"),
    "no guard": (BARE, MASKED.replace(")", ", nan_unseen=True)")),
    "no guard, no mask": (
        [("softmax(w)", "softmax(s)"), ADDED, *BARE],
        "attention(keys=7, features=3, scale=0.25)",
    ),
    "one factor": ([("MatMul(a, b)", "MatMul(q, b)")], MASKED.replace("0.25", "0.5")),
    "divided scores": (
        [("onnx.MatMul(a, b)", "onnx.MatMul(q, t)"), ('("a + b")(s', '("b + a / 0.5")(s')],
        MASKED.replace("0.25", "2"),
    ),
    "the usual scale": (
        [
            ("onnx.MatMul(a, b)", "onnx.MatMul(q, t)"),
            ('("a + b")(s', '("a * 0.35355338454246524 + b")(s'),
        ],
        "attention(keys=7, features=3, bias_axes=bt)",
    ),
    "a stack of matrices": (
        [
            ('map("a * b")(q, half)', "reshape((12, 5, 8))(q)"),
            ('map("a * b")(t, half)', "reshape((12, 8, 7))(t)"),
            ("s: f32[2x6x5x7] = onnx.MatMul(a, b)",
             "z: f32[12x5x7] = torch.aten.bmm.default(a, b)\ns = reshape((2, 6, 5, 7))(z)"),
            ("y: f32[2x6x5x3] = onnx.MatMul(g, v)",
             "i = reshape((12, 5, 7))(g)\nj = reshape((12, 7, 3))(v)\n"
             "o: f32[12x5x3] = torch.aten.bmm.default(i, j)\ny = reshape((2, 6, 5, 3))(o)"),
        ],
        "attention(keys=7, features=3, scale=1, bias_axes=bt)",
    ),
    "keys turned as matrices": (
        [("t = permute((0, 1, 3, 2))(k)", "h = reshape((12, 7, 8))(k)\ni = permute((0, 2, 1))(h)\n"
          "t = reshape((2, 6, 8, 7))(i)")],
        MASKED,
    ),
    "heads that several queries read": (
        [
            ("k: f32[2x6x7x8]", "k: f32[2x2x7x8]"),
            ("v: f32[2x6x7x3]", "v: f32[2x2x7x3]"),
            ("t = permute((0, 1, 3, 2))(k)",
             "u = reshape((2, 2, 1, 7, 8))(k)\ne = expand((2, 2, 3, 7, 8))(u)\n"
             "h = reshape((12, 7, 8))(e)\ni = permute((0, 2, 1))(h)\nt = reshape((2, 6, 8, 7))(i)"),
            ("onnx.MatMul(g, v)", "onnx.MatMul(g, ev)"),
            ("p = softmax", "u2 = reshape((2, 2, 1, 7, 3))(v)\ne2 = expand((2, 2, 3, 7, 3))(u2)\n"
             "ev = reshape((2, 6, 7, 3))(e2)\np = softmax"),
        ],
        MASKED.replace("keys=7", "keys=7, key_heads=2"),
    ),
    "scores where a mask is true": (HIDDEN, MASKED.replace("bias", "mask")),
    "scores where a mask is true, no guard": (
        [*HIDDEN, *BARE],
        MASKED.replace("bias", "mask").replace(")", ", nan_unseen=True)"),
    ),
    "two masks": (
        [
            ("input m: f32[2x1x1x7]", "input m: f32[2x1x1x7]\ninput h: bool[2x1x1x7]"),
            ("p = softmax(w)", "x: f32[2x6x5x7] = torch.aten.where.hidden(w, h)\np = softmax(x)"),
        ],
        None,
    ),
    "heads inside of queries": (
        [
            ("q: f32[2x6x5x8]", "q0: f32[2x5x6x8]"),
            ("k: f32[2x6x7x8]", "k0: f32[2x7x6x8]"),
            ("t = permute((0, 1, 3, 2))(k)", "q = permute((0, 2, 1, 3))(q0)\nt = permute((0, 2, 3, 1))(k0)"),
        ],
        None,  # no value has the keys as (b, h, t, d)
    ),
}  # fmt: skip


def graph_of(text: str, changes: list[tuple[str, str]], **constants: np.ndarray) -> Graph:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return Graph.parse(text, constants)


class Numpy:
    """What runs foreign operators here: the meanings that they have in a graph."""

    def prepare(self, graph, unit):  # type: ignore[no-untyped-def]
        def run(given):  # type: ignore[no-untyped-def]
            values = {**graph.constants, **dict(zip(unit.reads, given, strict=True))}
            for node in unit.nodes:
                made = node.op.evaluate([values[name] for name in node.inputs])
                values |= dict(zip(node.outputs, made, strict=True))
            return [values[name] for name in unit.writes]

        return run


def check(graph: Graph) -> list[str]:
    """The plans, which are right."""
    cut = find(graph, threads=1)
    inputs = random_inputs(graph)
    made = Session(cut, {"onnx": Numpy(), "torch": Numpy()})(inputs)
    for name, want in graph.evaluate(inputs).items():
        np.testing.assert_allclose(made[name], want, rtol=1e-5, atol=2e-5)
    return [str(site.plan).partition(" -> ")[2] for site in cut.sites]


@pytest.mark.parametrize("form", FORMS)
def test_attention_in_pieces_is_one_plan(form: str) -> None:
    changes, plan = FORMS[form]
    made = [each for each in check(graph_of(PLAIN, changes)) if "attention" in each]
    assert made == [plan] * (plan is not None)


def test_the_site_means_its_pieces() -> None:
    graph = graph_of(PLAIN, [])
    (site,) = find(graph, threads=1).sites
    inputs = random_inputs(graph)
    want = graph.evaluate(inputs)["y"]
    np.testing.assert_array_equal(meaning(graph, site, inputs), want)
    assert site.reads == ("q", "k", "v", "m")
    assert len(site.nodes) == len(graph.nodes)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_constant_masks(is_guarded: bool) -> None:
    bare = [] if is_guarded else BARE
    changes = [("input m: f32[2x1x1x7]", "constant m: f32[1x1x5x7]"), *bare]
    causal = np.where(np.tri(5, 7, 2), 0, -np.inf).astype(np.float32)[None, None]
    assert check(graph_of(PLAIN, changes, m=causal)) == [
        "attention(is_causal=True, keys=7, features=3, scale=0.25, offset=2)"
    ]
    drawn = np.random.default_rng(0).standard_normal((1, 1, 5, 7)).astype(np.float32)
    assert check(graph_of(PLAIN, changes, m=drawn)) == [
        "attention(keys=7, features=3, scale=0.25, bias_axes=st)"
    ]
    drawn[0, 0, 2] = -np.inf
    nan = "" if is_guarded else ", nan_unseen=True"
    made = check(graph_of(PLAIN, changes, m=drawn))
    assert made == [f"attention(keys=7, features=3, scale=0.25, bias_axes=st{nan})"]


@pytest.mark.parametrize("is_seeing", [True, False])
def test_constant_masks_of_places(is_seeing: bool) -> None:
    changes = [("input m: bool[2x1x1x7]", "constant m: bool[1x1x5x7]"), *BARE]
    mask = np.tri(5, 7, 2, dtype=bool)[None, None]
    told = "is_causal=True, keys=7, features=3, scale=0.25, offset=2"
    if not is_seeing:
        mask[0, 0, 1], told = False, "keys=7, features=3, scale=0.25, mask_axes=st, nan_unseen=True"
    assert check(graph_of(PLAIN, [*HIDDEN, *changes], m=mask)) == [f"attention({told})"]


def test_a_mask_that_hides_all_keys_gives_zeros() -> None:
    graph = graph_of(PLAIN, [])
    inputs = random_inputs(graph) | {"m": np.full((2, 1, 1, 7), -np.inf, np.float32)}
    assert not Session(find(graph, threads=1))(inputs)["y"].any()


def test_a_mask_that_hides_all_keys_of_a_query_gives_nan_without_a_guard() -> None:
    graph = graph_of(PLAIN, BARE)
    mask = np.zeros((2, 1, 1, 7), np.float32)
    mask[0] = -np.inf
    inputs = random_inputs(graph) | {"m": mask}
    cut = find(graph, threads=1)
    assert str(cut.sites[0].plan).partition(" -> ")[2] == MASKED.replace(")", ", nan_unseen=True)")
    made, want = Session(cut)(inputs)["y"], graph.evaluate(inputs)["y"]
    assert np.isnan(made[0]).all()
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=2e-5)


LEFT = {
    "weights are an output": ([("output y", "output y\noutput p")], Why.EXTERNAL_CONSUMER),
    "scores are an output": ([("output y", "output y\noutput s")], Why.EXTERNAL_CONSUMER),
    "values are scaled": (
        [("y: f32[2x6x5x3] = onnx.MatMul(g, v)",
          'c = map("a * b")(v, half)\ny: f32[2x6x5x3] = onnx.MatMul(g, c)')],
        Why.FORMULA,
    ),
    "keys are no view": (
        [("k: f32[2x6x7x8]", "t: f32[2x6x8x7]"), ("t = permute((0, 1, 3, 2))(k)\n", "")],
        Why.SHAPE,
    ),
    "heads in another order": (
        [
            ("k: f32[2x6x7x8]", "k: f32[2x2x7x8]"),
            ("t = permute((0, 1, 3, 2))(k)",
             "u = reshape((2, 1, 2, 7, 8))(k)\ne = expand((2, 3, 2, 7, 8))(u)\n"
             "h = reshape((12, 7, 8))(e)\ni = permute((0, 2, 1))(h)\nt = reshape((2, 6, 8, 7))(i)"),
        ],
        Why.SHAPE,
    ),
    "a scale of zero": ([("f32[] = 0.5", "f32[] = 0.0")], Why.SHAPE),
    "a mask of a number a query": ([("m: f32[2x1x1x7]", "m: f32[1x1x5x1]")], Why.REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_nearly_attention_is_left_with_its_reason(case: str) -> None:
    changes, why = LEFT[case]
    graph = graph_of(PLAIN, changes)
    assert not [plan for plan in check(graph) if "attention" in plan]
    cut = find(graph, threads=1)
    reason = cut.reason(graph.made_by["y"])
    assert reason is not None
    assert reason.why is why


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("onnx.Where(n, zero, p)", "onnx.Where(n, p, p)"),
        ("constant zero: f32[] = 0.0", "constant zero: f32[] = 1.0"),
        ("softmax(w)", "softmax(2)(w)"),
        ('("a + b")(s', '("a + b * 2")(s'),
        ("softmax(w)", "softmax(m3)"),
    ],
)
def test_another_product_of_a_softmax_is_no_attention(old: str, new: str) -> None:
    text = PLAIN.replace("p = softmax", 'm3 = map("2 * a")(w)\np = softmax') if "m3" in new else PLAIN
    assert not [plan for plan in check(graph_of(text, [(old, new)])) if "attention" in plan]
