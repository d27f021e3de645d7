"""Launches in the OpenMP threads that torch's operators run in, and where there are none."""

import copy
import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

import fuseplan
import fuseplan.torch
from forked import holds_in_child
from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.backend import Function, FunctionBlock
from fuseplan.backends.cpu.loader import Address
from fuseplan.backends.cpu.phases import COUNTERS
from fuseplan.backends.cpu.runtime import _TORCHS, Pool, _team
from fuseplan.execution import runner

pytestmark = pytest.mark.skipif(not _team(), reason="torch has no GNU OpenMP here")
forks = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested

# A kernel counts its calls by thread; `nested` launches it as a member of a team that somebody else began.
_TEXT = f"""
define void @kernel(ptr %args, i64 %thread, i64 %threads) {{
  %place = add i64 %thread, {COUNTERS}
  %word = getelementptr i64, ptr %args, i64 %place
  %before = atomicrmw add ptr %word, i64 1 monotonic
  ret void
}}
define void @nested(ptr %given) {{
  %launch.at = getelementptr ptr, ptr %given, i64 1
  %args.at = getelementptr ptr, ptr %given, i64 2
  %pool = load ptr, ptr %given
  %launch = load ptr, ptr %launch.at
  %args = load ptr, ptr %args.at
  call void %launch(ptr %pool, ptr @kernel, ptr %args, i64 2)
  ret void
}}
"""


@pytest.fixture(scope="module")
def code() -> dict[str, Address]:
    return toolchain.load_object(toolchain.compile_object(_TEXT), ["kernel", "nested"])


@pytest.fixture
def two() -> Iterator[None]:
    """Torch has two threads, which have run."""
    was = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).add(1)
    yield
    torch.set_num_threads(was)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(native=True, most=2)
    yield made
    made.stop()


def counted(launch: Callable[[int], None], times: int) -> list[int]:
    """How often each of two threads ran the kernel."""
    block = (ctypes.c_int64 * (COUNTERS + 2))()
    for _ in range(times):
        launch(ctypes.addressof(block))
    return list(block[COUNTERS:])


def test_each_member_of_torchs_team_takes_part(two: None, pool: Pool, code: dict[str, int]) -> None:
    """Our own workers come late to so short a kernel: nobody waits for them."""
    assert counted(pool.launcher(code["kernel"], 2), 200) == [200, 200]


def test_a_process_without_torchs_tensors_has_a_pool_alone(
    two: None, pool: Pool, code: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, _TORCHS)
    assert counted(pool.launcher(code["kernel"], 2), 2000)[1] < 2000


def test_a_team_of_another_size_is_left_alone(two: None, pool: Pool, code: dict[str, int]) -> None:
    """It would end threads, and torch's next operator would start them again."""
    launch = pool.launcher(code["kernel"], 2)
    torch.set_num_threads(1)
    first, second = counted(launch, 2000)
    assert first == 2000
    assert second < 2000
    torch.set_num_threads(2)
    assert counted(launch, 200) == [200, 200]


def test_a_launch_inside_of_a_parallel_region_has_one_thread(
    two: None, pool: Pool, code: dict[str, int]
) -> None:
    pool.launcher(code["kernel"], 2)
    block = (ctypes.c_int64 * (COUNTERS + 2))()
    given = (ctypes.c_void_p * 3)(pool._state, pool._code["launch"], ctypes.addressof(block))
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    for _ in range(100):
        parallel(_team()[0])(code["nested"], ctypes.addressof(given), 2, 0)
    assert list(block[COUNTERS:]) == [200, 0]


def test_several_python_threads_launch_at_once(two: None, pool: Pool, code: dict[str, int]) -> None:
    made: list[list[int]] = []
    launch = pool.launcher(code["kernel"], 2)
    callers = [threading.Thread(target=lambda: made.append(counted(launch, 300))) for _ in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert [first for first, _ in made] == [300] * 4  # alone or not, the first thread runs


@forks
def test_a_forked_child_has_workers_of_its_own(two: None, pool: Pool, code: dict[str, int]) -> None:
    """The child's copy of the library waits forever for threads that only the parent has."""
    launch = pool.launcher(code["kernel"], 2)
    assert counted(launch, 10) == [10, 10]

    def launches() -> bool:
        again = pool.launcher(code["kernel"], 2)
        return counted(launch, 50)[0] == counted(again, 50)[0] == 50 and pool.workers == 1

    assert holds_in_child(launches)
    assert counted(launch, 10) == [10, 10]


@forks
def test_a_forked_child_calls_a_module_that_its_parent_called(two: None) -> None:
    """As a worker of a DataLoader does, with one thread."""
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    src = torch.randn(256, 64)
    with torch.no_grad():
        want = copy.deepcopy(module).double()(src.double())
        fused = fuseplan.torch.fuse(module, src)

        def is_right() -> bool:
            return bool((fused(src) - want).abs().max() < 1e-5)

        assert is_right()

        def is_right_in_child() -> bool:
            first = is_right()  # all of it is plans
            torch.set_num_threads(1)
            return first and is_right()

        assert holds_in_child(is_right_in_child)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert is_right()


def test_a_process_ends_after_launches_in_a_team() -> None:
    code = (
        "import torch, fuseplan; torch.set_num_threads(2); src = torch.ones(512, 512);"
        "made = fuseplan.compile('f32[512x512] -> gelu', threads=2)(torch.add(src, src)); print(made.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, check=True)
    assert b"512" in done.stdout


@pytest.mark.parametrize(("rows", "threads"), [(4, 1), (4096, 2)])
def test_a_brief_kernel_runs_on_its_callers_thread(
    rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(runner, "ALONE", 3e-6)
    compiled = fuseplan.compile(f"f32[{rows}x64] -> bias -> relu", threads=2)
    block = Function.block

    def noted(function: Function, count: int) -> FunctionBlock:
        asked.append(count)
        return block(function, count)

    monkeypatch.setattr(Function, "block", noted)
    compiled(np.ones((rows, 64), np.float32), bias=np.ones(64, np.float32))
    assert asked == [threads]
