"""Shorthand for tests of `fuseplan.miopen`: calls that must succeed or fail, and descriptors in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuseplan import miopen
from fuseplan.miopen import Ref

Status = miopen.miopenStatus_t


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


def convolution(
    axes: int = 2, *, pad: int = 0, stride: int = 1, dilation: int = 1, groups: int = 1, mode: Any = 0
) -> Ref:
    made = Ref()
    ok(miopen.miopenCreateConvolutionDescriptor(made))
    numbers: list[Sequence[int]] = [(each,) * axes for each in (pad, stride, dilation)]
    ok(miopen.miopenInitConvolutionNdDescriptor(made, axes, *numbers, mode))
    ok(miopen.miopenSetConvolutionGroupCount(made, groups))
    return made


def activation(mode: Any, *numbers: float) -> Ref:
    made = Ref()
    ok(miopen.miopenCreateActivationDescriptor(made))
    ok(miopen.miopenSetActivationDescriptor(made, mode, *(*numbers, 0.0, 0.0, 0.0)[:3]))
    return made


def created(create: Any, *rest: Any, plan: Ref | None = None) -> Ref:
    """What a create call writes, which must succeed: the first argument, or the one behind the plan."""
    made = Ref()
    ok(create(made, *rest) if plan is None else create(plan, made, *rest))
    return made


def output(plan: Ref) -> Ref:
    """A descriptor of what a plan gives."""
    spec = plan.value.place
    made = created(miopen.miopenCreateTensorDescriptor)
    made.value.set(next(kind for kind in KINDS if KINDS[kind] == spec.dtype), spec.shape, layout=spec.layout)
    return made


KINDS = {
    miopen.miopenHalf: "f16",
    miopen.miopenFloat: "f32",
    miopen.miopenBFloat16: "bf16",
    miopen.miopenDouble: "f64",
}
