"""Tuning through its entrances: the function, compile(tune=), suites in a process that may die."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fuseplan
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError
from fuseplan.execution.stages import decide
from fuseplan.measure import ground, quiet
from fuseplan.measure.cases import Case
from fuseplan.measure.data import deviation, random_arrays, reference
from fuseplan.measure.spaces import empty
from fuseplan.measure.stats import Timing
from fuseplan.messages.quantities import seconds_text
from fuseplan.plans.plan import FusionPlan
from fuseplan.stores import tuned
from fuseplan.tuning import cases as tuning
from fuseplan.tuning.cases import Outcome, TuneOptions, mean_ratio, tune_cases
from fuseplan.tuning.tune import ERROR, LEAST_A_TEMPLATE, NEAREST, Search, measured, shortlist, undecided
from posing import CUDA_0, posing

pytestmark = pytest.mark.usefixtures("resting")

PLAN = "f32[1x16x7x7, nhwc] -> conv2d(16, kernel=3, padding=1) -> relu"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned.OWN, "unsaved", {})
    return tmp_path


def test_what_was_tuned_is_what_compile_takes() -> None:
    lines: list[str] = []
    found = fuseplan.tune(PLAN, seconds=0.0, threads=1, progress=lines.append)
    assert found.tried >= 1
    assert lines
    compiled = fuseplan.compile(PLAN, threads=1)
    assert compiled.choice.tuned == found
    assert compiled.choice.template.text == found.template
    assert "measured:" in str(compiled.explain())
    assert fuseplan.compile(PLAN, threads=2).choice.tuned is None, "another number of threads is another key"


def test_compile_tunes_once() -> None:
    first = fuseplan.compile(PLAN, threads=1, tune=0.0)
    assert first.choice.tuned is not None
    again = fuseplan.compile(PLAN, threads=1, tune=0.0)
    assert again.choice.tuned == first.choice.tuned, "a stored measurement was measured again"


def test_near_candidates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseplan.tuning.tune.FINAL_FACTOR", math.inf)  # however other programs disturb one
    first = fuseplan.compile(PLAN, threads=1, tune="near")
    found = first.choice.tuned
    assert found is not None
    every = decide(PLAN, "cpu", threads=1, tuned=False).choice
    near = [
        each.template for each in every.considered if each.seconds and each.seconds <= ERROR * every.seconds
    ]
    assert set(found.times) <= set(near[:NEAREST])
    assert len(found.times) > 1
    assert found.seconds == (found.times[found.untuned] if found.disturbance else min(found.times.values()))
    assert fuseplan.compile(PLAN, threads=1, tune="near").choice.tuned == found, "measured again"
    assert fuseplan.compile(PLAN, threads=1).choice.tuned == found
    told = " ".join(str(first.explain()).split())
    others = (seconds for name, seconds in found.times.items() if name != found.template)
    assert all(f"by the model, {seconds_text(each)} measured" in told for each in others)
    whole = fuseplan.compile(PLAN, threads=1, tune=0.0).choice.tuned
    assert whole is not None
    assert (found.is_near, whole.is_near) == (True, False), "a search by seconds was asked for"
    assert fuseplan.compile(PLAN, threads=1, tune="near").choice.tuned == whole


def test_near_candidates_beside_other_programs_leave_the_models_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = SimpleNamespace(disturbance=lambda: "other programs used the GPU for 64% of the time")
    monkeypatch.setattr(ground.Ground, "watch", lambda self: busy)
    own = decide(PLAN, "cpu", threads=1, tuned=False).choice.template.text
    times = {own: 3.0}
    monkeypatch.setattr(
        ground.Ground,
        "times",
        lambda self, calls, rounds: {
            name: Timing(1, 1, each := times.get(name, 1.0), each, each, each, 0.0) for name in calls
        },
    )
    found = fuseplan.tune(PLAN, threads=1, seconds="near")
    assert (found.template, found.seconds) == (own, 3.0)
    monkeypatch.setattr(busy, "disturbance", lambda: None)
    assert fuseplan.tune(PLAN, threads=1, seconds="near").template != own


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"target": "triton:gfx942"}, "code for triton:gfx942 does not run here"),
        ({"target": "reference"}, "nothing to tune"),
        ({"target": "cpu", "template": "direct"}, "leaves nothing to tune"),
        ({"target": "cpu", "tune": -1.0}, "want seconds"),
        ({"target": "cpu", "tune": "long"}, "want seconds"),
    ],
)
def test_what_cannot_be_tuned_says_why(told: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ArgumentError, match=wanted):
        fuseplan.compile(PLAN, **{"tune": 1.0, **told})


def test_a_short_list_keeps_the_models_choice_and_some_of_each_template() -> None:
    every = decide("f16[64x256x14x14, nhwc] -> conv2d(256, kernel=1) -> relu", "triton:sm_90", tuned=False)
    candidates = every.choice.candidates
    names = {each.name for each in candidates}
    assert len(names) > 1
    short = shortlist(candidates, 8)
    assert len(short) == 8
    assert short[0] == candidates[0]
    for name in names:
        there = sum(each.name == name for each in candidates)
        assert sum(each.name == name for each in short) >= min(there, LEAST_A_TEMPLATE, 8 // len(names))
    assert shortlist(candidates, None) == candidates


def test_a_skipped_candidate_is_rejected_without_being_touched() -> None:
    records = undecided(PLAN, "cpu", threads=1)
    first = records.choice.candidates[0].text
    begun: list[str] = []
    found = measured(records, Search(0.0, most=3, skipped={first: "wrong: it hung"}, begins=begun.append))
    assert (first, "wrong: it hung") in found.rejected
    assert first not in begun
    assert found.template in begun
    assert found.untuned_seconds is None


class PosingGround:
    """Torch tensors of the host, and a clock that only counts."""

    def __init__(self, plan: FusionPlan) -> None:
        self._plan = plan
        self.tensors: Mapping[str, Any] = random_arrays(plan, 0, device="cpu")

    def out(self) -> Any:
        return empty(self._plan.output, "cpu", float("nan"))

    def results(self) -> dict[str, Any]:
        return {}

    def call(self, bind: Callable[..., Callable[..., object]]) -> Callable[[], object]:
        given = {key: each for key, each in self.tensors.items() if key != "src"}
        return partial(bind(**given), self.tensors["src"], self.out())

    def deviations(self, out: Any) -> dict[str, float]:
        return {"out": deviation(out, reference(self._plan, self.tensors))}

    def deviation(self, out: Any) -> float:
        return self.deviations(out)["out"]

    def watch(self) -> quiet.HostWatch:
        return quiet.HostWatch()

    def times(self, variants: Mapping[str, Callable[[], object]], rounds: int = 1) -> dict[str, Timing]:
        seconds = {name: 1e-6 * (9 - place) for place, name in enumerate(variants)}
        return {name: Timing(1, 1, each, each, each, each, 0.0) for name, each in seconds.items()}


@pytest.mark.parametrize("computes", [True, False])
def test_a_gpus_candidates_are_compiled_checked_and_chosen(
    monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    monkeypatch.setitem(measured.__globals__, "ground_of", lambda plan, target: PosingGround(plan))
    monkeypatch.setitem(tuned.__dict__, "SHIPPED", Path("nowhere"))
    with posing() as driver:
        driver.computes = computes
        records = undecided("f16[2x16x8x8, nhwc] -> relu", CUDA_0)
        if not computes:
            with pytest.raises(ArgumentError, match="wrong: inf of the largest output"):
                measured(records, Search(0.0, most=1))
            return
        found = measured(records, Search(0.0, most=2))
        assert found.tried == 2
        assert found.key.processor == CUDA_0.cpu
        tuned.keep(found)
        chosen = fuseplan.compile("f16[2x16x8x8, nhwc] -> relu", CUDA_0)
        assert chosen.choice.template.text == found.template
        assert chosen.program.origin == "disk", "the code that was measured is the code that is used"


STUB = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "warm" in asked:
        print("@{}", flush=True)
        continue
    for text in ("hangs()", "dies()", "raises()"):
        if text in asked["skipped"]:
            continue
        print("@" + json.dumps({"trying": text}), flush=True)
        if text == "hangs()":
            time.sleep(60)
        if text == "raises()":
            print("@" + json.dumps({"died": "RuntimeError: the GPU is gone"}), flush=True)
        sys.exit(3)
    print("a library's own line")
    found = json.loads(FOUND) | {"rejected": list(asked["skipped"].items())}
    print("@" + json.dumps({"found": found}), flush=True)
"""


