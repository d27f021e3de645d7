"""Graphs: their text and JSON, the types of their values, their checks, and their meaning in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fuseplan.errors import ArgumentError, PlanError, Unsupported
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node, Origin
from fuseplan.graph.op import GraphOp
from fuseplan.graph.ops import (
    OPS,
    Concat,
    Convert,
    Expand,
    Flip,
    Foreign,
    Map,
    Pad,
    Permute,
    Reduce,
    Reshape,
    Slice,
)
from fuseplan.graph.type import QUANTIZED, Type, numpy_dtype, word_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op
from fuseplan.ops import OPERATORS
from fuseplan.ops.conversion import Dequantize
from fuseplan.ops.embedding import Embedding

RNG = np.random.default_rng(0)
BLOCK = """
input x: f32[1x4x6x6]
constant w: f32[8x4x3x3]
constant b: f32[8]
constant two: f32[] = 2.0
constant sizes: i64[2] = [1, -8]
y: f32[1x8x6x6, nchw] = conv2d(8, kernel=3, padding=1)(x, w)  # Conv layer1/conv:0
y.b = bias(y, b)  # Conv layer1/conv:0
"odd name" = relu(y.b)
m = max_pool2d(3, stride=2, padding=1)("odd name")
g = reduce('mean', axes=(2, 3))(m)
gated = map('a * b + c')("odd name", g, two)
top: f32[1x8x2x6], "" = onnx.TopK(axis=2, bias=-inf, body=b'ab(')(gated, "", sizes)
output gated
output top
"""
CONSTANTS = {"w": RNG.standard_normal((8, 4, 3, 3), np.float32), "b": RNG.standard_normal(8, np.float32)}


def test_a_text_is_read_back() -> None:
    graph = Graph.parse(BLOCK, CONSTANTS)
    again = Graph.parse(str(graph), CONSTANTS)
    assert again == graph
    assert str(again) == str(graph)
    assert graph.nodes[0].origin == Origin("layer1/conv:0", "Conv") == again.nodes[0].origin
    assert str(graph.types["gated"]) == "f32[1x8x6x6, nchw]"
    assert graph.types["top"] == Type((1, 8, 2, 6), "f32")
    assert isinstance(graph.nodes[-1].op, Foreign)
    assert graph.nodes[-1].op.attributes == (("axis", 2), ("bias", -np.inf), ("body", b"ab("))
    assert graph.nodes[-1].inputs == ("gated", "", "sizes")
    np.testing.assert_array_equal(graph.constants["sizes"], [1, -8])


def test_json_is_read_back() -> None:
    graph = Graph.parse(BLOCK, CONSTANTS)
    assert Graph.from_json(graph.to_json(), CONSTANTS) == graph
    with pytest.raises(PlanError, match="not a graph's JSON: KeyError"):
        Graph.from_json("{}")
    with pytest.raises(PlanError, match="elements of the constant w are missing"):
        Graph.from_json(graph.to_json())


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.name)
def test_each_operator_of_plans_is_a_layer(kind: type[Op]) -> None:
    """A layer's types and results are those of the operator."""
    for text, op in kind.samples():
        read = TensorSpec.parse(text)
        if isinstance(op, Dequantize) and read.dtype not in QUANTIZED:
            continue  # graphs have no such values
        src = Type(read.shape, read.dtype if isinstance(op, Embedding | Dequantize) else "f32")
        spec = Layer(op).src([src, *[src] * len(Layer(op).keys)])
        operands = {each.name: each.shape for each in op.operands(spec)}
        operands |= {each.name: each.shape for each in op.results(spec)}
        shapes = [operands[key] for key in Layer(op).keys]
        inputs = {"x": src} | {f"in{place}": Type(shape, "f32") for place, shape in enumerate(shapes)}
        node = Node(Layer(op), tuple(inputs), ("y",))
        graph = Graph(inputs, [node], ["y"])
        assert graph.types["y"].shape == op.output(spec).shape
        given = {
            name: RNG.uniform(0.1, 1, made.shape or ()).astype(numpy_dtype(made.dtype))
            for name, made in inputs.items()
        }
        assert graph.evaluate(given)["y"].shape == graph.types["y"].shape
        assert Graph.parse(str(graph)) == graph


def test_formulas_views_and_reductions() -> None:
    x, y = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((4,))
    pairs: list[tuple[GraphOp, list[np.ndarray], np.ndarray]] = [
        (Map("a * b + 1"), [x, y], x * y + 1),
        (Map("maximum(a, 0)"), [y], np.maximum(y, 0)),
        (Map("a ** 2 / b"), [y, x], y**2 / x),
        (Convert("bf16"), [x], x),
        (Reshape((6, 4)), [x], x.reshape(6, 4)),
        (Permute((2, 0, 1)), [x], x.transpose(2, 0, 1)),
        (Slice(1, 1, 3), [x], x[:, 1:3]),
        (Slice(2, 0, 4, 3), [x], x[..., ::3]),
        (Expand((2, 2, 3, 4)), [x], np.stack([x, x])),
        (Flip((0, 2)), [x], x[::-1, :, ::-1]),
        (Concat(1), [x, x], np.concatenate([x, x], 1)),
        (Pad(((0, 1), (2, 0), (0, 0)), 3.0), [x], np.pad(x, ((0, 1), (2, 0), (0, 0)), constant_values=3)),
        (Reduce("mean", (0, 2), keepdims=False), [x], x.mean((0, 2))),
        (Reduce("amin", (1,)), [x], x.min(1, keepdims=True)),
    ]
    for op, given, want in pairs:
        (made,) = op.evaluate(given)
        np.testing.assert_allclose(made, want, rtol=1e-14, err_msg=op.text)
        assert op.infer([Type(each.shape, "f64") for each in given])[0].shape == want.shape
    assert {type(op) for op, _, _ in pairs} == set(OPS)


