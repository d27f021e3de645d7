"""What all commands share: where plans come from, verbosity, completion, widths, exit statuses."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import fuseplan as package
from benchmarks import command as bench
from fuseplan.bench.peers import known
from fuseplan.cli import commands, support
from fuseplan.cli.commands import fuseplan
from fuseplan.cli.screen import Screen, tabled
from fuseplan.cli.statuses import CLOSED, INTERRUPTED, MEANINGS
from fuseplan.measure import ground
from fuseplan.messages.folding import fold

ROOT = Path(__file__).resolve().parents[2]
PLAN = "f32[1x8x9x9, nhwc] -> conv2d(8, kernel=3, padding=1) -> bias -> relu"
WIDE = "f16[8x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu"
COMMAND = [sys.executable, "-m", "fuseplan"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(ground, "HOST_BLOCK", 0.001)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(fuseplan, words, input=typed)


def spawn(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, **more)


def without(packages: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command where packages are not installed."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({packages.split(',')!r}));"
        f"sys.argv = {['fuseplan', *words]!r}; import fuseplan.cli; fuseplan.cli.main()"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


# Plans


@pytest.mark.parametrize("command", [("explain",), ("show",), ("driver", "--target", "reference")])
def test_a_plan_comes_from_a_file_or_the_standard_input(command: tuple[str, ...], folder: Path) -> None:
    text = "# a comment\nf32[1x8x4x4]\n    -> bias  # is none, and neither is -> it\n"
    text = text.partition("  # is")[0] + "\n    -> relu\n"
    (folder / "plan.txt").write_text(text)
    given = [call(*command, "f32[1x8x4x4] -> bias -> relu"), call(*command, "@plan.txt")]
    given.append(call(*command, "-", typed=text))
    assert [each.exit_code for each in given] == [0, 0, 0], given[-1].output
    assert len({each.stdout for each in given}) == 1


def test_a_file_that_cannot_be_read_is_told(folder: Path) -> None:
    (folder / "bytes").write_bytes(b"\xff\xfe")
    for name in ("nothing", "bytes"):
        result = call("explain", f"@{name}")
        assert (result.exit_code, f"@{name} cannot be read" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize(
    "words",
    ["run f32[1x8] -> relu", "run f32[1x8] -> bias -> relu", "run f32[1x8]->relu", "tune f32[1x8] -> relu"],
)
def test_a_plan_without_quotes_is_told_to_be_a_redirection(words: str, folder: Path) -> None:
    line = f'"{sys.executable}" -m fuseplan {words}'
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (result.returncode, "put the plan in quotes" in result.stderr) == (2, True), result.stderr
    assert "the file 'relu'" in result.stderr
    assert (folder / "relu").read_text() == ""


# Options


def test_the_version() -> None:
    assert call("-V").stdout == f"fuseplan, version {package.__version__}\n"


def test_quiet_commands_give_no_warnings(folder: Path) -> None:
    (folder / "file").write_text("")
    environment = {**os.environ, "FUSEPLAN_CACHE_DIR": str(folder / "file")}
    words = ["show", PLAN, "--stage", "program"]
    assert (
        spawn("-q", *words, env=environment).stderr == spawn(*words, "--quiet", env=environment).stderr == ""
    )
    assert "RuntimeWarning" in spawn(*words, env=environment).stderr


def test_verbose_commands_list_all_candidates_and_tracebacks() -> None:
    short = call("explain", WIDE, "--target", "triton:sm_90").stdout
    whole = call("-v", "explain", WIDE, "--target", "triton:sm_90").stdout
    assert "`fuseplan explain -v` lists them" in " ".join(short.split())
    assert whole.count("not hopper(") > 20
    assert "Traceback" not in call("explain", "f32[1x4] -> relo").stderr
    assert "Traceback" in call("explain", "f32[1x4] -> relo", "-v").stderr


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "-inf", "soon"])
@pytest.mark.parametrize(
    "words",
    [
        ("tune", PLAN, "--seconds"),
        ("tune", PLAN, "--timeout"),
        ("tune", PLAN, "--within"),
        ("verdict", PLAN, "--patience"),
        ("bench", "quick", "--block-ms"),
        ("crossbuild", "quick", "--seconds"),
    ],
)
def test_durations_are_finite_and_not_negative(words: tuple[str, ...], value: str) -> None:
    result = call(*words, value)
    assert (result.exit_code, words[-1] in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("template", ["(", " (", "(rows=8)"])
def test_a_template_has_a_name(template: str) -> None:
    result = call("run", PLAN, "--template", template)
    assert (result.exit_code, "names no template; cpu:" in result.stderr) == (2, True), result.output


def test_a_folded_candidate_is_a_template(folder: Path) -> None:
    text = package.explain(PLAN).to_json()["choice"]["considered"][0]["template"]
    assert call("explain", PLAN, "--template", text.replace(", ", ",\n   ")).exit_code == 0


@pytest.mark.parametrize(
    ("words", "begin", "want"),
    [
        (["run", PLAN, "--target"], "cpu:av", ["cpu:avx2", "cpu:avx512", "cpu:avx512bf16"]),
        (["tune", PLAN, "--target"], "cu", ["cuda"]),
        (["run", PLAN, "--template"], "wino", ["winograd"]),
        (["bench"], "conv_", ["conv_nchw", "conv_nhwc"]),
        (["driver"], "CAInferb", ["CAInferbfp16"]),
    ],
)
def test_shells_complete_words(words: list[str], begin: str, want: list[str]) -> None:
    completion = ShellComplete(fuseplan, {}, "fuseplan", "_FUSEPLAN_COMPLETE")
    assert [each.value for each in completion.get_completions(words, begin)] == want


def test_the_help_names_every_peer() -> None:
    told = " ".join(call("bench", "--help").stdout.split())
    assert [name for name in (*known(False).libraries, *known(True).by_name) if name not in told] == []


# Widths


@pytest.mark.parametrize("target", ["cpu:avx2", "triton:sm_90"])
@pytest.mark.parametrize("columns", [80, 100])
def test_explanations_keep_to_the_screen(target: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    told = call("explain", WIDE, "--target", target)
    assert (told.exit_code, widest(told.stdout) <= columns) == (0, True)
    assert widest(str(package.explain(WIDE, target))) <= 100


def test_tables_of_a_pipe_keep_to_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = support.supported
    monkeypatch.setattr(support, "DTYPES", ("f32", "i8"))  # rows as wide as those of all dtypes
    monkeypatch.setattr(support, "supported", cache(lambda target: [*asked(target)]))
    for columns in (80, 130):
        monkeypatch.setenv("COLUMNS", str(columns))
        told = call("supported", "--target", "cpu:avx2").stdout
        assert 70 < widest(told) <= columns
        assert "…" not in told
    monkeypatch.delenv("COLUMNS")
    assert Screen().width == 100


def test_lines_go_on_below_their_words() -> None:
    told = fold(["template    " + "a(b=1, c=2) " * 3, "  f32[1x8] -> relo", "            ^^^^", "short"], 30)
    first, second, *others = told.splitlines()
    assert (first, second) == ("template    a(b=1, c=2) a(b=1,", "            c=2) a(b=1, c=2)")
    assert others[-3:] == ["  f32[1x8] -> relo", "            ^^^^", "short"]
    pointed = ["  f32[1x8] -> " + "relu -> " * 9, "            ^^^^"]
    assert fold(pointed, 30).splitlines() == pointed, "carets keep their place"


def test_a_table_that_is_too_wide_becomes_entries() -> None:
    head, row = ["shape", "ours", "onnxruntime", "best peer / ours"], ["conv2", "0.551", "", "1.92 (ncnn)"]
    assert tabled(head, [row], 60).splitlines()[0] == "shape  ours   onnxruntime  best peer / ours"
    assert tabled(head, [row], 30).splitlines() == [
        "conv2",
        "    ours 0.551,",
        "    best peer / ours 1.92 (ncnn)",
    ]


def test_markdown_is_shown_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen().show("**f16**\n\n| a | b |\n| --- | --- |\n| 1 |  |\n\nDone.")
    assert capsys.readouterr().out == "f16\n\na  b\n-  -\n1\n\nDone.\n"


# Exit statuses


@pytest.mark.parametrize(
    "words", [("show", PLAN, "--stage", "source"), ("supported",), ("show", "f32[1x8] -> relu")]
)
def test_a_closed_pipe_is_not_a_wrong_result(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*COMMAND, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (CLOSED, "")


@pytest.mark.parametrize(("plan", "status"), [(PLAN, 0), ("-", 2)])
def test_streams_that_are_closed_from_the_start(plan: str, status: int) -> None:
    words = " ".join(map(shlex.quote, [*COMMAND, "explain", plan]))
    done = subprocess.run(["sh", "-c", f"{words} <&- >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_an_interruption_while_the_command_is_imported_shows_no_traceback() -> None:
    program = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "fuseplan.cli.commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
import fuseplan.cli
fuseplan.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "interrupted\n")


def test_every_status_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text()
    told = " ".join(call("--help").stdout.split())
    for status, meaning in MEANINGS.items():
        assert f"{status} {meaning}" in told
        assert f"| {status} | {meaning} |" in page


# What is not installed


def test_without_llvmlite_the_advice_is_no_circle() -> None:
    done = without("llvmlite", "run", PLAN, "--target", "cpu:avx2")
    assert (done.returncode, "pip install llvmlite" in done.stderr) == (2, True), done.stderr
    assert "`explain` and `show` take" in done.stderr
    assert without("llvmlite", "explain", PLAN, "--target", "cpu:avx2").returncode == 0


def test_without_torch_the_advice_for_a_kind_of_gpu_is_no_circle() -> None:
    done = without("torch,triton", "run", "f16[8x64] -> relu", "--target", "triton:sm_90")
    assert (done.returncode, "such as 'triton:sm_90'" in done.stderr) == (1, False), done.stderr
    assert "`show` to the stage `source`, need none" in done.stderr
    source = without(
        "torch,triton", "show", "f16[8x64] -> relu", "--target", "triton:sm_90", "--stage", "source"
    )
    assert (source.returncode, "@triton.jit" in source.stdout or "@gluon.jit" in source.stdout) == (0, True)


def test_without_matplotlib_and_onnx_the_demo_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import demo

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "benchmarks.networks", None)  # which imports onnx
    monkeypatch.setattr(demo, "SHAPES", (demo.Shape("a", "convolution", PLAN, 1.5),))
    assert len(demo.main(1)) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "no model: " in told
    assert "no chart: charts need matplotlib: `pip install '.[plot]'` in a checkout" in told
    asked = call("demo", "--chart", "a.svg")
    assert (asked.exit_code, asked.stdout) == (2, ""), "a chart that is asked for is checked first"


# Stages, suites, scripts


def test_the_instructions_of_a_cpus_kernel() -> None:
    assert "ret" in call("show", "f32[1x8] -> relu", "--stage", "asm").stdout
    neon = call("show", "f32[1x8] -> relu", "--stage", "asm", "--target", "cpu:neon")
    assert ".4s" in neon.stdout
    listed = json.loads(call("show", "f32[1x8] -> relu", "--stage", "asm", "--json").stdout)["asm"]
    assert listed == call("show", "f32[1x8] -> relu", "--stage", "asm").stdout.splitlines()


@pytest.mark.parametrize(("stage", "word"), [("ptx", ".version"), ("sass", "EXIT")])
def test_the_instructions_of_a_gpus_kernel(stage: str, word: str) -> None:
    pytest.importorskip("triton")
    assert word in call("show", "f16[8x64] -> relu", "--stage", stage, "--target", "triton:sm_90").stdout


@pytest.mark.parametrize(
    ("target", "stage", "says"),
    [
        ("cpu", "ptx", "it has asm"),
        ("triton:sm_90", "asm", "it has ptx and sass"),
        ("triton:gfx942", "sass", "it has asm"),
        ("reference", "asm", "it is interpreted, and has no instructions"),
    ],
)
def test_a_listing_that_code_has_not_is_refused(target: str, stage: str, says: str) -> None:
    result = call("show", "f32[8x64] -> relu", "--target", target, "--stage", stage)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_tune_prints_a_line_of_json_per_case() -> None:
    words = [
        "tune",
        "f32[1x4x1x1] -> relu",
        "f32[1x4x9x9] -> conv2d(4, kernel=3) -> conv2d(4, kernel=3)",
        "--json",
    ]
    result = call(*words, "--seconds", "0", "--threads", "1", "--most", "1")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (result.exit_code, first["tuned"]["plan"], first["why"]) == (0, "f32[1x4x1x1] -> relu", None)
    assert (second["tuned"], second["case"]) == (
        None,
        "f32[1x4x9x9] -> conv2d(4, kernel=3) -> conv2d(4, kernel=3)",
    )


def test_bench_measures_a_plan(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def run(suite: Any, *_: object) -> list[Any]:
        met.append(suite)
        return []

    met: list[Any] = []
    monkeypatch.setattr("fuseplan.bench.runner.run", run)
    assert call("bench", PLAN, "--peers", "torch").exit_code == 0
    assert [case.plan for case in met[0].cases] == [PLAN]
    assert not (folder / "benchmarks").exists(), "results are kept in a checkout, or where --results says"


def test_bench_keeps_results_in_a_checkout_or_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    met: list[Any] = []
    monkeypatch.setattr(bench, "bench", lambda name, options, _: met.append(options.results))
    monkeypatch.setattr("fuseplan.bench.command.bench", lambda suite, options, _: met.append(options.results))
    call("bench", "quick")
    call("bench", "quick", "--results", "mine")
    call("bench", PLAN, "--results", "mine")
    (folder / "benchmarks" / "results").mkdir(parents=True)
    call("bench", "quick")
    call("bench", PLAN)
    assert met == [None, Path("mine"), Path("mine"), Path("benchmarks/results"), None]


def test_the_script_runs_every_combination(folder: Path) -> None:
    tool = folder / "bin" / "fuseplan"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    paths = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / "fusion_tests.sh", "--every", "9"], capture_output=True, text=True, check=True, env=paths
    )
    assert done.stdout == "driver --all --every 9\n"


def test_no_message_names_an_extra_that_no_registry_has() -> None:
    texts = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    assert [str(path) for path, text in texts.items() if "'fuseplan[" in text] == []
    assert commands.fuseplan.name == "fuseplan"
