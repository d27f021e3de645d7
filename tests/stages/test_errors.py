from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fuseplan.arguments import OUT, SRC
from fuseplan.errors import (
    ArgumentError,
    BuildError,
    FuseplanError,
    PlanError,
    Unsupported,
    did_you_mean,
    nearest,
    operator_span,
    segments,
    underlined,
)
from fuseplan.reasons import Reason, Refusal
from fuseplan.tensor import TensorSpec

PLAN = "f32[2x4x8x8] -> conv2d(4, kernel=3) -> relu"


def test_plan_error_shows_the_plan_with_carets_and_what_to_do() -> None:
    error = PlanError("it cannot be", got="a", want="b", remedy="Do c", text=PLAN, operator=1)
    assert str(error) == "\n".join(
        [
            "it cannot be",
            "",
            "  f32[2x4x8x8] -> conv2d(4, kernel=3) -> relu",
            "                                         ^^^^",
            "  got a; want b",
            "  Do c",
        ]
    )


def test_plan_error_underlines_its_span_rather_than_the_operator() -> None:
    error = PlanError("no", text=PLAN, operator=1, span=(26, 34))
    assert str(error).splitlines()[-1] == "  " + " " * 26 + "^" * 8


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (PlanError("no"), "no"),
        (PlanError("no", got=0), "no\n\n  got 0"),
        (PlanError("no", text="f32[1x1]"), "no\n\n  f32[1x1]"),
        (PlanError("no", text="f32[1x1]", operator=7), "no\n\n  f32[1x1]"),
        (BuildError("it failed"), "it failed"),
        (ArgumentError("weight is missing"), "weight is missing"),
    ],
)
def test_what_is_not_known_is_not_shown(error: FuseplanError, printed: str) -> None:
    assert str(error) == printed


def test_located_moves_an_error_and_keeps_the_rest() -> None:
    error = PlanError("no", got=1, want=2, remedy="Do", field="kernel", text="a", span=(0, 1))
    moved = error.located(PLAN, 0)
    assert (moved.text, moved.operator, moved.span) == (PLAN, 0, None)
    assert (moved.what, moved.got, moved.want, moved.remedy, moved.field) == ("no", 1, 2, "Do", "kernel")
    assert error.text == "a"


def test_build_error_shows_the_last_lines_and_the_file() -> None:
    output = "\n".join(f"line {number}" for number in range(40))
    printed = str(BuildError("it failed", source="text", output=output, path=Path("/somewhere/kernel.ll")))
    assert "line 39" in printed
    assert "line 1\n" not in printed
    assert printed.endswith("the source: /somewhere/kernel.ll")


def refusal(number: int, operator: int | None = 0, reason: Reason = Reason.SEVERAL_CONTRACTIONS) -> Refusal:
    return Refusal(reason, got=f"number {number}", operator=operator, tried=f"way_{number}")


def test_unsupported_shows_the_nearest_misses_first_and_at_most_three() -> None:
    given = [refusal(number) for number in range(5)]
    error = Unsupported("no kernel", text=PLAN, refusals=given, options="--target reference")
    assert list(error.refusals) == given
    printed = str(error)
    assert printed.index("number 0") < printed.index("number 1") < printed.index("number 2")
    assert "number 3" not in printed
    assert f"5 ways were tried; `fuseplan explain '{PLAN}' --target reference` lists them" in printed


def test_a_refusal_that_points_to_what_refused_as_well_comes_last_and_without_its_remedy() -> None:
    vain = Refusal(Reason.FLOAT64, tried="winograd")
    real = Refusal(Reason.STRIDED_PROLOGUE, tried="direct")
    both = Unsupported("no kernel", text=PLAN, refusals=[vain, real])
    assert both.refusals == (real, vain)
    assert Reason.STRIDED_PROLOGUE.remedy in str(both)
    assert Reason.FLOAT64.remedy not in str(both)
    assert Reason.FLOAT64.remedy in str(Unsupported("no kernel", text=PLAN, refusals=[vain]))


