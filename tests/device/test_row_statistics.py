"""Statistics of a product's rows on Hopper: every form, with seeds and repetitions."""

from collections.abc import Iterator
from typing import Any

import pytest

from device.guarded import inputs
from device.repeats import deviation, repeated
from device.test_hopper import KIND
from forced import forced
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.data import evaluated
from fuseplan.plans.plan import FusionPlan

SEEDS = (1, 2, 3)
REPEATS = 5
PLANS = (
    "bf16[1100x520] -> linear(3001) -> cross_entropy",
    "f16[901x1043] -> linear(1999) -> bias -> cross_entropy(label_smoothing=0.1, z_loss=0.001)",
    "bf16[613x2056] -> linear(2504) -> argmax(axes=-1)",
    "f16[700x72] -> linear(1333) -> bias -> var(axes=-1)",
)


def forms(text: str) -> list[Hopper]:
    """The best choice of each combination of knobs but the sizes, in one band and in several."""
    found: dict[tuple[Any, ...], Hopper] = {}
    for choice in Hopper.candidates(lower(match(FusionPlan.parse(text))), KIND, "default"):
        assert isinstance(choice, Hopper)
        form = choice.groups, choice.together, choice.programs, choice.resident
        found.setdefault((*form, choice.band > 1, choice.columns & (choice.columns - 1) > 0), choice)
    return list(found.values())


def cases() -> Iterator[Any]:
    for text in PLANS:
        yield from (pytest.param(text, choice, id=f"{choice.text} {text}") for choice in forms(text))


@pytest.mark.parametrize(("text", "choice"), list(cases()))
def test_every_form_is_right_again_and_again(text: str, choice: Hopper) -> None:
    compiled = forced(text, Hopper, parse_target("cuda"), choice)
    for seed in SEEDS:
        tensors = inputs(compiled.plan, seed)
        want, exact = evaluated(compiled.plan, tensors)
        out, *results = repeated(compiled, tensors, exact, REPEATS)
        assert deviation(compiled.plan, out, want, compiled.plan.output.dtype) <= 1
        for tensor, value in zip(results, exact.values(), strict=True):
            assert deviation(compiled.plan, tensor, value, compiled.plan.src.dtype) <= 1
