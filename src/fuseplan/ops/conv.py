"""Convolutions in one, two and three spatial axes, and their gradients of src, transposed convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, replace
from itertools import product
from math import prod
from typing import Any

from fuseplan.errors import PlanError
from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.declarations import Array, Shape, count, operand, word
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Given, Op, operator
from fuseplan.ops.windows import Padding, Pair, PerAxis, Window, Windowed, columns_of, reach, shortest

PRECISIONS = ("full", "tf32")
INTEGERS = ("i8", "u8", "i16")  # that a weight of i8 multiplies, with exact sums in i32


def factor(_: Op, src: TensorSpec) -> str:
    """The dtype of the weight that src is multiplied by."""
    return "i8" if src.dtype in INTEGERS else src.dtype


def summed(dst: TensorSpec) -> TensorSpec:
    """The tensor of the sums of products, told as one of the factors' dtype."""
    return dst.with_dtype("i32") if dst.dtype in INTEGERS else dst


def check_precision(operator: str, precision: str, src: TensorSpec) -> None:
    """Checks that a precision applies to src's dtype; a PlanError for tf32 of another dtype than f32."""
    if precision == "tf32" and src.dtype != "f32":
        raise PlanError(
            f"{operator}: precision=tf32 rounds the factors of f32, and src has another dtype",
            field="precision",
            got=str(src),
            want="f32",
            remedy=f"Leave precision out: products of {src.dtype} are exact"
            if src.itemsize == 2
            else "Leave precision out",
        )


