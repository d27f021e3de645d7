from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from click.testing import CliRunner, Result

from fuseplan.cli import trial
from fuseplan.cli.commands import fuseplan
from fuseplan.cli.options import MODES
from fuseplan.cli.show import RECORDS
from fuseplan.graph.choose import Mode
from fuseplan.measure import data, ground
from fuseplan.measure.clock import HostClock, Protocol
from fuseplan.measure.data import evaluated
from pretend_gpu import machine
from toy_chain import PLAN as CHAIN
from toy_chain import ToyChain, chain

PLAN = "f32[1x8x9x9, nhwc] -> conv2d(8, kernel=3, padding=1) -> bias -> relu"
REFUSED = "f32[1x4x9x9] -> conv2d(4, kernel=3) -> conv2d(4, kernel=3)"


def posed_machine(device: int | None) -> tuple[str | None, HostClock]:
    """A GPU's tensors, which are torch's on the CPU."""
    return (None if device is None else "cpu"), HostClock(Protocol(rounds=1, block_seconds=0.001))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    monkeypatch.setattr(ground, "HOST_BLOCK", 0.001)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(fuseplan, words)


def told(*words: str) -> Any:
    return json.loads(call(*words, "--json").stdout)


def test_run_checks_and_times() -> None:
    result = call("run", PLAN, "--threads", "1")
    assert result.exit_code == 0, result.output
    for words in ("right", "1 for 3 operators", "ms", "template   "):
        assert words in result.stdout
    found = told("run", PLAN, "--threads", "1")
    assert found["right"] is True
    assert 0 < found["error"] < found["allowed"]
    assert found["unfused_seconds"] > 0
    assert found["threads"] == 1


def test_run_compares_each_result_within_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result in f32 that is wrong by less than the output's f16 rounds by."""

    def biased(*given: Any) -> Any:
        out, results = evaluated(*given)
        return out, {**results, "saved_mean": results["saved_mean"] * 1.0005}

    monkeypatch.setattr(data, "evaluated", biased)
    result = call("run", "f16[4x8x9x9, nhwc] -> batch_norm_training -> relu")
    assert (result.exit_code, "of the largest saved_mean" in result.stdout) == (1, True), result.output


def test_run_on_the_reference() -> None:
    found = told("run", PLAN, "--target", "reference")
    assert found["error"] < 1e-7
    assert found["unfused_seconds"] is None


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "evaluated", lambda *given: (evaluated(*given)[0] * 1.001, {}))
    result = call("run", PLAN, "--target", "reference")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout


def test_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "machine_of", posed_machine)
    monkeypatch.setattr(trial, "OneAtATime", lambda plan, tensors, target: lambda: None)
    with machine(ToyChain) as gpu:
        gpu.driver.meaning = chain
        result = call("run", CHAIN, "--target", "cuda")
        assert result.exit_code == 0, result.output
        assert "target     triton:sm_90, 132 processors" in result.stdout
        assert "right" in result.stdout
        gpu.driver.meaning = lambda launch: None
        assert call("run", CHAIN, "--target", "cuda").exit_code == 1, "nothing was written"
        refused = call("run", CHAIN, "--target", "cuda", "--threads", "2")
        assert (refused.exit_code, "threads=2 is for CPUs" in refused.stderr) == (2, True)
        foreign = call("run", CHAIN, "--target", "triton:gfx942")
        assert (foreign.exit_code, "does not run here" in foreign.stderr) == (1, True)


def test_the_driver_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "machine_of", posed_machine)
    with machine(ToyChain) as gpu:
        gpu.driver.meaning = chain
        found = json.loads(call("driver", CHAIN, "--target", "cuda", "-t", "1", "-w", "1", "--json").stdout)
        assert (found["right"], found["target"]) == (True, "triton:sm_90")
        assert found["kernel_seconds"]["calls"] == found["wall_seconds"]["calls"] == 1
        gpu.driver.meaning = lambda launch: None
        assert call("driver", CHAIN, "--target", "cuda").exit_code == 1, "nothing was written"
        foreign = call("driver", CHAIN, "--target", "triton:gfx942")
        assert (foreign.exit_code, "does not run here" in foreign.stderr) == (1, True)


