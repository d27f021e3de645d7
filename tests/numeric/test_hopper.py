"""The kernel for Hopper, run by the emulator: coordinates, barriers and epilogues against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gluon_emulator
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.kernels.emit import COUNTER_BYTES, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan
from interpreted import in_kernel_order

PLANS = (
    "f16[70x40] -> matmul(72) -> bias -> relu",
    "f16[70x40] -> matmul(72) -> elementwise('x * index(c)')",
    "bf16[200x64] -> matmul(136, transposed=True) -> bias -> gelu(approximate=tanh)",
    "f16[3x40x16] -> matmul(24, batched=True) -> bias",
    "f16[70x40] -> matmul(72) -> mul_along((0,)) -> relu",
    "f16[70x40] -> linear(72) -> bias -> save(kept) -> add -> gelu",
    "f16[70x40] -> matmul(136) -> save(one) -> add -> save(two) -> relu",
    "f16[3x20x40] -> linear(72) -> bias -> mul_along((0, 1)) -> add_along((1, 2), alpha2=-1)",
    "f16[2x16x9x7, nhwc] -> conv2d(24, kernel=1) -> bias -> relu",
    "f16[2x24x9x7, nhwc] -> conv2d(40, kernel=3, padding=1) -> bias -> batch_norm -> add -> relu",
    "f16[3x16x11x10, nhwc] -> conv2d(64, kernel=(3, 2), stride=(2, 3), padding=2, dilation=(2, 1)) -> add"
    " -> relu -> add",
    "bf16[2x64x8x8, nhwc] -> conv2d(64, kernel=3, padding=1, groups=2) -> bias -> relu",
    "f16[3x8x33, nwc] -> conv1d(16, kernel=5, padding=2, stride=2) -> bias -> leaky_relu",
    "f16[2x8x5x6x7, ndhwc] -> conv3d(16, kernel=3, padding=1) -> bias -> batch_norm(per_activation)",
    "f16[2x16x6x6, strides=1152:1:192:32] -> conv2d(16, kernel=1) -> bias -> relu",
    "f16[70x40] -> linear(144) -> glu(silu, gate=first)",
    "f16[70x41] -> matmul(72) -> bias -> relu",
    "f16[70x42] -> matmul(73) -> bias -> add -> relu",
    "bf16[70x300] -> linear(75) -> bias -> save(kept) -> add -> gelu",
    "bf16[70x40] -> matmul(74) -> elementwise('x * index(c)') -> mul_along((0,))",
    "f16[70x44] -> linear(154) -> glu(silu, gate=first)",
    "bf16[70x43] -> linear(144) -> bias -> glu(gelu, gate=first, interleaved=True)",
    "f16[3x20x13] -> linear(72) -> bias -> mul_along((0, 1)) -> add_along((1, 2), alpha2=-1)",
    "f16[3x40x15] -> matmul(25, batched=True) -> bias",
    "f16[2x9x9x7, nhwc] -> conv2d(23, kernel=3, padding=1) -> bias -> batch_norm -> add -> relu",
    "bf16[2x10x9x7, nhwc] -> conv2d(24, kernel=1, stride=2) -> bias -> relu",
    "f16[70x40, strides=44:1] -> matmul(72)",
    "f16[70x41, strides=48:1] -> matmul(72)",
    "f16[2x16x6x6, strides=1155:1:192:32] -> conv2d(16, kernel=1) -> bias -> relu",
    "f16[1x41] -> matmul(72) -> bias",
    "bf16[2x64x5x5, strides=1625:1:325:65] -> conv2d(64, kernel=3, padding=1, groups=2) -> bias -> relu",
    "bf16[200x1608] -> matmul(136) -> bias -> add -> relu",
    "bf16[200x1608] -> matmul(137) -> bias -> relu",
    "bf16[200x1608] -> linear(264) -> bias",
    "f16[330x40] -> matmul(520) -> add -> relu",
    "bf16[200x1032] -> linear(272) -> glu(silu, gate=first)",
    "f32[330x300] -> matmul(136, precision=tf32) -> bias",
    "bf16[200x64] -> linear(272) -> bias -> glu(gelu, gate=first, interleaved=True) -> mul_along((0,))",
    "f16[2x16x9x7, nhwc] -> conv2d(48, kernel=3, padding=1) -> batch_norm -> glu(axis=c) -> add -> relu",
    "f32[70x40] -> matmul(72, precision=tf32) -> bias -> relu",
    "f32[70x41] -> matmul(71, precision=tf32) -> bias -> relu",
    "f32[2x24x9x37] -> conv2d(41, kernel=3, precision=tf32) -> save(kept) -> relu",
    "f32[3x40x16] -> matmul(24, batched=True, precision=tf32) -> bias",
    "f32[2x13x9x7, nhwc] -> conv2d(40, kernel=3, padding=1, precision=tf32) -> bias -> batch_norm -> add",
    "f32[2x24x9x37] -> conv2d(41, kernel=3, precision=tf32) -> bias -> batch_norm(per_activation) -> add",
    "f32[2x3x21x18] -> conv2d(16, kernel=(3, 2), stride=(2, 3), padding=2, dilation=(2, 1), precision=tf32)",
    "f32[1x64x8x8] -> conv2d(64, kernel=1, precision=tf32) -> add -> relu",
    "f32[2x12x29x37] -> conv_transpose2d(20, kernel=4, stride=2, padding=1, precision=tf32) -> bias -> add",
    "f32[1x8x31x50] -> conv_transpose2d(12, kernel=(2, 6), stride=(2, 3), precision=tf32)"
    " -> batch_norm(per_activation)",
    "f32[2x9x8x11] -> conv_transpose2d(40, kernel=3, padding=1, precision=tf32) -> bias",
    "f32[1x55x23x9] -> conv_transpose2d(6, kernel=2, stride=2, precision=tf32) -> add"
    " -> batch_norm(per_activation)",
    "f32[2x12x23x9] -> conv_transpose2d(20, kernel=(3, 2), stride=(3, 2), precision=tf32) -> add",
    "f32[2x64x8x8] -> conv2d(64, kernel=3, padding=1, groups=2, precision=tf32) -> bias -> relu",
    "f32[3x8x33] -> conv1d(16, kernel=5, padding=2, precision=tf32) -> elementwise('x * index(c)')",
    "f32[2x8x5x6x7] -> conv3d(16, kernel=3, padding=1, precision=tf32) -> bias -> batch_norm(per_activation)",
)

OPEN = (
    "f16[*x40] -> matmul(136) -> bias -> relu",
    "f16[*x41] -> matmul(135) -> bias -> relu",
    "bf16[*x9x9x7, nhwc] -> conv2d(40, kernel=3, padding=1) -> bias -> batch_norm -> add -> relu",
    "bf16[*x24x9x7, nhwc] -> conv2d(40, kernel=3, padding=1) -> bias -> batch_norm -> add -> relu",
    "f16[*x16x5x6, nhwc] -> conv2d(16, kernel=3, padding=1, groups=2) -> batch_norm(per_activation)",
    "bf16[*x40] -> linear(400) -> bias -> glu(silu, gate=first)",
    "f32[*x6x9x17] -> conv2d(20, kernel=3, padding=1, precision=tf32) -> bias -> add",
)

SUMS = (
    "f16[330x40] -> matmul(328) -> bias -> add -> relu",
    "bf16[600x776] -> linear(96) -> bias -> relu",
    "bf16[330x72] -> linear(592) -> glu(silu, gate=first)",
    "f16[330x41] -> matmul(327) -> bias",
    "f16[4x16x9x7, nhwc] -> conv2d(192, kernel=3, padding=1) -> bias -> relu",
)

FORM = ("groups", "together", "resident", "programs", "band", "swapped", "spread", "whole_lines", "padded")


def lowered(text: str) -> Kernel:
    return lower(match(FusionPlan.parse(text)))


@pytest.fixture(scope="module")
def target() -> Target:
    """A GPU of three processors: programs have several tiles, and not all as many."""
    return replace(parse_target("triton:sm_90"), processors=3)


def choices(kernel: Kernel, target: Target) -> list[Hopper]:
    """One choice of each form that the template has for the kernel."""
    forms: dict[tuple[object, ...], Hopper] = {}
    for choice in Hopper.candidates(kernel, target, "default"):
        assert isinstance(choice, Hopper)
        forms.setdefault(
            tuple(value for name, value in choice.knobs.items() if name in FORM),
            choice,
        )
    return list(forms.values())


def data(plan: FusionPlan, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Operands by key: small integers over eight, so that sums are exact; variances above zero."""
    found = {}
    for each in plan.operands:
        values = rng.integers(-8, 9, each.shape) / 8
        found[each.key] = np.abs(values) + 0.5 if each.name == "variance" else values
    return found