def test_a_candidate_that_kills_its_process_costs_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = fuseplan.tune(PLAN, seconds=0.0, threads=1)
    script = tmp_path / "stub.py"
    script.write_text(f"FOUND = {json.dumps(found.to_json())!r}\n{STUB}")
    monkeypatch.setattr(tuning, "WORKER", (str(script),))
    (outcome,) = tune_cases([Case("a", PLAN, "g", "m")], TuneOptions(timeout=3.0))
    assert outcome.tuned is not None
    reasons = dict(outcome.tuned.rejected)
    assert reasons["hangs()"] == "wrong: its process hung for 3 s"
    assert reasons["dies()"] == "wrong: its process died with status 3"
    assert reasons["raises()"] == "wrong: RuntimeError: the GPU is gone"
    assert "hangs(): wrong" in str(outcome), "the line of a case names what was wrong"


def test_a_process_that_always_dies_ends_the_case_and_not_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "stub.py"
    script.write_text("import sys\nsys.stdin.readline()\nsys.stdin.readline()\nsys.exit(5)\n")
    monkeypatch.setattr(tuning, "WORKER", (str(script),))
    cases = [Case("a", PLAN, "g", "m"), Case("b", "f32[1x4x1x1] -> bias -> relu", "g", "m")]
    outcomes = list(tune_cases(cases, TuneOptions(timeout=20.0)))
    assert [outcome.why for outcome in outcomes] == [
        "while candidates were timed: its process died with status 5"
    ] * 2
    assert mean_ratio(outcomes) is None


