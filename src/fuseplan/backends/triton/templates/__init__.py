"""The templates for GPUs, the best first."""

from __future__ import annotations

from fuseplan.backends.triton.template import GpuTemplate

TEMPLATES: tuple[type[GpuTemplate], ...] = ()
