"""The most this machine's GPU can do, measured, and the floor it sets under a kernel's time.

Measuring takes some two seconds; the result is kept in the cache directory, a file a GPU, and read from
then on, unless other programs used the GPU meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fuseplan.kernel import Kernel
from fuseplan.measure.kept import place_of, read_kept, write_kept
from fuseplan.measure.peaks import Floor, bytes_of_passes
from fuseplan.measure.quiet import undisturbed

if TYPE_CHECKING:
    from fuseplan.measure.gpu_clock import GpuClock

COPIED_BYTES = 1 << 30
SIDE = 8192  # of the square matrices of 16-bit numbers; a quarter of the work in the slower dtypes
SLOW_SIDE = 4096


@dataclass(frozen=True)
class GpuPeaks:
    """What a GPU does at most.

    Attributes:
        gpu: its name.
        bytes_a_second: of a copy in its memory (`dram`), bytes read and bytes written both counted.
        flops: of a product of matrices, two a multiply-add, by dtype: `f16`, `bf16`, `tf32`, `f32`, `f64`.
    """

    gpu: str
    bytes_a_second: dict[str, float]
    flops: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)

    def floor(self, kernel: Kernel) -> Floor:
        """The least time for a kernel's products and its bytes from memory: the longer of the two.

        Where statistics need more passes over the data, each reads it from memory; what the second cache
        still holds of it can be faster. Full precision in f32 is what the f32 units take, or three
        products of TF32, whichever is less.
        """
        product = kernel.convolution
        dtype = "tf32" if product is not None and product.precision == "tf32" else kernel.src.dtype
        rate = self.flops[dtype]
        if dtype == "f32":
            rate = max(rate, self.flops["tf32"] / 3)
        computing = (product.flops if product else 0) / rate
        moving = bytes_of_passes(kernel) / self.bytes_a_second["dram"]
        return Floor(computing, "compute") if computing >= moving else Floor(moving, "dram")


def gpu_peaks(gpu: str) -> GpuPeaks | None:
    """The peaks of the GPU that its maker calls so; None before they are measured."""
    return _read(place_of("peaks", gpu))


def measured_gpu_peaks(gpu: str, device: int = 0, patience: float = 0.0) -> tuple[GpuPeaks, str | None]:
    """The peaks measured now or, rate by rate, the better stored ones; kept if they are reliable.

    Args:
        gpu: its maker's name for it.
        device: its index.
        patience: seconds to wait for other programs to rest.

    Returns:
        The peaks, and what makes them unreliable; None where nothing does.
    """
    from fuseplan.measure.gpu_machine import GpuWatch

    place = place_of("peaks", gpu)
    measure, watch = partial(measure_gpu_peaks, gpu, device), partial(GpuWatch, device)
    found, disturbance = undisturbed(measure, watch, patience)
    stored = _read(place)
    if stored is not None:
        found, disturbance = _better(found, stored), None
    if disturbance is None:
        write_kept(place, found.to_json())
    return found, disturbance


def _better(found: GpuPeaks, stored: GpuPeaks) -> GpuPeaks:
    bytes_a_second, flops = (
        {name: max(rate, known.get(name, 0.0)) for name, rate in fresh.items()}
        for fresh, known in (
            (found.bytes_a_second, stored.bytes_a_second),
            (found.flops, stored.flops),
        )
    )
    return GpuPeaks(found.gpu, bytes_a_second, flops)


def measure_gpu_peaks(gpu: str, device: int = 0) -> GpuPeaks:
    """Measures now, whatever is stored: torch's copy, and its products of matrices."""
    import torch

    from fuseplan.measure.gpu_clock import GpuClock

    clock = GpuClock(device)
    rates = {"dram": _copy_rate(clock, COPIED_BYTES)}
    was = torch.backends.cuda.matmul.allow_tf32
    try:
        flops = {name: _product_rate(clock, name) for name in ("bf16", "f16", "tf32", "f32", "f64")}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was
    return GpuPeaks(gpu, rates, flops)


def _copy_rate(clock: GpuClock, nbytes: int) -> float:
    import torch

    from fuseplan.measure.gpu_clock import rate_of

    src = torch.empty(nbytes, dtype=torch.uint8, device=clock.device).random_()
    dst = torch.empty_like(src)
    return rate_of(clock, lambda: dst.copy_(src), 2.0 * nbytes)


def _product_rate(clock: GpuClock, name: str) -> float:
    """Operations a second of a product of square matrices of normal numbers."""
    import torch

    from fuseplan.measure.gpu_clock import rate_of
    from fuseplan.measure.gpu_data import torch_dtype

    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    side = SIDE if name in ("f16", "bf16") else SLOW_SIDE
    dtype: Any = torch_dtype("f32" if name == "tf32" else name)
    left, right = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    dst = torch.empty_like(left)
    return rate_of(clock, lambda: torch.mm(left, right, out=dst), 2.0 * side**3)


def _read(place: str) -> GpuPeaks | None:
    """The stored peaks; None where they are absent, unreadable, or of another format."""
    found = read_kept(place, GpuPeaks)
    return found if found and min(*found.flops.values(), found.bytes_a_second.get("dram", 0.0)) > 0 else None
