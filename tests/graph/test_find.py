"""Graphs cut into plans: what ends in which plan, why the rest does not, and that the plans are right."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.graph.cut import Cut
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.ops import VIEWS
from fuseplan.graph.session import Session
from fuseplan.graph.why import Why
from graphs import graph_of, random_inputs

BOTTLENECK = """
input x: f32[1x64x14x14]
constant w1: f32[16x64x1x1]
constant m: f32[16]
constant v: f32[16]
constant s: f32[16]
constant h: f32[16]
constant w2: f32[64x16x1x1]
constant b2: f32[64]
y1 = conv2d(16, kernel=1)(x, w1)
y2 = batch_norm(y1, m, v, s, h)
y3 = relu(y2)
y4 = conv2d(64, kernel=1)(y3, w2)
y5 = bias(y4, b2)
y6 = map("a + b")(x, y5)
y7 = relu(y6)
output y7
"""
EXCITE = """
input x: f32[1x32x7x7, nchw]
constant w1: f32[8x32x1x1]
constant w2: f32[32x8x1x1]
p = reduce('mean', axes=(2, 3))(x)
e = conv2d(8, kernel=1)(p, w1)
t = sigmoid(e)
u = map("a * b")(e, t)
c = conv2d(32, kernel=1)(u, w2)
g = sigmoid(c)
y = map("a * b")(g, x)
output y
"""
NORMED = """
input x: f32[2x6x16]
input r: f32[2x6x16]
constant scale: f32[16]
constant shift: f32[16]
constant w: f32[24x16]
s = map("a + b")(x, r)
n = layer_norm(s, scale, shift)
l = linear(24)(n, w)
output l
"""
PRE_NORM = NORMED.replace("output l", "output l\noutput s")
SPELLED = """
input x: f32[4x16]
constant w: f32[16x16]
constant b: f32[16]
constant root: f32[] = 1.4142135
constant half: f32[] = 0.5
constant one: f32[1] = [1.0]
l = matmul(16)(x, w)
z = map("a + b")(b, l)
d = map("a / b")(z, root)
e = map("erf(a)")(d)
f = map("a + b")(one, e)
g = map("a * b")(half, f)
y = map("a * b")(g, z)
output y
"""
NORM_IN_PIECES = """
input x: f32[1x8x5x5]
constant w: f32[8x8x3x3]
constant mean: f32[8x1x1]
constant k: f32[1x8x1x1]
constant shift: f32[8x1x1]
y = conv2d(8, kernel=3)(x, w)
d = map("a - b")(y, mean)
n = map("a * b")(k, d)
z = map("a + b")(n, shift)
q = map("a / b")(z, k)
r = map("b - a")(q, shift)
output r
"""
SPELLED_NORM = """
input x: f32[2x6x16]
input r: f32[2x6x16]
constant scale: f32[16]
constant shift: f32[16]
constant column: f32[6x1]
constant eps: f32[] = 0.25
s = map("a + b")(x, r)
m = {mean}(s)
d = map("a - b")(s, m)
p = {square}
v = {mean}(p)
e = map("a + b")(v, eps)
{factor}
t = map("a * b")(scale, q)
y = map("a + b")(t, shift)
output y
"""
MEANS = ("mean(2, keepdim=True)", "reduce('mean', axes=(2,))")
SQUARES = ('map("a * a")(d)', 'map("a * b")(d, d)', 'map("a ** 2")(d)')
FACTORS = (
    'k = map("sqrt(a)")(e)\nq = map("a / b")(d, k)',
    'k = map("sqrt(a)")(e)\nl = map("1 / a")(k)\nq = map("a * b")(d, l)',
    'k = map("a ** -0.5")(e)\nq = map("a * b")(k, d)',
    'k = map("a ** 0.5")(e)\nq = map("a / b")(d, k)',
)
FORMULAS = """
input x: f32[2x3x4]
input y: f32[2x3x4]
input row: f32[4]
constant k: f32[3x1]
a = map("a - b")(x, y)
b = leaky_relu(0.2)(a)
c = map("a * b")(b, k)
d = map("a + b")(c, row)
output d
"""

ALONG = """
input x: f32[3x5x8]
input positions: f32[1x5x8]
input rows: f32[3x5x1]
input images: f32[3x1x16]
constant table: f32[1x5x16]
constant w: f32[16x8]
a = map("b - a")(x, positions)
n = layer_norm(affine=False)(a)
b = linear(16)(n, w)
c = map("a * b - c")(b, rows, table)
d = map("a * b + c")(c, images, images)
output d
"""


def texts(cut: Cut) -> list[str]:
    return [str(site.plan) for site in cut.sites]


@pytest.mark.parametrize(
    ("text", "plans"),
    [
        (
            BOTTLENECK,
            [
                "f32[1x64x14x14, nhwc] -> conv2d(16, kernel=1) -> bias -> relu",
                "f32[1x16x14x14, nhwc] -> conv2d(64, kernel=1) -> bias -> add -> relu",
            ],
        ),
        (
            EXCITE,
            [
                "f32[1x32x1x1, nhwc] -> conv2d(8, kernel=1) -> silu",
                "f32[1x8x1x1, nhwc] -> conv2d(32, kernel=1) -> sigmoid",
                "f32[1x32x7x7, nhwc] -> scale",
            ],
        ),
        (NORMED, ["f32[2x6x16] -> add -> layer_norm", "f32[2x6x16] -> linear(24)"]),
        (PRE_NORM, ["f32[2x6x16, bsc] -> add", "f32[2x6x16] -> layer_norm", "f32[2x6x16] -> linear(24)"]),
        (
            SPELLED,
            ['f32[4x16] -> linear(16) -> bias -> elementwise("0.5 * (1 + erf(x / 1.4142135381698608)) * x")'],
        ),
        (NORM_IN_PIECES, ["f32[1x8x5x5] -> conv2d(8, kernel=3) -> bias"]),
        (
            ALONG,
            [
                "f32[3x5x8] -> add_along((1, 2), alpha1=-1) -> layer_norm(affine=False)",
                "f32[3x5x8] -> linear(16) -> mul_along((0, 1)) -> add_along((1, 2), alpha2=-1)"
                " -> mul_along((0, 2)) -> add_along((0, 2))",
            ],
        ),
        (FORMULAS, ["f32[2x3x4] -> add(alpha2=-1) -> leaky_relu(0.2) -> scale", "f32[2x3x4, bsc] -> bias"]),
    ],
    ids=["bottleneck", "excite", "norm", "pre-norm", "gelu", "norm in pieces", "along", "formulas"],
)
def test_plans_are_found_and_right(text: str, plans: list[str]) -> None:
    graph = graph_of(text)
    cut = find(graph, threads=1)
    assert texts(cut) == plans
    books(cut)
    inputs = random_inputs(graph)
    session = Session(cut)
    exact = graph.evaluate(inputs)
    for _ in range(2):  # the memory of a run is used again
        made = session(inputs)
        for name, want in exact.items():
            assert made[name].dtype == np.float32
            np.testing.assert_allclose(made[name], want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    ("square", "mean"), [(square, MEANS[0]) for square in SQUARES] + [(SQUARES[0], MEANS[1])]
)
@pytest.mark.parametrize("is_centred", [True, False])
def test_normalizations_in_pieces_are_found(factor: str, square: str, mean: str, is_centred: bool) -> None:
    text = SPELLED_NORM.format(mean=mean, square=square, factor=factor)
    if not is_centred:
        text = text.replace(f'm = {mean}(s)\nd = map("a - b")(s, m)\n', "").replace("(d)", "(s)")
        text = text.replace("(d, ", "(s, ").replace(", d)", ", s)")
    graph = graph_of(text)
    cut = find(graph, threads=1)
    kind = "layer_norm" if is_centred else "rms_norm"
    assert texts(cut) == [f"f32[2x6x16] -> add -> {kind}(affine=False, epsilon=0.25) -> scale -> bias"]
    books(cut)
    inputs = random_inputs(graph)
    np.testing.assert_allclose(Session(cut)(inputs)["y"], graph.evaluate(inputs)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("output y", "output y\noutput v"),
        ("axes=(2,)", "axes=(1,)"),
        ('("a + b")(v, eps)', '("a + b")(v, column)'),
        ('("a * a")(d)', '("a * b")(d, s)'),
        ('("sqrt(a)")(e)', '("sqrt(a)")(v)'),
        ('("a / b")(d, k)', '("b / a")(d, k)'),
        ('("a / b")(d, k)', '("a / b")(s, k)'),
    ],
)
def test_what_is_nearly_a_normalization_is_none(old: str, new: str) -> None:
    text = SPELLED_NORM.format(mean=MEANS[1], square=SQUARES[0], factor=FACTORS[0])
    assert old in text
    graph = graph_of(text.replace(old, new))
    cut = find(graph, threads=1)
    assert not [text for text in texts(cut) if "_norm" in text]
    inputs = random_inputs(graph)
    made, exact = Session(cut)(inputs), graph.evaluate(inputs)
    np.testing.assert_allclose(made["y"], exact["y"], rtol=1e-4, atol=1e-4, equal_nan=True)


def books(cut: Cut) -> None:
    """Each node is in exactly one plan, left for a reason, or a view."""
    inside = [id(node) for site in cut.sites for node in site.nodes]
    for node in cut.graph.nodes:
        places = [inside.count(id(node)), id(node) in cut.left, isinstance(node.op, VIEWS)]
        assert sum(places) == 1, node


def why(graph: Graph, name: str) -> Why:
    return find(graph, threads=1).left[id(graph.made_by[name])].why


@pytest.mark.parametrize(
    ("lines", "name", "code"),
    [
        ("y: f32[2x3] = onnx.Foo(x)", "y", Why.NOT_IN_TABLE),
        ("y = reduce('sum', axes=(1,))(x)", "y", Why.NO_PLAN),
        ("y = linear(4)(x, w)", "y", Why.WEIGHT_NOT_CONSTANT),
        ("y = map('a + 1')(v)", "y", Why.SHAPE),
        ("y = map('a * b')(t, u)", "y", Why.BROADCAST),
        ("y = map('a / b')(x, r)", "y", Why.BROADCAST),
        ("y = map('a + b')(c, r)", "y", Why.BROADCAST),
        ("y = map('a ** b')(x, z)", "y", Why.FORMULA),
        ("y = reshape((3, 2))(i)\nq: i64[3x2] = onnx.Neg(y)", "q", Why.NOT_IN_TABLE),
    ],
)
def test_what_is_left_has_its_reason(lines: str, name: str, code: Why) -> None:
    head = """
