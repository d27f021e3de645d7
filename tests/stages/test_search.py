"""The search for the fastest candidate and the verdict, on a ground whose clock and answers are made up."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuseplan.errors import ArgumentError, BuildError, FuseplanError
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.template import Template
from fuseplan.measure import quiet
from fuseplan.measure.ground import Ground, allowed_deviation, first_wrong, ground_of
from fuseplan.measure.stats import Timing
from fuseplan.plans.plan import FusionPlan
from fuseplan.tuning.tune import Ready, search
from fuseplan.tuning.verdict import FUSED, UNFUSED, Verdict, judge, recorded

pytestmark = pytest.mark.usefixtures("resting")

PLAN = "f32[1x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def records() -> Records:
    return decide(PLAN, "cpu", tuned=False)


class FakeGround(Ground):
    """A result is a list of one deviation, which a run writes; a call's time is looked up by who ran."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.tensors: Mapping[str, Any] = {}
        self.seconds = dict(seconds)
        self.timed: list[set[str]] = []

    def out(self) -> list[float]:
        return [float("nan")]

    def results(self) -> dict[str, Any]:
        return {}

    def deviations(self, got: list[float]) -> dict[str, float]:
        return {"out": got[0]}

    def deviation(self, got: list[float]) -> float:
        return got[0]

    def watch(self) -> quiet.HostWatch:
        return quiet.HostWatch()

    def times(self, variants: Mapping[str, Callable[[], object]], rounds: int = 1) -> dict[str, Timing]:
        self.timed.append(set(variants))
        return {name: _timing(self.seconds[name], rounds) for name in variants}

    def kernel_seconds(self, call: Callable[[], object], count: int) -> list[float]:
        raise NotImplementedError

    wall_seconds = kernel_seconds


def _timing(seconds: float, rounds: int) -> Timing:
    return Timing(n=1, blocks=rounds, minimum=seconds, median=seconds, p90=seconds, p99=seconds, spread=0.0)


def right(out: list[float]) -> list[float]:
    out[0] = 0.0
    return out


def prepare_with(
    special: Mapping[str, Ready | FuseplanError],
) -> Callable[[Sequence[Template]], Iterator[tuple[Template, Ready | FuseplanError]]]:
    def prepare(templates: Sequence[Template]) -> Iterator[tuple[Template, Ready | FuseplanError]]:
        for template in templates:
            yield template, special.get(template.text, Ready(right))

    return prepare


def test_the_fastest_right_candidate_is_chosen(records: Records) -> None:
    texts = [each.text for each in records.choice.candidates]
    seconds = {text: 1e-5 * (1 + place) for place, text in enumerate(reversed(texts[:4]))}
    seconds |= dict.fromkeys(texts[4:], 1.0)
    ground = FakeGround(seconds)
    found = search(records, ground, prepare_with({}), "toolchain", 1e9)
    assert found.template == texts[3]
    assert found.seconds == 1e-5
    assert (found.untuned, found.untuned_seconds) == (texts[0], seconds[texts[0]])
    assert found.tried == len(texts)
    assert texts[0] in ground.timed[-1], "the cost model's choice runs beside the finalists"


def test_wrong_spilling_and_failing_candidates_are_recorded_and_never_timed(records: Records) -> None:
    texts = [each.text for each in records.choice.candidates]
    runs = iter([0.0, 0.5, 0.0])

    def at_times_wrong(out: list[float]) -> list[float]:
        out[0] = next(runs)
        return out

    special: dict[str, Ready | FuseplanError] = {
        texts[0]: Ready(at_times_wrong),
        texts[1]: Ready(right, spilled=64),
        texts[2]: BuildError("the toolchain refused it\nwith more to say"),
    }
    ground = FakeGround(dict.fromkeys(texts, 1e-05))
    found = search(records, ground, prepare_with(special), "toolchain", 1e9)
    reasons = dict(found.rejected)
    assert set(reasons) == set(texts[:3])
    assert reasons[texts[0]].startswith("wrong: 5.0e-01")
    assert reasons[texts[1]] == "spills 64 bytes of registers"
    assert reasons[texts[2]] == "the toolchain refused it"
    assert not set().union(*ground.timed) & set(texts[:3])
    assert found.untuned_seconds is None


