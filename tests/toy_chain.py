"""A plan with every kind of argument, a toy template for it, and what that does, in NumPy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fake_driver import Launch
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from toy_templates import HEAD, Toy

Tensors = dict[str, torch.Tensor]

PLAN = "f32[4x64] -> scale -> add -> leaky_relu(0.5)"
SIZE = 4 * 64


@dataclass(frozen=True)
class ToyChain(Toy):
    """PLAN: a channel operand, a residual, a parameter by value, and a workspace, not read."""

    name: ClassVar[str] = "toy-chain"

    def emit(self, kernel: Kernel, target: Target) -> Source:
        text = HEAD + (
            "def toy(src, op_scale, op_other, par_negative_slope, workspace, dst):\n"
            "    at = tl.program_id(0) * 64 + tl.arange(0, 64)\n"
            "    x = tl.load(src + at) * tl.load(op_scale + tl.arange(0, 64)) + tl.load(op_other + at)\n"
            "    tl.store(dst + at, tl.where(x >= 0, x, x * par_negative_slope))\n"
        )
        slots = (
            Slot("src"),
            Slot("operand", "scale"),
            Slot("operand", "other"),
            Slot("parameter", "negative_slope"),
            Slot("workspace"),
            Slot("dst"),
        )
        return Source(text, "toy", slots, language="triton", grid=(4, 1, 1), workspace_bytes=100)


def floats(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def chain(launch: Launch) -> None:
    """What the toy does, on the memory that its arguments name."""
    src, scale, other, slope, _, dst = launch.arguments
    x = floats(src, SIZE).reshape(4, 64) * floats(scale, 64) + floats(other, SIZE).reshape(4, 64)
    floats(dst, SIZE).reshape(4, 64)[...] = np.where(x >= 0, x, x * np.float32(slope))


def random_tensors() -> Tensors:
    """What the plan is given."""
    torch.manual_seed(0)
    return {"src": torch.randn(4, 64), "scale": torch.randn(64), "other": torch.randn(4, 64)}


def wanted(tensors: Tensors, slope: float = 0.5) -> torch.Tensor:
    """What the plan makes of it."""
    return torch.nn.functional.leaky_relu(tensors["src"] * tensors["scale"] + tensors["other"], slope)


def split(tensors: Tensors) -> tuple[torch.Tensor, Tensors]:
    """`src`, and the operands."""
    return tensors["src"], {key: tensor for key, tensor in tensors.items() if key != "src"}
