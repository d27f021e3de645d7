"""Models of ONNX on a GPU beside float64: of arrays and of tensors, recorded as a graph and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fuseplan.onnx
from from_onnx.test_random import compare, drawn
from onnx_models import cnn, mlp

RNG = np.random.default_rng(0)
MODELS: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]]]] = {
    "cnn": (cnn, {"x": (3, 3, 32, 32)}),
    "mlp": (mlp, {"x": (2, 5, 24), "r": (2, 5, 24)}),
}
SEEDS = 60


def inputs(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: RNG.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_beside_float64(name: str) -> None:
    make, shapes = MODELS[name]
    model = fuseplan.onnx.load(make(), "cuda")
    for turn in range(4):  # the second is recorded, and the others replay it on other inputs
        given = inputs(shapes)
        for got, want in zip(model.run(None, given), model.exact(given), strict=True):
            assert isinstance(got, np.ndarray)
            assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max(), f"turn {turn}"
    types = {key: fuseplan.onnx.Type(each, "f32") for key, each in shapes.items()}
    assert model.report(types).launches.libraries == ({"onnxruntime": 1} if name == "cnn" else {})


def test_tensors_give_tensors_of_their_own() -> None:
    model = fuseplan.onnx.load(cnn(), "cuda")
    given = {key: torch.from_numpy(each).cuda() for key, each in inputs({"x": (1, 3, 32, 32)}).items()}
    kept = []
    for turn in range(4):
        (out,) = model.run(None, {"x": given["x"] + turn})
        kept.append((out, model.exact({"x": (given["x"] + turn).cpu().numpy()})[0]))
    for got, want in kept:
        assert got.is_cuda
        assert np.abs(got.cpu().numpy() - want).max() <= 1e-4 * np.abs(want).max()


def test_streams_take_turns() -> None:
    model = fuseplan.onnx.load(cnn(), "cuda")
    x = torch.randn(1, 3, 32, 32, device="cuda")
    wanted = [model.run(None, {"x": x + turn})[0] for turn in range(6)]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(model.run(None, {"x": x + turn})[0])
    torch.cuda.synchronize()
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_models(seed: int) -> None:
    drawing = drawn(seed)
    outputs = [name for name in drawing.found if name not in drawing.given]
    model = fuseplan.onnx.load(drawing.proto(outputs), "cuda")
    for _ in range(3):
        compare(drawing, outputs, model.run(None, drawing.given))
