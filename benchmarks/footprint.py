"""What having fuseplan costs: seconds to import it, and bytes on disk of all that it needs."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import fuseplan
from fuseplan.system.child import python, python_environment

NEEDED = ("numpy", "llvmlite")
RUNS = 9
INSTALLED = ("*.py", "py.typed")
PACKAGE = Path(fuseplan.__file__).resolve().parent
HEAVY = ("torch", "onnx", "matplotlib")  # what an import must not bring along

PROGRAM = f"""
import json, sys, time
begin = time.perf_counter()
import numpy
middle = time.perf_counter()
import fuseplan
end = time.perf_counter()
brought = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([middle - begin, end - middle, brought]))
"""


@dataclass(frozen=True)
class Footprint:
    """Seconds and bytes.

    Attributes:
        numpy_import: seconds `import numpy` takes, median.
        own_import: seconds `import fuseplan` takes after it, median.
        runs: how many fresh processes were timed.
        brought: heavy packages that the import brought along; none should be.
        installed: bytes of the files of fuseplan and of each package it needs.
    """

    numpy_import: float
    own_import: float
    runs: int
    brought: tuple[str, ...]
    installed: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.installed.values())

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self) | {"total": self.total}


def footprint(runs: int = RUNS) -> Footprint:
    """Measures, each import in a fresh process; the first only warms the disk."""
    told = [_import() for _ in range(runs + 1)][1:]
    sizes = {name: installed_bytes(name) for name in NEEDED}
    own = (path for word in INSTALLED for path in PACKAGE.rglob(word))
    sizes["fuseplan"] = _bytes(own)
    return Footprint(
        numpy_import=statistics.median(row[0] for row in told),
        own_import=statistics.median(row[1] for row in told),
        runs=runs,
        brought=tuple(sorted({name for row in told for name in row[2]})),
        installed=sizes,
    )


def _import() -> tuple[float, float, list[str]]:
    printed = subprocess.run(
        python("-c", PROGRAM), env=python_environment(), capture_output=True, text=True, check=True
    )
    numpy_seconds, own_seconds, brought = json.loads(printed.stdout)
    return float(numpy_seconds), float(own_seconds), list(brought)


def installed_bytes(package: str) -> int:
    """Bytes of a package's files on disk, as its installer listed them; byte code is not counted."""
    listed = metadata.files(package) or []
    return _bytes(Path(str(file.locate())) for file in listed if file.suffix != ".pyc")


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
