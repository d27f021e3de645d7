"""Statistics: numbers made of many elements, each class a declaration of a few lines.

A statistic consists of parts. A part joins one term of every element by a function of `JOINS`. The
term may use the parts before it, as a sum of exponentials uses the maximum; `moved` corrects a part when the
parts before it change. From these follow the identity, the step, the merge of two states, the float64
reference, and in every backend the code and the split over threads and programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, TypeVar

import numpy as np

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.layouts import dense
from fuseplan.scalar import Scalar, call, const, exp, fold, leaf, leaves_of, told, where

T = TypeVar("T")

INDEX = "index()"  # the leaf of an element's place among the reduced ones; no key has parentheses
# Functions that join terms, each with its identity: the value of no terms.
JOINS = {"add": 0.0, "mul": 1.0, "maximum": -inf, "minimum": inf}


@dataclass(frozen=True)
class Part:
    """One number of a statistic's state.

    Attributes:
        name: the leaf by which later parts and the statistic's numbers use it.
        join: a function of JOINS.
        term: the term of one element, over the leaves of the statistic's expressions and parts before.
        moved: this part after parts before it have changed, over its own name, their names, and their former
            values (`before`); None where its terms use no part.
        settled: the term where the parts before it are those of all elements; `term` unless told.
        has_numbers: the part of a maximum may pass over NaN among its terms, because a later part has it, and
            the least number may stand for no terms, and for -inf.
    """

    name: str
    join: str
    term: Scalar
    moved: Scalar | None = None
    settled: Scalar | None = None
    has_numbers: bool = False

    @property
    def identity(self) -> float:
        """The value of no terms."""
        return JOINS[self.join]

    def corrected(
        self, state: Mapping[str, T], after: Mapping[str, T], table: Mapping[str, Callable[..., T]]
    ) -> T:
        """This part of a state under the values `after` of the parts before it."""
        if self.moved is None:
            return state[self.name]
        former = {before(name): value for name, value in state.items()}
        return fold(self.moved, {**former, **after, self.name: state[self.name]}, table)


def before(part: str) -> str:
    """The leaf of a part's value before the step that is being taken."""
    return f"{part} before"


@dataclass(frozen=True)
class Statistic(ABC):
    """Numbers made of all elements along some axes.

    Attributes:
        names: the names of the numbers in later expressions.
        expressions: the reduced values, each of one element: over `x`, which is the prologue's result, keys
            of operands and parameters, names of earlier statistics, and `INDEX`.
    """

    names: tuple[str, ...]
    expressions: tuple[Scalar, ...]
    word: ClassVar[str]

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The state, in the order in which its parts use one another."""

    @property
    def numbers(self) -> tuple[Scalar, ...]:
        """The finished numbers in the order of `names`, over names of parts; the parts, unless told."""
        return tuple(leaf(part.name) for part in self.parts)

    @property
    def reads_index(self) -> bool:
        """Whether a value depends on the element's place."""
        return any(INDEX in leaves_of(each) for each in self.expressions)

    @property
    def text(self) -> str:
        """All fields in one line."""
        return f"{', '.join(self.names)} = {self.word} of {'; '.join(map(told, self.expressions))}"

    def part(self, name: str) -> str:
        """The name of a part: no other statistic of a plan has it."""
        return f"{self.names[0]}.{name}"


def merged(
    parts: Sequence[Part],
    first: Mapping[str, T],
    second: Mapping[str, T],
    table: Mapping[str, Callable[..., T]],
) -> dict[str, T]:
    """The state of two groups of elements from their states, by the names of parts.

    Args:
        parts: all parts of a statistic, or those of one of its levels.
        first: the state of one group.
        second: the state of the other.
        table: the meanings of functions, as `fuseplan.scalar.fold` takes them.
    """
    made: dict[str, T] = {}
    for part in parts:
        sides = [part.corrected(state, made, table) for state in (first, second)]
        made[part.name] = table[part.join](*sides)
    return made


class Joined(Statistic):
    """Each expression's terms, joined."""

    join: ClassVar[str]

    @property
    def parts(self) -> tuple[Part, ...]:
        """One number for each expression."""
        listed = zip(self.names, self.expressions, strict=True)
        return tuple(Part(self.part(name), self.join, each) for name, each in listed)


class Sums(Joined):
    """The sum of each expression."""

    word, join = "sums", "add"


class Max(Joined):
    """The largest value of one expression; NaN if any is."""

    word, join = "max", "maximum"


class Min(Joined):
    """The smallest value of one expression; NaN if any is."""

    word, join = "min", "minimum"


