"""The line that reproduces a plan.

In the driver's letters where they say all of the plan, else `fuseplan run` with the plan's text.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fuseplan.compat.miopen_driver import letters
from fuseplan.compat.miopen_driver.letters import Letter, Value
from fuseplan.compat.miopen_driver.problem import Problem
from fuseplan.errors import PlanError
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.conv import Conv
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plans.plan import FusionPlan

ENDINGS = {dtype: ending for ending, dtype in letters.DTYPES.items()}
NAMES = {operators: name for name, operators in letters.MODES.items()}
WORDS = {kind: word for word, (kind, _) in letters.ACTIVATIONS.items()}

Said = Iterator[tuple[Letter, Value]]


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


def _of_src(src: TensorSpec) -> Said:
    yield letters.BATCH, src.batch
    yield letters.CHANNELS, src.channels
    yield letters.SPATIAL, len(src.spatial)
    yield from _of_axes(letters.IN, src.spatial)
    if src.layout is not None and src.layout != LAYOUTS[src.rank][0]:
        yield letters.IN_LAYOUT, src.layout.upper()


def _of_axes(each: tuple[Letter, ...], values: Sequence[int]) -> Said:
    return zip(each[-len(values) :], values, strict=True)


def _of_operator(op: Op) -> tuple[str, Said]:
    """An operator's letter in a mode and its letters on a line; an unknown operator has no mode's letter."""
    for kind, word, write in WRITERS:
        if isinstance(op, kind):
            return word, write(op)
    return "?", iter(())


def _of_convolution(op: Conv) -> Said:
    yield letters.FEATURES, op.features
    yield letters.GROUPS, op.groups
    yield from _of_axes(letters.FILTER, op.per_axis(op.kernel))
    yield from _of_axes(letters.STRIDE, op.per_axis(op.stride))
    yield from _of_axes(letters.DILATION, op.per_axis(op.dilation))
    if isinstance(op.padding, str):
        yield letters.PAD_MODE, op.padding
    elif isinstance(op.padding, int):
        yield from _of_axes(letters.PAD, op.per_axis(op.padding))
    else:  # pairs give another plan, and the comparison finds that
        yield from _of_axes(letters.PAD, [low if isinstance(low, int) else low[0] for low in op.padding])


def _of_activation(op: Elementwise) -> Said:
    word = WORDS.get(type(op))
    if word is None:  # none of MIOpen's: the letters give another plan, and the comparison finds that
        return
    yield letters.ACTIVATION, word
    values = {each.name: each.value for each in op.parameters()}
    names = letters.ACTIVATIONS[word][1]
    for letter, name in zip((letters.ALPHA, letters.BETA, letters.GAMMA), names, strict=False):
        yield letter, values[name]


def _of_batch_norm(op: BatchNorm) -> Said:
    yield letters.BATCH_NORM, op.mode
    yield letters.EPSILON, op.epsilon


def _of_training(op: BatchNormTraining) -> Said:
    yield letters.BATCH_NORM, op.mode
    yield letters.EPSILON, op.epsilon
    yield letters.RUN, letters.NO_YES[op.running]
    yield letters.SAVE, letters.NO_YES[op.saved]
    yield letters.MOMENTUM, op.momentum


def _of_backward(op: BatchNormBackward) -> Said:
    yield from _of_activation(op.activation)
    yield letters.BATCH_NORM, op.mode
    yield letters.EPSILON, op.epsilon
    yield letters.SAVE, letters.NO_YES[op.statistics == "saved"]


# Each operator's letter in a mode, and its letters on a line. The first match counts.
WRITERS: tuple[tuple[type[Op], str, Callable[[Any], Said]], ...] = (
    (Conv, "c", _of_convolution),
    (Bias, "b", lambda op: iter(())),
    (BatchNorm, "n", _of_batch_norm),
    (BatchNormTraining, "t", _of_training),
    (BatchNormBackward, "g", _of_backward),
    (ActivationBackward, "d", lambda op: _of_activation(op.of)),
    (Elementwise, "a", _of_activation),
)
