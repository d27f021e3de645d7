"""Execution of a compiled plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuseplan.compat.miopen.call import bad_parameter
from fuseplan.compat.miopen.enums import miopenConvFwdAlgorithm_t
from fuseplan.compat.miopen.handle import miopenHandle_t
from fuseplan.compat.miopen.operators import ALPHA, Lowered
from fuseplan.compat.miopen.tensors import check_same
from fuseplan.language.tensor import TensorSpec

Arguments = Mapping[str, Any]  # of a call, by their names


@dataclass(frozen=True)
class Call:
    """The handle and the two ends of a run.

    Attributes:
        src: the input's description, and the tensor.
        algorithm: the convolution's; None is any.
        workspace: bytes of the caller's, which are not used; None where there is none.
    """

    handle: miopenHandle_t
    src: tuple[TensorSpec, Any]
    dst: tuple[TensorSpec, Any]
    algorithm: miopenConvFwdAlgorithm_t | None = None
    workspace: int | None = None

    def launch(self, made: Lowered, given: Sequence[Mapping[str, Any]]) -> None:
        """Runs operators on their values.

        Raises:
            StatusError: a descriptor is not the plan's, or the workspace is too small.
            Unsupported: nothing computes the plan on the handle's target.
            ArgumentError: a tensor is not what its descriptor says, or overlaps the output.
        """
        check_same("input", self.src[0], made.plan.src)
        check_same("output", self.dst[0], made.plan.output)
        compiled = self.handle.kernel(made.plan, self.algorithm)
        check_workspace(self.workspace, compiled.workspace_bytes)
        values: dict[str, Any] = {}
        for index, each in enumerate(given):
            values |= made.named(index, each)
        self.handle.run(compiled, self.src[1], self.dst[1], values)


def scaled(given: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """The operators with a factor, by index."""
    return frozenset(index for index, values in enumerate(given) if ALPHA in values)


def workspace_size(workspace: Any, size: int) -> int | None:
    """The bytes of the caller's workspace; None where there is none.

    Raises:
        StatusError: the size is no size, or of nothing.
    """
    if size < 0 or (workspace is None and size):
        raise bad_parameter(f"`workspace` is {'null' if workspace is None else 'given'}; its size is {size}")
    return None if workspace is None else size


def check_workspace(size: int | None, needed: int) -> None:
    """Checks the bytes of the caller's workspace, where there is one.

    Raises:
        StatusError: they are too few.
    """
    if size is not None and size < needed:
        raise bad_parameter(
            f"the workspace is too small: its size is {size}; the kernel needs {needed} bytes"
        )


def call_of(arguments: Arguments, src: str, dst: str) -> Call:
    """The handle and the two ends of a call: its arguments of these names, with their descriptors."""
    ends = [(arguments[f"{name}Desc"].spec, arguments[name]) for name in (src, dst)]
    sizes = [value for name, value in arguments.items() if name.startswith("workspaceSize")]
    size = workspace_size(arguments["workspace"], *sizes) if sizes else None
    return Call(arguments["handle"], ends[0], ends[1], arguments.get("algo"), size)


def execute(arguments: Arguments) -> None:
    """Runs a plan that the handle compiled; a factor that is not 1 takes a kernel of its own, made once.

    Raises:
        StatusError: the handle did not compile the plan as it is now, or an operator has no arguments.
        StatusError, Unsupported, ArgumentError: as `Call.launch` does.
    """
    call, plan = call_of(arguments, "input", "output"), arguments["fusePlanDesc"]
    if all(each is not call.handle for each in plan.handles):
        raise bad_parameter(
            "the plan was not compiled with this handle as it is now: call miopenCompileFusionPlan, and "
            "check what it returns"
        )
    given = [arguments["args"].of(each) for each in plan.operators]
    replace(call, algorithm=plan.algorithm).launch(plan.lowered(scaled(given)), given)
