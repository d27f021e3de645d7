"""Cross-entropy and its gradient: torch's numbers, and both backends' kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.execution.stages import decide
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret_all

TENSORS = ("3x5", "9x77", "2x6x7", "2x6x7, nwc", "2x5x3x7, nhwc", "2x5x3x7", "1x3x3x2x5")
OPTIONS = ("", "label_smoothing=0.25", "ignore_index=2", "z_loss=0.125", "label_smoothing=1, ignore_index=1")


def torch_made(plan: FusionPlan, src: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The losses by torch; it has no z-loss."""
    options: dict[str, Any] = plan.ops[0].attributes()
    kept = {name: options[name] for name in ("label_smoothing", "ignore_index")}
    loss = cross_entropy(src, target.long(), reduction="none", **kept)
    squared = torch.logsumexp(src, 1).square() * (target != options["ignore_index"])
    return loss + options["z_loss"] * squared


@pytest.mark.part(2)
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_and_gradients_are_torchs(tensor: str, options: str) -> None:
    plan = FusionPlan.parse(f"f64[{tensor}] -> cross_entropy({options})")
    arrays = random_arrays(plan, 1)
    src, target = torch.from_numpy(arrays["src"]).requires_grad_(), torch.from_numpy(arrays["target"])
    want = torch_made(plan, src, target)
    loss, results = evaluated(plan, arrays)
    np.testing.assert_allclose(loss, want.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(results["lse"], torch.logsumexp(src, 1).detach().numpy())
    compiled = forced(plan, Reduction, narrowed(32))
    assert_close(compiled, arrays)
    gradient = np.random.default_rng(2).standard_normal(want.shape)
    want.backward(torch.from_numpy(gradient))
    back = FusionPlan.parse(f"f64[{tensor}] -> cross_entropy_backward({options})")
    given = {**arrays, "lse": results["lse"], "gradient": gradient}
    assert src.grad is not None
    np.testing.assert_allclose(evaluated(back, given)[0], src.grad.numpy(), atol=1e-12)
    made = forced(back, Reduction, narrowed(32))
    np.testing.assert_allclose(made(**given), src.grad.numpy(), atol=1e-12)
    out = np.copy(given["src"])  # laid out as the logits
    out = np.lib.stride_tricks.as_strided(out, out.shape, given["src"].strides)
    out[...] = given["src"]
    assert made(**{**given, "src": out}, out=out) is out
    np.testing.assert_array_equal(out, made(**given))


@pytest.mark.part(2)
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_loss_and_its_gradient_in_one_pass_are_torchs(tensor: str, options: str) -> None:
    plan = FusionPlan.parse(f"f64[{tensor}] -> cross_entropy_gradient({options})")
    arrays = random_arrays(plan, 1)
    src, target = torch.from_numpy(arrays["src"]).requires_grad_(), torch.from_numpy(arrays["target"])
    want = torch_made(plan, src, target)
    want.sum().backward()
    assert src.grad is not None
    gradient, results = evaluated(plan, arrays)
    np.testing.assert_allclose(gradient, src.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(results["loss"], want.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(results["lse"], torch.logsumexp(src, 1).detach().numpy())
    made = forced(plan, Reduction, narrowed(32))
    assert_close(made, arrays)
    out = torch.from_numpy(arrays["src"]).clone().numpy()
    assert made(out, target=arrays["target"], out=out).out is out
    np.testing.assert_array_equal(out, made(**arrays).out)


PLANS = (
    "[9x77] -> cross_entropy",
    "[5x301] -> relu -> cross_entropy(label_smoothing=0.1, z_loss=0.01)",
    "[2x5x3x7, nhwc] -> cross_entropy(ignore_index=1) -> scale",
    "[2x3x70, bsc] -> cross_entropy",
    "[9x77] -> cross_entropy_backward(label_smoothing=0.1, z_loss=0.01)",
    "[2x5x3x7, nhwc] -> cross_entropy_backward(ignore_index=1)",
    "[9x77] -> cross_entropy(index_dtype=i64)",
    "[9x77] -> cross_entropy_backward(index_dtype=i64)",
    "[9x77] -> cross_entropy_gradient(label_smoothing=0.1, z_loss=0.01, index_dtype=i64)",
    "[2x5x3x7, nhwc] -> cross_entropy_gradient(ignore_index=1)",
)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_and_dtype(dtype: str, plan: str) -> None:
    made = FusionPlan.parse(dtype + plan)
    for width in (16, 64):
        assert_close(forced(made, Reduction, narrowed(width)), random_arrays(made, 5), slack=64)


def test_no_target_of_64_bits_is_taken_for_its_lower_bits() -> None:
    compiled = forced(FusionPlan.parse("f32[5x7] -> cross_entropy(index_dtype=i64)"), Reduction, narrowed(32))
    target = np.array([3, -100, 2**32, 2**32 - 100, 3 - 2**32])
    loss = compiled(np.zeros((5, 7), np.float32), target=target).out
    np.testing.assert_allclose(loss, [np.log(7), 0, np.nan, np.nan, np.nan], rtol=1e-6)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_row_in_parts(parts: int) -> None:
    for chain in (
        "cross_entropy(label_smoothing=0.1)",
        "cross_entropy_backward",
        "cross_entropy_gradient",
    ):
        made = FusionPlan.parse(f"f32[3x9001] -> {chain}")
        compiled = forced(made, Reduction, narrowed(32, threads=2), Reduction(1, parts))
        assert_close(compiled, random_arrays(made, 5), slack=64)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("plan", [f"bf16{PLANS[0]}", *(f"f32{plan}" for plan in PLANS[1:])])
def test_a_gpus_text_in_the_interpreter(plan: str, place: int) -> None:
    """The best and the worst candidate."""
    records = decide(plan, "triton:sm_90")
    candidates = list(GpuReduction.candidates(records.kernel, records.target, "default"))
    assert_interpreted(plan, candidates[place], slack=64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "template"),
    [
        ("f16[5x301] -> cross_entropy(index_dtype=i64, z_loss=0.5)", GpuReduction(1, 64, 1, 4, lanes=True)),
        ("bf16[3x100] -> bias -> relu -> cross_entropy(label_smoothing=0.25)", GpuReduction(1, 32, 2, 4)),
        ("f16[137x64] -> bias -> cross_entropy", GpuReduction(1, 64, 1, 1, resident=1, ahead=3)),
        ("f32[2x5x3x7, nhwc] -> cross_entropy_gradient", GpuReduction(4, 8, 1, 4)),
        ("f32[3x100] -> cross_entropy_backward", GpuReduction(1, 32, 4, 4)),
        ("bf16[7x100] -> bias -> cross_entropy_backward", GpuReduction(2, 64, 2, 4)),
    ],
)
def test_a_gpus_cuts_in_the_interpreter(plan: str, template: GpuReduction) -> None:
    assert_interpreted(plan, template, slack=64)


def test_a_gpu_loads_the_targets_logit() -> None:
    """No sum of a row has it, where the row is one run of classes; a gradient alone has no groups to meet."""
    for plan in ("bf16[64x512] -> cross_entropy", "bf16[8x9x30] -> cross_entropy"):
        text = decide(plan, "triton:sm_90").source.text
        assert "picked_0 = tl.minimum(" in text
        assert text.count("tl.sum(") == 1  # of the exponentials
    records = decide("bf16[64x9000] -> cross_entropy_backward", "triton:sm_90")
    for candidate in records.choice.candidates:
        assert isinstance(candidate, GpuReduction)
        assert candidate.resident or candidate.elements * candidate.programs >= 9000
        assert not candidate.emit(records.kernel, records.target).workspace(1)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("template", [GpuReduction(1, 64, 1, 4), GpuReduction(2, 16, 1, 4, lanes=True)])
def test_a_gpus_targets_that_are_no_class(dtype: str, template: GpuReduction) -> None:
    plan = FusionPlan.parse(f"{dtype}[8x40] -> cross_entropy(index_dtype=i64)")
    kernel, target = lower(match(plan)), parse_target("triton:sm_90")
    src = np.random.default_rng(1).standard_normal((8, 40)).astype(dtype_of(dtype).array)
    places = np.array([-100, -1, 40, 2**40, 3, 4, 5, 6])
    src[4, 3], src[5, 9], src[6, 7], src[7] = -np.inf, np.inf, np.nan, -np.inf
    loss, results = interpret_all(template, kernel, target, {"src": src, "target": places})
    logits = torch.from_numpy(src.astype(np.float64))
    want = cross_entropy(logits[4:], torch.from_numpy(places[4:]), reduction="none").numpy()
    assert loss[0] == 0
    assert np.isnan(loss[1:4]).all()
    np.testing.assert_allclose(loss[4:].ravel(), want, rtol=1e-5)
    np.testing.assert_allclose(results["lse"].ravel(), torch.logsumexp(logits, 1).numpy(), rtol=1e-3)


def test_targets_that_are_no_class_and_logits_that_are_no_numbers() -> None:
    """Ignored places give 0, other indices NaN; rows of infinities are torch's."""
    src = np.random.default_rng(1).standard_normal((7, 40)).astype(np.float32)
    target = np.array([-100, -1, 40, 3, 4, 5, 6], np.int32)
    src[3, 3], src[4, 9], src[5, 7], src[6] = -np.inf, np.inf, np.nan, -np.inf
    compiled = forced("f32[7x40] -> cross_entropy", Reduction, narrowed(32))
    loss = compiled(src, target=target).out
    want = cross_entropy(torch.from_numpy(src[3:]), torch.from_numpy(target[3:]).long(), reduction="none")
    assert loss[0] == 0
    assert np.isnan(loss[1:3]).all()
    np.testing.assert_allclose(loss[3:], want.numpy(), rtol=1e-6)


def test_large_logits_keep_their_digits() -> None:
    """The error is at most 1.5 times torch's."""
    plan = FusionPlan.parse("f32[64x1000] -> cross_entropy")
    compiled = forced(plan, Reduction, narrowed(32))
    for inputs in ("normal", "large mean", "large range"):
        arrays = random_arrays(plan, 3, inputs=inputs)
        want = evaluated(plan, arrays)[0]
        target = torch.from_numpy(arrays["target"])
        theirs = torch_made(plan, torch.from_numpy(arrays["src"]), target).numpy() - want
        ours = compiled(**arrays).out - want
        assert np.square(ours).sum() <= 1.5**2 * np.square(theirs).sum()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[5] -> cross_entropy", "reads classes and places"),
        ("f32[3x5] -> cross_entropy(label_smoothing=2)", "label_smoothing"),
        ("f32[3x5] -> cross_entropy(z_loss=-1)", "z_loss"),
        ("f32[3x5] -> cross_entropy(ignore_index=0.5)", "must be an index"),
        ("f16[1x16777217] -> cross_entropy", "at most 2\\^24 classes"),
    ],
)
def test_losses_that_are_none(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)


def test_other_plans_do_not_overwrite_their_input() -> None:
    src = np.ones((3, 5), np.float32)
    with pytest.raises(ArgumentError, match="overlaps"):
        forced("f32[3x5] -> softmax", Reduction, narrowed(32))(src, out=src)
