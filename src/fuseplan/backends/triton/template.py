"""What the templates for GPUs share: the order in which a kernel reads its operands."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.target import Target
from fuseplan.template import Template

# Triton's names of our dtypes.
HALF_UNIT = 1 << 12  # half of the last of 11 bits, in the bits of f32
TYPES = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class Packing:
    """How a kernel reads an operand: logical axes in the order `axes`, dense, padded with zeros to `shape`.

    Attributes:
        axes: the logical axis that stands at each place, outermost first.
        shape: extents in that order; at least the operand's.
        dtype: of the elements; the operand's own, or the compute dtype.
        halves: of f32: all elements rounded to the 11 bits that a tensor core multiplies, and behind them
            what that leaves of each.
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    halves: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """Of the packed array."""
        return (2, *self.shape) if self.halves else self.shape


@dataclass(frozen=True)
class GpuTemplate(Template):
    """A template whose operands are packed as `packing` says: by NumPy here, by torch on the device."""

    @abstractmethod
    def packing(self, kernel: Kernel, operand: KernelOperand) -> Packing:
        """How the kernel reads an operand that is not per element."""

    def pack(
        self, kernel: Kernel, target: Target, operand: KernelOperand, array: NDArray[Any]
    ) -> NDArray[Any]:
        """The operand in the order and padding of `packing`; still in the dtype that `array` has."""
        wanted = self.packing(kernel, operand)
        ordered = np.asarray(array).reshape(operand.shape).transpose(wanted.axes)
        padded = np.zeros(wanted.shape, ordered.dtype)
        padded[tuple(map(slice, ordered.shape))] = ordered
        return in_halves(padded) if wanted.halves else padded


def in_halves(array: NDArray[Any]) -> NDArray[np.float32]:
    """The elements rounded to 11 bits, a half up, and what that leaves of each.

    An infinity is all in what is left: the other factor's whole stands against it, which has its sign.
    """
    whole = array.astype(np.float32)
    bits = (whole.view(np.int32) + np.int32(HALF_UNIT)) & np.int32(-2 * HALF_UNIT)
    rounded = np.where(np.isnan(whole), whole, bits.view(np.float32))  # its bits might carry into the sign
    rounded = np.where(np.isinf(rounded), np.float32(0), rounded)
    return np.stack([rounded, whole - rounded])


def vector_packing(kernel: Kernel, operand: KernelOperand) -> Packing:
    """The packing of an operand per channel, per activation or shared: in the compute dtype.

    Per activation, one image in the order in which the tensor it is applied to is stored.
    """
    if operand.per != "activation":
        return Packing((0,), operand.shape, kernel.compute_dtype)
    axes = storage_axes(kernel, operand)
    return Packing(axes, tuple(operand.shape[axis] for axis in axes), kernel.compute_dtype)


def storage_axes(kernel: Kernel, operand: KernelOperand) -> tuple[int, ...]:
    """Axes of one image (c and spatial), outermost first, as the tensor of the operand's stage is stored."""
    strides = kernel.shape_of(operand).element_strides[1:]
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
