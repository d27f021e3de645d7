"""Threads that wait inside generated code: to start them costs about a microsecond and never the GIL.

A launch opens a job and takes part in it; workers that are awake enter, and the launch returns when all that
entered have left. A worker that wakes late finds the job closed: nobody waits for it. Only one launch owns
the workers at a time; a launch that finds them taken runs its kernel on its own thread alone, so that many
Python threads may call at once. There is at most one thread a processor: a launch on more is done by fewer.
"""

from __future__ import annotations

import atexit
import ctypes
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Mapping

from fuseplan.backends.cpu.loader import Address
from fuseplan.backends.cpu.phases import PATIENCE, YIELD, YIELD_DECLARATION, relax
from fuseplan.kernels.target import available_processors
from fuseplan.stores import cache
from fuseplan.system.locks import Lock, in_child, loading

# Words of the pool's state, each group on a cache line of its own.
_GENERATION, _ENTERED, _OPEN, _SLEEPERS, _LOCK, _WORDS = 0, 8, 16, 24, 32, 40

# Pauses before a worker sleeps: about half a millisecond, more than the gap between two layers of a model.
_SPINS = 20_000

_POOL = """
{declarations}

; A worker takes part in the job that is open, if it is the job it was woken for.
define void @enter(ptr %pool, i64 %generation) {{
  %entered = getelementptr i64, ptr %pool, i64 8
  %open = getelementptr i64, ptr %pool, i64 16
  %function.at = getelementptr i64, ptr %pool, i64 17
  %args.at = getelementptr i64, ptr %pool, i64 18
  %threads.at = getelementptr i64, ptr %pool, i64 19
  %next.at = getelementptr i64, ptr %pool, i64 20
  %count = atomicrmw add ptr %entered, i64 1 seq_cst
  %job = load atomic i64, ptr %open seq_cst, align 8
  %same = icmp eq i64 %job, %generation
  br i1 %same, label %join, label %leave
join:
  %thread = atomicrmw add ptr %next.at, i64 1 monotonic
  %threads = load i64, ptr %threads.at
  %needed = icmp slt i64 %thread, %threads
  br i1 %needed, label %work, label %leave
work:
  %function = load ptr, ptr %function.at
  %args = load ptr, ptr %args.at
  call void %function(ptr %args, i64 %thread, i64 %threads)
  br label %leave
leave:
  %left = atomicrmw sub ptr %entered, i64 1 seq_cst
  ret void
}}

define i64 @generation(ptr %pool) {{
  %now = load atomic i64, ptr %pool acquire, align 8
  ret i64 %now
}}

; Waits for a job, enters it, waits for the next; returns when the generation turns negative.
define void @worker(ptr %pool, i64 %spins) {{
entry:
  %sleepers = getelementptr i64, ptr %pool, i64 24
  br label %wait
wait:
  %last = phi i64 [ 0, %entry ], [ %now, %begin ]
  br label %spin
spin:
  %tries = phi i64 [ 0, %wait ], [ %more, %again ], [ 0, %sleep ]
  %now = load atomic i64, ptr %pool acquire, align 8
  %new = icmp ne i64 %now, %last
  br i1 %new, label %check, label %again
again:
  {relax}
  %more = add i64 %tries, 1
  %on = icmp slt i64 %more, %spins
  br i1 %on, label %spin, label %sleep
sleep:
  %in = atomicrmw add ptr %sleepers, i64 1 seq_cst
  %expected = trunc i64 %last to i32
  {sleep}
  %out = atomicrmw sub ptr %sleepers, i64 1 seq_cst
  br label %spin
check:
  %stop = icmp slt i64 %now, 0
  br i1 %stop, label %quit, label %begin
begin:
  call void @enter(ptr %pool, i64 %now)
  br label %wait
quit:
  ret void
}}

define void @wake(ptr %pool, i64 %threads) {{
  %sleepers = getelementptr i64, ptr %pool, i64 24
  %asleep = load atomic i64, ptr %sleepers seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %call, label %done
call:
  {wake}
  br label %done
done:
  ret void
}}

; Opens a job, takes part as thread 0, closes it and waits for those that entered.
define void @launch(ptr %pool, ptr %function, ptr %args, i64 %threads) {{
  call void @llvm.memset.p0.i64(ptr align 8 %args, i8 0, i64 128, i1 false)
  %lock = getelementptr i64, ptr %pool, i64 32
  %alone = icmp slt i64 %threads, 2
  br i1 %alone, label %solo, label %try
try:
  %got = cmpxchg ptr %lock, i64 0, i64 1 acquire monotonic
  %mine = extractvalue {{ i64, i1 }} %got, 1
  br i1 %mine, label %open.job, label %solo
solo:
  call void %function(ptr %args, i64 0, i64 1)
  ret void
open.job:
  %entered = getelementptr i64, ptr %pool, i64 8
  %open = getelementptr i64, ptr %pool, i64 16
  %function.at = getelementptr i64, ptr %pool, i64 17
  %args.at = getelementptr i64, ptr %pool, i64 18
  %threads.at = getelementptr i64, ptr %pool, i64 19
  %next.at = getelementptr i64, ptr %pool, i64 20
  store ptr %function, ptr %function.at
  store ptr %args, ptr %args.at
  store i64 %threads, ptr %threads.at
  store atomic i64 1, ptr %next.at monotonic, align 8
  %before = load atomic i64, ptr %pool monotonic, align 8
  %job = add i64 %before, 1
  store atomic i64 %job, ptr %open seq_cst, align 8
  store atomic i64 %job, ptr %pool seq_cst, align 8
  call void @wake(ptr %pool, i64 %threads)
  call void %function(ptr %args, i64 0, i64 %threads)
  store atomic i64 0, ptr %open seq_cst, align 8
  br label %drain
drain:
  %pauses = phi i64 [ 0, %open.job ], [ 0, %yield ], [ %more, %wait ]
  %inside = load atomic i64, ptr %entered seq_cst, align 8
  %empty = icmp eq i64 %inside, 0
  br i1 %empty, label %close, label %wait
wait:
  {relax}
  %more = add i64 %pauses, 1
  %on = icmp slt i64 %more, {patience}
  br i1 %on, label %drain, label %yield
yield:
  {give_way}
  br label %drain
close:
  store atomic i64 0, ptr %lock release, align 8
  ret void
}}
"""

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
    return _POOL.format(
        declarations="\n".join(declarations),
        relax=pause,
        patience=PATIENCE,
        give_way=YIELD,
        sleep=sleep,
        wake=wake,
    )


