from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from fuseplan.messages.reasons import Claim, Reason, Refusal, claim, first_refusal


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_a_reason_reads_as_the_others_do(reason: Reason) -> None:
    assert reason.code == reason.name.lower().replace("_", "-")
    assert re.fullmatch(r"[^A-Z].*[^.]", reason.sentence), "a sentence goes on from what was met"
    assert re.fullmatch(r"[A-Z`].*[^.]", reason.remedy), "a remedy stands on its own line"


def test_codes_are_distinct() -> None:
    codes = [reason.code for reason in Reason]
    assert len(set(codes)) == len(codes) == len(Reason.__members__), "two reasons with equal texts become one"


def test_the_first_claim_that_does_not_hold_refuses() -> None:
    def conditions() -> Iterator[Claim]:
        yield claim(True, Reason.EMPTY_PLAN)
        yield claim(False, Reason.NO_CONTRACTION, got=2, want=1, operator=3)
        raise AssertionError("later claims are not asked")

    refusal = first_refusal(conditions(), tried="contraction")
    assert refusal == Refusal(Reason.NO_CONTRACTION, "2", "1", 3, "contraction", held=1)


def test_nothing_is_refused_where_all_claims_hold() -> None:
    assert first_refusal([]) is None
    assert first_refusal([claim(True, Reason.EMPTY_PLAN)]) is None


def test_a_claim_takes_any_value_that_is_true_or_false() -> None:
    assert claim([], Reason.EMPTY_PLAN).holds is False  # type: ignore[arg-type]


def test_a_refusal_prints_what_is_known() -> None:
    assert str(Refusal(Reason.EMPTY_PLAN)) == Reason.EMPTY_PLAN.sentence
    printed = str(Refusal(Reason.EMPTY_PLAN, got="0 operators", want="1"))
    assert printed == "0 operators; the plan has no operator; want 1"


def test_a_refusal_is_json() -> None:
    refusal = Refusal(Reason.EMPTY_PLAN, operator=None, tried="pointwise")
    told = json.loads(json.dumps(refusal.to_json()))
    assert told["code"] == refusal.code == "empty-plan"
    assert told["tried"] == "pointwise"
    assert told["remedy"] == refusal.remedy
