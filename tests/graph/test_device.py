"""Sessions whose values are torch's tensors, on the CPU: what a GPU's differ in is where these lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fuseplan.onnx
from fuseplan.errors import ArgumentError
from fuseplan.graph.device import ON_DEVICE, DeviceRoom, in_numpy
from fuseplan.graph.find import find
from fuseplan.graph.place import GPU_LINE, Call, Compute, Launch, place
from fuseplan.graph.schedule import schedule
from fuseplan.graph.session import Session, room_on
from fuseplan.graph.type import numpy_dtype, type_of
from fuseplan.kernels.target import parse_target
from graph.test_session import CHAIN, MIXED, Doubling
from graphs import graph_of, random_inputs
from onnx_models import cnn

# Operators of ours that are in no plan, of two dtypes.
LOOSE = """
input x: f32[2x3x4]
input h: f16[2x3x4]
constant w: f32[5x4]
a = flip((0, 2))(x)
b = concat(1)(a, x)
c = pad(((0, 0), (1, 2), (0, 1)), value=-1.0)(b)
d = expand((2, 2, 3, 4))(x)
e = permute((0, 2, 1))(x)
f = reshape((8, 3))(e)
g = slice(1, 0, 3, 2)(x)
i = convert("f16")(x)
j = map("where(a > 0.5, a * b, -b)")(i, h)
k = reduce("mean", (0, 2), keepdims=False)(h)
l = reduce("amax", (1,))(x)
output c
output d
output f
output g
output j
output k
output l
"""
# Parts of a joined value of which the second begins at 12 bytes, and a part that a plan reads there.
UNEVEN = """
input x: f32[4x16]
constant w1: f32[3x16]
constant w2: f32[5x16]
a = linear(3)(x, w1)
b = linear(5)(x, w2)
c = concat(1)(a, b)
d = slice(1, 3, 8)(c)
y = map("exp(a)")(d)
output c
output y
"""


@pytest.mark.parametrize("text", [CHAIN, MIXED, LOOSE, UNEVEN])
def test_results_are_those_of_host_memory(text: str) -> None:
    graph = graph_of(text)
    given, libraries = random_inputs(graph), {"other": Doubling()}
    given = {name: each.astype(numpy_dtype(graph.inputs[name].dtype)) for name, each in given.items()}
    want = Session(find(graph, threads=1), libraries)(given)
    session = Session(find(graph, threads=1), libraries, room=DeviceRoom("cpu"))
    for _ in range(2):
        made = session(given)
        for name, each in want.items():
            assert isinstance(made[name], torch.Tensor)
            got = in_numpy(made[name])
            assert type_of(got) == type_of(each)
            np.testing.assert_allclose(got, each, rtol=2e-3 if each.dtype == np.float16 else 1e-5)


def test_results_stay_when_the_memory_is_written_again() -> None:
    graph = graph_of(CHAIN)
    session = Session(find(graph, threads=1), room=DeviceRoom("cpu"))
    given = random_inputs(graph)
    first = session(given)["y"]
    kept = first.clone()
    session({"x": 1 + given["x"]})
    assert torch.equal(first, kept)


def test_inputs_are_copied_without_their_gradients() -> None:
    graph = graph_of(CHAIN)
    session = Session(find(graph, threads=1), room=DeviceRoom("cpu"))
    ((name, array),) = random_inputs(graph).items()
    made = session({name: torch.from_numpy(array).requires_grad_()})["y"]
    assert not made.requires_grad
    assert torch.equal(made, session({name: array})["y"])


@pytest.mark.parametrize("text", [CHAIN, UNEVEN])
def test_tensors_of_kernels_begin_where_gpus_take_them(text: str) -> None:
    cut = find(graph_of(text), "triton:sm_90")
    steps = place(cut, schedule(cut)).steps
    assert any(isinstance(each, Launch) for each in steps)
    for each in steps:
        for placed in (each.src, each.dst, *each.bound.values()) if isinstance(each, Launch) else ():
            memory = placed.buffer.alone()
            assert (placed.viewed(memory).ctypes.data - memory.ctypes.data) % GPU_LINE == 0


def test_all_operators_of_ours_but_layers_run_on_the_device() -> None:
    cut = find(graph_of(LOOSE), threads=1)
    steps = place(cut, schedule(cut)).steps
    assert {type(each.node.op) for each in steps if isinstance(each, Compute)} <= ON_DEVICE.keys()
    assert not any(isinstance(each, Call) for each in steps)


def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseplan.onnx.model.room_on", lambda target: DeviceRoom("cpu"))


def test_a_model_gives_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"x": np.random.default_rng(0).standard_normal((1, 3, 32, 32), np.float32)}
    proto = cnn()
    (want,) = fuseplan.onnx.load(proto, threads=1).run(None, given)
    on_torch(monkeypatch)
    model = fuseplan.onnx.load(proto, threads=1)
    for _ in range(2):
        (got,) = model.run(None, given)
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    found = model.compare(given)
    assert found.first is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8", "int64", "bool", "float16"])
def test_dtypes_keep_their_bits(dtype: str) -> None:
    room: Any = DeviceRoom("cpu")
    array = np.arange(6).reshape(2, 3).T.astype(np.dtype(dtype))
    tensor = room.from_host(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert type_of(tensor) == type_of(array)
    back = room.to_host(tensor)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_values_that_torch_has_no_dtype_for_stay() -> None:
    room: Any = DeviceRoom("cpu")
    words = np.array(["a", "b"])
    assert room.from_host(words) is words
    assert room.to_host(room.entered("w", words)) is words


def test_kinds_of_gpus_are_for_reports_alone() -> None:
    model = fuseplan.onnx.load(cnn(), "triton:sm_90")
    types = model.example
    assert "10 kernels, 0 by torch" in str(model.report(types))
    assert len(model.fused(types).functions) > 5
    with pytest.raises(ArgumentError, match="a model runs on 'cuda' or 'cuda:1'"):
        model.prepare(types)
    with pytest.raises(ArgumentError, match="load the model for 'cpu'"):
        model.profile({"x": np.zeros((1, 3, 32, 32), np.float32)})
    with pytest.raises(ArgumentError, match="is a kind of GPU"):
        room_on(parse_target("triton:gfx942"))
    with pytest.raises(ArgumentError, match="want choose='predicted'"):
        fuseplan.onnx.load(cnn(), "triton:sm_90", choose="measured")
