"""The command `fuseplan driver`: lines run, checked and timed, one at a time and many."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.toolchain import compile_object
from fuseplan.cli.commands import fuseplan
from fuseplan.compat.miopen_driver import run as driving
from fuseplan.compat.miopen_driver.letters import ACTIVATIONS, BATCH_NORM_MODES, DTYPES, MODES
from fuseplan.compat.miopen_driver.report import driver_report
from fuseplan.compat.miopen_driver.sweep import combinations
from fuseplan.measure import clock, data, ground
from fuseplan.measure.data import evaluated
from fuseplan.plans.plan import FusionPlan

SIZES = "-n 1 -c 8 -H 9 -W 9 -k 8"
CBA = f"CBAInfer -F 4 {SIZES}"
REFUSED = "f32[1x4x9x9] -> conv2d(4, kernel=3) -> conv2d(4, kernel=3)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ground, "HOST_BLOCK", 0.001)
    return tmp_path


def call(line: str, *words: str) -> Result:
    return CliRunner().invoke(fuseplan, ["driver", *line.split(), *words])


def lines_of(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def sweep(folder: Path) -> Any:
    def run(lines: str, *words: str) -> Result:
        (folder / "lines").write_text(lines)
        return call("", "--sweep", str(folder / "lines"), *words)

    return run


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiles another text than the templates emitted: `emitted(what, instead)`."""

    def change(what: str, instead: str) -> None:
        def compiled(text: str) -> bytes:
            assert what in text
            return compile_object(text.replace(what, instead))

        monkeypatch.setattr(toolchain, "compile_object", compiled)
        monkeypatch.setattr("fuseplan.execution.build._programs", {})

    return change


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "evaluated", lambda *given: (evaluated(*given)[0] * 1.001, {}))


def test_a_line_is_run_and_verified() -> None:
    result = call(CBA)
    assert result.exit_code == 0, result.output
    for words in (
        "plan       f32[1x8x9x9] -> conv2d(8, kernel=3) -> bias -> relu",
        "command    fuseplan driver CBAInfer -F 4 -n 1 -c 8 -H 9 -W 9 -k 8",
        "kernels    1 for 3 operators",
        ": right",
    ):
        assert words in result.stdout
    assert "kernel " not in result.stdout, "no time was asked for"


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    result = call(CBA, "-V", "1")
    assert (result.exit_code, "WRONG" in result.stdout) == (1, True)
    monkeypatch.setattr(data, "evaluated", None)  # which is not asked
    unseen = call(CBA, "-V", "0")
    assert (unseen.exit_code, "not compared with float64" in unseen.stdout) == (0, True)


BIASED = f"CBAInfer -F cb {SIZES} -y 1 -x 1"


def test_a_wrong_kernel_is_found(emitted: Any, sweep: Any) -> None:
    emitted("fadd <", "fsub <")
    result = call(BIASED)
    assert (result.exit_code, "WRONG" in result.stdout) == (1, True)
    many = sweep(BIASED)
    assert (many.exit_code, "1 line, 1 failed" in many.stdout) == (1, True)