def test_tensors_that_a_gpu_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ground, "GpuClock", full)
    with machine(ToyChain):
        result = call("run", CHAIN, "--target", "cuda")
    assert (result.exit_code, "do not fit this machine's memory: no room" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", ["run", "explain", "show"])
@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ((REFUSED,), 3, "several-contractions"),
        (("f32[1x4] -> relo",), 2, "Did you mean `relu`?"),
        (("f32[1x4", "--target", "reference"), 2, "not a tensor"),
        ((PLAN, "--target", "gpu"), 2, "no target is named 'gpu'"),
        ((PLAN, "--threads", "0"), 2, "threads=0"),
        ((PLAN, "--threads", "many"), 2, "not a valid integer"),
        ((PLAN, "--accuracy", "perfect"), 2, "accuracy='perfect'"),
        ((PLAN, "--accuracy", "1e-15"), 3, "[accuracy]"),
        ((PLAN, "--template", "fft"), 2, "no template 'fft'. Known here: depthwise"),
        ((), 2, "Missing argument 'PLAN'"),
    ],
)
def test_exit_statuses(command: str, words: tuple[str, ...], status: int, says: str) -> None:
    result = call(command, *words)
    assert result.exit_code == status, result.output
    assert says in result.output


def test_tensors_larger_than_memory_are_an_error_of_the_caller() -> None:
    result = call("run", "f32[99999999x99999999x9x9] -> relu")
    assert result.exit_code == 2
    assert "do not fit this machine's memory" in result.output


