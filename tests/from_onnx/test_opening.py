"""Models whose batch is open: kernels that serve every batch, beside ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import fuseplan.onnx
from fuseplan.backends.host import HostMemory
from fuseplan.execution import build
from fuseplan.graph import opened
from fuseplan.onnx import OnnxModel, Type
from onnx_models import cnn, mlp, model, weights

RNG = np.random.default_rng(0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans' kernels that are built from now on and were not known; estimates ask for no second one."""
    texts: list[str] = []
    plain = build.build

    def noted(choice: Any, kernel: Any, target: Any, **options: Any) -> Any:
        program = plain(choice, kernel, target, **options)
        if program.origin != "memory":
            texts.append(kernel.text)
        return program

    monkeypatch.setattr(build, "build", noted)
    monkeypatch.setattr(opened, "AS_FAST", 1e9)
    build._programs.clear()
    return texts


def check(proto: Any, ours: OnnxModel, batch: int, rest: tuple[int, ...]) -> None:
    given = {name: RNG.standard_normal((batch, *rest), np.float32) for name in ours.inputs}
    peer = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)
    for made, want in zip(ours.run(None, given), peer, strict=True):
        assert made.shape == want.shape
        np.testing.assert_allclose(made, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(("proto", "rest"), [(cnn(), (3, 32, 32)), (mlp(), (7, 24))], ids=["cnn", "mlp"])
def test_one_loaded_model_takes_every_batch(proto: Any, rest: tuple[int, ...], compiled: list[str]) -> None:
    """Of a model whose first extent is open; batches come again. Gates of one image are a scale."""
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=2)
    check(proto, ours, 1, rest)
    check(proto, ours, 3, rest)
    first = len(compiled)
    for batch in (7, 2, 1, 3):
        check(proto, ours, batch, rest)
    assert 0 < first == len(compiled)
    report = ours.report({name: Type((3, *rest), "f32") for name in ours.inputs})
    assert all(site.opened.startswith("f32[*x") and not site.fixed for site in report.sites)
    assert f"for every batch: {report.sites[0].opened}" in str(report)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("proto", "rest"), [(cnn(), (3, 32, 32)), (mlp(), (7, 24))], ids=["cnn", "mlp"])
def test_weights_are_packed_once_for_all_batches(
    proto: Any, rest: tuple[int, ...], mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a message in memory, and of a file whose weights are mapped: these are known by their places."""
    packed, plain = list[str](), HostMemory.packed

    def noted(self: HostMemory, packing: Any, buffer: Any, **how: bool) -> Any:
        made = plain(self, packing, buffer, **how)
        packed.extend([str(packing.shape)] * (made.address != buffer.address))
        return made

    monkeypatch.setattr(opened, "AS_FAST", 1e9)
    monkeypatch.setattr(HostMemory, "packed", noted)
    onnx.save(proto, tmp_path / "model.onnx")
    ours: OnnxModel = fuseplan.onnx.load(tmp_path / "model.onnx" if mapped else proto, threads=2)

    def prepare(model: OnnxModel, batch: int) -> int:
        packed.clear()
        model.prepare({name: Type((batch, *rest), "f32") for name in model.inputs})
        return len(packed)

    first = prepare(ours, 2)
    assert first > 1
    for batch in (3, 5):
        assert prepare(ours, batch) == 0
        check(proto, ours, batch, rest)
    assert prepare(fuseplan.onnx.load(proto, threads=2), 3) > 1


def test_other_weights_are_packed_by_themselves() -> None:
    """Two layers alike but for their weights, of which one is a multiple of the other."""
    w, factor = weights(64, 64), weights(64)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "v"], ["b"]),
        helper.make_node("Mul", ["b", "f"], ["y"]),
    ]
    proto = model(nodes, {"x": ["n", 64]}, ["y"], {"w": w, "v": 2 * w, "f": factor})
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    for batch in (1, 3, 2):
        check(proto, ours, batch, (64,))


def test_a_batch_has_a_kernel_of_its_own_where_the_known_ones_are_slow(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    proto = model(nodes, {"x": ["n", 64]}, ["y"], {"w": weights(64, 256)})
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    check(proto, ours, 1, (64,))
    monkeypatch.setattr(opened, "AS_FAST", 1.0)
    check(proto, ours, 64, (64,))
    assert len(compiled) == 2
    monkeypatch.setattr(opened, "AS_FAST", 1e9)
    check(proto, ours, 65, (64,))  # by the faster one of the two
    assert len(compiled) == 2
    templates = [ours.report({"x": Type((n, 64), "f32")}).sites[0].template for n in (1, 64, 65)]
    assert templates[0] != templates[1] == templates[2]


def test_plans_that_cannot_be_open_are_compiled_for_each_batch() -> None:
    """A sum along the batch, and values whose batch is an inner axis."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("Softmax", ["a"], ["b"], "softmax", axis=0),
        helper.make_node("Transpose", ["b"], ["t"], "turn", perm=[1, 0]),
        helper.make_node("Tanh", ["t"], ["y"], "tanh"),
    ]
    proto = model(nodes, {"x": ["n", 6]}, ["a", "y"], {})
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    for batch in (1, 4, 3):
        check(proto, ours, batch, (6,))
    report = ours.report({"x": Type((4, 6), "f32")})
    told = {site.operators: (site.opened, site.fixed.partition(":")[0]) for site in report.sites}
    assert told == {
        ("relu",): ("f32[*x6] -> relu", ""),
        ("softmax",): ("", "open-axes"),
        ("tanh",): ("", "open-extent"),
    }
    assert "for this batch alone: open-axes: " in str(report)


def test_a_model_for_one_batch_says_nothing_of_others() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], "relu")]
    ours: OnnxModel = fuseplan.onnx.load(model(nodes, {"x": [2, 6]}, ["y"], {}), threads=1)
    (site,) = ours.report().sites
    assert (site.opened, site.fixed) == ("", "")
