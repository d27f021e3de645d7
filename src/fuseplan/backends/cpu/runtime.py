"""Threads that wait inside generated code: to start them costs about a microsecond and never the GIL.

In a process that gives fuseplan tensors of torch's, a launch is a parallel region of the OpenMP library that
torch calls, where that has as many threads as the launch. Workers of our own beside it take turns with its
threads, which wait busily too: a launch after a `torch.add` took 8 ms so on two cores, and takes 1.4 us.

Elsewhere a launch opens a job and takes part in it; workers that are awake enter, and the launch returns
when all that entered have left. A worker that wakes late finds the job closed: nobody waits for it. Only one
launch runs on several threads at a time; one that finds another at it runs its kernel on its own thread
alone, so that many Python threads may call at once. There is at most one thread a processor: more would wait
for one another.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template

from fuseplan.backends.cpu.loader import Address
from fuseplan.backends.cpu.phases import PATIENCE, YIELD, YIELD_DECLARATION, relax
from fuseplan.kernels.target import available_processors
from fuseplan.stores import cache
from fuseplan.system.locks import Lock, in_child, loading

# Names of the words of the pool's state by their places, each group on a cache line of its own; the jobs that
# were begun are counted in the first word.
_JOB = ("open", "function", "args", "threads", "next")
_TEAM = ("team", "most", "number")  # another library's functions; the first is set last
_GROUPS = {8: ("entered",), 16: _JOB, 24: ("sleepers",), 32: ("lock",), 40: _TEAM}
_PLACES = {name: at for first, names in _GROUPS.items() for at, name in enumerate(names, first)}
_WORDS = 48

# Pauses before a worker sleeps: about half a millisecond, more than the gap between two layers of a model.
_SPINS = 20_000

_TORCHS = "fuseplan.tensors.torch_tensors"  # the module is imported with the first tensor of torch's
_OPENMP = ("GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num")
_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of Linux's futex call


def _can_sleep_natively() -> bool:
    return sys.platform == "linux" and platform.machine() in _FUTEX


def pool_text(native: bool) -> str:
    """LLVM IR of `FUNCTIONS`: workers that sleep natively need Linux."""
    pause, declaration = relax(platform.machine())
    declarations = [declaration, YIELD_DECLARATION, "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"]
    sleep = wake = ""
    if native:
        declarations.append("declare i64 @syscall(i64, ...)")
        call = f"call i64 (i64, ...) @syscall(i64 {_FUTEX[platform.machine()]}, ptr %pool"
        sleep = f"%slept = {call}, i32 128, i32 %expected, ptr null, ptr null, i32 0)"  # FUTEX_WAIT_PRIVATE
        wake = f"%woken = {call}, i32 129, i32 2147483647, ptr null, ptr null, i32 0)"  # FUTEX_WAKE_PRIVATE
    pairs = _PLACES.items()
    return Template(Path(__file__).with_name("pool.ll").read_text(encoding="utf-8")).substitute(
        declarations="\n".join(declarations),
        words="\n  ".join(f"%{name}.at = getelementptr i64, ptr %pool, i64 {at}" for name, at in pairs),
        relax=pause,
        patience=PATIENCE,
        give_way=YIELD,
        sleep=sleep,
        wake=wake,
    )


Functions = Callable[[], Mapping[str, Address]]
FUNCTIONS = ("launch", "enter", "wake", "worker")


def _compiled(native: bool) -> Mapping[str, Address]:
    with loading:
        from fuseplan.backends.cpu import toolchain  # noqa: PLC0415 - a saved plan has the code, and no llvmlite

    text = pool_text(native)
    versions = (toolchain.fingerprint(), repr(toolchain.host_cpu()))
    return toolchain.load_object(
        cache.kept(lambda: toolchain.compile_object(text), text, *versions), FUNCTIONS
    )


@functools.cache
def _team() -> tuple[int, ...]:
    """What launches a job in torch's OpenMP threads, and their count and numbers; empty without a GNU OpenMP.

    Torch calls the functions that the process shows to all of its libraries, and otherwise the ones that its
    own library is linked with. No library is loaded here.
    """
    for library in (None, "libtorch_cpu.so"):
        with contextlib.suppress(AttributeError, OSError):
            found = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            pointers = [ctypes.cast(getattr(found, name), ctypes.c_void_p) for name in _OPENMP]
            return tuple(each.value or 0 for each in pointers)
    return ()


class Pool:
    """Worker threads for kernels; one a process.

    Args:
        native: workers sleep in the kernel's futex. Where there is none they wait for a Python semaphore,
            which makes a launch on two threads about three times dearer.
        most: threads of a launch, its caller's included; one a processor unless given. Threads beyond the
            processors wait for one another: 32 on two took 5.3 ms where two take 0.8.
        functions: gives `FUNCTIONS` of code that is at hand; compiled, or from the cache, unless given.
    """

    def __init__(
        self, native: bool | None = None, most: int | None = None, functions: Functions | None = None
    ) -> None:
        self._most = len(available_processors()) if most is None else most
        self._native = _can_sleep_natively() if native is None else native
        base = self._code = functions() if functions else _compiled(self._native)
        word, pointer = ctypes.c_int64, ctypes.c_void_p
        self._launch = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, word)(base["launch"])
        self._enter = ctypes.CFUNCTYPE(None, pointer, word)(base["enter"])
        self._wake = ctypes.CFUNCTYPE(None, pointer, word)(base["wake"])
        self._worker = ctypes.CFUNCTYPE(None, pointer, word)(base["worker"])
        self._storage = (ctypes.c_int64 * (_WORDS + 8))()
        self._state = (ctypes.addressof(self._storage) + 63) & ~63
        self._semaphore = threading.Semaphore(0)
        self._workers: list[threading.Thread] = []
        self._growing = Lock()
        self._stopped = self._is_forked = False
        _pools.add(self)

    @property
    def workers(self) -> int:
        """How many worker threads wait for jobs."""
        return len(self._workers)

    def reserve(self, threads: int) -> None:
        """Starts workers until a launch on `threads` threads has as many; looks for a team to join."""
        with self._growing:
            if self._native and not self._is_forked and _TORCHS in sys.modules:
                self._join(_team())
            while len(self._workers) < threads - 1:
                body = self._run_native if self._native else self._run_python
                worker = threading.Thread(target=body, name=f"fuseplan-{len(self._workers) + 1}", daemon=True)
                worker.start()
                self._workers.append(worker)

    def launcher(self, function: int, threads: int) -> Callable[[int], None]:
        """A callable that runs the kernel at address `function` on the argument block it is given.

        It holds the address, and with it the code: a launch that runs keeps what it runs.
        """
        threads = min(threads, self._most)
        self.reserve(threads)
        launch, state, helpers = self._launch, self._state, threads - 1
        if self._native or not helpers:
            return lambda args: launch(state, function, args, threads)

        def run(args: int) -> None:
            self._semaphore.release(helpers)
            launch(state, function, args, threads)

        return run

    def stop(self) -> None:
        """Ends the workers; called when the interpreter exits, before their code could go away."""
        if self._stopped:
            return
        self._stopped = True
        ctypes.c_int64.from_address(self._state).value = -1
        if self._native:
            self._wake(self._state, len(self._workers))
        else:
            for _ in self._workers:
                self._semaphore.release()
        for worker in self._workers:
            worker.join(timeout=1.0)

    def start_anew(self) -> None:
        """In a forked child: no worker came along, and the parent's launches are not the child's."""
        ctypes.memset(self._state, 0, 8 * _WORDS)
        self._semaphore = threading.Semaphore(0)
        self._workers.clear()
        self._is_forked = True  # torch's team did not come along either, and its library waits for it forever

    def _join(self, team: Sequence[int]) -> None:
        for name, address in reversed([*zip(_TEAM, team, strict=False)]):
            ctypes.c_int64.from_address(self._state + 8 * _PLACES[name]).value = address

    def _run_native(self) -> None:
        self._worker(self._state, _SPINS)

    def _run_python(self) -> None:
        while True:
            self._semaphore.acquire()
            generation = ctypes.c_int64.from_address(self._state).value
            if generation < 0:
                return
            self._enter(self._state, generation)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_process: list[Pool] = []  # the one of this process, once there is one
_making = Lock()


def pool(functions: Functions | None = None) -> Pool:
    """The process's workers, started at first use; a forked child starts its own.

    Args:
        functions: as `Pool` takes them; only the first use of a process needs any.
    """
    with _making:
        if not _process:
            _process.append(Pool(functions=functions))
            atexit.register(_process[0].stop)
        return _process[0]


def _start_anew() -> None:
    for each in _pools:
        each.start_anew()


in_child(_start_anew)
