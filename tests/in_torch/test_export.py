"""Fused modules inside torch's own compilers: torch.compile without breaks, torch.export, AOTInductor."""

import copy
import inspect
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import fuseplan.onnx
import fuseplan.torch as fused


class Block(nn.Module):  # type: ignore[misc]
    """Two products around an activation, a shortcut, and an operator that no plan computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        inner = self.down(nn.functional.gelu(self.up(tokens))) * scale
        return {"out": self.norm(inner + tokens), "sums": inner.cumprod(-1)}


def _run() -> nn.Module:
    return fused.Fused(nn.Linear(16, 32), nn.GELU()).eval()


def _fused() -> tuple[Block, nn.Module, torch.Tensor]:
    module, src = Block().eval(), torch.randn(3, 16)
    return module, fused.fuse(module, src), src


def test_a_fused_module_has_its_own_signature() -> None:
    module, whole, src = _fused()
    twin = copy.deepcopy(whole)
    for each in (whole, twin):
        assert inspect.signature(each.forward) == inspect.signature(module.forward)
    with torch.no_grad():
        twin.up.weight.zero_()
        torch.testing.assert_close(whole(src), module(src), rtol=1e-4, atol=1e-5)
        assert not torch.equal(twin(src)["out"], whole(src)["out"])


def test_torch_compile_follows_a_fused_module() -> None:
    """In one graph, with the gradients; another mode of the module is another graph."""
    module, whole, src = _fused()
    torch.compiler.reset()
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, module):
        module.zero_grad()
        made = call(src)
        (made["out"] ** 3).sum().backward()
        found.append((made, [each.grad for each in module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_torch_compile_follows_open_extents() -> None:
    module, src = Block().eval(), torch.randn(3, 16)
    shapes = {"tokens": {0: torch.export.Dim("rows", max=64)}}
    whole = fused.fuse(module, src, dynamic_shapes=shapes)
    torch.compiler.reset()
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for rows in (3, 5, 7):
            src = torch.randn(rows, 16)
            torch.testing.assert_close(compiled(src), module(src), rtol=1e-4, atol=1e-5)


def _plans(graph: torch.fx.Graph) -> list[str]:
    return [str(node.args[0]) for node in graph.nodes if node.target is torch.ops.fuseplan.run.default]


def test_exported_modules_are_saved_and_loaded() -> None:
    _, whole, src = _fused()
    with torch.no_grad():
        want, program = whole(src), torch.export.export(whole, (src,))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file)
        torch.testing.assert_close(loaded.module()(src), want, rtol=0, atol=0)
    assert len(_plans(loaded.graph)) == len(whole.fusion.cut.sites) == 3
    assert loaded.state_dict.keys() == whole.state_dict().keys()


@pytest.mark.parametrize("is_dynamo", [pytest.param(True, marks=pytest.mark.part(50)), False])
@pytest.mark.filterwarnings("ignore")  # torch's own, of its exporters
def test_onnx_has_the_operators_of_torch(is_dynamo: bool) -> None:
    """Of a run inside of a whole module: ONNX has no word for plans."""
    module, src, file = fused.fuse(_run(), torch.randn(3, 16)), torch.randn(5, 16), io.BytesIO()
    program = torch.onnx.export(module, (src,), *([] if is_dynamo else [file]), dynamo=is_dynamo)
    proto = program.model_proto if is_dynamo else onnx.load_from_string(file.getvalue())
    (made,) = fuseplan.onnx.load(proto).run(None, {proto.graph.input[0].name: src.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(made), module(src), rtol=1e-4, atol=1e-5)


class Encoder(nn.Module):  # type: ignore[misc]
    """A convolution with batch norm, and a transformer's layer on its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.classes = nn.Linear(8, 5)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = self.layer(nn.functional.silu(self.norm(self.patches(src))).flatten(2).transpose(1, 2))
        return self.classes(made.mean(1)).softmax(-1)


@pytest.mark.parametrize("opset", [14, 17, 20])
@pytest.mark.filterwarnings("ignore")  # torch's own, of its exporters
def test_what_torchs_older_exporter_writes_is_fused(opset: int) -> None:
    module, src, file = Encoder().eval(), torch.randn(2, 3, 8, 8), io.BytesIO()
    how = {"dynamo": False, "opset_version": opset, "input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
    torch.onnx.export(module, (src,), file, **how)
    ours = fuseplan.onnx.load(onnx.load_from_string(file.getvalue()), threads=1)
    for batch in (2, 3):
        given = torch.randn(batch, 3, 8, 8)
        (made,) = ours.run(None, {"x": given.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(made), module(given), rtol=1e-5, atol=1e-6)
    launches = ours.report({"x": fuseplan.onnx.Type((3, 3, 8, 8), "f32")}).launches
    assert (launches.kernels, launches.numpy) == (11, 0)


@pytest.mark.part(50)  # a compiler's 10 s
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles its package with g++")
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # torch's own, of its parts
@pytest.mark.parametrize("made", [_run, lambda: _fused()[1]], ids=["run", "whole"])
def test_packages_of_aotinductor_hold_the_kernels(made: Callable[[], nn.Module], tmp_path: Path) -> None:
    module, src = made(), torch.randn(3, 16)
    with torch.no_grad():
        want = module(src)
        program = torch.export.export(module, (src,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "module.pt2"))
        package = torch._inductor.aoti_load_package(path)
        with torch.profiler.profile() as profiled:
            torch.testing.assert_close(package(src), want, rtol=1e-5, atol=1e-5)
    called = {each.key: each.count for each in profiled.key_averages()}
    assert called["fuseplan::run"] == len(_plans(program.graph)) > 0
