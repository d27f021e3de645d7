"""From a line's letters to the plan's src and operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.compat.miopen_driver import letters
from fuseplan.compat.miopen_driver.letters import Letter
from fuseplan.errors import PlanError, near_miss
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.conv import CONVOLUTIONS
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.system.locks import cached_property


@dataclass(frozen=True)
class Problem:
    """A line of the driver.

    Attributes:
        name: `CBAInfer`, `CAInferfp16`, ...
        given: the line's values, by the letters' long names; the rest has its default.
    """

    name: str
    given: Mapping[str, str]

    def plan(self) -> tuple[TensorSpec, list[Op]]:
        """The src and the operators; whether they go together is not asked.

        Raises:
            PlanError: a name or a value cannot be, or values contradict each other.
        """
        self._check()
        shape = (self[letters.BATCH], self[letters.CHANNELS], *self.per_axis(letters.IN))
        src = TensorSpec(shape, self.dtype, self.layout(letters.IN_LAYOUT))
        return src, [MAKERS[word](self) for word in letters.MODES[self.mode]]

    def __getitem__(self, letter: Letter) -> Any:
        """The letter's value.

        Raises:
            PlanError: the line's value is not one of the letter's.
        """
        said = self.given.get(letter.word)
        return letter.default if said is None else letter.read(said)

    @cached_property
    def dtype(self) -> str:
        """Src's dtype, which the name ends with."""
        for family in letters.FAMILIES:
            ending = self.name.removeprefix(family)
            if ending != self.name and ending in letters.DTYPES:
                return letters.DTYPES[ending]
        raise PlanError(
            f"the driver has no problem {self.name!r}",
            want=" or ".join(letters.PROBLEMS),
            remedy=near_miss(self.name, letters.PROBLEMS),
        )

    @property
    def mode(self) -> str:
        """The mode's name; CAInfer is one alone."""
        if self.name.startswith("CBAInfer"):
            return str(self[letters.MODE])
        said = self.given.get(letters.MODE.word, "ca")
        if letters.MODE.read(said) != "ca":
            raise letters.MODE.refused(said, f"5 or ca, the only mode of {self.name}", "Write CBAInfer")
        return "ca"

    @property
    def axes(self) -> int:
        """How many spatial axes."""
        return int(self[letters.SPATIAL])

    def per_axis(self, each: tuple[Letter, ...]) -> tuple[int, ...]:
        """The values of one kind of letter, for each spatial axis that there is."""
        return tuple(self[letter] for letter in each[-self.axes :])

    def layout(self, letter: Letter) -> str:
        """The layout that a letter says; by default the first of the rank."""
        known = LAYOUTS[2 + self.axes]
        said = self[letter].lower() or known[0]
        if said not in known:
            raise letter.refused(said.upper(), " or ".join(name.upper() for name in known))
        return str(said)

    def activation(self) -> Elementwise:
        """The operator of -m, with as many of -A, -B and -G as it has parameters."""
        kind, names = letters.ACTIVATIONS[self[letters.ACTIVATION]]
        values = (self[letter] for letter in (letters.ALPHA, letters.BETA, letters.GAMMA))
        threshold = {"threshold": letters.POWER_THRESHOLD[self.dtype]} if self._is_coarse(kind) else {}
        return kind(**dict(zip(names, values, strict=False)), **threshold)

    def _is_coarse(self, kind: type[Elementwise]) -> bool:
        return kind is letters.ACTIVATIONS["power"][0] and self.dtype in letters.POWER_THRESHOLD

    def _check(self) -> None:
        """Refuses invalid values, values without a reader too, and contradictions."""
        for word, said in self.given.items():
            letters.BY_WORD[word].read(said)
        self._check_axes()
        self.layout(letters.FILTER_LAYOUT)
        out, own = self.layout(letters.OUT_LAYOUT), self.layout(letters.IN_LAYOUT)
        if letters.OUT_LAYOUT.word in self.given and out != own:
            raise letters.OUT_LAYOUT.refused(out.upper(), f"{own.upper()}, the input's")

    def _check_axes(self) -> None:
        """Refuses letters of axes that src has not."""
        for each in (letters.IN, letters.FILTER, letters.STRIDE, letters.PAD, letters.DILATION):
            for place, letter in enumerate(each[: -self.axes]):
                if letter.word in self.given:
                    remedy = f"Write {letters.SPATIAL.flag} {len(each) - place}, or leave it out"
                    want = f"no value, since there are {self.axes} spatial axes"
                    raise letter.refused(self.given[letter.word], want, remedy)


def _convolution(problem: Problem) -> Op:
    mode = problem[letters.PAD_MODE]
    return CONVOLUTIONS[problem.axes - 1](
        problem[letters.FEATURES],
        kernel=problem.per_axis(letters.FILTER),
        stride=problem.per_axis(letters.STRIDE),
        padding=mode if mode in ("same", "valid") else problem.per_axis(letters.PAD),
        dilation=problem.per_axis(letters.DILATION),
        groups=problem[letters.GROUPS],
    )


def _training(problem: Problem) -> Op:
    is_running = problem[letters.RUN] == "yes"
    return BatchNormTraining(
        problem[letters.BATCH_NORM],
        running=is_running,
        saved=problem[letters.SAVE] == "yes",
        epsilon=problem[letters.EPSILON],
        **({"momentum": problem[letters.MOMENTUM]} if is_running else {}),
    )


def _backward(problem: Problem) -> Op:
    is_saved = problem[letters.SAVE] == "yes"
    return BatchNormBackward(
        problem.activation(),
        mode=problem[letters.BATCH_NORM],
        statistics="saved" if is_saved else "recomputed",
        **({} if is_saved else {"epsilon": problem[letters.EPSILON]}),
    )


# The operator of each letter of a mode.
MAKERS: dict[str, Callable[[Problem], Op]] = {
    "c": _convolution,
    "b": lambda problem: Bias(),
    "n": lambda problem: BatchNorm(problem[letters.BATCH_NORM], epsilon=problem[letters.EPSILON]),
    "a": Problem.activation,
    "t": _training,
    "g": _backward,
    "d": lambda problem: ActivationBackward(problem.activation()),
}
