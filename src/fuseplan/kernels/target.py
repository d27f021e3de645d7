"""What is known of the machine a kernel is for: plain data, so any machine can emit for any other."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fuseplan.errors import ArgumentError, counted, did_you_mean, installing
from fuseplan.messages.excerpt import shown
from fuseplan.settings import parse_size, settings
from fuseplan.system import limits, tiles
from fuseplan.system.locks import loading

KIB = 1024
# The most of the last cache that a core is taken to have. A virtual machine sees all of the package's, and
# has a share of it: two cores of a Xeon that told 480 MB read 16 MB at 26 GB/s, and 40 MB at memory's 13.
CORE_SHARE = 16 * KIB * KIB


@dataclass(frozen=True, repr=False)
class Target:
    """A machine of one kind.

    Attributes:
        backend: the name of the backend whose templates run there.
        name: the kind: `avx2`, `avx512`, `avx512bf16`, `amx`, `neon` or a GPU's generation; empty where a
            backend has one kind. On a machine with none of these vectors it is `baseline`, and no other
            machine compiles for it.
        vector_bytes: width of one vector register; of one thread's widest load on a GPU.
        vector_registers: how many of them; of a GPU's thread, of 4 bytes.
        threads: the most threads one launch may use; 1 on a GPU, where that is not the caller's to say.
        l1_bytes, l2_bytes, l3_bytes: data caches: a core's first two, and all of the last. On a GPU, the
            shared memory that one program may use, and the second cache.
        cpu: LLVM's name of the processor, or the GPU's name.
        features: LLVM's feature string, `+avx2,+fma,...`.
        processors: multiprocessors or compute units of a GPU; 0 on a CPU.
        warp: threads of a GPU that run as one; 0 on a CPU.
        device: the GPU's index on this machine; None where it is not one of this machine's.
        repacks: weights are others in each launch, as in training, so that estimates count their packing.
    """

    backend: str
    name: str = ""
    vector_bytes: int = 32
    vector_registers: int = 16
    threads: int = 1
    l1_bytes: int = 32 * KIB
    l2_bytes: int = 512 * KIB
    l3_bytes: int = 8192 * KIB
    cpu: str = ""
    features: str = ""
    processors: int = 0
    warp: int = 0
    device: int | None = None
    repacks: bool = False

    def __str__(self) -> str:
        return f"{self.backend}:{self.name}" if self.name else self.backend

    def __repr__(self) -> str:
        machine = f"{self.cpu}, " if self.cpu else ""
        return f"<target {self}: {machine}{self.shape}>"

    @property
    def is_host(self) -> bool:
        """Whether it was made by looking at this machine."""
        if self.processors:
            return self.device is not None
        return self.backend == "cpu" and _host_kind.cache_info().currsize > 0 and self.cpu == _host_kind().cpu

    @property
    def shape(self) -> str:
        """How much of it works at once: `8 threads`, `132 processors`."""
        return counted(self.processors, "processor") if self.processors else counted(self.threads, "thread")


def _gpu(name: str, cpu: str, processors: int, shared: int, l2: int, warp: int = 32, l3: int = 0) -> Target:
    """A GPU: `shared` memory that one program may use and caches in KiB."""
    caches = (shared * KIB, l2 * KIB, l3 * KIB)
    return Target("triton", name, 16, 255, 1, *caches, cpu, processors=processors, warp=warp)


# GPUs by generation, each with the numbers of its usual server card; the binaries run on every card of it.
GPUS = (
    _gpu("sm_80", "NVIDIA A100-SXM4-80GB", 108, 163, 40 * KIB),
    _gpu("sm_86", "NVIDIA A40", 84, 99, 6 * KIB),
    _gpu("sm_89", "NVIDIA L40S", 142, 99, 96 * KIB),
    _gpu("sm_90", "NVIDIA H100 80GB HBM3", 132, 227, 50 * KIB),
    _gpu("sm_100", "NVIDIA B200", 148, 227, 126 * KIB),
    _gpu("sm_120", "NVIDIA GeForce RTX 5090", 170, 99, 96 * KIB),
    _gpu("gfx942", "AMD Instinct MI300X", 304, 64, 4 * KIB, warp=64, l3=256 * KIB),
    _gpu("gfx950", "AMD Instinct MI355X", 256, 160, 4 * KIB, warp=64, l3=256 * KIB),
    _gpu("gfx1100", "AMD Radeon RX 7900 XTX", 96, 64, 6 * KIB, l3=96 * KIB),
    _gpu("gfx1201", "AMD Radeon RX 9070 XT", 64, 64, 8 * KIB, l3=64 * KIB),
)
WITHOUT_GPU = "For source and code alone, name a kind of GPU, such as 'triton:sm_90' or 'triton:gfx942'"
OLDEST_GPU = (8, 0)  # bf16, asynchronous copies, and what Triton compiles for

_AVX2 = "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt"
_AVX512 = Target(
    "cpu", "avx512", 64, 32, l2_bytes=1024 * KIB, cpu="x86-64-v4",
    features=f"{_AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl",
)  # fmt: skip
_PAIRS = f"{_AVX512.features},+avx512bf16"
_TILES = f"{_PAIRS},+amx-tile,+amx-bf16,+amx-int8"

# Any machine of a kind. Caches are the smallest usual ones: a kernel blocked for them runs well on the rest.
KINDS = {
    "reference": Target("reference"),
    "cpu:avx2": Target("cpu", "avx2", 32, 16, cpu="x86-64-v3", features=_AVX2),
    "cpu:avx512": _AVX512,
    "cpu:avx512bf16": replace(_AVX512, name="avx512bf16", features=_PAIRS),
    "cpu:amx": replace(_AVX512, name="amx", l2_bytes=2048 * KIB, features=_TILES),
    "cpu:neon": Target("cpu", "neon", 16, 32, cpu="generic", features="+neon,+fp-armv8"),
    **{str(gpu): gpu for gpu in GPUS},
}

# Vector registers of this machine by what its features hold, the best first: kind, feature, bytes, registers.
WIDTHS = (
    ("amx", "+amx-tile", 64, 32),
    ("avx512bf16", "+avx512bf16", 64, 32),
    ("avx512", "+avx512vl", 64, 32),
    ("avx2", "+avx2", 32, 16),
    ("neon", "+neon", 16, 32),
    ("baseline", "", 16, 16),
)


def parse_target(text: str | Target) -> Target:
    """The target a text names.

    `cpu` is this machine, `cuda` its GPU that is torch's current one, `cuda:1` the second; `cpu:avx2`,
    `triton:sm_90` and the like are any machines of that kind; `reference` is NumPy.

    Raises:
        ArgumentError: there is no such target; or this machine's processor cannot be told, because llvmlite
            is not installed, or its GPU, because torch or the GPU is missing (the named kinds need nothing).
    """
    if isinstance(text, Target):
        return text
    if text == "cpu":
        return host_target()
    gpu = re.fullmatch(r"cuda(?::(\d+))?", str(text))
    if gpu:
        try:
            return gpu_target(None if gpu[1] is None else int(gpu[1]))
        except ArgumentError as error:
            raise ArgumentError(f"{error}. {WITHOUT_GPU}") from error
    if text in KINDS:
        kind = KINDS[text]
        return kind if kind.processors else replace(kind, threads=available_threads())
    hint = "Did you mean `cuda`?" if text == "gpu" else did_you_mean(str(text), ("cpu", "cuda", *KINDS))
    raise ArgumentError(f"no target is named {shown(text)}. {hint}")


def any_of(backend: str) -> Target:
    """Some machine of a backend, for questions that any can answer."""
    return next(kind for kind in KINDS.values() if kind.backend == backend)


@cache
def machine_text(target: Target) -> str:
    """The fields of a target that code may depend on: not the device's number, nor how long weights last."""
    return repr(asdict(replace(target, device=None, repacks=False)))


