"""Refusals: every reason of the catalogue is met by a plan of `refusals.toml`, or at construction."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import Unsupported
from fuseplan.execution.stages import decide
from fuseplan.explanation import explain
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.messages.excerpt import operator_span
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan
from toy_templates import ToyScale

ROWS = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text())["refusal"]
# No plan's text shows them: tested below, and in backward/test_backward.py.
NO_ROW = {Reason.HORIZONTAL, Reason.KNOWN_EXTENTS, Reason.NO_GRADIENT}


def name(row: dict[str, Any]) -> str:
    return f"{row['code']} by {row['tried']}: {row['plan']}"


def how(row: dict[str, Any]) -> dict[str, Any]:
    return {"target": row.get("target", "cpu:avx2"), "accuracy": row.get("accuracy", "default")}


def met(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All refusals that an explanation tells: of a refused plan, or of what was passed over."""
    yield from told.get("refusals", ())
    yield from told.get("match", {}).get("passed_over", ())
    considered = told.get("choice", {}).get("considered", ())
    yield from (each["refusal"] for each in considered if each["refusal"])


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_reason_is_given(row: dict[str, Any]) -> None:
    told = explain(row["plan"], **how(row)).to_json()
    assert told["fused"] is not row["refused"]
    found = [each for each in met(told) if each["tried"] == row["tried"]]
    assert [(each["code"], each["operator"]) for each in found] == [(row["code"], row.get("operator"))]


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_reason_is_printed(row: dict[str, Any]) -> None:
    reason = next(each for each in Reason if each.code == row["code"])
    unfolded = " ".join(str(explain(row["plan"], **how(row))).split())
    before = unfolded.split(f"[{reason.code}]")[:-1]
    assert any(row["tried"] in told.rpartition(reason.sentence)[0] for told in before)


@pytest.mark.parametrize("row", [row for row in ROWS if row["refused"]], ids=name)
def test_the_plan_is_refused_before_any_toolchain(row: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as from_stages:
        decide(row["plan"], **how(row))
    with pytest.raises(Unsupported) as from_compile:
        compile_plan(row["plan"], **how(row))
    assert str(from_compile.value) == str(from_stages.value)
    refusal = next(each for each in from_stages.value.refusals if each.tried == row["tried"])
    assert (refusal.code, refusal.operator) == (row["code"], row.get("operator"))


@pytest.mark.parametrize("row", [row for row in ROWS if row["refused"]], ids=name)
def test_carets_stand_under_the_operator_to_blame(row: dict[str, Any]) -> None:
    if "operator" not in row:
        return
    begin, end = operator_span(row["plan"], row["operator"]) or (0, 0)
    carets = "  " + " " * begin + "^" * (end - begin)
    with pytest.raises(Unsupported) as refused:
        decide(row["plan"], **how(row))
    is_shown = refused.value.advice(refused.value.refusals[0]) and row["code"] in str(refused.value)
    printed = refused.value if is_shown else explain(row["plan"], **how(row))
    assert carets in str(printed).splitlines()


def test_every_reason_has_a_row() -> None:
    listed = {row["code"] for row in ROWS} | {reason.code for reason in NO_ROW}
    assert {reason.code for reason in Reason} - listed == set(), "add a row to tests/refusals.toml"
    assert listed - {reason.code for reason in Reason} == set(), "a row's code is in no catalogue"


def test_a_template_says_that_it_takes_open_axes() -> None:
    kernel, target = lower(match(FusionPlan.parse("f16[*x64] -> scale"))), parse_target("triton:sm_90")
    refusal = first_refusal(ToyScale.claims(kernel, target, "default"))
    assert refusal is not None
    assert refusal.reason is Reason.KNOWN_EXTENTS


def test_a_horizontal_plan_is_refused_when_it_is_made() -> None:
    with pytest.raises(Unsupported) as refused:
        FusionPlan("f32[1x8]", direction="horizontal")
    assert [each.reason for each in refused.value.refusals] == [Reason.HORIZONTAL]
    assert "f32[1x8]" in str(refused.value)


def test_a_kind_of_operator_has_its_article() -> None:
    passed_over = explain("f32[1x2x8x16, bhsd] -> attention", "cpu:avx2").to_json()["match"]["passed_over"]
    (found,) = (each["got"] for each in passed_over if each["tried"] == "pointwise")
    assert found == "operator 0 (attention) is an attention"
