"""Hypothesis strategies: tensors, operators that take a given tensor, plans, expressions; data for a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fuseplan.language.layouts import LAYOUTS, ROWS, channel_names
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.data import terms
from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS, Clamp, Gelu
from fuseplan.ops.affine import MODES, Add, BatchNorm, Bias, Prelu, Scale
from fuseplan.ops.conv import CONVOLUTIONS, PRECISIONS, Conv
from fuseplan.ops.expression import Expression
from fuseplan.ops.matmul import Linear, Matmul, Product
from fuseplan.ops.pool import AVG_POOLS, MAX_POOLS, Pool
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import FUNCTIONS, Scalar, call, const, leaf, neg

RANKS = tuple(LAYOUTS)
COMPUTED = ("f64", "f32", "f16", "bf16")  # dtypes that every operator takes
MODERATE = st.floats(-4, 4, allow_nan=False).map(lambda value: round(value, 3))
ANY_NUMBER = st.floats(allow_nan=False)


@st.composite
def tensors(
    draw: st.DrawFn,
    ranks: Sequence[int] = RANKS,
    dtypes: Sequence[str] = COMPUTED,
    strided: bool = True,
    rows: bool = False,
) -> TensorSpec:
    """Small tensors of every layout; with `strided`, also any order of the axes and gaps between them.

    With `rows` the channels are the last axis.
    """
    rank = draw(st.sampled_from(ranks))
    shape = draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank))
    dtype = draw(st.sampled_from(dtypes))
    names = ROWS[rank] if rows else channel_names(rank)
    if not strided or draw(st.booleans()):
        return TensorSpec(shape, dtype, names if rows else draw(st.sampled_from(LAYOUTS[rank])))
    strides, step = [0] * rank, draw(st.integers(1, 2))
    for axis in draw(st.permutations(range(rank))):
        strides[axis] = step
        step = step * shape[axis] + draw(st.integers(0, 2))
    return TensorSpec(shape, dtype, strides=strides, names=names)


@cache
def activations(number: st.SearchStrategy[float] = MODERATE) -> st.SearchStrategy[Op]:
    """Every activation, with any parameters."""
    plain: list[Any] = [kind for kind in ACTIVATIONS if kind not in (Clamp, Gelu)]
    made = [st.builds(kind, **{each.name: number for each in kind().parameters()}) for kind in plain]
    return st.one_of(
        *made, st.builds(Clamp, min=number, max=number), st.builds(Gelu, st.sampled_from(["none", "tanh"]))
    )


def elementwise(
    number: st.SearchStrategy[float] = MODERATE, src: TensorSpec | None = None
) -> st.SearchStrategy[Op]:
    """Every elementwise operator; those that take `src`, where it is given."""
    return _elementwise(number, src is None or src.has_channel_names)


@cache  # of one strategy, all that it is made of is looked at once
def _elementwise(number: st.SearchStrategy[float], with_channels: bool) -> st.SearchStrategy[Op]:
    if not with_channels:
        return _elementwise(number, True).filter(lambda op: op.reads is None)
    return st.one_of(
        activations(number),
        st.builds(Bias),
        st.builds(Scale),
        st.builds(Add, alpha1=number, alpha2=number),
        st.builds(BatchNorm, st.sampled_from(list(MODES)), epsilon=number.map(abs)),
        st.builds(BatchNorm, st.sampled_from(list(MODES)), inverse=st.just(True)),
        st.builds(Prelu, shared=st.booleans()),
        st.builds(ActivationBackward, activations(number)),
        st.builds(Expression, st.just("x / (1 + k * x**2)"), k=number.map(abs)),
        st.builds(Expression, st.just("where(x > low, sigmoid(x), x * x)"), low=number),
    )


@st.composite
def convolutions(draw: st.DrawFn, src: TensorSpec) -> Conv:
    """Convolutions that take `src`, of rank 3 to 5: any kernel, groups, padding and so on."""
    axes = src.rank - 2
    groups = draw(st.sampled_from([divisor for divisor in range(1, 10) if src.channels % divisor == 0]))
    sizes = st.one_of(st.integers(1, 3), st.tuples(*[st.integers(1, 3)] * axes))
    made = {"kernel": draw(sizes), "stride": draw(sizes), "dilation": draw(sizes)}
    made["precision"] = draw(st.sampled_from(PRECISIONS if src.dtype == "f32" else PRECISIONS[:1]))
    pair = st.tuples(st.integers(0, 2), st.integers(0, 2))
    padding = draw(st.one_of(st.integers(0, 2), st.just("same"), st.just("valid"), st.tuples(*[pair] * axes)))
    op = CONVOLUTIONS[axes - 1](groups * draw(st.integers(1, 3)), padding=padding, groups=groups, **made)
    if min(op.window(src).dst) >= 1:
        return op
    return CONVOLUTIONS[axes - 1](groups, padding="same", groups=groups, **made)


@st.composite
def pools(draw: st.DrawFn, src: TensorSpec) -> Pool:
    """Pools that take `src`, of rank 3 to 5; each window has an element of src."""
    axes = src.rank - 2
    kernel, stride = draw(st.integers(1, 3)), draw(st.none() | st.integers(1, 3))
    made: dict[str, Any] = {"stride": stride, "ceil_mode": draw(st.booleans())}
    if draw(st.booleans()):
        made["count_include_pad"] = draw(st.booleans())
    kinds = AVG_POOLS if "count_include_pad" in made else MAX_POOLS
    op: Pool = kinds[axes - 1](kernel, padding=draw(st.integers(0, kernel // 2)), **made)
    return op if min(op.window(src).dst) >= 1 else kinds[axes - 1](1, **made)


def normalizations(src: TensorSpec, number: st.SearchStrategy[float] = MODERATE) -> st.SearchStrategy[Op]:
    """Operators with statistics that take `src`."""
    mode, epsilon = st.sampled_from(list(MODES)), number.map(abs)
    asked, of = st.booleans(), activations(number)
    makers: list[st.SearchStrategy[Op]] = [
        st.builds(BatchNormTraining, mode, saved=asked, epsilon=epsilon),
        st.builds(BatchNormBackward, of, mode),
        st.builds(BatchNormBackward, of, mode, st.just("recomputed"), epsilon=epsilon),
    ]
    if src.batch > 1:
        makers.append(st.builds(BatchNormTraining, mode, st.just(True), asked, epsilon, number))
    return st.one_of(*makers)


def products(src: TensorSpec) -> st.SearchStrategy[Product]:
    """Matrix products that take `src`."""
    precision = st.sampled_from(PRECISIONS if src.dtype == "f32" else PRECISIONS[:1])
    return st.one_of(
        st.builds(Matmul, st.integers(1, 9), st.booleans(), st.booleans(), precision),
        st.builds(Linear, st.integers(1, 9), precision),
    )


@st.composite
def plans(
    draw: st.DrawFn,
    src: st.SearchStrategy[TensorSpec] | None = None,
    number: st.SearchStrategy[float] = MODERATE,
    max_ops: int = 5,
    max_contractions: int = 2,
    max_normalizations: int = 0,
) -> FusionPlan:
    """Plans of up to `max_ops` operators in any legal order."""
    given = st.booleans().flatmap(lambda rows: tensors(rows=rows)) if src is None else src
    plan = FusionPlan(draw(given))
    is_rows = plan.src.rank == 2 or not plan.src.has_channel_names
    is_channels = plan.src.has_channel_names
    for _ in range(draw(st.integers(0, max_ops))):
        kinds = [step.op.kind for step in plan]
        kind = draw(st.integers(0, 4)) if kinds.count("contraction") < max_contractions else 0
        if kind in (1, 2) and is_rows:
            plan.add(draw(products(plan.output)))
        elif kind == 2:
            plan.add(draw(st.one_of(convolutions(plan.output), pools(plan.output))))
        elif (
            is_channels and kinds.count("normalization") < max_normalizations and not draw(st.integers(0, 3))
        ):
            plan.add(draw(normalizations(plan.output, number)))
        else:
            plan.add(draw(elementwise(number, plan.output)))
    return plan


def _calls(parts: st.SearchStrategy[Scalar]) -> st.SearchStrategy[Scalar]:
    numbers = [name for name in FUNCTIONS if name not in ("where", "gt", "ge", "neg")]
    made = [st.builds(call, st.just(name), *[parts] * FUNCTIONS[name]) for name in numbers]
    chosen = st.builds(
        lambda comparison, a, b, c, d: call("where", call(comparison, a, b), c, d),
        st.sampled_from(["gt", "ge"]),
        *[parts] * 4,
    )
    return st.one_of(*made, st.builds(neg, parts), chosen)


def scalars(
    names: Sequence[str] = ("x", "k"), number: st.SearchStrategy[float] = ANY_NUMBER
) -> st.SearchStrategy[Scalar]:
    """Expressions over leaves of these names."""
    leaves = st.one_of(st.sampled_from(names).map(leaf), number.map(const))
    return st.recursive(leaves, _calls, max_leaves=12)


def random_src(plan: FusionPlan, rng: np.random.Generator) -> NDArray[np.float64]:
    """An input for the plan: normal, logical order."""
    return rng.standard_normal(plan.src.shape)


def random_operands(plan: FusionPlan, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Operands and old results by key: normal, weights scaled to keep results near 1, variances positive."""
    made: dict[str, NDArray[np.float64]] = {}
    for each in plan.operands:
        values = rng.standard_normal(each.shape)
        if each.per == "weight":
            values /= math.sqrt(terms(plan[each.step], each))
        made[each.key] = np.abs(values) + 0.5 if "variance" in each.name else values
    for old in plan.results:
        if old.updated:
            made[old.key] = np.abs(rng.standard_normal(old.shape)) + 0.5
    return made
