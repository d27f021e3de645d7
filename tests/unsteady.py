"""How far a plan's meaning in float64 moves when each number on the way is rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import held
from fuseplan.measure.spaces import exact
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.scalar import CASTS

Array = NDArray[Any]

ROUNDINGS = 8  # of the compute dtype, in each number
TF32 = 2.0**-11  # a rounding to the ten bits of its significand
RUNS = 3
EXACT = ("const", "where", "gt", "ge", "neg", "abs", "maximum", "minimum", "bits", "number", "random")
# Beyond these, numbers of the compute dtype become infinite, or lose bits.
RANGES = {"f32": (1e-36, 3e36), "f64": (1e-300, 1e300)}


class OutOfRangeError(Exception):
    """A number on the way lies where the compute dtype has fewer bits, or none."""


def _coarse(step: Step) -> float:
    """The rounding of a product's factors: to tf32, or to src's dtype where a prologue made them."""
    if step.op.kind != "contraction":
        return 0.0
    if step.op.attributes().get("precision") == "tf32":
        return TF32
    factors = dtype_of(step.src.dtype)
    return factors.epsilon if step.index and factors.is_float else 0.0


class _Noise:
    """Arithmetic in float64 that rounds each result at random."""

    def __init__(self, plan: FusionPlan, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._size = max(ROUNDINGS * dtype_of(plan.compute_dtype).epsilon, *map(_coarse, plan.steps))
        self._least, self._most = RANGES[plan.compute_dtype]

    def moved(self, values: Array) -> Array:
        return values * (1 + self._size * self._rng.uniform(-1, 1, np.shape(values)))

    def _behind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*given: Any, **how: Any) -> Any:
            made = self.moved(np.asarray(fn(*given, **how)))
            sizes = abs(made[np.isfinite(made) & (made != 0)])
            if sizes.size and not self._least <= sizes.min() <= sizes.max() <= self._most:
                raise OutOfRangeError
            return made

        return moved

    def _before(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: fn(self.moved(x))

    @property
    def arithmetic(self) -> Arithmetic:
        rounds = ("round", *CASTS)
        table = {
            name: fn if name in EXACT else self._before(fn) if name in rounds else self._behind(fn)
            for name, fn in ARRAYS.table.items()
        }
        joins = {name: self._behind(fn) for name, fn in ARRAYS.joins.items()}
        return replace(ARRAYS, table=table, joins=joins)


def motion(plan: FusionPlan, arrays: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The output, `out`, and the results by key, as their dtypes hold them; how far each element may be away.

    Raises:
        OutOfRangeError: a number on the way is one for which no bound holds.
    """
    dtypes = {"src": plan.src.dtype} | {each.key: each.dtype for each in plan.operands}
    stored = {"out": plan.output.dtype} | {each.key: each.dtype for each in plan.results}
    wide = {key: exact(array, dtypes.get(key)) for key, array in arrays.items()}

    def made(tensors: dict[str, Array], by: Arithmetic) -> dict[str, Array]:
        out, results = plan.meaning(tensors.pop("src"), tensors, {}, 0.0, by)
        found = {"out": out, **results}
        return {key: held(found[key], dtype) for key, dtype in stored.items()}

    want = made({**wide}, ARRAYS)
    far = {key: np.zeros(np.shape(value)) for key, value in want.items()}
    for seed in range(RUNS):
        noise = _Noise(plan, seed)
        floats = {key for key in wide if dtype_of(dtypes.get(key, "f32")).is_float}
        moved = {key: noise.moved(array) if key in floats else array for key, array in wide.items()}
        for key, value in made(moved, noise.arithmetic).items():
            apart = abs(value - want[key])
            far[key] += np.where(value == want[key], 0.0, np.where(np.isfinite(apart), apart, np.inf))
    spread = {key: each.max(initial=0.0, where=np.isfinite(each)) for key, each in far.items()}
    return want, {key: each + 2 * ROUNDINGS * spread[key] for key, each in far.items()}
