"""The gradients of whole plans: finite differences in float64, torch's autograd, compiled plans, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fuseplan.backward.value import Backward
from fuseplan.errors import ArgumentError, PlanError, Unsupported
from fuseplan.measure.data import random_arrays
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

Arrays = dict[str, NDArray[Any]]

# Each kind of derivative and of contraction; what each plan saves and computes again is counted below.
PLANS = (
    "f64[8x16] -> linear(12) -> bias -> gelu",
    "f64[2x5x12] -> linear(7) -> bias -> gelu -> scale -> add",
    "f64[8x16] -> matmul(12, transposed=True) -> tanh(0.5, beta=2)",
    "f64[8x16] -> matmul(12) -> bias",
    "f64[3x8x6] -> matmul(5, batched=True) -> bias",
    "f64[3x8x6] -> matmul(5, batched=True, transposed=True) -> gelu",
    "f64[8x16] -> gelu -> scale -> linear(12) -> bias -> gelu",
    "f64[2x5x3x4, nhwc] -> bias -> gelu -> scale -> silu -> add(alpha1=0.5, alpha2=-2)",
    "f64[2x5x3x4] -> batch_norm -> prelu",
    "f64[2x5x3x4, nhwc] -> prelu(shared=True) -> mul -> batch_norm(per_activation)",
    "f64[2x6x7x8] -> conv2d(4, kernel=3, padding=1) -> bias -> silu",
    "f64[2x6x7x8, nhwc] -> conv2d(4, kernel=(3, 2), padding=((0, 1), (1, 0)), dilation=2, groups=2) -> add",
    "f64[2x6x9] -> conv1d(12, kernel=3, padding=1, groups=6) -> bias",
    "f64[2x6x9x9] -> conv2d(4, kernel=3, stride=2, padding=1) -> bias -> relu",
    "f64[2x6x8x7, nhwc] -> gelu -> conv2d(4, kernel=(3, 4), stride=(2, 3), padding=((0, 1), 2), groups=2)",
    "f64[2x6x8x9, nhwc] -> bias -> conv2d(6, kernel=3, stride=(1, 2), padding=1, dilation=(2, 1), groups=6)",
    "f64[2x6x7x8] -> conv2d(4, kernel=1, stride=2)",
    "f64[2x6x9x9] -> conv2d(4, kernel=3, stride=2, dilation=2)",
    "f64[2x6x9x8] -> conv2d(4, kernel=3, padding=3)",
    "f64[1x16x9x8] -> conv2d(4, kernel=3, stride=(2, 3), padding=((1, 0), 2)) -> bias",
    "f64[2x4x11] -> conv1d(6, kernel=2, stride=3)",
    "f64[1x4x5x3x7, ndhwc] -> conv3d(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding=same, groups=2)",
    "f64[2x4x3x4x5] -> conv3d(6, kernel=(1, 3, 2), padding=same, groups=2) -> tanh",
    "f64[2x6x5x4] -> conv_transpose2d(4, kernel=4, stride=2, padding=1) -> bias -> silu",
    "f64[2x6x4x5, nhwc] -> gelu -> conv_transpose2d(4, kernel=3, stride=(2, 3), padding=((0, 1), 2), "
    "dilation=(1, 2), groups=2, output_padding=(1, 2)) -> add",
    "f64[1x4x2x3x3, ndhwc] -> conv_transpose3d(6, kernel=(1, 3, 2), stride=(1, 2, 3), groups=2)",
    "f64[8x16] -> add -> save(y) -> gelu -> add(other=y)",
    "f64[8x16] -> save(y) -> sigmoid -> mul(other=y)",
    "f64[2x3x9] -> add -> save(y) -> layer_norm -> gelu",
    "f64[4x9] -> layer_norm(affine=False) -> bias",
    "f64[2x3x9] -> rms_norm -> add",
    "f64[4x9] -> bias -> softmax -> scale",
    "f64[2x6x5x4, nhwc] -> scale -> group_norm(3) -> gelu -> add",
    "f64[2x6x9] -> instance_norm -> silu",
    "f64[2x5x3x4, nhwc] -> log_softmax(hw)",
    "f64[5x9] -> linear(14) -> bias -> glu(silu, gate=first)",
    "f64[3x8] -> gelu -> glu(gelu, interleaved=True) -> add",
    "f64[2x6x3x5, nhwc] -> scale -> glu(axis=c) -> bias",
    "f64[4x9] -> bias -> save(y) -> gelu -> add(other=y) -> linear(5) -> gelu -> linear(3)",
    "f64[2x4x5x8, bhsd] -> attention -> tanh",
    "f64[2x4x5x8, bshd of bhsd] -> attention(keys=7, key_heads=2, features=3, scale=0.5)",
    "f64[2x4x5x8, bshd of bhsd] -> relu -> attention(is_causal=True, window=3, softcap=1.5) -> bias",
    "f64[2x4x5x8, bhsd] -> attention(score='x * tanh(x + index(h) - index(t))')",
    "f64[3x9] -> bias -> cumsum -> gelu -> scale",
    "f64[2x5x3x4, nhwc] -> mul -> cumsum(2, exclusive=True, reverse=True) -> save(y) -> tanh -> mul(other=y)",
    "f64[2x5x3x4, nhwc] -> batch_norm_training -> relu",
    "f64[4x9] -> gelu -> batch_norm_training(saved=False)",
    "f64[2x4x5x8, bhsd] -> attention(key_heads=2, key_strides=(99, 8, 16, 1), value_strides=(320, 8, 64, 1))",
)


def drawn(made: Backward, seed: int = 0) -> Arrays:
    """Random inputs of a graph of gradients; variances above 0."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(each.shape or ()) for name, each in made.graph.inputs.items()}
    return {name: np.abs(each) + 0.5 if "variance" in name else each for name, each in arrays.items()}


