"""The fifth stage: object code from the cache or the toolchain, loaded into this process."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fuseplan.backends import backend_of
from fuseplan.backends.backend import Backend, Loaded
from fuseplan.errors import BuildError, UnsoundCodeError, counted
from fuseplan.execution.select import Choice
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, available_threads, machine_text
from fuseplan.kernels.template import Template
from fuseplan.stores import cache, foreign
from fuseplan.system import limits
from fuseplan.system.locks import Lock

if TYPE_CHECKING:
    from fuseplan.execution.stages import Records

ALONE = 2  # kernels that this process compiles as soon as other processes have started
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Program:
    """A kernel's code.

    Attributes:
        source: what it was made of; without text where the object code was cached.
        code: the compiled code. On a CPU it is an object file of the system, which a disassembler reads; for
            a GPU it is fuseplan's own container of the binary and of all that a launch has to be told, which
            vendors' tools do not read. `fuseplan show PLAN --stage asm`, `ptx` and `sass` print its
            instructions.
        target: what it is for, with the device that it was loaded onto.
        loaded: the code in this process; None where it does not run on this machine.
        refusal: why it does not.
        load_seconds: time from the choice to the loaded code.
        origin: `memory`, `disk` or `compiled`.
        key: the cache's key, in hexadecimal; empty where nothing is cached.
        toolchain: the versions that made the code; empty where they cannot be told.
    """

    source: Source = field(repr=False)
    code: bytes = field(repr=False)
    target: Target
    loaded: Loaded | None
    refusal: str | None
    load_seconds: float
    origin: str
    key: str
    toolchain: str

    @property
    def cached(self) -> bool:
        """Whether nothing had to be compiled."""
        return self.origin != "compiled"

    @property
    def resources(self) -> Mapping[str, int]:
        """What a GPU's code uses: registers, spills, shared memory; empty on a CPU, whose code says none."""
        return backend_of(self.target.backend).resources(self.code)

    def to_json(self) -> dict[str, object]:
        """The program as JSON values, without the code."""
        return {
            "load_seconds": self.load_seconds,
            "origin": self.origin,
            "key": self.key,
            "toolchain": self.toolchain,
            "code_bytes": len(self.code),
            "resources": dict(self.resources),
            "refusal": self.refusal,
            **self.source.frame,
        }


_Place = tuple[bytes, int | None]  # a key, and the device that the program was loaded onto
_programs: dict[_Place, Program] = {}  # the one used last at the end
_guard = Lock()


def build(choice: Choice, kernel: Kernel, target: Target, *, use_cache: bool = True) -> Program:
    """The program of a choice: of this process, of the disk cache, or compiled now and stored.

    Args:
        target: this machine, or a kind of machine; code for one that this is not is made where the backend
            can, and not loaded.
        use_cache: look for it, and store it, in memory and on disk.

    Raises:
        BuildError: this machine neither runs code for the target nor makes it, or the toolchain failed.
    """
    backend = backend_of(target.backend)
    refusal = backend.refuses(target)
    if refusal and not backend.compiles_for(target):
        raise BuildError(
            f"code for {target} does not run here: {refusal}; `explain` and `show` take any target"
        )
    begin = time.perf_counter()
    placed = target if refusal else backend.placed(target)
    key = _key(backend, choice.template, kernel, target) if use_cache else None
    making = _Making(backend, choice.template, kernel, placed, refusal, begin, key)
    if key is None:
        return making.compiled()
    place = key, placed.device
    known = _known(place)
    if known is not None and known.refusal == refusal:
        return replace(known, load_seconds=time.perf_counter() - begin, origin="memory")
    program = making.stored()
    if program is None:
        with cache.lock(key):
            program = making.stored(again=True) or making.compiled()
    return _keep(place, program)


def build_sound(records: Records, *, use_cache: bool = True) -> tuple[Records, Program]:
    """The program of the choice, or of the next candidate whose code passes the toolchain's checks.

    Returns:
        The records with the choice that was built, and its program.

    Raises:
        BuildError: as `build`; or the code of no candidate passes.
    """
    made, faults = records, 0
    while True:
        try:
            program = build(made.choice, made.kernel, made.target, use_cache=use_cache)
        except UnsoundCodeError as error:
            choice = made.choice.without(error.what)
            if choice is None and faults:
                many = f"\nThe code of {counted(faults, 'other candidate')} fails a check too"
                raise UnsoundCodeError(error.what + many, source=error.source, output=error.output) from error
            if choice is None:
                raise
            made, faults = replace(made, choice=choice), faults + 1
            continue
        if faults and made.choice.keep is not None:
            made.choice.keep(made.choice)
        return made, program


def _known(place: _Place) -> Program | None:
    """The program that is kept; it is the one used last then."""
    with _guard:
        program = _programs.pop(place, None)
        if program is not None:
            _programs[place] = program
        return program


def _keep(place: _Place, program: Program) -> Program:
    """Keeps a program, unless another thread kept one before, and gives the one that is kept.

    Those used longest ago go, and are freed where no compiled plan holds them.
    """
    with _guard:
        kept = _programs.setdefault(place, program)
        oldest = list(_programs)[: max(0, len(_programs) - limits.KERNELS_KEPT)]
        gone = [_programs.pop(each) for each in oldest]
    del gone  # not under the lock: to free code takes a while
    return kept


