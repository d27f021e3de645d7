"""This machine posing as one with a GPU: CPU tensors stand for the device's, and launches are interpreted.

Everything between `compile` and the driver is the library's own: selection, compiling, loading, packing by
torch, arguments, tensor maps. What the driver is asked to launch is recorded; a kernel of plain Triton is
then run in the interpreter on the memory that the arguments name.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from fake_driver import FakeDriver, MapArgument
from fuseplan.backends.backend import Backend
from fuseplan.backends.triton import TRITON, memory, toolchain
from fuseplan.backends.triton import driver as drivers
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import dtype_of
from interpreted import WRITTEN, Array, ask

HOST = torch.device("cpu")
CUDA_0 = replace(parse_target("triton:sm_90"), device=0)  # a GPU that this machine pretends to have


class HostQueue(memory.Queue):
    """A queue of launches that are done at once."""

    def __init__(self) -> None:
        self.device = 0
        self.now = 7
        self.stream = functools.partial(getattr, self, "now")
        self._rooms: dict[int, tuple[int, memory.DeviceCopy]] = {}

    @property
    def torch_device(self) -> torch.device:
        return HOST

    def is_capturing(self) -> bool:
        return False

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class _Known:
    """What a binary was made of."""

    source: Source
    kernel: Kernel
    template: GpuTemplate

    def values(self, arguments: tuple[Any, ...]) -> list[Any]:
        """What the interpreter is given: copies of the memory that the arguments name."""
        copies: dict[tuple[str, str], Array] = {}
        found: list[Any] = []
        for slot, argument in zip(self.source.slots, arguments, strict=True):
            if slot.kind == "parameter":
                found.append(float(argument))
                continue
            key = (slot.kind, slot.key)
            address = argument.encoded.address if isinstance(argument, MapArgument) else argument
            if key not in copies:
                copies[key] = np.array(self.seen(slot, address))
            found.append(copies[key] if slot.map is None else (copies[key], asdict(slot.map)))
        return found

    def seen(self, slot: Slot, address: int) -> Array:
        """The memory of a slot."""
        size, dtype = self._extent(slot)
        kind: np.dtype[Any] = dtype_of(dtype).array
        raw: Any = (ctypes.c_char * (size * kind.itemsize)).from_address(address)
        array: Array = np.frombuffer(raw, kind)
        return array

    def _extent(self, slot: Slot) -> tuple[int, str]:
        """Elements and dtype of a slot's memory."""
        kernel = self.kernel
        if slot.kind == "src":
            return kernel.src.span, kernel.src.dtype
        if slot.kind == "dst":
            return kernel.dst.span, kernel.dst.dtype
        if slot.kind == "workspace":
            return self.source.workspace(1) // 4, "i32"
        if slot.kind == "parameters":
            return len(kernel.parameters), kernel.compute_dtype
        if slot.kind == "result":
            made = next(each for each in kernel.results if each.key == slot.key)
            return prod(made.shape), made.dtype
        operand = kernel.operand(slot.key)
        if not operand.packed:
            return kernel.shape_of(operand).span, operand.dtype
        packed = self.template.packing(kernel, CUDA_0, operand)
        return prod(packed.extents), packed.dtype


@dataclass
class PosingDriver(FakeDriver):
    """A driver that computes what it is asked to launch, where that can be interpreted.

    Attributes:
        queue: where the launches go.
        known: by binary, what it was made of.
        computes: whether to, or only to record.
    """

    queue: HostQueue = field(default_factory=HostQueue)
    known: dict[bytes, _Known] = field(default_factory=dict)
    computes: bool = True

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        status = super().launch(config, function, parameters, extra)
        if not status and self.computes:
            self._compute()
        return status

    def _compute(self) -> None:
        launched = self.launches[-1]
        known = self.known[launched.artifact.binary]
        slots = known.source.slots
        reply = ask(
            {
                "text": known.source.text,
                "entry": known.source.entry,
                "types": list(launched.artifact.types),
                "values": known.values(launched.arguments),
                "grid": list(launched.grid),
                "writes": [place for place, slot in enumerate(slots) if slot.kind in WRITTEN],
                "cooperative": launched.cooperative,
            }
        )
        assert "error" not in reply, reply["error"]
        for place, array in reply.items():
            argument = launched.arguments[place]
            address = argument.encoded.address if isinstance(argument, MapArgument) else argument
            known.seen(slots[place], address)[...] = array


@contextmanager
def posing() -> Iterator[PosingDriver]:
    """While it lasts, `CUDA_0` is a target whose code runs here, on torch's CPU tensors."""
    driver, compiled = PosingDriver(), toolchain.compile_object

    def compile_object(source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        code = compiled(source, kernel, template, target)
        assert isinstance(template, GpuTemplate)
        driver.known[Artifact.unpack(code).binary] = _Known(source, kernel, template)
        return code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drivers, "driver", lambda: driver)
        patch.setattr(memory, "queue", lambda device: driver.queue)
        patch.setattr(toolchain, "compile_object", compile_object)
        patch.setattr(toolchain, "compile_all", functools.partial(Backend.compile_all, TRITON))
        yield driver
