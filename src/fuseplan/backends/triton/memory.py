"""A GPU's memory: torch's tensors, and what DLPack or `__cuda_array_interface__` shows there.

Everything is checked before a launch: a kernel that reads where it must not breaks the whole process.
Tensors that are not torch's, CuPy's, JAX's and Numba's, are seen where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from fuseplan.backends.backend import Addresses, Packer
from fuseplan.errors import ArgumentError, a_thing
from fuseplan.kernels.emit import COUNTER_BYTES
from fuseplan.kernels.packing import HALF_UNIT, Halves, Packing, Pad, Reshape, Rounded, Step, Take, Transpose
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.tensors.arrays import Buffer, is_torch
from fuseplan.tensors.dlpack import CUDA, MANAGED, device_of, view_array_interface, view_dlpack
from fuseplan.tensors.torch_tensors import DTYPES, TorchForm, torch_form, torch_maker, torch_pair, view_torch

ALIGNMENT = 16  # bytes: the widest load of a thread, and what a copy engine takes
UNALIGNED = ALIGNMENT - 1  # bits that no address has


class DeviceCopy:
    """A tensor that a kernel reads."""

    __slots__ = ("address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.address = tensor, tensor.data_ptr()


class Queue:
    """Where launches on a device go: torch's current stream there, whose handle `stream` gives."""

    def __init__(self, device: int) -> None:
        self.device = device
        # The public way, torch.cuda.current_stream(device).cuda_stream, takes 1.5 us; this one 0.1 us.
        self.stream = functools.partial(torch._C._cuda_getCurrentRawStream, device)
        self._rooms: dict[int, tuple[int, DeviceCopy]] = {}

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cuda", self.device)

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of running."""
        # Not torch.cuda.current_device(), which asks first whether CUDA is initialized, for twice the time.
        if torch._C._cuda_getDevice() == self.device:
            return bool(torch.cuda.is_current_stream_capturing())
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())

    def wait(self) -> None:
        """Returns when the current stream has nothing left to do."""
        torch.cuda.current_stream(self.device).synchronize()

    def workspace(self, stream: int, nbytes: int) -> DeviceCopy:
        """Memory for a launch on the current stream, whose handle is `stream`; its counters are zero.

        Launches on one stream follow one another and share it, whatever plan they are of. A graph may run
        beside other graphs that were recorded on the same stream: a launch that is recorded gets memory of
        its own, whose counters the graph sets to zero. It is held until the launch was made; torch may give a
        recorded launch's to what follows it.
        """
        if stream and self.is_capturing():  # the default stream, whose handle is 0, cannot be recorded
            return self._room(nbytes)
        held = self._rooms.get(stream)
        if held is None or held[0] < nbytes:
            held = self._rooms[stream] = nbytes, self._room(nbytes)
        return held[1]

    def _room(self, nbytes: int) -> DeviceCopy:
        made = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        made[:COUNTER_BYTES].zero_()
        return DeviceCopy(made)


@functools.cache
def queue(device: int) -> Queue:
    """The device's queue, which all plans share."""
    return Queue(device)