def test_no_case_begins_after_the_time_is_over() -> None:
    (outcome,) = tune_cases([Case("a", PLAN, "g", "m")], TuneOptions(within=-1.0))
    assert outcome.why == "-1 s were over"


def test_the_mean_is_over_what_has_both_times() -> None:
    found = fuseplan.tune(PLAN, seconds=0.0, threads=1)
    case = Case("a", PLAN, "g", "m")
    told = [
        Outcome(case, replace(found, seconds=1.0, untuned_seconds=untuned)) for untuned in (1.0, 4.0, None)
    ]
    assert mean_ratio(told) == pytest.approx(2.0)


def test_suites_and_plans_are_tuned_into_a_file_that_merges(tmp_path: Path) -> None:
    suite, first, second = tmp_path / "s.toml", tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    suite.write_text(f'title = "t"\n[[case]]\nname = "small"\nmodel = "m"\ngroup = "g"\nplan = "{PLAN}"\n')
    words = ["--seconds", "0", "--threads", "1", "--most", "2", "--output"]
    ran = tune(str(suite), "f32[1x4x1x1] -> relu", *words, str(first))
    assert ran.exit_code == 0, ran.output
    assert "small (g): " in ran.output
    assert "1 of 1 tuned; untuned over tuned" in " ".join(ran.output.split())
    assert [choice.plan for choice in tuned.read(first)] == [PLAN, "f32[1x4x1x1] -> relu"]
    assert tune("--merge", str(first), str(first), "--output", str(second)).exit_code == 0
    assert len(list(tuned.read(second))) == 2
    assert tune("--merge", str(first)).exit_code == 2
    elsewhere = tune("f32[1x4x1x1] -> relu", "--target", "triton:gfx942")
    assert elsewhere.exit_code == 2
    assert "does not run here" in elsewhere.output


