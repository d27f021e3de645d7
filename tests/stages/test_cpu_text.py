"""The text of CPU kernels: no instruction whose result is known when the kernel is written."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I1, I64, PTR, Module, folded
from fuseplan.backends.cpu.loops import batches, pieces, places
from fuseplan.backends.cpu.templates.order import TEMPLATES
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS
from fuseplan.kernels.template import Template
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan
from suite_plans import one_of_each, plans_of_suites

NUMBER = r"-?\d+"
# Each names an instruction that index arithmetic should have folded.
FOLDABLE = {
    "arithmetic on two numbers": rf"= (?:add|sub|mul|udiv|urem|and|or|xor) i\d+ {NUMBER}, {NUMBER}$",
    "a comparison of two numbers": rf"= icmp \w+ i\d+ {NUMBER}, {NUMBER}$",
    "+ 0": r"= (?:add|sub) i64 [^,]+, 0$|= add i64 0, ",
    "* 1": r"= (?:mul|udiv) i64 [^,]+, 1$|= mul i64 1, ",
    "* 0": r"= mul i64 [^,]+, 0$|= mul i64 0, ",
    "% 1": r"= urem i64 [^,]+, 1$",
    "0 divided": r"= (?:udiv|urem) i64 0, ",
    "an address + 0": r"getelementptr .*, i64 0$",
    "a choice that is made": r"select i1 (?:true|false),|br i1 (?:true|false),",
    "a condition that always holds": r"= (?:and|or) i1 (?:[^,]+, )?(?:true|false)",
    "a mask of all lanes": r"@llvm\.masked\..*<(?:i1 true(?:, )?)+>",
}
# Odd sizes, strides, dtypes and operators on both sides, which no suite has.
ODD = (
    "f32[2x4x33x24, bhsd] -> attention_gradient(is_causal=True, key_heads=2)",
    "f32[2x32x14x14, nhwc] -> conv2d_weight_gradient(32, kernel=3, padding=1, groups=32)",
    "f32[2x32x14x14] -> relu -> conv2d_weight_gradient(32, kernel=3, padding=1, groups=32)",
    "bf16[1x2x50x40, bhsd] -> attention_gradient(by=key, keys=90)",
    "bf16[1x19x9x11, nhwc] -> relu -> conv2d(37, kernel=(3, 5), stride=2) -> tanh",
    "f32[2x4x9x11, strides=2000:500:50:3] -> relu -> conv2d(5, kernel=3) -> bias",
    "f32[2x16x5x6x7, ndhwc] -> conv3d(24, kernel=3, padding=1) -> bias",
    "f32[2x16x40, nwc] -> conv1d(24, kernel=5, padding=2, groups=2) -> bias",
    "f64[2x13x9x7] -> conv2d(21, kernel=1) -> add -> batch_norm(per_activation) -> silu",
    "f32[2x13x10x23] -> relu -> conv2d(19, kernel=3, padding=1) -> add -> silu",
    "bf16[2x13x10x23, nhwc] -> batch_norm -> relu -> conv2d(18, kernel=5, padding=2) -> add -> silu",
    "f16[2x13x10x23, nhwc] -> add -> conv2d(13, kernel=3, stride=(1, 2), padding=1, groups=13) -> prelu",
    "f32[1x6x4x5x21] -> conv3d(6, kernel=3, padding=1, groups=6) -> bias",
    "f32[1x8x6x90] -> conv2d(8, kernel=(3, 70), padding=(1, 0), groups=8) -> bias",
    "f32[1x12x4x5x21, ndhwc] -> batch_norm -> prelu -> conv3d(6, kernel=3, groups=3) -> bias",
    "bf16[2x18x13x17, nhwc] -> add -> conv2d(18, kernel=3, padding=1, groups=9) -> add -> silu",
    "f32[2x36x13x17] -> conv2d(36, kernel=3, padding=1, groups=9) -> bias",
    "f32[6x33x20, bsc] -> matmul(35, batched=True) -> bias -> add -> relu",
    "f32[3x5x7] -> relu -> save(kept) -> softmax(1) -> mul(kept)",
    "bf16[2x19x9x11, nhwc] -> conv2d(23, kernel=3) -> bias -> save(pre) -> gelu -> mul(pre)",
    "f32[1x1x8x8] -> conv2d(1, kernel=3, padding=1)",
    "f16[3x7x8x9, strides=1000:100:12:1] -> batch_norm(per_activation) -> bias",
    "f32[64x512x56x56, nhwc] -> batch_norm -> relu",
    "f64[4x19x7x9] -> bias -> batch_norm_training(per_activation, running=True) -> add -> relu",
    "f32[16x19x3x5] -> bias -> batch_norm_training(running=True) -> add -> relu",
    "f32[2x3x5x7, strides=200:50:9:1] -> batch_norm_training -> relu",
)

TILED = (
    "bf16[2x19x9x11, nhwc] -> conv2d(37, kernel=(3, 5), stride=2, padding=1) -> bias -> tanh",
    "bf16[300x5000] -> linear(100) -> bias -> glu(silu)",
    "i8[33x700] -> linear(70)",
    "f32[300x5000] -> linear(100) -> bias -> glu(silu)",
    "bf16[*x70] -> linear(100) -> bias",
)


def texts(kind: str, plans: list[str]) -> Iterator[tuple[str, Template, str]]:
    """The kernel of each template's first choice for each plan."""
    target = replace(KINDS[kind], threads=2)
    for plan in plans:
        kernel = lower(match(FusionPlan.parse(plan)))
        for template in TEMPLATES:
            if first_refusal(template.limits(kernel, target, "default")) is None:
                choice = next(iter(template.candidates(kernel, target, "default")))
                yield plan, choice, choice.emit(kernel, target).text


