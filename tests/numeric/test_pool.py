"""The threads behind the kernels: every task once, whoever calls, however many at a time."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder
from fuseplan.backends.cpu.ir_text import I64, PTR, Module
from fuseplan.backends.cpu.phases import COUNTERS, PHASES
from fuseplan.backends.cpu.runtime import Pool, pool
from fuseplan.execution.stages import decide
from fuseplan.kernels.target import available_processors

TASKS = 1000


def counting_kernel() -> int:
    """A kernel of one phase: task i adds one to word COUNTERS + i of the argument block."""
    module = Module()
    b = Builder(module, "kernel", [(PTR, "args"), (I64, "thread"), (I64, "threads")], noalias=False)
    args = b.parameters[0]
    b.line("br label %take")
    b.label("take")
    task = b.op(I64, f"atomicrmw add ptr {args.name}, i64 1 monotonic", "task")
    more = b.compare("slt", task, TASKS)
    b.line(f"br i1 {more.name}, label %run, label %end")
    b.label("run")
    word = b.at(args, task + COUNTERS, I64)
    b.op(I64, f"atomicrmw add ptr {word.name}, i64 1 monotonic")
    b.line("br label %take")
    b.label("end")
    b.finish()
    return toolchain.load_object(toolchain.compile_object(module.text()), ["kernel"])["kernel"]


@pytest.fixture(scope="module")
def kernel() -> int:
    return counting_kernel()


@pytest.fixture(params=["native", "portable"])
def workers(request: pytest.FixtureRequest) -> Iterator[Pool]:
    if request.param == "native" and sys.platform != "linux":
        pytest.skip("workers sleep natively on Linux alone")
    made = Pool(native=request.param == "native", most=8)
    yield made
    made.stop()


def launch_often(workers: Pool, kernel: int, threads: int, times: int) -> list[int]:
    block = (ctypes.c_int64 * (COUNTERS + TASKS))()
    run = workers.launcher(kernel, threads)
    for _ in range(times):
        run(ctypes.addressof(block))
    return list(block[COUNTERS:])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_task_runs_once_a_launch(workers: Pool, kernel: int, threads: int) -> None:
    assert launch_often(workers, kernel, threads, 200) == [200] * TASKS


def order_of(thread: int, tasks: int) -> list[int]:
    """The tasks of a phase as one of two threads takes them, alone: src counts them, and dst lists them."""
    records = decide("f32[64] -> relu", "cpu", threads=2)
    frame = Frame(records.choice.template, records.kernel, records.target, workspace=False)
    b, counted, listed = frame.body, frame.pointer("src"), frame.pointer("dst")
    with frame.tasks(tasks) as task:
        place = b.op(I64, f"atomicrmw add ptr {counted.name}, i64 1 monotonic")
        b.store(task, b.at(listed, place, I64))
    source = frame.source()
    entry = toolchain.load_object(toolchain.compile_object(source.text), [source.entry])[source.entry]
    block, count = (ctypes.c_int64 * (COUNTERS + 2))(), ctypes.c_int64()
    order = (ctypes.c_int64 * (2 * tasks))(*[-1] * (2 * tasks))
    block[COUNTERS:] = [ctypes.addressof(count), ctypes.addressof(order)]
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(entry)
    run(ctypes.addressof(block), thread, 2)
    assert list(order[tasks:]) == [-1] * tasks
    return list(order[:tasks])


@pytest.mark.parametrize("tasks", [1, 10])
def test_threads_take_tasks_from_the_two_ends(tasks: int) -> None:
    assert order_of(0, tasks) == [*range(tasks)]
    assert order_of(1, tasks) == [*reversed(range(tasks))]


def test_many_python_threads_may_launch_at_once(workers: Pool, kernel: int) -> None:
    results: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: results.append(launch_often(workers, kernel, 3, 300)))
        for _ in range(6)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [[300] * TASKS] * 6


def test_the_counters_are_zero_when_a_kernel_starts(workers: Pool, kernel: int) -> None:
    block = (ctypes.c_int64 * (COUNTERS + TASKS))()
    block[:COUNTERS] = [7] * COUNTERS
    workers.launcher(kernel, 1)(ctypes.addressof(block))
    assert list(block[COUNTERS:]) == [1] * TASKS
    assert PHASES * 2 == COUNTERS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_forked_child_gets_workers_of_its_own(kernel: int) -> None:
    launch_often(pool(), kernel, 2, 5)
    child = os.fork()
    if child == 0:
        right = launch_often(pool(), kernel, 2, 50) == [50] * TASKS
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_workers_leave_when_the_pool_stops(kernel: int) -> None:
    made = Pool(most=4)
    assert launch_often(made, kernel, 4, 20) == [20] * TASKS
    assert made.workers == 3
    before = threading.active_count()
    made.stop()
    assert threading.active_count() == before - 3


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("most", [1, 2])
def test_no_more_threads_than_processors_share_a_launch(kernel: int, native: bool, most: int) -> None:
    if native and sys.platform != "linux":
        pytest.skip("workers sleep natively on Linux alone")
    made = Pool(native, most)
    assert launch_often(made, kernel, 32, 20) == [20] * TASKS
    assert made.workers == most - 1
    made.stop()


def test_the_processs_pool_has_a_thread_a_processor_at_most(kernel: int) -> None:
    assert launch_often(pool(), kernel, 64, 5) == [5] * TASKS
    assert pool().workers < len(available_processors())
