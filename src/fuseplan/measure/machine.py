"""What a measurement was made on and with, so that a number can be read years later."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fuseplan.kernels.target import Target, available_processors, parse_target
from fuseplan.system import limits
from fuseplan.system.reading import Record

FIELDS_OF_A_MODEL = ("model name", "cpu model", "Model", "Hardware")  # of /proc/cpuinfo, by architecture


@dataclass(frozen=True)
class Machine(Record):
    """A processor as its maker names it, LLVM's name for its kind, and the cores this process may use."""

    cpu: str
    kind: str
    cores: int
    system: str


@dataclass(frozen=True)
class GpuMachine(Record):
    """A GPU, and the machine it is in.

    Attributes:
        kind: the kind that code is made for: `sm_90`.
        memory_bytes, l2_bytes: its memory, and its second cache.
        driver: the driver's version; empty where the system does not tell.
    """

    gpu: str
    kind: str
    processors: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    host: Machine

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, the host's beside the GPU's."""
        own = super().to_json()
        del own["host"]
        return self.host.to_json() | own


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as its maker gives it; the architecture where the system does not tell."""
    if cpuinfo.exists():
        rows = [
            line.split(":", 1) for line in cpuinfo.read_text(errors="replace").splitlines() if ":" in line
        ]
        told = {key.strip(): value.strip() for key, value in rows}
        for field in FIELDS_OF_A_MODEL:
            if told.get(field):
                return told[field]
    return platform.processor() or platform.machine()


@functools.cache
def machine() -> Machine:
    """This machine."""
    target: Target = parse_target("cpu")
    return Machine(cpu_model(), f"{target.cpu} {target.name}", target.threads, platform.system())


@functools.cache
def gpu_machine(device: int = 0) -> GpuMachine:
    """The GPU of that index.

    Raises:
        ImportError: torch is not installed.
        RuntimeError, AssertionError: torch finds no such GPU.
    """
    import torch

    known: Any = torch.cuda.get_device_properties(device)
    return GpuMachine(
        gpu=known.name,
        kind=f"sm_{known.major}{known.minor}" if torch.version.cuda else known.gcnArchName.split(":")[0],
        processors=known.multi_processor_count,
        memory_bytes=known.total_memory,
        l2_bytes=getattr(known, "L2_cache_size", 0),
        driver=next(iter(nvidia_smi("driver_version")), ""),
        host=machine(),
    )


def nvidia_smi(*fields: str) -> list[str]:
    """The answer of nvidia-smi, a line per GPU; nothing where it cannot answer."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=limits.TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told.stdout.strip().splitlines() if told.returncode == 0 else []


def processor_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Busy seconds of the processors that this process may use, and all their seconds.

    Time that a hypervisor took counts as busy. Both are zero where the system does not tell.
    """
    if not stat.exists():
        return 0.0, 0.0
    rows = (line.split() for line in stat.read_text().splitlines() if line.startswith("cpu"))
    ticks = {name: [int(word) for word in counts[:8]] for name, *counts in rows}
    own = [ticks[f"cpu{number}"] for number in available_processors() if f"cpu{number}" in ticks]
    idle = sum(each[3] + each[4] for each in own)
    total = sum(map(sum, own))
    return (total - idle) / 100, total / 100


def others(before: tuple[float, float], after: tuple[float, float], own: float) -> float:
    """The share of the processors that other programs used between two readings; `own` is our seconds."""
    total = after[1] - before[1]
    return max(0.0, min(1.0, (after[0] - before[0] - own) / total)) if total > 0 else 0.0


def version_of(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, numpy, llvmlite, fuseplan and of the named packages that are installed."""
    named = {name: version_of(name) for name in ("fuseplan", "llvmlite", *packages)}
    found = {name: version for name, version in named.items() if version is not None}
    return {"python": sys.version.split()[0], "numpy": np.__version__, **found}


def gpu_versions() -> dict[str, str]:
    """Versions of Python, numpy, fuseplan, torch and the toolchain, and of torch's CUDA and cuDNN."""
    import torch

    from fuseplan.backends.triton import toolchain

    cudnn = torch.backends.cudnn.version()
    told = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
    told["cudnn"] = None if cudnn is None else str(cudnn)
    told["toolchain"] = toolchain.fingerprint()
    return versions("torch", "triton") | {name: version for name, version in told.items() if version}


@functools.cache
def commit(folder: Path = Path(__file__).parent) -> str:
    """The checked-out commit, `+` behind it where files differ from it; empty outside a repository."""

    def git(*words: str) -> str:
        told = subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=limits.TOOL_SECONDS,
        )
        return told.stdout.strip() if told.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no") if head else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head + ("+" if changed else "")
