"""Keeps torch.compile out of this package: calls that launch kernels are breaks in its graphs.

torch.compile follows Python into every function that it meets. Functions marked here run as they are, and so
does everything that they call. The mark costs a call nothing, and imports nothing of torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
REASON = (
    "fuseplan launches a kernel of its own here, which torch.compile does not see: its graph breaks before "
    "the call and goes on after it; with fullgraph=True, call the plan outside of the compiled function"
)
_marked: list[CodeType] = []
_skipped: set[CodeType] = set()


def untraced(function: Function) -> Function:
    """Marks a function that torch.compile calls instead of following it."""
    marks: Any = function
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = (
        True,
        REASON,
    )  # as torch.compiler.disable does
    _marked.append(marks.__code__)
    skip_frames()
    return function


def skip_frames() -> None:
    """Tells torch, once it is imported, to run the marked functions and all that they call as they are."""
    if len(_skipped) == len(_marked) or "torch._C._dynamo" not in sys.modules:
        return
    from torch._C._dynamo import eval_frame

    for code in _marked:
        if code not in _skipped:
            _skip(eval_frame, code)
            _skipped.add(code)


def _skip(eval_frame: Any, code: CodeType) -> None:
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # before torch 2.7 for the function alone
        eval_frame.skip_code(code)
        return
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
