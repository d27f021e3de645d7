"""Random models beside ONNX Runtime: operators with random attributes, most of them behind the last one.

python -m pytest tests/from_onnx/test_random.py --cases 3000 --first 100000
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

import fuseplan.onnx
from onnx_models import model

Made = tuple[str, dict[str, Any], list[Any]]  # an operator, its attributes, and its other inputs
Shape = tuple[int, ...]


def window(rng: random.Random, axes: int, pads: int) -> dict[str, Any]:
    made: dict[str, Any] = {"strides": [rng.randint(1, 2) for _ in range(axes)]}
    mode = rng.choice(("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    if mode != "NOTSET":
        return made | {"auto_pad": mode}
    made["dilations"] = [rng.randint(1, 2) for _ in range(axes)]
    return made | {"pads": [rng.randint(0, pads) for _ in range(2 * axes)]}


def conv(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    axes, groups = len(shape) - 2, rng.choice([each for each in (1, 2, 3) if shape[1] % each == 0])
    kernel, features = [rng.randint(1, 3) for _ in range(axes)], groups * rng.randint(1, 3)
    operands = [values(features, shape[1] // groups, *kernel), *([values(features)] * rng.randint(0, 1))]
    return "Conv", {"group": groups, **window(rng, axes, 2)}, operands


def pool(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    attributes = {"kernel_shape": [2] * (len(shape) - 2), **window(rng, len(shape) - 2, 1)}
    if rng.random() < 0.5:
        return "MaxPool", attributes, []
    attributes.pop("dilations", None)
    return "AveragePool", {**attributes, "count_include_pad": rng.randint(0, 1)}, []


def norm(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    numbers = [values(shape[1]) for _ in range(3)]
    if rng.random() < 0.5:
        return "BatchNormalization", {}, [*numbers, 0.5 + abs(numbers[0])]
    axis = rng.randrange(-len(shape), len(shape))
    return "LayerNormalization", {"axis": axis}, [values(*shape[axis % len(shape) :])]


def rows(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    return "MatMul", {}, [values(shape[-1], rng.randint(1, 6))]


def binary(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    other = [rng.choice((1, extent)) for extent in shape][rng.randint(0, len(shape)) :]
    return rng.choice(("Add", "Sub", "Mul", "Max", "PRelu")), {}, [values(*other)]


def unary(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    return rng.choice(("Relu", "Tanh", "Sigmoid", "HardSwish", "Selu", "Abs")), {}, []


def joined(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    axis = rng.randrange(-len(shape), len(shape))
    if rng.random() < 0.5:
        return rng.choice(("Softmax", "LogSoftmax")), {"axis": axis}, []
    return rng.choice(("ReduceMean", "ReduceMax")), {"keepdims": 1}, [np.array([axis])]


def moved(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    if rng.random() < 0.5:
        return "Transpose", {"perm": rng.sample(range(len(shape)), len(shape))}, []
    ends = [rng.choice((extent, -1)) if extent > 1 else extent for extent in shape]
    return "Slice", {}, [np.zeros(len(shape), np.int64), np.array(ends)]


def gemm(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    features, is_turned = rng.randint(1, 6), rng.randint(0, 1)
    weight = values(features, shape[-1]) if is_turned else values(shape[-1], features)
    bias = [values(*rng.choice(((features,), (1, features), (1,), ())))] * rng.randint(0, 1)
    return "Gemm", {"transB": is_turned, "alpha": rng.choice((1.0, 0.5))}, [weight, *bias]


def reshaped(rng: random.Random, shape: Shape, values: Callable[..., Any]) -> Made:
    axis = rng.randrange(len(shape))
    kind, attributes, numbers = rng.choice(
        (
            ("Reshape", {}, rng.choice(([0, -1], [1, -1], [*shape, 1], [0, 0, -1]))),
            ("Flatten", {"axis": axis}, None),
            ("Unsqueeze", {}, [axis]),
            ("Gather", {"axis": axis}, [0, -1]),
            ("Pad", {"mode": rng.choice(("constant", "edge"))}, [rng.randint(0, 2) for _ in 2 * shape]),
            ("Expand", {}, [2, *shape]),
            ("CumSum", {"exclusive": rng.randint(0, 1), "reverse": rng.randint(0, 1)}, axis),
        )
    )
    return kind, attributes, [] if numbers is None else [np.array(numbers)]


KINDS = (conv, conv, pool, norm, rows, gemm, binary, binary, unary, unary, joined, moved, reshaped)
OPSETS = (18, 24)  # reductions have their axes as an input


def run(proto: Any, given: dict[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, given)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, cases = map(metafunc.config.getoption, ("first", "cases"))
    metafunc.parametrize("seed", range(first, first + cases // 3))


def test_random_models(seed: int) -> None:
    """Each value is an output in one run, so that plans end everywhere, and the last one alone in another."""
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    opset = rng.randint(*OPSETS)
    shape: Shape = tuple(rng.randint(1, 7) for _ in range(rng.choice((3, 4, 4, 5))))
    given = {"x": draws.standard_normal(shape).astype(np.float32)}
    nodes, stored, found = list[Any](), dict[str, Any](), dict(given)
    for place in range(40):
        last = [*found][-1] if rng.random() < 0.8 else rng.choice([*found])
        made = found[last]
        fan = max(1, made.size // made.shape[0]) ** 0.5
        kind, attributes, operands = rng.choice(KINDS)(
            rng, made.shape, lambda *each, fan=fan: (draws.standard_normal(each) / fan).astype(np.float32)
        )
        names = {f"{place}.{number}": each for number, each in enumerate(operands)}
        node = helper.make_node(kind, [last, *names], [f"v{place}"], **attributes)
        try:
            (result,) = run(
                model([*nodes, node], {"x": shape}, [f"v{place}"], {**stored, **names}, opset), given
            )
        except Exception:  # the attributes do not fit this shape
            continue
        if not result.size or np.abs(result).max() > 50 or not 10 > result.ndim > 2:
            continue
        nodes, stored = [*nodes, node], {**stored, **names}
        found[f"v{place}"] = result
        if len(nodes) == 9:
            break
    every = [node.output[0] for node in nodes]
    for outputs in (every, every[-1:]):
        proto = model(nodes, {"x": shape}, outputs, stored, opset)
        ours = fuseplan.onnx.load(proto, threads=1).run(None, given)
        for name, got, want in zip(outputs, ours, run(proto, given), strict=True):
            scale = max(1e-3, float(np.abs(want).max()))
            np.testing.assert_allclose(got / scale, want / scale, atol=2e-4, err_msg=name)
