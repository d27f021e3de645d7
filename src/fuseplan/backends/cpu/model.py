"""What the CPU's templates share when they say what they can, what they cost and how exact they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Traffic,
    accuracy_claim,
    contraction_claims,
    dst_claim,
    layout_claims,
    sum_claim,
    summation_bound,
)
from fuseplan.messages.reasons import Claim, Reason, claim

# Only ratios between templates matter here; the floor that `explain` shows comes from measured peaks.
_CYCLES_A_SECOND = 3.0e9
_PRODUCTS_A_CYCLE = 2  # vector multiply-adds
_BYTES_A_SECOND = 20.0e9  # memory, one core
PHASE_SECONDS = 1.0e-6
_MOST_BYTES = 2**47  # addresses of a process on x86-64, and of the usual one on ARM


def itemsize(kernel: Kernel) -> int:
    """Bytes of one element in the compute type."""
    return 8 if kernel.compute_dtype == "f64" else 4


def arrival(target: Target, nbytes: int) -> int:
    """Bytes that a core takes in a cycle of weights of that size, from the last cache or from memory.

    Layers of a model have weights of their own: where eight such layers do not fit the last cache, a run
    finds them in memory. Measured on Zen 5, and on a Xeon, whose last cache is behind a mesh.
    """
    is_near = 8 * nbytes < target.l3_bytes
    return (24 if is_near else 12) if target.cpu.startswith("znver") else (8 if is_near else 4)


def in_halves(target: Target) -> bool:
    """Whether a vector takes two cycles, in which loads keep up: Zen 4 computes halves of 64 bytes."""
    return target.cpu == "znver4" and target.vector_bytes == 64


def features_innermost(kernel: Kernel) -> bool:
    """Whether the features of one position follow one another in dst; the layout of one feature says neither.

    One that is a gated product's counts as innermost, as its gate and value are.
    """
    is_gated = kernel.parts is not None and kernel.dst.channels == 1
    return is_gated or kernel.dst.is_channels_last or prod(kernel.dst.shape[2:]) == 1


def padding_claim(kernel: Kernel) -> Claim:
    """Whether a copy of src with its padding can be addressed; no product of sizes exceeds 64 bits then."""
    conv = kernel.contraction
    extents = [size + sum(around) for size, around in zip(conv.src_spatial, conv.padding, strict=True)]
    size = conv.batch * conv.channels * prod(extents) * itemsize(kernel)
    most = f"at most {_MOST_BYTES:.1e}"
    return about(kernel, size <= _MOST_BYTES, Reason.PADDED_SRC, f"{size:.1e} bytes", most)


def kept_bytes(target: Target) -> int:
    """Bytes of all tensors of a kernel from which on dst is written past the caches.

    The last cache has other lines too. Of 32 MB on a Zen 4, stores past the caches took
    1.3 times as long in a relu of 16 MB, 0.8 to 1.0 of 21 MB, 0.85 of 27 MB, 0.65 in a layer_norm of 25 MB.
    """
    return 5 * target.l3_bytes // 8


def seconds(
    kernel: Kernel,
    target: Target,
    *,
    flops: float,
    traffic: Traffic,
    efficiency: float,
    phases: int = 1,
    held: int | None = None,
) -> float:
    """The longer of arithmetic and memory; data that fits the last cache moves three times as fast.

    `held`: bytes of the data, where passes move it more than once.
    """
    lanes = target.vector_bytes // itemsize(kernel)
    rate = _CYCLES_A_SECOND * _PRODUCTS_A_CYCLE * 2 * lanes * efficiency * target.threads
    cached = 3 if (held or traffic.total) < target.l3_bytes else 1
    moving = traffic.total / (_BYTES_A_SECOND * cached * min(target.threads, 4))
    return max(flops / rate, moving) + phases * PHASE_SECONDS


def paid(moved: Traffic, target: Target, *, stream: bool, held: int | None = None) -> Traffic:
    """The bytes that cost time: a plain store reads its line before it writes it, unless a cache has it."""
    fetched = 0 if stream or (held or moved.total) < target.l3_bytes else moved.written
    return Traffic(moved.read + fetched, moved.written, moved.workspace)


def about(
    kernel: Kernel, holds: bool, reason: Reason, got: str | None = None, want: str | None = None
) -> Claim:
    """A claim about the contraction, which is to blame where it fails."""
    return claim(holds, reason, got=got, want=want, operator=kernel.centre_step)


class SumOfProducts(CpuTemplate):
    """A template that computes each element as one sum of products and reads every tensor once."""

    efficiency: ClassVar[float]  # of the processor's multiply-adds in the longest loops
    gated: ClassVar[bool] = False  # whether it computes gated products behind the contraction
    pools: ClassVar[bool] = False  # whether it computes pools
    sums_integers: ClassVar[bool] = False  # whether sums of integers have 32 bits
    transposes: ClassVar[bool] = False  # whether it computes transposed convolutions with a stride

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel, pools=cls.pools, transposes=cls.transposes)
        yield from cls.takes(kernel, target)
        yield dst_claim(kernel)
        yield from layout_claims(kernel, gated=cls.gated)
        if not cls.sums_integers:
            yield sum_claim(kernel)
        yield accuracy_claim(summation_bound(kernel), accuracy)

    @classmethod
    @abstractmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        """The template's own limits, of kernels with a contraction."""

    @abstractmethod
    def waste(self, kernel: Kernel, target: Target) -> float:
        """Time of the template's products over that of the contraction's, at full speed."""

    def phases(self, kernel: Kernel, target: Target) -> int:
        """Phases of tasks that wait for one another."""
        return 1

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return seconds(
            kernel,
            target,
            flops=kernel.contraction.flops * self.waste(kernel, target),
            traffic=self.traffic(kernel, target),
            efficiency=self.efficiency,
            phases=self.phases(kernel, target),
        )

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per product: the number of products times 2^-24, in f64 times 2^-53."""
        return summation_bound(kernel)