def available_threads() -> int:
    """The `threads` setting, or the processors this process may run on."""
    return settings().threads or min(len(available_processors()), limits.THREADS)


def available_processors() -> list[int]:
    """The numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@cache
def _host_processor() -> tuple[str, str]:
    """LLVM's name and features of this processor."""
    try:
        with loading:
            from llvmlite import binding  # noqa: PLC0415 - only this target needs it, and it takes 40 ms
    except ImportError as error:
        raise ArgumentError(
            "llvmlite is not installed: it tells this machine's processor, and compiles for it: `pip install "
            "llvmlite`. Without it `explain` and `show` take a kind of machine, such as 'cpu:avx2'"
        ) from error
    return str(binding.get_host_cpu_name()), str(binding.get_host_cpu_features().flatten())


@cache
def _host_kind() -> Target:
    cpu, features = _host_processor()
    if "+amx-tile" in features and not tiles.permitted():
        features = features.replace("+amx-", "-amx-")
    name, vector_bytes, registers = width_of(features)
    first, second, third = cache_bytes()
    third = min(third, CORE_SHARE * (os.cpu_count() or 1))
    return Target("cpu", name, vector_bytes, registers, 1, first, second, third, cpu, features)


def host_target() -> Target:
    """This machine; its thread count is read anew, since the setting may change."""
    return replace(_host_kind(), threads=available_threads())


