"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from recorder import Versions

# Examples have no deadline: how long one takes says more about what else the machine does. Continuous
# integration draws the same ones each time, so what fails there fails for its commit; elsewhere they are new.
settings.register_profile("fuseplan", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fuseplan")

# The many processes that tests start read the package's bytecode instead of compiling it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def _gradient_mode() -> Iterator[None]:
    """Benchmarks turn torch's gradients off for their process; a test's is the next test's too."""
    torch = sys.modules.get("torch")
    was = torch is None or torch.is_grad_enabled()
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(was)


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs rest, as far as measurements know: tests run on any machine."""
    from fuseplan.measure import quiet

    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: None)
    monkeypatch.setattr(quiet, "SPREAD", float("inf"))
    monkeypatch.setattr(quiet, "SLOWED", float("inf"))


@pytest.fixture
def registries() -> Iterator[None]:
    """What a test registers is known to that test alone."""
    from fuseplan import ops
    from fuseplan.backends import backend_of

    cpu = backend_of("cpu")
    operators, templates = dict(ops.BY_NAME), cpu.templates
    yield
    ops.BY_NAME.clear()
    ops.BY_NAME.update(operators)
    vars(cpu)["templates"] = templates


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="what continuous integration runs a part of is run in full"
    )
    parser.addoption("--share", default="1/1", help="K/N: of every N tests, the one at place K runs")
    parser.addoption("--versions", help="file to append a JSON line to: what passed with which versions")


def pytest_configure(config: pytest.Config) -> None:
    place = config.getoption("versions")
    is_controller = not hasattr(config, "workerinput")  # with xdist, workers report to it
    if place and is_controller:
        config.pluginmanager.register(Versions(Path(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is collected stays as long as the process: garbage collections have no need to look at it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with the mark `part(n)`, one case in n runs, drawn by its name; `--whole` runs all.

    `--share` leaves out all tests but one of so many, for processes side by side (`tests/device/shares.py`).
    """
    place, count = map(int, config.getoption("share").split("/"))
    others = [item for at, item in enumerate(items) if at % count != place - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = items[place - 1 :: count]
    if config.getoption("whole"):
        return
    left = [item for item in items if _is_left(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not _is_left(item)]


def _is_left(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("part")
    return mark is not None and zlib.crc32(item.name.encode()) % mark.args[0] != 0
