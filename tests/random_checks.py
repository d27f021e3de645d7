"""Checks a random plan: two candidates of each template that takes it, beside float64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from fuseplan.backends import backend_of
from fuseplan.compile import CompiledPlan
from fuseplan.errors import UnsoundCodeError, Unsupported
from fuseplan.execution.build import build
from fuseplan.execution.select import Considered, ranked
from fuseplan.execution.stages import Records
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.measure.ground import Ground, checks_of, ground_of
from fuseplan.measure.spaces import exact
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan
from unsteady import Array, OutOfRangeError, motion


def templates(kernel: Kernel, target: Target) -> Iterator[type[Template]]:
    for each in backend_of(target.backend).templates:
        refusal = first_refusal(each.claims(kernel, target, "default"), each.name)
        if refusal is None:
            yield each
        assert str(refusal)


def check(plan: FusionPlan, target: Target, rng: random.Random, seed: int) -> None:
    """Every template's best candidate, and another one, beside float64; code that is refused is left out."""
    try:
        kernel = lower(matched := match(plan))
    except Unsupported:
        return
    numbers = plan.with_extents(*(rng.choice((1, 2, rng.randint(1, 17))) for _ in plan.src.open_axes))
    with np.errstate(all="ignore"):
        ground = ground_of(numbers, target, seed)
    for kind in templates(kernel, target):
        every = list(kind.candidates(kernel, target, "default"))
        best = min(every, key=lambda each: each.seconds(kernel, target))
        for template in dict.fromkeys((best, rng.choice(every))):
            choice = ranked(template, (Considered(template.text),))
            try:
                program = build(choice, kernel, target, use_cache=False)
            except UnsoundCodeError:
                continue
            compiled = CompiledPlan(Records(plan, target, "default", matched, kernel, choice), program)
            compare(compiled, numbers, ground)


def compare(compiled: CompiledPlan, numbers: FusionPlan, ground: Ground) -> None:
    """The results are right; those that are not within their bounds, within what rounding moves."""
    template, call = compiled.choice.template, ground.call(compiled.bind)
    with np.errstate(all="ignore"):
        got = call()
        errors = {key: error for key, error in ground.deviations(got).items() if key not in numbers.views}
        wrong = [each for each in checks_of(compiled.kernel, template, errors) if not each.is_right]
        if not wrong:
            return
        given = {"src": numbers.src.dtype} | {each.key: each.dtype for each in numbers.operands}
        try:
            want, far = motion(
                numbers, {key: on_host(each, given.get(key)) for key, each in ground.tensors.items()}
            )
        except OutOfRangeError:
            return
        dtypes = {"out": numbers.output.dtype} | {each.key: each.dtype for each in numbers.results}
        made = dict(zip(dtypes, got if isinstance(got, tuple) else (got,), strict=False))
        for each in wrong:
            value, right = on_host(made[each.tensor], dtypes[each.tensor]), want[each.tensor]
            same = (value == right) | (np.isnan(value) & np.isnan(right))
            largest = abs(right).max(initial=0.0, where=np.isfinite(right))
            is_near = same | (abs(value - right) <= each.allowed * largest + far[each.tensor])
            assert is_near.all(), f"{numbers}\n{template.text} on {compiled.target.shape}: {each}"


def on_host(tensor: object, dtype: str | None) -> Array:
    """The elements in float64, in NumPy."""
    values = exact(tensor, dtype)
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()
