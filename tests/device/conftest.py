"""All in this folder needs a GPU; `--record FILE` adds a line of what was run, and where, to a file."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fuseplan.measure.machine import commit, gpu_machine, gpu_versions
from recorder import Counts

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", default=None, help="file to append a JSON line to: what passed on which GPU")
    parser.addoption(
        "--commit", default="", help="what the record says was tested; the checkout's unless given"
    )


class Left(pytest.Module):
    """A module whose tests this machine cannot run: its cases are not even made."""

    def collect(self) -> NoReturn:
        pytest.skip("needs a GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    is_left = HERE in module_path.parents and not torch.cuda.is_available()
    return Left.from_parent(parent, path=module_path) if is_left else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(f"{HERE}{os.sep}"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _no_gradients_nor_kept_memory():  # type: ignore[no-untyped-def]
    with torch.no_grad():
        yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # 15 processes share a GPU: what one of them kept, others lacked


class Recorder(Counts):
    """Counts outcomes by file, and remembers the largest share of an allowed error."""

    def __init__(self, place: Path, what: str) -> None:
        super().__init__(lambda file: file.stem)
        self._place, self._commit = place, what
        self._worst: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        for name, value in report.user_properties:
            template, share = str(name), float(str(value))
            self._worst[template] = max(self._worst.get(template, 0.0), share)

    def pytest_sessionfinish(self) -> None:
        """Adds the record; to the last line, where that is of the same commit on the same GPU."""
        import fcntl

        with self._place.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # processes with a share of the tests add to one line
            file.seek(0)
            lines = self._recorded(file.read().splitlines())
            file.truncate(0)
            file.write("".join(f"{line}\n" for line in lines))

    def _recorded(self, lines: list[str]) -> list[str]:
        machine, what = gpu_machine().to_json(), self._commit or commit()
        last = json.loads(lines[-1]) if lines else {}
        if (last.get("commit"), last.get("machine")) == (what, machine):
            lines.pop()
            self._add(last)
        shares = self._worst
        record = self.told(
            "device", worst_share_of_bound=shares, machine=machine, versions=gpu_versions(), commit=what
        )
        return [*lines, json.dumps(record)]

    def _add(self, record: dict[str, Any]) -> None:
        for name, counted in record["outcomes"].items():
            self.outcomes.setdefault(name, Counter()).update(counted)
        self.failed = record["failed"] + self.failed
        for name, share in record["worst_share_of_bound"].items():
            self._worst[name] = max(self._worst.get(name, 0.0), share)


def pytest_configure(config: pytest.Config) -> None:
    place = config.getoption("record", None)
    is_controller = not hasattr(config, "workerinput")  # with xdist, workers report to it
    if place and is_controller and torch.cuda.is_available():
        config.pluginmanager.register(Recorder(Path(place), config.getoption("commit")))