def gpu_target(index: int | None = None) -> Target:
    """This machine's GPU of that index, by what its driver says; torch's current one unless given.

    Raises:
        ArgumentError: there is none that kernels can be launched on.
    """
    torch = _torch_with_gpu()
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if index is None else index
    if index >= count:
        raise ArgumentError(
            f"there is no GPU {index}; torch sees {count}: "
            + ", ".join(f"cuda:{each}" for each in range(count))
        )
    return _gpu_of(torch.cuda.get_device_properties(index), index)


def _torch_with_gpu() -> Any:
    """Torch, where it has a GPU to launch on."""
    try:
        import torch  # noqa: PLC0415 - only this target needs it, and it takes a second
    except ImportError as error:
        how = installing("triton", "torch", "triton")
        raise ArgumentError(f"running on a GPU needs torch, for its tensors and streams: {how}") from error
    if torch.version.hip:
        raise ArgumentError(
            f"this torch ({torch.__version__}) is for AMD GPUs, whose kernels are compiled and not launched"
        )
    if not torch.version.cuda:
        raise ArgumentError(
            f"this torch ({torch.__version__}) is built without CUDA: install a build with CUDA"
        )
    if not torch.cuda.is_available():
        raise ArgumentError(
            f"torch ({torch.__version__}) finds no GPU: `nvidia-smi` tells whether the driver does, and "
            "CUDA_VISIBLE_DEVICES hides the GPUs that it does not list"
        )
    return torch


def _gpu_of(found: Any, index: int) -> Target:
    """The target of torch's device properties."""
    if (found.major, found.minor) < OLDEST_GPU:
        raise ArgumentError(
            f"cuda:{index} ({found.name}) is sm_{found.major}{found.minor}; kernels need sm_80 (Ampere) or "
            "later: compile for 'cpu'"
        )
    name = f"sm_{found.major}{found.minor}"
    like = KINDS.get(f"triton:{name}", KINDS["triton:sm_86"])  # the least shared memory of all that there are
    shared = getattr(found, "shared_memory_per_block_optin", 0) or like.l1_bytes
    return replace(
        like,
        name=name,
        l1_bytes=shared,
        l2_bytes=getattr(found, "L2_cache_size", 0) or like.l2_bytes,
        cpu=found.name,
        processors=found.multi_processor_count,
        warp=getattr(found, "warp_size", like.warp),
        device=index,
    )


def width_of(features: str) -> tuple[str, int, int]:
    """The kind, vector bytes and vector registers that LLVM's feature string stands for."""
    held = set(features.split(","))
    for name, feature, vector_bytes, registers in WIDTHS:
        if not feature or feature in held or (name == "neon" and platform.machine() in ("arm64", "aarch64")):
            return name, vector_bytes, registers
    raise AssertionError("the last width needs no feature")


def cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[int, int, int]:
    """Bytes of the first, second and last level data caches.

    Linux says so under `root`. Elsewhere, and in containers that hide it, these are the defaults of `Target`:
    small ones, because blocking for a cache that is not there costs more than leaving part of one unused.
    """
    found = {1: Target.l1_bytes, 2: Target.l2_bytes, 3: Target.l3_bytes}
    for index in sorted(root.glob("index*")):
        try:
            level = int((index / "level").read_text())
            kind = (index / "type").read_text().strip()
            size = parse_size((index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and level in found:
            found[level] = size
    return found[1], found[2], found[3]