input x: f32[2x3]
input z: f32[2x3]
input w: f32[4x3]
input r: f32[2x1]
input t: f32[2x3x4x5]
input u: f32[1x1x4x1]
input v: f32[3]
input i: i64[2x3]
constant c: f32[1x3]
"""
    assert why(graph_of(f"{head}{lines}\noutput {name}"), name) == code


def test_a_plan_ends_where_a_value_is_needed_elsewhere() -> None:
    head = "input x: f32[2x3]\nconstant w: f32[3x3]\n"
    ends = {
        "l = linear(3)(x, w)\ny = relu(l)\noutput y\noutput l": Why.GRAPH_OUTPUT,
        "l = linear(3)(x, w)\ny = relu(l)\nz = linear(3)(l, w)\noutput y\noutput z": Why.EXTERNAL_CONSUMER,
        "l = linear(3)(x, w)\ny = linear(3)(l, w)\noutput y": Why.CONSUMER,
    }
    for lines, code in ends.items():
        site = find(graph_of(head + lines), threads=1).sites[0]
        assert str(site.plan) == "f32[2x3] -> linear(3)"
        assert site.ended.why == code


def test_a_formula_that_reads_its_source_twice_is_two_plans() -> None:
    cut = find(graph_of("""
input x: f32[4x16]
input z: f32[4x16]
t = map("tanh(a * b)")(x, z)
y = map("a + b")(t, x)
output y
"""))  # fmt: skip
    assert [str(site.plan).count(" -> ") for site in cut.sites] == [2, 1]


def test_a_constant_that_is_no_number_is_in_no_formula() -> None:
    graph = graph_of("input x: f32[2x3]\nconstant k: f32[1] = [nan]\ny = map('a * b')(x, k)\noutput y")
    assert find(graph, threads=1).left[id(graph.nodes[0])].why == Why.NO_PLAN
    assert np.isnan(Session(find(graph, threads=1))(random_inputs(graph))["y"]).all()


def test_a_gate_of_several_readers_is_one_plan() -> None:
    """x * sigmoid(x) reads a product's result twice, and nothing else does."""
    graph = graph_of(
        "input x: f32[2x3]\nconstant w: f32[3x3]\nl = linear(3)(x, w)\ng = sigmoid(l)\n"
        'y = map("a * b")(g, l)\noutput y'
    )
    (plan,) = texts(find(graph, threads=1))
    assert plan == "f32[2x3] -> linear(3) -> silu"


