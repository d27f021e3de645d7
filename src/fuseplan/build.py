"""The fifth stage: object code from the cache or the toolchain, loaded into this process."""

from __future__ import annotations

import json
import struct
import threading
import time
from dataclasses import dataclass

from fuseplan import cache
from fuseplan.backends import backend_of
from fuseplan.backends.backend import Backend
from fuseplan.emit import Source
from fuseplan.errors import BuildError
from fuseplan.kernel import Kernel
from fuseplan.select import Choice
from fuseplan.target import Target

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Program:
    """A kernel that can be launched.

    Attributes:
        source: what it was made of; without text where the object code was cached.
        address: what the backend's launcher takes.
        load_seconds: time from the choice to the address.
        origin: `memory`, `disk` or `compiled`.
        key: the cache's key, in hexadecimal; empty where nothing is cached.
    """

    source: Source
    address: int
    load_seconds: float
    origin: str
    key: str

    @property
    def cached(self) -> bool:
        """Whether nothing had to be compiled."""
        return self.origin != "compiled"

    def to_json(self) -> dict[str, object]:
        """The program as JSON values; the address means nothing elsewhere."""
        return {
            "load_seconds": self.load_seconds,
            "origin": self.origin,
            "key": self.key,
            **self.source.frame,
        }


_programs: dict[bytes, Program] = {}
_guard = threading.Lock()


def build(choice: Choice, kernel: Kernel, target: Target, *, use_cache: bool = True) -> Program:
    """The program of a choice: of this process, of the disk cache, or compiled now and stored.

    Args:
        choice: the template and its knobs.
        kernel: what it computes.
        target: this machine, or a kind of machine that this one is.
        use_cache: look for it, and store it, in memory and on disk.

    Raises:
        BuildError: this machine does not run code for the target, or the toolchain failed.
    """
    backend = backend_of(target.backend)
    refusal = backend.refuses(target)
    if refusal:
        raise BuildError(
            f"code for {target} does not run here: {refusal}; `explain` and `show` take any target"
        )
    begin = time.perf_counter()
    key = _key(backend, choice, kernel, target) if use_cache else None
    if key is None:
        return _compiled(backend, choice, kernel, target, begin, None)
    with _guard:
        known = _programs.get(key)
    if known is not None:
        return Program(known.source, known.address, time.perf_counter() - begin, "memory", known.key)
    program = _stored(backend, kernel, key, begin)
    if program is None:
        with cache.lock(key):
            program = _stored(backend, kernel, key, begin, again=True)
            program = program or _compiled(backend, choice, kernel, target, begin, key)
    with _guard:
        return _programs.setdefault(key, program)


def _key(backend: Backend, choice: Choice, kernel: Kernel, target: Target) -> bytes | None:
    """What code follows from: kernel, choice, target, generator and toolchain; None if one cannot be told."""
    generator, toolchain = cache.fingerprint(), backend.fingerprint()
    if generator is None or toolchain is None:
        return None
    return cache.key_of(kernel.text, repr(choice.template), repr(target), generator, toolchain)


def _stored(
    backend: Backend, kernel: Kernel, key: bytes, begin: float, *, again: bool = False
) -> Program | None:
    """The program on disk; None if there is none that loads. A second look is counted if it finds one."""
    payload = cache.read(key, counts_miss=not again)
    if payload is None:
        return None
    try:
        source, code = _unpacked(payload)
        address = backend.load(kernel, source, code)
    except (BuildError, KeyError, TypeError, ValueError, struct.error):
        cache.reject(key)
        return None
    return Program(source, address, time.perf_counter() - begin, "disk", key.hex())


def _compiled(
    backend: Backend, choice: Choice, kernel: Kernel, target: Target, begin: float, key: bytes | None
) -> Program:
    source = choice.template.emit(kernel, target)
    code = backend.compile_object(source, target)
    address = backend.load(kernel, source, code)
    if key is not None:
        cache.write(key, _packed(source, code))
    return Program(source, address, time.perf_counter() - begin, "compiled", key.hex() if key else "")


def _packed(source: Source, code: bytes) -> bytes:
    frame = json.dumps(source.frame).encode()
    return _LENGTH.pack(len(frame)) + frame + code


def _unpacked(payload: bytes) -> tuple[Source, bytes]:
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return Source.from_frame(json.loads(payload[_LENGTH.size : end])), payload[end:]
