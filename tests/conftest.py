"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from recorder import Versions

# Examples have no deadline: how long one takes says more about what else the machine does. Continuous
# integration draws the same ones each time, so what fails there fails for its commit; elsewhere they are new.
settings.register_profile("fuseplan", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fuseplan")

# There is a test process a core. Threads of NumPy's products would wait for the other processes', and busily:
# one thread takes a sixth of the processor time in test_hopper.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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
    parser.addoption("--cases", type=int, default=40, help="how many random plans are drawn")
    parser.addoption("--first", type=int, default=0, help="the seed of the first of them")
    parser.addoption("--seconds", type=float, default=inf, help="after which random plans are left out")
    parser.addoption("--versions", help="file to append a JSON line to: what passed with which versions")


def pytest_configure(config: pytest.Config) -> None:
    from fuseplan.execution import runner

    runner.ALONE = 0.0  # tests run small kernels on several threads, as large ones run
    place = config.getoption("versions")
    is_controller = not hasattr(config, "workerinput")  # with xdist, workers report to it
    if place and is_controller:
        config.pluginmanager.register(Versions(Path(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is collected stays as long as the process: garbage collections have no need to look at it.

    There is one every 10,000 objects instead of 700: of 20 seconds of torch's tests they take 0.7, not 2.2.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with the mark `part(n)`, about one case in n runs; `--whole` runs all. See `_kept`.

    `--share` leaves out all tests but one of so many, for processes side by side (`tests/device/shares.py`).
    The files of this folder come first: their tests are long, which at the end keep one process waiting for
    another, and share results of a minute, which a process makes again that takes tests from another's end.
    """
    here = str(Path(__file__).parent)
    items.sort(key=lambda item: os.path.dirname(item.path) != here)
    place, count = map(int, config.getoption("share").split("/"))
    others = [item for at, item in enumerate(items) if at % count != place - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = items[place - 1 :: count]
    if config.getoption("whole"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in tests.values() for item in _kept(cases)}
    left = [item for item in items if item not in kept]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in kept]


def _kept(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of a test's cases, those with the most new pairs of values; one with each value is among them.

    A parameter counts if its values are no more than one case in n: others are the cases' names. Two thirds
    of one in n, chosen so, have as many pairs as one in n by chance.
    """
    mark = cases[0].get_closest_marker("part")
    if mark is None:
        return iter(cases)
    share = len(cases) / mark.args[0]
    counts = Counter(name for name, _ in {value for item in cases for value in _values(item)})
    kept, seen = set[pytest.Item](), set[Any]()
    pairs, alone = dict[pytest.Item, set[Any]](), dict[pytest.Item, set[Any]]()
    for item in sorted(cases, key=lambda item: zlib.crc32(item.name.encode())):
        alone[item] = {value for value in _values(item) if counts[value[0]] <= share}
        pairs[item] = {frozenset(both) for both in combinations_with_replacement(alone[item], 2)}
    for least in range(max(map(len, pairs.values())), -1, -1):
        for item, own in pairs.items():
            if len(kept) < share / 1.5 and len(own - seen) >= least:
                kept.add(item)
                seen |= own
    values = {value for item in kept for value in alone[item]}
    for item, own in alone.items():
        if own - values:
            kept.add(item)
            values |= own
    return (item for item in cases if item in kept)


def _values(item: pytest.Item) -> list[tuple[str, int]]:
    """The parameters of a case, and which value each has: an object, the same in all cases that have it."""
    given: dict[str, object] = vars(item)["callspec"].params
    return [(name, id(value)) for name, value in given.items()]
