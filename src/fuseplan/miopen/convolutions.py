"""Convolution descriptors: the attributes of `conv1d`, `conv2d` and `conv3d`, before the weight is known."""

from __future__ import annotations

from fuseplan.errors import counted
from fuseplan.miopen.call import Extents, Object, Ref, StatusError, api, bad_parameter, not_implemented, write
from fuseplan.miopen.enums import (
    miopenConvolutionAttrib_t,
    miopenConvolutionMode_t,
    miopenMathType_t,
    miopenStatus_t,
)
from fuseplan.miopen.tensors import miopenTensorDescriptor_t
from fuseplan.ops.conv import CONVOLUTIONS, Conv
from fuseplan.tensor import TensorSpec

PRECISION = {miopenMathType_t.miopenMathDefault: "tf32", miopenMathType_t.miopenMathPedantic: "full"}
# Each attribute with its value at first, and those that mean something here.
ATTRIBUTES: dict[miopenConvolutionAttrib_t, tuple[int, tuple[int, ...], str]] = {
    miopenConvolutionAttrib_t.MIOPEN_CONVOLUTION_ATTRIB_FP16_ALT_IMPL: (
        -1,
        (-1, 0, 1),
        "-1, 0 or 1; it concerns gfx90a alone and has no effect elsewhere",
    ),
    miopenConvolutionAttrib_t.MIOPEN_CONVOLUTION_ATTRIB_DETERMINISTIC: (
        0,
        (0, 1),
        "0 or 1; all kernels give the same result every time",
    ),
    miopenConvolutionAttrib_t.MIOPEN_CONVOLUTION_ATTRIB_FP8_ROUNDING_MODE: (
        0,
        (0,),
        "0: there are no f8 tensors",
    ),
    miopenConvolutionAttrib_t.MIOPEN_CONVOLUTION_ATTRIB_MATH_TYPE: (
        miopenMathType_t.miopenMathPedantic,
        tuple(PRECISION),
        "miopenMathDefault (f32 factors may be rounded to TF32) or miopenMathPedantic",
    ),
}