def single_steps(function: str) -> Iterator[str]:
    """The counters of loops that end after a step, or before it."""
    starts = dict(re.findall(rf"^  (%\S+) = phi i64 \[ ({NUMBER}), ", function, re.MULTILINE))
    stops = dict(re.findall(rf"\.more = icmp slt i64 (%\S+), ({NUMBER})$", function, re.MULTILINE))
    steps = dict(re.findall(r"\.next = add i64 (%\S+), (\d+)$", function, re.MULTILINE))
    for index in starts.keys() & stops.keys() & steps.keys():
        if int(starts[index]) + int(steps[index]) >= int(stops[index]):
            yield index


def foldable(text: str) -> list[str]:
    """What a text has of FOLDABLE, each with its line."""
    found = []
    for what, pattern in FOLDABLE.items():
        hit = re.search(pattern, text, re.MULTILINE)
        found += [f"{what}: {text[hit.start() :].splitlines()[0]}"] if hit else []
    for function in text.split("\ndefine "):
        found += [f"a loop of one step: {index}" for index in single_steps(function)]
    return found


def test_no_generated_text_leaves_work_to_the_optimizer() -> None:
    """Of plans that differ in numbers alone, another one for each kind of CPU; the odd ones for all kinds."""
    kinds, seen = ("cpu:avx2", "cpu:avx512", "cpu:neon"), set()
    each = {kind: [*one_of_each(turn, len(kinds)), *ODD] for turn, kind in enumerate(kinds)}
    wide = [plan for plan in dict.fromkeys(plans_of_suites()) if plan.startswith("bf16")]
    each["cpu:amx"] = [*wide[::8], *TILED]
    for kind, plans in each.items():
        for plan, choice, text in texts(kind, plans):
            seen.add(choice.name)
            assert foldable(text) == [], f"{plan} for {kind} with {choice.text}"
    assert seen == {template.name for template in TEMPLATES}


def test_softmax_takes_one_exponential() -> None:
    """Five vectors a row: the sum's terms are dst's, where a row stays in the caches."""
    ((_, choice, text),) = texts("cpu:avx512", ["f32[300x80] -> softmax"])
    assert (choice.name, choice.knobs["near"]) == ("reduction", True)
    assert text.count("= shl <16 x i32>") == 5
    kernel = lower(match(FusionPlan.parse("f32[300x80] -> softmax")))
    far = Reduction(300, 1).emit(kernel, KINDS["cpu:avx512"]).text
    assert far.count("= shl <16 x i32>") > 10


@pytest.mark.parametrize(
    "line",
    [
        "  %v.0 = mul i64 0, 13",
        "  %c.1 = icmp slt i64 13, 13",
        "  %v.2 = add i64 %v.0, 0",
        "  %v.3 = mul i64 1, %v.1",
        "  %v.4 = urem i64 %task.0, 1",
        "  %v.5 = and i1 %c.2, true",
        "  %p.1 = getelementptr float, ptr %src, i64 0",
        "  %i = phi i64 [ 0, %a ], [ %j, %b ]\n  %i.more = icmp slt i64 %i, 8\n  %i.next = add i64 %i, 8",
    ],
)
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert foldable(f"entry:\n{line}\n  ret void\n")


