"""Models with windows: padding of their own nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import helper, numpy_helper

import fuseplan.onnx
from fuseplan.graph.why import Reason, Why
from fuseplan.onnx.reader import read
from onnx_models import RNG, model, weights


def test_padding_before_a_convolution_is_the_plan_s() -> None:
    """As models converted from TensorFlow have it: at the high end alone."""
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["p"], "pad"),
        helper.make_node("Conv", ["p", "w"], ["c"], "conv", strides=[2, 2]),
        helper.make_node("Pad", ["c", "sides", "", "axes"], ["y"], "border"),
    ]
    stored = {"w": weights(4, 3, 3, 3)}
    proto = model(nodes, {"x": (1, 3, 8, 8)}, ["y"], stored)
    numbers = {"pads": [0, 0, 0, 0, 0, 0, 1, 1], "sides": [1, 2], "axes": [-1]}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.array(each), name) for name, each in numbers.items()
    )
    given = {"x": RNG.standard_normal((1, 3, 8, 8), np.float32)}
    ours = fuseplan.onnx.load(proto, threads=1)
    want = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)[0]
    np.testing.assert_allclose(ours.run(None, given)[0], want, rtol=1e-5, atol=1e-6)
    sites = ours.prepare().session.cut.sites
    assert [str(site.plan) for site in sites] == [
        "f32[1x3x8x8, nhwc] -> conv2d(4, kernel=3, stride=2, padding=((0, 1), (0, 1)))"
    ]


def test_a_window_that_holds_the_image_is_a_mean() -> None:
    attributes = {"kernel_shape": [99, 99], "strides": [99, 99], "ceil_mode": 1}
    nodes = [helper.make_node("AveragePool", ["x"], ["y"], "pool", **attributes)]
    proto = model(nodes, {"x": (2, 3, 7, 5)}, ["y"], {})
    given = {"x": RNG.standard_normal((2, 3, 7, 5), np.float32)}
    ours = fuseplan.onnx.load(proto, threads=1)
    np.testing.assert_allclose(ours.run(None, given)[0], given["x"].mean((2, 3), keepdims=True), atol=1e-6)
    sites = ours.prepare().session.cut.sites
    assert [str(site.plan) for site in sites] == ["f32[2x3x7x5] -> mean((2, 3), keepdim=True)"]


def test_a_missing_input_is_no_src_of_a_plan() -> None:
    nodes = [
        helper.make_node("Resize", ["x", "", "by"], ["r"], mode="nearest"),
        helper.make_node("LogSoftmax", ["r"], ["y"]),
    ]
    proto = model(nodes, {"x": [1, 3, 2, 2]}, ["y"], {"by": np.array([1, 1, 2, 2], np.float32)})
    given = {"x": RNG.standard_normal((1, 3, 2, 2), np.float32)}
    want = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)[0]
    np.testing.assert_allclose(fuseplan.onnx.load(proto, threads=1).run(None, given)[0], want, rtol=1e-5)


def _pool(seed: int) -> Any:
    """A random pool, rounded up more often than not."""
    drawn = np.random.default_rng(seed)
    rank = int(drawn.integers(1, 4))
    kernel = drawn.integers(1, 5, rank)
    attributes = {
        "kernel_shape": kernel,
        "strides": drawn.integers(1, 5, rank),
        "pads": drawn.integers(0, np.tile(kernel, 2)),
        "ceil_mode": int(drawn.integers(0, 3) > 0),
    }
    extents = drawn.integers(0, 6, rank) + 2 * kernel - 1  # which hold the window
    if seed % 2:
        node = helper.make_node("AveragePool", ["x"], ["y"], count_include_pad=seed // 2 % 2, **attributes)
    else:
        attributes["dilations"] = drawn.integers(1, 3, rank)
        node = helper.make_node("MaxPool", ["x"], ["y"], **attributes)
    return model([node], {"x": (2, 3, *extents.tolist())}, ["y"], {})


def test_any_pool_is_onnx_runtimes() -> None:
    """By the table, and of the types that operators have which ONNX Runtime runs."""
    left = Reason(Why.NOT_IN_TABLE)
    for seed in range(80):
        proto = _pool(seed)
        ours = fuseplan.onnx.load(proto, threads=1)
        given = {"x": RNG.standard_normal(ours.inputs["x"].shape, np.float32)}
        (want,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)
        assert read(proto, ours.inputs, lambda _: left).graph.types["y"].shape == want.shape
        np.testing.assert_allclose(ours.exact(given)[0], want, rtol=1e-5, atol=1e-6)


def _transposed(seed: int) -> Any:
    """A random transposed convolution, and what follows it."""
    drawn = np.random.default_rng(seed)
    rank, groups = int(drawn.integers(1, 4)), int(drawn.integers(1, 3))
    kernel, strides = drawn.integers(1, 5, rank), drawn.integers(1, 4, rank)
    extents, more = drawn.integers(2, 6, rank), drawn.integers(0, strides)
    attributes: dict[str, Any] = {"strides": strides, "group": groups, "output_padding": more}
    attributes["dilations"] = dilations = drawn.integers(1, 3, rank)
    whole = (extents - 1) * strides + (kernel - 1) * dilations + 1 + more
    mode = drawn.choice(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
    if seed % 3 == 0:
        attributes["output_shape"] = whole - drawn.integers(0, np.minimum(whole, 3))
        attributes["auto_pad"] = mode
    elif seed % 3 == 1 and (whole >= extents * strides).all():
        attributes["auto_pad"] = mode
    else:
        attributes["pads"] = drawn.integers(0, np.tile((whole + 1) // 2, 2))
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["c"], kernel_shape=kernel, **attributes),
        helper.make_node("Tanh", ["c"], ["y"]),
    ]
    stored = {"w": weights(4 * groups, 3, *kernel), "b": weights(3 * groups)}
    return model(nodes, {"x": (2, 4 * groups, *extents.tolist())}, ["y"], stored)


def test_any_transposed_convolution_is_onnx_runtimes() -> None:
    plans = 0
    for seed in range(60):
        proto = _transposed(seed)
        ours = fuseplan.onnx.load(proto, threads=1)
        given = {"x": RNG.standard_normal(ours.inputs["x"].shape, np.float32)}
        (want,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)
        np.testing.assert_allclose(ours.exact(given)[0], want, rtol=1e-5, atol=1e-5, err_msg=str(seed))
        if seed % 6 < 3:
            np.testing.assert_allclose(ours.run(None, given)[0], want, rtol=1e-5, atol=1e-5)
            plans += sum(" -> bias -> tanh" in str(each.plan) for each in ours.prepare().session.cut.sites)
    assert plans == 30
