"""Fresh random tensors for a plan, the plan's result in float64, and how far a result is from that.

Every function takes NumPy's arrays as well as torch's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fuseplan.errors import ArgumentError, did_you_mean
from fuseplan.language.arithmetic import Arithmetic
from fuseplan.language.declarations import Operand
from fuseplan.language.dtypes import DType, dtype_of
from fuseplan.language.tensor import MAX_BYTES, Dense, TensorSpec
from fuseplan.measure.spaces import HOST, Draws, Shape, Space, Tensor, Tensors, arithmetic_of, exact, space_on
from fuseplan.op import Given
from fuseplan.ops.attention import Attending
from fuseplan.ops.conversion import Scaled
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.losses import OfLogits
from fuseplan.ops.normalization import Names, Normalization
from fuseplan.ops.training import BatchNormBackward
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.scalar import CASTS, calls, fold
from fuseplan.tensors.arrays import empty, is_torch

STATISTICS_OF_SQUARES = ("variance", "inverse_variance", "running_variance")
HALF = 0.5  # the least of them
ROUNDED = ("round", *(fn for fn, dtype in CASTS.items() if dtype_of(dtype).is_float))
LEAST = 8  # over a dtype's largest number it is once or twice the least number that has all bits

# How `src` is drawn; the words are what tables and commands call it.
INPUTS: Mapping[str, Callable[[Draws, Shape, DType], Tensor]] = {
    "normal": lambda draws, shape, _: draws.normal(shape),
    "after relu": lambda draws, shape, _: draws.normal(shape).clip(0),
    "large mean": lambda draws, shape, _: draws.normal(shape) + 100.0,
    "large range": lambda draws, shape, _: draws.spread(shape) * draws.normal(shape),
    "denormal": lambda draws, shape, dtype: draws.normal(shape) / dtype.largest,
}


def random_arrays(
    plan: FusionPlan,
    seed: int | None = None,
    *,
    inputs: str = "normal",
    gain: float = 1.0,
    device: Any = None,
) -> dict[str, Tensor]:
    """`src`, every operand and the old value of every updated result of a plan, by key, in its dtypes.

    Args:
        seed: the same seed gives the same tensors in every process; None gives others each time.
        inputs: the distribution of `src`, one of `INPUTS`: `normal` (mean 0, variance 1), `after relu` (its
            negative half is 0), `large mean` (100), `large range` (over seven orders of magnitude),
            `denormal` (below the least normal number of the dtype). Weights are normal and scaled so that a
            sum of normal data has variance 1 again.
        gain: a factor on the weights.
        device: torch's device of torch tensors; None for NumPy's arrays.

    Returns:
        Tensors of logical shape; `src` and operands per element lie in memory as the plan says. In NumPy,
        bf16 is uint16. On a device, operands in the compute dtype are rounded to src's dtype first, so that a
        library which takes them in that dtype is given the same numbers.

    Raises:
        ArgumentError: there is no such kind of input.
        MemoryError: they do not fit.
    """
    if inputs not in INPUTS:
        raise ArgumentError(f"no kind of input is named {inputs!r}. {did_you_mean(inputs, INPUTS)}")
    _check_size(plan)
    space = space_on(None if device is None else str(device))
    draws = space.draws(seed)
    drawn = ranged(INPUTS[inputs](draws, plan.src.shape, dtype_of(plan.src.dtype)), plan.src.dtype)
    if plan.ops and isinstance(plan.ops[0], Embedding):
        drawn = (abs(drawn) * 8).round() % plan.ops[0].rows
    tensors = {"src": space.fill(space.empty(plan.src), plan.src, drawn)}
    for step in plan.steps:
        for held in step.operands:
            values = _values(draws, step, held, gain)
            if held.spec is not None:
                spec = held.spec
                tensors[held.key] = space.fill(space.empty(spec), spec, values)
            else:
                tensors[held.key] = space.rounded(values, held.dtype, plan.src.dtype)
        for old in (each for each in step.results if each.updated):
            values = _sized(draws.normal(old.shape), old.name)
            tensors[step.keys[old.name]] = space.rounded(values, old.dtype, "f32")
    settle(plan, tensors, space)
    return tensors


def ranged(values: Tensor, dtype: str) -> Tensor:
    """Values near 1 spread over the elements of a dtype: an eighth of the largest integer, half of bool."""
    row = dtype_of(dtype)
    if row.is_float:
        return values
    return values.clip(0) if dtype == "bool" else values * min(row.largest / 4, 2.0**16)


def _check_size(plan: FusionPlan) -> None:
    """Refuses what in float64 is larger than memory can be, which NumPy calls an error of the value."""
    largest = max((plan.src.size, *(math.prod(held.shape) for held in plan.operands)))
    if largest * np.dtype(np.float64).itemsize > MAX_BYTES:
        raise MemoryError(f"{largest} random numbers in float64 are larger than memory can be")


def _values(draws: Draws, step: Step, operand: Operand, gain: float) -> Tensor:
    values = draws.normal(operand.shape)
    if isinstance(step.op, Attending) and operand.name == "lse":
        known = step.op.attend(step.src)
        spread = known.scale * math.sqrt(known.size)  # of the scores of normal numbers: 1 as usual
        return values + math.log(known.keys) + 4 * max(0.0, spread - 1)  # weights are about 1 at most
    if isinstance(step.op, Attending) and not dtype_of(operand.dtype).is_float:
        keys = step.op.attend(step.src).keys
        return values.clip(0) if operand.dtype == "bool" else (abs(values) * keys).clip(0, keys)
    if isinstance(step.op, OfLogits) and operand.name == "target":
        return (abs(values) * (step.src.channels / 2)).clip(0, step.src.channels - 1)
    if operand.per == "weight":
        scaled = values * (gain / math.sqrt(terms(step, operand)))
        return scaled if dtype_of(operand.dtype).is_float else ranged(values, operand.dtype)
    if isinstance(step.op, Scaled):  # so that the elements fill much of the dtype
        units = 64 if step.src.dtype != "i32" else 2**15  # sums of products of 8 bits are about so large
        return (abs(values) + HALF) / units if operand.name == "scale" else values * 8
    return _sized(values, operand.name)


def _sized(values: Tensor, name: str) -> Tensor:
    return abs(values) + HALF if name in STATISTICS_OF_SQUARES else values


def terms(step: Step, weight: Operand) -> int:
    """How many products with a contraction's weight are summed into one element of its result."""
    attributes = step.op.attributes()
    if step.op.is_gradient:  # the second factor has all rows, or all images and positions
        return math.prod(weight.shape) // step.dst.shape[0]
    weights = step.src.batch if attributes.get("batched") else 1
    return math.prod(weight.shape) // (weights * step.dst.channels)


