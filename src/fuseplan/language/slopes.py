"""The module of derivatives, imported when first asked for: gradients alone need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplan.system.locks import Late

if TYPE_CHECKING:
    from fuseplan.language import derivative as slopes
else:
    slopes = Late("fuseplan.language.derivative")

__all__ = ["slopes"]
