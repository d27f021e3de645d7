"""A driver that records what would have been launched, with arguments as a real one finds them."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.driver import COOPERATIVE, LaunchConfig, MapEncoding

MARK = b"tensor map "
NUMBERS = {"fp32": ctypes.c_float, "fp64": ctypes.c_double}


@dataclass(frozen=True)
class Encoded:
    """A tensor map as the driver was given it, outermost axis first; strides are bytes."""

    address: int
    dtype: int
    swizzle: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class MapArgument:
    """A tensor map as the kernel gets it: what was encoded, and the extents and strides that follow it."""

    encoded: Encoded
    extents: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One launch; an argument is an address, a number, or a tensor map."""

    artifact: Artifact
    device: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    cooperative: bool
    arguments: tuple[Any, ...]


@dataclass
class FakeDriver:
    """What `driver.driver()` gives on a machine with a GPU, as far as launches can tell.

    Attributes:
        launches: so far.
        encodings: tensor maps made so far.
        statuses: what the next calls of `launch` return instead of launching, first to last.
        contexts: devices whose context is current, innermost last.
        dropped: functions that will not be launched again.
        unloaded: those whose modules were freed.
    """

    launches: list[Launch] = field(default_factory=list)
    encodings: list[Encoded] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    refuses_maps: bool = False
    dropped: list[int] = field(default_factory=list)
    unloaded: list[int] = field(default_factory=list)
    _loaded: list[tuple[Artifact, int]] = field(default_factory=list)

    def load(self, artifact: Artifact, device: int) -> int:
        assert artifact.binary[:4] == b"\x7fELF"
        self._loaded.append((artifact, device))
        return len(self._loaded)

    def drop(self, function: int, device: int) -> None:
        assert self._loaded[function - 1][1] == device
        self.dropped.append(function)

    def unload(self, device: int) -> None:
        self.unloaded += self.dropped
        self.dropped.clear()

    def encode(self, storage: int, encoding: MapEncoding, address: int) -> int:
        assert self.contexts, "a tensor map is made in the device's context"
        assert storage % 64 == 0
        if self.refuses_maps:
            return 1
        assert address % 16 == 0
        assert address > 0
        listed = [
            tuple(reversed(each[:count]))
            for each, count in (
                (encoding.extents, encoding.rank),
                (encoding.strides, encoding.rank - 1),
                (encoding.box, encoding.rank),
                (encoding.steps, encoding.rank),
            )
        ]
        assert all(stride % 16 == 0 for stride in listed[1])
        self.encodings.append(Encoded(address, encoding.dtype, encoding.swizzle, *listed))
        text = MARK + struct.pack("<q", len(self.encodings) - 1)
        ctypes.memmove(storage, text.ljust(128, b"\0"), 128)
        return 0

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        self.contexts.append(device)
        try:
            yield
        finally:
            assert self.contexts.pop() == device

    def told(self, status: int) -> str:
        return f"CUDA_ERROR_{status}: as the test wants it"

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        assert extra is None
        if self.statuses:
            status = self.statuses.pop(0)
            if status:
                return status
        assert function.value not in self.unloaded
        artifact, device = self._loaded[function.value - 1]
        found = config._obj
        assert isinstance(found, LaunchConfig)
        attributes = [found.attributes[index].id for index in range(found.attribute_count)]
        arguments, used = self._arguments(artifact, parameters)
        assert used + 2 == len(parameters), "two pointers to scratch memory come last"
        for place in (used, used + 1):
            assert ctypes.c_int64.from_address(parameters[place]).value == 0
        self.launches.append(
            Launch(
                artifact,
                device,
                tuple(found.grid),
                tuple(found.block),
                found.shared_bytes,
                found.stream or 0,
                COOPERATIVE in attributes,
                arguments,
            )
        )
        return 0

    def _arguments(self, artifact: Artifact, parameters: Any) -> tuple[tuple[Any, ...], int]:
        """The arguments by the kernel's types, and how many parameters they are."""
        found: list[Any] = []
        at = 0
        for kind in artifact.types:
            if kind.startswith("*"):
                found.append(ctypes.c_uint64.from_address(parameters[at]).value)
                assert found[-1] % 16 == 0, "kernels are compiled for aligned pointers"
            elif kind in NUMBERS:
                found.append(NUMBERS[kind].from_address(parameters[at]).value)
            else:
                rank = kind.count(",") + 1
                found.append(self._map(parameters, at, rank))
                at += 2 * rank
            at += 1
        return tuple(found), at

    def _map(self, parameters: Any, at: int, rank: int) -> MapArgument:
        held = ctypes.string_at(parameters[at], 128)
        assert held.startswith(MARK), "the map was encoded before the launch"
        (number,) = struct.unpack_from("<q", held, len(MARK))
        extents = tuple(ctypes.c_int32.from_address(parameters[at + 1 + axis]).value for axis in range(rank))
        strides = tuple(
            ctypes.c_int64.from_address(parameters[at + 1 + rank + axis]).value for axis in range(rank)
        )
        return MapArgument(self.encodings[number], extents, strides)
