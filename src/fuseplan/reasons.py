"""Every way to be refused, and how a refusal comes about.

A rule's conditions and a template's limits are flat runs of claims. The first that does not hold becomes a
`Refusal`: data, which errors print and `explain` tells. Each reason stands in the one catalogue below.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

GENERAL = "`direct` on the CPU and `convolution` or `product` on a GPU"


class Reason(Enum):
    """The catalogue: a code as users meet it, a sentence that says what would be taken, and what to do.

    What stands in backticks in a remedy is the name of a rule or of a template.
    """

    # What no rule fuses.
    EMPTY_PLAN = (
        "empty-plan",
        "a kernel needs at least one operator",
        "Add an operator: plan.add(Relu())",
    )
    HORIZONTAL = (
        "horizontal",
        "operators are fused one after the other, not side by side",
        "Make one vertical plan for each branch",
    )
    NO_CONTRACTION = (
        "no-contraction",
        "this takes plans with a contraction",
        "`pointwise` takes elementwise operators alone; `normalization` takes one with statistics among them",
    )
    SEVERAL_CONTRACTIONS = (
        "several-contractions",
        "one kernel holds one contraction",
        "Split the plan in front of the second contraction",
    )
    CONTRACTION_IN_POINTWISE = (
        "contraction-in-pointwise",
        "this takes elementwise operators alone",
        f"The rule `contraction` takes plans with one contraction, as do {GENERAL}",
    )
    NORMALIZATION_IN_POINTWISE = (
        "normalization-in-pointwise",
        "this takes elementwise operators alone",
        "The rule `normalization`, and the template of that name, take plans with one operator that has "
        "statistics",
    )
    NO_NORMALIZATION = (
        "no-normalization",
        "this takes plans with an operator that has statistics, such as batch_norm_training",
        "`pointwise` takes elementwise operators alone; the rule `contraction`, and of its templates "
        f"{GENERAL}, take a contraction among them",
    )
    SEVERAL_NORMALIZATIONS = (
        "several-normalizations",
        "one kernel holds one operator that has statistics",
        "Split the plan in front of the second one",
    )
    CONTRACTION_AND_NORMALIZATION = (
        "contraction-and-normalization",
        "one kernel holds one contraction or one operator that has statistics, not both",
        "Split the plan in front of the second of the two",
    )

    # What no template of a backend computes.
    STRIDED_PROLOGUE = (
        "strided-prologue",
        "in front of a contraction, an operand per element or activation needs a src in a named layout",
        "Copy src into one of the named layouts, and make the plan for that",
    )
    ACCURACY = (
        "accuracy",
        "the error bound of this algorithm is above the one asked for",
        "Allow a larger bound with accuracy=, or make the plan in f64 (without precision=tf32)",
    )
    NOT_DEPTHWISE = (
        "not-depthwise",
        "this kernel convolves each channel alone",
        f"{GENERAL} take any groups",
    )
    MANY_TAPS = (
        "many-taps",
        "this kernel has code of its own for each tap",
        "`convolution` takes kernels of any size",
    )
    GROUP_WIDTH = (
        "group-width",
        "this kernel packs several narrow groups into a vector",
        "`direct` takes groups of any width",
    )
    CHANNEL_MULTIPLIER = (
        "channel-multiplier",
        "this kernel makes few features from each channel",
        "`direct` takes any number of them",
    )
    NO_TRANSFORM = (
        "no-transform",
        "this kernel takes 2-D convolutions of kernel 3 or 5, stride 1, dilation 1 and one group",
        "`direct` takes any convolution",
    )
    FLOAT64 = (
        "float64",
        "this kernel computes in float32",
        "`direct` computes f64 plans",
    )
    CHANNELS_FIRST = (
        "channels-first",
        "this kernel writes channels last",
        "Give src a layout with its channels innermost, such as nhwc",
    )
    CHANNELS_LAST = (
        "channels-last",
        "this kernel writes channels first",
        "Give src a layout with its pixels innermost, such as nchw",
    )

    NOT_POINT_CONVOLUTION = (
        "not-point-convolution",
        "this kernel takes 1x1 convolutions: stride 1, no padding, one group",
        "`direct` on the CPU and `convolution` on a GPU take any",
    )
    SCATTERED_POSITIONS = (
        "scattered-positions",
        "this kernel reads the positions of a channel side by side",
        "Give src the default layout (ncw, nchw or ncdhw)",
    )
    WEIGHT_PER_BATCH = (
        "weight-per-batch",
        "this kernel reads one weight for all images",
        "`direct` on the CPU and `product` on a GPU take a weight for each image",
    )

    # What the kernel for Hopper leaves to others.
    NOT_HOPPER = (
        "not-hopper",
        "this kernel is written in the copies and products of sm_90",
        "`product` or `convolution` runs on any GPU",
    )
    NOT_HALF = (
        "not-half",
        "this kernel multiplies f16 and bf16",
        "`product` or `convolution` takes any dtype",
    )
    PROLOGUE = (
        "prologue",
        "this kernel copies src to its products as it is: nothing comes before the contraction",
        "`product` or `convolution` computes what comes before it",
    )
    COPY_ALIGNMENT = (
        "copy-alignment",
        "channels, features and strides are multiples of the 16 bytes that the copy engine moves",
        "Pad them to a multiple of 8; `product` or `convolution` takes any",
    )
    COPY_STEP = (
        "copy-step",
        "the copy engine steps over at most 8 positions",
        "`convolution` takes any stride",
    )
    GROUP_TILES = (
        "group-tiles",
        "a group has whole tiles: a multiple of 16 of its channels and of its features",
        "`convolution` takes groups of any width",
    )

    def __init__(self, code: str, sentence: str, remedy: str) -> None:
        self.code = code
        self.sentence = sentence
        self.remedy = remedy


@dataclass(frozen=True)
class Claim:
    """What has to hold and, should it not: why, what was met, what was wanted, which operator is to blame."""

    holds: bool
    reason: Reason
    got: str | None = None
    want: str | None = None
    operator: int | None = None


def claim(
    holds: bool, reason: Reason, *, got: object = None, want: object = None, operator: int | None = None
) -> Claim:
    """A claim; `got` and `want` are anything that prints, `operator` is an index into the plan."""
    return Claim(bool(holds), reason, _printed(got), _printed(want), operator)


def _printed(value: object) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True)
class Refusal:
    """A claim that did not hold.

    Attributes:
        reason: its entry in the catalogue.
        got: what the plan has; None where the reason's sentence says it all.
        want: what would have been taken.
        operator: index of the operator to blame; None for the plan as a whole.
        tried: the rule or template that refused.
        held: how many of its claims held before this one; of one template's refusals of two plans, the one
            with more is the nearer miss.
    """

    reason: Reason
    got: str | None = None
    want: str | None = None
    operator: int | None = None
    tried: str = ""
    held: int = 0

    @property
    def code(self) -> str:
        """The reason's code, in kebab-case."""
        return self.reason.code

    @property
    def sentence(self) -> str:
        """What would be taken."""
        return self.reason.sentence

    @property
    def remedy(self) -> str:
        """What to do."""
        return self.reason.remedy

    def __str__(self) -> str:
        met = f"{self.got}; " if self.got is not None else ""
        wanted = f"; want {self.want}" if self.want is not None else ""
        return f"{met}{self.sentence}{wanted}"

    def to_json(self) -> dict[str, object]:
        """The refusal as JSON values."""
        return {
            "code": self.code,
            "sentence": self.sentence,
            "remedy": self.remedy,
            "got": self.got,
            "want": self.want,
            "operator": self.operator,
            "tried": self.tried,
        }


def first_refusal(claims: Iterable[Claim], tried: str = "") -> Refusal | None:
    """The first claim that does not hold, or None; later ones are not asked: they may rely on the earlier."""
    for held, made in enumerate(claims):
        if not made.holds:
            return Refusal(made.reason, made.got, made.want, made.operator, tried, held)
    return None


def named(remedy: str) -> tuple[str, ...]:
    """The rules and templates that a remedy names: what it says would take the plan instead."""
    return tuple(re.findall(r"`(\w+)`", remedy))