def stored(spec: TensorSpec, values: Tensor) -> Tensor:
    """A new array that holds float64 values as the spec has them in memory, rounded once."""
    return HOST.fill(empty(spec), spec, values)


def laid_out(plan: FusionPlan, arrays: Tensors) -> dict[str, Tensor]:
    """Copies of what `random_arrays` gave, read from a file, that lie in memory as the plan says."""
    specs: dict[str, TensorSpec | Dense] = {"src": plan.src}
    specs |= {held.key: held.spec for held in plan.operands if held.spec is not None}
    made = {key: np.array(array) for key, array in arrays.items() if key not in specs}
    for key, spec in specs.items():
        made[key] = empty(spec)
        found = arrays[key]
        bits = dtype_of(spec.dtype).array  # of bf16 and fp8, for which files have no name
        made[key].view(bits)[...] = found.view(bits) if found.dtype.itemsize == bits.itemsize else found
    return made


def has_statistics(plan: FusionPlan) -> bool:
    """Whether an operator of the plan computes numbers of many elements."""
    return any(isinstance(step.op, Normalization) for step in plan)


def is_training(plan: FusionPlan) -> bool:
    """Whether an operator of the plan computes numbers of a batch, forward or backward."""
    batch = ("channel", "activation")
    return any(isinstance(step.op, Normalization) and step.op.per in batch for step in plan)


def reference(plan: FusionPlan, tensors: Tensors) -> Tensor:
    """The plan's output for what `random_arrays` gave, in float64 and logical order."""
    return evaluated(plan, tensors)[0]


