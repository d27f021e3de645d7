"""The runner of GPU benchmarks, on torch's CPU tensors and a clock that knows the answer."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recorded, special, suite
from benchmarks.command import bench
from benchmarks.peers.gpu_fused import CudnnAttention
from fuseplan.bench import command, gpu, results
from fuseplan.bench.options import Display, Options
from fuseplan.bench.peers import known
from fuseplan.bench.peers.ours import Fuseplan
from fuseplan.bench.peers.peer import Prepared
from fuseplan.bench.peers.torch_peer import Torch
from fuseplan.cli.screen import display
from fuseplan.errors import ArgumentError
from fuseplan.measure.cases import Case
from fuseplan.measure.data import random_arrays
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.machine import GpuMachine, machine
from fuseplan.measure.peaks import GpuPeaks
from fuseplan.measure.spaces import Tensors
from fuseplan.measure.stats import summarize
from fuseplan.plans.plan import FusionPlan

PEAKS = GpuPeaks("a GPU", {"dram": 1e12}, {"f16": 1e14, "f32": 1e13, "tf32": 5e13})
MACHINE = GpuMachine("a GPU", "sm_90", 132, 80 << 30, 50 << 20, "1.2", machine())
SECONDS = 3e-5


class Clock:
    """Every call takes as long as the next, and is made once."""

    def __init__(self, device: int, protocol: Any) -> None:
        del device, protocol

    def interleave(self, variants: Mapping[str, Any]) -> dict[str, Any]:
        for call in variants.values():
            call()
        return {name: summarize([[SECONDS]]) for name in variants}

    def latency(self, variants: Mapping[str, Any]) -> dict[str, Any]:
        return {name: summarize([[5e-5]]) for name in variants}

    def wall(self, variants: Mapping[str, Any]) -> dict[str, Any]:
        return {name: summarize([[4e-6]]) for name in variants}

    def replay(self, calls: list[Any]) -> float:
        raise RuntimeError("no graphs here")


class Wrong(Torch):
    name = "wrong"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        prepared = super().prepare(plan, copies)
        return Prepared(prepared.call, lambda: prepared.result() * 1.5)


class Unwritten(Torch):
    name = "unwritten"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        prepared = super().prepare(plan, copies)

        def result() -> Any:
            made: Any = prepared.result()
            made[-1, -1, -1, -1] = float("nan")
            return made

        return Prepared(prepared.call, result)


class Rounding(Torch):
    name = "rounding"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        return replace(super().prepare(plan, copies), facts={"template": str(torch_rounds())})


class Broken(Torch):
    name = "broken"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        raise OSError("out of something")


class Refusing(Torch):
    name = "refusing"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        raise CannotRunError("not this one")


class Extra(Torch):
    name = "extra"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        prepared = super().prepare(plan, copies)
        return Prepared(prepared.call, prepared.result, {"template": "direct", "added_bytes": 10**6})


class Ours(Fuseplan):
    name = "ours"
    target = "cpu"


class MathAttention(CudnnAttention):
    name = "math"
    backend = "MATH"


def torch_rounds() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


BY_NAME: Any = known(True).by_name
drawn = partial(random_arrays, device="cpu")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Wrong, Unwritten, Rounding, Broken, Refusing, Extra, Ours, MathAttention):
        monkeypatch.setitem(BY_NAME, kind.name, kind)
    monkeypatch.setattr(gpu, "needs_gpu", lambda: None)
    monkeypatch.setattr(gpu, "gpu_machine", lambda device: MACHINE)
    monkeypatch.setattr(command, "gpu_machine", lambda device: MACHINE)
    monkeypatch.setattr(gpu, "gpu_versions", lambda: {"numpy": "2", "torch": "2"})
    monkeypatch.setattr(gpu, "gpu_peaks", lambda name: PEAKS)
    monkeypatch.setattr(gpu, "GpuClock", Clock)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def listing(shown: list[str]) -> Display:
    """Keeps all that is told."""
    return Display(shown.append, shown.append, lambda _: nullcontext(lambda _: None))


SUITE = suite.Suite(
    "s",
    "A suite",
    (Case("a", "f32[2x3x5x4, nhwc] -> conv2d(4, kernel=3) -> bias -> relu", "g", "m"),),
    (),
)


def rows(*peers: str, of: Case = SUITE.cases[0], **more: Any) -> dict[str, results.Row]:
    (listed,) = gpu.run(replace(SUITE, cases=(of,)), Options(target="cuda", chosen=peers, **more))
    return {row.peer: row for row in listed}


def test_what_is_right_is_timed_and_stamped() -> None:
    names = ("torch", "torch:steps", "unfused:nchw", "unfused:nhwc")
    found = rows(*names, run="2026-01-01", commit="abc")
    assert tuple(found) == names
    assert all(row.error is not None and row.error < 1e-6 for row in found.values())
    assert all(row.latency == 5e-5 for row in found.values())
    row = found["torch"]
    assert (row.median, row.run, row.commit, row.case) == (SECONDS, "2026-01-01", "abc", "a")
    assert row.error is not None
    assert row.error < 1e-6
    assert row.machine["gpu"] == "a GPU"
    assert row.machine["cpu"] == machine().cpu
    assert row.floor == pytest.approx((2 * 2 * 4 * 3 * 2 * 27) / (5e13 / 3)) or row.bound == "dram"
    assert results.Row(**row.to_json()) == row


def test_torch_rounds_as_the_plan_does_while_it_is_measured() -> None:
    case, before = SUITE.cases[0], torch_rounds()
    for precision, is_tf32 in (("full", False), ("tf32", True)):
        plan = case.plan.replace("kernel=3", f"kernel=3, precision={precision}")
        found = rows("rounding", of=replace(case, plan=plan))
        assert (found["rounding"].template, torch_rounds()) == (str((is_tf32, is_tf32)), before)


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        ("wrong", "wrong: off by 5.0e-01 of the largest output"),
        ("unwritten", "wrong: off by inf of the largest output"),
        ("broken", "OSError: out of something"),
        ("refusing", "not this one"),
    ],
)
def test_what_is_not_right_is_told_and_not_timed(peer: str, why: str) -> None:
    found = rows("torch", peer)
    assert found[peer].refused == why
    assert found[peer].median is None
    assert found["torch"].median == SECONDS


def test_bytes_that_a_comparison_adds_are_seconds_at_the_copy_rate() -> None:
    row = rows("extra")["extra"]
    assert row.added == pytest.approx(1e-6)
    assert row.template == "direct"


@pytest.mark.parametrize(
    ("plan", "wrt"),
    [
        ("f32[2x4x20x16, bshd of bhsd] -> attention(key_heads=2, is_causal=True)", "src key value"),
        ("f32[2x4x20x16, bhsd] -> attention(mask_axes=bt)", "value src"),
        ("f32[2x4x20x16, bhsd] -> attention(bias_axes=hst)", "src key value"),
        ("f32[12x20] -> linear(8) -> gelu", "src weight"),
    ],
)
def test_gradients_are_those_of_autograd(plan: str, wrt: str) -> None:
    found = rows("ours", "torch", "torch.compile", of=Case("a", plan, gradients=wrt))
    for name in ("ours", "torch"):
        assert (found[name].median, found[name].refused) == (SECONDS, None)
        assert (found[name].error or 0) < 1e-6
    assert found["ours"].nbytes is not None
    assert found["torch.compile"].refused == "torch.compile is not measured with gradients of plans"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("is_causal=True, key_heads=2", None),
        ("window=5", None),
        ("is_causal=True, window=5", None),
        ("mask_axes=bst", None),
        ("softcap=2.0", "math is not measured with these attributes"),
    ],
)
def test_gradients_of_the_libraries_attention(how: str, why: str | None) -> None:
    case = Case("a", f"f32[2x4x20x16, bhsd] -> attention({how})", gradients="src key value")
    assert rows("math", of=case)["math"].refused == why


def test_a_mask_is_what_torch_is_given() -> None:
    plan = "f32[2x2x9x16, bhsd] -> attention(bias_axes=hst, mask_axes=bt, keys=7)"
    assert rows("torch", of=Case("a", plan))["torch"].median == SECONDS


def test_the_hosts_time_where_asked_for() -> None:
    assert rows("torch")["torch"].wall is None
    row = rows("torch", is_host=True)["torch"]
    assert row.wall == 4e-6
    assert row.replay is None, "what cannot be captured has no such time"


def test_results_are_appended_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    options = Options(target="cuda", peers="torch", only="bias and relu", results=tmp_path)
    found = bench("gpu_overhead", options, listing(shown))
    assert [row.peer for row in found] == ["torch"]
    assert list(recorded.read(tmp_path / "gpu_overhead.jsonl")) == found
    assert "Calling a bound plan on a GPU: a GPU" in shown[0]
    with pytest.raises(ArgumentError, match="no case"):
        bench("gpu_overhead", Options(target="cuda", only="nothing"), display(False, is_quiet=True))
    quiet = Options(target="cuda", peers="torch", as_json=True, only="bias and")
    bench("gpu_overhead", quiet, display(True, is_quiet=True))
    assert [row["peer"] for row in json.loads(capsys.readouterr().out)] == ["torch"]


def test_the_published_shapes_are_appended_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = suite.load("published_cuda").cases[0]
    plan = "f32[2x8x5x4] -> conv2d(4, kernel=1) -> bias -> relu"
    small = suite.Suite("published_cuda", "P", (replace(case, plan=plan),), ())
    monkeypatch.setattr(special, "load", lambda name: {small.name: small}[name])
    monkeypatch.setattr(special, "CHARTS", tmp_path / "charts")
    monkeypatch.setitem(BY_NAME, "fuseplan", type("Ours", (Torch,), {"name": "fuseplan"}))
    for name in [each for each in BY_NAME if each.startswith("torch.compile")]:  # Inductor takes seconds
        monkeypatch.setitem(BY_NAME, name, type("Compiled", (Refusing,), {"name": name}))
    shown: list[str] = []
    options = Options(target="cuda", results=tmp_path)
    found = special.bench_published("published", options, listing(shown))
    assert {"fuseplan", "unfused:nchw", "unfused:nhwc", "cudnn"} <= {row.peer for row in found}
    assert list(recorded.read(tmp_path / "published_cuda.jsonl")) == found
    (drawn,) = (tmp_path / "charts").iterdir()
    assert shown[-1] == f"chart: {drawn}"
    only = special.bench_published("published", replace(options, peers="unfused"), listing(shown))
    assert [row.peer for row in only] == ["unfused:nchw", "unfused:nhwc"]
