"""Compiles many sources at once, in processes of their own: what crashes or hangs there is an error here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import LifoQueue
from typing import IO, Any

from fuseplan.backends.triton.worker import Job, received, send
from fuseplan.errors import BuildError
from fuseplan.system import limits
from fuseplan.system.child import python, python_environment

SHOWN_BYTES = 4000


def compile_many(
    jobs: Iterable[Job], *, workers: int, seconds: float = limits.COMPILER_SECONDS, triton: Path | None = None
) -> Iterator[bytes | BuildError]:
    """A packed artifact or an error for each job, in the jobs' order, each as soon as all up to it are.

    Args:
        jobs: what to compile.
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
        self._first = () if triton is None else (triton,)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def compile(self, job: Job, seconds: float = limits.COMPILER_SECONDS) -> bytes | BuildError:
        """The packed artifact of a job, or why there is none."""
        process = self._started()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            reply = self._asked(process, job)
        finally:
            timer.cancel()
        if reply is not None:
            return reply  # type: ignore[no-any-return]
        return self._died(job, f"took more than {seconds:g} s" if late.is_set() else "")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
            self._process = subprocess.Popen(
                python("-m", "fuseplan.backends.triton.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=python_environment(*map(str, self._first), TRITON_INTERPRET="0"),
            )
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], job: Job) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, job)  # type: ignore[arg-type]
            return received(process.stdout)  # type: ignore[arg-type]
        except OSError:
            return None

    def _died(self, job: Job, why: str) -> BuildError:
        process, log = self._process, self._log
        assert process is not None
        assert log is not None
        said = why or f"died with status {process.wait()}"
        log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN_BYTES))
        output = log.read().decode(errors="replace")
        self.stop()
        return BuildError(
            f"the compiler of a kernel for {job.target} {said}", source=job.source.text, output=output
        )

    def stop(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        log, self._log = self._log, None
        if process is None or log is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # what a dead process has not read cannot be flushed
            process.stdin.close()
        process.wait()
        process.stdout.close()
        log.close()
