"""The cost model of GPUs: what each kind of them does at most, and what a launch of a template takes of it.

Only ratios between templates and knobs matter for a choice; `explain` shows the measured floor besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Traffic
from fuseplan.scalar import Scalar, calls

LAUNCH_SECONDS = 2.5e-6  # from a kernel's start to its end when it does nothing; H100, CUDA events

# Instructions of functions where results have few bits, and where they are exact; of all others one.
HEAVY = {
    "exp": (4, 14), "log": (18, 22), "log1p": (20, 40), "expm1": (20, 30), "div": (3, 10), "sqrt": (4, 10),
    "tanh": (3, 30), "erf": (12, 30), "pow": (25, 60), "round": (7, 7),
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """What a GPU does at most.

    Attributes:
        memory: bytes a second of a copy, read and written both counted.
        half: operations a second in products of f16 and bf16.
        tf32: in products of TF32.
        single: in f32 without tensor cores.
        double: in f64.
        source: where the numbers are from.
    """

    memory: float
    half: float
    tf32: float
    single: float
    double: float
    source: str


# By the GPU's name, then by its kind. Of those that were not measured, 0.9 of the data sheet's bandwidth and
# 0.8 of its dense products, which is what the measured ones reach.
RATES = {
    "NVIDIA H100 80GB HBM3": Rates(3.0e12, 760e12, 380e12, 52e12, 52e12, "measured: docs/measured.md"),
    "NVIDIA H200": Rates(4.3e12, 780e12, 390e12, 52e12, 52e12, "measured: torch's copy and product"),
    "sm_80": Rates(1.75e12, 250e12, 125e12, 17e12, 15e12, "data sheet: A100 80GB"),
    "sm_86": Rates(0.63e12, 120e12, 60e12, 30e12, 0.5e12, "data sheet: A40"),
    "sm_89": Rates(0.78e12, 290e12, 145e12, 70e12, 1.1e12, "data sheet: L40S"),
    "sm_90": Rates(3.0e12, 760e12, 380e12, 52e12, 52e12, "measured: H100 80GB HBM3"),
    "sm_100": Rates(7.2e12, 1800e12, 900e12, 60e12, 30e12, "data sheet: B200"),
    "sm_120": Rates(1.6e12, 170e12, 85e12, 80e12, 1.3e12, "data sheet: GeForce RTX 5090"),
    "gfx942": Rates(4.7e12, 1040e12, 520e12, 130e12, 65e12, "data sheet: MI300X"),
    "gfx950": Rates(7.2e12, 1840e12, 500e12, 125e12, 62e12, "data sheet: MI355X"),
    "gfx1100": Rates(0.86e12, 98e12, 24e12, 48e12, 1.5e12, "data sheet: Radeon RX 7900 XTX"),
    "gfx1201": Rates(0.58e12, 150e12, 37e12, 39e12, 0.6e12, "data sheet: Radeon RX 9070 XT"),
}


def rates(target: Target) -> Rates:
    """The rates of the target's GPU: by its name where that is known, else by its kind, else an H100's."""
    return RATES.get(target.cpu) or RATES.get(target.name) or RATES["sm_90"]


def instructions(formulas: Iterable[Scalar], *, is_exact: bool) -> int:
    """What one element takes of a processor, nearly."""
    return sum(HEAVY.get(fn, (1, 1))[is_exact] for each in formulas for fn in calls(each))


def fill(programs: int, places: int) -> float:
    """The share of the processors' time that is used when `programs` equal ones run `places` at a time."""
    waves = -(-programs // places)
    return programs / (waves * places)


def seconds(target: Target, moved: Traffic, *, used: float = 1.0) -> float:
    """A launch that takes as long as its bytes; of the processors the share `used` works: see `fill`."""
    return LAUNCH_SECONDS + moved.total / rates(target).memory / max(used, 0.25)
