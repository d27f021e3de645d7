"""The backends, in order; the reference backend is last: the slow right answer.

    cpu          LLVM IR, generated here and compiled by llvmlite
    triton       Triton and Gluon, for GPUs
    reference    NumPy in float64

To add one: a package with an object that has what `backend.Backend` says, and its line in BACKENDS.
"""

from __future__ import annotations

from fuseplan.backends.backend import Backend
from fuseplan.backends.cpu import CPU
from fuseplan.backends.reference import REFERENCE
from fuseplan.backends.triton import TRITON
from fuseplan.errors import ArgumentError, did_you_mean

BACKENDS: tuple[Backend, ...] = (CPU, TRITON, REFERENCE)


def backend_of(name: str) -> Backend:
    """The backend of that name; an ArgumentError where there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    names = [backend.name for backend in BACKENDS]
    raise ArgumentError(f"no backend is named {name!r}. {did_you_mean(name, names)}")
