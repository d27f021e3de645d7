"""Choosing beside Inductor: a site beside its kernels for the operators, a graph beside its own one."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.graph import choose, trial
from fuseplan.graph.why import Why
from fuseplan.stores import sites
from fuseplan.torch.dynamo import compile_graph
from fuseplan.torch.sites import Site

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of Inductor's imports
    from fuseplan.torch import whole
    from fuseplan.torch.inductor import PEER

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles kernels for the CPU with g++"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: None) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})


def _module() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5), nn.Tanh()
    return nn.Sequential(*layers)


def _compiled(module: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, backend=compile_graph, options={"rest": "inductor", **options})  # type: ignore[no-any-return]


def _plans(run: Callable[[], object]) -> int:
    with torch.profiler.profile() as profiled:
        run()
    return sum(each.count for each in profiled.key_averages() if each.key == "fuseplan::run")


def _decided(code: str) -> Callable[..., sites.Measured]:
    """A measurement of a whole graph that ends so."""
    return lambda key, *_: sites.Measured(
        key, whole.PLANS, PEER, None, 0.0, "2026", code=code, said="told so"
    )


def test_sites_and_the_graph_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, src = _module(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        compiled = _compiled(module, choose="measured")
        made = compiled(src)
        assert int(module[2].num_batches_tracked) == 1, "measuring writes into buffers"
        torch.testing.assert_close(made, module(src), rtol=1e-5, atol=1e-5)
    found = sites.KEPT.records().values()
    assert {each.peer for each in found} == {PEER}
    assert sum(each.plan == whole.PLANS for each in found) == 1
    assert len(found) == 3
    assert all(each.error <= each.allowed for each in found if each.error is not None)
    monkeypatch.setattr(choose, "measured", None)
    monkeypatch.setattr(whole, "_measured", None)
    with torch.no_grad():
        again = _compiled(module, choose="measured")
        torch.testing.assert_close(again(src), module(src), rtol=1e-5, atol=1e-5)
        count = _plans(lambda: again(src))
    (graph,) = (each for each in found if each.plan == whole.PLANS)
    assert count == (0 if graph.code else sum(not each.code for each in found) - 1)


def test_inductor_has_a_graph_that_it_computes_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "_lost", lambda *_: None)
    monkeypatch.setattr(whole, "_measured", _decided(Why.SLOWER.code))
    module, src = _module().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for options in ({"choose": "measured"}, {"choose": "predicted"}):  # which follows what is stored
            made = _compiled(module, **options)
            torch.testing.assert_close(made(src), module(src), rtol=1e-5, atol=1e-5)
            assert _plans(partial(made, src)) == 0
        strict = _compiled(module, accuracy="strict")  # was not measured
        strict(src)
        assert _plans(partial(strict, src)) == 2
        _compiled(module, dryrun=True)(src)
        told = capsys.readouterr().out
        assert "0 kernels" in told
        assert "told so  [slower]" in told
        other = torch.randn(3, 3, 8, 8)  # another graph
        monkeypatch.setattr(whole, "_measured", _decided(""))
        kept = _compiled(module, choose="measured")
        kept(other)
        assert _plans(lambda: kept(other)) == 2


def test_a_graph_that_cannot_be_measured_keeps_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_lost", lambda *_: None)
    monkeypatch.setattr(whole, "_measured", lambda *_: torch.empty(1 << 60))
    module, src = _module().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        compiled = _compiled(module, choose="measured")
        with pytest.warns(UserWarning, match="the whole graph is not measured: "):
            made = compiled(src)
        torch.testing.assert_close(made, module(src), rtol=1e-5, atol=1e-5)
    assert not any(each.plan == whole.PLANS for each in sites.KEPT.records().values())


def test_training_is_measured_site_by_site() -> None:
    module, src = _module(), torch.randn(2, 3, 8, 8)
    module(src).square().sum().backward()
    want = [each.grad.clone() for each in module.parameters()]
    module.zero_grad()
    _compiled(module, choose="measured")(src).square().sum().backward()
    for each, gradient in zip(module.parameters(), want, strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=1e-3, atol=1e-4)
    found = sites.KEPT.records().values()
    assert len(found) >= 3
    assert not any(each.plan == whole.PLANS for each in found)


def test_torchs_own_operators_in_float64_are_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where NumPy takes seconds; here on a CPU."""
    wanted, measured = trial.meaning, list[float]()

    def _compared(graph: Any, site: Any, framework: Any, values: Any) -> Any:
        (made,), want = framework.exact(site, values), wanted(graph, site, values)
        assert made.dtype == torch.float64
        measured.append(float(abs(made.numpy().reshape(want.shape) - want).max()))
        return want

    monkeypatch.setattr(trial, "_want", _compared)
    module, src = _module().eval().bfloat16(), torch.randn(2, 3, 8, 8).bfloat16()
    with torch.no_grad():
        _compiled(module, rest="torch", choose="measured")(src)
    assert len(measured) >= 2
    assert max(measured) < 1e-12