class Product(Joined):
    """The product of one expression's values."""

    word, join = "product", "mul"


class Moments(Statistic):
    """The mean of one expression, and the mean of the squared deviations from it.

    States are merged by the formula of Chan, Golub and LeVeque, "Algorithms for computing the sample
    variance", The American Statistician 37 (1983).
    """

    word = "moments"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The number of elements, their sum, and the sum of squared deviations from their mean."""
        (x,) = self.expressions
        count, total, square = map(self.part, ("count", "sum", "square"))
        mean, old = leaf(total) / leaf(count), leaf(before(count))
        apart = leaf(before(total)) / old - mean
        moved = where(old > 0, leaf(square) + old * (apart * apart), leaf(square))
        return (
            Part(count, "add", const(1)),
            Part(total, "add", x),
            Part(square, "add", (x - mean) * (x - mean), moved),
        )

    @property
    def numbers(self) -> tuple[Scalar, ...]:
        """Mean and variance."""
        count, total, square = (leaf(part.name) for part in self.parts)
        return total / count, square / count


@dataclass(frozen=True)
class SumExp(Statistic):
    """The maximum m of the first expression, the sum of exp(expression - m), and the sums of the others.

    No exponential overflows. Where m is infinite or NaN, the sum is NaN; where m is -inf, it is 0. With
    `has_numbers`, m may be infinite where a value is NaN too.
    """

    has_numbers: bool = True
    word = "maximum and sum of exponentials"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The maximum so far, the sum by it, and the other sums."""
        x, *others = self.expressions
        most, total = self.part("max"), self.part("sum")
        shift = where(leaf(most) > -inf, leaf(most), 0)  # -inf - -inf would be NaN
        moved = leaf(total) * exp(leaf(before(most)) - shift)
        settled = where(leaf(most) > -inf, exp(x - leaf(most)), 0)
        sums = (Part(self.part(name), "add", each) for name, each in zip(self.names[2:], others, strict=True))
        largest = Part(most, "maximum", x, has_numbers=self.has_numbers)
        return largest, Part(total, "add", exp(x - shift), moved, settled), *sums


class ArgMax(Statistic):
    """The largest value of the first expression, and the least value of the second where the first has it.

    The second is an index. NaN is larger than any number, as in torch.argmax.
    """

    word = "maximum and its index"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The maximum so far, and the least index of it."""
        x, index = self.expressions
        most, place = self.part("max"), self.part("index")

        def kept(value: Scalar, at: Scalar) -> Scalar:
            """The index where the value is the maximum; infinite elsewhere."""
            largest = leaf(most)
            of_nan = where(_is_number(value), inf, at)
            return where(_is_number(largest), where(value >= largest, at, inf), of_nan)

        moved = kept(leaf(before(most)), leaf(place))
        return Part(most, "maximum", x), Part(place, "minimum", kept(x, index), moved)


def _is_number(value: Scalar) -> Scalar:
    """The condition that a value is not NaN."""
    return call("ge", value, value)


STATISTICS: tuple[type[Statistic], ...] = (Sums, Moments, Max, Min, Product, SumExp, ArgMax)


def indices(shape: Sequence[int], steps: Sequence[int]) -> Any:
    """`INDEX` of all elements in float64, from what a step along each axis adds to it."""
    grid = np.ogrid[tuple(slice(extent) for extent in shape)]
    return np.asarray(sum((axis * step for axis, step in zip(grid, steps, strict=True)), 0.0), np.float64)


def reduce(
    statistic: Statistic,
    leaves: Mapping[str, Any],
    shape: Sequence[int],
    axes: tuple[int, ...],
    by: Arithmetic = ARRAYS,
) -> dict[str, Any]:
    """The numbers of a statistic in float64, by name; the reduced axes stay, with extent 1.

    Args:
        statistic: its parts are joined over all elements at once.
        leaves: the values of its expressions' leaves: float64 arrays that broadcast over `shape`.
        axes: the axes that are reduced.
    """
    state: dict[str, Any] = {}
    if statistic.reads_index and INDEX not in leaves:
        leaves = {**leaves, INDEX: by.table["const"](indices(shape, dense(shape, axes)))}
    for part in statistic.parts:
        terms = by.broadcast(fold(part.term, {**leaves, **state}, by.table), shape)
        state[part.name] = by.joins[part.join](terms, axes, keepdims=True)
    return {
        name: fold(number, state, by.table)
        for name, number in zip(statistic.names, statistic.numbers, strict=True)
    }
