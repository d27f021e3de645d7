"""Running a cut graph: order, memory, copies, and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.memory import Buffer, plan
from fuseplan.graph.place import Call, Compute, Copy, Launch
from fuseplan.graph.schedule import Unit, schedule
from fuseplan.graph.session import Session
from fuseplan.reports.books import report_of
from fuseplan.tensors.arrays import aligned_copy
from graphs import graph_of, random_inputs

CHAIN = """
input x: f32[1x8x16x16]
constant w1: f32[8x8x3x3]
constant w2: f32[8x8x3x3]
constant w3: f32[8x8x3x3]
constant fc: f32[5x2048]
a = conv2d(8, kernel=3, padding=1)(x, w1)
b = conv2d(8, kernel=3, padding=1)(a, w2)
c = conv2d(8, kernel=3, padding=1)(b, w3)
d = reshape((1, 2048))(c)
y = linear(5)(d, fc)
output y
"""
# Two of another library's operators that may run together, though the graph has a plan between them.
MIXED = """
input x: f32[2x3]
constant w: f32[4x3]
p: f32[2x3] = other.Double(x)
l = linear(4)(x, w)
q: f32[2x3] = other.Double(p)
i: i64[2] = other.Rows(q)
s = map("a + a")(q)
output l
output i
output s
"""


class Doubling:
    """A library of two operators; it counts its runs."""

    def __init__(self) -> None:
        self.units: list[Unit] = []

    def prepare(self, graph: Graph, unit: Unit) -> Callable[[Sequence[Any]], Sequence[Any]]:
        self.units.append(unit)

        def run(values: Sequence[Any]) -> Sequence[Any]:
            found = dict(zip(unit.reads, values, strict=True))
            for node in unit.nodes:
                (value,) = (found[name] for name in node.inputs)
                found[node.outputs[0]] = (
                    2 * value if node.op.word == "other.Double" else np.arange(len(value))
                )
            return [found[name] for name in unit.writes]

        return run


def kinds(session: Session) -> list[type]:
    return [type(step) for step in session.placement.steps]


def test_memory_is_shared_by_values_that_do_not_live_at_once() -> None:
    graph = graph_of(CHAIN)
    session = Session(find(graph, threads=1))
    image = 8 * 16 * 16 * 4
    assert 2 * image <= session.arena_bytes <= 2 * image + 256
    # The input is copied to lie channels last, and the last image to lie as rows of a matrix.
    assert kinds(session) == [Copy, Launch, Launch, Launch, Compute, Launch]
    assert len(session.compiled) == 4
    assert len({id(each) for each in session.compiled}) == 2  # equal plans are compiled once
    inputs = random_inputs(graph)
    first, second = session(inputs)["y"], session(inputs)["y"]
    np.testing.assert_array_equal(first, second)
    assert not np.shares_memory(first, second)
    np.testing.assert_allclose(first, graph.evaluate(inputs)["y"], rtol=1e-4, atol=1e-5)


def test_views_cost_nothing_where_elements_lie_so() -> None:
    graph = graph_of(
        "input x: f32[2x8x1x1]\nconstant w: f32[6x8x1x1]\nconstant fc: f32[3x6]\n"
        "a = conv2d(6, kernel=1)(x, w)\nb = reshape((2, 6))(a)\ny = linear(3)(b, fc)\noutput y"
    )
    session = Session(find(graph, threads=1))
    assert kinds(session) == [Copy, Launch, Launch]
    image = graph_of(
        "input x: f32[1x4x3x3]\nconstant w: f32[6x4x1x1]\nconstant fc: f32[2x6]\n"
        "a = conv2d(6, kernel=1)(x, w)\nb = permute((0, 2, 3, 1))(a)\ny = linear(2)(b, fc)\noutput y"
    )
    assert kinds(Session(find(image, threads=1))) == [Copy, Launch, Launch]


def test_a_library_runs_its_operators_together() -> None:
    graph = graph_of(MIXED)
    library = Doubling()
    session = Session(find(graph, threads=1), {"other": library})
    assert [[node.outputs[0] for node in unit.nodes] for unit in library.units] == [["p", "q", "i"]]
    assert library.units[0].writes == ("i", "q")
    assert kinds(session).count(Call) == 1
    inputs = random_inputs(graph)
    made = session(inputs)
    np.testing.assert_array_equal(made["s"], 8 * inputs["x"])
    np.testing.assert_array_equal(made["i"], [0, 1])
    with pytest.raises(ArgumentError, match="nothing runs the operators of 'other'"):
        Session(find(graph, threads=1))


def test_a_wrong_input_is_refused() -> None:
    session = Session(find(graph_of(CHAIN), threads=1))
    with pytest.raises(ArgumentError, match=r"got f32\[1x8x16x15\]; want f32\[1x8x16x16\]"):
        session({"x": np.zeros((1, 8, 16, 15), np.float32)})
    with pytest.raises(ArgumentError, match="the input 'x' is missing"):
        session({})


def test_units_come_after_those_that_they_read() -> None:
    cut = find(graph_of(MIXED), threads=1)
    made = {"x", "w"}
    for unit in schedule(cut):
        assert made.issuperset(unit.reads)
        made |= set(unit.writes)
    assert made.issuperset(cut.graph.outputs)


def test_buffers_that_live_at_once_lie_apart() -> None:
    rng = np.random.default_rng(0)
    buffers = []
    for _ in range(60):
        size, (first, last) = int(rng.integers(1, 900)), sorted(rng.integers(0, 30, 2).tolist())
        buffers.append(Buffer((size,), (1,), np.dtype(np.float32), first, last))
    nbytes = plan(buffers)
    for place, one in enumerate(buffers):
        assert one.offset % 64 == 0
        assert one.offset + one.nbytes <= nbytes
        for other in buffers[:place]:
            at_once = one.first <= other.last and other.first <= one.last
            apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            assert apart or not at_once
    busiest = max(
        sum(each.nbytes for each in buffers if each.first <= step <= each.last) for step in range(30)
    )
    assert busiest <= nbytes <= 1.5 * busiest


@pytest.mark.parametrize(("channels", "stays"), [(64, True), (5, False)])
def test_gates_of_channels_are_read_where_they_lie(channels: int, stays: bool) -> None:
    """A value of a run that a plan takes for each channel is packed only where it fills no whole vectors."""
    graph = graph_of(
        f"input x: f32[1x{channels}x6x6]\nconstant w: f32[{channels}x{channels}x1x1]\n"
        "p = mean((2, 3), keepdim=True)(x)\ng = sigmoid(p)\ny = map('a * b')(x, g)\n"
        f"z = conv2d({channels}, kernel=1)(y, w)\noutput z"
    )
    session = Session(find(graph, threads=1))
    for number in (1, 2):
        given = {name: number * each for name, each in random_inputs(graph).items()}
        np.testing.assert_allclose(session(given)["z"], graph.evaluate(given)["z"], rtol=1e-4, atol=1e-5)
    gate = next(each for each in session.compiled if str(each.plan).endswith("scale"))
    scale = aligned_copy(np.ones(channels, np.float32))
    assert gate.borrow({"scale": scale}).lent == ({"scale"} if stays else set())
    assert gate.bind(scale=scale).lent == set()


def test_a_join_is_written_once() -> None:
    graph = graph_of(
        "input x: f32[1x3x6x6]\nconstant w: f32[4x3x1x1]\na = conv2d(4, kernel=1)(x, w)\n"
        "b = max_pool2d(3, stride=1, padding=1)(x)\ny = concat(1)(a, b)\noutput y"
    )
    given = random_inputs(graph)
    made = Session(find(graph, threads=1))(given)["y"]
    np.testing.assert_allclose(made, graph.evaluate(given)["y"], rtol=1e-5, atol=1e-6)


def test_a_launcher_checks_its_tensors_once() -> None:
    compiled = fuseplan.compile("f32[2x16x3x3, nhwc] -> scale -> relu", "cpu", threads=1)
    bound = compiled.bind(scale=np.arange(16, dtype=np.float32) - 8)
    src, out = fuseplan.empty(compiled.plan.src), fuseplan.empty(compiled.plan.output)
    src[...] = 1
    launch = bound.launcher(src, out)
    for _ in range(3):
        src[...] = -1.5 * src
        launch()
        np.testing.assert_array_equal(out, bound(src))
    with pytest.raises(ArgumentError):
        bound.launcher(src, src)()
    with pytest.raises(ArgumentError):
        compiled.bind().launcher(src, out)()


GIVEN = """
input x: f32[2x3x{size}x{size}]
constant w: f32[20x3x3x3]
constant v: f32[5x20x1x1]
a = conv2d(20, kernel=3, stride=2, padding=1)(x, w)
b = relu(a)
y = conv2d(5, kernel=1)(b, v)
output y
"""


@pytest.mark.parametrize(("size", "is_read"), [(80, True), (16, False)])
def test_a_large_image_is_read_as_it_was_given(size: int, is_read: bool) -> None:
    graph = graph_of(GIVEN.replace("{size}", str(size)))
    session = Session(find(graph, threads=1))
    first, second = (site.plan for site in session.cut.sites)
    assert str(first).endswith("within(20, layout=nhwc)") is is_read
    assert (first.src.layout, second.src.layout) == ("nchw" if is_read else "nhwc", "nhwc")
    inputs = random_inputs(graph)
    np.testing.assert_allclose(session(inputs)["y"], graph.evaluate(inputs)["y"], rtol=1e-4, atol=1e-4)


JOINED = """
input x: f32[2x8x9x9]
constant w1: f32[12x8x1x1]
constant w2: f32[16x8x3x3]
constant w3: f32[5x36x1x1]
constant w4: f32[8x8x1x1]
a1 = conv2d(12, kernel=1)(x, w1)
a = relu(a1)
b = conv2d(16, kernel=3, padding=1)(x, w2)
e = conv2d(8, kernel=1)(x, w4)
c = max_pool2d(3, stride=1, padding=1)(e)
n: f32[2x8x9x9, nchw] = other.Double(x)
j = concat(1)(a, b, {more})
k = map("a + 1")(j)
y = conv2d(5, kernel=1)(k, w3)
output {outputs}
"""


@pytest.mark.parametrize(
    ("more", "outputs", "copies"),
    [("c", "y", 1), ("n", "y\noutput j", 2)],  # of x, to lie channels last; of what a library made
)
def test_plans_write_into_the_value_that_joins_them(more: str, outputs: str, copies: int) -> None:
    text = JOINED.replace("{more}", more).replace("{outputs}", outputs)
    graph = graph_of(text)
    session = Session(find(graph, threads=1), {"other": Doubling()})
    inputs = random_inputs(graph)
    found = kinds(session)
    assert Compute not in found
    assert found.count(Copy) == copies
    into = [site.into for site in session.cut.sites if site.into]
    assert [(each.begin, each.end) for each in into if each] == [(0, 12), (12, 28), (28, 36)][: len(into)]
    assert len(into) == (3 if more == "c" else 2)
    run = {"other": lambda node, values: [2 * values[0]]}
    want, made = graph.evaluate(inputs, run), session(inputs)
    for name in graph.outputs:
        np.testing.assert_allclose(made[name], want[name], rtol=1e-4, atol=1e-4)
    report = report_of(session.placement, "cpu")
    (row,) = (row for row in report.operators if row.name == "j")
    assert row.state == "fused"
    assert len(row.sites) == len(into)
    assert report.launches.kernels == found.count(Launch)
    assert len(report.copies) == copies
    apart = Session(find(graph, threads=1, joins=False), {"other": Doubling()})
    assert Compute in kinds(apart)
    np.testing.assert_array_equal(apart(inputs)["y"], made["y"])


def test_constants_that_kernels_read_where_they_lie_stay() -> None:
    """A product's weight that is turned is copied, and lies then as the kernel packs it."""
    graph = graph_of("input x: f32[4x16]\nconstant w: f32[16x16]\ny = matmul(16)(x, w)\noutput y")
    session = Session(find(graph, threads=1))
    (step,) = (each for each in session.placement.steps if isinstance(each, Launch))
    others = [np.full(n, np.nan, np.float32) for n in (256,) * 64]  # take freed memory
    inputs = random_inputs(graph)
    np.testing.assert_allclose(session(inputs)["y"], graph.evaluate(inputs)["y"], rtol=1e-4, atol=1e-5)
    assert len(others) == 64
    assert str(step.site.plan) == "f32[4x16] -> linear(16)"
