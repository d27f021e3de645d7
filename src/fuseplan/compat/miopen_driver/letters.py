"""MIOpenDriver's letters for fusion problems, as tables: letter, long name, default, values.

Where MIOpen takes a number for a word, the word is taken too; the number is the word's place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fuseplan.errors import PlanError, did_you_mean
from fuseplan.language.layouts import LAYOUTS
from fuseplan.op import Elementwise, Op
from fuseplan.ops.activation import (
    Abs,
    Clamp,
    ClippedRelu,
    Elu,
    Identity,
    LeakyRelu,
    Power,
    Relu,
    Sigmoid,
    Softplus,
    Tanh,
)
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.conv import Conv
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.scalar import number

Value = int | float | str

DTYPES = {"": "f32", "fp16": "f16", "bfp16": "bf16"}  # by the ending of a problem's name
FAMILIES = ("CBAInfer", "CAInfer")
PROBLEMS = tuple(family + ending for family in FAMILIES for ending in DTYPES)

# By name, the operators in order: c convolution, b bias, n batch normalization, a activation, t batch
# normalization in training, g its backward pass with the activation's, d an activation's. MIOpen has seven.
MODES = {
    **{name: name for name in ("cbna", "cna", "na", "cn", "cba", "ca", "cb")},
    "na_train": "ta",
    "na_backward": "g",
    "n_train": "t",
    "a_backward": "d",
}
BATCH_NORM_MODES = ("per_activation", "spatial")
NO_YES = ("no", "yes")
PAD_MODES = ("conv", "default", "same", "valid")
LAYOUT_WORDS = tuple(name.upper() for names in LAYOUTS.values() for name in names if len(name) > 2)
AXES = "dhw"

# MIOpen's activations in the order of its numbers, and which of our parameters its a, b and g are.
ACTIVATIONS: dict[str, tuple[type[Elementwise], tuple[str, ...]]] = {
    "pasthru": (Identity, ()),
    "logistic": (Sigmoid, ()),
    "tanh": (Tanh, ("alpha", "beta")),
    "relu": (Relu, ()),
    "softrelu": (Softplus, ()),
    "abs": (Abs, ()),
    "power": (Power, ("alpha", "beta", "gamma")),
    "clippedrelu": (ClippedRelu, ("alpha",)),
    "leakyrelu": (LeakyRelu, ("negative_slope",)),
    "elu": (Elu, ("alpha",)),
    "clamp": (Clamp, ("min", "max")),
}
POWER_THRESHOLD = {"f16": 1e-4}  # where MIOpen's is not our default


@dataclass(frozen=True)
class Letter:
    """An option of a line.

    Attributes:
        letters: its letters behind one dash; empty for an option without a letter in MIOpen.
        word: its name behind two dashes.
        default: its value where the line leaves it out; the line takes a value of this type.
        least, most: of a whole number; None for no limit.
        words: the words that it takes; any unless given.
        is_numbered: whether MIOpen writes the words' numbers.
    """

    letters: str
    word: str
    default: Value
    meaning: str
    least: int = 0
    most: int | None = None
    words: tuple[str, ...] = ()
    is_numbered: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """All that a line may write for it."""
        return (*(f"-{letter}" for letter in self.letters), f"--{self.word}")

    @property
    def flag(self) -> str:
        """The shortest one that a shell reads without quotes."""
        return self.flags[0] if self.letters[:1].isalnum() else f"--{self.word}"

    @property
    def wanted(self) -> str:
        """The values that it takes, in words."""
        if self.is_numbered:
            return ", ".join(f"{place} or {word}" for place, word in enumerate(self.words))
        if self.words:
            return " or ".join(self.words)
        if isinstance(self.default, float):
            return "a number"
        if self.most == self.least:
            return f"{self.least} alone"
        return f"a whole number, {self.least} {'or more' if self.most is None else f'to {self.most}'}"

    def read(self, given: str) -> Value:
        """The value that a line gives; a PlanError where it is none for this letter."""
        if self.words:
            return self._word(given)
        try:
            value = float(given) if isinstance(self.default, float) else int(given)
        except ValueError:
            raise self.refused(given) from None
        if "_" in given or math.isnan(value) or (isinstance(value, int) and not self._holds(value)):
            raise self.refused(given)
        return value

    def _holds(self, value: int) -> bool:
        return self.least <= value and (self.most is None or value <= self.most)

    def _word(self, given: str) -> str:
        named = {word.lower(): word for word in self.words}
        numbered = {str(place): word for place, word in enumerate(self.words)} if self.is_numbered else {}
        found = named.get(given.lower()) or numbered.get(given)
        if found is None:
            near = did_you_mean(given.lower(), named) if given.isalpha() else None
            raise self.refused(given, remedy=near)
        return found

    def written(self, value: Value) -> str:
        """The value on a line, as MIOpen writes it."""
        if self.is_numbered:
            return str(self.words.index(str(value)))
        return number(value) if isinstance(value, float) else str(value)

    def refused(self, got: object, want: str | None = None, remedy: str | None = None) -> PlanError:
        """The error about its value; `want` names its values unless given."""
        what = f"{', '.join(self.flags)} has no such value"
        return PlanError(what, got=repr(got), want=want or self.wanted, remedy=remedy)


def _each_axis(letters: str, word: str, default: int, meaning: str, least: int = 1) -> tuple[Letter, ...]:
    """A letter for each spatial axis, as `AXES` names them."""
    named = zip(letters, AXES, strict=True)
    return tuple(
        Letter(letter, f"{word}_{axis}", default, f"{meaning} along {axis}", least) for letter, axis in named
    )


def _choice(letters: str, word: str, default: str, meaning: str, words: tuple[str, ...]) -> Letter:
    """A letter of words that MIOpen writes as their numbers."""
    return Letter(letters, word, default, meaning, words=words, is_numbered=True)


def _layout(letters: str, word: str, meaning: str) -> Letter:
    return Letter(letters, word, "", meaning, words=LAYOUT_WORDS)


IN = (
    Letter("!", "in_d", 1, "The input's extent along d", 1),  # MIOpen's; its filter's is 3 all the same
    Letter("H", "in_h", 32, "The input's extent along h", 1),
    Letter("W", "in_w", 32, "The input's extent along w", 1),
)
FILTER = _each_axis("@yx", "fil", 3, "The filter's extent")
STRIDE = _each_axis("#uv", "conv_stride", 1, "The filter's stride")
PAD = _each_axis("$pq", "pad", 0, "Zeros at each end of the input", 0)
DILATION = _each_axis("^lj", "dilation", 1, "The distance between the filter's taps")

BATCH = Letter("n", "batchsize", 32, "The number of images", 1)
CHANNELS = Letter("c", "in_channels", 3, "The input's channels", 1)
FEATURES = Letter("k", "out_channels", 32, "The convolution's output channels", 1)
GROUPS = Letter("g", "group_count", 1, "The convolution's groups", 1)
PAD_MODE = Letter(
    "z",
    "pad_mode",
    "conv",
    "The padding's mode; conv and default take -p and -q, same gives the input's extent over the stride",
    words=PAD_MODES,
)
PAD_VALUE = Letter("r", "pad_val", 0, "The padding's value", 0, 0)
ACTIVATION = _choice("m", "activMode", "relu", "The activation", tuple(ACTIVATIONS))
ALPHA = Letter("A", "alpha", 1.0, "The activation's a")
BETA = Letter("B", "beta", 0.0, "The activation's b")
GAMMA = Letter("G", "gamma", 1.0, "The activation's g")
BATCH_NORM = _choice(
    "M", "bnMode", "per_activation", "The axes that share batch normalization's statistics", BATCH_NORM_MODES
)
EPSILON = Letter("", "epsilon", 1e-5, "Batch normalization's epsilon; MIOpenDriver's is 1e-6")
RUN = _choice("", "run", "no", "Training updates running statistics", NO_YES)
SAVE = _choice(
    "", "save", "yes", "Training saves its statistics, and a backward pass takes saved statistics", NO_YES
)
MOMENTUM = Letter("", "momentum", 0.1, "The momentum of running statistics, MIOpen's expAvgFactor")
MODE = _choice("FJ", "fusion_mode", "cbna", "The operators", tuple(MODES))
SPATIAL = Letter("_", "spatial_dim", 2, "The number of spatial axes", 1, len(AXES))
IN_LAYOUT = _layout("I", "in_layout", "The input's layout, channels first unless given")
OUT_LAYOUT = _layout("O", "out_layout", "The output's layout, which is the input's")
FILTER_LAYOUT = _layout("f", "fil_layout", "The filter's layout, which changes nothing")

Said = Letter | tuple[Letter, ...]  # the letter of a field, or one for each axis

# Of each letter of a mode: the operator and the letters of its fields; of an activation the one of its kind.
# The first kind that an operator is of counts.
OPERATORS: dict[str, tuple[type[Op], dict[str, Said]]] = {
    "c": (Conv, {
        "features": FEATURES, "kernel": FILTER, "stride": STRIDE, "padding": PAD, "dilation": DILATION,
        "groups": GROUPS,
    }),
    "b": (Bias, {}),
    "n": (BatchNorm, {"mode": BATCH_NORM, "epsilon": EPSILON}),
    "t": (BatchNormTraining, {
        "mode": BATCH_NORM, "running": RUN, "saved": SAVE, "epsilon": EPSILON, "momentum": MOMENTUM,
    }),
    "g": (BatchNormBackward, {
        "activation": ACTIVATION, "mode": BATCH_NORM, "statistics": SAVE, "epsilon": EPSILON,
    }),
    "d": (ActivationBackward, {"of": ACTIVATION}),
    "a": (Elementwise, {"": ACTIVATION}),
}  # fmt: skip
# The values of fields for a line's words, where they differ.
MEANINGS: dict[str, dict[str, Any]] = {
    "running": {"no": False, "yes": True},
    "saved": {"no": False, "yes": True},
    "statistics": {"no": "recomputed", "yes": "saved"},
}

LETTERS: tuple[Letter, ...] = (
    MODE, BATCH, CHANNELS, *IN, FEATURES, GROUPS, *FILTER, *STRIDE, *PAD, PAD_MODE, PAD_VALUE, *DILATION,
    ACTIVATION, ALPHA, BETA, GAMMA, BATCH_NORM, EPSILON, RUN, SAVE, MOMENTUM, SPATIAL,
    IN_LAYOUT, OUT_LAYOUT, FILTER_LAYOUT,
)  # fmt: skip
BY_WORD: dict[str, Letter] = {letter.word: letter for letter in LETTERS}