def test_what_is_not_finite_is_null_in_json(emitted: Any, folder: Path, sweep: Any) -> None:
    def strict(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    emitted("splat (float 0x0000000000000000)", "splat (float 0x7FF0000000000000)")
    line = f"CBAInfer -F na -M 1 {SIZES}"
    found = json.loads(call(line, "--json").stdout, parse_constant=strict)
    assert (found["right"], found["checks"][0]["error"]) == (False, None)
    assert sweep(line, "--report", str(folder / "report")).exit_code == 1
    assert json.loads((folder / "report" / "report.json").read_text(), parse_constant=strict)
    assert "out is not finite where the float64 reference is" in (folder / "report" / "report.md").read_text()
    run = CliRunner().invoke(fuseplan, ["run", "f32[1x8x4x4] -> relu", "--json"])
    assert (run.exit_code, json.loads(run.stdout, parse_constant=strict)["error"]) == (1, None)


def test_times_are_of_so_many_calls_but_the_first() -> None:
    (found,) = lines_of(call(CBA, "-t", "1", "-w", "1", "-i", "4", "--json"))
    for taken in (found["kernel_seconds"], found["wall_seconds"]):
        assert taken["calls"] == 4
        assert 0 < taken["least"] <= taken["mean"]
    calls: list[None] = []
    place = ground.Ground(FusionPlan.parse("f32[1x8] -> relu"), 0, None, clock.HostClock())
    assert len(place.kernel_seconds(lambda: calls.append(None), 4)) == 4
    assert len(calls) == 5


def test_times_are_printed() -> None:
    result = call(CBA, "-t", "1", "-w", "1", "-i", "3")
    assert "kernel     " in result.stdout
    assert "ms on average of 3" in result.stdout
    assert "wall       " in result.stdout


def test_the_unfused_runs_are_measured_beside_it() -> None:
    (found,) = lines_of(call(CBA, "--unfused", "--json"))
    assert found["unfused"]["kernels"] == 3
    assert found["unfused"]["others"]["one at a time"] > 0
    assert found["unfused"]["others"].keys() | found["unfused"]["refused"].keys() == {
        "one at a time",
        "torch",
    }
    assert "one at a time" in call(CBA, "--unfused").stdout


def test_json_is_one_line_a_run(sweep: Any) -> None:
    (found,) = lines_of(call(CBA, "--json"))
    assert found["right"] is True
    (check,) = found["checks"]
    assert check["tensor"] == "out"
    assert 0 < check["error"] < check["allowed"]
    assert found["kernel_seconds"] is None
    assert found["command"] == f"fuseplan driver {CBA}"
    many = lines_of(sweep(f"{CBA}\n{CBA} -m 1\nCBAInfer -n x\n", "--json"))
    assert [each["right"] for each in many] == [True, True, False]
    assert [each["line"] for each in many] == [CBA, f"{CBA} -m 1", "CBAInfer -n x"]
    assert many[2]["error"] == "PlanError"


def test_what_is_wrong_is_not_measured_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    (found,) = lines_of(call(CBA, "--unfused", "--json"))
    assert (found["right"], found["unfused"]) == (False, None)


def test_errors_alone_have_their_statuses() -> None:
    refused = CliRunner().invoke(fuseplan, ["driver", REFUSED])
    assert (refused.exit_code, "[several-contractions]" in refused.stderr) == (3, True)
    bad = call("CBAInfer -m 99")
    assert (bad.exit_code, "-m, --activMode has no such value" in bad.stderr) == (2, True)
    told = json.loads(call("CBAInfer -m 99", "--json").stdout)
    assert told["error"] == "PlanError"
    for words, says in (
        ("", "no problem is named"),
        ("CBAInfer -V 2", "-V"),
        ("CBAInfer -i 0", "-i"),
        ("CBAInfer -i many", "-i"),
        (f"{CBA} --target gpu", "no target is named 'gpu'"),
        (f"{CBA} --threads 0", "threads=0"),
        (f"{CBA} --report there", "want --sweep FILE or --all"),
        (f"{CBA} --every 2", "want --sweep FILE or --all"),
        ("--all -D graph", "draws one plan"),
        (f"{CBA} --all", "a problem, --sweep FILE and --all exclude each other"),
        ("--sweep missing", "missing"),
        ("--sweep /dev/null", "--sweep /dev/null holds no line to run"),
    ):
        result = call(words)
        assert (result.exit_code, says in result.stderr) == (2, True), words


def test_letters_beside_a_plans_text() -> None:
    result = CliRunner().invoke(fuseplan, ["driver", "f32[1x8x4x4] -> relu", "-n", "2"])
    assert (result.exit_code, "leave -n out" in result.stderr) == (2, True)
    assert CliRunner().invoke(fuseplan, ["driver", "f32[1x8x4x4] -> relu"]).exit_code == 0


def test_letters_of_a_sweep_are_for_its_problems_alone(sweep: Any) -> None:
    lines = "CBAInfer -F 2\nCBAInfer -F 2 -n 3\nfuseplan run 'f32[1x8x4x4] -> relu'"
    found = lines_of(sweep(lines, "-n", "2", "-c", "4", "-H", "5", "-W", "6", "--json"))
    assert [each["plan"].split(" ->")[0] for each in found] == [
        "f32[2x4x5x6]",
        "f32[3x4x5x6]",
        "f32[1x8x4x4]",
    ]


def test_what_cancels_is_right() -> None:
    assert call("CBAInfer -F 8 -n 2 -c 1 -H 2 -W 9 --save 0").exit_code == 0, "of dx nothing is left"


def test_every_result_of_training_is_compared() -> None:
    line = "CBAInferfp16 -F na_train --run 1 -M 1 -n 3 -c 4 -H 5 -W 5 --target reference"
    (found,) = lines_of(call(line, "--json"))
    checks = {each["tensor"]: each for each in found["checks"]}
    assert list(checks) == ["out", "saved_mean", "saved_inverse_variance", "running_mean", "running_variance"]
    assert checks["saved_mean"]["allowed"] < 0.1 * checks["out"]["allowed"], "it is f32"
    assert "of the largest running_mean, at most" in call(line).stdout


LINES = f"""
# a comment
fuseplan driver {CBA}
./bin/MIOpenDriver CBAInferfp16 -F 2 {SIZES} -M 1
fuseplan run 'f32[1x8x9x9] -> bias -> relu' --threads 1
"""


def test_a_file_of_lines(sweep: Any) -> None:
    result = sweep(LINES, "-t", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("right ") == 3
    assert result.stdout.count("kernel ") == 3, "the options beside --sweep are for every line"
    assert "3 lines, 0 failed" in result.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"fuseplan run '{REFUSED}'", "[several-contractions]"),
        ("CBAInfer -n 0", "-n, --batchsize has no such value"),
        ("CBAInfer -Z 1", "No such option"),
        ("CBAInfer -i 0", "Invalid value for '-i'"),
        ("CBAInfer --help", "No such option"),
        ("CBAInfer 'open", "cannot be read"),
        ("CBAInferfp8 -n 1", "names no problem"),
        ("f32[2x3] -> relu", "a plan's text is one word: want it in quotes"),
        (f"{CBA} --sweep /dev/null", "--sweep: give it beside --sweep, not in a line"),
        (f"{CBA} --target gpu", "no target is named 'gpu'"),
    ],
)
def test_a_line_that_fails_is_told_and_the_others_run(line: str, says: str, sweep: Any) -> None:
    result = sweep(f"{line}\n{CBA}\n")
    assert result.exit_code == 1
    assert f"FAILED  {line}\n" in result.stdout
    assert "lines, line 1\n" in result.stdout
    assert says in result.stdout
    assert "right " in result.stdout
    assert "2 lines, 1 failed" in result.stdout


