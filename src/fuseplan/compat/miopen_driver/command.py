"""The line that reproduces a plan.

In the driver's letters where they say all of the plan, else `fuseplan run` with the plan's text.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from fuseplan.compat.miopen_driver import letters
from fuseplan.compat.miopen_driver.letters import Letter, Said, Value
from fuseplan.compat.miopen_driver.problem import Problem
from fuseplan.errors import PlanError
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.plans.plan import FusionPlan

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
    words = [word for letter in letters.LETTERS for word in _written(problem, letter)]
    return shlex.join(["fuseplan", "driver", problem.name, *words])


def _written(problem: Problem, letter: Letter) -> Iterator[str]:
    if letter.word in problem.given:
        yield from (letter.flag, problem.given[letter.word])


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
