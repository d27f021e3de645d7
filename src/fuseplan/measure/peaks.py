"""The most this machine's processors and GPU can do, measured, and the floor it sets under a kernel's time.

Measuring takes under a second a thread count, and some two seconds a GPU. The result is kept in the cache
directory and read from then on, unless other programs ran meanwhile. A rate is the best of many launches.
"""

from __future__ import annotations

import ctypes
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fuseplan.backends.cpu.dots import fastest
from fuseplan.kernels.centre import Reduction, Summary
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import FIRST_SLOT
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, host_target, parse_target
from fuseplan.measure.machine import cpu_model
from fuseplan.measure.quiet import GpuWatch, HostWatch, Watch, undisturbed
from fuseplan.stores import cache
from fuseplan.system import limits, private
from fuseplan.system.reading import Record, json_of, record

if TYPE_CHECKING:
    from fuseplan.measure.clock import GpuClock
    from fuseplan.measure.peak_kernels import PeakKernel

LAUNCHES = 16
KINDS_OF_TRAFFIC = ("read", "copy", "stream")
CHUNK = 64 * 1024  # regions are whole chunks: every step of every vector width divides them
COPIED_BYTES = 1 << 30  # on a GPU
ON_CHIP = 1 << 19  # bytes: registers and shared memory of a multiprocessor, the second cache of a core
SIDE = 8192  # of the square matrices of 16-bit numbers on a GPU; a quarter of the work in the slower dtypes
SLOW_SIDE = 4096
FORMAT = 2  # of the files; what has another number is measured again