ALONE = """
input x: f32[8x16x30x30, nchw]
constant w: f32[32x16x3x3]
y = conv2d(32, kernel=3)(x, w)
z = relu(y)
output z
"""
TWO = ALONE.replace("output z", "q = conv2d(32, kernel=1)(z, v)\noutput q").replace(
    "y = conv2d", "constant v: f32[32x32x1x1]\ny = conv2d"
)


@pytest.mark.parametrize(
    ("text", "last", "layouts"),
    [
        (ALONE, (), ["nchw"]),  # two copies would take longer than the convolution
        (ALONE, ("x", "z"), ["nhwc"]),
        (TWO, (), ["nhwc", "nhwc"]),
    ],
)
def test_a_plan_alone_reads_tensors_as_they_lie(text: str, last: tuple[str, ...], layouts: list[str]) -> None:
    cut = find(graph_of(text), "triton:sm_90", last=last)
    assert [site.plan.src.layout for site in cut.sites] == layouts


def test_a_plan_is_alone_beside_operators_that_a_library_computes() -> None:
    text = ALONE.replace("relu(y)", "instance_norm(y, s, s)").replace("kernel=3", "kernel=3, precision=tf32")
    text = text.replace("8x16x30x30", "32x16x30x30")
    graph = graph_of(text.replace("y =", "constant s: f32[32]\ny ="))
    conv, *_ = find(graph, "triton:sm_90", is_apart=lambda node: node.op.word == "instance_norm").sites
    assert (conv.plan.src.layout, find(graph, "triton:sm_90").sites[0].plan.src.layout) == ("nchw", "nhwc")