def test_the_meaning_is_float64() -> None:
    graph = Graph.parse(BLOCK.replace("output top\n", ""), CONSTANTS)
    x = RNG.standard_normal((1, 4, 6, 6), np.float32)
    with pytest.raises(Unsupported, match="TopK is run by its library"):
        graph.evaluate({"x": x})
    made = graph.evaluate({"x": x}, {"onnx": lambda node, given: [given[0][:, :, :2], None]})["gated"]
    double = torch.from_numpy(x).double()
    weights = (torch.from_numpy(CONSTANTS[name]).double() for name in ("w", "b"))
    relu = torch.nn.functional.conv2d(double, *weights, padding=1).relu()
    pooled = torch.nn.functional.max_pool2d(relu, 3, 2, 1).mean((2, 3), keepdim=True)
    np.testing.assert_allclose(made, (relu * pooled + 2).numpy(), rtol=1e-12)
    with pytest.raises(ArgumentError, match=r"the input 'x' is another tensor\n  got f64"):
        graph.evaluate({"x": x.astype(np.float64)})
    with pytest.raises(ArgumentError, match="no input is named 'y'"):
        graph.evaluate({"x": x, "y": x})


def test_axes_keep_their_names_in_float64() -> None:
    """The last axis of a product of three axes is its channels, for the operators behind it too."""
    text = "input x: f32[2x3x4]\nconstant w: f32[5x4]\nconstant b: f32[5]\n"
    constants = {"w": RNG.standard_normal((5, 4), np.float32), "b": RNG.standard_normal(5, np.float32)}
    graph = Graph.parse(f"{text}l = linear(5)(x, w)\ny = bias(l, b)\noutput y", constants)
    x = RNG.standard_normal((2, 3, 4), np.float32)
    want = x.astype(np.float64) @ constants["w"].T.astype(np.float64) + constants["b"]
    np.testing.assert_allclose(graph.evaluate({"x": x})["y"], want, rtol=1e-12)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("y = relu(z)", "z is not made before"),
        ("x = relu(x)", "there is a value x already"),
        ("y = conv2d(8, kernel=3)(x)", "takes another number of inputs"),
        ("y = conv2d(8, kernel=3)(x, x)", "conv2d -> y: conv2d: weight has another shape"),
        ("y = bias(x, i)", "bias has another shape"),
        ("y = relu(i)", "takes tensors of plans"),
        ("y = map('a + b')(x, i)", "takes tensors of one dtype"),
        ("y = map('a > b')(x, x)", "is a comparison"),
        ("y = map('a + q7')(x)", "there is no 'q7'"),
        ("y = reshape((3, 5))(x)", "keeps the number of elements"),
        ("y = permute((0, 1, 1, 2))(x)", "names each axis once"),
        ("y = concat(7)(x)", "takes tensors that differ along axis 7"),
        ("y = reduce('median', axes=(0,))(x)", "takes mean, sum, amax or amin"),
        ("y = reduce('sum', axes=(4,))(x)", "there is no such axis"),
        ("y = max_pool2d((2,))(x)", "2 spatial axes"),
        ("y = relux(x)", "there is no operator relux"),
        ("y = relu x", "not a line of a graph"),
        ("y: f32[2,3] = relu(x)", "this is not a value's type"),
        ("y z = relu(x)", "are not the names"),
        ("y, z = relu(x)", "it has fewer results"),
        ("input q", "input q has no type"),
        ("constant k: i64[2] = [1]", "not the constant's elements"),
        ("output q", "the output q is never made"),
        ("y = reshape(shape=[x])(x)", "this is not a value"),
    ],
)
def test_wrong_lines_are_refused(line: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem.replace("(", r"\(")):
        Graph.parse(f"input x: f32[1x4x6x6]\ninput i: i64[3]\n{line}")


@pytest.mark.parametrize("text", ["f32[1x64x56x56, nchw]", "i64[]", "bool[0x3]", "f32[?]", "?", "u8[7]"])
def test_types_are_read_back(text: str) -> None:
    assert str(Type.parse(text)) == text


def test_dtypes_have_a_word() -> None:
    for word in ("f64", "f32", "f16", "i64", "u8", "bool", "c64"):
        assert word_of(numpy_dtype(word)) == word
    with pytest.raises(PlanError, match="NumPy has no dtype 'f3'"):
        numpy_dtype("f3")
