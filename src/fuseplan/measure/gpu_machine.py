"""The GPU a measurement was made on, and the versions of what drives it."""

from __future__ import annotations

import functools
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import Any

from fuseplan import limits
from fuseplan.backends.triton import toolchain
from fuseplan.measure.machine import Machine, machine
from fuseplan.measure.quiet import QUIET
from fuseplan.measure.versions import versions

REST = 1.0  # seconds: the driver tells of the last one at most


@dataclass(frozen=True)
class GpuMachine:
    """A GPU, and the machine it is in.

    Attributes:
        gpu: its maker's name for it.
        kind: what code is made for: `sm_90`.
        processors: multiprocessors.
        memory_bytes, l2_bytes: its memory, and its second cache.
        driver: the driver's version; empty where the system does not tell.
        host: the machine.
    """

    gpu: str
    kind: str
    processors: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    host: Machine

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values, the host's beside the GPU's."""
        own: dict[str, object] = asdict(self)
        del own["host"]
        return self.host.to_json() | own


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
        driver=_driver(),
        host=machine(),
    )


def _driver() -> str:
    return next(iter(_asked("driver_version")), "")


def _asked(*fields: str) -> list[str]:
    """What nvidia-smi tells of each GPU, a line a GPU; nothing where it cannot."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=limits.TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told.stdout.strip().splitlines() if told.returncode == 0 else []


class GpuWatch:
    """Looks whether a GPU works while this process gives it nothing to do.

    What begins later shows in the spread of samples.

    Args:
        device: the GPU's index, as torch counts.
    """

    def __init__(self, device: int) -> None:
        import torch

        torch.cuda.synchronize(device)
        time.sleep(REST)
        # torch counts the GPUs that CUDA_VISIBLE_DEVICES leaves, nvidia-smi all: both know the identity.
        self._share = gpu_share(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")))

    def disturbance(self) -> str | None:
        """The share of the time that other programs' kernels ran."""
        if self._share is None or self._share <= QUIET:
            return None
        return f"other programs used the GPU for {self._share:.0%} of the time"


def gpu_share(uuid: str) -> float | None:
    """The share of the last second in which a GPU ran kernels; None where its driver does not tell."""
    for line in _asked("uuid", "utilization.gpu"):
        name, _, percent = line.partition(", ")
        if uuid and name.removeprefix("GPU-") == uuid.removeprefix("GPU-") and percent.isdecimal():
            return int(percent) / 100
    return None


def gpu_versions() -> dict[str, str]:
    """Versions of Python, numpy, fuseplan, torch and the toolchain, and of torch's CUDA and cuDNN."""
    import torch

    found = versions("torch", "triton")
    cudnn = torch.backends.cudnn.version()
    told = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
    told["cudnn"] = None if cudnn is None else str(cudnn)
    told["toolchain"] = toolchain.fingerprint()
    return found | {name: version for name, version in told.items() if version}