@pytest.mark.parametrize(
    "before", ["-n 3", "fuseplan driver -n 3", "python -m fuseplan driver -n 3", "./bin/MIOpenDriver -n 3"]
)
def test_options_may_stand_before_a_lines_problem(before: str, sweep: Any) -> None:
    (found,) = lines_of(sweep(f"{before} CBAInfer -F 2 -c 4 -H 5 -W 6", "--json"))
    assert found["plan"].startswith("f32[3x4x5x6]")


def test_lines_of_miopens_log(sweep: Any) -> None:
    """What MIOPEN_ENABLE_LOGGING_CMD prints."""
    log = "MIOpen(HIP): Command [LogCmdFusion] ./bin/MIOpenDriver"
    letters = "-n 2 -c 3 -H 8 -W 8 -k 4 -y 3 -x 3 -p 1 -q 1 -u 1 -v 1 -l 1 -j 1"
    found = lines_of(sweep(f"{log} CBAInfer -F 4 {letters}\n{log} CAInfer -J 5 {letters} -g 1\n", "--json"))
    convolution = "f32[2x3x8x8] -> conv2d(4, kernel=3, padding=1)"
    assert [each["plan"] for each in found] == [f"{convolution} -> bias -> relu", f"{convolution} -> relu"]


def test_a_file_as_other_systems_write_it(folder: Path, sweep: Any) -> None:
    (folder / "lines").write_bytes(f"\ufeff{CBA}\r\n# a comment\r\n\r\n{CBA} -m 1\r\n".encode())
    found = lines_of(call("", "--sweep", str(folder / "lines"), "--json"))
    assert [each["right"] for each in found] == [True, True]
    assert [each["place"] for each in found] == [f"{folder / 'lines'}, line {place}" for place in (1, 4)]


def test_what_an_interrupted_sweep_found_is_kept(
    folder: Path, sweep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: FusionPlan, **how: Any) -> driving.Driven:
        if plan.src.batch == 2:
            raise KeyboardInterrupt
        return driving.drive(plan, **how)

    monkeypatch.setattr("fuseplan.compat.miopen_driver.cli.drive", interrupted)
    result = sweep(f"{CBA}\n{CBA} -n 2\n{CBA} -n 3\n", "--report", str(folder / "report"))
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert "1 line, 0 failed" in result.stdout
    assert "- not run: 2" in (folder / "report" / "report.md").read_text()
    assert len(json.loads((folder / "report" / "report.json").read_text())["lines"]) == 1


