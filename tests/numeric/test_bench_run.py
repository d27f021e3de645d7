"""The benchmarks end to end on small plans: workers, checks against float64, rows, the demo."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy, demo, networks, recorded, special, suite
from benchmarks.command import bench
from benchmarks.footprint import footprint
from fuseplan.bench import runner, worker
from fuseplan.bench.options import Display, Options
from fuseplan.bench.peers import known
from fuseplan.bench.peers.peer import Peer, Prepared
from fuseplan.bench.runner import Process
from fuseplan.cli.screen import display
from fuseplan.errors import ArgumentError
from fuseplan.measure import ground, peaks
from fuseplan.measure.cases import Case
from fuseplan.measure.data import INPUTS, NEAR, deviation, evaluated, random_arrays, reference
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.torch_eager import before_relu
from fuseplan.plans.plan import FusionPlan
from fuseplan.tuning.verdict import OneAtATime

SMALL = "f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3, padding=1) -> bias -> relu"
QUICK = Options(rounds=2, block_ms=1.0)
BY_NAME = known(False).by_name
UNEVEN = "f32[1x3x5x5] -> conv2d(4, kernel=2, padding=((0, 1), (1, 2))) -> bias -> silu"
PLANS = (
    SMALL,
    "f32[1x8x6x6] -> conv2d(8, kernel=3, stride=2, groups=8) -> bias -> add -> relu",
    "f32[2x8x6x6] -> batch_norm -> relu",
    "f32[1x4x9, nwc] -> conv1d(6, kernel=3) -> scale -> leaky_relu(0.2)",
    UNEVEN,
    "f32[9x8] -> matmul(6) -> bias -> gelu(tanh)",
    "f32[2x5x8] -> matmul(6, transposed=True) -> bias -> gelu",
    "f32[2x3x3x8, bchs of bhsc] -> matmul(6, transposed=True, batched=True) -> bias -> relu",
    "f32[3x8] -> matmul(6, batched=True)",
)


@pytest.fixture(autouse=True)
def _no_measured_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks take a second to measure; rows only copy what they are told."""
    made = peaks.Peaks(
        "x", 1, 1e9, {level: {"read": 1e9} for level in ("l2", "l3", "dram")}, 1 << 20, 1 << 24
    )
    monkeypatch.setattr(runner, "measured_peaks", lambda threads: (made, None))
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))


OURS = ("fuseplan", "fuseplan:strict", "fuseplan:unfused")
TORCH = ("torch", "torch:nhwc", "unfused:nchw", "unfused:nhwc")
RUNTIME = ("onnxruntime", "unfused:onnxruntime")
PEERS = (*OURS, *TORCH, *RUNTIME)
PAIRS = [(name, text) for name in PEERS for text in PLANS if name not in TORCH or text != UNEVEN]


@pytest.mark.parametrize(("name", "text"), PAIRS)
def test_peers_compute_the_plan(name: str, text: str) -> None:
    if name in RUNTIME:
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    plan = FusionPlan.parse(text)
    copies = [random_arrays(plan, seed=3), random_arrays(plan, seed=4)]
    prepared = BY_NAME[name](1).prepare(plan, copies)
    assert deviation(prepared.result(), reference(plan, copies[0])) < 2e-6
    for _ in range(3):
        prepared.call()


TRAINING = (
    "f32[4x8x6x5, nhwc] -> batch_norm_training -> relu",
    "f32[4x8x6x5] -> batch_norm_backward(relu)",
)


@pytest.mark.parametrize("text", TRAINING)
@pytest.mark.parametrize("name", [*TORCH[:2], "fuseplan"])
def test_peers_train(name: str, text: str, tmp_path: Path) -> None:
    """All that the plan gives goes through the worker's files, and is what float64 says."""
    made, plan = worker.Worker(BY_NAME[name](1)), FusionPlan.parse(text)
    arrays = random_arrays(plan, seed=3)
    np.savez(tmp_path / "arrays.npz", **arrays)
    place = tmp_path / "y.npy"
    given = {"arrays": str(tmp_path / "arrays.npz"), "copies": 1, "result": str(place)}
    answer = made.answer({"do": "prepare", "plan": text, **given})
    assert answer["outputs"] == 3, answer
    want, results = evaluated(plan, arrays)
    for number, exact in enumerate((want, *results.values())):
        assert deviation(np.load(worker.part(place, number)), exact) < 2e-6


