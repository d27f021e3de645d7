"""Exit statuses, and errors as JSON values."""

from __future__ import annotations

from typing import Any

from fuseplan.errors import ArgumentError, BuildError, FuseplanError, Unsupported

RIGHT, WRONG, BAD, REFUSED, DISTURBED = 0, 1, 2, 3, 4
INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended
OF_ERRORS: dict[type[Exception], int] = {Unsupported: REFUSED, BuildError: WRONG}


def status_of(error: Exception) -> int:
    """What a command ends with: 3 refused, 1 toolchain failed, 2 anything else."""
    return OF_ERRORS.get(type(error), BAD)


def known_error(error: FuseplanError | MemoryError) -> FuseplanError:
    """The error as ours: tensors without room are the caller's."""
    if isinstance(error, FuseplanError):
        return error
    return ArgumentError(f"the plan's tensors do not fit this machine's memory: {error}")


def error_json(error: Exception) -> dict[str, Any]:
    """The error's kind, message and refusals."""
    refusals = error.refusals if isinstance(error, Unsupported) else ()
    return {
        "error": type(error).__name__,
        "message": str(error),
        "refusals": [refusal.to_json() for refusal in refusals],
    }
