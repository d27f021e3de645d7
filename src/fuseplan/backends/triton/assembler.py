"""NVIDIA's assembler: the choice of one on this machine, and machine code by it; imports no triton.

Up to CUDA 13.2, ptxas can reuse registers of sm_90 that a matrix instruction has not read yet: it removes
the copies that protect them (triton-lang/triton#11781; NVIDIA's release notes of CUDA 13.3). So an assembler
of 13.3 or later is preferred. `sass` finds the code that an earlier one gets wrong.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fuseplan.backends.triton.driver import driver_release
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.settings import PTXAS, settings
from fuseplan.stores import cache
from fuseplan.system import limits

SECONDS = limits.ASSEMBLER_SECONDS
KEEPS_FACTORS = (13, 3)  # the first release whose code keeps registers until they are read
TOOLS = Path("backends", "nvidia", "bin")  # in Triton's package


@dataclass(frozen=True)
class Assembler:
    """One ptxas; its version is as it tells it, `13.4.59`."""

    path: Path
    version: str
    size: int

    @property
    def release(self) -> tuple[int, int]:
        """CUDA's release: (13, 4)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def ptx(self) -> int:
        """The newest PTX that it takes: 87 is 8.7.

        CUDA 11.8 came with PTX 7.8, 12.0 to 12.5 with 8.0 to 8.5, 12.6 on with one less than its own number,
        and 13.0 with 9.0: NVIDIA's PTX ISA, release notes.
        """
        major, minor = self.release
        if major >= 13:
            return 90 + 10 * (major - 13) + minor
        return 80 + minor - (minor >= 6) if major == 12 else 70 + minor

    def __str__(self) -> str:
        return f"ptxas {self.version} of {self.size} bytes"

    def assembled(self, ptx: str, capability: int, text: str = "") -> tuple[bytes, str]:
        """A cubin of PTX, and the log, which tells its resources.

        Args:
            text: of the kernel, for the error.

        Raises:
            BuildError: ptxas refuses the PTX, crashes, or takes longer than SECONDS.
        """
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        with tempfile.TemporaryDirectory(prefix="fuseplan-") as folder:
            given, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            given.write_text(ptx)
            command = [str(self.path), "-v", f"--gpu-name={name}", str(given), "-o", str(made)]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(
                    f"{self} cannot assemble the kernel for {name}: {error}", source=text
                ) from error
            if ran.returncode:
                raise BuildError(
                    f"{self} ended with status {ran.returncode} on the kernel for {name}",
                    source=text,
                    output=ran.stderr + ran.stdout,
                )
            return made.read_bytes(), ran.stderr + ran.stdout


def assembler(package: Path) -> Assembler:
    """The assembler for kernels of NVIDIA's GPUs.

    The setting FUSEPLAN_PTXAS names it. Without the setting it is the first of CUDA 13.3 or later whose code
    this machine's driver loads, Triton's `ptxas-blackwell` before those of the PyPI package nvidia-cuda-nvcc.
    Where there is none, it is Triton's `ptxas`.

    Raises:
        ArgumentError: the setting names no assembler.
        BuildError: Triton's assembler does not run.
    """
    named = settings().ptxas
    if named is not None:
        return _named(named)
    newest = next((found for found in map(_asked, _brought(package)) if found and _suits(found)), None)
    return newest or own_assembler(package)


def own_assembler(package: Path) -> Assembler:
    """Triton's `ptxas`, whose PTX its kernels are written in; a BuildError where it does not run."""
    path = package / TOOLS / "ptxas"
    found = _asked(path)
    if found is None:
        raise BuildError(f"{path} does not run, or does not print its version")
    return found


def _named(path: Path) -> Assembler:
    found = _asked(path)
    if found is None:
        why = "does not run as NVIDIA's assembler" if path.is_file() else "is not a file"
        raise ArgumentError(
            f"{PTXAS}={path} {why}; want the path of a ptxas, such as /usr/local/cuda/bin/ptxas"
        )
    return found


@functools.cache
def _brought(package: Path) -> tuple[Path, ...]:
    """The places of newer assemblers: in Triton's package, and in NVIDIA's beside it."""
    beside = sorted(package.parent.glob("nvidia/cu[0-9]*/bin/ptxas"), reverse=True)
    return package / TOOLS / "ptxas-blackwell", *beside


def _suits(found: Assembler) -> bool:
    """Whether an assembler is new enough, and this machine's driver not too old for its code.

    A driver of CUDA 13.0 loads code of all 13.x (NVIDIA's minor version compatibility), none of 14.0.
    """
    loads = driver_release()
    return found.release >= KEEPS_FACTORS and (loads is None or loads[0] >= found.release[0])


@functools.cache
def _asked(path: Path) -> Assembler | None:
    """The assembler at a path; None if none runs there. Its answer is kept, by the file's size and time."""
    try:
        found = path.stat()
        said = cache.kept(
            partial(_said, path), "ptxas", str(path), str(found.st_size), str(found.st_mtime_ns)
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    version = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", said.decode(errors="replace"))
    return Assembler(path, version[1], found.st_size) if version and b"Ptx" in said else None


def _said(path: Path) -> bytes:
    """The output of `--version`, which takes 3 to 10 ms, and more in a process with torch."""
    command = [str(path), "--version"]
    return subprocess.run(command, capture_output=True, check=True, timeout=limits.TOOL_SECONDS).stdout