def test_errors_are_json_where_json_is_wanted() -> None:
    result = call("run", REFUSED, "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["error"] == "Unsupported"
    assert "several-contractions" in [each["code"] for each in found["refusals"]]
    assert json.loads(call("explain", REFUSED, "--json").stdout)["fused"] is False
    assert json.loads(call("run", "f32[1x4] -> relo", "--json").stdout)["error"] == "PlanError"


def test_explain() -> None:
    result = call("explain", PLAN, "--target", "cpu:neon", "--accuracy", "strict")
    assert result.exit_code == 0
    assert "cpu:neon" in result.stdout
    assert told("explain", PLAN)["match"]["rule"] == "contraction"


@pytest.mark.parametrize("stage", RECORDS)
def test_show_prints_each_stage(stage: str) -> None:
    result = call("show", PLAN, "--stage", stage)
    assert result.exit_code == 0, result.output
    assert len(result.stdout) > 10
    assert list(told("show", PLAN, "--stage", stage)) == [stage]


def test_show_prints_all_for_another_machine() -> None:
    result = call("show", PLAN, "--target", "cpu:neon")
    for stage in ("plan", "match", "kernel", "choice", "source"):
        assert f"# {stage}\n" in result.stdout
    assert PLAN in result.stdout
    assert told("show", PLAN, "--stage", "source")["source"]["entry"] in result.stdout


def test_supported_lists_every_operator_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuseplan.language.dtypes import DTYPES
    from fuseplan.ops import OPERATORS

    rows = told("supported")["supported"]
    assert {row["operator"] for row in rows} == {operator.name for operator in OPERATORS}
    assert {row["dtype"] for row in rows} == set(DTYPES)
    assert all(row["templates"] for row in rows), "an operator that nothing computes"
    monkeypatch.setattr("fuseplan.cli.support.DTYPES", ("f64",))
    result = call("supported", "--target", "reference")
    assert "interpreted" in result.stdout


def test_supported_lists_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one dtype: tests/test_supported.py asks about all."""
    monkeypatch.setattr("fuseplan.cli.combinations.FACTORS", ("f16",))
    rows = told("supported", "--combinations", "--target", "triton:gfx942")["combinations"]
    taken = [row for row in rows if "reason" not in row and row["algorithm"] == "product"]
    assert any({"CBA", "CNA"} <= set(row["combinations"]) and row["filter"] == "any" for row in taken)
    assert [row["reason"] for row in rows if row["algorithm"] == "hopper" and "C" in row["combinations"]] == [
        "not-hopper"
    ]
    printed = call("supported", "--combinations", "--target", "reference").stdout
    assert "what reference computes" in printed
    assert "…" not in printed, "a pipe has room for every word"
    assert "NA-backward" in printed


def test_models_are_chosen_by_the_words_of_the_library() -> None:
    assert get_args(Mode) == MODES


def test_cache(folder: Path) -> None:
    assert told("cache", "path") == {"path": str(folder)}
    assert told("cache", "info")["entries"] == 0
    call("run", "f32[1x8] -> relu")
    assert told("cache", "info")["entries"] == 1
    assert "1 kernel," in call("cache", "info").stdout
    assert told("cache", "clear") == {"removed": 1}
    assert told("cache", "info")["entries"] == 0
    assert told("cache", "info")["problem"] is None


def test_a_cache_folder_that_cannot_be_used_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    for name in ("file", "file/in"):
        monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(folder / name))
        assert f"it cannot be used: {folder / 'file'} is not a folder" in call("cache", "info").stdout
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(folder / "not" / "yet"))
    assert "cannot be used" not in call("cache", "info").stdout


def test_bench_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr("benchmarks.command.bench", lambda name, options, _: met.append((name, options)))
    result = call("bench", "quick", "--threads", "1,2", "--peers", "torch", "--only", "3x3", "--no-results")
    assert result.exit_code == 0, result.output
    ((name, options),) = met
    assert name == "quick"
    assert options.threads == (1, 2)
    assert options.peers == "torch"
    assert options.only == "3x3"
    assert options.results is None
    call("bench", "mine.toml")
    assert met[-1][0] == "mine.toml", "a suite may be any file"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bench", "nothing"), "no suite is named 'nothing'"),
        (("bench", "quick", "--threads", "one"), "want whole numbers from 1 to"),
        (("bench", "quick", "--threads", "1,0"), "want whole numbers from 1 to"),
        (("bench", "quick", "--rounds", "0"), "--rounds"),
        (("run", PLAN, "--seed", "-1"), "--seed"),
        (("verdict", PLAN, "--seed", "-1"), "--seed"),
        (("tune", PLAN, "--most", "-1"), "--most"),
        (("tune", PLAN, "--threads", "0"), "threads=0"),
        (("tune", PLAN, "--target", "nonsense"), "no target is named 'nonsense'"),
        (("tune", PLAN, "--accuracy", "sloppy"), "accuracy='sloppy'"),
        (("crossbuild", "quick", "--candidates", "0"), "--candidates"),
        (("crossbuild", "quick", "--template", "zz"), "no template 'zz' takes these plans"),
    ],
)
def test_options_that_cannot_be(words: tuple[str, ...], says: str) -> None:
    result = call(*words)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "compile_plan", interrupted)
    result = call("run", PLAN)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "fuseplan", "explain", PLAN]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("the output cannot be written: ")
    assert len(result.stderr.splitlines()) == 1


def test_warnings_are_told_without_source(folder: Path) -> None:
    (folder / "file").write_text("")
    environment = {**os.environ, "FUSEPLAN_CACHE_DIR": str(folder / "file")}
    words = [sys.executable, "-m", "fuseplan", "run", PLAN, "--json"]
    result = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(result.stdout)["right"] is True
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"RuntimeWarning: the cache folder {folder / 'file'} cannot be used")


def test_a_chart_that_cannot_be_drawn_is_told_before_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.demo.measure", None)  # which is not asked
    result = call("demo", "--chart", "demo.jpg")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a chart is written as .svg or .png, not '.jpg'" in result.stderr


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    met: list[Any] = []
    monkeypatch.setattr(
        "benchmarks.commands.run_demo",
        lambda threads, chart, **more: met.append((threads, chart, more["as_json"])),
    )
    assert call("demo", "--threads", "2", "--chart", str(tmp_path / "a.svg"), "--json").exit_code == 0
    assert met == [(2, tmp_path / "a.svg", True)]


@pytest.mark.parametrize("package", ["click", "rich"])
def test_a_missing_package_is_named(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import fuseplan.cli; fuseplan.cli.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    how = "`pip install '.[cli]'` in a checkout of fuseplan, or `pip install click rich`"
    assert done.stderr.strip() == f"the command line needs {package}: {how}"


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuseplan", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for command in ("demo", "run", "explain", "show", "bench", "supported", "cache"):
        assert command in done.stdout