class miopenConvolutionDescriptor_t(Object):
    """How a kernel moves; nothing until it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False
        self.mode = miopenConvolutionMode_t.miopenConvolution
        self.padding: tuple[int, ...] = ()
        self.stride: tuple[int, ...] = ()
        self.dilation: tuple[int, ...] = ()
        self.groups = 1
        self.attributes = {name: first for name, (first, _, _) in ATTRIBUTES.items()}

    def set(
        self,
        mode: miopenConvolutionMode_t,
        padding: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
    ) -> None:
        """Sets what the Init calls say.

        Raises:
            StatusError: a number is out of its range.
        """
        for name, values, least in (("pad", padding, 0), ("stride", stride, 1), ("dilation", dilation, 1)):
            if min(values) < least:
                raise bad_parameter(f"{name} is {least} or more along each axis; got {values}")
        is_old_word = mode in (
            miopenConvolutionMode_t.miopenGroupConv,
            miopenConvolutionMode_t.miopenDepthwise,
        )
        self.mode = miopenConvolutionMode_t.miopenConvolution if is_old_word else mode
        self.padding, self.stride, self.dilation = padding, stride, dilation
        self.is_set = True

    def checked(self, axes: int | None = None) -> miopenConvolutionDescriptor_t:
        """Itself, if it was initialised and, where `axes` is given, for so many spatial axes.

        Raises:
            StatusError: it is not.
        """
        if not self.is_set:
            raise StatusError(
                miopenStatus_t.miopenStatusNotInitialized,
                "the convolution descriptor was never set: miopenInitConvolutionDescriptor says how the "
                "kernel moves",
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
        if self.mode is miopenConvolutionMode_t.miopenTranspose:
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

    def output(self, src: TensorSpec, weight: TensorSpec) -> TensorSpec:
        """What the convolution makes of src."""
        return self.operator(src, weight).output(src)


@api
def miopenCreateConvolutionDescriptor(convDesc: Ref) -> None:
    """Makes a convolution descriptor; an Init call says how the kernel moves."""
    convDesc.value = miopenConvolutionDescriptor_t()


@api
def miopenInitConvolutionDescriptor(
    convDesc: miopenConvolutionDescriptor_t,
    c_mode: miopenConvolutionMode_t,
    pad_h: int,
    pad_w: int,
    stride_h: int,
    stride_w: int,
    dilation_h: int,
    dilation_w: int,
) -> None:
    """Sets a convolution over two spatial axes."""
    convDesc.set(c_mode, (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w))


@api
def miopenInitConvolutionNdDescriptor(
    convDesc: miopenConvolutionDescriptor_t,
    spatialDim: int,
    padA: Extents,
    strideA: Extents,
    dilationA: Extents,
    c_mode: miopenConvolutionMode_t,
) -> None:
    """Sets a convolution over one to three spatial axes."""
    if not 1 <= spatialDim <= len(CONVOLUTIONS):
        raise bad_parameter(f"`spatialDim` is 1 to {len(CONVOLUTIONS)}; got {spatialDim}")
    for name, values in (("padA", padA), ("strideA", strideA), ("dilationA", dilationA)):
        if len(values) != spatialDim:
            raise bad_parameter(
                f"`{name}` has {counted(len(values), 'number')}; want spatialDim = {spatialDim}"
            )
    convDesc.set(c_mode, padA, strideA, dilationA)


@api
def miopenSetConvolutionGroupCount(convDesc: miopenConvolutionDescriptor_t, groupCount: int) -> None:
    """Divides the channels into groups that are convolved apart."""
    if groupCount < 1:
        raise bad_parameter(f"`groupCount` is 1 or more; got {groupCount}")
    convDesc.groups = groupCount


@api
def miopenSetConvolutionAttribute(
    convDesc: miopenConvolutionDescriptor_t, attr: miopenConvolutionAttrib_t, value: int
) -> None:
    """Sets an attribute; MATH_TYPE says whether factors of f32 may be rounded to TF32."""
    _, known, meaning = ATTRIBUTES[attr]
    if value not in known:
        raise bad_parameter(f"{attr.name} is {meaning}; got {value}")
    convDesc.attributes[attr] = value


@api
def miopenGetConvolutionAttribute(
    convDesc: miopenConvolutionDescriptor_t, attr: miopenConvolutionAttrib_t, value: Ref
) -> None:
    """Reads an attribute."""
    value.value = int(convDesc.attributes[attr])


@api
def miopenGetConvolutionGroupCount(convDesc: miopenConvolutionDescriptor_t, groupCount: Ref) -> None:
    """Reads the number of groups."""
    groupCount.value = convDesc.groups


@api
def miopenGetConvolutionSpatialDim(convDesc: miopenConvolutionDescriptor_t, spatialDim: Ref) -> None:
    """Reads the number of spatial axes."""
    spatialDim.value = len(convDesc.checked().padding)


@api
def miopenGetConvolutionDescriptor(
    convDesc: miopenConvolutionDescriptor_t,
    c_mode: Ref,
    pad_h: Ref,
    pad_w: Ref,
    stride_h: Ref,
    stride_w: Ref,
    dilation_h: Ref,
    dilation_w: Ref,
) -> None:
    """Reads a convolution over two spatial axes."""
    told = convDesc.checked(2)
    c_mode.value = told.mode
    cells = (pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w)
    write(cells, (*told.padding, *told.stride, *told.dilation))


@api
def miopenGetConvolutionNdDescriptor(
    convDesc: miopenConvolutionDescriptor_t,
    requestedSpatialDim: int,
    spatialDim: Ref,
    padA: Ref,
    strideA: Ref,
    dilationA: Ref,
    c_mode: Ref,
) -> None:
    """Reads a convolution; of its spatial axes at most as many as requested, as tuples."""
    told = convDesc.checked()
    if requestedSpatialDim < 0:
        raise bad_parameter(f"`requestedSpatialDim` is 0 or more; got {requestedSpatialDim}")
    spatialDim.value, c_mode.value = len(told.padding), told.mode
    for cell, values in ((padA, told.padding), (strideA, told.stride), (dilationA, told.dilation)):
        cell.value = values[:requestedSpatialDim]


@api
def miopenGetConvolutionForwardOutputDim(
    convDesc: miopenConvolutionDescriptor_t,
    inputTensorDesc: miopenTensorDescriptor_t,
    filterDesc: miopenTensorDescriptor_t,
    n: Ref,
    c: Ref,
    h: Ref,
    w: Ref,
) -> None:
    """Computes the lengths of a convolution's result over two spatial axes."""
    convDesc.checked(2)
    shape = convDesc.output(inputTensorDesc.spec, filterDesc.spec).shape
    write((n, c, h, w), shape)


@api
def miopenGetConvolutionNdForwardOutputDim(
    convDesc: miopenConvolutionDescriptor_t,
    inputTensorDesc: miopenTensorDescriptor_t,
    filterDesc: miopenTensorDescriptor_t,
    nDim: Ref,
    outputTensorDimA: Ref,
) -> None:
    """Computes the lengths of a convolution's result, as a tuple."""
    shape = convDesc.output(inputTensorDesc.spec, filterDesc.spec).shape
    nDim.value, outputTensorDimA.value = len(shape), shape


@api
def miopenDestroyConvolutionDescriptor(convDesc: miopenConvolutionDescriptor_t) -> None:
    """Ends a convolution descriptor; plans that were made with it keep what it said."""
    convDesc.destroy()
