"""Tensor descriptors: fuseplan's `TensorSpec`, made and read by MIOpen's calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

from fuseplan.compat.miopen.call import Object, StatusError, bad_parameter, not_implemented, not_initialized
from fuseplan.compat.miopen.enums import miopenBatchNormMode_t, miopenDataType_t, miopenTensorLayout_t
from fuseplan.compat.miopen_driver.letters import BATCH_NORM_MODES
from fuseplan.errors import PlanError
from fuseplan.language.declarations import extents
from fuseplan.language.layouts import LAYOUTS as NAMED
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.affine import MODES

DTYPES = {
    miopenDataType_t.miopenHalf: "f16",
    miopenDataType_t.miopenFloat: "f32",
    miopenDataType_t.miopenBFloat16: "bf16",
    miopenDataType_t.miopenDouble: "f64",
}
LAYOUTS = {miopenTensorLayout_t[f"miopenTensor{name.upper()}"]: name for name in (*NAMED[4], *NAMED[5])}
MODE_WORDS = dict(zip(miopenBatchNormMode_t, BATCH_NORM_MODES, strict=True))


class miopenTensorDescriptor_t(Object):
    """A tensor's shape, type and strides; nothing until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._spec: TensorSpec | None = None

    @property
    def spec(self) -> TensorSpec:
        """The description; a StatusError where nothing was set yet."""
        if self._spec is None:
            raise not_initialized(
                "the tensor descriptor was never set: miopenSet4dTensorDescriptor, ... set its shape"
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
            raise _none_of(kind, DTYPES)
        if len(shape) < 2:
            raise PlanError("a descriptor has 2 to 5 axes", got=f"{len(shape)}")
        self._spec = TensorSpec(shape, DTYPES[kind], layout, strides)

    def set_layout(self, kind: miopenDataType_t, layout: miopenTensorLayout_t, shape: Sequence[int]) -> None:
        """Sets a packed tensor in a named layout."""
        if layout not in LAYOUTS:
            raise _none_of(layout, LAYOUTS, ", or strides")
        self.set(kind, shape, layout=LAYOUTS[layout])

    def derive(self, x: miopenTensorDescriptor_t, mode: miopenBatchNormMode_t) -> None:
        """Sets the parameters of a batch normalization of x."""
        self.set(_type_of(x.spec.compute_dtype), parameters_shape(x.spec, mode))

    def read(self) -> tuple[miopenDataType_t, tuple[int, ...], tuple[int, ...]]:
        """Type, lengths and strides."""
        return _type_of(self.spec.dtype), self.spec.shape, self.spec.element_strides

    def read_4d(self) -> tuple[int, ...]:
        """Type, lengths and strides of 4 axes."""
        if self.spec.rank != 4:
            raise bad_parameter(
                f"`tensorDesc` has {self.spec.rank} axes; miopenGetTensorDescriptor reads any number"
            )
        kind, shape, strides = self.read()
        return (kind, *shape, *strides)


def _none_of(
    kind: miopenDataType_t | miopenTensorLayout_t, known: Collection[IntEnum], other: str = ""
) -> StatusError:
    names = ", ".join(each.name for each in known)
    return not_implemented(f"{kind.name} is not supported; want one of {names}{other}")


def _type_of(dtype: str) -> miopenDataType_t:
    return next(kind for kind, name in DTYPES.items() if name == dtype)


def is_same(given: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether two descriptions are of one tensor: its shape, its type, and where each element lies."""
    is_alike = (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
    return is_alike and wanted.same_layout(given.element_strides)


def check_same(what: str, given: TensorSpec, wanted: TensorSpec) -> None:
    """Checks a descriptor against the tensor that a plan has there; a StatusError where it differs."""
    if not is_same(given, wanted):
        raise bad_parameter(f"the {what} descriptors do not match: got {given}; want {wanted}")


def parameters_shape(x: TensorSpec, mode: miopenBatchNormMode_t) -> tuple[int, ...]:
    """The lengths of a tensor of batch normalization's parameters, of x's rank."""
    shape = extents(x, MODES[MODE_WORDS[mode]])
    return (1, *shape, *(1,) * (x.rank - 1 - len(shape)))


def check_parameters(name: str, given: TensorSpec, x: TensorSpec, mode: miopenBatchNormMode_t) -> None:
    """Checks the shape and type of a bias, or of batch normalization's parameters.

    Raises:
        PlanError: it has others.
    """
    dtypes = dict.fromkeys((x.compute_dtype, x.dtype))
    wanted = [TensorSpec(parameters_shape(x, mode), dtype) for dtype in dtypes]
    if all((given.shape, given.dtype) != (each.shape, each.dtype) for each in wanted):
        raise PlanError(
            f"`{name}` does not describe the tensor that {x} takes",
            got=given,
            want=" or ".join(map(str, wanted)),
        )
