from __future__ import annotations

import json

import pytest

import fuseplan
from fuseplan.errors import PlanError
from fuseplan.explanation import NEAREST
from fuseplan.measure.peaks import Peaks

TEXT = "f32[1x16x28x28, nhwc] -> conv2d(32, kernel=3, padding=1) -> bias -> relu"


def test_what_was_decided_is_told_as_json() -> None:
    told = json.loads(json.dumps(fuseplan.explain(TEXT, "cpu:avx2").to_json()))
    assert told["plan"] == TEXT
    assert told["fused"] is True
    assert told["kernels"] == 1
    assert told["operators"] == 3
    assert told["match"]["rule"] == "contraction"
    assert told["choice"]["considered"][0]["seconds"] == told["estimated_seconds"]
    traffic = told["traffic"]
    assert traffic["least"] == 4 * (16 * 784 + 32 * 784 + 32 * 16 * 9 + 32)
    assert traffic["saved"] == traffic["one_at_a_time"] - traffic["fused"]
    assert traffic["saved"] >= 2 * 2 * 4 * 32 * 784 - 1000, "two results neither written nor read again"
    assert told["flops"]["plan"] == 2 * 784 * 32 * 144 + 2 * 784 * 32
    assert told["error_bound"] > 0
    assert told["floor"] is None, "the peaks of another machine are not known"


def test_every_template_is_accounted_for() -> None:
    from fuseplan.backends import backend_of

    told = fuseplan.explain(TEXT, "cpu:avx2").to_json()
    named = {each["template"].split("(")[0] for each in told["choice"]["considered"]}
    assert named == {template.name for template in backend_of("cpu").templates}
    text = fuseplan.explain(TEXT, "cpu:avx2").text(1000)
    for each in told["choice"]["considered"][1:]:
        assert f"not {each['template']}: " in text
        if each["refusal"]:
            assert f"[{each['refusal']['code']}]" in text


def test_the_text_is_cut_off_where_a_template_has_many_candidates() -> None:
    explained = fuseplan.explain("f16[8x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1)", "triton:sm_90")
    listed = [each["template"] for each in explained.to_json()["choice"]["considered"][1:]]
    shown = [line for line in explained.text(1000).splitlines() if line.startswith("            not hopper(")]
    of_hopper = [text for text in listed if text.startswith("hopper(")]
    assert len(of_hopper) > 20
    assert [line.split("not ")[1].split("): ")[0] + ")" for line in shown] == of_hopper[: len(shown)]
    assert len(shown) == NEAREST
    assert f"... and {len(of_hopper) - NEAREST} more of hopper" in str(explained)
    whole = explained.text(1000, is_whole=True)
    assert all(f"not {text}: " in whole for text in listed)


def test_the_text_says_what_the_json_says() -> None:
    text = str(fuseplan.explain(TEXT, "cpu:avx2"))
    for words in ("1 for 3 operators", "contraction: conv2d -> bias -> relu", "cpu:avx2", "saved", "at most"):
        assert words in text


def test_the_floor_is_there_once_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not measured on this machine" in str(_explained(monkeypatch, None))
    rates = {level: {"read": 1e10, "copy": 1e10, "stream": 1e10} for level in ("l2", "l3", "dram")}
    measured = Peaks("this", 2, 1e9, rates, 1 << 20, 1 << 24)
    told = _explained(monkeypatch, measured)
    floor = told.to_json()["floor"]
    assert floor["bound"] == "compute"
    assert floor["seconds"] == pytest.approx(told.to_json()["flops"]["algorithm"] / 1e9)
    assert "set by arithmetic" in str(told)
    slow = {level: dict.fromkeys(rate, 1.0) for level, rate in rates.items()}
    assert "bandwidth" in str(_explained(monkeypatch, Peaks("this", 2, 1e9, slow, 1 << 20, 1 << 24)))


def _explained(monkeypatch: pytest.MonkeyPatch, measured: Peaks | None) -> fuseplan.Explanation:
    monkeypatch.setattr("fuseplan.measure.peaks.peaks", lambda threads: measured)
    return fuseplan.explain(TEXT, "cpu")


def test_a_refusal_is_explained_with_every_reason() -> None:
    text = "f32[1x4x9x9] -> conv2d(4, kernel=3) -> conv2d(4, kernel=3)"
    told = fuseplan.explain(text)
    assert not told.is_fused
    assert [each["code"] for each in told.to_json()["refusals"]]
    assert "^^^^^^^^^^^^^^^^^^^" in str(told)
    assert "[several-contractions]" in str(told)


def test_a_text_that_is_no_plan_is_an_error() -> None:
    with pytest.raises(PlanError):
        fuseplan.explain("f32[1x4] -> relo")


def test_a_compiled_plan_explains_itself() -> None:
    compiled = fuseplan.compile(TEXT, threads=1)
    told = compiled.explain()
    assert repr(told) == str(told), "at the prompt it is read too"
    assert told.to_json()["workspace_bytes"] == compiled.workspace_bytes
    assert told.to_json()["traffic"]["fused"] == compiled.traffic.total


def test_passes_are_told_with_their_reason() -> None:
    """How often each tensor is read follows from what the formulas name."""
    text = "f32[8x4x8x8] -> bias -> batch_norm_backward(relu, statistics=recomputed) -> add"
    told = fuseplan.explain(text, "reference").to_json()
    assert told["kernels"] == 1
    reads = {"src": 1, "input": 1, "other": 1}
    want = {"count": 3, "per": "channel", "elements": 512, "kept": True, "reads": reads}
    assert told["passes"] == want
    says = "3 over the data: the statistics of a channel, 512 elements"
    assert says in str(fuseplan.explain(text, "reference"))
    plain = fuseplan.explain(TEXT, "cpu:avx2")
    assert plain.to_json()["passes"] is None
    assert "passes" not in str(plain)


def test_what_does_not_stay_on_the_chip_is_read_in_every_pass() -> None:
    text = "f32[64x64x56x56] -> batch_norm_backward(relu, statistics=recomputed) -> add"
    told = fuseplan.explain(text, "cpu:avx2")
    assert told.to_json()["passes"]["reads"] == {"src": 2, "input": 3, "other": 1}
    assert "src is read in 2, input in 3, other in 1" in str(told)