def evaluated(
    plan: FusionPlan, tensors: Tensors, slip: float = 0.0, edge: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """`reference`, and the plan's results by key, in float64.

    Statistics are off by `slip`, and numbers that are rounded by `edge`, relative.
    """
    dtypes = {"src": plan.src.dtype} | {each.key: each.dtype for each in plan.operands}
    wide = (
        {**tensors, "src": tensors["src"].double()}
        if is_torch(tensors["src"])
        else {key: exact(array, dtypes.get(key)) for key, array in tensors.items()}
    )
    by = arithmetic_of(wide["src"])
    return plan.meaning(wide.pop("src"), wide, {}, slip, _on_edge(by, edge) if edge else by)


def is_rounded_inside(plan: FusionPlan) -> bool:
    """Whether elements are joined that were rounded: the sum does not say how large a step of one is."""
    steps = iter(plan.steps)
    return any(_rounds(step) for step in steps) and any(step.op.kind != "elementwise" for step in steps)


def _rounds(step: Step) -> bool:
    is_elementwise = step.op.kind == "elementwise"
    return is_elementwise and any(fn in ROUNDED for each in step.formulas for fn in calls(each))


def _on_edge(by: Arithmetic, edge: float) -> Arithmetic:
    """Arithmetic that rounds numbers which are larger by `edge`, relative; smaller where it is negative."""

    def rounding(fn: str) -> Callable[[Any], Any]:
        return lambda x: by.table[fn](x + edge * abs(x))

    return replace(by, table={**by.table, **{fn: rounding(fn) for fn in ROUNDED}})


def deviation(
    got: Tensor, want: Tensor, besides: float = 0.0, dtype: str | None = None, edges: Any = 0.0
) -> float:
    """The largest |got - want| over the largest |want|; infinite where what is not finite differs.

    Args:
        got: a result, logical order; bf16 and fp8 in NumPy as bits or of ml_dtypes.
        want: the same in float64.
        besides: added to the largest |want|.
        dtype: of `got`, for integers, bits of fp8, and numbers that it does not hold: beyond its largest
            number infinity is right, or that number; and the distance is over its least number with all bits
            where the largest |want| is less. One integer in a thousand may be off by 1: the number before it
            lies where rounding decides between the two.
        edges: how far each element may be away beside that.
    """
    want = want if dtype is None else held(want, dtype)
    wide, finite = exact(got, dtype), abs(want) < math.inf
    if wide.shape != want.shape or not bool(((abs(wide) < math.inf) == finite).all()):
        return math.inf
    odd, wanted = wide[~finite], want[~finite]
    if not bool(((odd == wanted) | ((odd != odd) & (wanted != wanted))).all()):  # noqa: PLR0124 - NaN is not itself
        return math.inf
    with np.errstate(invalid="ignore"):  # infinities are results like any other
        apart = (abs(wide - want) - edges).clip(0)
        if dtype is not None and not dtype_of(dtype).is_float:
            by_one = apart == 1
            apart = apart * ~by_one if int(by_one.sum()) <= 1 + math.prod(want.shape) // 1000 else apart
        off, size = largest(apart, finite), besides + largest(want, finite)
    if dtype is not None and dtype_of(dtype).is_float:
        size = max(size, LEAST / dtype_of(dtype).largest)
    return off / size if size else off


def held(values: Tensor, dtype: str) -> Tensor:
    """Float64 values, those beyond the dtype's largest number as it holds them: infinite, or saturated."""
    row, cast = dtype_of(dtype), f"as_{dtype}"
    if cast not in CASTS or not row.is_float:
        return values
    by, is_beyond = arithmetic_of(values), abs(values) > row.largest
    if not bool(is_beyond.any()):
        return values
    with np.errstate(over="ignore"):
        return by.table["where"](is_beyond, by.table[cast](values), values)


def largest(values: Tensor, counted: Tensor) -> float:
    """The largest absolute value of the counted elements; 0 of none."""
    # Not values[counted], whose index takes 32 bytes an element on a GPU.
    sizes = arithmetic_of(values).table["where"](counted, abs(values), 0.0)
    return float(sizes.max()) if math.prod(sizes.shape) else 0.0


def distances(one: Tensor, other: Tensor) -> Tensor:
    """The distances of two tensors' elements; 0 where one is not finite."""
    with np.errstate(invalid="ignore"):  # as above
        apart = abs(one - other)
    return arithmetic_of(apart).table["where"](apart < math.inf, apart, 0.0)


def moved(one: Tensor, other: Tensor) -> float:
    """The largest finite distance of two tensors' elements."""
    apart = distances(one, other)
    return float(apart.max()) if math.prod(apart.shape) else 0.0


NEAR = 1e-3  # of an edge: far beyond what rounding moves
JUMP = 0.05  # of a slope from one side to the other: a smooth activation's is a tenth of it


def settle(plan: FusionPlan, tensors: Tensors, space: Space) -> None:
    """Makes gradients 0 where rounding decides what becomes of them."""
    step = plan.steps[0] if plan.steps else None
    if step is None or not isinstance(step.op, BatchNormBackward) or "shift" not in step.keys:
        return
    src, op = tensors["src"], step.op
    x = exact(src)
    by, operands = arithmetic_of(x), {each.name: exact(tensors[each.key]) for each in step.operands}
    leaves = {**op.leaf_values(Given(x, step.src, operands, {}, by=by)), "x": by.table["const"](1.0)}
    *moments, sums = op.reductions(Names(), step.src)
    with np.errstate(all="ignore"):
        for each in moments:
            leaves |= op.reduced(each, leaves, step.src, by)

        def gradient(side: float) -> Tensor:
            return fold(sums.expressions[0], {**leaves, "shift": leaves["shift"] + side}, by.table)

        mask = abs(gradient(NEAR) - gradient(-NEAR)) > JUMP
    space.fill(src, step.src, by.table["where"](mask, 0.0, x))  # torch has no index of fp8 by a mask