@pytest.mark.parametrize("text", [PLANS[0], *TRAINING])
@pytest.mark.parametrize("name", ["fuseplan", "fuseplan:unfused"])
def test_ours_take_torchs_tensors(name: str, text: str) -> None:
    """As on a GPU, in host memory."""
    plan = FusionPlan.parse(text)
    tensors = random_arrays(plan, seed=3, device="cpu")
    got = BY_NAME[name](1).prepare(plan, [tensors]).result()
    out, results = evaluated(plan, tensors)
    made = got if isinstance(got, tuple) else (got,)
    assert name != "fuseplan" or len(made) == 1 + len(results)
    assert all(deviation(*pair) < 2e-6 for pair in zip(made, (out, *results.values()), strict=False))


def test_what_a_call_changes_is_not_measured() -> None:
    plan = FusionPlan.parse("f32[4x8x6x5] -> batch_norm_training(running=True) -> relu")
    with pytest.raises(CannotRunError, match="running statistics"):
        BY_NAME["fuseplan"](1).prepare(plan, [random_arrays(plan)])


def test_a_result_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (Case("train", TRAINING[0], "g", "none"),)
    setting = replace(QUICK, chosen=("fuseplan",))
    ((row,),) = runner.run(suite.Suite("s", "S", cases, ()), setting)
    assert row.refused is None
    assert row.error is not None
    assert row.error < 2e-6
    both: tuple[dict[str, Any], ...] = ({}, {"a": np.zeros(1)})
    made = [(np.zeros((4, 8, 6, 5)), results) for results in both]
    for given in made:
        monkeypatch.setattr(runner, "evaluated", lambda plan, arrays, given=given: given)
        ((row,),) = runner.run(suite.Suite("s", "S", cases, ()), setting)
        assert row.refused == f"it returned 3 of {1 + len(given[1])} tensors"


@pytest.mark.parametrize(
    "text",
    [
        "f32[4x8x6x5] -> batch_norm_training -> softplus",
        "f32[4x8x6x5] -> batch_norm_training(saved=False) -> relu",
        "f32[4x8x6x5] -> batch_norm_training(per_activation) -> relu",
        "f32[4x8x6x5] -> batch_norm_backward(relu, statistics=recomputed)",
        "f32[4x8x6x5] -> batch_norm_backward(sigmoid)",
    ],
)
def test_training_that_torch_is_not_measured_with(text: str) -> None:
    plan = FusionPlan.parse(text)
    with pytest.raises(CannotRunError, match="torch"):
        BY_NAME["torch"](1).prepare(plan, [random_arrays(plan)])


def test_no_gradient_hangs_on_a_rounding() -> None:
    plan = FusionPlan.parse("f32[32x8x16x16] -> batch_norm_backward(relu)")
    arrays = random_arrays(plan, seed=3)
    x, vectors = arrays["input"], [arrays[key] for key in ("scale", "shift", "mean", "inverse_variance")]
    near = abs(before_relu(x, *vectors))
    assert (near < NEAR / 2).any()
    assert not arrays["src"][near < NEAR / 2].any()
    assert arrays["src"][near > 2 * NEAR].all()


def test_a_peer_says_what_it_cannot() -> None:
    plan = FusionPlan.parse(UNEVEN)
    with pytest.raises(CannotRunError, match="pads both sides"):
        BY_NAME["torch"](1).prepare(plan, [random_arrays(plan)])


@pytest.mark.parametrize("name", ["torch", "onnxruntime", "ncnn", "openvino"])
def test_peers_are_not_measured_in_f64(name: str) -> None:
    pytest.importorskip(name)
    plan = FusionPlan.parse(SMALL.replace("f32", "f64"))
    with pytest.raises(CannotRunError, match="f32"):
        BY_NAME[name](1).prepare(plan, [random_arrays(plan)])


def test_one_at_a_time_is_the_plan() -> None:
    plan = FusionPlan.parse(PLANS[1])
    arrays = random_arrays(plan, seed=5)
    unfused = OneAtATime(plan, arrays, 1)
    assert len(unfused.decided) == 4
    assert deviation(np.array(unfused()), reference(plan, arrays)) < 2e-6
    assert unfused.nbytes > 2 * plan.output.nbytes


class Failing(Peer):
    """A peer that fails in a way of its own for each plan."""

    name = "failing"

    def prepare(self, plan: FusionPlan, copies: Any) -> Prepared:
        if plan.src.batch == 1:
            raise RuntimeError("out of luck\n" + "x" * 1000)
        return Prepared(lambda: None, lambda: np.zeros(plan.output.shape, np.float32))


