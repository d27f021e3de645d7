"""Processes that fuseplan starts: no module of the working directory is imported there."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import fuseplan
from benchmarks import compile_time, footprint
from fuseplan.backends.triton.pool import Worker
from fuseplan.bench.runner import Process
from fuseplan.system.child import PACKAGE_ROOT, python, python_environment
from fuseplan.tuning import cases as tuning

PACKAGE = Path(fuseplan.__file__).parent
PLANTED = ("pickle", "json", "struct", "numpy", "tempfile", "triton")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules that say so when they are run; the file where they do."""
    told = tmp_path / "told"
    folder = tmp_path / "somewhere"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(told)!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")  # as an interactive Python and `python -c` begin
    return told


def test_a_child_imports_nothing_from_the_working_directory(planted: Path) -> None:
    program = "import json, sys, fuseplan; print(json.dumps([sys.path, fuseplan.__file__]))"
    told = subprocess.run(
        python("-c", program), env=python_environment(), capture_output=True, text=True, check=True
    )
    path, file = json.loads(told.stdout)
    assert os.getcwd() not in path
    assert "" not in path
    assert Path(file).parent == PACKAGE
    assert not planted.exists()


def peers(folder: Path) -> None:
    process = Process("no such peer", 1, folder / "log")
    assert "KeyError" in process.ask(do="release")["refused"]
    process.stop()


def compilers(folder: Path) -> None:
    worker = Worker()
    child, _ = worker._started()
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.process.wait() == 0
    worker.stop()


def tuners(folder: Path) -> None:
    process = tuning._Worker("cpu")
    (answer,) = itertools.islice(process._child.answers(), 1)
    assert answer == {}
    process.stop()


def compile_times(folder: Path) -> None:
    assert compile_time._in_a_process([], str(folder / "cache"))[0] == []


def footprints(folder: Path) -> None:
    assert footprint._import()[0] > 0


@pytest.mark.parametrize("start", [peers, compilers, tuners, compile_times, footprints])
def test_no_worker_runs_a_module_of_the_working_directory(
    start: Callable[[Path], None], planted: Path, tmp_path: Path
) -> None:
    start(tmp_path)
    assert not planted.exists()


def test_no_other_module_starts_a_python() -> None:
    """Every process comes by its command from `child`, so that none starts another way."""
    starters = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"sys\.executable|^(import|from) multiprocessing", path.read_text(), re.MULTILINE)
    ]
    assert starters == ["system/child.py"]


def test_a_package_in_the_working_directory_stays_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE_ROOT)
    assert PACKAGE_ROOT in python_environment()["PYTHONPATH"].split(os.pathsep)
    program = "import fuseplan; print(fuseplan.__file__)"
    told = subprocess.run(
        python("-c", program), env=python_environment(), capture_output=True, text=True, check=True
    )
    assert Path(told.stdout.strip()).parent == PACKAGE
