"""The text of kernels for GPUs, of every template, for all suites' and odd shapes: nothing in it is idle."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest

from fuseplan.backends.triton.templates.order import TEMPLATES
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.errors import Unsupported
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.messages.reasons import first_refusal
from fuseplan.ops.normalization import Normalization
from fuseplan.plans.plan import FusionPlan
from kernel_noise import noise
from suite_plans import one_of_each

ODD = (
    "f32[2x5x9x11] -> conv2d(7, kernel=3, padding=1) -> bias -> relu",
    "f16[1x64x9x9, nhwc] -> conv2d(33, kernel=3, padding=1) -> bias -> relu",
    "f16[1x64x9x9] -> conv2d(33, kernel=3, padding=1) -> bias -> add -> relu",
    "f32[1x3x20x20, nhwc] -> conv2d(40, kernel=7, stride=2, padding=3) -> bias",
    "f16[1x9x13x15] -> conv2d(70, kernel=(5, 2), stride=(2, 3), padding=((0, 3), (1, 0)))",
    "bf16[2x12x9x8, nhwc] -> conv2d(18, kernel=3, padding=1, groups=3) -> relu",
    "f16[1x60x8x8] -> conv2d(45, kernel=3, padding=1, groups=15)",
    "f32[2x3x50] -> conv1d(7, kernel=9, stride=3, padding=4) -> bias",
    "f64[1x5x6x7x8] -> conv3d(9, kernel=3, padding=1)",
    "f16[2x34x5x9x6, ndhwc] -> conv3d(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding=(0, 1, 2), groups=2)",
    "bf16[2x20x7x9, nhwc] -> batch_norm(per_activation) -> conv2d(20, kernel=3, padding=1, groups=4) -> gelu",
    "f32[2x3x9x11] -> bias -> add -> conv2d(20, kernel=3, padding=1) -> relu",
    "f32[2x3x4x5, strides=1300:2:250:40] -> relu -> conv2d(8, kernel=2, padding=1)",
    "f32[5x40] -> matmul(17) -> relu",
    "f16[2x6x40, bcs of bsc] -> matmul(17, transposed=True)",
    "bf16[1x200] -> matmul(3) -> bias",
    "bf16[8x4096] -> matmul(4096) -> bias",
    "f32[16x2048] -> matmul(1000) -> bias",
    "f32[8x512x768] -> matmul(768) -> bias",
    "i8[33x48] -> linear(24) -> dequantize(f16) -> bias",
    "f16[33x40] -> quantize(i8) -> linear(24) -> dequantize(f16) -> relu",
    "f8e4m3[2x20x5x7] -> conv2d(22, kernel=3, padding=1) -> bias",
    "f32[7x13] -> linear(34) -> bias -> gelu -> glu -> scale -> add",
    "bf16[90x72] -> linear(200) -> bias -> glu(silu, gate=first)",
    "f16[2x20x5x7] -> conv2d(22, kernel=3, padding=1) -> batch_norm -> glu(axis=c)",
    "f16[3x20x17] -> matmul(19, batched=True) -> bias -> relu",
    "f16[2x20x7x7, nhwc] -> conv2d(19, kernel=1) -> batch_norm -> add -> relu",
    "f32[2x20x2x3x4] -> conv3d(5, kernel=1) -> batch_norm(per_activation)",
    "bf16[2x20x7x7, nhwc] -> add -> silu -> conv2d(19, kernel=1) -> bias",
    "f16[4x64x50, nwc] -> conv1d(128, kernel=3, padding=1) -> batch_norm(per_activation) -> relu",
    "f16[3x16x64] -> matmul(64, batched=True) -> bias",
    "f16[2x19x9x7, nhwc] -> conv2d(19, kernel=3, padding=1, groups=19) -> bias -> relu",
    "f16[2x8x9x7] -> relu -> conv2d(16, kernel=(3, 2), stride=2, padding=(0, 1), groups=8) -> batch_norm",
    "f32[2x8x5x6x7, ndhwc] -> bias -> conv3d(8, kernel=3, padding=1, groups=8) -> batch_norm(per_activation)",
    "f32[3x6x5x7, nhwc] -> softmax(hw)",
    "f32[2x3x33, bsc] -> softmax(s)",
    "f32[70x40] -> relu -> linear(301) -> cross_entropy(label_smoothing=0.1)",
    "f16[3x700x128, bsc] -> linear(5000) -> bias -> cross_entropy",
    "bf16[9x64] -> linear(33) -> gelu -> argmax(axes=-1)",
    "f64[40x24] -> linear(130) -> var(axes=-1)",
    "f16[2x6x5x64, nhwc] -> conv2d(90, kernel=1) -> amax(axes=1)",
    "f16[2x300x70, bsc] -> scale -> log_softmax(s) -> add",
    "bf16[64x256x28x28, nhwc] -> relu -> mean(hw) -> bias",
    "f32[100003] -> sum(all)",
    "f64[4x6x5x7] -> scale -> sum((0, -1)) -> tanh",
    "f32[8x65536] -> amax(1) -> relu",
    "f32[8x65536] -> argmax(1)",
    "f64[4x6x5x7] -> argmax((0, -1))",
    "f16[2x5x3x7, nhwc] -> var(hw) -> bias",
    "f32[33x40] -> prod(0)",
    "f16[33x40] -> scale -> softmax(0) -> save(kept) -> relu -> mul(kept)",
    "f32[3x17x5x7, strides=4000:1:800:100] -> relu -> softmax(h)",
    "f32[2x3x5x7, strides=1:1000:100:10 of bhsc] -> layer_norm -> relu",
    "f32[7x5] -> bias -> add -> gelu",
    "f16[1x1x1x1] -> bias -> relu",
    "f32[100003x1] -> relu",
    "f16[2x5x3x4, strides=120:1:40:10] -> batch_norm -> relu",
    "f16[2x1500x9, nwc] -> batch_norm -> silu",
    "f32[2x64x56x57] -> batch_norm -> add -> relu",
    "f32[4x6x5x7] -> batch_norm_training(running=True) -> relu",
    "f16[4x24x5x7, nhwc] -> bias -> batch_norm_training -> add -> leaky_relu",
    "f64[4x6x5] -> batch_norm_training -> relu",
    "f32[4x6x5x7] -> batch_norm_training(mode=per_activation, running=True) -> batch_norm -> relu",
    "f32[3x17x5x7, strides=4000:1:800:100] -> relu -> batch_norm_training -> relu",
    "f16[5x20x5x6] -> batch_norm_backward(leaky_relu(0.1), statistics=recomputed)",
    "f32[2x3x133x24, bhsd] -> attention_gradient",
    "f16[1x4x130x64, bhsd] -> attention_gradient(is_causal=True)",
    "bf16[1x4x170x40, bhsd] -> attention_gradient(by=key, key_heads=2)",
    "f16[2x2x264x128, bhsd] -> attention_gradient(by=key, is_causal=True)",
    "f32[1x2x100x16, bhsd] -> attention_gradient(keys=130, window=39, offset=30)",
    "bf16[2x2x165x80, bshd of bhsd] -> attention_gradient(softcap=30)",
    "f16[1x2x150x32, bhsd] -> attention_gradient(by=key, mask_axes=st)",
    "f16[1x4x256x64, bhsd] -> attention_gradient(by=key, keys=300, key_heads=2)",
    "bf16[2x4x200x64, bhsd] -> attention_gradient(softcap=5, is_causal=True, by=key)",
    "f16[2x3x170x128, bhsd] -> attention_gradient(keys=300, offset=140, window=90, by=key)",
    "bf16[1x2x333x96, bshd of bhsd] -> attention_gradient(keys=200, features=40)",
    "f16[2x4x300x64, bhsd] -> attention_gradient(key_heads=2, is_causal=True, offset=20)",
    "bf16[3x2x192x32, bhsd] -> attention_gradient(by=key, is_causal=True, key_heads=1)",
    "f32[3x2100] -> bias -> cumsum",
    "f64[1x1] -> cumsum(reverse=True)",
    "f16[2x301x70, bsc] -> add -> cumsum(1, exclusive=True) -> scale",
    "f32[3x17x5x7, strides=4000:1:800:100] -> relu -> cumsum(2, exclusive=True, reverse=True) -> save(kept)",
)


@cache
def lowered(plan: str) -> Kernel:
    return lower(match(FusionPlan.parse(plan)))


def sources(plan: str, target_name: str, turn: int) -> list[tuple[str, Source]]:
    """A source of each template that computes the plan: of one of its candidates, another one each turn."""
    target, found = parse_target(f"triton:{target_name}"), []
    try:
        kernel = lowered(plan)
    except Unsupported:  # a plan of a suite that is several kernels
        return []
    for template in TEMPLATES:
        if first_refusal(template.limits(kernel, target, "default")) is None:
            candidates = list(template.candidates(kernel, target, "default"))
            chosen = candidates[turn % len(candidates)]
            found.append((chosen.text, chosen.emit(kernel, target)))
    return found


CASES = [(plan, "sm_90", turn) for plan in ODD for turn in (0, 1)]
CASES += [(plan, "gfx942", 2) for plan in ODD]
OF_SUITES = sorted({plan for third in range(3) for plan in one_of_each(third, 3)})
CASES += [(plan, "sm_90", turn) for turn, plan in enumerate(OF_SUITES)]


@cache
def written() -> list[tuple[str, str, Source]]:
    """Every source: its plan, its template's text, and the text."""
    return [(plan, *found) for plan, target, turn in CASES for found in sources(plan, target, turn)]