@pytest.mark.parametrize(
    ("word", "left", "right", "wanted"),
    [
        ("add", "3", "4", "7"),
        ("sub", "3", "4", "-1"),
        ("add", "%x", "0", "%x"),
        ("add", "0", "%x", "%x"),
        ("sub", "0", "%x", None),
        ("mul", "%x", "1", "%x"),
        ("mul", "0", "%x", "0"),
        ("mul", "%x", "2", None),
        ("udiv", "%x", "1", "%x"),
        ("udiv", "1", "%x", None),
        ("udiv", "7", "2", "3"),
        ("udiv", "-7", "2", None),
        ("udiv", "7", "0", None),
        ("urem", "%x", "1", "0"),
        ("urem", "0", "%x", "0"),
        ("urem", "7", "4", "3"),
        ("urem", "%x", "0", None),
    ],
)
def test_index_arithmetic_folds(word: str, left: str, right: str, wanted: str | None) -> None:
    assert folded(word, left, right) == wanted


def builder() -> Builder:
    return Builder(Module(), "f", [(PTR, "p"), (I64, "n")])


def test_a_loop_of_one_step_is_straight_and_one_of_none_is_nothing() -> None:
    b = builder()
    pointer, count = b.parameters
    with b.loop(0, 8, 8) as once:
        b.store(b.number(1.0), b.at(pointer, once))
    with b.loop(8, 8) as never:
        b.store(b.number(2.0), b.at(pointer, never))
    with b.loop(0, count, 8) as often:
        b.store(b.number(3.0), b.at(pointer, often))
    b.finish()
    assert b.module.text().count("phi") == 1
    assert b.module.text().count("store") == 2


def test_what_is_known_to_hold_needs_no_branch() -> None:
    b = builder()
    count = b.parameters[1]
    yes, no = b.compare("slt", b.const(1, I64), 2), b.compare("slt", b.const(2, I64), 2)
    unknown = b.compare("slt", count, 2)
    assert (yes.name, no.name) == ("true", "false")
    assert b.both([]).name == b.both([yes, yes]).name == "true"
    assert b.both([unknown, no]).name == "false"
    assert b.both([yes, unknown]) == unknown
    assert b.both([unknown, Value(b, I1, "%other")]).name not in ("true", "false", unknown.name)
    assert b.select(yes, count, 7) == count
    with b.when(no):
        b.line("this is not kept")
    with b.when(yes):
        b.comment("this is")
    b.finish()
    assert "not kept" not in b.module.text()
    assert "br i1" not in b.module.text()


def written(b: Builder) -> str:
    b.finish()
    return b.module.text()


def test_pieces_are_whole_ones_in_a_loop_and_one_that_is_left() -> None:
    seen: list[tuple[str, int]] = []

    def note(first: Index, count: int) -> None:
        seen.append((first.name if isinstance(first, Value) else str(first), count))

    b = builder()
    pieces(b, 19, 8, note, name="i")
    pieces(b, 16, 8, note, name="i")
    pieces(b, 5, 8, note, name="i")
    pieces(b, 8, 8, note, name="i")
    pieces(b, 19, 8, note, name="i", within=(b.parameters[1], b.parameters[1] + 1), numbered=True)
    assert seen == [("%i.0", 8), ("16", 3), ("%i.1", 8), ("0", 5), ("0", 8), ("%i.2", 8), ("2", 3)]
    assert written(b).count("br i1") == 4  # three loops, and whether the last piece belongs to the range


def test_batches_are_several_rows_and_then_single_ones() -> None:
    counts: list[int] = []
    b = builder()
    batches(b, 0, 11, 4, lambda _, count: counts.append(count))
    assert counts == [4, 1]
    assert re.findall(r"\.more = icmp slt i64 \S+ (\d+)", written(b)) == ["8", "11"]


def test_places_count_the_last_axis_fastest() -> None:
    b = builder()
    assert places(b.parameters[1], []) == []
    assert places(b.const(23, I64), [9, 3, 4]) == [b.const(1, I64), b.const(2, I64), b.const(3, I64)]
    image, position = places(b.parameters[1], [2, 1])
    assert image == b.parameters[1]
    assert position == b.const(0, I64)


@pytest.mark.parametrize(
    ("plan", "src"),
    [
        ("f32[128x256] -> matmul(512) -> bias", "f32[128x256]"),
        ("f32[2x8x9x7, nhwc] -> relu", "f32[2x8x9x7, nhwc]"),
    ],
)
def test_a_text_begins_with_its_choice_what_that_does_and_the_plans_kernel(plan: str, src: str) -> None:
    for _, choice, text in texts("cpu:avx2", [plan]):
        head = [line[2:] for line in text.splitlines() if line.startswith("; ")]
        assert head[0] == choice.text
        assert head[1] == (type(choice).__doc__ or "").partition("\n")[0]
        assert head[2] == f"src: {src}"
