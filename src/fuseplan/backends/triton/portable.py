"""Code for a GPU in a file: a binary runs on every GPU of its kind, and is loaded without triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplan.backends.triton import TRITON
from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target
from fuseplan.system.locks import loading

if TYPE_CHECKING:
    from fuseplan.backends.backend import Loaded


def saved(source: Source, code: bytes, target: Target) -> bytes:
    """The binary, and what a launch has to know of it."""
    return code


def loaded(source: Source, code: bytes, target: Target) -> tuple[Target, Loaded]:
    """The target on torch's current GPU, and the binary as a module there.

    Raises:
        BuildError: that GPU is of another kind, or the driver refuses the code.
    """
    refusal = TRITON.refuses(target)
    if refusal:
        raise BuildError(f"code for {target} does not run here: {refusal}")
    placed = TRITON.placed(target)
    with loading:
        from fuseplan.backends.triton import launch, memory

    return placed, launch.load(source, code, memory.queue(placed.device or 0))
