"""MIOpen's Fusion API by its own names: a spelling of fusion plans, line by line, with status codes.

    plan, conv = Ref(), Ref()
    miopenCreateFusionPlan(plan, miopenVerticalFusion, input_desc)
    miopenCreateOpConvForward(plan, conv, conv_desc, weight_desc)

A `Ref` is a variable of C: it is passed where C passes the variable's address, and where C passes its value.
Every function returns a `miopenStatus_t`; `miopenGetLastErrorMessage()` says why it is not Success.
"""

from __future__ import annotations

from typing import Any

from fuseplan.compat.miopen.call import Ref as Ref
from fuseplan.compat.miopen.call import miopenGetLastErrorMessage
from fuseplan.compat.miopen.enums import ENUMS
from fuseplan.compat.miopen.functions import CLASSES, FUNCTIONS
from fuseplan.compat.miopen.handle import miopenGetErrorString

# Enumerations, objects, functions; enumerators are names of their own.
NAMES: dict[str, Any] = {
    each.__name__: each for each in (Ref, *ENUMS, *CLASSES, miopenGetErrorString, miopenGetLastErrorMessage)
}
NAMES |= FUNCTIONS
for _enumeration in ENUMS:
    NAMES |= dict(_enumeration.__members__)

__all__ = list(NAMES)


def __getattr__(name: str) -> Any:
    try:
        return NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(NAMES)