R = TypeVar("R")
# Those that no folder took last as long as the process.
_unkept: dict[tuple[Path | None, str], Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Floor:
    """The least time a kernel can take, and what sets it: `compute`, or the `l2`, `l3` or `dram` it reads."""

    seconds: float
    bound: str


@dataclass(frozen=True)
class Peaks(Record):
    """What `threads` threads of a processor do at most.

    Attributes:
        cpu: the processor's name.
        threads: how many threads ran.
        flops: f32 operations a second, two a multiply-add; f64 has half of it.
        bytes_a_second: by where the data lies (`l2`, `l3`, `dram`) and what is done (`read`, `copy`,
            `stream`: a copy with stores past the caches); bytes read and bytes written both count.
        l2_bytes, l3_bytes: the caches: a core's second level, and all of the last.
        tiles: operations of products of bf16 by AMX's tiles a second; those of i8 are twice as many. 0 where
            the processor has none.
    """

    cpu: str
    threads: int
    flops: float
    bytes_a_second: dict[str, dict[str, float]]
    l2_bytes: int
    l3_bytes: int
    tiles: float = 0.0

    def level(self, footprint: int) -> str:
        """Where that many bytes stay from one call to the next: `l2`, `l3` or `dram`."""
        if footprint <= self.l2_bytes * self.threads:
            return "l2"
        return "l3" if footprint <= max(self.l3_bytes, self.l2_bytes * self.threads) else "dram"

    def floor(self, flops: int, nbytes: int, *, footprint: int | None = None, dtype: str = "f32") -> Floor:
        """The least time for that much arithmetic and traffic: whichever of the two takes longer.

        Args:
            flops: operations of the algorithm that runs: Winograd has fewer than the plain sum.
            nbytes: bytes read and written.
            footprint: bytes touched, which say where they lie between calls; `nbytes` unless given.
            dtype: that is computed with; of a product, that of its factors.
        """
        level = self.level(nbytes if footprint is None else footprint)
        by_tiles = {"bf16": self.tiles, "i8": 2 * self.tiles}.get(dtype, 0.0)
        speed = fastest(host_target()) if dtype == "i8" else 0.5 if dtype == "f64" else 1.0
        computing = flops / max(by_tiles, self.flops * speed)
        moving = nbytes / max(self.bytes_a_second[level].values())
        return Floor(computing, "compute") if computing >= moving else Floor(moving, level)


@dataclass(frozen=True)
class GpuPeaks(Record):
    """The most that a GPU does.

    Attributes:
        gpu: its name.
        bytes_a_second: of a copy in its memory (`dram`), bytes read and bytes written both counted.
        flops: of a product of matrices, two a multiply-add, by dtype: `f16`, `bf16`, `tf32`, `f32`, `f64`.
    """

    gpu: str
    bytes_a_second: dict[str, float]
    flops: dict[str, float]

    def floor(self, kernel: Kernel) -> Floor:
        """The least time for a kernel's products and its bytes from memory: the longer of the two.

        Where statistics need more passes over the data, each reads it from memory, but for rows that stay on
        the chip; what the second cache still holds of it can be faster. Full precision in f32 is what the f32
        units take, or three products of TF32, whichever is less.
        """
        has_products = isinstance(kernel.centre, Contraction | Summary)
        product = kernel.contraction if has_products else None
        dtype = "tf32" if product and product.precision == "tf32" else kernel.src.dtype
        rate = self.flops[dtype]
        if dtype == "f32":
            rate = max(rate, self.flops["tf32"] / 3)
        computing = (product.flops if product else 0) / rate
        moving = bytes_of_passes(kernel) / self.bytes_a_second["dram"]
        return Floor(computing, "compute") if computing >= moving else Floor(moving, "dram")


def multiplied_dtype(kernel: Kernel) -> str:
    """The dtype of most operations: that of a product's factors, `i8` of all integers; else computed in."""
    if not isinstance(kernel.centre, Contraction):
        return kernel.compute_dtype
    return "i8" if kernel.largest_sum else "bf16" if kernel.src.dtype == "bf16" else kernel.compute_dtype


AnyPeaks = TypeVar("AnyPeaks", Peaks, GpuPeaks)


def bytes_of_passes(kernel: Kernel) -> int:
    """What moves between memory and the chip: each pass reads again what no multiprocessor or core holds."""
    passes = kernel.read_in_passes
    read = sum(sum(each.values()) for each in passes)
    once = sum({key: size for each in passes for key, size in each.items()}.values())
    return kernel.minimum_bytes + (0 if _stays(kernel, once) else read - once)


def _stays(kernel: Kernel, nbytes: int) -> bool:
    """Whether the elements of a number, of these bytes in all, are side by side, and stay on the chip."""
    src, over = kernel.src, kernel.centre.over if isinstance(kernel.centre, Reduction) else ()
    span = 1 + sum((src.shape[axis] - 1) * src.element_strides[axis] for axis in over)
    return span == kernel.reduced_count and span * nbytes <= ON_CHIP * src.size


def peaks_of(target: Target) -> Peaks | GpuPeaks | None:
    """The peaks of a target of this machine; None of another machine's, and before they are measured."""
    if target.device is not None:
        return gpu_peaks(target.cpu)
    return peaks(target.threads) if target.backend == "cpu" and target.is_host else None


def peaks(threads: int | None = None) -> Peaks | None:
    """This machine's peaks for that many threads (default: all it may use); None before they are measured."""
    return _kept(_place(threads or parse_target("cpu").threads), Peaks)


def gpu_peaks(gpu: str) -> GpuPeaks | None:
    """The peaks of the GPU that its maker calls so; None before they are measured."""
    return _kept(place_of("peaks", gpu), GpuPeaks)


def measured_peaks(threads: int | None = None, patience: float = 0.0) -> tuple[Peaks, str | None]:
    """The peaks measured now or, rate by rate, the better stored ones; kept if they are reliable.

    Other programs can only make a machine look slower than it is: a disturbed measurement may raise rates
    that are stored, and is no first one.

    Args:
        threads: how many threads run; all that this process may use unless given.
        patience: seconds to wait for other programs to rest.

    Returns:
        The peaks, and what makes them unreliable; None where nothing does.

    Raises:
        BuildError: the kernels to measure with do not compile.
    """
    target = parse_target("cpu")
    count = threads or target.threads
    return _measured(_place(count), Peaks, partial(measure_peaks, target, count), HostWatch, patience)


def measured_gpu_peaks(gpu: str, device: int = 0, patience: float = 0.0) -> tuple[GpuPeaks, str | None]:
    """The same of the GPU that its maker calls so, by its index."""
    measure, watch = partial(measure_gpu_peaks, gpu, device), partial(GpuWatch, device)
    return _measured(place_of("peaks", gpu), GpuPeaks, measure, watch, patience)


def _measured(
    place: str,
    kind: type[AnyPeaks],
    measure: Callable[[], AnyPeaks],
    watch: Callable[[], Watch],
    patience: float,
) -> tuple[AnyPeaks, str | None]:
    found, disturbance = undisturbed(measure, watch, patience)
    stored = _kept(place, kind)
    if stored is not None:
        rates, disturbance = _better(_rates(found), _rates(stored)), None
        found = replace(found, **rates)
    if disturbance is None:
        write_kept(place, found.to_json())
    return found, disturbance


def _rates(found: Peaks | GpuPeaks) -> dict[str, Any]:
    tiles = {"tiles": found.tiles} if isinstance(found, Peaks) and found.tiles else {}
    return {"flops": found.flops, "bytes_a_second": found.bytes_a_second, **tiles}


def _better(found: Any, stored: Any) -> Any:
    """Rate by rate the better one; a rate that was not stored is the found one."""
    if isinstance(found, Mapping):
        return {name: _better(rate, stored.get(name, rate)) for name, rate in found.items()}
    return max(found, stored)


def _kept(place: str, kind: type[AnyPeaks]) -> AnyPeaks | None:
    """The stored peaks; None where they are absent, unreadable, or of another format."""
    found = read_kept(place, kind)
    levels = {"dram"} if kind is GpuPeaks else {"l2", "l3", "dram"}
    is_whole = found is not None and levels <= found.bytes_a_second.keys() and min(_flat(_rates(found))) > 0
    return found if is_whole else None


def _flat(rates: Any) -> Iterator[float]:
    for rate in rates.values() if isinstance(rates, Mapping) else ():
        yield from _flat(rate)
    if not isinstance(rates, Mapping):
        yield rates


def measure_peaks(target: Target, threads: int) -> Peaks:
    """Measures now, whatever is stored."""
    # The toolchain is imported where a kernel is built: reading stored peaks needs no compiler.
    from fuseplan.measure.peak_kernels import fma_kernel, memory_kernel, tile_kernel

    bench = _Bench(target, threads)
    steps = 200_000
    flops = bench.rate(fma_kernel(target, threads, steps), "flops")
    has_tiles = "+amx-bf16" in target.features
    tiles = bench.rate(tile_kernel(target, threads, steps), "flops") if has_tiles else 0.0
    rates = {
        level: {
            kind: bench.rate(memory_kernel(target, kind, threads, region, repeats), "nbytes")
            for kind in KINDS_OF_TRAFFIC
        }
        for level, region, repeats in _regions(target, threads)
    }
    return Peaks(cpu_model(), threads, flops, rates, target.l2_bytes, target.l3_bytes, tiles)


def _regions(target: Target, threads: int) -> Iterator[tuple[str, int, int]]:
    """Level, bytes a task, repeats: half of an L2; half of L3 shared out; four times L3, 256 MiB at most."""
    sizes = (
        ("l2", target.l2_bytes // 2),
        ("l3", max(target.l2_bytes * 2, target.l3_bytes // 2 // threads)),
        ("dram", min(256 << 20, max(64 << 20, 4 * target.l3_bytes)) // threads),
    )
    for level, size in sizes:
        region = max(1, size // CHUNK) * CHUNK
        yield level, region, max(1, (4 << 20) // region)


class _Bench:
    """Launches peak kernels on buffers that are big enough for all of them."""

    def __init__(self, target: Target, threads: int) -> None:
        self._threads = threads
        largest = max(region for _, region, _ in _regions(target, threads))
        self._memory = _aligned(largest * threads)
        self._scratch = _aligned(4096 * max(1, threads))
        self._scratch[:] = 0.5
        self._memory[:] = 1.0

    def rate(self, kernel: PeakKernel, counted: str) -> float:
        """The best of many launches: `counted` (`flops` or `nbytes`) a second."""
        from fuseplan.backends.cpu import runtime, toolchain

        address = toolchain.load_object(toolchain.compile_object(kernel.text), [kernel.entry])[kernel.entry]
        launch = runtime.pool().launcher(address, self._threads)
        storage = (ctypes.c_int64 * (FIRST_SLOT + 2))()
        storage[FIRST_SLOT] = self._scratch.ctypes.data
        storage[FIRST_SLOT + 1] = self._memory.ctypes.data if kernel.nbytes else self._scratch.ctypes.data
        best = float("inf")
        for _ in range(LAUNCHES):
            storage[0] = 0
            begin = time.perf_counter()
            launch(ctypes.addressof(storage))
            best = min(best, time.perf_counter() - begin)
        return float(getattr(kernel, counted)) / best


def _aligned(nbytes: int) -> NDArray[np.float32]:
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + nbytes].view(np.float32)


def _place(threads: int) -> str:
    return place_of("peaks", cpu_model(), str(threads))


def measure_gpu_peaks(gpu: str, device: int = 0) -> GpuPeaks:
    """Measures now, whatever is stored: torch's copy, and its products of matrices."""
    import torch

    from fuseplan.measure.clock import GpuClock

    clock = GpuClock(device)
    src = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=clock.device).random_()
    dst = torch.empty_like(src)
    copied = 2 * COPIED_BYTES / clock.least(lambda: dst.copy_(src))
    was = torch.backends.cuda.matmul.allow_tf32
    try:
        flops = {name: _product_rate(clock, name) for name in ("bf16", "f16", "tf32", "f32", "f64")}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was
    return GpuPeaks(gpu, {"dram": copied}, flops)


def _product_rate(clock: GpuClock, name: str) -> float:
    """Operations a second of a product of square matrices of normal numbers."""
    import torch

    from fuseplan.measure.spaces import torch_dtype

    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    side = SIDE if name in ("f16", "bf16") else SLOW_SIDE
    dtype = torch_dtype("f32" if name == "tf32" else name)
    left, right = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    dst = torch.empty_like(left)
    return 2.0 * side**3 / clock.least(lambda: torch.mm(left, right, out=dst))


def place_of(*words: str) -> str:
    """The name of a measurement's file; what no file name may have is replaced."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(words)).strip("-").lower()
    return f"{name}.json"


def read_kept(place: str, kind: type[R]) -> R | None:
    """The measurement in a file; None where it is absent, unreadable, or of another format."""
    try:
        told = _told(cache.folder(), place)
        return None if told is None else record(kind, told)
    except (OSError, ValueError):
        return None


def _told(where: Path | None, place: str) -> Mapping[str, Any] | None:
    if where is None or (where, place) in _unkept:
        return _unkept.get((where, place))
    told = json_of(private.read(where / place, limits.MEASUREMENT_BYTES))
    return told if isinstance(told, dict) and told.pop("format", None) == FORMAT else None


def write_kept(place: str, found: Mapping[str, Any]) -> None:
    """Keeps a measurement; where that is not possible, says so once, and this process alone knows it."""
    where = cache.folder()
    _unkept.pop((where, place), None)
    data = json.dumps({"format": FORMAT, **found}, indent=1).encode()
    if where is None or not cache.stored(where / place, data):
        _unkept[where, place] = found
