"""Execution of a compiled plan."""

from __future__ import annotations

from typing import Any

from fuseplan.miopen.arguments import miopenOperatorArgs_t
from fuseplan.miopen.call import Pointer, api, bad_parameter
from fuseplan.miopen.handle import miopenHandle_t
from fuseplan.miopen.operators import ALPHA
from fuseplan.miopen.plan import miopenFusionPlanDescriptor_t
from fuseplan.miopen.tensors import miopenTensorDescriptor_t
from fuseplan.tensor import TensorSpec


def execute(
    handle: miopenHandle_t,
    plan: miopenFusionPlanDescriptor_t,
    src: tuple[TensorSpec, Any],
    dst: tuple[TensorSpec, Any],
    args: miopenOperatorArgs_t,
    workspace: int | None = None,
) -> None:
    """Runs a plan that the handle compiled; a factor that is not 1 takes a kernel of its own, made once.

    `workspace` is the size in bytes of the caller's, where there is one.

    Raises:
        StatusError: the handle did not compile the plan as it is now, a descriptor is not the plan's, an
            operator has no arguments, or the workspace is too small.
        ArgumentError: a tensor is not what its descriptor says, or overlaps the output.
    """
    if all(each is not handle for each in plan.handles):
        raise bad_parameter(
            "the plan was not compiled with this handle as it is now: call miopenCompileFusionPlan, and "
            "check what it returns"
        )
    check_same("input", src[0], plan.src)
    check_same("output", dst[0], plan.lowered().plan.output)
    given = [args.of(each) for each in plan.operators]
    made = plan.lowered(frozenset(index for index, values in enumerate(given) if ALPHA in values))
    values = {
        keys[name]: value for keys, of in zip(made.keys, given, strict=True) for name, value in of.items()
    }
    compiled = handle.kernel(made.plan, plan.algorithm)
    if workspace is not None and workspace < compiled.workspace_bytes:
        raise bad_parameter(
            f"the workspace has {workspace} bytes; the kernel needs {compiled.workspace_bytes}"
        )
    handle.run(compiled, src[1], dst[1], values)


def check_same(what: str, given: TensorSpec, wanted: TensorSpec) -> None:
    """Checks a descriptor against the plan's.

    Raises:
        StatusError: it differs.
    """
    is_same = given.shape == wanted.shape and given.dtype == wanted.dtype
    if not (is_same and wanted.same_layout(given.element_strides)):
        raise bad_parameter(f"the {what} descriptors do not match: got {given}; the plan's is {wanted}")


@api
def miopenExecuteFusionPlan(
    handle: miopenHandle_t,
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    inputDesc: miopenTensorDescriptor_t,
    input: Pointer,
    outputDesc: miopenTensorDescriptor_t,
    output: Pointer,
    args: miopenOperatorArgs_t,
) -> None:
    """Runs a compiled plan; on a GPU it returns when the launch is queued."""
    execute(handle, fusePlanDesc, (inputDesc.spec, input), (outputDesc.spec, output), args)


@api
def miopenExecuteFusionPlan_v2(
    handle: miopenHandle_t,
    fusePlanDesc: miopenFusionPlanDescriptor_t,
    inputDesc: miopenTensorDescriptor_t,
    input: Pointer,
    outputDesc: miopenTensorDescriptor_t,
    output: Pointer,
    args: miopenOperatorArgs_t,
    workspace: Pointer | None,
    workspaceSize: int,
) -> None:
    """The same with a workspace: its size is checked; fuseplan uses memory of its own, so it may be null."""
    if workspaceSize < 0 or (workspace is None and workspaceSize):
        raise bad_parameter(f"`workspace` is null and `workspaceSize` is {workspaceSize}")
    size = None if workspace is None else workspaceSize
    execute(handle, fusePlanDesc, (inputDesc.spec, input), (outputDesc.spec, output), args, size)