def test_a_worker_answers_whatever_happens(tmp_path: Path) -> None:
    made = worker.Worker(Failing(1))
    ask = {
        "do": "prepare",
        "plan": SMALL,
        "data": {"seed": 1},
        "copies": 1,
        "result": str(tmp_path / "y.npy"),
    }
    assert made.answer({"do": "block", "seconds": 0.001}) == {"refused": "nothing is prepared"}
    refused = made.answer(ask)["refused"]
    assert refused.startswith("RuntimeError: out of luck")
    assert len(refused) < 400
    assert "no operator" in made.answer({**ask, "plan": "f32[1x2] -> rellu"})["refused"]
    answer = made.answer({**ask, "plan": SMALL.replace("1x8", "2x8")})
    assert answer["setup"] > 0
    assert not np.load(tmp_path / "y.npy").any()
    assert len(made.answer({"do": "block", "seconds": 0.001})["samples"]) >= 3
    assert made.answer({"do": "release"}) == {}
    assert made.answer({"do": "block", "seconds": 0.001}) == {"refused": "nothing is prepared"}


def test_a_process_that_dies_is_a_refusal_and_starts_again(tmp_path: Path) -> None:
    process = Process("fuseplan", 1, tmp_path / "log")
    try:
        ask: dict[str, Any] = {"do": "prepare", "plan": SMALL, "data": {"seed": 1}, "copies": 1}
        ask["result"] = str(tmp_path / "y.npy")
        assert "setup" in process.ask(**ask)
        assert process._child is not None
        process._child.process.kill()
        process._child.process.wait()
        assert process.ask(do="block", seconds=0.001)["refused"].startswith("its process died")
        assert "setup" in process.ask(**ask)
    finally:
        process.stop()


def test_a_peer_that_is_not_there_is_a_refusal(tmp_path: Path) -> None:
    process = Process("no such peer", 1, tmp_path / "log")
    assert "KeyError" in process.ask(do="release")["refused"]
    process.stop()


def small_suite() -> suite.Suite:
    cases = (Case("small", SMALL, "3x3 stride 1", "none"), Case("norm", PLANS[2], "norm", "none"))
    return suite.Suite("small", "Small", cases, (suite.Aim("3x3 stride 1", "all", 1.0),))


def test_a_run_gives_stamped_rows_for_ours_and_the_peers() -> None:
    shown: list[str] = []
    setting = replace(QUICK, chosen=("fuseplan", "fuseplan:unfused", "torch"))
    rows = [row for done in runner.run(small_suite(), setting, shown.append) for row in done]
    assert [(row.case, row.peer) for row in rows] == [
        (case, peer) for case in ("small", "norm") for peer in setting.names
    ]
    assert len(shown) == 2 * runner.steps(setting)
    for row in rows:
        assert row.refused is None
        assert row.median is not None
        assert row.minimum is not None
        assert 0 < row.minimum <= row.median
        assert row.error is not None
        assert row.error < 2e-6
        assert row.floor is not None
        assert row.machine["cpu"]
        assert row.versions["numpy"]
        assert row.setup is not None
    assert rows[0].template
    assert rows[0].knobs is not None
    assert rows[2].versions["torch"]


def test_a_wrong_result_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: FusionPlan, arrays: Any) -> tuple[Any, dict[str, Any]]:
        return reference(plan, arrays) + 1, {}

    monkeypatch.setattr(runner, "evaluated", wrong)
    setting = replace(QUICK, chosen=("fuseplan",))
    rows = [row for done in runner.run(small_suite(), setting) for row in done]
    for row in rows:
        assert row.refused is not None
        assert row.refused.startswith("wrong: off by")
        assert row.median is None


def test_bench_prints_tables_and_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "load", lambda name: small_suite())
    options = Options(peers="", rounds=2, block_ms=1, results=tmp_path, is_twice=True)
    rows = bench("small", options, display(False, is_quiet=True))
    assert len((tmp_path / "small.jsonl").read_text().splitlines()) == len(rows) == 4
    assert "small" in capsys.readouterr().out
    quiet = Options(peers="", rounds=2, block_ms=1, as_json=True, only="norm")
    bench("small", quiet, display(True, is_quiet=True))
    told = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in told] == ["norm"]


def test_the_published_shapes_are_appended_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = suite.load("published_cpu").cases[0]
    small = suite.Suite("published_cpu", "P", (replace(case, plan=SMALL.replace(", nhwc", "")),), ())
    monkeypatch.setattr(special, "load", lambda name: {small.name: small}[name])
    monkeypatch.setattr(special, "CHARTS", tmp_path / "charts")
    options = Options(peers="unfused", rounds=2, block_ms=1, results=tmp_path)
    rows = special.bench_published("published", options, display(False, is_quiet=True))
    names = ["fuseplan", "unfused:nchw", "unfused:nhwc", "unfused:onnxruntime"]
    assert [row.peer for row in rows] == names
    assert list(recorded.read(tmp_path / "published_cpu.jsonl")) == rows
    (drawn,) = (tmp_path / "charts").iterdir()
    assert drawn.name.endswith("-1-thread-cba.svg")


