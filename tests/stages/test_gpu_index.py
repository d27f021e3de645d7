"""The index algebra: a text has the value that it stands for, and is not written where a range decides."""

from __future__ import annotations

from operator import add, floordiv, mod, mul, sub
from random import Random

import numpy as np
import pytest

from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    Index,
    arange,
    as_index,
    condition,
    digits,
    merged,
    number,
    offset,
    total,
)

X, Y = Index("x", 0, 11), Index("y", -3, 5)


STEPS = {"+": add, "*": mul, "-": sub, "/": floordiv, "%": mod, "y": add}


def random_index(rng: Random, depth: int) -> Index:
    """An expression of x and y, whose quotients and remainders have dividends that are not negative."""
    if not depth:
        return rng.choice([X, Y, as_index(rng.randrange(-2, 5))])
    first, count = random_index(rng, depth - 1), rng.choice([1, 2, 3, 4, 6, 12])
    made = rng.choice(["+", "*", "n", "//", "%", "-"])
    if made in ("//", "%") and first.low >= 0:
        return first // count if made == "//" else first % count
    if made == "-":
        return count - first
    if made == "n":
        return first * rng.choice([0, 1, 2, -3]) + rng.choice([0, 1, -4])
    other = random_index(rng, depth - 1)
    return first * other if made == "*" else first + other


def test_values_and_ranges() -> None:
    rng = Random(1)
    x, y = np.meshgrid(np.arange(12), np.arange(-3, 6))
    for _ in range(1000):
        folded = random_index(rng, 4)
        values = eval(folded.text, {"x": x, "y": y})
        assert folded.low <= np.min(values)
        assert np.max(values) <= folded.high
        assert folded.constant is None or folded.text == str(folded.constant)


def test_folding_changes_no_value() -> None:
    """Each step of a random expression, on numbers and on indices."""
    rng = Random(2)
    x, y = np.meshgrid(np.arange(12), np.arange(-3, 6))
    for _ in range(500):
        made, want = X, x
        for _ in range(5):
            count, kind = rng.choice([1, 2, 3, 4, 6, 12]), rng.choice("+*-/%y")
            if kind in "/%" and made.low < 0:
                continue
            operation = STEPS[kind]
            made, want = (
                operation(made, Y if kind == "y" else count),
                operation(want, y if kind == "y" else count),
            )
        assert np.array_equal(np.broadcast_to(eval(made.text, {"x": x, "y": y}), want.shape), want)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (X % 1, "0"),
        (X // 1 * 1 + 0, "x"),
        (X * 0 + 3, "3"),
        (X % 12, "x"),
        (X // 12, "0"),
        (X // 4 // 3, "0"),
        (X // 2 // 3, "x // 6"),
        ((X + 3) - 4, "x - 1"),
        ((X * 4 + 1) * 16, "x * 64 + 16"),
        (X * 12 // 4, "x * 3"),
        (X * 12 % 4, "0"),
        (X * 2 * 3 + Y, "x * 6 + y"),
        ((X + Y) * 2, "(x + y) * 2"),
        (X + (Y + X), "x + (y + x)"),
        (5 - X, "5 - x"),
        (2 - as_index(1), "1"),
        ((X + 1) // 2 % 3, "(x + 1) // 2 % 3"),
        (number("program", 1) * 8 + arange(4), "tl.arange(0, 4)"),
        (total([X, as_index(0), Y]), "x + y"),
    ],
)
def test_what_is_written(made: Index, text: str) -> None:
    assert made.text == text


def test_quotients_of_negative_numbers_are_left_alone() -> None:
    """Triton rounds them towards zero."""
    assert (Y // 8).text == "y // 8"
    assert (Y % 8).text == "y % 8"


def test_a_vector_of_one_element_stays_a_vector() -> None:
    assert (number("program", 1) * 16 + arange(1)).at(DOWN).text == "tl.arange(0, 1)[:, None]"
    assert offset(arange(4), ()).text == "tl.zeros_like(tl.arange(0, 4))"
    assert offset(number("row", 4), ()).text == "0"
    far = offset(arange(4) + 8, ((3, 5), (8, 0)))  # all four are the second of three
    assert (far.text, far.low, far.high) == ("tl.zeros_like(tl.arange(0, 4) + 8) + 5", 5, 5)
    assert (as_index(3).at(DOWN), X.at(ACROSS)) == (as_index(3), X)


def test_masks_say_what_ranges_do_not() -> None:
    assert (X < 12) & (X >= 0) == ALL
    assert str(X < 11) == "x < 11"
    assert str((X < 11) & (X >= 1) & (X < 11)) == "(x < 11) & (x >= 1)"
    assert not str(ALL & ALL)
    assert (
        str((arange(8) < 5).at(DOWN) & condition("ok").at(ACROSS))
        == "(tl.arange(0, 8) < 5)[:, None] & ok[None, :]"
    )
    assert str((X < 3).at(DOWN)) == "x < 3"
    assert (arange(8) < 5).guard() == ", mask=tl.arange(0, 8) < 5, other=0.0"
    assert not ALL.guard()
    assert (arange(8) < 20 - X) == ALL


def test_axes_merge_where_one_continues_another() -> None:
    assert merged([(2, 60), (3, 20), (4, 5)]) == ((24, 5),)
    assert merged([(2, 980), (7, 7), (7, 1)]) == ((2, 980), (49, 1))
    assert merged([(2, 12), (3, 4), (4, 1)]) == ((24, 1),)
    assert merged([(2, 20), (3, 4), (4, 1)]) == ((2, 20), (12, 1))
    assert merged([(2, 9), (1, 5), (4, 2)]) == ((2, 9), (4, 2))
    assert merged([(1, 5), (1, 9)]) == ()


@pytest.mark.parametrize("axes", [((6, 5),), ((3, 100), (4, 7)), ((2, 50), (3, 1), (5, 9)), ()])
def test_offsets_count_along_the_axes(axes: tuple[tuple[int, int], ...]) -> None:
    extents = [extent for extent, _ in axes]
    index = number("index", int(np.prod(extents)))
    for place, at in enumerate(np.ndindex(*extents)):
        want = sum(each * stride for each, (_, stride) in zip(at, axes, strict=True))
        assert eval(offset(index, axes).text, {"index": place}) == want
        assert [eval(digit.text, {"index": place}) for digit in digits(index, extents)] == list(at)
