"""Sums and products with operands: bias, scale, residual, frozen batch normalization, learnt slope."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.language.declarations import PER, Along, operand, parameter, word
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar, maximum, minimum, sqrt, where

MODES = {"spatial": "channel", "per_activation": "activation"}  # of batch_norm: the extents of its statistics


@operator
class Bias(Elementwise):
    """x + bias

    bias: (c,), one element a channel.
    """

    bias = operand("channel")

    def apply(self, x: Scalar, bias: Scalar) -> Scalar:
        return x + bias


@operator
class Scale(Elementwise):
    """x * scale

    scale: (c,), one element a channel; with `shared` one element for all.
    """

    scale = operand(lambda op, _: "shared" if op.shared else "channel")
    shared: bool = False

    def apply(self, x: Scalar, scale: Scalar) -> Scalar:
        return x * scale

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7]", cls(shared=True)


@operator
class Add(Elementwise):
    """alpha1 * x + alpha2 * other

    other: the shape of src: a residual; or the name of an earlier value: `save(y) -> relu -> add(other=y)`.

    MIOpen: TensorScaleAdd, with alpha1 and alpha2 of miopenConvolutionBiasActivationForward.
    """

    onnx = "Add"
    torch = "add"

    other: str | None = operand("element", default=None, kw_only=True)
    alpha1: float = parameter(default=1.0)
    alpha2: float = parameter(default=1.0)

    def apply(self, x: Scalar, other: Scalar, alpha1: Scalar, alpha2: Scalar) -> Scalar:
        return alpha1 * x + alpha2 * other

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7]", cls(alpha1=0.5, alpha2=-2)


@operator
class Mul(Elementwise):
    """x * other

    other: the shape of src: a gate; or the name of an earlier value, `save(gate) -> sigmoid -> mul(gate)`.
    """

    onnx = "Mul"
    torch = "mul"

    other: str | None = operand("element", default=None, kw_only=True)

    def apply(self, x: Scalar, other: Scalar) -> Scalar:
        return x * other


@operator
class Div(Elementwise):
    """x / other, or other / x if turned

    other: as of mul.
    """

    onnx = "Div"
    torch = "div"

    other: str | None = operand("element", default=None, kw_only=True)
    turned: bool = False

    def apply(self, x: Scalar, other: Scalar) -> Scalar:
        return other / x if self.turned else x / other

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7]", cls(turned=True)


@operator
class Maximum(Elementwise):
    """max(x, other), NaN where either is

    other: as of mul.
    """

    onnx = "Max"
    torch = "maximum"

    other: str | None = operand("element", default=None, kw_only=True)

    def apply(self, x: Scalar, other: Scalar) -> Scalar:
        return maximum(x, other)


@operator
class Minimum(Elementwise):
    """min(x, other), NaN where either is

    other: as of mul.
    """

    onnx = "Min"
    torch = "minimum"

    other: str | None = operand("element", default=None, kw_only=True)

    def apply(self, x: Scalar, other: Scalar) -> Scalar:
        return minimum(x, other)


def _statistics(op: BatchNorm, _: TensorSpec) -> str:
    return MODES[op.mode]


def _is_plain(op: BatchNorm) -> bool:
    return not op.inverse


@operator
class BatchNorm(Elementwise):
    """(x - mean)/sqrt(variance + epsilon) * scale + shift

    Normalizes by statistics frozen at training time. `inverse` takes inverse_variance, which is
    1/sqrt(variance + epsilon), MIOpen's saved form, in the place of variance; there is no epsilon then.

    mean, variance or inverse_variance, scale, shift: (c,) with mode `spatial`; (c, *spatial) with
    `per_activation`.
    """

    onnx = "BatchNormalization"
    torch = "batch_norm"

    mean = operand(_statistics)
    variance = operand(_statistics, when=_is_plain)
    inverse_variance = operand(_statistics, when="inverse")
    scale = operand(_statistics)
    shift = operand(_statistics)
    mode: str = word(MODES, default="spatial")
    inverse: bool = False
    epsilon: float = parameter(default=1e-5, when=_is_plain)

    @property
    def reads(self) -> str | None:
        """The channels at axis 1, as in PyTorch; per activation no axis but the first is told apart."""
        return "channels" if self.mode == "spatial" else None

    def apply(
        self,
        x: Scalar,
        mean: Scalar,
        scale: Scalar,
        shift: Scalar,
        variance: Scalar | None = None,
        inverse_variance: Scalar | None = None,
        epsilon: Scalar | None = None,
    ) -> Scalar:
        """The formula; brackets hold the part that depends on operands alone, to be computed once."""
        if variance is not None and epsilon is not None:
            return (x - mean) * (scale / sqrt(variance + epsilon)) + shift
        assert inverse_variance is not None  # by the declarations above
        return (x - mean) * (scale * inverse_variance) + shift

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        for mode in MODES:
            yield "f32[2x5x3x7, nhwc]", cls(mode, inverse=True)
        yield "f32[2x5x3x7]", cls("per_activation", epsilon=1e-3)


@operator
class Prelu(Elementwise):
    """x where x > 0, else slope * x

    slope: (c,); with `shared` one element for all.
    """

    onnx = "PRelu"
    torch = "prelu"

    slope = operand(lambda op, _: "shared" if op.shared else "channel")
    shared: bool = False

    @property
    def reads(self) -> str | None:
        """The channels at axis 1, as in PyTorch; none where all share a slope."""
        return None if self.shared else "channels"

    def apply(self, x: Scalar, slope: Scalar) -> Scalar:
        return where(x > 0, x, slope * x)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7, nhwc]", cls(shared=True)


def _along(op: Spread, src: TensorSpec) -> str | Along:
    """All axes but the first are a word of `PER`."""
    found = tuple(axis for axis in op.numbered(src) if axis < src.rank)
    is_word = found == PER["activation"](src)
    return "activation" if is_word else Along(found, tuple(src.shape[axis] for axis in found))


@dataclass(frozen=True)
class Spread(Elementwise):
    """An operator with an operand that has some axes of src; along the others it is the same."""

    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = self.axes if isinstance(self.axes, tuple | list) else (self.axes,)
        if not axes or not all(map(is_integer, axes)):
            raise refused(self.name, "axes", "must be numbers of axes, at least one", got=shown(self.axes))
        self._set("axes", tuple(map(int, axes)))

    def numbered(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes, none from the end."""
        return tuple(axis + src.rank * (axis < 0) for axis in self.axes)

    def output(self, src: TensorSpec) -> TensorSpec:
        """As of every elementwise operator; a PlanError where kernels have no places for the axes."""
        found, ahead = self.numbered(src), src.canonical_order[:1]
        is_known = set(found) <= set(range(src.rank)) and found == tuple(sorted(set(found)))
        if not is_known or not ({*ahead} <= {*found} or found == PER["activation"](src)):
            got, want = f"{self.axes} of {src}", "the outermost in memory among them, or all but the first"
            raise refused(self.name, "axes", "must be in order, with the outermost", got=got, want=want)
        return super().output(src)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls((0,))
        yield "f32[2x3x7]", cls((-2, -1))
        yield "f32[2x3x7]", cls((0, 2))
        yield "f32[2x5x3x7, nhwc]", cls((0, 1))


@operator
class AddAlong(Spread):
    """alpha1 * x + alpha2 * other

    other: src's extents along `axes`, which are the first and any others, or all but the first:
    `f32[8x512x768] -> add_along((1, 2))` adds what all images share.
    """

    other = operand(_along)
    alpha1: float = parameter(default=1.0)
    alpha2: float = parameter(default=1.0)
    apply = Add.apply


@operator
class MulAlong(Spread):
    """x * other

    other: as of add_along: `f32[8x512x768] -> mul_along((0, 1))` has a factor for each row.
    """

    other = operand(_along)
    apply = Mul.apply


AFFINE = (Bias, Scale, Add, Mul, Div, Maximum, Minimum, BatchNorm, Prelu, AddAlong, MulAlong)
