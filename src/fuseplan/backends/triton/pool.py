"""Compiles many sources at once, in processes of their own: LLVM may abort and ptxas may never end.

`python -m fuseplan.backends.triton.pool` is such a process. Each request on its standard input has a pickled
`Job`; the answer has a pickled packed artifact or error.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import IO, Any

from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target
from fuseplan.system import limits
from fuseplan.system.child import Child, teller

SHOWN_BYTES = 4000
PATIENCE = 5.0  # seconds for a process to end


@dataclass(frozen=True)
class Job:
    """What is to be compiled."""

    source: Source
    types: tuple[str, ...]
    target: Target
    assembly: bool = False


def compile_many(
    jobs: Iterable[Job], *, workers: int, seconds: float = limits.COMPILER_SECONDS, triton: Path | None = None
) -> Iterator[bytes | BuildError]:
    """A packed artifact or an error for each job, in the jobs' order, each as soon as all up to it are.

    Args:
        workers: processes at a time.
        seconds: the most that one job may take; its process is ended then.
        triton: a folder with another Triton than the installed one, from `pip install --target`.
    """
    idle: LifoQueue[Worker] = LifoQueue()
    for _ in range(workers):
        idle.put(Worker(triton))

    def compiled(job: Job) -> bytes | BuildError:
        worker = idle.get()
        try:
            return worker.compile(job, seconds)
        finally:
            idle.put(worker)

    executor = ThreadPoolExecutor(workers)
    try:
        yield from executor.map(compiled, jobs)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        while not idle.empty():
            idle.get().stop()


class Worker:
    """One process, started when it is first needed and again after it died."""

    def __init__(self, triton: Path | None = None) -> None:
        self._first = () if triton is None else (str(triton),)
        self._running: tuple[Child, IO[bytes]] | None = None  # with the file that takes its errors

    def compile(self, job: Job, seconds: float = limits.COMPILER_SECONDS) -> bytes | BuildError:
        """The packed artifact of a job, or why there is none."""
        child, log = self._started()
        try:
            with child.within(seconds) as late:
                child.send({"job": _packed(job)})
                made: bytes | BuildError = _unpacked(next(child.answers())["made"])
        except (OSError, StopIteration, ValueError):  # it has died, perhaps within an answer
            status = child.process.wait()
            why = f"took more than {seconds:g} s" if late.is_set() else f"died with status {status}"
            log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN_BYTES))
            output = log.read().decode(errors="replace")
            self.stop()
            told = f"the compiler of a kernel for {job.target} {why}"
            return BuildError(told, source=job.source.text, output=output)
        return made

    def _started(self) -> tuple[Child, IO[bytes]]:
        if self._running is None:
            log = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
            words = ("-m", "fuseplan.backends.triton.pool")
            self._running = Child(words, log, *self._first, TRITON_INTERPRET="0"), log
        return self._running

    def stop(self) -> None:
        """Ends the process."""
        if self._running is not None:
            child, log = self._running
            self._running = None
            child.end(PATIENCE)
            log.close()


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def answer(job: Job) -> bytes | BuildError:
    """The packed artifact, or why there is none."""
    from fuseplan.backends.triton.compiler import compile_source

    try:
        return compile_source(job.source, job.types, job.target, assembly=job.assembly).pack()
    except BuildError as error:
        return error


def main() -> None:
    """Answers until the input ends."""
    tell = teller(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what compilers print must not come between the answers
    for line in sys.stdin:
        tell({"made": _packed(answer(_unpacked(json.loads(line)["job"])))})


if __name__ == "__main__":
    main()
