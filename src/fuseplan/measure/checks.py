"""What a kernel gave beside float64: each tensor within the bound of its own dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.template import Template
from fuseplan.measure.ground import OUT, allowed_deviation


@dataclass(frozen=True)
class Check:
    """A tensor beside float64.

    Attributes:
        tensor: `out`, or a result's key.
        error: the largest deviation, over the largest value.
        allowed: the most that is right.
    """

    tensor: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether the error is within what rounding explains."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        whole = "the largest output" if self.tensor == OUT else f"the largest {self.tensor}"
        return f"{self.error:.1e} of {whole}, at most {self.allowed:.1e}"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; null for an error that is not finite, which JSON has no number for."""
        error = self.error if math.isfinite(self.error) else None
        return {"tensor": self.tensor, "error": error, "allowed": self.allowed}


def checks_of(kernel: Kernel, template: Template, errors: Mapping[str, float]) -> tuple[Check, ...]:
    """Each tensor's error, by `Ground.deviations`, beside what its dtype allows."""
    dtypes = {each.key: each.dtype for each in kernel.outputs}
    return tuple(
        Check(key, error, allowed_deviation(kernel, template, dtypes.get(key)))
        for key, error in errors.items()
    )


def first_wrong(kernel: Kernel, template: Template, errors: Mapping[str, float]) -> Check | None:
    """The first tensor that is not right; None where all are."""
    return next((each for each in checks_of(kernel, template, errors) if not each.is_right), None)
