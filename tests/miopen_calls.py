"""Shorthand for tests of `fuseplan.miopen`: calls that must succeed or fail, descriptors, a whole plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan import miopen
from fuseplan.compat.miopen.functions import FUNCTIONS
from fuseplan.compat.miopen.tensors import DTYPES
from fuseplan.language.tensor import TensorSpec
from fuseplan.miopen import Ref

Array = NDArray[Any]
Status = miopen.miopenStatus_t
CLASSES = {name: value for name, value in miopen.NAMES.items() if inspect.isclass(value)}


def taken(annotation: str) -> tuple[Any, bool]:
    """What a parameter takes, a class or the name of a type, and whether it may be null."""
    name, _, null = annotation.partition(" | ")
    return CLASSES.get(name, name), null == "None"


# By function and parameter.
TAKES = {
    name: {each.name: taken(each.annotation) for each in inspect.signature(function).parameters.values()}
    for name, function in FUNCTIONS.items()
}


def ok(status: Any) -> None:
    assert status is Status.miopenStatusSuccess, f"{status!r}: {miopen.miopenGetLastErrorMessage()}"


def fails(status: Any, wanted: str, *said: str) -> str:
    """Holds that a call failed with the status, and that its message has each of the texts."""
    message = str(miopen.miopenGetLastErrorMessage())
    assert isinstance(status, Status)
    assert status.name == f"miopenStatus{wanted}", message
    for text in said:
        assert text in message, message
    return message


def handle(target: str = "cpu") -> Ref:
    made = Ref()
    ok(miopen.miopenCreate(made, target))
    return made


def tensor(*shape: int, dtype: Any = miopen.miopenFloat, layout: Any = None) -> Ref:
    made = Ref()
    ok(miopen.miopenCreateTensorDescriptor(made))
    if layout is None:
        ok(miopen.miopenSetTensorDescriptor(made, dtype, len(shape), shape, None))
    else:
        ok(miopen.miopenSetNdTensorDescriptorWithLayout(made, dtype, layout, shape, len(shape)))
    return made


def described(spec: TensorSpec) -> Ref:
    """A descriptor of a tensor of this library."""
    made = created(miopen.miopenCreateTensorDescriptor)
    kind = next(kind for kind, name in DTYPES.items() if name == spec.dtype)
    ok(miopen.miopenSetTensorDescriptor(made, kind, spec.rank, spec.shape, spec.element_strides))
    return made


def convolution(
    axes: int = 2, *, pad: int = 0, stride: int = 1, dilation: int = 1, groups: int = 1, mode: int = 0
) -> Ref:
    made = created(miopen.miopenCreateConvolutionDescriptor)
    numbers = [(each,) * axes for each in (pad, stride, dilation)]
    ok(miopen.miopenInitConvolutionNdDescriptor(made, axes, *numbers, mode))
    ok(miopen.miopenSetConvolutionGroupCount(made, groups))
    return made


def activation(mode: Any, *numbers: float) -> Ref:
    made = created(miopen.miopenCreateActivationDescriptor)
    ok(miopen.miopenSetActivationDescriptor(made, mode, *(*numbers, 0.0, 0.0, 0.0)[:3]))
    return made


def created(create: Any, *rest: Any, plan: Ref | None = None) -> Ref:
    """What a create call writes, which must succeed: the first argument, or the one behind the plan."""
    made = Ref()
    ok(create(made, *rest) if plan is None else create(plan, made, *rest))
    return made


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def close(got: Array, exact: Array, bound: float = 1e-5) -> None:
    wide = got.astype(np.float64)
    assert np.isfinite(wide).all()
    assert np.abs(wide - exact).max() <= bound * max(1e-30, float(np.abs(exact).max()))


class Built:
    """A plan with its operators and arguments, on a handle."""

    def __init__(self, src: Ref, target: str = "cpu", direction: Any = miopen.miopenVerticalFusion) -> None:
        self.handle, self.src = handle(target), src
        self.plan = created(miopen.miopenCreateFusionPlan, direction, src)
        self.args = created(miopen.miopenCreateOperatorArgs)

    def add(self, create: Any, *rest: Any) -> Ref:
        """The operator that a miopenCreateOp... call appends."""
        return created(create, *rest, plan=self.plan)

    def compile(self) -> None:
        ok(miopen.miopenCompileFusionPlan(self.handle, self.plan))

    def execute(self, x: Array) -> Array:
        """The output, into an array of NaN."""
        out = self.plan.value.lowered().plan.output
        y = np.full(out.shape, np.nan, x.dtype)
        self.execute_into(x, y)
        return y

    def execute_into(self, x: Any, y: Any) -> None:
        dst = described(self.plan.value.lowered().plan.output)
        ok(miopen.miopenExecuteFusionPlan(self.handle, self.plan, self.src, x, dst, y, self.args))

    def reference(
        self, x: Array, operands: Mapping[str, Array], parameters: Mapping[str, float] | None = None
    ) -> Array:
        """The plan's meaning in float64, by this library's own names."""
        exact: Array = self.plan.value.lowered().plan.reference(x, operands, parameters)
        return exact