def assert_gradients(plan: FusionPlan, made: Backward, results: tuple[str, ...] = ()) -> None:
    """The gradients, along a random direction each, against central differences of the plan's meaning."""
    arrays = drawn(made)
    rng = np.random.default_rng(1)

    def loss(at: Arrays) -> float:
        out, saved = plan.evaluate(at["src"], {each.key: at[each.key] for each in plan.operands})
        return float(
            (out * at["grad"]).sum() + sum((saved[key] * at[f"grad_{key}"]).sum() for key in results)
        )

    for name, got in made.evaluate(arrays).items():
        assert got.shape == arrays[name].shape, name
        along, step = rng.standard_normal(got.shape), 1e-5
        up, down = (loss({**arrays, name: arrays[name] + sign * step * along}) for sign in (1, -1))
        terms = float(np.linalg.norm(got) * np.linalg.norm(along))
        assert abs((up - down) / (2 * step) - (got * along).sum()) <= 1e-7 * max(terms, 1.0), name


@pytest.mark.parametrize("text", PLANS)
def test_gradients_are_those_of_finite_differences(text: str) -> None:
    plan = FusionPlan.parse(text)
    made = plan.backward()
    assert list(made.gradients) == ["src", *(each.key for each in plan.operands)]
    assert_gradients(plan, made)
    assert Backward.parse(str(made)) == made


def test_a_result_has_a_gradient_too() -> None:
    plan = FusionPlan.parse("f64[8x16] -> add -> save(y) -> gelu -> add(other=y)")
    assert_gradients(plan, plan.backward(results=("y",)), ("y",))


CHAINS = st.lists(
    st.sampled_from(
        (
            "bias",
            "scale",
            "add(alpha2=0.5)",
            "mul",
            "gelu",
            "tanh",
            "softplus",
            "silu",
            "prelu",
            "linear(5)",
            "layer_norm",
            "softmax",
        )
    ),
    min_size=1,
    max_size=6,
).filter(lambda ops: sum(op in ("linear(5)", "layer_norm", "softmax") for op in ops) < 2)


