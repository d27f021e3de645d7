"""docs/versions.md, written from recorded runs: `python -m benchmarks.report.versions RESULTS PAGE`.

`pytest --versions FILE` records what passed, `fuseplan crossbuild --record FILE` what compiles.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fuseplan.bench.markdown import table

FILE = "versions.jsonl"
SHOWN = ("python", "numpy", "llvmlite", "torch", "triton")
HEAD = """\
<!-- Written by `make docs` from benchmarks/results: run again, do not edit. -->

# Versions

Each row is one recorded run. `pyproject.toml` admits other versions too; no run shows that they work.
"""

Record = Mapping[str, Any]
UNSOUND = """\
`fuseplan crossbuild SUITE --triton FOLDER --record FILE`. A kernel is unsound if it does not compile, if it
spills more than `benchmarks/allowed_spills.toml` allows, or if it lacks the instructions it was made for."""


def records(folder: Path) -> list[Record]:
    """The recorded runs: of each set of versions the last one."""
    lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    last = {_what(record): record for record in map(json.loads, lines)}
    return sorted(last.values(), key=_what)


def _what(record: Record) -> tuple[object, ...]:
    numbers = (tuple(map(_number, record["versions"].get(name, "").split("."))) for name in SHOWN)
    return record["benchmark"], *numbers, tuple(record.get("suites", ()))


def _number(part: str) -> tuple[int, str]:
    """`9` before `10`."""
    return (int(part), "") if part.isdecimal() else (-1, part)


def page(folder: Path) -> str:
    """The page, from the recorded runs in a folder of results."""
    found = records(folder)
    tests = [record for record in found if record["benchmark"] == "versions"]
    built = [record for record in found if record["benchmark"] == "crossbuild"]
    return "\n".join([HEAD, *_tests(tests), *_built(built)]) + "\n"


def _tests(found: list[Record]) -> Iterator[str]:
    """The runs of tests, and which tests failed in which."""
    yield "## Tests"
    yield ""
    yield "`pytest FOLDERS --versions FILE`, on a CPU. GPU kernels are compiled and interpreted, not run."
    yield ""
    yield from table([*SHOWN, "passed", "skipped", "failed", "commit"], [_row(record) for record in found])
    failed = [(record["versions"], each) for record in found for each in record["failed"]]
    if failed:
        yield ""
    for used, each in failed:
        yield f"- failed with {', '.join(f'{name} {used[name]}' for name in SHOWN if name in used)}: `{each}`"
    yield ""


def _row(record: Record) -> list[str]:
    counts = sum((Counter(each) for each in record["outcomes"].values()), Counter[str]())
    outcomes = [str(counts[name]) for name in ("passed", "skipped", "failed")]
    return [*(record["versions"].get(name, "") for name in SHOWN), *outcomes, record["commit"]]


def _built(found: list[Record]) -> Iterator[str]:
    yield "## Triton"
    yield ""
    yield UNSOUND
    yield ""
    rows = [
        [
            *(record["versions"][name] for name in ("triton", "ptxas")),
            *(", ".join(record[name]) for name in ("suites", "targets")),
            str(record["kernels"]),
            str(len(record["unsound"])),
            record["commit"],
        ]
        for record in found
    ]
    yield from table(["triton", "ptxas", "suites", "targets", "kernels", "unsound", "commit"], rows)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])), encoding="utf-8")