@pytest.mark.parametrize("rest", ["torch", "inductor"])
def test_sites_are_measured_on_the_values_of_the_call(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    measured = trial.measured

    def _watched(graph: Any, site: Any, framework: Any, key: Any, example: Mapping[str, Any]) -> Any:
        seen.update(example)
        return measured(graph, site, framework, key, example)

    monkeypatch.setattr(choose, "measured", _watched)
    module, src = nn.Sequential(nn.Linear(6, 4), nn.ReLU()), torch.randn(3, 6)
    with torch.no_grad():
        _compiled(module, rest=rest, choose="measured")(src)
    assert any(each.shape == src.shape and (each == src.numpy()).all() for each in seen.values())
    assert any(
        (each == module[0].weight.detach().numpy()).all() for each in seen.values() if each.shape == (4, 6)
    )


class _Less(nn.Module):  # type: ignore[misc]
    """A product less a number a feature, which a plan computes with constants of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.less = nn.Linear(24, 40), nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = (self.layer(x) - self.less).logsumexp(1, keepdim=True)
        return made


@pytest.mark.parametrize("rest", ["torch", "inductor"])
def test_constants_of_plans_have_elements(rest: str) -> None:
    torch.manual_seed(1)
    module, src = _Less().eval(), torch.randn(7, 24)
    with torch.no_grad():
        compiled = _compiled(module, rest=rest)
        torch.testing.assert_close(compiled(src), module(src))
        assert _plans(lambda: compiled(src)) or rest == "inductor"  # there a call passes by the dispatcher


class Mixed(nn.Module):  # type: ignore[misc]
    """Torch's own module, which joins positions and images to rows, and its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        held = self.norm(src)
        return src + self.heads(held, held, held, need_weights=False)[0]


def test_rows_that_torch_joins_are_read_with_the_axes_of_the_plan() -> None:
    module, src = Mixed().eval(), torch.randn(3, 5, 16)
    whole = fused.fuse(module, src)
    assert "f32[5x3x16] -> linear(16) -> bias" in [str(site.plan) for site in whole.fusion.cut.sites]
    with torch.no_grad():
        torch.testing.assert_close(whole(src), module(src), rtol=1e-4, atol=1e-4)
        timed = fused.fuse(module, src, choose="measured")
        torch.testing.assert_close(timed(src), module(src), rtol=1e-4, atol=1e-4)
    cut = timed.fusion.cut
    assert all(site.measured.error is not None for site in (*cut.sites, *cut.reverted))


def test_plans_of_training_are_timed_as_steps_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes the host 10 us: a plan that is launched faster than that may lose as a call."""
    called = list[str]()
    again = Site.__call__

    def noted(site: Site, operators: str, *given: Any) -> list[torch.Tensor]:
        called.append(operators)
        return again(site, operators, *given)

    monkeypatch.setattr(Site, "__call__", noted)
    compiled = _compiled(_module(), choose="measured", rest="torch")
    made = compiled(torch.randn(2, 3, 8, 8)).square().sum()
    found = sites.KEPT.records().values()
    assert found
    assert all(each.peer.startswith(f"torch {torch.__version__} beside calls") for each in found)
    assert len(called) > 2 * len(found)
    made.backward()