def test_unsupported_shows_the_plan_once_for_refusals_of_one_operator() -> None:
    printed = str(
        Unsupported("no kernel", text=PLAN, refusals=[refusal(2), refusal(1), refusal(0, operator=1)])
    )
    lines = printed.splitlines()
    assert lines[:6] == [
        "no kernel",
        "",
        f"  {PLAN}",
        "                  ^^^^^^^^^^^^^^^^^^^",
        f"  {'way_2: number 2; one kernel holds one contraction':<70}  [several-contractions]",
        "  Split the plan in front of the second contraction",
    ]
    assert lines.count(f"  {PLAN}") == 2


def test_unsupported_that_blames_no_operator_shows_the_plan_without_carets() -> None:
    printed = str(Unsupported("no kernel", text="f32[2x3]", refusals=[refusal(0, operator=None)]))
    assert "^" not in printed
    assert "  f32[2x3]\n" in printed


@pytest.mark.parametrize(
    "error",
    [
        PlanError("no", got=1, text=PLAN, operator=1, field="kernel"),
        Unsupported("no kernel", text=PLAN, refusals=[refusal(1), refusal(3)]),
        BuildError("it failed", source="text", output="said"),
        ArgumentError("weight is missing"),
        ArgumentError(OUT, " overlaps ", SRC),
    ],
)
def test_errors_cross_process_boundaries(error: FuseplanError) -> None:
    revived = pickle.loads(pickle.dumps(error))
    assert type(revived) is type(error)
    assert str(revived) == str(error)
    assert vars(revived) == vars(error)


def test_tensors_are_told_by_other_names() -> None:
    error = ArgumentError(OUT, " overlaps ", SRC, ", not `src`")
    assert str(error) == "`out` overlaps `src`, not `src`"
    assert error.told({OUT: "y", SRC: "x"}.__getitem__) == "y overlaps x, not `src`"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("a", ["a"]),
        (" a ->  b->c ", ["a", "b", "c"]),
        ("a ->", ["a", ""]),
        ("a -> f('x -> y') -> b", ["a", "f('x -> y')", "b"]),
        ('a -> f("\\" -> ") -> b', ["a", 'f("\\" -> ")', "b"]),
        ("a -> f('never closed -> b", ["a", "f('never closed -> b"]),
    ],
)
def test_segments_are_what_stands_between_arrows(text: str, pieces: list[str]) -> None:
    assert [text[begin:end] for begin, end in segments(text)] == pieces


def test_operator_span_is_none_where_there_is_no_such_operator() -> None:
    assert operator_span(PLAN, 1) == (39, 43)
    assert operator_span(PLAN, 2) is None
    assert operator_span(PLAN, -1) is None


def test_underlined_keeps_columns_and_shows_empty_pieces() -> None:
    assert underlined("a\tb\nc", (2, 3)) == ["a b c", "  ^"]
    assert underlined("abc", (3, 3)) == ["abc", "   ^"]
    assert underlined("abc", None) == ["abc"]


def test_the_nearest_name_is_named() -> None:
    assert nearest("rellu", ["relu", "elu", "tanh"]) == ["relu"]
    assert nearest("xyz", ["relu"]) == []
    assert did_you_mean("conv", ["conv1d", "conv2d", "relu"]) == "Did you mean `conv1d` or `conv2d`?"
    assert did_you_mean("rellu", ["relu"]) == "Did you mean `relu`?"
    assert did_you_mean("xyz", ["relu", "tanh"]) == "Known here: relu, tanh"
    assert did_you_mean("xyz", []) == "Known here: none"
    with pytest.raises(PlanError) as caught:
        TensorSpec((2, 3), "i8")
    assert str(caught.value) == "there is no dtype 'i8'\n\n  want f64 f32 f16 bf16", "each name once"
