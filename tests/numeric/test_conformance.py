"""The shapes of MIOpen's own fusion tests, with bounds tighter than MIOpen's.

MIOpen accepts a root mean square deviation, over the largest value, of 80 epsilon in f32 (9.5e-6) and f16
(7.8e-2) and 4 epsilon in bf16 (3.1e-2). What we accept stands in BOUNDS.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import random_arrays, reference
from fuseplan.op import Op
from fuseplan.ops import activation, affine, conv
from fuseplan.plan import FusionPlan
from fuseplan.tensor import DTYPES, TensorSpec

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "conformance.json").read_text()
)["cases"]

# Root mean square deviation over the largest value. f16 and bf16 are rounded once: half an epsilon.
BOUNDS = {"f32": 1e-6, "f16": 0.5 * DTYPES["f16"].epsilon, "bf16": 0.5 * DTYPES["bf16"].epsilon}
MIOPEN = {"f32": 80 * 2.0**-23, "f16": 80 * 2.0**-10, "bf16": 4 * 2.0**-7}

CONVOLUTIONS: Mapping[int, Callable[..., Op]] = {2: conv.Conv2d, 3: conv.Conv3d}
ACTIVATIONS: Mapping[str, Op] = {  # with MIOpen's own test parameters: a = b = g = 0.5
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


def plans(case: Mapping[str, Any]) -> Iterator[FusionPlan]:
    """The case's plans: each of its layouts, dtypes and activations."""
    for layout in case["layouts"]:
        for dtype in case["dtypes"]:
            for name in case["activations"] or [None]:
                src = TensorSpec(case["shape"], dtype, layout)
                yield FusionPlan(src, *operators(case, name))


def operators(case: Mapping[str, Any], name: str | None) -> Iterator[Op]:
    """One operator a letter of the combination: Convolution, Scale-add, Bias, Normalization, Activation."""
    for letter in case["combo"]:
        if letter == "C":
            sizes = {word: tuple(case[word]) for word in ("kernel", "stride", "padding", "dilation")}
            yield CONVOLUTIONS[len(case["kernel"])](case["features"], groups=case["groups"], **sizes)
        elif letter == "S":
            yield affine.Add(alpha1=2.0, alpha2=0.5)
        elif letter == "B":
            yield affine.Bias()
        elif letter == "N":
            yield affine.BatchNorm(case["statistics"])
        elif name is not None:
            yield ACTIVATIONS[name]


PLANS = [plan for case in CASES for plan in plans(case)]


def root_mean_square(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    largest = max(float(np.abs(got).max()), float(np.abs(want).max()))
    return float(np.sqrt(np.mean((got - want) ** 2))) / largest if largest else 0.0


def widened(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def test_bounds_are_tighter_than_miopens() -> None:
    assert BOUNDS.keys() == MIOPEN.keys()
    assert all(BOUNDS[dtype] < MIOPEN[dtype] / 5 for dtype in BOUNDS)


def test_every_combination_is_there() -> None:
    assert {case["combo"] for case in CASES} == {"CB", "CA", "CBA", "CN", "CNA", "CBNA", "CSBA", "NA"}
    assert {name for case in CASES for name in case["activations"]} == set(ACTIVATIONS)


@pytest.mark.parametrize("case", [case for case in CASES if "spatial" in case], ids=str)
def test_output_has_the_size_miopen_expects(case: dict[str, Any]) -> None:
    for plan in plans(case):
        assert plan.output.shape == (case["shape"][0], case["features"], *case["spatial"])


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_fused_result_is_within_the_bound(plan: FusionPlan) -> None:
    arrays = random_arrays(plan, seed=7)
    got = widened(compile_plan(plan, "cpu", cache=False)(**arrays))
    want = reference(plan, arrays)
    assert np.isfinite(got).all()
    assert got.any() == want.any()
    assert root_mean_square(got, want) <= BOUNDS[plan.src.dtype]
