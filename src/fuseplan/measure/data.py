"""Fresh random arrays for a plan, what it makes of them in float64, and how far a result is from that."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.arrays import empty, narrow, widen
from fuseplan.errors import ArgumentError, did_you_mean
from fuseplan.measure.edges import at_edges, edged
from fuseplan.op import Operand, broadcast
from fuseplan.ops.affine import MODES
from fuseplan.ops.normalization import Normalization, reduced_axes
from fuseplan.plan import FusionPlan, Step
from fuseplan.reduction import reduce
from fuseplan.scalar import NUMPY
from fuseplan.tensor import MAX_BYTES, TensorSpec

Array = NDArray[Any]
Float64 = NDArray[np.float64]

STATISTICS_OF_SQUARES = ("variance", "inverse_variance", "running_variance")
HALF = 0.5  # the least of them


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Float64:
    return generator.standard_normal(shape)


def _after_relu(generator: np.random.Generator, shape: tuple[int, ...]) -> Float64:
    return np.maximum(generator.standard_normal(shape), 0)


def _large_mean(generator: np.random.Generator, shape: tuple[int, ...]) -> Float64:
    return generator.standard_normal(shape) + 100.0


def _large_range(generator: np.random.Generator, shape: tuple[int, ...]) -> Float64:
    spread: Float64 = np.exp(generator.uniform(-8, 8, shape))
    return generator.standard_normal(shape) * spread


# What `src` may look like; the words are what tables and commands call it.
INPUTS = {
    "normal": _normal,
    "after relu": _after_relu,
    "large mean": _large_mean,
    "large range": _large_range,
}


def random_arrays(
    plan: FusionPlan, seed: int | None = None, *, inputs: str = "normal", gain: float = 1.0
) -> dict[str, Array]:
    """`src`, every operand and the old value of every updated result of a plan, by key, in its dtypes.

    Args:
        plan: whose arrays.
        seed: the same seed gives the same arrays in every process; None gives others each time.
        gain: a factor on the weights.
        inputs: what `src` looks like, one of `INPUTS`: `normal` (mean 0, variance 1), `after relu` (its
        negative
            half is 0), `large mean` (100), `large range` (over seven orders of magnitude). Weights are normal
            and scaled so that a sum of normal data has variance 1 again.

    Returns:
        Arrays of logical shape; `src` and operands per element lie in memory as the plan says. bf16 is
        uint16.

    Raises:
        ArgumentError: there is no such kind of input.
        MemoryError: they do not fit.
    """
    check_inputs(inputs)
    _check_size(plan)
    generator = np.random.default_rng(seed)
    arrays = {"src": stored(plan.src, INPUTS[inputs](generator, plan.src.shape))}
    for step in plan.steps:
        for held in step.operands:
            values = _values(generator, step, held.operand, gain)
            if held.operand.per == "element":
                arrays[held.key] = stored(step.dst, values)
            else:
                arrays[held.key] = narrow(values, held.operand.dtype)
        for old in (each for each in step.results if each.result.updated):
            values = _sized(generator.standard_normal(old.result.shape), old.result.name)
            arrays[old.key] = narrow(values, old.result.dtype)
    _settle(plan, arrays)
    return arrays


def _check_size(plan: FusionPlan) -> None:
    """Refuses what in float64 is larger than memory can be, which NumPy calls an error of the value."""
    largest = max((plan.src.size, *(prod(held.operand.shape) for held in plan.operands)))
    if largest * np.dtype(np.float64).itemsize > MAX_BYTES:
        raise MemoryError(f"{largest} random numbers in float64 are larger than memory can be")


def _settle(plan: FusionPlan, arrays: Mapping[str, Array]) -> None:
    """Makes gradients 0 where rounding decides what becomes of them."""
    step = edged(plan)
    if step is None:
        return
    rank, per = step.src.rank, step.op.attributes()["mode"]
    leaves: dict[str, Any] = {each.key: np.float64(each.parameter.value) for each in step.parameters}
    leaves |= {held.key: broadcast(_float64(arrays[held.key]), rank) for held in step.operands}
    axes = reduced_axes(MODES[str(per)], rank)
    with np.errstate(all="ignore"):
        mask = at_edges(
            step, {**leaves, "x": 1.0}, NUMPY, lambda each, known: reduce(each, known, step.src.shape, axes)
        )
    arrays["src"][np.broadcast_to(mask, step.src.shape)] = 0


def check_inputs(inputs: str) -> None:
    """Refuses a word that `INPUTS` does not have.

    Raises:
        ArgumentError: there is no such kind of input.
    """
    if inputs not in INPUTS:
        raise ArgumentError(f"no kind of input is named {inputs!r}. {did_you_mean(inputs, INPUTS)}")


def _values(generator: np.random.Generator, step: Step, operand: Operand, gain: float) -> Float64:
    values = generator.standard_normal(operand.shape)
    if operand.per == "weight":
        return values * (gain / sqrt(terms(step, operand)))
    return _sized(values, operand.name)


def _sized(values: Float64, name: str) -> Float64:
    return np.abs(values) + HALF if name in STATISTICS_OF_SQUARES else values


def terms(step: Step, weight: Operand) -> int:
    """How many products with a contraction's weight are summed into one element of its result."""
    attributes = step.op.attributes()
    weights = step.src.batch if attributes.get("batched") else 1
    return prod(weight.shape) // (weights * step.dst.channels)


