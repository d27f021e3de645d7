"""Activations: formulas of one element. A class here is all there is to an activation.

The words are PyTorch's where PyTorch has one. Each activation that MIOpen has tells MIOpen's name, and
which of MIOpen's parameters its own are: a is activAlpha, b activBeta, g activGamma. NaN goes in and comes
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import pi, sqrt

from fuseplan.language.declarations import SAMPLE_TENSORS, parameter, word
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar, erf, exp, expm1, maximum, minimum, relu, sigmoid, softplus, tanh, where

APPROXIMATIONS = ("none", "tanh")


@operator
class Identity(Elementwise):
    """x

    MIOpen: PASTHRU.
    """

    onnx = "Identity"

    def apply(self, x: Scalar) -> Scalar:
        return x


@operator
class Sigmoid(Elementwise):
    """1/(1 + exp(-x))

    MIOpen: LOGISTIC.
    """

    onnx = "Sigmoid"
    torch = "sigmoid"

    def apply(self, x: Scalar) -> Scalar:
        return sigmoid(x)


@operator
class Tanh(Elementwise):
    """beta * tanh(alpha * x)

    MIOpen: TANH, alpha is a, beta is b.
    """

    onnx = "Tanh"
    torch = "tanh"

    alpha: float = parameter(default=1.0)
    beta: float = parameter(default=1.0)

    def apply(self, x: Scalar, alpha: Scalar, beta: Scalar) -> Scalar:
        return beta * tanh(alpha * x)


@operator
class Relu(Elementwise):
    """maximum(x, 0)

    MIOpen: RELU.
    """

    onnx = "Relu"
    torch = "relu"

    def apply(self, x: Scalar) -> Scalar:
        return relu(x)


@operator
class Softplus(Elementwise):
    """log(1 + exp(x)) = maximum(x, 0) + log1p(exp(-|x|))

    MIOpen: SOFTRELU.
    """

    onnx = "Softplus"
    torch = "softplus"

    def apply(self, x: Scalar) -> Scalar:
        return softplus(x)


@operator
class Abs(Elementwise):
    """|x|

    MIOpen: ABS.
    """

    onnx = "Abs"
    torch = "abs"

    def apply(self, x: Scalar) -> Scalar:
        return abs(x)


@operator
class Power(Elementwise):
    """(alpha + beta*x)**gamma; 0 where alpha + beta*x <= threshold

    MIOpen: POWER, alpha is a, beta is b, gamma is g; its threshold is 1e-6 (in half precision 1e-4).
    """

    alpha: float = parameter(default=0.0)
    beta: float = parameter(default=1.0)
    gamma: float = parameter(default=1.0)
    threshold: float = parameter(default=1e-6)

    def apply(self, x: Scalar, alpha: Scalar, beta: Scalar, gamma: Scalar, threshold: Scalar) -> Scalar:
        base = alpha + beta * x
        return where(base <= threshold, 0, base**gamma)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7]", cls(alpha=0.5, beta=0.25, gamma=1.75)


@operator
class ClippedRelu(Elementwise):
    """minimum(alpha, maximum(x, 0))

    MIOpen: CLIPPEDRELU, alpha is a. PyTorch's relu6 is `clipped_relu`.
    """

    torch = "relu6"

    alpha: float = parameter(default=6.0)

    def apply(self, x: Scalar, alpha: Scalar) -> Scalar:
        return minimum(alpha, relu(x))


@operator
class LeakyRelu(Elementwise):
    """x where x > 0, else negative_slope * x

    MIOpen: LEAKYRELU, negative_slope is a.
    """

    onnx = "LeakyRelu"
    torch = "leaky_relu"

    negative_slope: float = parameter(default=0.01)

    def apply(self, x: Scalar, negative_slope: Scalar) -> Scalar:
        return where(x > 0, x, negative_slope * x)


@operator
class Elu(Elementwise):
    """x where x > 0, else alpha * (exp(x) - 1)

    MIOpen: ELU, alpha is a.
    """

    onnx = "Elu"
    torch = "elu"

    alpha: float = parameter(default=1.0)

    def apply(self, x: Scalar, alpha: Scalar) -> Scalar:
        return where(x > 0, x, alpha * expm1(x))


@operator
class Clamp(Elementwise):
    """maximum(min, minimum(max, x))

    MIOpen: CLAMP, min is a, max is b. A bound may be infinite.
    """

    onnx = "Clip"
    torch = "clamp"

    min: float = parameter()
    max: float = parameter()

    def apply(self, x: Scalar, min: Scalar, max: Scalar) -> Scalar:
        return maximum(min, minimum(max, x))

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        for text in SAMPLE_TENSORS:
            yield text, cls(-0.5, 0.75)
        yield "f32[3x5]", cls(0, float("inf"))


@operator
class Gelu(Elementwise):
    """x * (1 + erf(x/sqrt(2)))/2

    `approximate=tanh` is x * (1 + tanh(sqrt(2/pi) * (x + 0.044715*x**3)))/2 (Hendrycks and Gimpel, 2016).
    """

    onnx = "Gelu"
    torch = "gelu"

    approximate: str = word(APPROXIMATIONS, default="none")

    def apply(self, x: Scalar) -> Scalar:
        if self.approximate == "tanh":
            return 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))
        return 0.5 * x * (1 + erf(x * sqrt(0.5)))

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7]", cls("tanh")


@operator
class Silu(Elementwise):
    """x * sigmoid(x)"""

    torch = "silu"

    def apply(self, x: Scalar) -> Scalar:
        return x * sigmoid(x)


@operator
class Hardswish(Elementwise):
    """x * (minimum(maximum(x + 3, 0), 6)/6)"""

    onnx = "HardSwish"
    torch = "hardswish"

    def apply(self, x: Scalar) -> Scalar:
        return x * (minimum(relu(x + 3), 6) / 6)


@operator
class Hardsigmoid(Elementwise):
    """minimum(maximum(x + 3, 0), 6)/6"""

    torch = "hardsigmoid"

    def apply(self, x: Scalar) -> Scalar:
        return minimum(relu(x + 3), 6) / 6


@operator
class Mish(Elementwise):
    """x * tanh(log(1 + exp(x)))

    tanh(log(1 + exp(x))) is the fraction (e*e + 2*e)/(e*e + 2*e + 2) with e = exp(x). Where x >= 0 it is
    expanded by exp(-2*x), so that the one exponential taken, exp(-|x|), cannot overflow.
    """

    onnx = "Mish"
    torch = "mish"

    def apply(self, x: Scalar) -> Scalar:
        decay = exp(-abs(x))
        above = where(x >= 0, 1 + 2 * decay, decay * (decay + 2))
        below = above + where(x >= 0, 2 * decay * decay, 2)
        return x * (above / below)


@operator
class Softsign(Elementwise):
    """x/(1 + |x|)"""

    onnx = "Softsign"
    torch = "softsign"

    def apply(self, x: Scalar) -> Scalar:
        return x / (1 + abs(x))


@operator
class LogSigmoid(Elementwise):
    """log(1/(1 + exp(-x))) = -maximum(-x, 0) - log1p(exp(-|x|))"""

    torch = "logsigmoid"

    def apply(self, x: Scalar) -> Scalar:
        return -softplus(-x)


ACTIVATIONS = (
    Identity, Sigmoid, Tanh, Relu, Softplus, Abs, Power, ClippedRelu, LeakyRelu, Elu, Clamp,
    Gelu, Silu, Hardswish, Hardsigmoid, Mish, Softsign, LogSigmoid,
)  # fmt: skip
