"""Convolutions in one, two and three spatial axes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fuseplan.errors import PlanError, near_miss
from fuseplan.language.declarations import Array, Shape, operand
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import one_of, positive, refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op, operator

Pair = tuple[int, int]
PerAxis = int | tuple[int, ...]
PRECISIONS = ("full", "tf32")
Padding = int | str | tuple[int | Pair, ...]


@dataclass(frozen=True)
class Window:
    """How a kernel moves over a src: one entry a spatial axis, padding as (low, high)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[Pair, ...]
    dst: tuple[int, ...]


def check_precision(operator: str, precision: str, src: TensorSpec) -> None:
    """Checks that a precision applies to src's dtype.

    Raises:
        PlanError: tf32, and src is not f32.
    """
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


def _weight(op: Conv, src: TensorSpec) -> Shape:
    return (op.features, src.channels // op.groups, *op.per_axis(op.kernel))


@dataclass(frozen=True)
class Conv(Op):
    """What convolutions of any number of spatial axes share.

    Fields are kept in one form: a number where all axes agree, else a number an axis. Padding is a number,
    a number or (low, high) pair an axis, `same`, or `valid`, which is 0. Precision is `full`, or `tf32`: then
    the factors of an f32 product may be rounded to 10 bits where the hardware is faster for it.
    """

    kind = "contraction"
    onnx = "Conv"

    axes: ClassVar[int]

    features: int
    kernel: PerAxis
    _: KW_ONLY  # PyTorch's order is channels, features, kernel: three numbers would be taken for other fields
    stride: PerAxis = 1
    padding: Padding = 0
    dilation: PerAxis = 1
    groups: int = 1
    precision: str = "full"

    @property
    def reads(self) -> str:
        """Axis 1."""
        return "channels"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("features", "groups"):
            self._set(name, positive(self.name, name, getattr(self, name)))
        for name in ("kernel", "stride", "dilation"):
            values = self._axes_of(name, getattr(self, name))
            self._set(name, _shortest(tuple(positive(self.name, name, value) for value in values)))
        self._set("padding", self._canonical_padding())
        one_of(self.name, "precision", self.precision, PRECISIONS)
        if self.features % self.groups:
            raise refused(
                self.name,
                "groups",
                "must divide the features",
                got=f"features={self.features}, groups={self.groups}",
                want=f"features a multiple of {self.groups}",
            )

    def _axes_of(self, name: str, value: Any) -> tuple[Any, ...]:
        """The value for each spatial axis."""
        if not isinstance(value, tuple | list):
            return (value,) * self.axes
        if len(value) != self.axes:
            raise refused(
                self.name,
                name,
                f"must be one number, or one for each of {self.axes} spatial axes",
                got=shown(value),
            )
        return tuple(value)

    def _canonical_padding(self) -> Padding:
        if isinstance(self.padding, str):
            if self.padding in ("same", "valid"):
                return "same" if self.padding == "same" else 0
            raise refused(
                self.name,
                "padding",
                f"is not {shown(self.padding)}",
                want="same, valid, a number, or a number or (low, high) pair for each axis",
                remedy=near_miss(self.padding, ("same", "valid")),
            )
        pairs = tuple(self._pair(value) for value in self._axes_of("padding", self.padding))
        is_symmetric = all(low == high for low, high in pairs)
        return _shortest(tuple(low for low, _ in pairs)) if is_symmetric else pairs

    def _pair(self, value: Any) -> Pair:
        pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
        if len(pair) != 2 or not all(is_integer(side) and 0 <= side < 2**31 for side in pair):
            raise refused(
                self.name,
                "padding",
                "must be 0 to 2^31 - 1 at the low and the high end of each axis",
                got=shown(self.padding),
                want=f"such as 1, {(1,) * self.axes} or {((0, 1),) * self.axes}",
            )
        return int(pair[0]), int(pair[1])

    def per_axis(self, value: PerAxis) -> tuple[int, ...]:
        """One of `kernel`, `stride`, `dilation`, as a number a spatial axis."""
        return (value,) * self.axes if isinstance(value, int) else value

    def window(self, src: TensorSpec) -> Window:
        """How the kernel moves over `src`, `same` padding resolved; an output extent may be 0 or less."""
        kernel, stride, dilation = map(self.per_axis, (self.kernel, self.stride, self.dilation))
        reach = tuple(map(_reach, kernel, dilation))
        padding = self._padding_of(src.spatial, reach, stride)
        dst = tuple(
            (extent + low + high - over) // step + 1
            for extent, (low, high), over, step in zip(src.spatial, padding, reach, stride, strict=True)
        )
        return Window(kernel, stride, dilation, padding, dst)

    def _padding_of(self, spatial: Shape, reach: Shape, stride: Shape) -> tuple[Pair, ...]:
        if self.padding == "same":
            return tuple(map(_same, spatial, reach, stride))
        return tuple(self._pair(value) for value in self._axes_of("padding", self.padding))

    def output(self, src: TensorSpec) -> TensorSpec:
        """n, features, and along each axis (extent + padding - dilation*(kernel - 1) - 1)//stride + 1.

        Raises:
            PlanError: src has another rank; its channels do not divide among the groups; an extent would be
                0; the precision is not for src's dtype.
        """
        check_precision(self.name, self.precision, src)
        if len(src.spatial) != self.axes:
            raise PlanError(
                f"{self.name} takes a tensor with {self.axes} spatial axes",
                got=f"{src}, which has {len(src.spatial)}",
                want=f"rank {self.axes + 2}",
                remedy=f"This tensor is taken by {f'conv{len(src.spatial)}d' if src.spatial else 'matmul'}",
            )
        if src.channels % self.groups:
            raise PlanError(
                f"{self.name}: the groups must divide the channels of its input",
                got=f"{src.channels} channels, groups={self.groups}",
                want=f"a multiple of {self.groups} channels",
            )
        window = self.window(src)
        if min(window.dst) < 1:
            raise PlanError(
                f"{self.name}: the kernel is larger than its padded input",
                got=f"kernel={self.kernel}, dilation={self.dilation}, padding={self.padding} over {src}",
                want="an output of 1 or more along each axis",
            )
        return src.with_shape((src.batch, self.features, *window.dst))

    def reference(
        self,
        src: Array,
        operands: Mapping[str, Array],
        parameters: Mapping[str, float],
        names: str | None = None,
    ) -> Array:
        """The correlation in float64: for each image and group, its windows as rows, times the weight."""
        window = self.window(TensorSpec(src.shape))
        dst = np.empty((src.shape[0], self.features, *window.dst))
        weights = np.split(np.asarray(operands["weight"], np.float64), self.groups)
        taps = tuple(range(-self.axes, 0))  # the kernel's axes, the last of the windows
        beside_channels = tuple(range(1, 1 + self.axes))  # as the weight has them
        for image, result in zip(_windows(src, window), dst, strict=True):
            groups = zip(np.split(image, self.groups), np.split(result, self.groups), weights, strict=True)
            for rows, features, weight in groups:
                columns = np.moveaxis(rows, taps, beside_channels).reshape(weight[0].size, -1)
                with np.errstate(all="ignore"):  # infinities and NaN are results like any other
                    # Not by `tensordot`: a factor of one element is an axpy there, and makes 0 of 0 * inf.
                    product = np.matmul(weight.reshape(-1, columns.shape[0]), columns)
                features[...] = product.reshape(features.shape)
        return dst

    @classmethod
    @abstractmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Tensors and convolutions of them."""


def _windows(src: Array, window: Window) -> Array:
    """The elements under the kernel at each place: (n, c, *dst, *kernel), a view of the padded src."""
    axes = len(window.kernel)
    padded = np.pad(np.asarray(src, np.float64), ((0, 0), (0, 0), *window.padding))
    reach = tuple(map(_reach, window.kernel, window.dilation))
    steps = [slice(None, None, step) for step in (1, 1, *window.stride, *window.dilation)]
    everywhere: Array = sliding_window_view(padded, reach, axis=tuple(range(2, 2 + axes)))
    return everywhere[tuple(steps)]


def _reach(taps: int, dilation: int) -> int:
    """Elements from the kernel's first tap to its last."""
    return dilation * (taps - 1) + 1


def _same(extent: int, reach: int, stride: int) -> Pair:
    """Padding that makes ceil(extent/stride) of an axis; an odd element goes to the high end, as in ONNX."""
    total = max(0, (-(-extent // stride) - 1) * stride + reach - extent)
    return total // 2, total - total // 2


def _shortest(values: tuple[int, ...]) -> PerAxis:
    return values[0] if len(set(values)) == 1 else values


@operator
class Conv1d(Conv):
    """dst[n, f, o] = sum over c, k of src[n, c, o*stride + k*dilation - padding] * weight[f, c, k]

    src: (n, c, w); weight: (features, c/groups, kernel); dst: (n, features, output). Its fields have the
    meaning of `conv2d`'s.
    """

    torch = "conv1d"
    axes = 1

    weight = operand(_weight)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Each attribute, on odd sizes."""
        yield "f32[2x3x11]", cls(5, kernel=3)
        yield "f32[1x4x13, nwc]", cls(6, kernel=4, stride=3, padding=((2, 1),), dilation=2, groups=2)


@operator
class Conv2d(Conv):
    """dst[n, f, o, p] = sum over c, k, l of src[n, c, o*stride + k*dilation - padding, ..]*weight[f, c, k, l]

    src: (n, c, h, w); weight: (features, c/groups, *kernel); dst: (n, features, *output). Along each axis,
    stride, dilation and padding are that axis's own, and the output has
    (extent + low + high - dilation*(kernel - 1) - 1)//stride + 1 elements.

    `kernel`, `stride` and `dilation` are a number for both axes, or one for each. `padding` is that too, or a
    pair (low, high) for each axis; `same`: ceil(extent/stride) elements, an odd one of padding at the high
    end; `valid`: 0. `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.
    """

    torch = "conv2d"
    axes = 2

    weight = operand(_weight)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Each attribute, on odd sizes."""
        yield "f32[1x5x6x7, nhwc]", cls(7, kernel=1)
        yield "f32[2x3x9x11]", cls(5, kernel=3, padding=1)
        yield "f32[2x3x9x8, nhwc]", cls(4, kernel=(3, 5), stride=2, padding="same")
        yield "f32[1x6x9x10]", cls(9, kernel=3, stride=(1, 2), padding=((0, 1), (2, 1)), dilation=2, groups=3)
        yield "f32[2x7x5x6, nhwc]", cls(7, kernel=3, padding=1, groups=7)


@operator
class Conv3d(Conv):
    """dst[n, f, o..] = sum over c, k.. of src[n, c, o*stride + k*dilation - padding, ..] * weight[f, c, k..]

    src: (n, c, d, h, w); weight: (features, c/groups, *kernel); dst: (n, features, *output). Along each axis,
    stride, dilation and padding are that axis's own; the fields have the meaning of `conv2d`'s.
    """

    torch = "conv3d"
    axes = 3

    weight = operand(_weight)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Each attribute, on odd sizes."""
        yield "f32[1x3x4x5x6]", cls(5, kernel=3, padding=1)
        yield "f32[2x4x5x3x7, ndhwc]", cls(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding="same", groups=2)


CONVOLUTIONS = (Conv1d, Conv2d, Conv3d)
