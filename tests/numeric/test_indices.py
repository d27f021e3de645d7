"""The index of an element in formulas: both backends beside NumPy's, wherever an operator may stand."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fuseplan
from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.order import TEMPLATES as CPU
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.order import TEMPLATES as GPU
from fuseplan.errors import PlanError
from fuseplan.kernels.template import Template
from fuseplan.language.derivative import derivative
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.ground import first_wrong, ground_of
from fuseplan.ops.expression import Expression
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import index, random, text, where
from interpreted import assert_interpreted

ALL = "elementwise('where(random(seed, offset) > 0.5, x, index({}) - index())', seed=7, offset=2)"
BATCH = "f32[4x6x5x7, nhwc] -> batch_norm_training -> " + ALL.format("w")  # `reduction` on a CPU
PLANS = {
    "f32[2x3x4, bsc] -> elementwise('where(index(s) >= index(c), x, index())')": ("pointwise",),
    "f64[2x5x3x7, nhwc] -> bias -> " + ALL.format("h"): ("pointwise",),
    "f32[3x5x4x2, strides=1:84:12:3] -> " + ALL.format("n"): ("pointwise",),
    "f32[6x37] -> linear(40) -> bias -> " + ALL.format("c") + " -> add": ("direct", "product"),
    "f32[2x8x6x6, nhwc] -> conv2d(8, kernel=3) -> " + ALL.format("h"): ("direct", "winograd", "product"),
    "f32[2x8x6x6] -> conv2d(8, kernel=1) -> " + ALL.format("w"): ("planes", "product"),
    "f32[2x8x6x6, nhwc] -> conv2d(8, kernel=3, padding=1, groups=8) -> " + ALL.format("c"): ("depthwise",),
    "f32[2x8x9x9] -> conv2d(8, kernel=3, padding=1, groups=8) -> " + ALL.format("w"): ("depthwise_planes",),
    "f32[6x32] -> linear(64) -> glu(silu) -> " + ALL.format("c"): ("direct", "product"),
    "f32[6x37] -> " + ALL.format("c") + " -> add -> save(sum) -> layer_norm": ("reduction",),
    "f32[2x5x37, bsc] -> softmax -> " + ALL.format("s"): ("reduction",),
    "f32[4x6x37, bsc] -> sum(-1) -> " + ALL.format("s"): ("reduction",),
    "f32[4x6x5x7] -> group_norm(3) -> " + ALL.format("c"): ("reduction",),
    "f32[2x6x5x8, nhwc] -> group_norm(3) -> " + ALL.format("h"): ("reduction",),
    BATCH: ("normalization",),
    "f32[2x4x16x32, bhsd] -> attention -> " + ALL.format("d"): ("attention",),
}


def named(templates: tuple[type[Template], ...], plan: str) -> list[type[Template]]:
    return [each for each in templates if each.name in PLANS[plan]]


CASES = [(plan, each) for plan in PLANS for each in named(CPU, plan)] + [(BATCH, Reduction)]
GPU_CASES = [(plan, each) for plan in PLANS for each in named(GPU, plan)]


def known(case: tuple[str, type[Template]]) -> str:
    return f"{case[1].name}-{re.sub('elementwise.*?[)]. ?', '', case[0])}"


@pytest.mark.parametrize("case", CASES, ids=known)
def test_cpu(case: tuple[str, type[Template]]) -> None:
    plan = FusionPlan.parse(case[0])
    assert_close(forced(plan, case[1], narrowed(32)), random_arrays(plan, 1))


@pytest.mark.parametrize("case", GPU_CASES, ids=known)
def test_gpu(case: tuple[str, type[Template]]) -> None:
    assert_interpreted(case[0], case[1], slack=80)  # type: ignore[arg-type]


@pytest.mark.parametrize("chain", ["-> elementwise('x * index(c)')", "-> linear(8) -> dropout(0.25, seed=3)"])
def test_one_kernel_counts_for_every_extent(chain: str) -> None:
    compiled = fuseplan.compile(f"f32[*x24] {chain}")
    for extent in (1, 5):
        plan = FusionPlan.parse(f"f32[{extent}x24] {chain}")
        arrays = random_arrays(plan, 1)
        np.testing.assert_allclose(compiled(**arrays), evaluated(plan, arrays)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["", "linear(24) -> "])
def test_stages_that_are_a_function_are_given_numbers(head: str) -> None:
    """More functions than are written out: indices are counted, and conditions made, where they are read."""
    chain = "gelu -> elementwise('x + index(c) / 8') -> gelu -> dropout(0.3, seed=3) -> gelu -> bias -> gelu"
    plan = FusionPlan.parse(f"f32[33x40] -> {head}{chain} -> mish -> elementwise('where(k > 0, x, -x)', k=1)")
    assert_close(fuseplan.compile(plan), random_arrays(plan, 1), slack=40)


def test_the_text_is_read_back() -> None:
    made = Expression(lambda x, seed: where(index("c") >= 2, x, x * random(seed, 3)), seed=4)
    assert made.expression == "where(index(c) >= 2, x, x * random(seed, 3))"
    assert Expression(made.expression, seed=4) == made
    plan = FusionPlan.parse(str(FusionPlan("f32[2x5]", made)))
    assert plan.ops == (made,)


def test_an_index_has_no_slope() -> None:
    slope = derivative(Expression("x * index(c) + random(x, 0) * index()").formula())
    assert text(slope) == "index(c)"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("f32[2x5] -> elementwise('x * index(w)')", "no axis 'w'"),
        ("f32[4097x4097] -> elementwise('x * index()')", "index() may be too large for a number of f32"),
        ("f32[*x5] -> elementwise('x * index(n)')", "index(n) may be too large for a number of f32"),
        ("f32[2x*x5, sbc of bsc] -> dropout", "the first axis alone may be open"),
        ("f32[2x5] -> elementwise('x * index(x)')", "no axis 'x'"),
        ("f32[2x5] -> elementwise('x * index(1)')", "takes the letter of an axis"),
        ("f32[2x5] -> elementwise('x * random(1)')", "another number of arguments"),
        ("f32[2x6] -> glu(elementwise('x * index(c)'))", "must be an activation"),
    ],
)
def test_wrong_indices_are_refused(plan: str, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        FusionPlan.parse(plan)


def test_large_indices_are_exact_in_f64() -> None:
    plan = FusionPlan.parse("f64[1x16777219] -> elementwise('x * 0 + index()')")
    made = fuseplan.compile(plan)(np.zeros((1, 16777219)))
    np.testing.assert_array_equal(made[0, -3:], [16777216, 16777217, 16777218])


@pytest.mark.parametrize("strides", ["91:18:3:6", "98:19:9:3", "95:19:4:7", "41:8:3:1"])
@pytest.mark.parametrize(
    "chain",
    [
        'elementwise("index() * x") -> cumsum(0)',
        'elementwise("x + index()") -> cumsum(3)',
        "quantize(i8, per=channel)",
        'elementwise("index() * x") -> softmax(0)',
        'elementwise("index() * x")',
    ],
)
def test_places_in_storage_whose_steps_are_no_multiples_of_one_another(strides: str, chain: str) -> None:
    """An offset's place along an axis is the rest that all axes around it leave, not that of the next one."""
    plan = FusionPlan.parse(f"f32[9x5x2x3, strides={strides}] -> {chain}")
    compiled = fuseplan.compile(plan, "cpu", cache=False, threads=1)
    ground = ground_of(plan, compiled.target, 3)
    errors = ground.deviations(ground.call(compiled.bind)())
    assert first_wrong(compiled.kernel, compiled.choice.template, errors) is None