Functions = Callable[[], Mapping[str, Address]]
FUNCTIONS = ("launch", "enter", "generation", "wake", "worker")


def _compiled(native: bool) -> Mapping[str, Address]:
    with loading:
        from fuseplan.backends.cpu import toolchain  # noqa: PLC0415 - a saved plan has the code, and no llvmlite

    text = pool_text(native)
    versions = (toolchain.fingerprint(), repr(toolchain.host_cpu()))
    return toolchain.load_object(
        cache.kept(lambda: toolchain.compile_object(text), text, *versions), FUNCTIONS
    )


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
        self._generation = ctypes.CFUNCTYPE(word, pointer)(base["generation"])
        self._wake = ctypes.CFUNCTYPE(None, pointer, word)(base["wake"])
        self._worker = ctypes.CFUNCTYPE(None, pointer, word)(base["worker"])
        self._storage = (ctypes.c_int64 * (_WORDS + 8))()
        self._state = (ctypes.addressof(self._storage) + 63) & ~63
        self._semaphore = threading.Semaphore(0)
        self._workers: list[threading.Thread] = []
        self._growing = Lock()
        self._stopped = False
        _pools.add(self)

    @property
    def workers(self) -> int:
        """How many worker threads wait for jobs."""
        return len(self._workers)

    def reserve(self, threads: int) -> None:
        """Starts workers until a launch on `threads` threads can have as many as there are processors for."""
        with self._growing:
            while len(self._workers) < min(threads, self._most) - 1:
                body = self._run_native if self._native else self._run_python
                worker = threading.Thread(target=body, name=f"fuseplan-{len(self._workers) + 1}", daemon=True)
                worker.start()
                self._workers.append(worker)

    def launcher(self, function: int, threads: int) -> Callable[[int], None]:
        """A callable that runs the kernel at address `function` on the argument block it is given.

        It holds the address, and with it the code: a launch that runs keeps what it runs.
        """
        self.reserve(threads)
        launch, state, helpers = self._launch, self._state, min(threads, self._most) - 1
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

    def _run_native(self) -> None:
        self._worker(self._state, _SPINS)

    def _run_python(self) -> None:
        while True:
            self._semaphore.acquire()
            generation = self._generation(self._state)
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
