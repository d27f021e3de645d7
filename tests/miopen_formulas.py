"""What MIOpen's operators mean, in float64 by torch and NumPy: not by this library's own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import Array, Built, created, ok, tensor

Formula = Callable[[Any, float, float, float], Any]  # of x and activAlpha, activBeta, activGamma
THRESHOLD = 1e-6  # of POWER, but for f16
CONVOLVE = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)


def power(base: Any, exponent: float) -> Any:
    """base**exponent, and 0 where MIOpen's POWER is."""
    return np.where(base <= THRESHOLD, 0, np.where(base <= THRESHOLD, 1, base) ** exponent)


def logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


FORWARD: Mapping[str, Formula] = {
    "PASTHRU": lambda x, a, b, g: x,
    "LOGISTIC": lambda x, a, b, g: logistic(x),
    "TANH": lambda x, a, b, g: b * np.tanh(a * x),
    "RELU": lambda x, a, b, g: np.maximum(x, 0),
    "SOFTRELU": lambda x, a, b, g: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "ABS": lambda x, a, b, g: np.abs(x),
    "POWER": lambda x, a, b, g: power(a + b * x, g),
    "CLIPPEDRELU": lambda x, a, b, g: np.minimum(a, np.maximum(x, 0)),
    "LEAKYRELU": lambda x, a, b, g: np.where(x > 0, x, a * x),
    "ELU": lambda x, a, b, g: np.where(x > 0, x, a * np.expm1(x)),
    "CLAMP": lambda x, a, b, g: np.maximum(a, np.minimum(b, x)),
}
# By which the gradient that comes back is multiplied; POWER's and ABS's are not MIOpen's at all points.
BACKWARD: Mapping[str, Formula] = {
    "PASTHRU": lambda x, a, b, g: np.ones_like(x),
    "LOGISTIC": lambda x, a, b, g: logistic(x) * (1 - logistic(x)),
    "TANH": lambda x, a, b, g: a * (b - (b * np.tanh(a * x)) ** 2 / b),
    "RELU": lambda x, a, b, g: x > 0,
    "SOFTRELU": lambda x, a, b, g: logistic(x),
    "ABS": lambda x, a, b, g: np.sign(x),
    "POWER": lambda x, a, b, g: b * g * power(a + b * x, g - 1),
    "CLIPPEDRELU": lambda x, a, b, g: (x > 0) & (x <= a),
    "LEAKYRELU": lambda x, a, b, g: np.where(x > 0, 1, a),
    "ELU": lambda x, a, b, g: np.where(x > 0, 1, a * np.exp(np.minimum(x, 0))),
    "CLAMP": lambda x, a, b, g: (x >= a) & (x <= b),
}


def formula(formulas: Mapping[str, Formula], mode: Any) -> Formula:
    """The one of a mode."""
    return formulas[mode.name.removeprefix("miopenActivation")]


class Written:
    """A plan that is written operator by operator, and what it makes of `x`, each step apart, in float64."""

    def __init__(self, src: Ref, x: Array, seed: int = 0, target: str = "cpu") -> None:
        self.built, self.random = Built(src, target), np.random.default_rng(seed)
        self.x, self.exact = x, x.astype(np.float64)
        self.dtype = x.dtype

    def draw(self, *shape: int, dtype: Any = None) -> Array:
        return self.random.standard_normal(shape).astype(dtype or self.dtype)

    def parameter(self, *shape: int) -> Array:
        """A bias, scale, ...: in what is computed in."""
        return self.draw(*shape, dtype=np.float64 if self.dtype == np.float64 else np.float32)

    def convolve(
        self, features: int, kernel: tuple[int, ...], alpha: float = 1.0, groups: int = 1, **moves: Any
    ) -> None:
        """`moves` are padding, stride and dilation, an axis each."""
        axes, made = len(kernel), created(miopen.miopenCreateConvolutionDescriptor)
        usual = {"padding": (0,) * axes, "stride": (1,) * axes, "dilation": (1,) * axes} | moves
        ok(miopen.miopenInitConvolutionNdDescriptor(made, axes, *usual.values(), miopen.miopenConvolution))
        ok(miopen.miopenSetConvolutionGroupCount(made, groups))
        w = self.draw(features, self.exact.shape[1] // groups, *kernel)
        op = self.built.add(miopen.miopenCreateOpConvForward, made, tensor(*w.shape, dtype=self.kind))
        ok(miopen.miopenSetOpArgsConvForward(self.built.args, op, alpha, 0.0, w))
        exact, wide = torch.tensor(self.exact), torch.tensor(w).double()
        self.exact = alpha * CONVOLVE[axes - 1](exact, wide, None, groups=groups, **usual).numpy()

    @property
    def kind(self) -> Any:
        """MIOpen's word for the type of x."""
        kinds = {2: miopen.miopenHalf, 4: miopen.miopenFloat, 8: miopen.miopenDouble}
        return kinds[self.dtype.itemsize]

    def shift(self) -> None:
        b = self.parameter(1, self.exact.shape[1], *(1,) * (self.exact.ndim - 2))
        op = self.built.add(miopen.miopenCreateOpBiasForward, tensor(*b.shape, dtype=self.kind))
        ok(miopen.miopenSetOpArgsBiasForward(self.built.args, op, None, None, b))
        self.exact = self.exact + b

    def normalize(self, mode: Any, alpha: float = 1.0, epsilon: float = 1e-3) -> None:
        derived = created(miopen.miopenCreateTensorDescriptor)
        place = tensor(*self.exact.shape, dtype=self.kind)
        ok(miopen.miopenDeriveBNTensorDescriptor(derived, place, mode))
        scale, bias, mean, variance = (self.parameter(*derived.value.spec.shape) for _ in range(4))
        op = self.built.add(miopen.miopenCreateOpBatchNormInference, mode, derived)
        given = (scale, bias, mean, variance**2, epsilon)
        ok(miopen.miopenSetOpArgsBatchNormInference(self.built.args, op, alpha, 0.0, *given))
        deviation = np.sqrt(variance.astype(np.float64) ** 2 + epsilon)
        self.exact = alpha * (scale * ((self.exact - mean) / deviation) + bias)

    def activate(self, mode: Any, *numbers: float, alpha: float = 1.0) -> None:
        op = self.built.add(miopen.miopenCreateOpActivationForward, mode)
        ok(miopen.miopenSetOpArgsActivForward(self.built.args, op, alpha, 0.0, *numbers))
        self.exact = alpha * formula(FORWARD, mode)(self.exact, *numbers)

    def computed(self) -> Array:
        self.built.compile()
        return self.built.execute(self.x)