def stored(values: NDArray[Any], strides: tuple[int, ...]) -> NDArray[Any]:
    """Flat memory that holds the values at those strides; NaN between them."""
    where = offsets(values.shape, strides)
    memory = np.full(int(where.max()) + 1, np.nan, np.float32)
    memory[where] = values
    return memory


def offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
    """Where each element lies."""
    where: NDArray[Any] = np.tensordot(np.array(strides), np.indices(shape), 1)
    return where


def emulated(
    plan: FusionPlan,
    choice: Hopper,
    target: Target,
    arrays: dict[str, NDArray[Any]],
    opened: Source | None = None,
) -> dict[str, NDArray[Any]]:
    """The plan's results with the kernel's order of axes, by the text of the choice, or an open one."""
    kernel = lower(match(plan))
    arrays = in_kernel_order(plan, kernel, arrays)
    source = opened.at(plan.src.shape[0]) if opened else choice.emit(kernel, target)
    made = {key: np.full(kernel.dst.span, np.nan, np.float32) for key in ("", *_saved(plan))}
    values = {each.key: each.value for each in plan.parameters}
    memories: list[Any] = []
    room = np.full(source.workspace(1) // 2, np.nan, np.float32)  # elements of two bytes
    room[: COUNTER_BYTES // 2] = 0
    for slot in source.slots:
        if slot.kind == "src":
            memories.append(stored(arrays["src"], kernel.src.element_strides))
        elif slot.kind in ("dst", "result"):
            memories.append(made[slot.key])
        elif slot.kind == "parameter":
            memories.append(values[slot.key])
        elif slot.kind == "workspace":
            memories.append(room)
        elif slot.kind == "extent":
            memories.append(gluon_emulator.Number(plan.src.shape[0]))
        elif not kernel.operand(slot.key).packed:
            memories.append(stored(arrays[slot.key], kernel.dst.element_strides))
        else:
            operand = kernel.operand(slot.key)
            packing = choice.packing(kernel, target, operand)
            packing = packing.behind(operand.given) if operand.given else packing
            packed = packing.of(arrays[slot.key])
            memories.append(np.ravel(packed).astype(np.float32))
    gluon_emulator.run(source, memories)
    assert not room[: COUNTER_BYTES // 4].any(), "counters are left zero"
    places = offsets(kernel.dst.shape, kernel.dst.element_strides)
    return {key: each[places] for key, each in made.items()}


def _saved(plan: FusionPlan) -> list[str]:
    return [each.key for each in plan.results]


@pytest.mark.parametrize("text", OPEN)
def test_one_text_serves_every_extent(text: str, target: Target) -> None:
    plan, kernel = FusionPlan.parse(text), lowered(text)
    rng = np.random.default_rng(6)
    given = data(plan.with_extents(1), rng)
    for choice, extent in zip(
        choices(kernel, target), cycle((200 if plan.src.rank == 2 else 5, 1, 3)), strict=False
    ):
        known, source = plan.with_extents(extent), choice.emit(kernel, target)
        assert source.text == choice.emit(kernel.with_extent(40961), target).text
        own = {key: value for key, value in data(known, rng).items() if value.shape != given[key].shape}
        arrays = {"src": rng.integers(-8, 9, known.src.shape) / 8, **given, **own}
        operands = {key: value for key, value in arrays.items() if key != "src"}
        want = known.reference(arrays["src"], operands).transpose(known.output.canonical_order)
        got = emulated(known, choice, target, arrays, source)[""]
        told = f"{choice.text} at {extent}"
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=told)


@pytest.mark.parametrize("text", PLANS)
def test_every_form_computes_the_plan(text: str, target: Target) -> None:
    plan = FusionPlan.parse(text)
    kernel = lowered(text)
    assert first_refusal(Hopper.limits(kernel, target, "default")) is None
    rng = np.random.default_rng(5)
    arrays = {"src": rng.integers(-8, 9, plan.src.shape) / 8, **data(plan, rng)}
    out, results = plan.evaluate(arrays["src"], {key: value for key, value in arrays.items() if key != "src"})
    for choice in choices(kernel, target):
        made = emulated(plan, choice, target, arrays)
        for key, want in {"": out, **results}.items():
            told, order = f"{choice.text} {key}", plan.output.canonical_order
            np.testing.assert_allclose(made[key], want.transpose(order), rtol=2e-5, atol=2e-5, err_msg=told)


@pytest.mark.parametrize("text", SUMS)
def test_tiles_of_several_sums_compute_the_plan(text: str, target: Target) -> None:
    plan, kernel = FusionPlan.parse(text), lowered(text)
    rng = np.random.default_rng(7)
    arrays = {"src": rng.integers(-8, 9, plan.src.shape) / 8, **data(plan, rng)}
    out, _ = plan.evaluate(arrays["src"], {key: value for key, value in arrays.items() if key != "src"})
    found = {}
    for choice in Hopper.candidates(kernel, target, "default"):
        assert isinstance(choice, Hopper)
        schedule = choice.schedule(kernel)
        if schedule.pieces > 1 or schedule.weight_pieces > 1:
            found[choice.box, choice.columns, choice.groups, choice.swapped, choice.spread] = choice
    for choice in [each for each in found.values() if each.spread] or found.values():
        got = emulated(plan, choice, target, arrays)[""]
        np.testing.assert_allclose(got, out, rtol=2e-5, atol=2e-5, err_msg=choice.text)


def test_factors_are_not_rounded_where_accuracy_is_strict(target: Target) -> None:
    kernel = lowered("f32[70x40] -> matmul(72, precision=tf32)")
    refusal = first_refusal(Hopper.limits(kernel, target, "strict"))
    assert refusal is not None
    assert refusal.reason is Reason.ACCURACY
