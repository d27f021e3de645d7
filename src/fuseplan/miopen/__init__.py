"""MIOpen's Fusion API by its own names: a spelling of fusion plans, line by line, with status codes.

    plan, conv = Ref(), Ref()
    miopenCreateFusionPlan(plan, miopenVerticalFusion, input_desc)
    miopenCreateOpConvForward(plan, conv, conv_desc, weight_desc)

A `Ref` is a variable of C: it is passed where C passes the variable's address, and where C passes its value.
Every function returns a `miopenStatus_t`; `miopenGetLastErrorMessage()` says why it is not Success.
"""

from __future__ import annotations

from typing import Any

from fuseplan.miopen import (
    activations,
    arguments,
    batch_norm_inference,
    batch_norm_training,
    convolutions,
    enums,
    execute,
    handle,
    onecall,
    plan,
    problems,
    solutions,
    tensors,
)
from fuseplan.miopen.call import Ref as Ref

MODULES = (
    enums,
    handle,
    tensors,
    convolutions,
    activations,
    plan,
    arguments,
    execute,
    onecall,
    batch_norm_inference,
    batch_norm_training,
    problems,
    solutions,
)
# Functions, objects and enumerations, in the module that defines each; enumerators are names of their own.
NAMES: dict[str, Any] = {"Ref": Ref}
for _module in MODULES:
    NAMES |= {
        name: value
        for name, value in vars(_module).items()
        if name.startswith("miopen") and getattr(value, "__module__", "") == _module.__name__
    }
for _enumeration in enums.ENUMS:
    NAMES |= dict(_enumeration.__members__)

__all__ = list(NAMES)


def __getattr__(name: str) -> Any:
    try:
        return NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(NAMES)