def tune(*words: str) -> Result:
    return CliRunner().invoke(command, ["tune", *words])


def test_the_command_tunes_and_judges() -> None:
    run = CliRunner().invoke(command, ["tune", "f32[1x4x1x1] -> relu", "--seconds", "0", "--threads", "1"])
    assert run.exit_code == 0, run.output
    assert "plans: 1 of 1 tuned" in run.output
    judged = CliRunner().invoke(command, ["verdict", PLAN, "--threads", "1", "--json"])
    assert judged.exit_code == 0, judged.output
    assert json.loads(judged.output)["kernels"] == 2


def test_a_verdict_is_measured_and_explained() -> None:
    compiled = fuseplan.compile("f32[1x16x9x9, nhwc] -> conv2d(16, kernel=3) -> bias -> relu", threads=1)
    assert compiled.explain().to_json()["verdict"] is None
    verdict = compiled.verdict()
    assert set(verdict.others) == {"one at a time", "torch"}
    assert min(verdict.fused, *verdict.others.values()) > 0
    told = compiled.explain()
    assert told.to_json()["verdict"]["fused"] == verdict.fused
    assert str(verdict).splitlines()[0] in str(told)
    assert told.to_json()["verdict"]["pays"] is verdict.pays


@pytest.mark.parametrize(
    "plan",
    [
        "bf16[2x8x5x5] -> batch_norm -> relu",
        "f16[8x16] -> matmul(8) -> bias -> gelu",
        "f32[2x8x5x5] -> batch_norm_training -> relu",
        "f32[2x8x5x5] -> batch_norm_backward(relu)",
        "f32[4x8x5x5] -> batch_norm_training(running=True) -> leaky_relu(0.2)",
        "bf16[4x8x5x5] -> batch_norm_training -> bias -> relu",
        "f32[4x8x5x5] -> batch_norm_backward(elu(0.7))",
        *(f"f32[2x8x5x5] -> activation_backward({of})" for of in ("relu", "leaky_relu(0.3)", "elu(0.3)")),
        *(f"f32[2x8x5x5] -> activation_backward({of})" for of in ("silu", "hardswish", "hardsigmoid")),
        *(f"f32[2x8x5x5] -> activation_backward({of})" for of in ("mish", "gelu")),
    ],
)
def test_torch_is_given_the_same_numbers_in_every_dtype(plan: str) -> None:
    assert "torch" in fuseplan.compile(plan, threads=1).verdict().others


def test_a_run_that_there_is_none_of_is_refused_by_name() -> None:
    alone = fuseplan.compile("f32[1x4x8x8] -> softplus", threads=1).verdict()
    assert alone.others == {}
    assert alone.refused["one at a time"] == "the plan is one operator"
    assert "does not run 'softplus'" in alone.refused["torch"]
    backward = fuseplan.compile("f32[1x4x8x8] -> activation_backward(gelu(tanh))", threads=1).verdict()
    assert backward.refused["torch"] == "torch's activation_backward of gelu is not measured"
    assert "nothing to compare" in str(alone)


def test_a_wrong_kernel_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = fuseplan.compile(PLAN, threads=1)
    monkeypatch.setattr(ground, "allowed_deviation", lambda *_: -1.0)
    with pytest.raises(ArgumentError, match="wrongly"):
        compiled.verdict()


def test_a_verdict_on_a_gpu_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("fuseplan.measure.ground.ground_of", lambda plan, target, seed: PosingGround(plan))
    with posing():
        compiled = fuseplan.compile("f16[2x16x8x8, nhwc] -> scale -> relu", CUDA_0)
        before = torch.backends.cudnn.benchmark, torch.is_inference_mode_enabled()
        verdict = compiled.verdict()
        assert set(verdict.others) == {"one at a time", "torch"}
        assert verdict.processor == CUDA_0.cpu
        assert (torch.backends.cudnn.benchmark, torch.is_inference_mode_enabled()) == before
