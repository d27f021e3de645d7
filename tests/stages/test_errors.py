from __future__ import annotations

import pickle
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import (
    ArgumentError,
    BuildError,
    FuseplanError,
    PlanError,
    Unsupported,
    did_you_mean,
    nearest,
)
from fuseplan.language.dtypes import DTYPES
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import bounded, operator_span, segments, shown, underlined, visible
from fuseplan.messages.reasons import Reason, Refusal
from fuseplan.ops.activation import Relu
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import limits
from fuseplan.tensors.arguments import OUT, SRC

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
    reasons = (Reason.SEVERAL_CONTRACTIONS, Reason.ACCURACY, Reason.STRIDED_PROLOGUE, Reason.CHANNELS_LAST)
    given = [refusal(number, reason=reason) for number, reason in enumerate(reasons)]
    error = Unsupported("no kernel", text=PLAN, refusals=given, options="--target reference")
    assert list(error.refusals) == given
    printed = str(error)
    assert printed.index("number 0") < printed.index("number 1") < printed.index("number 2")
    assert "number 3" not in printed
    assert f"1 other refused it too; `fuseplan explain '{PLAN}' --target reference` lists all" in printed


def test_a_reason_is_shown_once_by_its_nearest_miss() -> None:
    printed = str(Unsupported("no kernel", text=PLAN, refusals=[refusal(7), refusal(1), refusal(2)]))
    assert "number 7" in printed
    assert "number 1" not in printed
    assert "2 others refused it too" in printed


def test_a_refusal_that_points_to_what_refused_as_well_is_counted_alone() -> None:
    vain = Refusal(Reason.FLOAT64, tried="winograd")
    real = Refusal(Reason.STRIDED_PROLOGUE, tried="direct")
    both = Unsupported("no kernel", text=PLAN, refusals=[vain, real])
    assert both.refusals == (real, vain)
    assert (both.advice(real), both.advice(vain)) == (Reason.STRIDED_PROLOGUE.remedy, None)
    assert Reason.STRIDED_PROLOGUE.remedy in str(both)
    assert Reason.FLOAT64.sentence not in str(both)
    assert "1 other refused it too" in str(both)
    assert Reason.FLOAT64.remedy in str(Unsupported("no kernel", text=PLAN, refusals=[vain]))
    each_other = [vain, Refusal(Reason.GROUP_WIDTH, tried="direct")]
    assert Reason.FLOAT64.sentence in str(Unsupported("no kernel", text=PLAN, refusals=each_other))
    assert Reason.FLOAT64.remedy not in str(Unsupported("no kernel", text=PLAN, refusals=each_other))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            "f32[1x16x28x28] -> conv2d(32, kernel=3) -> relu -> conv2d(16, kernel=1)",
            "contraction: operator 2 (conv2d) comes after operator 0 (conv2d); one kernel",
        ),
        (
            "f32[4x3] -> batch_norm_training -> relu -> batch_norm_backward",
            "normalization: operator 2 (batch_norm_backward) comes after operator 0 (batch_norm_training)",
        ),
        (
            "f32[4x3x8x8] -> relu -> conv2d(4, kernel=3) -> batch_norm_training",
            "contraction, normalization: operator 2 (batch_norm_training) comes after operator 1 (conv2d)",
        ),
    ],
)
def test_the_rule_that_got_furthest_is_shown_alone_and_names_the_operators(plan: str, says: str) -> None:
    with pytest.raises(Unsupported) as caught:
        compile_plan(plan, "reference")
    lines = str(caught.value).splitlines()
    assert lines[4].startswith(f"  {says}")
    assert lines[5].startswith("  Split the plan in front of the second")
    assert [line for line in lines[6:] if line and "refused it too" not in line] == []
    held = [each.held for each in caught.value.refusals]
    assert held == sorted(held, reverse=True)


