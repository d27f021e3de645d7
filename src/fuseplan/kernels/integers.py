"""Integers that a kernel multiplies: between which numbers they lie, and how large a sum can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuseplan.language.bounds import Bounds, bounds_behind, largest_sum
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.system.locks import cached_property

if TYPE_CHECKING:
    from fuseplan.kernels.contraction import Contraction


class Integers:
    """The properties of a `Kernel` that multiplies integers."""

    src: TensorSpec
    prologue: tuple[Any, ...]
    operands: tuple[Any, ...]

    @property
    def contraction(self) -> Contraction:
        """The centre, a contraction, or that whose statistics it has; ValueError in any other kernel."""
        raise NotImplementedError

    @cached_property
    def factors(self) -> Bounds:
        """Between which numbers the elements lie that a weight is multiplied by; infinite unless integers."""
        dtypes = {each.key: each.dtype for each in self.operands}
        return bounds_behind((each.expression for each in self.prologue), self.src.dtype, dtypes)

    @property
    def largest_sum(self) -> float:
        """The largest absolute value of a sum of products of integers; 0 in any other kernel."""
        weights = (each.dtype for each in self.operands if each.role == "weight")
        dtype = next((each for each in weights if not dtype_of(each).is_float), None)
        return largest_sum(self.factors, dtype, self.contraction.depth) if dtype else 0.0
