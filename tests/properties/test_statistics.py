"""Statistics: the merge of parts is the statistic of the whole, in any split, for infinities and NaN too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.language.arithmetic import NUMPY_JOINS
from fuseplan.language.reduction import STATISTICS, Statistic, merged, reduce
from fuseplan.scalar import NUMPY, fold, leaf

NAMES = dict.fromkeys(("Sums", "Max", "Min", "Product"), ("a",))
FORMULAS = {"ArgMax": (leaf("x"), leaf("at"))}
MEANINGS = {
    "Sums": lambda x: [x.sum()],
    "Moments": lambda x: [x.mean(), x.var()],
    "Max": lambda x: [x.max()],
    "Min": lambda x: [x.min()],
    "Product": lambda x: [x.prod()],
    "SumExp": lambda x: [x.max(), np.exp(x - x.max()).sum()],
    "ArgMax": lambda x: [x.max(), np.argmax(x)],
}
ELEMENTS = st.lists(st.sampled_from([0.0, 1.5, -2.25, 700.0, -800.0, np.inf, -np.inf, np.nan]), min_size=1)


def made(kind: type[Statistic]) -> Statistic:
    return kind(NAMES.get(kind.__name__, ("a", "b")), FORMULAS.get(kind.__name__, (leaf("x"),)))


def leaves(x: list[float]) -> dict[str, np.ndarray]:
    return {"x": np.array(x), "at": np.arange(float(len(x)))}


def state(statistic: Statistic, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state of a group of elements, part by part; identities where there is none."""
    found: dict[str, np.ndarray] = {}
    for part in statistic.parts:
        terms = np.broadcast_to(fold(part.term, {**given, **found}, NUMPY), given["x"].shape)
        is_empty = terms.size == 0
        joined = NUMPY_JOINS[part.join](terms, (0,), keepdims=True) if not is_empty else [part.identity]
        found[part.name] = np.array(joined)
    return found


@pytest.mark.parametrize("kind", STATISTICS)
@settings(max_examples=40)
@given(x=ELEMENTS, cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_any_split_gives_the_statistic_of_the_whole(
    kind: type[Statistic], x: list[float], cuts: tuple[float, float]
) -> None:
    statistic, whole = made(kind), leaves(x)
    ends = [0, *sorted(round(cut * len(x)) for cut in cuts), len(x)]
    with np.errstate(all="ignore"):
        found = {part.name: np.array([part.identity]) for part in statistic.parts}
        for low, high in itertools.pairwise(ends):
            share = state(statistic, {name: values[low:high] for name, values in whole.items()})
            found = merged(statistic.parts, found, share, NUMPY)
        numbers = [fold(each, found, NUMPY)[0] for each in statistic.numbers]
        wanted = reduce(statistic, whole, (len(x),), (0,))
        np.testing.assert_allclose(numbers, [wanted[name][0] for name in statistic.names], rtol=1e-12)


@pytest.mark.parametrize("kind", STATISTICS)
@settings(max_examples=40)
@given(x=ELEMENTS)
def test_the_reference_is_the_meaning(kind: type[Statistic], x: list[float]) -> None:
    with np.errstate(all="ignore"):
        found = reduce(made(kind), leaves(x), (len(x),), (0,))
        wanted = MEANINGS[kind.__name__](np.array(x))
    if kind.__name__ == "SumExp" and np.max(x) == -np.inf:
        wanted[1] = 0.0  # the sum over nothing but -inf
    np.testing.assert_allclose([each[0] for each in found.values()], wanted, rtol=1e-12, equal_nan=True)
