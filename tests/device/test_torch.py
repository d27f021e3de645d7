"""Plans as operators of torch's on a GPU: beside torch's layers, compiled, and recorded in CUDA graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.stores import sites
from fuseplan.torch.dynamo import compile_graph

BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest value
MODULES: tuple[tuple[Callable[[], fused.Fused], tuple[int, ...]], ...] = (
    (lambda: fused.Fused(nn.Linear(96, 80), nn.GELU()), (37, 96)),
    (lambda: fused.Fused(nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()), (2, 16, 14, 14)),
    (lambda: fused.Fused(nn.RMSNorm(96, eps=1e-5)), (5, 7, 96)),
)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own of its compiler
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("made", "shape"), MODULES)
@pytest.mark.parametrize("way", ["eager", "compiled", "recorded", "misaligned"])
def test_modules_compute_what_torch_computes(
    made: Callable[[], fused.Fused], shape: tuple[int, ...], dtype: torch.dtype, way: str
) -> None:
    torch.manual_seed(0)
    module = made().to("cuda", dtype).eval()
    whole = torch.randn(torch.Size(shape).numel() + 1, device="cuda").to(dtype)
    src = whole[1:].view(shape) if way == "misaligned" else whole[:-1].view(shape)
    want = nn.Sequential.forward(module.double(), src.double())
    module.to(dtype)
    got = _called(module, src, way)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


def _called(module: Any, src: torch.Tensor, way: str) -> torch.Tensor:
    if way == "compiled":
        torch.compiler.reset()  # torch compiles one function for eight modules at most
        compiled: torch.Tensor = torch.compile(module, fullgraph=True)(src)
        return compiled
    if way != "recorded":
        called: torch.Tensor = module(src)
        return called
    module(src)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded: torch.Tensor = module(src)
    recorded.fill_(float("nan"))
    graph.replay()
    return recorded


def test_gradients_are_torchs() -> None:
    torch.manual_seed(0)
    module, src = fused.Fused(nn.Linear(96, 80), nn.Tanh()).cuda(), torch.randn(37, 96, device="cuda")
    found = []
    with torch.enable_grad():
        for call in (module, lambda each: nn.Sequential.forward(module, each)):
            module.zero_grad()
            call(src).square().sum().backward()
            found.append([each.grad for each in module.parameters()])
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-3 * want.abs().max()


def test_weights_that_lie_as_the_kernel_reads_them_are_neither_copied_nor_kept() -> None:
    module, src = fused.Fused(nn.Linear(4096, 4096, bias=False)).cuda().half(), torch.zeros(256, 4096)
    src = src.cuda().half()
    module(src)
    before = torch.cuda.memory_allocated()
    other = fused.Fused(nn.Linear(4096, 4096, bias=False)).cuda().half()
    other(src)
    del other
    assert torch.cuda.memory_allocated() <= before + 4096 * 4096


@pytest.mark.parametrize("dtype", BOUNDS)
def test_sites_are_measured_beside_torch(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(2),
        nn.Linear(196, 64),
        nn.GELU(),
    )
    model, src = model.to("cuda", dtype).eval(), torch.randn(2, 16, 14, 14, device="cuda").to(dtype)
    whole = fused.fuse(model, src, choose="measured")
    found = [*whole.fusion.cut.sites, *whole.fusion.cut.reverted]
    assert len(found) == 2
    for site in found:
        made = site.measured
        assert made.code in ("", "slower"), made.said
        assert made.error <= made.allowed
        assert all(1e-6 < seconds < 1e-3 for seconds in made.seconds.values())
        assert len(made.seconds) == 2
    want = model.double()(src.double())
    model.to(dtype)
    assert (whole(src).double() - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("way", ["fuse", "backend", "recorded"])
def test_whole_models_compute_what_torch_computes(
    dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 1), nn.SiLU(), nn.Flatten(2), nn.Linear(49, 24), nn.LayerNorm(24), nn.GELU(),
    )  # fmt: skip
    model = model.to("cuda", dtype).eval()
    src = torch.randn(2, 16, 14, 14, device="cuda").to(dtype)
    want = model.double()(src.double())
    model.to(dtype)
    whole = torch.compile(model, backend=compile_graph) if way == "backend" else fused.fuse(model, src)
    got = _called(whole, src, way)
    assert (got.double() - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11's own
def test_a_report_counts_the_launches_of_a_gpu() -> None:
    """Torch's profiler sees a kernel a plan; the profile has a time for each operator before that."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    module, src = module.to("cuda", torch.float16).eval(), torch.randn(64, 256, device="cuda").half()
    whole = fused.fuse(module, src)
    activity = torch.profiler.ProfilerActivity
    with torch.no_grad():
        whole(src)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as seen:
            whole(src)
            torch.cuda.synchronize()
    calls = [event.name for event in seen.events()]
    launches = whole.report.launches
    assert calls.count("fuseplan::run") == launches.kernels == len(whole.report.sites)
    assert launches.after < launches.before == 4
    told = fused.profile(module, src)
    assert {row.name for row in told.operators} == {row.name for row in whole.report.operators}
    assert min(row.seconds for row in told.operators) > 0
