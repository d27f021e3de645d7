"""The reference backend: a kernel's meaning by NumPy in float64, rounded once at the end.

It is slow and always there. It reads the same argument block as generated code does, so that all around a
kernel is tested with it.
"""

from __future__ import annotations

from fuseplan.backends.reference.backend import ReferenceBackend

REFERENCE = ReferenceBackend()