@pytest.mark.parametrize(
    ("window", "value", "plan"),
    [
        ("conv2d(4, kernel=3, padding=1)(p, w)", 0.0, "conv2d(4, kernel=3, padding=((1, 2), (2, 1)))"),
        ("max_pool2d(3, stride=1)(p)", -np.inf, "max_pool2d(3, stride=1, padding=((0, 1), (1, 0)))"),
        ("avg_pool2d(3, stride=1)(p)", 0.0, "avg_pool2d(3, stride=1, padding=((0, 1), (1, 0)))"),
        ("max_pool2d(3, stride=1)(p)", 0.0, "max_pool2d(3, stride=1)"),
        ("avg_pool2d(3, stride=1, padding=1, count_include_pad=False)(p)", 0.0, None),
        ("max_pool2d(3, ceil_mode=True)(p)", -np.inf, None),
    ],
)
def test_padding_is_the_window_s_own_where_it_stands_for_the_same(
    window: str, value: float, plan: str | None
) -> None:
    graph = graph_of(
        "input x: f32[1x3x6x7]\nconstant w: f32[4x3x3x3]\n"
        f"p = pad(((0, 0), (0, 0), (0, 1), (1, 0)), value={value})(x)\ny = {window}\noutput y"
    )
    cut = find(graph, threads=1)
    (site,) = cut.sites
    given = random_inputs(graph)
    np.testing.assert_allclose(Session(cut)(given)["y"], graph.evaluate(given)["y"], rtol=1e-5, atol=1e-6)
    books(cut)
    assert plan is None or str(site.plan).endswith(plan)
    is_folded = plan is not None and "padding" in plan
    assert (len(site.nodes), site.src) == ((2, "x") if is_folded else (1, "p"))


def test_padding_that_others_read_stays() -> None:
    graph = graph_of(
        "input x: f32[1x3x6x7]\nconstant w: f32[4x3x3x3]\np = pad(((0, 0), (0, 0), (1, 1), (1, 1)))(x)\n"
        "y = conv2d(4, kernel=3)(p, w)\noutput y\noutput p"
    )
    assert [site.src for site in find(graph, threads=1).sites] == ["p"]


@pytest.mark.parametrize(("rows", "rounded"), [(1, False), (4096, True)])
def test_factors_are_not_rounded_where_it_saves_no_time(rows: int, rounded: bool) -> None:
    """A weight that one row reads takes longer to load than to multiply, with all bits of the factors too."""
    text = f"input x: f32[{rows}x4096]\nconstant w: f32[4096x4096]\ny = linear(4096, precision=tf32)(x, w)"
    (site,) = find(graph_of(f"{text}\noutput y"), "triton:sm_90", last=("x", "y")).sites
    assert ("tf32" in str(site.plan)) == rounded
