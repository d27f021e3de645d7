"""Tensors on a GPU that are not torch's, seen where they lie: CuPy's, JAX's, Numba's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseplan.errors import ArgumentError, a_thing
from fuseplan.tensors.arrays import Buffer
from fuseplan.tensors.dlpack import CUDA, MANAGED, device_of, view_array_interface, view_dlpack

LEGACY = 1  # how DLPack and the array interface call the stream whose handle is 0


def exported(
    tensor: Any, what: object, device: torch.device, index: int, stream: Callable[[], int]
) -> Buffer:
    """A tensor of another package on `device`, the GPU of that index.

    What its maker has still to do to it, the current stream waits for.

    Raises:
        ArgumentError: it is no tensor on that device, or none that kernels take.
    """
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        kind, own = device_of(tensor, what)
        if kind not in (CUDA, MANAGED):
            raise ArgumentError(
                what,
                f" is {a_thing(tensor)} in the host's memory, and this plan runs on {device}: "
                f"pass torch.from_dlpack(tensor).to('{device}')",
            )
        _check_index(own, index, what)
        return Buffer(*view_dlpack(tensor, what, devices=(kind,), stream=stream() or LEGACY), tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        buffer = Buffer(*view_array_interface(tensor, what), tensor)
        if buffer.address:  # a null pointer is on no device, and refused by who asked
            _check_index(_index_of(tensor), index, what)
        _wait_for(tensor.__cuda_array_interface__.get("stream"), device)
        return buffer
    raise ArgumentError(
        what,
        f" is {a_thing(tensor)}; want a tensor on {device}: torch's, or one with DLPack or "
        "__cuda_array_interface__",
    )


def _check_index(own: int, index: int, what: object) -> None:
    if own != index:
        raise ArgumentError(
            what,
            f" is on cuda:{own}, and this plan runs on cuda:{index}: copy it there, or compile the "
            f"plan for target 'cuda:{own}'",
        )


def _index_of(tensor: Any) -> int:
    """The interface does not say whose memory it is: torch asks the driver."""
    return int(torch.as_tensor(tensor).get_device())


def _wait_for(stream: int | None, device: torch.device) -> None:
    """Makes the current stream wait for the one that the array's maker writes on."""
    if stream is None:
        return
    current = torch.cuda.current_stream(device)
    handle = 0 if stream == LEGACY else int(stream)
    if handle != current.cuda_stream:
        current.wait_stream(torch.cuda.ExternalStream(handle, device))