def compile_all(
    pairs: Sequence[tuple[Kernel, Template]], target: Target, *, workers: int, seconds: float
) -> Generator[tuple[Source, bytes] | BuildError, None, None]:
    """The source and object code of each kernel by its template, or why there is none, in order.

    They come from the disk, or are compiled, many at once where the toolchain can, and stored.

    Args:
        target: for which machine; nothing is loaded.
        workers: compilers at a time.
        seconds: the most that one kernel may take, where the toolchain has processes of its own.

    Raises:
        BuildError: the toolchain is missing.
    """
    backend = backend_of(target.backend)
    keys = [_key(backend, template, kernel, target) for kernel, template in pairs]
    stored = [None if key is None else cache.read(key) for key in keys]
    missing = [pair for pair, payload in zip(pairs, stored, strict=True) if payload is None]
    made = backend.compile_all(missing, target, workers=workers, seconds=seconds)
    for key, payload in zip(keys, stored, strict=True):
        if payload is not None:
            yield _unpacked(payload)
            continue
        source, code = next(made)
        if isinstance(code, BuildError):
            yield code
            continue
        if key is not None:
            cache.write(key, _packed(source, code))
        yield source, code


def build_ahead(every: Sequence[Records]) -> None:
    """Compiles kernels for one target that are not on disk, many at once, so that `build` finds them there.

    Those that fail are left to `build`, which tells why; so are all, where nothing can be kept, or where the
    toolchain has no processes of its own. The longest source is compiled first: the time follows its length,
    and on 16 cores the last one ends the wait. Of several processes that start at once, one compiles.
    """
    missing = _missing(every)
    info = cache.cache_info() if len(missing) > ALONE else None
    if info is None or info.path is None or info.problem is not None:
        return
    with cache.lock(cache.key_of("ahead")):
        made = [each for key, each in missing.items() if not cache.holds(key)]
        made.sort(key=lambda each: -len(each.source.text))
        pairs = [(each.kernel, each.choice.template) for each in made]
        how = {"workers": min(len(pairs), available_threads()), "seconds": limits.COMPILER_SECONDS}
        with contextlib.suppress(BuildError, OSError):  # no toolchain, or no more processes
            for _ in compile_all(pairs, every[0].target, **how) if pairs else ():
                pass


def _missing(every: Sequence[Records]) -> dict[bytes, Records]:
    """The records of each kernel that is neither in this process nor on disk, by the kernel's key."""
    found: dict[bytes, Records] = {}
    for each in every:
        backend = backend_of(each.target.backend)
        if not backend.compiles_apart:
            continue
        key = _key(backend, each.choice.template, each.kernel, each.target)
        if key is not None:
            found.setdefault(key, each)
    with _guard:
        held = {key for key, _ in _programs}
    return {key: each for key, each in found.items() if key not in held and not cache.holds(key)}


def load(template: Template, kernel: Kernel, target: Target, source: Source, code: bytes) -> Program:
    """The program of code that `compile_all` gave, on a placed target of this machine.

    Raises:
        BuildError: the driver refuses it.
    """
    backend = backend_of(target.backend)
    key = _key(backend, template, kernel, target)
    return _Making(backend, template, kernel, target, None, time.perf_counter(), key).loaded(source, code)


def _key(backend: Backend, template: Template, kernel: Kernel, target: Target) -> bytes | None:
    """What code follows from: kernel, choice, target, generator and toolchain; None if one cannot be told.

    Which of several equal devices it is does not matter. The number of threads does, on a CPU: templates cut
    their work by it.
    """
    generator, toolchain = cache.fingerprint(), backend.fingerprint()
    outside = foreign.fingerprint(type(template))
    if generator is None or toolchain is None or outside is None:
        return None
    return cache.key_of(kernel.text, repr(template), machine_text(target), generator, toolchain, outside)


@dataclass(frozen=True)
class _Making:
    """One program on its way: where it comes from is tried in order."""

    backend: Backend
    template: Template
    kernel: Kernel
    target: Target
    refusal: str | None
    begin: float
    key: bytes | None

    def stored(self, *, again: bool = False) -> Program | None:
        """The program on disk; None if there is none that loads. A second look is counted if it finds one."""
        if self.key is None:
            return None
        payload = cache.read(self.key, counts_miss=not again)
        if payload is None:
            return None
        try:
            return self._program(*_unpacked(payload), "disk")
        except (BuildError, KeyError, TypeError, ValueError, struct.error):
            cache.reject(self.key)
            return None

    def compiled(self) -> Program:
        """The program compiled now, and stored if it has a key."""
        source = self.template.emit(self.kernel, self.target)
        code = self.backend.compile_object(source, self.kernel, self.template, self.target)
        program = self._program(source, code, "compiled")
        if self.key is not None:
            cache.write(self.key, _packed(source, code))
        return program

    def loaded(self, source: Source, code: bytes) -> Program:
        """The program of code that was made elsewhere."""
        return self._program(source, code, "compiled")

    def _program(self, source: Source, code: bytes, origin: str) -> Program:
        backend, target = self.backend, self.target
        loaded = None if self.refusal else backend.load(self.kernel, source, code, target)
        seconds, key = time.perf_counter() - self.begin, self.key.hex() if self.key else ""
        toolchain = backend.fingerprint() or ""
        return Program(source, code, target, loaded, self.refusal, seconds, origin, key, toolchain)


def _packed(source: Source, code: bytes) -> bytes:
    frame = json.dumps(source.frame).encode()
    return _LENGTH.pack(len(frame)) + frame + code


def _unpacked(payload: bytes) -> tuple[Source, bytes]:
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return Source.from_frame(json.loads(payload[_LENGTH.size : end])), payload[end:]
