"""Tensor descriptors: fuseplan's `TensorSpec`, made and read by MIOpen's calls."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.errors import counted
from fuseplan.miopen.call import Extents, Object, Ref, StatusError, api, bad_parameter, not_implemented, write
from fuseplan.miopen.enums import (
    miopenBatchNormMode_t,
    miopenDataType_t,
    miopenStatus_t,
    miopenTensorLayout_t,
)
from fuseplan.op import PER
from fuseplan.ops.affine import MODES
from fuseplan.tensor import TensorSpec

DTYPES = {
    miopenDataType_t.miopenHalf: "f16",
    miopenDataType_t.miopenFloat: "f32",
    miopenDataType_t.miopenBFloat16: "bf16",
    miopenDataType_t.miopenDouble: "f64",
}
LAYOUTS = {
    miopenTensorLayout_t.miopenTensorNCHW: "nchw",
    miopenTensorLayout_t.miopenTensorNHWC: "nhwc",
    miopenTensorLayout_t.miopenTensorNCDHW: "ncdhw",
    miopenTensorLayout_t.miopenTensorNDHWC: "ndhwc",
}
MODE_WORDS = {
    miopenBatchNormMode_t.miopenBNSpatial: "spatial",
    miopenBatchNormMode_t.miopenBNPerActivation: "per_activation",
}


class miopenTensorDescriptor_t(Object):
    """A tensor's shape, type and strides; nothing until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._spec: TensorSpec | None = None

    @property
    def spec(self) -> TensorSpec:
        """What it describes.

        Raises:
            StatusError: nothing was set yet.
        """
        if self._spec is None:
            raise StatusError(
                miopenStatus_t.miopenStatusNotInitialized,
                "the tensor descriptor was never set: miopenSet4dTensorDescriptor, ... set its shape",
            )
        return self._spec

    def set(
        self,
        kind: miopenDataType_t,
        shape: Sequence[int],
        *,
        layout: str | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        """Sets it.

        Raises:
            StatusError: nothing computes with this type of elements.
            PlanError: there is no such tensor.
        """
        if kind not in DTYPES:
            known = ", ".join(each.name for each in DTYPES)
            raise not_implemented(f"{kind.name} is not supported; want one of {known}")
        self._spec = TensorSpec(shape, DTYPES[kind], layout, strides)

    @property
    def data_type(self) -> miopenDataType_t:
        """The type of its elements."""
        return next(kind for kind, name in DTYPES.items() if name == self.spec.dtype)


def is_same(given: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether two descriptions are of one tensor: its shape, its type, and where each element lies."""
    is_alike = (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
    return is_alike and wanted.same_layout(given.element_strides)


@api
def miopenCreateTensorDescriptor(tensorDesc: Ref) -> None:
    """Makes a tensor descriptor; a set call says what it describes."""
    tensorDesc.value = miopenTensorDescriptor_t()


@api
def miopenSet4dTensorDescriptor(
    tensorDesc: miopenTensorDescriptor_t, dataType: miopenDataType_t, n: int, c: int, h: int, w: int
) -> None:
    """Describes a packed NCHW tensor."""
    tensorDesc.set(dataType, (n, c, h, w))


@api
def miopenSet4dTensorDescriptorEx(
    tensorDesc: miopenTensorDescriptor_t,
    dataType: miopenDataType_t,
    n: int,
    c: int,
    h: int,
    w: int,
    nStride: int,
    cStride: int,
    hStride: int,
    wStride: int,
) -> None:
    """Describes a tensor of any strides, in elements."""
    tensorDesc.set(dataType, (n, c, h, w), strides=(nStride, cStride, hStride, wStride))


@api
def miopenSetTensorDescriptor(
    tensorDesc: miopenTensorDescriptor_t,
    dataType: miopenDataType_t,
    nbDims: int,
    dimsA: Extents,
    stridesA: Extents | None,
) -> None:
    """Describes a tensor of 2 to 5 axes; without strides it is packed, n outermost, then c."""
    for name, values in (("dimsA", dimsA), ("stridesA", stridesA)):
        if values is not None and len(values) != nbDims:
            raise bad_parameter(f"`{name}` has {counted(len(values), 'number')}; want nbDims = {nbDims}")
    tensorDesc.set(dataType, dimsA, strides=stridesA)


@api
def miopenSetTensorDescriptorV2(
    tensorDesc: miopenTensorDescriptor_t,
    dataType: miopenDataType_t,
    nbDims: int,
    dimsA: Extents,
    stridesA: Extents | None,
) -> None:
    """The same as miopenSetTensorDescriptor: Python has one kind of integer."""
    miopenSetTensorDescriptor.__wrapped__(tensorDesc, dataType, nbDims, dimsA, stridesA)  # type: ignore[attr-defined]


@api
def miopenSetNdTensorDescriptorWithLayout(
    tensorDesc: miopenTensorDescriptor_t,
    dataType: miopenDataType_t,
    tensorLayout: miopenTensorLayout_t,
    lens: Extents,
    num_lens: int,
) -> None:
    """Describes a packed tensor in a named layout; its lengths are always in the order n, c, spatial."""
    if len(lens) != num_lens:
        raise bad_parameter(f"`lens` has {counted(len(lens), 'number')}; want num_lens = {num_lens}")
    if tensorLayout not in LAYOUTS:
        known = ", ".join(each.name for each in LAYOUTS)
        raise not_implemented(f"{tensorLayout.name} is not supported; want one of {known}, or strides")
    tensorDesc.set(dataType, lens, layout=LAYOUTS[tensorLayout])


@api
def miopenGet4dTensorDescriptor(
    tensorDesc: miopenTensorDescriptor_t,
    dataType: Ref,
    n: Ref,
    c: Ref,
    h: Ref,
    w: Ref,
    nStride: Ref,
    cStride: Ref,
    hStride: Ref,
    wStride: Ref,
) -> None:
    """Reads the type, lengths and strides of a tensor of 4 axes."""
    spec = tensorDesc.spec
    if spec.rank != 4:
        raise bad_parameter(f"`tensorDesc` has {spec.rank} axes; miopenGetTensorDescriptor reads any number")
    dataType.value = tensorDesc.data_type
    cells = (n, c, h, w, nStride, cStride, hStride, wStride)
    write(cells, (*spec.shape, *spec.element_strides))


@api
def miopenGetTensorDescriptorSize(tensorDesc: miopenTensorDescriptor_t, size: Ref) -> None:
    """Reads the number of axes."""
    size.value = tensorDesc.spec.rank


@api
def miopenGetTensorDescriptor(
    tensorDesc: miopenTensorDescriptor_t, dataType: Ref | None, dimsA: Ref | None, stridesA: Ref | None
) -> None:
    """Reads the type, and lengths and strides as tuples; what is null is not wanted."""
    spec = tensorDesc.spec
    write((dataType, dimsA, stridesA), (tensorDesc.data_type, spec.shape, spec.element_strides))


@api
def miopenGetTensorNumBytes(tensorDesc: miopenTensorDescriptor_t, numBytes: Ref) -> None:
    """Reads the bytes from the first element to the end of the last."""
    numBytes.value = tensorDesc.spec.span * tensorDesc.spec.itemsize


@api
def miopenDestroyTensorDescriptor(tensorDesc: miopenTensorDescriptor_t) -> None:
    """Ends a tensor descriptor; plans that were made with it keep what it described."""
    tensorDesc.destroy()


@api
def miopenDeriveBNTensorDescriptor(
    derivedBnDesc: miopenTensorDescriptor_t, xDesc: miopenTensorDescriptor_t, bn_mode: miopenBatchNormMode_t
) -> None:
    """Describes scale, bias and statistics of a batch normalization of x: 1xCx1x1, or 1xCxHxW per activation.

    They are Float, or Double where x is.
    """
    x = xDesc.spec
    kind = next(kind for kind, name in DTYPES.items() if name == x.compute_dtype)
    derivedBnDesc.set(kind, parameters_shape(x, bn_mode))


def parameters_shape(x: TensorSpec, mode: miopenBatchNormMode_t) -> tuple[int, ...]:
    """The lengths of a tensor of batch normalization's parameters, of x's rank."""
    shape = PER[MODES[MODE_WORDS[mode]]](x)
    return (1, *shape, *(1,) * (x.rank - 1 - len(shape)))
