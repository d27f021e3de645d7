"""MIOpen's own cases of fusion (`data/conformance.json`) as plans, and how right their results have to be.

MIOpen accepts a root mean square deviation, over the largest value, of 80 epsilon in f32 (9.5e-6) and f16
(7.8e-2), 4 epsilon in bf16 (3.1e-2) and, in batch normalization's training, 80 epsilon times the number of
elements: anything. What is accepted here stands in RMS, and no element may be off by more than MOST.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from fuseplan.language.dtypes import DTYPES
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops import activation, affine, conv, training
from fuseplan.plans.plan import FusionPlan

Case = Mapping[str, Any]

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "conformance.json").read_text(encoding="utf-8")
)["cases"]

# Over the largest value, in epsilons of the dtype. f16 and bf16 are rounded once: by half of one at most. In
# f32 the most that was measured is of Winograd under a clamp at 0.5, whose sums are ten times that: 9.7, and
# 200 in one element.
EPSILONS = {"f32": (12, 256), "f16": (0.25, 0.55), "bf16": (0.25, 0.55)}
RMS = {name: rms * DTYPES[name].epsilon for name, (rms, _) in EPSILONS.items()}
MOST = {name: most * DTYPES[name].epsilon for name, (_, most) in EPSILONS.items()}
# POWER is 0 up to 1e-6 and a root behind it: where rounding decides on which side an element is, by so much.
STEP = 1e-3
MIOPEN = {"f32": 80 * 2.0**-23, "f16": 80 * 2.0**-10, "bf16": 4 * 2.0**-7}

# What continuous integration takes of one plan; the largest batch that keeps both, or none.
FLOPS = 1_000_000_000  # of a convolution
ELEMENTS = 2_000_000  # of src and the result together

MOMENTUM = 0.99  # MIOpen's expAvgFactor in its tests
CONVOLUTIONS: Mapping[int, Callable[..., Op]] = {2: conv.Conv2d, 3: conv.Conv3d}
ACTIVATIONS: Mapping[str, Elementwise] = {  # with MIOpen's own test parameters: a = b = g = 0.5
    "PASTHRU": activation.Identity(),
    "LOGISTIC": activation.Sigmoid(),
    "TANH": activation.Tanh(alpha=0.5, beta=0.5),
    "RELU": activation.Relu(),
    "SOFTRELU": activation.Softplus(),
    "ABS": activation.Abs(),
    "POWER": activation.Power(alpha=0.5, beta=0.5, gamma=0.5),
    "CLIPPEDRELU": activation.ClippedRelu(alpha=0.5),
    "LEAKYRELU": activation.LeakyRelu(negative_slope=0.5),
    "ELU": activation.Elu(alpha=0.5),
    "CLAMP": activation.Clamp(0.0, 0.5),
}


@dataclass(frozen=True)
class Sized:
    """A case in a layout and dtype, with an activation, and the images that continuous integration runs."""

    case: Case
    layout: str
    dtype: str
    activation: str | None
    images: int
    why: str  # there are none

    @property
    def plan(self) -> FusionPlan:
        """The whole."""
        return self._plan(self.case["shape"][0])

    @property
    def small(self) -> FusionPlan:
        """The plan with only those images."""
        return self._plan(self.images)

    def _plan(self, images: int) -> FusionPlan:
        src = TensorSpec((images, *self.case["shape"][1:]), self.dtype, self.layout)
        return FusionPlan(src, *operators(self.case, self.activation))


@cache
def sized() -> tuple[Sized, ...]:
    """Every plan of every case: each of its layouts, dtypes and activations."""
    return tuple(
        Sized(case, *form, *_images(case))
        for case in CASES
        for form in product(case["layouts"], case["dtypes"], case["activations"] or [None])
    )


def most(plan: FusionPlan, dtype: str, largest: float) -> float:
    """How far any element of a result may be off."""
    return MOST[dtype] * largest + (STEP if any(step.op.name == "power" for step in plan) else 0.0)


def operators(case: Case, name: str | None) -> Iterator[Op]:
    """One operator a letter of the combination: Convolution, Scale-add, Bias, Normalization, Activation.

    A backward pass is one operator, which has the activation's in it.
    """
    letters, _, phase = case["combo"].partition("-")
    if phase == "backward":
        yield training.BatchNormBackward(ACTIVATIONS[name or "PASTHRU"], case["statistics"])
        return
    for letter in letters:
        if letter == "C":
            sizes = {word: tuple(case[word]) for word in ("kernel", "stride", "padding", "dilation")}
            yield CONVOLUTIONS[len(case["kernel"])](case["features"], groups=case["groups"], **sizes)
        elif letter == "S":
            yield affine.Add(alpha1=2.0, alpha2=0.5)
        elif letter == "B":
            yield affine.Bias()
        elif letter == "N" and phase:
            yield training.BatchNormTraining(case["statistics"], running=True, momentum=MOMENTUM)
        elif letter == "N":
            yield affine.BatchNorm(case["statistics"])
        elif name is not None:
            yield ACTIVATIONS[name]


def _images(case: Case) -> tuple[int, str]:
    """How many images keep the limits; 0 and why, where too few of them do."""
    batch = case["shape"][0]
    flops, elements = _flops(case), prod(case["shape"][1:]) + _results(case)
    fitting = min(batch, ELEMENTS // elements, FLOPS // flops if flops else batch)
    if fitting >= (2 if "-" in case["combo"] else 1):  # one image has no statistics of its own
        return fitting, ""
    return 0, f"an image has {flops / 1e9:.2f} GFLOP and {elements / 1e6:.1f} million elements"


def _results(case: Case) -> int:
    return case["features"] * prod(case["spatial"]) if "spatial" in case else prod(case["shape"][1:])


def _flops(case: Case) -> int:
    """Of an image's convolution."""
    if "kernel" not in case:
        return 0
    depth: int = case["shape"][1] // case["groups"] * prod(case["kernel"])
    return 2 * _results(case) * depth