@operator
class OfConvolution(Windowed):
    """What convolutions and the gradients of their weights share: the fields of a convolution.

    Precision is `full`, or `tf32`: then the factors of an f32 product may be rounded to 10 bits where the
    hardware is faster for it.
    """

    features: int = count()
    kernel: PerAxis
    _: KW_ONLY  # PyTorch's order is channels, features, kernel: three numbers would be taken for other fields
    stride: PerAxis = 1
    padding: Padding = 0
    dilation: PerAxis = 1
    groups: int = count(default=1)
    precision: str = word(PRECISIONS, default="full")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_numbers("kernel", "stride", "dilation")
        self._set("padding", self._canonical_padding())
        if self.features % self.groups:
            raise refused(
                self.name,
                "groups",
                "must divide the features",
                got=f"features={self.features}, groups={self.groups}",
                want=f"features a multiple of {self.groups}",
            )

    def weight_shape(self, src: TensorSpec) -> Shape:
        """The convolution's weight: (features, c/groups, *kernel)."""
        return (self.features, src.channels // self.groups, *self.per_axis(self.kernel))

    def convolved(self, src: TensorSpec) -> Shape:
        """n, features, and along each axis (extent + padding - dilation*(kernel - 1) - 1)//stride + 1.

        Raises:
            PlanError: src has another rank; its channels do not divide among the groups; an extent would be
                0; the precision is not for src's dtype.
        """
        check_precision(self.name, self.precision, src)
        self.check_window(src, f"conv{len(src.spatial)}d" if src.spatial else "matmul")
        if src.channels % self.groups:
            raise PlanError(
                f"{self.name}: the groups must divide the channels of its input",
                got=f"{src.channels} channels, groups={self.groups}",
                want=f"a multiple of {self.groups} channels",
            )
        return (src.batch, self.features, *self.window(src).dst)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape that `convolved` tells; a PlanError as it says."""
        return src.with_shape(self.convolved(src))


@operator
class Conv(OfConvolution):
    """What convolutions of any number of spatial axes share."""

    onnx = "Conv"
    torch = "conv"
    integers = INTEGERS

    weight = operand(OfConvolution.weight_shape, dtype=factor)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape that `convolved` tells; of integers the sums are i32."""
        return summed(super().output(src))

    def depth(self, src: TensorSpec) -> int:
        """Products that are summed into one element."""
        return prod(self.weight_shape(src)[1:])

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        weight = given.operands["weight"]
        return correlation(given.src, weight, self.window(given.spec), self.groups, given.by), {}


def correlation(src: Array, weight: Any, window: Window, groups: int, by: Arithmetic = ARRAYS) -> Array:
    """For each image and group, the weight times the windows of src as columns.

    Args:
        src: (n, c, *spatial).
        weight: (features, c/groups, *kernel); with an axis of images in front, each has its own.
        groups: of channels and features.
    """
    is_each = weight.ndim > src.ndim
    features = weight.shape[is_each]
    rows = weight.reshape(-1, groups, features // groups, prod(weight.shape[is_each + 1 :]))
    dst: Array = by.empty((len(src), features, *window.dst))
    for some, columns in columns_of(src, window, groups, by):
        # Not by `tensordot`: a factor of one element is an axpy there, and makes 0 of 0 * inf.
        dst[some] = ((rows[some] if is_each else rows) @ columns).reshape(-1, *dst.shape[1:])
    return dst


@operator
class Conv1d(Conv, axes=1):
    """dst[n, f, o] = sum over c, k of src[n, c, o*stride + k*dilation - padding] * weight[f, c, k]

    src: (n, c, w); weight: (features, c/groups, kernel); dst: (n, features, output). Its fields have the
    meaning of `conv2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x11]", cls(5, kernel=3)
        yield "f32[3x4x13, nwc]", cls(6, kernel=4, stride=3, padding=((2, 1),), dilation=2, groups=2)


@operator
class Conv2d(Conv, axes=2):
    """dst[n, f, o, p] = sum over c, k, l of src[n, c, o*stride + k*dilation - padding, ..]*weight[f, c, k, l]

    src: (n, c, h, w); weight: (features, c/groups, *kernel); dst: (n, features, *output). Along each axis,
    stride, dilation and padding are that axis's own, and the output has
    (extent + low + high - dilation*(kernel - 1) - 1)//stride + 1 elements.

    `kernel`, `stride` and `dilation` are a number for both axes, or one for each. `padding` is that too, or a
    pair (low, high) for each axis; `same`: ceil(extent/stride) elements, an odd one of padding at the high
    end; `valid`: 0. `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.

    Of integers of 8 and 16 bits, the weight is i8, and dst i32 and exact; where src has a zero point,
    `dequantize(i16, zero_points=True)` in front takes it away, so that padding counts as 0.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5x6x7, nhwc]", cls(7, kernel=1)
        yield "f32[2x3x9x11]", cls(5, kernel=3, padding=1)
        yield "f32[2x3x9x8, nhwc]", cls(4, kernel=(3, 5), stride=2, padding="same")
        yield "f32[2x6x9x10]", cls(9, kernel=3, stride=(1, 2), padding=((0, 1), (2, 1)), dilation=2, groups=3)
        yield "f32[2x7x5x6, nhwc]", cls(7, kernel=3, padding=1, groups=7)


@operator
class Conv3d(Conv, axes=3):
    """dst[n, f, o..] = sum over c, k.. of src[n, c, o*stride + k*dilation - padding, ..] * weight[f, c, k..]

    src: (n, c, d, h, w); weight: (features, c/groups, *kernel); dst: (n, features, *output). Along each axis,
    stride, dilation and padding are that axis's own; the fields have the meaning of `conv2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x4x5x6]", cls(5, kernel=3, padding=1)
        yield "f32[2x4x5x3x7, ndhwc]", cls(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding="same", groups=2)


CONVOLUTIONS = (Conv1d, Conv2d, Conv3d)


@operator
class ConvTranspose(OfConvolution):
    """What transposed convolutions of any number of spatial axes share.

    Features are the output's; `output_padding` makes an axis longer at its end, by less than its stride or
    its dilation.
    """

    onnx = "ConvTranspose"
    torch = "conv_transpose"
    nothing = "the padding takes away the whole output"

    _: KW_ONLY
    output_padding: PerAxis = 0

    weight = operand(lambda op, src: op.weight_shape(src))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding == "same":
            raise refused(self.name, "padding", "is a number here", got="same", want="such as 1 or ((0, 1),)")
        ends = self._axes_of("output_padding", self.output_padding)
        if not all(is_integer(each) and 0 <= each < 2**31 for each in ends):
            want = "a whole number from 0 to 2^31 - 1, or one for each axis"
            raise refused(
                self.name, "output_padding", "must be 0 or more", got=shown(self.output_padding), want=want
            )
        limits = map(max, self.steps, self.per_axis(self.dilation))
        if any(more >= limit for more, limit in zip(ends, limits, strict=True)):
            problem = "must be less than the stride or the dilation of its axis"
            got = f"{shown(self.output_padding)}, stride={self.stride}, dilation={self.dilation}"
            raise refused(self.name, "output_padding", problem, got=got)
        self._set("output_padding", shortest(tuple(map(int, ends))))

    def weight_shape(self, src: TensorSpec) -> Shape:
        """The weight: (c, features/groups, *kernel)."""
        return (src.channels, self.features // self.groups, *self.per_axis(self.kernel))

    def window(self, src: TensorSpec) -> Window:
        """How src's elements spread over the output, whose extents are the window's `dst`."""
        found = super().window(src)
        dst = (
            extent + more for extent, more in zip(found.dst, self.per_axis(self.output_padding), strict=True)
        )
        return replace(found, dst=tuple(dst))

    def _count(self, extent: int, padding: Pair, over: int, stride: int) -> int:
        return (extent - 1) * stride + over - sum(padding)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The sum in float64: for each tap, one product of matrices, added where the tap lies."""
        window, weight = self.window(given.spec), given.operands["weight"]
        by_groups = weight.reshape(self.groups, -1, *weight.shape[1:]).swapaxes(1, 2)
        return spread(given.src, by_groups, window, given.by.zeros), {}


def spread(src: Any, weight: Any, window: Window, zeros: Any) -> Any:
    """The transposed convolution, of NumPy's arrays or torch's tensors.

    Args:
        src: (n, c, *spatial).
        weight: (groups, features/groups, c/groups, *kernel).
        zeros: makes the sum of a shape, (n, features, *extents).
    """
    batch, groups, spatial = src.shape[0], weight.shape[0], src.shape[2:]
    rows = src.reshape(batch, groups, weight.shape[2], -1)
    reaches = map(reach, window.kernel, window.dilation)
    ends = [
        max((extent - 1) * stride + over, low + out)
        for extent, stride, over, (low, _), out in zip(
            spatial, window.stride, reaches, window.padding, window.dst, strict=True
        )
    ]
    dst = zeros((batch, groups * weight.shape[1], *ends))
    for tap in product(*map(range, window.kernel)):
        made = weight[(slice(None), slice(None), slice(None), *tap)] @ rows
        dst[(slice(None), slice(None), *_met(tap, spatial, window))] += made.reshape(batch, -1, *spatial)
    inner = (slice(low, low + out) for (low, _), out in zip(window.padding, window.dst, strict=True))
    return dst[(slice(None), slice(None), *inner)]


def _met(tap: Sequence[int], spatial: Sequence[int], window: Window) -> Iterator[slice]:
    """Where the output, with its padding, has a tap of each element of src."""
    for at, extent, stride, dilation in zip(tap, spatial, window.stride, window.dilation, strict=True):
        yield slice(at * dilation, at * dilation + (extent - 1) * stride + 1, stride)


@operator
class ConvTranspose1d(ConvTranspose, axes=1):
    """dst[n, f, i*stride + k*dilation - padding] = sum over c, i, k of src[n, c, i] * weight[c, f, k]

    src: (n, c, w); weight: (c, features/groups, kernel); dst: (n, features, output). Its fields have the
    meaning of `conv_transpose2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x7]", cls(5, kernel=3, stride=2, padding=1)
        yield "f32[1x4x5, nwc]", cls(6, kernel=4, stride=3, padding=((2, 1),), dilation=2, groups=2)


@operator
class ConvTranspose2d(ConvTranspose, axes=2):
    """dst[n, f, i*stride + k*dilation - padding, ..] = sum over c, i, k of src[n, c, i..] * weight[c, f, k..]

    The gradient of src of `conv2d` with the same fields, as PyTorch's `conv_transpose2d`. src: (n, c, h, w);
    weight: (c, features/groups, *kernel); dst: (n, features, *output). Along each axis the output has
    (extent - 1)*stride + dilation*(kernel - 1) + 1 - low - high + output_padding elements. `output_padding`
    is less than the axis's stride or its dilation.

    `kernel`, `stride`, `dilation` and `output_padding` are a number for both axes, or one for each; `padding`
    is that too, or a pair (low, high) for each axis. `precision` is `full`, or `tf32`: then the factors of
    f32 may be rounded to 10 bits.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x5x6x7, nhwc]", cls(7, kernel=2, stride=2)
        yield "f32[2x3x5x4]", cls(5, kernel=3, padding=1)
        yield "f32[1x3x5x7]", cls(4, kernel=4, stride=2, padding=1)
        yield "f32[2x6x4x3, nhwc]", cls(9, kernel=3, stride=2, padding=1, output_padding=1, groups=3)
        yield (
            "f32[1x4x3x5]",
            cls(6, kernel=(2, 3), stride=(3, 4), padding=((0, 1), (3, 2)), dilation=(2, 1), output_padding=2),
        )
        yield "f32[2x7x5x6]", cls(7, kernel=1, stride=2, groups=7)


@operator
class ConvTranspose3d(ConvTranspose, axes=3):
    """dst[n, f, i*stride + k*dilation - padding, ..] = sum over c, i, k of src[n, c, i..] * weight[c, f, k..]

    src: (n, c, d, h, w); weight: (c, features/groups, *kernel); dst: (n, features, *output). Its fields have
    the meaning of `conv_transpose2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[1x3x3x4x5]", cls(5, kernel=3, stride=2, padding=1, output_padding=(1, 0, 1))
        yield "f32[2x4x2x3x5, ndhwc]", cls(6, kernel=(1, 3, 2), stride=(2, 1, 2), padding=(0, 1, 0), groups=2)


TRANSPOSED = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