class GpuMemory:
    """One GPU's memory, read by launches on torch's current stream."""

    def __init__(self, launches: Queue) -> None:
        self._queue = launches
        self._device = launches.torch_device

    def view(self, tensor: Any, what: object, *, in_place: bool = True) -> Buffer:
        """The tensor where it lies."""
        if isinstance(tensor, torch.Tensor):
            buffer = self._view_torch(tensor, what)
        else:
            buffer = exported(tensor, what, self._device, self._queue.device, self._queue.stream)
        if not buffer.address and 0 not in buffer.shape:
            raise ArgumentError(what, " has no memory: its address is null")
        if in_place and buffer.address % ALIGNMENT:
            raise ArgumentError(
                what,
                f" begins at an address that is not a multiple of {ALIGNMENT} bytes, and kernels for GPUs "
                f"move {ALIGNMENT} at a time: pass a copy, tensor.clone()",
            )
        return buffer

    def _view_torch(self, tensor: torch.Tensor, what: object) -> Buffer:
        if tensor.device != self._device:
            raise ArgumentError(
                what,
                f" is on {tensor.device}, and this plan runs on {self._device}: pass "
                f"tensor.to('{self._device}'), or compile the plan for target '{_target(tensor.device)}'",
            )
        return Buffer(*view_torch(tensor, what), tensor)

    def form_of(self, tensor: Any) -> TorchForm | None:
        """The form of an accepted torch tensor."""
        return torch_form(tensor, UNALIGNED) if is_torch(tensor) else None

    def pair_of(self, src: Any, out: Any) -> Addresses | None:
        """The form of two accepted torch tensors."""
        return torch_pair(src, out, UNALIGNED) if is_torch(src) and is_torch(out) else None

    def maker(self, spec: TensorSpec | Dense) -> Callable[[Any], tuple[torch.Tensor, int]]:
        """A torch tensor, whatever the source is."""
        return torch_maker(spec, self._device)

    def packed(self, packing: Packing, buffer: Buffer, *, keep: bool, lasts: bool = False) -> DeviceCopy:
        """The operand packed; itself where it lies so."""
        owner = buffer.owner if isinstance(buffer.owner, torch.Tensor) else self._torch_view(buffer.owner)
        return DeviceCopy(packed(owner.detach(), packing, keep=keep))

    def packer(self, packing: Packing, buffer: Buffer) -> Packer:
        """Packs on the current stream."""

        def pack(tensor: torch.Tensor, _: int) -> tuple[int, object]:
            made = packed(tensor, packing, keep=False)
            return made.data_ptr(), made

        return pack

    def _torch_view(self, owner: Any) -> torch.Tensor:
        if hasattr(owner, "__dlpack__"):
            return torch.from_dlpack(owner)
        return torch.as_tensor(owner, device=self._device)

    def kept(self, values: NDArray[Any]) -> DeviceCopy:
        """A copy on the device."""
        return DeviceCopy(torch.from_numpy(values.copy()).to(self._device))

    def settle(self) -> None:
        """Waits for the copies, so that any stream may read them; those that a graph records are in it."""
        if not self._queue.is_capturing():
            self._queue.wait()


def packed(tensor: torch.Tensor, packing: Packing, *, keep: bool) -> torch.Tensor:
    """A tensor as `packing` says; the same memory if it lies so, unless kept."""
    made = tensor.to(DTYPES[packing.dtype]).reshape(packing.shape)
    for step in packing.steps:
        made = _STEPS[type(step)](made, step)
    made = made.contiguous()
    is_shared = made.data_ptr() == tensor.data_ptr()
    return made.clone() if is_shared and (keep or made.data_ptr() % ALIGNMENT) else made


def _padded(tensor: torch.Tensor, step: Pad) -> torch.Tensor:
    if tuple(tensor.shape) == step.shape:
        return tensor
    made = torch.zeros(step.shape, dtype=tensor.dtype, device=tensor.device)
    made[tuple(map(slice, tensor.shape))].copy_(tensor)
    return made


def _in_halves(whole: torch.Tensor, _: Halves) -> torch.Tensor:
    rounded = torch.where(whole.isnan(), whole, _to_11_bits(whole))
    rounded = torch.where(rounded.isinf(), 0.0, rounded)
    return torch.stack([rounded, whole - rounded])


def _rounded(whole: torch.Tensor, _: Rounded) -> torch.Tensor:
    rounded = _to_11_bits(whole)
    return torch.where(rounded.isfinite() & whole.isfinite(), rounded, whole)


def _to_11_bits(whole: torch.Tensor) -> torch.Tensor:
    bits = (whole.contiguous().view(torch.int32) + HALF_UNIT) & -2 * HALF_UNIT
    return bits.view(torch.float32)


# The steps that templates for GPUs take, on the device.
_STEPS: dict[type[Step], Callable[[torch.Tensor, Any], torch.Tensor]] = {
    Reshape: lambda tensor, step: tensor.reshape(step.shape),
    Transpose: lambda tensor, step: tensor.permute(step.axes),
    Pad: _padded,
    Take: lambda tensor, step: tensor.index_select(
        step.axis, tensor.new_tensor(step.places, dtype=torch.int64)
    ),
    Halves: _in_halves,
    Rounded: _rounded,
}


def _target(device: torch.device) -> str:
    return f"cuda:{device.index}" if device.type == "cuda" else "cpu"


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
