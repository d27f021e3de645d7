"""What the toolchain makes of a source: machine code, and all that a launch has to be told, as bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fuseplan.errors import BuildError

MAGIC = b"FPGPU001"
_HEAD = struct.Struct("<8sIII")  # magic; bytes of the description, the binary, the assembly


@dataclass(frozen=True)
class MapLayout:
    """How a tensor map's boxes lie in shared memory.

    Attributes:
        swizzle: 0 for none, 1, 2 and 3 for 32, 64 and 128 bytes.
        box: extents of what one copy instruction moves, outermost first; a wide box is moved by several.
    """

    swizzle: int
    box: tuple[int, ...]


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
        binary: a cubin, or an hsaco.
        architecture: what it runs on: `sm_90`, `gfx942`.
        entry: the kernel's name in it.
        threads: of a program.
        shared_bytes: dynamic shared memory of a program.
        types: Triton's types of the arguments, in the order of the slots.
        maps: for each slot with a tensor map, by its place.
        resources: what `resources` read from the toolchain's output.
        assembly: PTX or amdgcn; empty unless asked for.
    """

    binary: bytes = field(repr=False)
    architecture: str
    entry: str
    threads: int
    shared_bytes: int
    types: tuple[str, ...]
    maps: Mapping[int, MapLayout]
    resources: Mapping[str, int]
    assembly: str = field(default="", repr=False)

    def pack(self) -> bytes:
        """All of it as bytes."""
        told = asdict(replace(self, binary=b"", assembly=""))
        del told["binary"], told["assembly"]
        head, text = json.dumps(told).encode(), zlib.compress(self.assembly.encode())
        return _HEAD.pack(MAGIC, len(head), len(self.binary), len(text)) + head + self.binary + text

    @classmethod
    def unpack(cls, data: bytes) -> Artifact:
        """What `pack` packed; a BuildError where the bytes are something else."""
        try:
            magic, head, binary, text = _HEAD.unpack_from(data)
            if magic != MAGIC or len(data) != _HEAD.size + head + binary + text:
                raise ValueError("its header was written by another version")
            start = _HEAD.size + head
            told = json.loads(data[_HEAD.size : start])
            assembly = zlib.decompress(data[start + binary :]).decode()
            return _described(told, data[start : start + binary], assembly)
        except (KeyError, TypeError, ValueError, struct.error, zlib.error) as error:
            raise BuildError(f"the kernel's object code was not made by this toolchain: {error}") from error


def _described(told: Mapping[str, Any], binary: bytes, assembly: str) -> Artifact:
    maps = {
        int(place): MapLayout(int(layout["swizzle"]), tuple(map(int, layout["box"])))
        for place, layout in told["maps"].items()
    }
    return Artifact(
        binary,
        str(told["architecture"]),
        str(told["entry"]),
        int(told["threads"]),
        int(told["shared_bytes"]),
        tuple(map(str, told["types"])),
        maps,
        {str(name): int(count) for name, count in told["resources"].items()},
        assembly,
    )
