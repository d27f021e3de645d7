"""A compiled plan as a file: code, packing, argument layout and checks, for processes without a compiler.

A file is a header, a description in JSON, and code:

    bytes  content
    8      the word FUSEPLAN
    4      the format's number, little-endian as all numbers
    32     the sha256 of the bytes from 44 on
    8      bytes of the description
    8      bytes of the code
    ...    the description: the members of `Saved` but for the code
    ...    the code: for a CPU an ELF object of the kernel and the threads' runtime; for a GPU the container
           of `backends/triton/artifact.py`, with the cubin and what a launch has to be told

Loading reads no pickle, imports no compiler, and runs nothing before all checks are passed.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fuseplan.backends import backend_of
from fuseplan.backends.backend import Backend
from fuseplan.errors import BuildError, FuseplanError
from fuseplan.execution.build import Program
from fuseplan.execution.runner import Packings, packings_of
from fuseplan.execution.stages import Records, checked_threads
from fuseplan.kernels.emit import Source
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import reading

MAGIC = b"FUSEPLAN"
FORMAT = 2  # raised when a member, a plan's text or an argument block changes its meaning
HEADER = struct.Struct("<8sI32sQQ")
_PORTABLE = ("cpu", "triton")  # backends
_CHECKED = struct.calcsize("<8sI32s")  # where the bytes begin that the checksum covers


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
        plan: the plan; its text is kept.
        target: the kind of machine, and the most threads of a launch.
        template: the choice, for people.
        toolchain: the versions that made the code, for people.
        source: entry and argument slots; without its text.
        packings: how the kernel reads each operand; None where it reads the caller's memory.
        code: as the backend's `saved` gives it.
    """

    plan: FusionPlan
    target: Target
    template: str
    toolchain: str
    source: Source
    packings: Packings
    code: bytes

    def pack(self) -> bytes:
        """The file's bytes."""
        told = {
            "plan": str(self.plan),
            "target": [self.target.backend, self.target.name, self.target.threads],
            "template": self.template,
            "toolchain": self.toolchain,
            "source": self.source.frame,
            "packings": {key: each and each.to_json() for key, each in self.packings.items()},
        }
        head = json.dumps(told).encode()
        body = struct.pack("<QQ", len(head), len(self.code)) + head + self.code
        return struct.pack("<8sI32s", MAGIC, FORMAT, hashlib.sha256(body).digest()) + body

    @classmethod
    def unpack(cls, data: bytes) -> Saved:
        """What `pack` packed.

        Raises:
            ValueError: the bytes are something else; it says what.
        """
        if not data.startswith(MAGIC):
            raise ValueError("it is no file that `compiled.save(path)` wrote")
        if len(data) < HEADER.size:
            raise ValueError(f"it is cut off: it has {len(data)} bytes, fewer than a header")
        _, number, digest, head, code = HEADER.unpack_from(data)
        if number != FORMAT:
            raise ValueError(f"its format is {number}; this version of fuseplan reads {FORMAT}: save it anew")
        if len(data) != HEADER.size + head + code:
            raise ValueError(f"it is cut off, or longer: {len(data)} bytes, not {HEADER.size + head + code}")
        if hashlib.sha256(data[_CHECKED:]).digest() != digest:
            raise ValueError("it was altered: its checksum does not match")
        end = HEADER.size + head
        try:
            return _described(reading.json_of(data[HEADER.size : end]), data[end:])
        except (KeyError, TypeError, ValueError, FuseplanError) as error:
            raise ValueError(f"its description cannot be read: {error}") from error


def _described(told: Mapping[str, Any], code: bytes) -> Saved:
    plan = FusionPlan.parse(told["plan"])
    backend, kind, threads = told["target"]
    packings = {
        key: None if told["packings"][key] is None else Packing.from_json(told["packings"][key])
        for key in (operand.key for operand in plan.operands)
    }
    target = Target(str(backend), str(kind), threads=checked_threads(threads))
    source = Source.from_frame(told["source"])
    return Saved(plan, target, str(told["template"]), str(told["toolchain"]), source, packings, code)


def portable(target: Target) -> Backend:
    """The target's backend, which makes and loads code for files; a BuildError where the backend has none."""
    if target.backend not in _PORTABLE:
        raise BuildError(f"the {target.backend} backend interprets plans: it has no code to save")
    return backend_of(target.backend)


def save(records: Records, program: Program, path: str | PathLike[str]) -> str:
    """Writes a compiled plan's file; gives its sha256."""
    target, template = program.target, records.choice.template
    source = records.source
    code = portable(target).saved(source, program.code, target)
    packings = packings_of(records.kernel, template, target)
    data = Saved(records.plan, target, template.text, program.toolchain, source, packings, code).pack()
    Path(path).write_bytes(data)
    return hashlib.sha256(data).hexdigest()
