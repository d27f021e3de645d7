"""Exit statuses, and errors as JSON values."""

from __future__ import annotations

import signal
from typing import Any

from fuseplan.errors import ArgumentError, BuildError, FuseplanError, Unsupported

SIGNALLED = 128  # a shell's status of a command that a signal ended is this number plus the signal's
RIGHT, WRONG, BAD, REFUSED, DISTURBED = 0, 1, 2, 3, 4
INTERRUPTED, TERMINATED = SIGNALLED + signal.SIGINT, SIGNALLED + signal.SIGTERM
CLOSED = SIGNALLED + 13  # SIGPIPE, which not every system has

MEANINGS = {
    RIGHT: "the plan is fused and its result is right",
    WRONG: "a result is wrong, fusions are lost, the toolchain failed, or the output cannot be written",
    BAD: "the plan, an option or an argument is not valid",
    REFUSED: "no kernel computes the plan on the target",
    DISTURBED: "other programs used the machine, so that there is no verdict",
    INTERRUPTED: "Ctrl-C interrupted the command",
    CLOSED: "the reader closed the pipe that the command writes to",
    TERMINATED: "SIGTERM ended the command",
}
OF_ERRORS: dict[type[Exception], int] = {Unsupported: REFUSED, BuildError: WRONG}


def status_of(error: Exception) -> int:
    """The exit status of a command that an error ends."""
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
