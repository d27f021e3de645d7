"""What plans compute, against MIOpen's formulas in float64, in orders too that MIOpen does not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import Built, activation, close, convolution, handle, ok, random, tensor
from miopen_formulas import BACKWARD, FORWARD, Written, formula

SPATIAL, PER_ACTIVATION = miopen.miopenBNSpatial, miopen.miopenBNPerActivation
MODES = tuple(miopen.miopenActivationMode_t)
# What activAlpha, activBeta and activGamma may be; the first of CLAMP's is below its second.
NUMBERS = ((0.5, 0.75, 2.0), (-0.5, 1.25, 3.0), (-2.5, -0.25, -1.5), (0.1, 0.3, 0.0))


def run_forward(made: Built, op: Ref, numbers: tuple[float, ...]) -> Any:
    return miopen.miopenSetOpArgsActivForward(made.args, op, 1.0, 0.0, *numbers)


def run_backward(made: Built, op: Ref, numbers: tuple[float, ...]) -> Any:
    return miopen.miopenSetOpArgsActivBackward(made.args, op, 1.0, 0.0, None, INPUT, *numbers)


INPUT, GRADIENT = 3 * random(3, 5, 4, 6), random(3, 5, 4, 6, seed=1)
INPUT.flat[:9] = (0, 1, -1, 2.5, 30, -30, 0.5, -0.5, 60)  # where the formulas have their edges


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_activations_take_their_numbers_at_run_time(mode: Any) -> None:
    made = Built(tensor(*INPUT.shape))
    op = made.add(miopen.miopenCreateOpActivationForward, mode)
    made.compile()
    for numbers in NUMBERS:
        ok(run_forward(made, op, numbers))
        exact = formula(FORWARD, mode)(INPUT.astype(np.float64), *numbers)
        np.testing.assert_allclose(made.execute(INPUT), exact, 4e-6, 1e-6)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_gradients_take_their_numbers_at_run_time(mode: Any) -> None:
    made = Built(tensor(*INPUT.shape))
    op = made.add(miopen.miopenCreateOpActivationBackward, mode)
    made.compile()
    for numbers in NUMBERS:
        ok(run_backward(made, op, numbers))
        exact = GRADIENT * formula(BACKWARD, mode)(INPUT.astype(np.float64), *numbers)
        np.testing.assert_allclose(made.execute(GRADIENT), exact, 4e-6, 1e-6)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_one_call_takes_every_activation(mode: Any) -> None:
    where, src, channel = handle(), tensor(*INPUT.shape), tensor(1, 5, 1, 1)
    made, numbers = activation(mode, *NUMBERS[0]), NUMBERS[0]
    y, one, zero = np.empty_like(INPUT), np.ones(5, np.float32), np.zeros(5, np.float32)
    exact = formula(FORWARD, mode)(INPUT.astype(np.float64), *numbers)
    ok(miopen.miopenActivationForward(where, made, 1.0, src, INPUT, 0.0, src, y))
    np.testing.assert_allclose(y, exact, 4e-6, 1e-6)
    head = (where, SPATIAL, 1.0, 0.0, src, INPUT, src, y, *(channel,) * 4)
    ok(miopen.miopenBatchNormForwardInferenceActivation(*head, one, zero, zero, one, 0.0, made))
    np.testing.assert_allclose(y, exact, 4e-6, 1e-6)
    convolved = (src, INPUT, tensor(5, 5, 1, 1), np.eye(5, dtype=np.float32)[:, :, None, None])
    algo = miopen.miopenConvolutionFwdAlgoDirect
    ok(miopen.miopenConvolutionBiasActivationForward(
        where, 1.0, *convolved, convolution(), algo, None, 0, None, None, None, channel, zero, made, src, y
    ))  # fmt: skip
    np.testing.assert_allclose(y, exact, 4e-6, 1e-6)
    slope = GRADIENT * formula(BACKWARD, mode)(INPUT.astype(np.float64), *numbers)
    tensors = (None, None, src, GRADIENT, src, INPUT, 0.0, src, y)
    ok(miopen.miopenActivationBackward(where, made, 1.0, *tensors))
    np.testing.assert_allclose(y, slope, 4e-6, 1e-6)


# Shape of x, features, kernel, groups, and how the kernel moves.
GEOMETRIES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], int, dict[str, tuple[int, ...]]]] = {
    "plain": ((4, 8, 9, 9), 16, (3, 3), 1, {"padding": (1, 1)}),
    "point": ((2, 7, 5, 3), 9, (1, 1), 1, {}),
    "grouped and dilated": (
        (2, 6, 11, 10), 9, (3, 2), 3, {"padding": (2, 0), "stride": (1, 2), "dilation": (2, 3)},
    ),
    "depthwise": ((1, 5, 9, 8), 10, (4, 3), 5, {"padding": (1, 2), "stride": (3, 1)}),
    "line": ((2, 5, 17), 7, (5,), 1, {"padding": (2,), "dilation": (2,)}),
    "volume": ((1, 4, 5, 6, 7), 6, (2, 3, 1), 2, {"padding": (1, 0, 0), "stride": (1, 2, 3)}),
}  # fmt: skip
ACTIVATIONS = (
    (miopen.miopenActivationLEAKYRELU, 0.25, 0.0, 0.0),
    (miopen.miopenActivationTANH, 0.3, -1.7, 0.0),
    (miopen.miopenActivationPOWER, 1.5, 0.25, 1.75),
)
LETTERS: dict[str, Callable[[Written, str, int], None]] = {
    "C": lambda made, geometry, _: convolve(made, geometry),
    "B": lambda made, *_: made.shift(),
    "N": lambda made, _, place: made.normalize((SPATIAL, PER_ACTIVATION)[place % 2], alpha=1.5 - place),
    "A": lambda made, _, place: made.activate(*ACTIVATIONS[place % 3], alpha=0.75 * place - 2),
}


def convolve(made: Written, geometry: str) -> None:
    _, features, kernel, groups, moves = GEOMETRIES[geometry]
    made.convolve(features, kernel, -0.5, groups, **moves)


def written(letters: str, geometry: str, x: Any, src: Ref) -> Written:
    made = Written(src, x, seed=len(letters))
    for place, letter in enumerate(letters):
        LETTERS[letter](made, geometry, place)
    return made


# The combinations of the driver's fusion modes 0 to 6; those that MIOpen takes and computes as another one;
# and some that it does not take.
COMBINATIONS = (
    "CBNA", "CNA", "NA", "CN", "CBA", "CA", "CB", "CAN", "CAA", "CNN", "CANA", "AC", "NAC", "CABN", "BAN",
)  # fmt: skip


# Every one on a plain convolution, and those of which MIOpen has no kernel that is right on all.
CASES = [(each, "plain") for each in COMBINATIONS] + [
    (letters, geometry) for letters in ("CBNA", "CAN", "CNN", "CANA", "NAC") for geometry in GEOMETRIES
]


@pytest.mark.parametrize(("letters", "geometry"), dict.fromkeys(CASES))
@pytest.mark.part(2)
def test_combinations_compute_what_they_say(letters: str, geometry: str) -> None:
    x = random(*GEOMETRIES[geometry][0])
    made = written(letters, geometry, x, tensor(*x.shape))
    close(made.computed(), made.exact)


@pytest.mark.parametrize("kind", [miopen.miopenHalf, miopen.miopenDouble], ids=lambda kind: kind.name)
@pytest.mark.parametrize("letters", ["CBNA", "CANA", "NAC"])
def test_combinations_round_once(letters: str, kind: Any) -> None:
    dtype, unit = (np.float16, 2.0**-11) if kind is miopen.miopenHalf else (np.float64, 2.0**-53)
    x = random(*GEOMETRIES["plain"][0]).astype(dtype)
    layout = miopen.miopenTensorNHWC
    made = written(letters, "plain", x, tensor(*x.shape, dtype=kind, layout=layout))
    made.x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    y = np.empty(made.exact.transpose(0, 2, 3, 1).shape, dtype).transpose(0, 3, 1, 2)
    made.built.compile()
    made.built.execute_into(made.x, y)
    error = np.abs(y.astype(np.float64) - made.exact)
    noise = 2e-5 if kind is miopen.miopenHalf else 1e-13
    assert (error <= 1.01 * unit * np.abs(made.exact) + noise * np.abs(made.exact).max()).all()


def test_parameters_may_have_the_type_of_the_data() -> None:
    made, x = Built(tensor(2, 3, 4, 5, dtype=miopen.miopenHalf)), random(2, 3, 4, 5).astype(np.float16)
    op = made.add(miopen.miopenCreateOpBatchNormInference, SPATIAL, tensor(1, 3, 1, 1))
    made.compile()
    given = [random(1, 3, 1, 1, seed=seed).astype(np.float16) for seed in range(4)]
    scale, bias, mean, variance = *given[:3], np.abs(given[3])
    exact = (x.astype(np.float64) - mean) / np.sqrt(variance.astype(np.float64)) * scale + bias
    for dtype in (np.float16, np.float32):
        parameters = [each.astype(dtype) for each in (scale, bias, mean, variance)]
        ok(miopen.miopenSetOpArgsBatchNormInference(made.args, op, 1.0, 0.0, *parameters, 0.0))
        close(made.execute(x), exact, 2.0**-11)


@pytest.mark.parametrize("numbers", [("TANH", 0.3, -1.7, 0.0), ("POWER", 8.0, 0.5, 1.75)], ids=lambda n: n[0])
@pytest.mark.parametrize("mode", [SPATIAL, PER_ACTIVATION], ids=lambda mode: mode.name)
@pytest.mark.parametrize("shape", [(16, 6), (5, 4, 9), (7, 3, 5, 4), (3, 2, 4, 3, 5)], ids=str)
@pytest.mark.part(2)
def test_training_and_its_gradients(shape: tuple[int, ...], mode: Any, numbers: tuple[Any, ...]) -> None:
    """Statistics over the batch, and over space where they are a channel's; factors for y and dx."""
    word, *abg = numbers
    act = miopen.miopenActivationMode_t[f"miopenActivation{word}"]
    axes = (0,) if mode is PER_ACTIVATION else (0, *range(2, len(shape)))
    per = tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    x, dy, scale, shift = (random(*each, seed=seed) for seed, each in enumerate((shape, shape, per, per)))
    wide = x.astype(np.float64)
    mean, inverse = wide.mean(axes, keepdims=True), 1 / np.sqrt(wide.var(axes, keepdims=True) + 1e-3)
    normal = (wide - mean) * inverse
    saved = np.empty(per, np.float32), np.empty(per, np.float32)
    made = Built(tensor(*shape))
    norm = made.add(miopen.miopenCreateOpBatchNormForward, mode, False)
    op = made.add(miopen.miopenCreateOpActivationForward, act)
    made.compile()
    given = (scale, shift, *saved, None, None, 0.0, 1e-3)
    ok(miopen.miopenSetOpArgsBatchNormForward(made.args, norm, 1.5, 0.0, *given))
    ok(miopen.miopenSetOpArgsActivForward(made.args, op, -0.5, 0.0, *abg))
    close(made.execute(x), -0.5 * formula(FORWARD, act)(1.5 * (normal * scale + shift), *abg))
    for got, exact in zip(saved, (mean, inverse), strict=True):
        close(got, exact)
    made = Built(tensor(*shape))
    norm = made.add(miopen.miopenCreateOpBatchNormBackward, mode)
    op = made.add(miopen.miopenCreateOpActivationBackward, act)
    made.compile()
    dscale, dshift = np.empty(per, np.float32), np.empty(per, np.float32)
    forward = (x, scale, shift, dscale, dshift, *saved)
    ok(miopen.miopenSetOpArgsBatchNormBackward(made.args, norm, 1.0, 0.0, *forward))
    ok(miopen.miopenSetOpArgsActivBackward(made.args, op, 2.0, 0.0, None, None, *abg))
    back = dy * formula(BACKWARD, act)(normal * scale + shift, *abg)
    parts = [each.mean(axes, keepdims=True) for each in (back * normal, back)]
    close(made.execute(dy), 2 * scale * inverse * (back - normal * parts[0] - parts[1]))
    for got, part in zip((dscale, dshift), parts, strict=True):
        close(got, part * (x.size // part.size))