def test_every_template_is_among_them() -> None:
    found = Counter(template.partition("(")[0] for _, template, _ in written())
    assert set(found) == {each.name for each in TEMPLATES}
    assert min(found.values()) >= 15


def test_no_arithmetic_and_no_mask_says_nothing() -> None:
    faults = [
        f"{fault}\n    {plan}\n    {template}"
        for plan, template, source in written()
        for fault in noise(source)
    ]
    assert not faults, "\n".join(faults[:20])


def test_each_operator_is_written_once() -> None:
    for plan, template, source in written():
        kernel = lowered(plan)
        wanted = Counter(stage.op_text for stage in (*kernel.prologue, *kernel.between, *kernel.epilogue))
        for stage in kernel.prologue if kernel.statistics else ():
            del wanted[stage.op_text]  # each pass over src has it
        parts = (
            max(kernel.parts.reads, kernel.parts.makes) if kernel.parts else 1
        )  # each is a tile of its own
        lines = Counter(line.strip() for line in source.text.splitlines())
        pieces = max(1, source.text.count("\n    element_"))  # of a row, outside of loops
        if isinstance(kernel.centre, Summary) and source.language == "gluon":  # of a tile's features
            pieces = source.text.count("\n        column_")
        for operator, times in wanted.items():
            assert lines[f"# {operator}"] <= times * parts * pieces, (
                f"{operator} in\n{plan}\n{template}\n{source.text}"
            )


