"""Training and backward passes by MIOpen's calls, against torch's gradients."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import Array, Built, activation, close, created, fails, handle, ok, random, tensor

SHAPE = (4, 6, 5, 7)
X, DY = random(*SHAPE), random(*SHAPE, seed=1)
SCALE, SHIFT = random(1, 6, 1, 1, seed=2), random(1, 6, 1, 1, seed=3)
SLOPE, EPSILON, FACTOR = 0.25, 1e-3, 0.2
SPATIAL = miopen.miopenBNSpatial
TARGETS = ("cpu", "reference")


def fresh(value: float = np.nan) -> Array:
    return np.full((1, 6, 1, 1), value, np.float32)


class Torch:
    """What torch makes of the forward and the backward pass, in float64."""

    def __init__(self, slope: float = SLOPE) -> None:
        x, scale, shift = (
            torch.tensor(each, dtype=torch.float64, requires_grad=True)
            for each in (X, SCALE.ravel(), SHIFT.ravel())
        )
        self.mean, self.variance = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        norm = torch.nn.functional.batch_norm(
            x, self.mean, self.variance, scale, shift, True, FACTOR, EPSILON
        )
        y = torch.nn.functional.leaky_relu(norm, slope)
        y.backward(torch.tensor(DY))
        self.y = y.detach().numpy()
        self.dx, self.dscale, self.dshift = (each.grad.numpy() for each in (x, scale, shift))


EXACT = Torch()
MEAN = X.astype(np.float64).mean((0, 2, 3))
INVERSE = 1 / np.sqrt(X.astype(np.float64).var((0, 2, 3)) + EPSILON)


def forward(target: str, running: bool, mode: Any = SPATIAL, src: Any = None) -> tuple[Built, Ref, Ref]:
    made = Built(src or tensor(*SHAPE), target)
    norm = made.add(miopen.miopenCreateOpBatchNormForward, mode, running)
    act = made.add(miopen.miopenCreateOpActivationForward, miopen.miopenActivationLEAKYRELU)
    made.compile()
    ok(miopen.miopenSetOpArgsActivForward(made.args, act, 1.0, 0.0, SLOPE, 0.0, 0.0))
    return made, norm, act


@pytest.mark.parametrize("target", TARGETS)
def test_forward_saves_and_updates_what_it_is_asked_to(target: str) -> None:
    made, norm, _ = forward(target, running=True)
    mean, inverse, running_mean, running_variance = fresh(), fresh(), fresh(0.0), np.ones(6, np.float32)
    results = (mean, inverse, running_mean, running_variance, FACTOR, EPSILON)
    ok(miopen.miopenSetOpArgsBatchNormForward(made.args, norm, 1.0, 0.0, SCALE, SHIFT, *results))
    close(made.execute(X), EXACT.y)
    close(mean.ravel(), MEAN)
    close(inverse.ravel(), INVERSE)
    close(running_mean.ravel(), EXACT.mean.numpy())
    close(running_variance, EXACT.variance.numpy())


@pytest.mark.parametrize("target", TARGETS)
def test_forward_without_results(target: str) -> None:
    made, norm, _ = forward(target, running=False)
    nothing = (None, None, None, None, FACTOR, EPSILON)
    ok(miopen.miopenSetOpArgsBatchNormForward(made.args, norm, 1.0, 0.0, SCALE, SHIFT, *nothing))
    close(made.execute(X), EXACT.y)


@pytest.mark.parametrize("target", TARGETS)
def test_backward_of_normalization_and_activation_is_one_operator(target: str) -> None:
    made = Built(tensor(*SHAPE), target)
    norm = made.add(miopen.miopenCreateOpBatchNormBackward, SPATIAL)
    act = made.add(miopen.miopenCreateOpActivationBackward, miopen.miopenActivationLEAKYRELU)
    made.compile()
    assert str(made.plan.value.lowered().plan).endswith("batch_norm_backward(leaky_relu)")
    dscale, dshift = fresh(), np.full(6, np.nan, np.float32)
    saved = MEAN.astype(np.float32), INVERSE.astype(np.float32)
    values = (X, SCALE, SHIFT, dscale, dshift, *saved)
    ok(miopen.miopenSetOpArgsBatchNormBackward(made.args, norm, 1.0, 0.0, *values))
    ok(miopen.miopenSetOpArgsActivBackward(made.args, act, 1.0, 0.0, None, None, SLOPE, 0.0, 0.0))
    close(made.execute(DY), EXACT.dx)
    close(dscale.ravel(), EXACT.dscale)
    close(dshift, EXACT.dshift)
    ok(miopen.miopenSetOpArgsActivBackward(made.args, act, 3.0, 0.0, X, None, SLOPE, 0.0, 0.0))
    close(made.execute(DY), 3 * EXACT.dx)
    close(dscale.ravel(), EXACT.dscale)  # alpha is of dx alone


def test_backward_of_normalization_alone() -> None:
    made = Built(tensor(*SHAPE))
    norm = made.add(miopen.miopenCreateOpBatchNormBackward, SPATIAL)
    made.compile()
    dscale, dshift = fresh(), fresh()
    saved = MEAN.astype(np.float32), INVERSE.astype(np.float32)
    ok(miopen.miopenSetOpArgsBatchNormBackward(
        made.args, norm, 1.0, 0.0, X, SCALE, SHIFT, dscale, dshift, *saved
    ))  # fmt: skip
    close(made.execute(DY), Torch(slope=1.0).dx)


def test_backward_of_an_activation_takes_what_it_was_applied_to() -> None:
    made = Built(tensor(*SHAPE))
    act = made.add(miopen.miopenCreateOpActivationBackward, miopen.miopenActivationPOWER)
    made.compile()
    x = np.abs(X)
    ok(miopen.miopenSetOpArgsActivBackward(made.args, act, 1.0, 0.0, None, x, 0.5, 0.75, 2.0))
    close(made.execute(DY), DY * 0.75 * 2.0 * (0.5 + 0.75 * x.astype(np.float64)))  # DY counts
    status = miopen.miopenSetOpArgsActivBackward(made.args, act, 1.0, 0.0, X, None, 0.5, 0.75, 2.0)
    fails(status, "BadParm", "`reserved` is null")


REFUSED: dict[str, tuple[bool, tuple[Any, ...], str]] = {
    "running statistics that are not asked for": (
        False,
        (None, None, fresh(0), fresh(1)),
        "runningMeanVariance=False: want null",
    ),
    "running statistics that are null": (
        True,
        (None, None, None, None),
        "runningMeanVariance=True: want running statistics",
    ),
    "half of the running statistics": (True, (None, None, fresh(0), None), "`runningVariance` is null"),
    "half of the saved statistics": (False, (fresh(), None, None, None), "`savedInvVariance` is null"),
    "statistics of another shape": (False, (np.zeros(5, np.float32), fresh(), None, None), "`savedMean` of"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_statistics_that_cannot_be(what: str) -> None:
    is_running, statistics, told = REFUSED[what]
    made, norm, _ = forward("cpu", is_running)
    status = miopen.miopenSetOpArgsBatchNormForward(
        made.args, norm, 1.0, 0.0, SCALE, SHIFT, *statistics, FACTOR, EPSILON
    )
    fails(status, "BadParm", told)


def test_what_backward_passes_refuse() -> None:
    made = Built(tensor(*SHAPE))
    norm = made.add(miopen.miopenCreateOpBatchNormBackward, SPATIAL)
    act = made.add(miopen.miopenCreateOpActivationBackward, miopen.miopenActivationRELU)
    status = miopen.miopenSetOpArgsActivBackward(made.args, norm, 1.0, 0.0, X, None, 0.0, 0.0, 0.0)
    fails(status, "BadParm", "operator 0 is of the kind batch normalization backward")
    status = miopen.miopenSetOpArgsActivBackward(made.args, act, 1.0, 0.0, X, X, 0.0, 0.0, 0.0)
    fails(status, "BadParm", "`reserved` is not null")
    values = (X, SCALE, SHIFT, fresh(), fresh(), fresh(0.0), fresh(1.0))
    status = miopen.miopenSetOpArgsBatchNormBackward(made.args, norm, 2.0, 0.0, *values)
    fails(status, "BadParm", "alpha = 2.0", "gradients of scale and bias")


@pytest.mark.parametrize("layout", [miopen.miopenTensorNCHW, miopen.miopenTensorNHWC], ids=str)
def test_layouts(layout: Any) -> None:
    src = tensor(*SHAPE, layout=layout)
    order = (0, 1, 2, 3) if layout is miopen.miopenTensorNCHW else (0, 2, 3, 1)
    x, y = (
        np.ascontiguousarray(each.transpose(order)).transpose(np.argsort(order)) for each in (X, DY * np.nan)
    )
    made, norm, _ = forward("cpu", running=False, src=src)
    nothing = (None, None, None, None, FACTOR, EPSILON)
    ok(miopen.miopenSetOpArgsBatchNormForward(made.args, norm, 1.0, 0.0, SCALE, SHIFT, *nothing))
    made.execute_into(x, y)
    close(y, EXACT.y)


class OneCall:
    """The arguments that all one-call functions share."""

    def __init__(self) -> None:
        self.handle, self.d, self.p = handle(), tensor(*SHAPE), tensor(1, 6, 1, 1)
        self.y = np.full(SHAPE, np.nan, np.float32)
        self.leaky = activation(miopen.miopenActivationLEAKYRELU, SLOPE)
        self.head = (self.handle, SPATIAL, 1.0, 0.0, self.d, X, self.d, self.y)


VARIANCE = X.astype(np.float64).var((0, 2, 3)).astype(np.float32)
FROZEN = {
    "": ("miopenBatchNormalizationForwardInference", 1, VARIANCE, (EPSILON,)),
    "_V2": ("miopenBatchNormalizationForwardInference_V2", 4, VARIANCE, (EPSILON,)),
    "inverse": ("miopenBatchNormalizationForwardInferenceInvVariance", 4, INVERSE.astype(np.float32), ()),
    "activation": ("miopenBatchNormForwardInferenceActivation", 4, VARIANCE, (EPSILON,)),
    "both": ("miopenBatchNormForwardInferenceActivationInvVariance", 4, INVERSE.astype(np.float32), ()),
}


@pytest.mark.parametrize("what", FROZEN)
def test_inference_in_one_call(what: str) -> None:
    name, descriptors, variance, epsilon = FROZEN[what]
    made, is_activated = OneCall(), "Activation" in name
    exact = EXACT.y if is_activated else Torch(slope=1.0).y
    tail = (made.leaky,) if is_activated else ()
    head = (*made.head, *(made.p,) * descriptors, SCALE, SHIFT)
    ok(getattr(miopen, name)(*head, MEAN.astype(np.float32), variance, *epsilon, *tail))
    close(made.y, exact)
    made.y[...] = np.nan
    ok(getattr(miopen, name)(*head, None, None, *epsilon, *tail))  # the batch's own
    close(made.y, exact, 1e-5 if epsilon else 1e-3)  # without one, epsilon is 1e-5 and not 1e-3
    status = getattr(miopen, name)(*head, None, variance, *epsilon, *tail)
    parameters = inspect.signature(getattr(miopen, name)).parameters
    message = fails(status, "BadParm", "`estimatedMean` is null")
    assert all(each in parameters for each in re.findall(r"`(\w+)`", message))


TRAINED = {
    "": ("miopenBatchNormalizationForwardTraining", 1, False),
    "_V2": ("miopenBatchNormalizationForwardTraining_V2", 4, False),
    "_V3": ("miopenBatchNormalizationForwardTraining_V3", 4, True),
    "activation": ("miopenBatchNormForwardTrainingActivation", 4, False),
    "activation_V2": ("miopenBatchNormForwardTrainingActivation_V2", 4, True),
}


@pytest.mark.parametrize("what", TRAINED)
def test_training_in_one_call(what: str) -> None:
    name, descriptors, is_split = TRAINED[what]
    made, is_activated = OneCall(), "Activation" in name
    old = (np.zeros(6, np.float32), np.ones(6, np.float32))
    new = (fresh(), fresh()) if is_split else ()
    saved = fresh(), fresh()
    tail = (made.leaky,) if is_activated else ()
    head = (*made.head, *(made.p,) * descriptors, SCALE, SHIFT, FACTOR)
    ok(getattr(miopen, name)(*head, *old, *new, EPSILON, *saved, *tail))
    close(made.y, EXACT.y if is_activated else Torch(slope=1.0).y)
    mean, variance = new or old
    close(mean.ravel(), EXACT.mean.numpy())
    close(variance.ravel(), EXACT.variance.numpy())
    close(saved[1].ravel(), INVERSE)
    if is_split:
        assert not old[0].any()
        assert (old[1] == 1).all()
    nothing = (None,) * (2 + 2 * is_split)
    ok(getattr(miopen, name)(*head, *nothing, EPSILON, None, None, *tail))
    status = getattr(miopen, name)(*head, old[0], *nothing[1:], EPSILON, None, None, *tail)
    message = fails(status, "BadParm", "go together")
    parameters = inspect.signature(getattr(miopen, name)).parameters
    assert all(each in parameters for each in re.findall(r"`(\w+)`", message))


def test_old_statistics_are_only_read() -> None:
    made, old, new = OneCall(), (np.zeros(6, np.float32), np.ones(6, np.float32)), (fresh(), fresh())
    for each in old:
        each.flags.writeable = False
    head = (*made.head, *(made.p,) * 4, SCALE, SHIFT, FACTOR)
    train = miopen.miopenBatchNormalizationForwardTraining_V3
    ok(train(*head, *old, *new, EPSILON, None, None))
    close(new[0].ravel(), EXACT.mean.numpy())
    for wrong in (np.zeros(5, np.float32), np.zeros(6)):
        status = train(*head, wrong, old[1], *new, EPSILON, None, None)
        fails(status, "BadParm", "`prevResultRunningMean` is", "want f32[6]")


def split(old: tuple[Any, Any], new: tuple[Any, Any], **other: Any) -> Any:
    """Training that reads running statistics from one pair and writes them into another."""
    made = OneCall()
    given = {"x": X, "scale": SCALE} | other
    tensors = (made.d, given["x"], made.d, made.y, *(made.p,) * 4, given["scale"], SHIFT, FACTOR)
    call = miopen.miopenBatchNormalizationForwardTraining_V3
    return call(made.handle, SPATIAL, 1.0, 0.0, *tensors, *old, *new, EPSILON, None, None)


def test_old_and_new_statistics_may_lie_in_the_same_memory() -> None:
    mean, variance = np.zeros(6, np.float32), np.ones(6, np.float32)
    ok(split((mean, variance), (variance, mean)))
    close(variance, EXACT.mean.numpy())
    close(mean, EXACT.variance.numpy())


@pytest.mark.parametrize("where", ["x", "scale", "new", "old"])
def test_a_refused_call_leaves_new_statistics_as_they_were(where: str) -> None:
    """Be they what they should be, or wrongly what the kernel reads."""
    old = (np.zeros(6, np.float32), np.ones(6, np.float64 if where == "old" else np.float32))
    others = {"x": X.copy(), "scale": SCALE.copy()}
    new = np.full(6, 7.0, np.float32), np.full(6, 8.0, np.float32)
    if where in others:
        new = others[where].reshape(-1)[:6], new[1]
    elif where == "new":
        new = new[0], new[0]
    before = [each.copy() for each in (*new, *others.values())]
    told = "want f32[6]" if where == "old" else "overlaps"
    fails(split(old, new, **others), "BadParm", told)
    for each, copied in zip((*new, *others.values()), before, strict=True):
        np.testing.assert_array_equal(each, copied)


DIFFERENTIATED = {
    "": ("miopenBatchNormalizationBackward", 1),
    "_V2": ("miopenBatchNormalizationBackward_V2", 4),
    "activation": ("miopenBatchNormBackwardActivation", 4),
}


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("what", DIFFERENTIATED)
def test_backward_in_one_call(what: str, is_saved: bool) -> None:
    name, descriptors = DIFFERENTIATED[what]
    made, is_activated = OneCall(), "Activation" in name
    dscale, dshift = fresh(), fresh()
    saved = (MEAN.astype(np.float32), INVERSE.astype(np.float32)) if is_saved else (None, None)
    tensors = (made.d, X, made.d, DY, made.d, made.y, *(made.p,) * descriptors)
    shift, tail = ((SHIFT,), (made.leaky,)) if is_activated else ((), ())
    rest = (*tensors, SCALE, *shift, dscale, dshift, EPSILON, *saved, *tail)
    ok(getattr(miopen, name)(made.handle, SPATIAL, 1.0, 0.0, 1.0, 0.0, *rest))
    exact = EXACT if is_activated else Torch(slope=1.0)
    close(made.y, exact.dx)
    close(dscale.ravel(), exact.dscale)
    close(dshift.ravel(), exact.dshift)
    told = "gradients of scale and bias are neither scaled nor added"
    fails(getattr(miopen, name)(made.handle, SPATIAL, 1.0, 0.0, 2.0, 0.0, *rest), "BadParm", told)
    fails(getattr(miopen, name)(made.handle, SPATIAL, 1.0, 1.0, 1.0, 0.0, *rest), "BadParm", "beta = 1.0")
    other = (made.handle, SPATIAL, 1.0, 0.0, 1.0, 0.0, tensor(4, 6, 5, 8), *rest[1:])
    fails(getattr(miopen, name)(*other), "BadParm", "the x descriptors do not match: got f32[4x6x5x8]")


def test_saved_statistics_are_read_and_not_made_again() -> None:
    made, (dscale, dshift) = OneCall(), (fresh(), fresh())
    mean, inverse = (each.astype(np.float32).reshape(1, 6, 1, 1) for each in (MEAN + 0.5, 2 * INVERSE))
    tensors = (made.d, X, made.d, DY, made.d, made.y, made.p, SCALE, dscale, dshift, EPSILON, mean, inverse)
    backward = miopen.miopenBatchNormalizationBackward
    ok(backward(made.handle, SPATIAL, 1.0, 0.0, 1.0, 0.0, *tensors))
    normal, dy = (X.astype(np.float64) - mean) * inverse, DY.astype(np.float64)
    parts = [each.mean((0, 2, 3), keepdims=True) for each in (dy, dy * normal)]
    close(made.y, SCALE * inverse * (dy - parts[0] - normal * parts[1]))
    close(dscale, parts[1] * X[:, 0].size)
    close(dshift, parts[0] * X[:, 0].size)


def test_parameters_in_one_call_are_described() -> None:
    made, wrong = OneCall(), tensor(1, 5, 1, 1)
    status = miopen.miopenBatchNormalizationForwardInference(
        *made.head, wrong, SCALE, SHIFT, None, None, EPSILON
    )
    fails(status, "BadParm", "`bnScaleBiasMeanVarDesc` does not describe", "want f32[1x6x1x1]")


def test_activations_in_one_call() -> None:
    made = OneCall()
    ok(miopen.miopenActivationForward(made.handle, made.leaky, 2.0, made.d, X, 0.0, made.d, made.y))
    close(made.y, 2 * np.where(X > 0, X, SLOPE * X))
    tensors = (None, None, made.d, DY, made.d, X, 0.0, made.d, made.y)
    ok(miopen.miopenActivationBackward(made.handle, made.leaky, -1.0, *tensors))
    close(made.y, -DY * np.where(X > 0, 1, SLOPE))
    other = (None, None, made.d, DY, tensor(4, 6, 5, 8), X, 0.0, made.d, made.y)
    fails(miopen.miopenActivationBackward(made.handle, made.leaky, 1.0, *other), "BadParm", "x descriptors")
    assert created(miopen.miopenCreateActivationDescriptor).value.is_alive