@settings(max_examples=12, deadline=None)
@given(CHAINS)
def test_any_chain_has_the_gradients_of_finite_differences(ops: list[str]) -> None:
    plan = FusionPlan.parse(" -> ".join(["f64[3x5]", *ops]))
    made = plan.backward()
    assert_gradients(plan, made)
    assert Backward.parse(str(made)) == made


def run(made: Backward, arrays: Arrays) -> tuple[Arrays, Arrays]:
    """The gradients of a compiled pass, twice with equal bits, and the gradient of the output."""
    compiled = made.compile("cpu")
    outcome = compiled.forward(**arrays)
    named = dict(zip(outcome._fields, outcome, strict=True)) if made.forward.results else {"out": outcome}
    grad = np.empty_like(named["out"])
    grad[...] = np.random.default_rng(2).standard_normal(grad.shape)
    held = {name: each for name, each in (arrays | named).items() if name in compiled.reads}
    first, second = compiled(grad, **held), compiled(grad, **held)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    return first._asdict(), {"grad": grad}


@pytest.mark.parametrize(
    "text",
    [PLANS[each].replace("f64", "f32") for each in (1, 5, 8, *range(11, 18), 22, *range(24, 32), 33, 34, 36)],
)
def test_compiled_gradients_are_those_of_float64(text: str) -> None:
    made = FusionPlan.parse(text).backward()
    arrays = random_arrays(made.forward, 0)
    got, grad = run(made, arrays)
    for name, want in made.evaluate({**arrays, **grad}).items():
        assert np.linalg.norm(got[name] - want) <= 2e-6 * np.linalg.norm(want), name


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_strided_convolution_has_torchs_gradients(layout: torch.memory_format) -> None:
    names = "nhwc" if layout == torch.channels_last else "nchw"
    made = FusionPlan.parse(
        f"f32[2x6x9x8, {names}] -> conv2d(4, kernel=3, stride=2, padding=1) -> relu"
    ).backward()
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 9, 8, generator=rng).to(memory_format=layout).requires_grad_()
    weight = torch.randn(4, 6, 3, 3, generator=rng).requires_grad_()
    out = torch.nn.functional.conv2d(x, weight, stride=2, padding=1).relu()
    grad = torch.randn(out.shape, generator=rng).to(memory_format=layout)
    out.backward(grad)
    compiled = made.compile("cpu")
    with torch.no_grad():
        held = compiled.forward(x, weight=weight)
        got = compiled(grad, src=x, weight=weight, relu_input=held.relu_input)
    torch.testing.assert_close(got.src, x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.weight, weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "text", ["f32[6x9] -> bias -> cross_entropy(0.25)", "f32[2x5x3x4, nhwc] -> gelu -> cross_entropy"]
)
def test_a_loss_has_torchs_gradients(text: str) -> None:
    plan = FusionPlan.parse(text)
    made = plan.backward()
    arrays = random_arrays(made.forward, 0)
    got, grad = run(made, arrays)
    leaves = {name: torch.from_numpy(arrays[name].copy()).requires_grad_() for name in made.gradients}
    front = leaves["src"] + leaves["bias"] if "bias" in leaves else torch.nn.functional.gelu(leaves["src"])
    smoothing, target = (0.25 if "bias" in leaves else 0), torch.from_numpy(arrays["target"]).long()
    loss = torch.nn.functional.cross_entropy(front, target, reduction="none", label_smoothing=smoothing)
    loss.backward(torch.from_numpy(grad["grad"]))
    for name, each in leaves.items():
        np.testing.assert_allclose(got[name], each.grad, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_loss_of_narrow_logits_reads_its_gradient_in_f32() -> None:
    made = FusionPlan.parse("f16[6x9] -> cross_entropy").backward()
    assert [str(plan) for plan in made.plans] == [
        "f16[6, b] -> cast(f32)",
        "f16[6x9] -> cross_entropy_backward",
    ]
    arrays = random_arrays(made.forward, 0)
    got, grad = run(made, arrays)
    logits = torch.from_numpy(arrays["src"].astype(np.float32)).requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(arrays["target"]).long(), reduction="none"
    )
    loss.backward(torch.from_numpy(grad["grad"].astype(np.float32)))
    np.testing.assert_allclose(got["src"], logits.grad, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "options"),
    [("key_heads=2, keys=7", {"enable_gqa": True}), ("is_causal=True, key_heads=2", {"is_causal": True}),
     ("keys=7, key_heads=2, bias_axes=ht", {"enable_gqa": True})],
)  # fmt: skip
def test_attention_has_torchs_gradients(fields: str, options: dict[str, Any]) -> None:
    made = FusionPlan.parse(f"f32[2x4x5x8, bhsd] -> attention({fields})").backward(("src", "key", "value"))
    arrays = random_arrays(made.forward, 0)
    got, grad = run(made, arrays)
    leaves = {name: torch.from_numpy(arrays[name]).double().requires_grad_() for name in made.gradients}
    bias = torch.from_numpy(arrays["bias"]).double()[None, :, None] if "bias" in arrays else None
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves.values(), attn_mask=bias, **{"enable_gqa": True, **options}
    )
    out.backward(torch.from_numpy(grad["grad"]).double())
    for name, leaf in leaves.items():
        np.testing.assert_allclose(got[name], leaf.grad, rtol=1e-4, atol=1e-6, err_msg=name)


