"""A line's letters as a plan's src and operators, and a plan as the line that reproduces it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuseplan.compat.miopen_driver import letters
from fuseplan.compat.miopen_driver.letters import Letter, Said, Value
from fuseplan.errors import PlanError, near_miss
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.activation import Power
from fuseplan.ops.conv import CONVOLUTIONS, Conv
from fuseplan.plans.plan import FusionPlan
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
        return src, [_made(self, word) for word in letters.MODES[self.mode]]

    def __getitem__(self, letter: Letter) -> Any:
        """The letter's value; a PlanError where the line's value is not one of the letter's."""
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
            remedy="Leave out the quotes" if " " in self.name else near_miss(self.name, letters.PROBLEMS),
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
        is_coarse = kind is Power and self.dtype in letters.POWER_THRESHOLD
        threshold = {"threshold": letters.POWER_THRESHOLD[self.dtype]} if is_coarse else {}
        return kind(**dict(zip(names, values, strict=False)), **threshold)

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


def _made(problem: Problem, word: str) -> Op:
    """The operator of a mode's letter, with those of its numbers that it takes."""
    kind, said = letters.OPERATORS[word]
    if kind is Elementwise:
        return problem.activation()
    make: type[Any] = CONVOLUTIONS[problem.axes - 1] if kind is Conv else kind
    values = {name: _value(problem, name, each) for name, each in said.items()}
    made: Any = make(**{name: value for name, value in values.items() if not isinstance(value, float)})
    taken = {each.name for each in made.parameters()} & values.keys()
    op: Op = replace(made, **{name: values[name] for name in taken})
    return op


def _value(problem: Problem, name: str, said: Said) -> Any:
    """The value of a field."""
    if said is letters.ACTIVATION:
        return problem.activation()
    mode = problem[letters.PAD_MODE] if said is letters.PAD else ""
    if mode in ("same", "valid"):
        return mode
    if isinstance(said, tuple):
        return problem.per_axis(said)
    value = problem[said]
    return letters.MEANINGS.get(name, {}).get(value, value)


ENDINGS = {dtype: ending for ending, dtype in letters.DTYPES.items()}
NAMES = {operators: name for name, operators in letters.MODES.items()}
WORDS = {kind: word for word, (kind, _) in letters.ACTIVATIONS.items()}

Pairs = Iterator[tuple[Letter, Value]]


def command_of(plan: FusionPlan) -> str:
    """The line that reproduces a plan on random data, ready for a shell.

    `fuseplan driver` with MIOpenDriver's letters if they can express the plan, else `fuseplan run`. Values
    that the line leaves out have their defaults.
    """
    problem = _problem(plan.src, plan.ops)
    if problem is None:
        return shlex.join(["fuseplan", "run", str(plan)])
    written = [letter for letter in letters.LETTERS if letter.word in problem.given]
    words = [word for each in written for word in (each.flag, problem.given[each.word])]
    return shlex.join(["fuseplan", "driver", problem.name, *words])


def _problem(src: TensorSpec, ops: Sequence[Op]) -> Problem | None:
    """The plan in the driver's letters; None where they say another plan or none."""
    if src.dtype not in ENDINGS or not src.spatial or src.layout is None:
        return None
    said = dict(_of_src(src))
    mode = ""
    for op in ops:
        word, values = _of_operator(op)
        mode += word
        said |= dict(values)
    if mode not in NAMES:
        return None
    said[letters.MODE] = NAMES[mode]
    given = {letter.word: letter.written(value) for letter, value in said.items() if value != letter.default}
    problem = Problem(letters.FAMILIES[0] + ENDINGS[src.dtype], given)
    try:
        return problem if problem.plan() == (src, list(ops)) else None
    except PlanError:  # a value that a plan may have and a line may not
        return None


def _of_src(src: TensorSpec) -> Pairs:
    yield letters.BATCH, src.batch
    yield letters.CHANNELS, src.channels
    yield letters.SPATIAL, len(src.spatial)
    yield from _of_axes(letters.IN, src.spatial)
    if src.layout is not None and src.layout != LAYOUTS[src.rank][0]:
        yield letters.IN_LAYOUT, src.layout.upper()


def _of_axes(each: tuple[Letter, ...], values: Sequence[int]) -> Pairs:
    return zip(each[-len(values) :], values, strict=True)


def _of_operator(op: Op) -> tuple[str, Pairs]:
    """An operator's letter in a mode and its letters on a line; an unknown operator has no mode's letter."""
    for word, (kind, said) in letters.OPERATORS.items():
        if isinstance(op, kind):
            return word, (each for name, letter in said.items() for each in _of_field(op, name, letter))
    return "?", iter(())


def _of_field(op: Any, name: str, said: Said) -> Pairs:
    value = getattr(op, name) if name else op
    if said is letters.ACTIVATION:
        yield from _of_activation(value)
    elif isinstance(value, str) and isinstance(said, tuple):
        yield letters.PAD_MODE, value
    elif isinstance(said, tuple):
        # Pairs of padding give another plan, and the comparison finds that.
        each = (low if isinstance(low, int) else low[0] for low in op.per_axis(value))
        yield from _of_axes(said, tuple(each))
    else:
        words = {meaning: word for word, meaning in letters.MEANINGS.get(name, {}).items()}
        yield said, words.get(value, value)


def _of_activation(op: Elementwise) -> Pairs:
    word = WORDS.get(type(op))
    if word is None:  # none of MIOpen's: the letters give another plan, and the comparison finds that
        return
    yield letters.ACTIVATION, word
    values = {each.name: each.value for each in op.parameters()}
    names = letters.ACTIVATIONS[word][1]
    for letter, name in zip((letters.ALPHA, letters.BETA, letters.GAMMA), names, strict=False):
        yield letter, values[name]
