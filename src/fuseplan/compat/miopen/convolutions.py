"""Convolution descriptors: the attributes of `conv1d`, `conv2d` and `conv3d`, before the weight is known."""

from __future__ import annotations

from fuseplan.compat.miopen.call import Object, bad_parameter, not_implemented, not_initialized
from fuseplan.compat.miopen.enums import miopenConvolutionAttrib_t, miopenMathType_t
from fuseplan.compat.miopen.enums import miopenConvolutionMode_t as Mode
from fuseplan.compat.miopen.tensors import miopenTensorDescriptor_t as Tensor
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.conv import CONVOLUTIONS, Conv

Attribute = miopenConvolutionAttrib_t
PRECISION = {miopenMathType_t.miopenMathDefault: "tf32", miopenMathType_t.miopenMathPedantic: "full"}
# Each attribute with its first value, the values with a meaning here, and the meaning.
ATTRIBUTES: dict[Attribute, tuple[int, tuple[int, ...], str]] = {
    Attribute.MIOPEN_CONVOLUTION_ATTRIB_FP16_ALT_IMPL: (
        *(-1, (-1, 0, 1)),
        "-1, 0 or 1; it concerns gfx90a alone and has no effect elsewhere",
    ),
    Attribute.MIOPEN_CONVOLUTION_ATTRIB_DETERMINISTIC: (
        *(0, (0, 1)),
        "0 or 1; all kernels give the same result every time",
    ),
    Attribute.MIOPEN_CONVOLUTION_ATTRIB_FP8_ROUNDING_MODE: (0, (0,), "0: there are no f8 tensors"),
    Attribute.MIOPEN_CONVOLUTION_ATTRIB_MATH_TYPE: (
        *(miopenMathType_t.miopenMathPedantic, tuple(PRECISION)),
        "miopenMathDefault (f32 factors may be rounded to TF32) or miopenMathPedantic",
    ),
}


class miopenConvolutionDescriptor_t(Object):
    """How a kernel moves; nothing until it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False
        self.mode = Mode.miopenConvolution
        self.padding: tuple[int, ...] = ()
        self.stride: tuple[int, ...] = ()
        self.dilation: tuple[int, ...] = ()
        self.groups = 1
        self.attributes = {name: first for name, (first, _, _) in ATTRIBUTES.items()}

    def set(
        self, mode: Mode, padding: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
    ) -> None:
        """Sets mode, padding, stride and dilation; a StatusError where a number is out of its range."""
        for name, values, least in (("pad", padding, 0), ("stride", stride, 1), ("dilation", dilation, 1)):
            if min(values) < least:
                raise bad_parameter(f"{name} is {least} or more along each axis; got {values}")
        is_old_word = mode in (Mode.miopenGroupConv, Mode.miopenDepthwise)
        self.mode = Mode.miopenConvolution if is_old_word else mode
        self.padding, self.stride, self.dilation = padding, stride, dilation
        self.is_set = True

    def set_attribute(self, name: Attribute, value: int) -> None:
        """Sets an attribute."""
        _, known, meaning = ATTRIBUTES[name]
        if value not in known:
            raise bad_parameter(f"{name.name} is {meaning}; got {value}")
        self.attributes[name] = value

    def checked(self, axes: int | None = None) -> miopenConvolutionDescriptor_t:
        """Itself, if it was initialised and, where `axes` is given, for so many spatial axes.

        Raises:
            StatusError: it is not.
        """
        if not self.is_set:
            raise not_initialized(
                "the convolution descriptor was never set: miopenInitConvolutionDescriptor says how the "
                "kernel moves"
            )
        if axes is not None and len(self.padding) != axes:
            raise bad_parameter(
                f"the convolution descriptor has {len(self.padding)} spatial axes; want {axes}"
            )
        return self

    def operator(self, src: TensorSpec, weight: TensorSpec) -> Conv:
        """The convolution of src by a weight.

        Raises:
            StatusError: it is transposed, or the weight's channels, axes or type are not src's.
            PlanError: there is no such convolution.
        """
        axes = len(self.checked().padding)
        if weight.rank - 2 != axes:
            raise bad_parameter(
                f"the convolution descriptor has {axes} spatial axes; "
                f"the filter {weight} has {weight.rank - 2}"
            )
        if self.mode is Mode.miopenTranspose:
            raise not_implemented("miopenTranspose: transposed convolutions are not supported")
        if weight.dtype != src.dtype:
            raise bad_parameter(f"the types of input and filter differ: {src} and {weight}")
        if weight.shape[1] * self.groups != src.channels:
            raise bad_parameter(
                f"the channels of input and filter do not match: {src} has {src.channels}; "
                f"the filter {weight} takes {weight.shape[1]} in each of {self.groups} groups"
            )
        math = miopenConvolutionAttrib_t.MIOPEN_CONVOLUTION_ATTRIB_MATH_TYPE
        is_single = src.dtype == "f32"
        make = CONVOLUTIONS[len(self.padding) - 1]
        return make(
            weight.shape[0],
            weight.shape[2:],
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            precision=PRECISION[miopenMathType_t(self.attributes[math])] if is_single else "full",
        )

    def output_axes(self, src: Tensor, weight: Tensor) -> tuple[int, tuple[int, ...]]:
        """The number and the lengths of the axes of the result for src."""
        shape = self.operator(src.spec, weight.spec).output(src.spec).shape
        return len(shape), shape

    def output_2d(self, src: Tensor, weight: Tensor) -> tuple[int, ...]:
        """The lengths of the result for src, over two spatial axes."""
        return self.checked(2).output_axes(src, weight)[1]

    def read(self, most: int) -> tuple[int | tuple[int, ...], ...]:
        """The number of spatial axes; padding, stride and dilation of at most so many of them; the mode."""
        told = self.checked()
        return len(told.padding), told.padding[:most], told.stride[:most], told.dilation[:most], told.mode

    def read_2d(self) -> tuple[int, ...]:
        """Mode, padding, stride and dilation over two spatial axes."""
        told = self.checked(2)
        return (told.mode, *told.padding, *told.stride, *told.dilation)