def stored(spec: TensorSpec, values: Float64) -> Array:
    """A new array that holds float64 values as the spec has them in memory, rounded once."""
    array = empty(spec)
    bits = array.view(np.uint16) if spec.dtype == "bf16" else array
    bits[...] = narrow(values, spec.dtype)
    return array


def laid_out(plan: FusionPlan, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Copies of what `random_arrays` gave, read from a file, that lie in memory as the plan says."""
    specs = {"src": plan.src}
    for step in plan.steps:
        specs |= {held.key: step.dst for held in step.operands if held.operand.per == "element"}
    made = {key: np.array(array) for key, array in arrays.items() if key not in specs}
    for key, spec in specs.items():
        made[key] = empty(spec)
        found = arrays[key]
        if spec.dtype == "bf16":  # files have no name for it: it may come back as two bytes of anything
            made[key].view(np.uint16)[...] = found.view(np.uint16)
        else:
            made[key][...] = found
    return made


def has_statistics(plan: FusionPlan) -> bool:
    """Whether an operator of the plan computes numbers of many elements."""
    return any(isinstance(step.op, Normalization) for step in plan)


def reference(plan: FusionPlan, arrays: Mapping[str, Array]) -> Float64:
    """What the plan makes of the arrays `random_arrays` gave, in float64 and logical order."""
    return evaluated(plan, arrays)[0]


def evaluated(
    plan: FusionPlan, arrays: Mapping[str, Array], slip: float = 0.0
) -> tuple[Float64, dict[str, Float64]]:
    """`reference`, and the plan's results by key, in float64; statistics are off by `slip`, relative."""
    exact = {key: _float64(array) for key, array in arrays.items()}
    return plan.evaluate(exact.pop("src"), exact, slip=slip)


def _float64(array: Array) -> Float64:
    plain = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    exact: Float64 = widen(plain, "bf16" if plain.dtype == np.uint16 else "f64").astype(np.float64)
    return exact


def deviation(got: Array, want: Float64, besides: float = 0.0) -> float:
    """The largest |got - want| over the largest |want|; infinite where what is not finite differs.

    Args:
        got: a result, logical order; bf16 as uint16 or of ml_dtypes.
        want: the same in float64.
        besides: added to the largest |want|.
    """
    exact, finite = _float64(got), np.isfinite(want)
    same = exact.shape == want.shape and np.array_equal(exact[~finite], want[~finite], equal_nan=True)
    if not same or not np.isfinite(exact[finite]).all():
        return float("inf")
    largest = besides + float(np.max(np.abs(want[finite]), initial=0.0))
    furthest = float(np.max(np.abs(exact[finite] - want[finite]), initial=0.0))
    return furthest / largest if largest else furthest