def test_unsupported_shows_the_plan_once_for_refusals_of_one_operator() -> None:
    other = refusal(1, reason=Reason.ACCURACY)
    printed = str(Unsupported("no kernel", text=PLAN, refusals=[refusal(2), other, refusal(0, operator=1)]))
    lines = printed.splitlines()
    assert lines[:6] == [
        "no kernel",
        "",
        f"  {PLAN}",
        "                  ^^^^^^^^^^^^^^^^^^^",
        f"  {f'way_2: number 2; {Reason.SEVERAL_CONTRACTIONS.sentence}':<70}  [several-contractions]",
        "  Split the plan in front of the second of them",
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
        TensorSpec((2, 3), "q")
    assert str(caught.value) == f"there is no dtype 'q'\n\n  want {' '.join(DTYPES)}", "each name once"


# ---- bounded, and without what a terminal takes for a command


def test_control_characters_are_not_echoed() -> None:
    assert visible("a\tb\nc\x1b[31m\u202e\u200b") == "a b c?[31m??"
    hidden = "f32[2x3] -> \x1b[2Jrelu\u202e(\x07)"
    for make in (
        lambda: FusionPlan.parse(hidden),
        lambda: TensorSpec((2, 3), "\x1b[2J"),
        lambda: TensorSpec((2, 3), "f32", "\x1b[2J"),
        lambda: FusionPlan.from_json('{"\\u001b": 1, "src": {}, "operators": []}'),
        lambda: compile_plan("f32[2x3] -> relu", "\x1b[2J"),
        lambda: compile_plan("f32[2x3] -> relu", "reference", template="\x1b[2J"),
    ):
        with pytest.raises(FuseplanError) as caught:
            make()
        assert all(line.isprintable() for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "f32[2x3] -> " + "r" * 90_000,
        "f32[2x3] -> relu(" + "x=1," * 2_000 + ")",
        "q" * 90_000,
        "f32[" + "2x" * 4_000 + "3]",
        "f32[2x3, " + "c" * 9_000 + "]",
        "f32[2x3]" + " -> relu" * 9_000,
        "f32[2x3] -> relu" * 60_000,
        "f32[2x3] -> " + "elu(" * 2_000,
        "f32[2x3] -> elu(" + "-" * 5_000 + "1)",
        "f32[2x3] -> elu(" + "(" * 150 + ")" * 150 + ")",
        "f32[2x3] -> elu(" + "9" * 4_000 + ")",
        "f32[" + " " * 9_000 + "2x",
        "f32[2x3] -> elementwise('" + "x+" * 4_000 + "')",
    ],
    ids=range(13),
)
def test_a_message_about_a_long_text_is_short_and_soon_there(text: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(PlanError) as caught:
        FusionPlan.parse(text)
    printed = str(caught.value)
    assert len(printed) < 5_000
    assert max(map(len, printed.splitlines())) <= limits.SHOWN_CHARACTERS + 2
    assert time.perf_counter() - begin < 2, "a text takes time by its length, not by its square"


def test_carets_stand_under_the_piece_of_a_long_text() -> None:
    text = "f32[2x3]" + " -> relu" * 300 + " -> rellu" + " -> relu" * 300
    with pytest.raises(PlanError) as caught:
        FusionPlan.parse(text)
    shown_text, carets = str(caught.value).splitlines()[2:4]
    assert shown_text.startswith("  ...")
    assert shown_text.endswith("...")
    assert shown_text[carets.index("^") : len(carets)] == "rellu"


def test_a_value_of_the_callers_is_shown_on_one_short_line() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert shown("a\x1bb") == r"'a\x1bb'"
    assert len(shown("x" * 10**6)) == 100
    assert bounded("ab" * 3000).startswith("abab")
    with pytest.raises(PlanError) as caught:
        FusionPlan(np.zeros((40, 40)))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_a_plan_has_a_thousand_operators_at_most() -> None:
    plan = FusionPlan.parse("f32[2x3]" + " -> bias" * limits.OPERATORS)
    assert plan.operands[-1].key == f"bias_{limits.OPERATORS}"
    for make in (
        lambda: plan.add(Relu()),
        lambda: FusionPlan.parse(f"{plan} -> relu"),
        lambda: FusionPlan.from_json(plan.to_json().replace("]}", ', {"name": "relu", "fields": {}}]}')),
    ):
        with pytest.raises(PlanError, match=f"a plan has at most {limits.OPERATORS} operators"):
            make()
    with pytest.raises(PlanError, match="the text of a plan has at most"):
        FusionPlan.parse("f32[2x3]" + " " * limits.TEXT_CHARACTERS + "-> relu")
    with pytest.raises(PlanError, match="the JSON of a plan has at most"):
        FusionPlan.from_json(" " * (limits.JSON_CHARACTERS + 1))


@pytest.mark.parametrize(
    "text",
    [
        "leaky_relu(1if 1else 2)", "leaky_relu(1.5if 1else 2)", "elu(0x1for)", r'elementwise("x + \d")',
        "elu(1_)", "elu(1and 2)", "elu(.5in x)", 'elementwise("x + 1if x else 2")',
    ],
)  # fmt: skip
def test_python_warns_of_no_text(text: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(PlanError):
            FusionPlan.parse(f"f32[2x3] -> {text}")
    assert warned == []


@pytest.mark.parametrize(
    "text", ["elu(0x10)", "elu(1_000)", "elu(1e-5)", "elu(.5)", "elu(5.)", 'gelu("tanh")']
)
def test_numbers_are_taken_as_python_writes_them(text: str) -> None:
    assert FusionPlan.parse(f"f32[2x3] -> {text}")