def test_models_are_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("benchmarks.models")
    seconds = {"fuseplan": 0.002, "onnxruntime": 0.003}
    times = {"seconds": seconds, "least": seconds, "cpu": seconds, "sum": 0.001, "steps": {"run": 2}}
    monkeypatch.setattr(models, "measured", lambda name, count: {"model": name, "threads": count, **times})
    shown: list[str] = []
    listing = Display(shown.append, shown.append, lambda _: nullcontext(lambda _: None))
    options = Options(results=tmp_path, threads=(1, 2), only="mobile")
    found = special.SPECIAL[False]["models"]("models", options, listing)
    rows = [(row["model"], row["threads"]) for row in found["rows"]]
    assert rows == [("mobilenet_v2", 1), ("mobilenet_v2", 2)]
    assert json.loads((tmp_path / "models.jsonl").read_text())["machine"]["cpu"]
    assert shown[0].startswith("mobilenet_v2 1t: fuseplan 2.00 (2.00), onnxruntime 3.00")
    assert "| mobilenet_v2 | 2 | 2.0 (2.0) | 3.0 (3.0) | 1.0 |" in shown[-1]
    with pytest.raises(ArgumentError, match="no model has 'nothing'"):
        special.bench_models("models", Options(only="nothing"), listing)


def test_compile_times_and_footprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special, "load", lambda name: small_suite())
    told = special.bench_compile("small", Options(results=tmp_path), display(False, is_quiet=True))
    assert 0 < told["cached"] < told["cold"]
    assert json.loads((tmp_path / "compile-small.jsonl").read_text())["cold"] == told["cold"]
    found = footprint(runs=1)
    assert found.brought == ()
    assert found.installed["llvmlite"] > 1e7
    assert found.total == sum(found.installed.values())
    assert found.own_import > 0


def test_accuracy_covers_inputs_and_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "STACK", SMALL)
    monkeypatch.setattr(accuracy, "LAYERS", 3)
    monkeypatch.setattr(accuracy, "FAMILIES", {"rows": "[4x64] -> layer_norm"})
    monkeypatch.setattr(accuracy, "DTYPES", ("f32",))
    one = suite.Suite("small", "Small", small_suite().cases[:1], ())
    shown: list[str] = []
    found = list(accuracy.accuracy(one, ["fuseplan", "torch"], progress=shown.append))
    assert len(shown) == accuracy.steps(one) == 2 * len(INPUTS) + 3
    assert {each.inputs for each in found} == {*INPUTS, "stack of 3"}
    assert all(each.error is not None and each.error < 1e-5 for each in found)
    assert {each.layer for each in found if each.inputs == "stack of 3"} == {1, 2, 3}
    told = accuracy.markdown(found, layers=(3,))
    assert "| small | large mean |" in told
    assert "| stack | layer 3 |" in told
    assert "layer 2" not in told
    (row,) = accuracy.of_families([each for each in found if each.case == "rows"]).splitlines()[2:]
    assert re.fullmatch(r"\| rows \| f32" + r" \| \d\.\de[+-]0\d \(\d\.\d\)" * len(INPUTS) + r" \|", row)


def test_the_demo_is_the_published_suite() -> None:
    listed = [case for case in suite.load("published_cpu").cases if case.group.endswith("f32 nhwc")]
    assert len(listed) == 21
    for shape, case in zip(demo.SHAPES, listed, strict=True):
        ours, theirs = FusionPlan.parse(shape.plan), FusionPlan.parse(case.plan)
        assert ours.ops == theirs.ops
        assert ours.src.shape[1:] == theirs.src.shape[1:]
        assert shape.label == case.name


def test_the_demo_measures_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = (demo.Shape("a", "convolution", SMALL, 1.5), demo.Shape("b", "norm", PLANS[2], 2.0))
    monkeypatch.setattr(demo, "SHAPES", shapes)
    monkeypatch.setattr(demo, "MODEL", "small")
    monkeypatch.setattr(demo, "SIZE", 8)
    monkeypatch.setitem(networks.NETWORKS, "small", lambda net: net.finish(net.conv("x", 8, 3), classes=10))
    monkeypatch.setattr(ground, "HOST_BLOCK", 0.001)
    found = demo.main(1, tmp_path / "new" / "chart.svg")
    printed = capsys.readouterr().out
    assert SMALL in printed
    assert "one at a time" in printed
    assert [each.kernels for each in found] == [1, 1]
    assert [each.operators for each in found] == [3, 2]
    assert all(each.bytes_saved > 0 and each.error < 2e-6 for each in found)
    assert "<svg" in (tmp_path / "new" / "chart.svg").read_text()
    assert "small: 5 operators in " in printed
    demo.main(1, tmp_path / "chart.png", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert len(told["plans"]) == 2
    assert told["model"]["difference"] < 1e-4
    assert 0 < told["model"]["kernels"] < told["model"]["operators"]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
