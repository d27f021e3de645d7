"""What compiled code takes of a process, and when it gives it back."""

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuseplan
from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.phases import COUNTERS
from fuseplan.backends.cpu.runtime import pool
from fuseplan.system import limits

LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells")
TIMES = 30


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is kept but what a test holds, and nothing is freed later than it could be."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    monkeypatch.setattr(limits, "KERNELS_KEPT", 0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plan_of(columns: int) -> str:
    return f"f32[4x{columns}] -> bias -> relu"


def compiled(columns: int) -> fuseplan.CompiledPlan:
    return fuseplan.compile(plan_of(columns), threads=2)


def engine_of(plan: fuseplan.CompiledPlan) -> weakref.ref[Any]:
    loaded: Any = plan.program.loaded
    return weakref.ref(loaded.address.held)


def test_code_goes_with_the_last_plan_that_has_it() -> None:
    src, bias = np.ones((4, 5), np.float32), np.ones(5, np.float32)
    plan = compiled(5)
    engine, layer = engine_of(plan), plan.bind(bias=bias)
    assert (plan(src, bias=bias) == layer(src)).all()
    del plan
    assert engine() is not None
    assert (layer(src) == 2).all()
    del layer
    assert engine() is None


def test_words_of_a_bound_plan_that_is_gone_are_nobodys() -> None:
    """Blocks outlive the plans that were bound, and hold addresses of what those had packed."""
    plan, src = compiled(6), np.ones((4, 6), np.float32)
    for value in range(8):
        assert (plan.bind(bias=np.full(6, value, np.float32))(src) == 1 + value).all()


def test_who_can_launch_code_holds_it() -> None:
    text = "define void @kernel(ptr %args, i64 %thread, i64 %threads) {\n  ret void\n}\n"
    address = toolchain.load_object(toolchain.compile_object(text), ["kernel"])["kernel"]
    engine, launch = weakref.ref(address.held), pool().launcher(address, 2)
    del address
    launch(ctypes.addressof((ctypes.c_int64 * COUNTERS)()))
    assert engine() is not None
    del launch
    assert engine() is None


def test_the_kernels_used_last_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KERNELS_KEPT", 2)
    origins = [compiled(columns).program.origin for columns in (5, 6, 5, 7, 5, 6)]
    assert origins == ["compiled", "compiled", "memory", "compiled", "memory", "disk"]


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def resident() -> int:
    """KiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@LINUX
def test_dropped_plans_leave_nothing_behind() -> None:
    """Two maps a kernel and 290 KiB stayed of each; of those, 210 with LLVM's passes."""
    for columns in (5, 6):
        compiled(columns)
    before = maps(), resident()
    for columns in range(7, 7 + TIMES):
        compiled(columns)
    assert maps() - before[0] < TIMES
    assert resident() - before[1] < 100 * TIMES


@LINUX
def test_loading_stops_before_the_maps_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(5)
    monkeypatch.setattr(toolchain, "maps_left", lambda: limits.SPARE_MAPS - 1)
    monkeypatch.setattr(toolchain._room, "loads", 64)
    for _ in range(2):
        with pytest.raises(MemoryError, match="Drop the compiled plans"):
            compiled(5)
    assert fuseplan.cache_info().entries == 1, "the stored code is not to blame"
    monkeypatch.undo()
    assert toolchain.maps_left() > limits.SPARE_MAPS


def test_maps_are_counted_where_the_system_limits_them(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text("one\ntwo\n")
    assert toolchain.maps_left(tmp_path) == float("inf")
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "max_map_count").write_text("10\n")
    assert toolchain.maps_left(tmp_path) == 8


def test_a_process_may_end_while_its_threads_launch() -> None:
    program = (
        "import threading, numpy as np, fuseplan\n"
        "layer = fuseplan.compile('f32[64x512] -> relu -> tanh', threads=2).bind()\n"
        "src, begun = np.ones((64, 512), np.float32), threading.Event()\n"
        "def work():\n"
        "    while True:\n"
        "        layer(src)\n"
        "        begun.set()\n"
        "for _ in range(3):\n"
        "    threading.Thread(target=work, daemon=True).start()\n"
        "begun.wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
