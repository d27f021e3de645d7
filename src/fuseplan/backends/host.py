"""The host's memory: NumPy arrays, torch's CPU tensors, anything there with DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from fuseplan.backends.backend import Addresses, Copier, Packer
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.system.locks import Late
from fuseplan.tensors.arrays import (
    ALIGNMENT,
    Buffer,
    Form,
    NumpyForm,
    address_of,
    aligned_copy,
    empty,
    form_of,
    is_torch,
    view,
)

if TYPE_CHECKING:
    from fuseplan.backends import packers
    from fuseplan.kernels.packing import Packing
else:
    packers = Late("fuseplan.backends.packers")


class HostCopy(NamedTuple):
    """An array that a kernel reads, aligned to 64 bytes, and where it begins."""

    array: NDArray[Any]
    address: int


class HostMemory:
    """Memory that this process's own threads read; `copier` gives copies of views faster than NumPy's."""

    def __init__(self, copier: Copier = lambda *_: None) -> None:
        self._copier = copier

    def view(self, tensor: Any, what: object, *, in_place: bool = True) -> Buffer:
        """The tensor where it lies."""
        return view(tensor, what)

    def form_of(self, tensor: Any) -> Form | None:
        """The form of an accepted array or torch tensor."""
        return form_of(tensor)

    def pair_of(self, src: Any, out: Any) -> Addresses | None:
        """The forms of two accepted arrays or torch tensors."""
        if is_torch(src) and is_torch(out):
            from fuseplan.tensors.torch_tensors import torch_pair

            return torch_pair(src, out)
        forms = form_of(src), form_of(out)
        if forms[0] is None or not isinstance(forms[1], NumpyForm):
            return None
        first, second = forms[0].address, forms[1].address
        return lambda src, out, /: (first(src), second(out, True), None)

    def maker(self, spec: TensorSpec | Dense) -> Callable[[Any], tuple[Any, int]]:
        """A torch tensor for torch's, else a NumPy array."""
        make_torch: Callable[[Any], tuple[Any, int]] | None = None

        def make(source: Any) -> tuple[Any, int]:
            nonlocal make_torch
            if not is_torch(source):
                array = empty(spec)
                return array, address_of(array)
            if make_torch is None:
                import torch

                from fuseplan.tensors.torch_tensors import torch_maker

                make_torch = torch_maker(spec, torch.device("cpu"))
            return make_torch(source)

        return make

    def packed(self, packing: Packing, buffer: Buffer, *, keep: bool, lasts: bool = False) -> HostCopy:
        """The operand packed: a copy, unless it may stay where it lies and lies as the kernel reads it."""
        values = packers.arranged(packing, buffer.dtype, buffer.numpy())
        is_there = address_of(values) == buffer.address and buffer.address % ALIGNMENT == 0
        stays = is_there and values.flags.c_contiguous and not keep
        array = values if stays else aligned_copy(values, lasts=lasts)
        return HostCopy(array, address_of(array))

    def packer(self, packing: Packing, buffer: Buffer) -> Packer:
        """Packs as `packed` does; as much of it as can be is done here, once."""
        return packers.packer(packing, buffer, self._copier)

    def kept(self, values: NDArray[Any]) -> HostCopy:
        """The copy."""
        copied = aligned_copy(values)
        return HostCopy(copied, address_of(copied))

    def settle(self) -> None:
        """What was written is there."""