def test_no_plan_of_attention_has_scores_in_memory() -> None:
    """All values together are a few times as large as src; scores were 64 times as large."""
    plan = FusionPlan.parse("f32[1x2x1024x16, bhsd] -> attention(is_causal=True)")
    graph = plan.backward().graph
    assert max(each.nbytes for each in graph.types.values()) == plan.src.nbytes
    assert sum(each.nbytes for each in graph.types.values()) < 10 * plan.src.nbytes


def test_gradients_are_torchs() -> None:
    made = FusionPlan.parse("f32[8x16] -> linear(12) -> bias -> gelu").backward()
    arrays = random_arrays(made.forward, 0)
    got, grad = run(made, arrays)
    leaves = {name: torch.from_numpy(each.copy()).requires_grad_() for name, each in arrays.items()}
    torch.nn.functional.gelu(torch.nn.functional.linear(*leaves.values())).backward(
        torch.from_numpy(grad["grad"])
    )
    for name, each in leaves.items():
        np.testing.assert_allclose(got[name], each.grad, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("text", "kernels", "saved", "recomputed"),
    [
        ("f32[8x16] -> linear(12) -> bias -> gelu", 3, {"gelu_input": 384}, {}),
        ("f32[8x16] -> linear(12) -> bias -> gelu -> scale", 4, {"gelu_input": 384}, {"gelu": 384}),
        ("f32[8x16] -> gelu -> linear(12) -> bias", 3, {}, {"gelu": 512}),
        ("f32[8x16] -> bias -> scale", 2, {"scale_input": 512}, {}),
        ("f32[8x16] -> layer_norm", 1, {}, {}),
        ("bf16[8x16] -> save(sum) -> rms_norm -> linear(12)", 4, {"sum": 256}, {"rms_norm": 256}),
        ("f32[8x16] -> linear(12) -> glu(silu)", 4, {}, {"linear": 384}),
        ("f32[8x16] -> glu -> linear(3)", 4, {}, {"glu": 256}),
        ("f32[2x4x5x8, bhsd] -> attention", 3, {"lse": 160}, {}),
        ("f32[1x4x999x8, bhsd] -> attention(is_causal=True)", 3, {"lse": 4 * 4 * 999}, {}),
        ("bf16[2x4x5x8, bhsd] -> attention -> bias", 4, {"lse": 160, "bias_input": 640}, {}),
        ("f32[8x16] -> batch_norm_training", 1, {"saved_mean": 64, "saved_inverse_variance": 64}, {}),
        ("bf16[8x16] -> add -> softmax -> gelu", 1, {"gelu_input": 256}, {}),
    ],
)
def test_values_are_saved_or_computed_again(
    text: str, kernels: int, saved: dict[str, int], recomputed: dict[str, int]
) -> None:
    made = FusionPlan.parse(text).backward()
    assert len(made.plans) == kernels
    assert {each.name: each.nbytes for each in made.saved} == saved
    assert {each.name: each.nbytes for each in made.recomputed} == recomputed


