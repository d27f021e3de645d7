"""Tensors on a GPU that are not torch's, seen where they lie: CuPy's, JAX's, Numba's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseplan.arrays import Buffer
from fuseplan.dlpack import CUDA, MANAGED, view_array_interface, view_dlpack
from fuseplan.errors import ArgumentError

LEGACY = 1  # how DLPack and the array interface call the stream whose handle is 0


def exported(tensor: Any, what: str, device: torch.device, stream: Callable[[], int]) -> Buffer:
    """A tensor of another package on `device`; its maker's stream is waited for by the current one.

    Raises:
        ArgumentError: it is no tensor on that device, or none that kernels take.
    """
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _dlpack(tensor, what, device, stream)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _array_interface(tensor, what, device)
    raise ArgumentError(
        f"{what} is a {type(tensor).__name__}; want a tensor on {device}: torch's, or one with DLPack or "
        "__cuda_array_interface__"
    )


def _dlpack(tensor: Any, what: str, device: torch.device, stream: Callable[[], int]) -> Buffer:
    kind, index = (int(word) for word in tensor.__dlpack_device__())
    if kind not in (CUDA, MANAGED):
        raise ArgumentError(
            f"{what} is a {type(tensor).__name__} in the host's memory, and this plan runs on {device}: pass "
            f"torch.from_dlpack({what}).to('{device}')"
        )
    if index != device.index:
        raise ArgumentError(
            f"{what} is on cuda:{index}, and this plan runs on {device}: copy it there, or compile the plan "
            f"for target 'cuda:{index}'"
        )
    return Buffer(*view_dlpack(tensor, what, devices=(kind,), stream=stream() or LEGACY), tensor)


def _array_interface(tensor: Any, what: str, device: torch.device) -> Buffer:
    buffer = Buffer(*view_array_interface(tensor, what), tensor)
    own = torch.as_tensor(tensor).device  # torch asks the driver whose memory it is
    if own != device:
        raise ArgumentError(
            f"{what} is on {own}, and this plan runs on {device}: copy it there, or compile the plan for "
            f"target '{own}'"
        )
    _wait_for(tensor.__cuda_array_interface__.get("stream"), device)
    return buffer


def _wait_for(stream: int | None, device: torch.device) -> None:
    """Makes the current stream wait for the one that the array's maker writes on."""
    if stream is None:
        return
    current = torch.cuda.current_stream(device)
    handle = 0 if stream == LEGACY else int(stream)
    if handle != current.cuda_stream:
        current.wait_stream(torch.cuda.ExternalStream(handle, device))