def test_the_header_is_the_plan() -> None:
    for plan, template, source in written():
        first, second, *_ = source.text.splitlines()
        assert second == f"# {template}"
        if _is_cut(plan) or "bshd]" in plan:
            continue  # an axis in runs is two axes of the kernel; heads behind positions lost their names
        assert lowered(first.removeprefix("# ")).text == lowered(plan).text, plan


def _is_cut(plan: str) -> bool:
    steps = FusionPlan.parse(plan).steps
    return any(isinstance(step.op, Normalization) and step.op.split(step.src) for step in steps)


def test_lanes_of_rows_in_pieces_fit_what_is_stored() -> None:
    """A lane stores 16 bytes at a time: of f32 no more neighbours than 4, whatever src is."""
    for dtype, lane in (("bf16", 8), ("f32", 4)):
        kernel = lowered(f"bf16[70x8768] -> layer_norm(affine=False) -> cast({dtype})")
        pieces = GpuReduction(1, 2048, 1, 8, lanes=True, ahead=1)
        assert f"+ tl.arange(0, {lane})[None, :]" in pieces.emit(kernel, parse_target("triton:sm_90")).text


def test_names_are_the_plans() -> None:
    for _, template, source in written():
        names = {node.id for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.Name)}
        assert not names & {"a", "b", "c", "first", "second"}, template
        assert {"src", "dst"} <= names


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x = tl.program_id(0) % 1", "arithmetic"),
        ("x = tl.arange(0, 4) // 4", "arithmetic"),
        ("x = src + 0", "arithmetic"),
        ("x = src * 1", "arithmetic"),
        ("x = 1 % 2", "arithmetic"),
        ("x = src + -1", "arithmetic"),
        ("x = tl.arange(0, 4) < 4", "a comparison"),
        ("x = tl.program_id(0) * 4 + tl.arange(0, 4)\n    y = x[:, None] < 12", "a comparison"),
        ("x = (src < 4) & (src < 4)", "a term"),
        ("x = src < 4\n    y = x & (src < 4)", "a term"),
        ("x = src < 4\n    y = src < 4", "a mask"),
        ("x = src", "a name"),
    ],
)
def test_faults_are_found(text: str, fault: str) -> None:
    source = Source(f"def f(src):\n    {text}\n", "f", (), grid=(3, 1, 1), language="triton")
    assert [each.partition(":")[0] for each in noise(source)][:1] == [
        each for each in [next(iter(noise(source))).partition(":")[0]] if each.startswith(fault)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "x = tl.arange(0, 4) % 3",
        "x = tl.program_id(0) * 4 < 8",
        "x = src < 4\n    src = dst\n    y = src < 4",
        "x = src\n    src = x + 2",
        "for step in range(3):\n        src = src + step",
        "x = (src < 4) & (src >= 0)",
    ],
)
def test_what_means_something_is_no_fault(text: str) -> None:
    assert not list(noise(Source(f"def f(src):\n    {text}\n", "f", (), grid=(3, 1, 1), language="triton")))