def test_a_result_that_is_not_written_is_wrong(records: Records) -> None:
    first = records.choice.candidates[0].text
    seconds = dict.fromkeys((each.text for each in records.choice.candidates), 1e-5)
    found = search(
        records, FakeGround(seconds), prepare_with({first: Ready(lambda out: out)}), "toolchain", 1e9
    )
    assert dict(found.rejected)[first].startswith("wrong: nan")


def test_a_short_budget_still_measures_the_first_batch(records: Records) -> None:
    texts = [each.text for each in records.choice.candidates]
    ground = FakeGround(dict.fromkeys(texts, 1e-05))
    found = search(records, ground, prepare_with({}), "toolchain", 0.0)
    assert 0 < found.tried <= 16


def test_nothing_right_is_an_error_that_lists_why(records: Records) -> None:
    texts = [each.text for each in records.choice.candidates]
    failing = {text: BuildError("no compiler") for text in texts}
    with pytest.raises(ArgumentError, match=r"no candidate computes .* rightly(.|\n)*no compiler"):
        search(records, FakeGround({}), prepare_with(failing), "toolchain", 1.0)


def test_the_hosts_ground_tells_right_from_wrong() -> None:
    records = decide("bf16[2x3x5x7, nhwc] -> relu", "cpu")
    ground = ground_of(records.plan, records.target)
    allowed = allowed_deviation(records.kernel, records.choice.template)
    assert not ground.deviation(ground.out()) <= allowed
    answer = records.plan.reference(*_exact(records.plan, ground.tensors))
    assert ground.deviation(answer) <= allowed


def test_results_are_held_to_their_own_dtype() -> None:
    records = decide("f16[4x8x9x9] -> batch_norm_training", "cpu")
    kernel, template = records.kernel, records.choice.template
    wrong = first_wrong(kernel, template, {"out": 5e-4, "saved_mean": 5e-4})
    assert wrong is not None
    assert wrong.tensor == "saved_mean", "which is f32"
    assert first_wrong(kernel, template, {"out": 5e-4, "saved_mean": 5e-7}) is None


def _exact(plan: FusionPlan, tensors: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    from fuseplan.language.dtypes import widen

    exact = {key: widen(array.view(np.uint16), "bf16").astype(float) for key, array in tensors.items()}
    return exact.pop("src"), exact


@pytest.mark.parametrize(("other", "word"), [(2e-5, "fusing pays"), (0.5e-5, "fusing loses")])
def test_a_verdict_says_which_way_it_went_and_is_kept(records: Records, other: float, word: str) -> None:
    ground = FakeGround({FUSED: 1e-5, UNFUSED: 3e-5, "torch": other})
    calls = {name: lambda: None for name in ground.seconds}
    verdict = judge(records, ground, calls, {"onnxruntime": "not installed"})
    assert str(verdict).startswith(word)
    assert "onnxruntime: not measured: not installed" in str(verdict)
    assert verdict.best_other == "torch"
    assert verdict.pays is (other > 1e-5)
    assert recorded(verdict.plan, verdict.target, verdict.processor) == verdict
    assert recorded(verdict.plan, verdict.target, "another") is None


def test_without_an_unfused_run_there_is_no_verdict_to_give() -> None:
    alone = Verdict("p", "t", "c", "x()", 1e-5, {}, {}, 1, "now", None)
    assert (alone.speedup, alone.pays) == (None, None)
    assert "nothing to compare" in str(alone)


def test_a_broken_line_of_history_is_passed_over(records: Records, own_folder: Path) -> None:
    ground = FakeGround({FUSED: 1e-5, UNFUSED: 3e-5})
    verdict = judge(records, ground, {name: lambda: None for name in ground.seconds}, {})
    with (own_folder / "verdicts.jsonl").open("a") as file:
        file.write("half a li\n[]\n" + json.dumps({**verdict.to_json(), "fused": 0}))
    where = (verdict.plan, verdict.target, verdict.processor)
    with pytest.warns(RuntimeWarning, match="3 lines skipped; the first is line 2"):
        assert recorded(*where) == verdict
    assert recorded(*where) == verdict, "and says so once"


@pytest.mark.skipif(os.name == "nt", reason="pipes are POSIX")
def test_a_history_that_is_no_file_costs_a_warning(records: Records, own_folder: Path) -> None:
    os.mkfifo(own_folder / "verdicts.jsonl")
    with pytest.warns(RuntimeWarning, match=r"verdicts\.jsonl is not used: .* not a regular file"):
        assert recorded("p", "t", "c") is None