def test_a_sweep_that_is_ended_tells_what_it_found(folder: Path) -> None:
    lines, report = folder / "lines.txt", folder / "report"
    lines.write_text(f"{CBA}\n" * 100_000)
    words = [sys.executable, "-m", "fuseplan", "driver", "--sweep", str(lines), "--report", str(report)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        running.terminate()
        rest = running.stdout.read()
    assert running.returncode == 128 + signal.SIGTERM
    assert ", 0 failed" in rest
    assert "- not run: 9" in (report / "report.md").read_text()


def test_a_wrong_line_fails_a_sweep(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    result = sweep(f"{CBA}\n")
    assert (result.exit_code, "WRONG " in result.stdout) == (1, True)


def test_tensors_without_room_are_a_line_that_fails(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(driving, "ground_of", full)
    result = sweep(f"{CBA}\n")
    assert (result.exit_code, "do not fit this machine's memory: no room" in result.stdout) == (1, True)


def test_a_file_that_is_no_text(folder: Path) -> None:
    (folder / "lines").write_bytes(b"\xff\xfe\xfa")
    result = call("", "--sweep", str(folder / "lines"))
    assert (result.exit_code, "cannot be read" in result.stderr) == (2, True)


def test_the_graph_is_written(folder: Path) -> None:
    assert call(CBA, "-D", str(folder / "graph.dot")).exit_code == 0
    assert "one kernel: contraction" in (folder / "graph.dot").read_text()
    words = ["driver", REFUSED, "--dot_graph", str(folder / "graph.dot")]
    assert CliRunner().invoke(fuseplan, words).exit_code == 3
    assert "cluster" not in (folder / "graph.dot").read_text(), "what is refused is drawn without a kernel"
    unwritten = call(CBA, "-D", str(folder / "none" / "graph.dot"))
    assert (unwritten.exit_code, "cannot be written" in unwritten.stderr) == (2, True)


def test_a_report_on_many_lines(folder: Path, sweep: Any) -> None:
    lines = f"{CBA}\n{CBA} -m 1\nCBAInferfp16 -F 4 {SIZES} -I NHWC\nCBAInfer -n x\n"
    assert sweep(lines, "--report", str(folder / "report")).exit_code == 1
    told = json.loads((folder / "report" / "report.json").read_text())
    assert [each["right"] for each in told["lines"]] == [True, True, True, False]
    assert told["target"] == "cpu"
    page = (folder / "report" / "report.md").read_text()
    assert "| `conv2d(8, kernel=3) -> bias -> activation` | 2 (" in page
    assert "- `CBAInfer -n x`: -n, --batchsize has no such value" in page
    assert "lines: 4, right: 3, failed: 1" in page
    (folder / "file").write_text("")
    unwritten = call("", "--all", "--report", str(folder / "file" / "in"))
    assert (unwritten.exit_code, unwritten.stdout) == (2, ""), "before any line is run"


def test_a_report_tells_wrong_results() -> None:
    plan = "f32[1x8x9x9] -> bias -> relu"
    check = {"tensor": "out", "error": 1e-7, "allowed": 4e-7}
    ran = {"plan": plan, "line": f"'{plan}'", "right": True, "checks": [check]}
    page = driver_report(
        {"target": "cpu"}, [ran, {**ran, "right": False, "checks": [check | {"error": 1e-3}]}]
    )
    assert "| `bias -> activation` | **1 of 2** (0.25) |" in page
    assert "out is 1.0e-03 from float64, at most 4.0e-07" in page
    assert "| 1 |" in driver_report({}, [{**ran, "checks": []}]), "not verified"


def test_gradients_of_all_activations_share_a_row() -> None:
    plans = [f"f32[2x8x5x5] -> batch_norm_backward{inner}" for inner in ("", "(relu)", "(elu(0.5))")]
    page = driver_report({}, [{"plan": plan, "line": plan, "right": True, "checks": []} for plan in plans])
    assert "| `batch_norm_backward(activation)` | 3 |" in page


def test_combinations_are_all_of_them() -> None:
    lines = list(combinations())
    assert len(lines) == len(set(lines))
    words = [set(line.split()) for line in lines]
    for each in (MODES, ACTIVATIONS, BATCH_NORM_MODES):
        assert all(any(name in line for line in words) for name in each)
    for ending in DTYPES:
        assert sum(f"CBAInfer{ending}" in line for line in words) * len(DTYPES) == len(lines)
    filters = "-y 3 -x 3 -p 1 -q 1 -I"
    most = [line for line in lines if line.startswith("CBAInfer -F cbna ") and filters in line]
    assert len(most) == len(ACTIVATIONS) * len(BATCH_NORM_MODES) * 2


def test_some_of_all_combinations_are_right(folder: Path) -> None:
    result = call("", "--all", "--every", "61", "--report", str(folder / "report"))
    assert result.exit_code == 0, result.output
    assert ", 0 failed" in result.stdout
