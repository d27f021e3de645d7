"""Training operators against torch in float64, and against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fuseplan.errors import PlanError
from fuseplan.op import Elementwise
from fuseplan.ops import activation
from fuseplan.ops.activation import Identity
from fuseplan.ops.affine import Bias, Prelu
from fuseplan.ops.conv import Conv2d
from fuseplan.ops.expression import Expression
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plans.plan import FusionPlan
from torch_activations import CASES, Torch

Array = NDArray[np.float64]

SHAPES = ((6, 5), (4, 3, 7), (3, 4, 5, 2), (2, 3, 2, 4, 3))
MODES = ("spatial", "per_activation")
BEHIND = (
    activation.Identity(),
    activation.Relu(),
    activation.LeakyRelu(-0.4),
    activation.Elu(0.3),
    activation.Tanh(0.5, -1.7),
    activation.Softplus(),
    activation.Silu(),
    activation.Gelu(),
)
# Torch's gradient of `where` is NaN where the other branch's is: powers are compared elsewhere.
DIFFERENTIABLE = [(op, function) for op, function in CASES if not isinstance(op, activation.Power)]


def tensor(array: Array) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float64)


def f64(shape: tuple[int, ...]) -> str:
    return f"f64[{'x'.join(map(str, shape))}]"


def drawn(shape: tuple[int, ...], mode: str, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """x, dy, scale and shift."""
    generator = np.random.default_rng(seed)
    vector = shape[1:2] if mode == "spatial" else shape[1:]
    return tuple(generator.standard_normal(each) for each in (shape, shape, vector, vector))  # type: ignore[return-value]


def torch_training(
    x: Any, scale: Any, shift: Any, mode: str, running: Any = (None, None), momentum: float = 0.1
) -> Any:
    """Torch's batch norm; per activation, every activation is a channel of its own."""
    if mode == "spatial":
        return torch.nn.functional.batch_norm(x, *running, scale, shift, True, momentum, 1e-5)
    flat = [None if each is None else each.view(-1) for each in (*running, scale, shift)]
    return torch.nn.functional.batch_norm(x.reshape(len(x), -1), *flat, True, momentum, 1e-5).reshape(x.shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_training_is_torchs(shape: tuple[int, ...], mode: str) -> None:
    x, _, scale, shift = drawn(shape, mode)
    generator = np.random.default_rng(1)
    old = {
        "running_mean": generator.standard_normal(scale.shape),
        "running_variance": generator.random(scale.shape),
    }
    plan = FusionPlan.parse(
        f"f64[{'x'.join(map(str, shape))}] -> batch_norm_training({mode}, running=True, momentum=0.3)"
    )
    got, results = plan.evaluate(x, {"scale": scale, "shift": shift, **old})
    running = [tensor(each) for each in old.values()]
    want = torch_training(tensor(x), tensor(scale), tensor(shift), mode, running, 0.3)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    for key, after in zip(old, running, strict=True):
        np.testing.assert_allclose(results[key], after, rtol=1e-12)
    axes = (0, *range(2, len(shape))) if mode == "spatial" else (0,)
    np.testing.assert_allclose(results["saved_mean"], x.mean(axis=axes), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(
        results["saved_inverse_variance"], 1 / np.sqrt(x.var(axis=axes) + 1e-5), rtol=1e-12
    )


@pytest.mark.parametrize("statistics", ["saved", "recomputed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", BEHIND, ids=str)
def test_backward_is_torchs(op: Elementwise, mode: str, statistics: str) -> None:
    function = next(function for known, function in CASES if known == op)
    shape = (4, 3, 5, 2)
    x, dy, scale, shift = drawn(shape, mode, seed=2)
    given = at, by, to = [tensor(each).requires_grad_() for each in (x, scale, shift)]
    function(torch_training(at, by, to, mode)).backward(tensor(dy))
    got, results = backward(op, mode, statistics, x, dy, scale, shift)
    for mine, theirs in zip((got, results["scale_gradient"], results["shift_gradient"]), given, strict=True):
        np.testing.assert_allclose(mine, theirs.grad, rtol=1e-9, atol=1e-10)


def backward(
    op: Elementwise, mode: str, statistics: str, x: Array, dy: Array, scale: Array, shift: Array
) -> tuple[Array, dict[str, Array]]:
    made = BatchNormBackward(op, mode, statistics)
    src = f64(x.shape)
    operands = {"input": x, "scale": scale, "shift": shift}
    if op == Identity():
        del operands["shift"]
    if statistics == "saved":
        _, saved = FusionPlan(src, BatchNormTraining(mode)).evaluate(x, {"scale": scale, "shift": shift})
        operands |= {"mean": saved["saved_mean"], "inverse_variance": saved["saved_inverse_variance"]}
    return FusionPlan(src, made).evaluate(dy, operands)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_the_finite_difference_of_forward(shape: tuple[int, ...], mode: str) -> None:
    """Of loss = sum(y * w), with y = silu(batch_norm_training(x)): dy is w."""
    x, w, scale, shift = drawn(shape, mode, seed=3)
    plan = FusionPlan(f64(shape), BatchNormTraining(mode), activation.Silu())

    def loss(x: Array, scale: Array, shift: Array) -> float:
        return float((plan.reference(x, {"scale": scale, "shift": shift}) * w).sum())

    dx, results = backward(activation.Silu(), mode, "recomputed", x, w, scale, shift)
    inputs = {"x": x, "scale": scale, "shift": shift}
    gradients = {"x": dx, "scale": results["scale_gradient"], "shift": results["shift_gradient"]}
    for name, gradient in gradients.items():
        for place in range(0, gradient.size, max(1, gradient.size // 7)):
            step = np.zeros(gradient.shape)
            step.flat[place] = 1e-5
            more, less = (loss(**{**inputs, name: inputs[name] + sign * step}) for sign in (1, -1))
            assert (more - less) / 2e-5 == pytest.approx(gradient.flat[place], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("op", "function"), DIFFERENTIABLE, ids=[str(op) for op, _ in DIFFERENTIABLE])
def test_activation_backward_is_torchs(op: Elementwise, function: Torch) -> None:
    generator = np.random.default_rng(4)
    x, dy = generator.uniform(-4, 4, (40, 25)), generator.standard_normal((40, 25))
    at = tensor(x).requires_grad_()
    function(at).backward(tensor(dy))
    got = ActivationBackward(op).reference(dy, {"input": x}, {})
    np.testing.assert_allclose(got, at.grad, rtol=1e-7, atol=1e-12)  # torch's 1/6 of hardsigmoid is a float


def test_the_gradient_of_power_is_multiplied_by_what_comes_back() -> None:
    """MIOpen's kernel and its host reference give b*g*y/t, whatever dy is."""
    op = ActivationBackward(activation.Power(0.5, 0.25, 1.75))
    x = np.array([[1.0, 2.0, -3.0]])
    twice = op.reference(np.full((1, 3), 2.0), {"input": x}, {})
    np.testing.assert_allclose(twice, 2 * op.reference(np.ones((1, 3)), {"input": x}, {}))
    np.testing.assert_allclose(twice[0, :2], 2 * 0.25 * 1.75 * (0.5 + 0.25 * x[0, :2]) ** 0.75)
    assert twice[0, 2] == 0


def test_parameters_of_the_activation_are_given_at_run_time() -> None:
    plan = FusionPlan.parse("f64[2x3] -> activation_backward(leaky_relu(0.1)) -> leaky_relu(0.5)")
    assert [each.key for each in plan.parameters] == ["negative_slope", "negative_slope_2"]
    got = plan.reference(-np.ones((2, 3)), {"input": -np.ones((2, 3))}, {"negative_slope": 0.25})
    np.testing.assert_allclose(got, -0.125)


def test_results_are_asked_for() -> None:
    """Running statistics are a caller's tensors: nothing touches them unless the plan says so."""
    src = "f16[4x3x2x2]"
    keys = {
        (running, saved): [
            each.key for each in FusionPlan(src, BatchNormTraining(running=running, saved=saved)).results
        ]
        for running in (False, True)
        for saved in (False, True)
    }
    saved, running = ["saved_mean", "saved_inverse_variance"], ["running_mean", "running_variance"]
    assert keys == {
        (False, False): [], (False, True): saved, (True, False): running, (True, True): saved + running
    }  # fmt: skip
    plan = FusionPlan(src, BatchNormTraining("per_activation", running=True))
    assert {(each.dtype, each.shape) for each in plan.results} == {("f32", (3, 2, 2))}
    assert [each.key for each in plan.results if each.updated] == running


def test_statistics_are_keys_that_nothing_else_has() -> None:
    plan = FusionPlan.parse(
        "f32[4x3] -> elementwise('x * batch_mean', batch_mean=2) -> batch_norm_training -> batch_norm"
    )
    assert plan[1].leaves["batch_mean"] == "batch_mean_2"
    assert plan[2].keys["mean"] == "mean"
    assert "batch_mean_2" not in plan[1].keys.values(), "nobody gives a statistic"


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("f32[1x3x1x1] -> batch_norm_training", True),
        ("f32[1x3x2x1] -> batch_norm_training(running=True)", True),
        ("f32[1x3x1x1] -> batch_norm_training(running=True)", False),
        ("f32[1x3x9x9] -> batch_norm_training(per_activation, running=True)", False),
        ("f32[2x3] -> batch_norm_training(running=True)", True),
    ],
)
def test_one_value_has_no_running_variance(text: str, is_taken: bool) -> None:
    if is_taken:
        assert len(FusionPlan.parse(text).results) >= 2
        return
    with pytest.raises(PlanError, match="more than one element a mean"):
        FusionPlan.parse(text)


@pytest.mark.parametrize(
    "wrong", [Bias(), Prelu(), Conv2d(3, kernel=1), ActivationBackward(activation.Relu()), "relu", 3]
)
def test_what_is_no_activation_is_refused(wrong: Any) -> None:
    takes_operands = isinstance(wrong, Elementwise)
    for make in (BatchNormBackward,) if takes_operands else (ActivationBackward, BatchNormBackward):
        with pytest.raises(PlanError, match="an activation: an elementwise operator without operands"):
            make(wrong)


@pytest.mark.parametrize("name", ["slope", "x"])
def test_a_derivative_along_an_operand_reads_what_the_formula_does(name: str) -> None:
    """Of prelu: where the input is at most 0, the slope's is the input, and src's is the slope."""
    x, grad, slopes = np.array([[-2.0, 3.0]]), np.array([[5.0, 7.0]]), np.array([0.5, 0.25])
    plan = FusionPlan("f64[1x2]", ActivationBackward(Prelu(), name))
    keys = [each.key for each in plan.operands]
    assert keys == (["input"] if name == "slope" else ["input", "slope"])
    given = {"input": x, "slope": slopes}
    got = plan.reference(grad, {key: given[key] for key in keys})
    np.testing.assert_array_equal(got, [[-10.0, 0.0]] if name == "slope" else [[2.5, 7.0]])


def test_a_derivative_is_along_an_operand_of_its_own() -> None:
    with pytest.raises(PlanError, match="by"):
        ActivationBackward(Prelu(), "scale")


@pytest.mark.parametrize("name", ["scale", "input", "epsilon", "scale_gradient"])
def test_a_parameter_of_the_activation_has_a_name_of_its_own(name: str) -> None:
    with pytest.raises(
        PlanError, match=f"has a parameter '{name}', a name that batch_norm_backward has already"
    ):
        BatchNormBackward(Expression(f"x * {name}", **{name: 2.0}))


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_a_large_mean_costs_no_digits(mean: float) -> None:
    x, one = np.random.default_rng(5).standard_normal((8, 3, 16, 16)), np.ones(3)
    plan = FusionPlan(f64(x.shape), BatchNormTraining())
    got, results = plan.evaluate(x + mean, {"scale": one, "shift": one})
    want = torch_training(tensor(x), tensor(one), tensor(one), "spatial")
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    inverse = 1 / np.sqrt(x.var(axis=(0, 2, 3)) + 1e-5)
    np.testing.assert_allclose(results["saved_inverse_variance"], inverse, rtol=1e-11)