def test_rotary_turns_back() -> None:
    plan = FusionPlan.parse("f64[2x3x5x8, bhsd] -> rotary")
    made = plan.backward(wrt=("src",))
    assert_gradients(plan, made)
    with pytest.raises(Unsupported, match="cos and sin"):
        plan.backward()


def test_gradients_that_are_not_wanted_are_not_computed() -> None:
    plan = FusionPlan.parse("f32[8x16] -> linear(12) -> bias -> gelu")
    (only,) = plan.backward(wrt=("src",)).plans
    assert str(only) == "f32[8x12] -> activation_backward(gelu) -> matmul(16)"
    assert plan.backward(wrt=("bias",)).plans[0].src.shape == (8, 12)


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("f32[2x6x9x9] -> bias -> max_pool2d(3)", 1),
        ("f32[2x6x4x4] -> conv_transpose2d(4, kernel=2, stride=2, dilation=3, output_padding=2)", 0),
        ("f32[8x16] -> bias -> cast(i8)", 1),
        ("f32[2x4x5x8, bhsd] -> relu -> attention(bias_axes=ht)", 1),
        ("f32[2x4x5x8, bhsd] -> attention(is_causal=True, nan_unseen=True)", 0),
        ("f32[2x4x5x8, bhsd] -> attention(rotary=8)", 0),
        ('f32[8x16] -> bias -> elementwise("round(x)")', 1),
    ],
)
def test_refusals_name_the_operator(text: str, operator: int) -> None:
    with pytest.raises(Unsupported) as error:
        FusionPlan.parse(text).backward()
    (refusal,) = error.value.refusals
    assert (refusal.reason, refusal.operator) == (Reason.NO_GRADIENT, operator)
    assert "^" in str(error.value)


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("f32[8x16] -> bias", {"wrt": ("biass",)}, "no src or operand 'biass'"),
        ("f32[8x16] -> bias", {"wrt": ()}, "nothing to take the gradient of"),
        ("f32[8x16] -> bias", {"results": ("y",)}, "no saved value 'y'"),
        ("f32[*x16] -> bias", {}, "known extents"),
        ("f32[8x16, strides=32:1] -> bias", {}, "without gaps"),
    ],
)
def test_mistakes_are_told(text: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        FusionPlan.parse(text).backward(**arguments)


def test_a_call_names_what_is_missing() -> None:
    compiled = FusionPlan.parse("f32[8x16] -> scale").backward().compile("cpu")
    grad = np.ones((8, 16), np.float32)
    with pytest.raises(ArgumentError, match="`src` is missing"):
        compiled(grad, scale=np.ones(16, np.float32))
    with pytest.raises(ArgumentError, match="`bias` is read by no gradient"):
        compiled(grad, src=grad, scale=np.ones(16, np.float32), bias=grad)
    with pytest.raises(ArgumentError, match=r"got f32\[4x16\](.|\n)*where src is grad"):
        compiled(grad[:4], src=grad, scale=np.ones(16, np.float32))


def test_a_text_that_is_no_backward_is_refused() -> None:
    with pytest.raises(PlanError, match="no graph of gradients"):
        Backward.parse("input x: f32[1x4]\ny = relu(x)\noutput y\n")


def test_the_gradient_of_a_loss_reads_targets_of_the_losss_dtype() -> None:
    made = FusionPlan.parse("f32[6x9] -> cross_entropy(index_dtype=i64)").backward()
    assert "cross_entropy_backward(index_dtype=i64)" in str(made)
