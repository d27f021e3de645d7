"""Plans with statistics and several results, and whether a compiled one is right: for every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.compile import CompiledPlan
from fuseplan.language.dtypes import DTYPES
from fuseplan.language.layouts import LAYOUTS
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact as wide
from fuseplan.plans.plan import FusionPlan

Arrays = dict[str, NDArray[Any]]

# Each role and mode, nothing, something before and something behind, with every way to index an operand.
CHAINS = (
    "batch_norm_training",
    "batch_norm_training(running=True, momentum=0.3) -> relu",
    "batch_norm_training(saved=False) -> leaky_relu(0.1)",
    "batch_norm_training(per_activation, running=True, saved=False) -> tanh(0.5, beta=2)",
    "bias -> batch_norm_training(epsilon=0.001) -> add -> gelu",
    "batch_norm_backward",
    "batch_norm_backward(relu)",
    "batch_norm_backward(elu(0.7), mode=per_activation)",
    "batch_norm_backward(statistics=recomputed)",
    "batch_norm_backward(leaky_relu(0.1), statistics=recomputed, epsilon=0.001)",
    "batch_norm_backward(sigmoid, mode=per_activation, statistics=recomputed) -> scale",
)
SHAPES = ("4x100", "33x3", "3x37x5", "2x13x9x11", "2x64x4x4", "5x3x1x1", "2x6x3x5x7", "3x1x2x2x1")
TENSORS = [f"{shape}, {layout}" for shape in SHAPES for layout in LAYOUTS[shape.count("x") + 1]]
STRIDES = ("900:90:10:1", "700:1:70:7", "1:1000:100:10")  # of 2x3x5x7
SLACK = 16.0  # roundings of the compute dtype


def training_arrays(plan: FusionPlan, seed: int = 0, mean: float = 0.0) -> Arrays:
    """Random arrays in which what is normalized has that mean, and saved statistics are its own."""
    arrays = random_arrays(plan, seed)
    step = next(step for step in plan if step.op.kind == "normalization")
    key = step.keys.get("input", "src")
    arrays[key][...] = (wide(arrays[key]) + mean).astype(arrays[key].dtype) if mean else arrays[key]
    if "mean" in step.keys and "input" in step.keys:
        means, deviations = _moments(plan, arrays)
        arrays[step.keys["mean"]][...] = means
        arrays[step.keys["inverse_variance"]][...] = 1 / deviations
    return arrays


def _moments(plan: FusionPlan, arrays: Arrays) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of what is normalized: the means, and the deviations that it is divided by."""
    step = next(step for step in plan if step.op.kind == "normalization")
    axes = (0, *range(2, plan.src.rank)) if step.op.attributes()["mode"] == "spatial" else (0,)
    x = wide(arrays[step.keys.get("input", "src")])
    return x.mean(axis=axes), np.sqrt(x.var(axis=axes) + 1e-5)


def assert_trained(compiled: CompiledPlan, arrays: Arrays) -> None:
    """The output and every result, each against float64.

    The mean is a number of the compute dtype: where it is large, its rounding is part of every deviation from
    it. A sum is right to some roundings of a random walk of its terms; where all terms end in the same bits,
    as short numbers and one bias do, every addition rounds alike, and the template's own bound says how far.
    """
    plan = compiled.plan
    want, results = evaluated(plan, arrays)
    outcome = compiled(**{key: array.copy() if key in results else array for key, array in arrays.items()})
    got = {"out": outcome} if not results else dict(zip(outcome._fields, outcome, strict=True))
    assert list(got) == ["out", *results]
    step = next(step for step in plan if step.op.kind == "normalization")
    mean, deviation = _moments(plan, arrays)
    epsilon = DTYPES[plan.src.compute_dtype].epsilon
    scale = np.abs(wide(arrays[step.keys["scale"]])).max()
    moved = epsilon * scale * max(1.0, (np.abs(mean) / deviation).max(), (1 / deviation).max())
    summed = compiled.choice.template.error_bound(compiled.kernel)
    rounding = DTYPES[plan.src.dtype].epsilon if plan.src.itemsize == 2 else 0.0
    compared = {"out": (want, rounding, rounding / 8 * np.abs(want).max())}
    compared |= {key: (value, 0.0, epsilon * _walk(key, arrays, compiled)) for key, value in results.items()}
    for key, (value, relative, absolute) in compared.items():
        bound = absolute + (SLACK * epsilon + summed) * np.abs(value).max() + 4 * moved
        np.testing.assert_allclose(
            wide(np.asarray(got[key])), value, relative, bound, err_msg=f"{key} of {plan}"
        )


def _walk(key: str, arrays: Arrays, compiled: CompiledPlan) -> float:
    """Of a gradient of scale or shift: how far a sum of so many terms may be from 0 by chance, times 8."""
    if not key.endswith("_gradient"):
        return 0.0
    return float(8 * np.sqrt(compiled.kernel.reduced_count) * np.abs(wide(arrays["src"])).max())
