"""The index algebra of generated kernels: whole numbers and masks as text, folded by their ranges.

An `Index` is an expression with the range of its values, a `Mask` a conjunction of comparisons. Nothing is
written where the ranges decide: for `x % 1` and `x + 0`, for a quotient that is always zero, for a comparison
that always holds, for a term that a mask has already. Quotients and remainders fold where the dividend is not
negative: only there Triton, which rounds towards zero, agrees with Python.

    program = number("tl.program_id(0)", 12)        # 0 .. 11
    row = program // 4 * 64 + arange(64)            # tl.program_id(0) // 4 * 64 + tl.arange(0, 64)
    row < 192                                       # always holds: no text
    row < 190                                       # (... < 190)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import overload

SUM, PRODUCT, ATOM = 1, 2, 3  # how tightly the outermost operator of a text binds
WIDE = 2**31  # elements: from here on offsets need 64 bits

DOWN, ACROSS = "[:, None]", "[None, :]"  # a vector as a column of a tile, and as a row

Axis = tuple[int, int]  # extent and stride, in elements


@dataclass(frozen=True)
class Index:
    """A whole number, or a tensor of whole numbers, of a kernel.

    Attributes:
        low, high: the least and the greatest value; infinite where nothing is known.
        binds: how tightly the expression's outermost operator binds.
        is_vector: whether it is a tensor; a number that a vector came to is none, and spreads by itself.
        made: the operator, its first factor or summand, and the number behind it, where it is one.
    """

    text: str
    low: float = -inf
    high: float = inf
    binds: int = ATOM
    is_vector: bool = False
    made: tuple[str, Index, int] | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def constant(self) -> int | None:
        """The value of a number."""
        return int(self.low) if self.low == self.high and not self.is_vector else None

    @property
    def atom(self) -> str:
        """The text as an operand of anything."""
        return self.text if self.binds == ATOM else f"({self.text})"

    def at(self, axes: str) -> Index:
        """A vector as an axis of a tile: `at("[:, None]")`; anything else stays as it is."""
        if not self.is_vector or not axes:
            return self
        return self._as(f"{self.atom}{axes}")

    def wide(self, is_wide: bool = True) -> Index:
        """In 64 bits."""
        if not is_wide:
            return self
        if self.constant is not None:
            return Index(f"tl.full((), {self.text}, tl.int64)", self.low, self.high)
        return self._as(f"{self.atom}.to(tl.int64)")

    def widened(self, is_wide: bool = True) -> Index:
        """In 64 bits, even where it is a number of Python's: in Triton's interpreter loops count in these."""
        text = f"tl.full((), 0, tl.int64) + {self.atom}"
        return Index(text, self.low, self.high, SUM, self.is_vector) if is_wide else self

    def named(self, name: str) -> Index:
        """The same by a name that the text gave it."""
        return self._as(name)

    def _as(self, text: str) -> Index:
        return Index(text, self.low, self.high, is_vector=self.is_vector)

    def narrow(self, is_wide: bool = True) -> Index:
        """In 32 bits again."""
        if not is_wide or self.constant is not None:
            return self
        return self._as(f"{self.atom}.to(tl.int32)")

    def __add__(self, other: Index | int) -> Index:
        other = as_index(other)
        if self.constant == 0:
            return other
        number = other.constant
        if number is None:
            right = other.text if other.binds > SUM else f"({other.text})"
            ends = self.low + other.low, self.high + other.high
            return Index(f"{self.text} + {right}", *ends, SUM, self.is_vector or other.is_vector)
        inner, number = self._under("+", number)
        if number == 0:
            return inner
        if inner.constant is not None:
            return as_index(inner.constant + number)
        sign = f"+ {number}" if number > 0 else f"- {-number}"
        return _made(
            "+", inner, number, f"{inner.text} {sign}", (inner.low + number, inner.high + number), SUM
        )

    def __radd__(self, other: int) -> Index:
        return as_index(other) + self

    def __sub__(self, other: Index | int) -> Index:
        other = as_index(other)
        if other.constant is not None:
            return self + -other.constant
        right = other.text if other.binds > SUM else f"({other.text})"
        ends = self.low - other.high, self.high - other.low
        return Index(f"{self.text} - {right}", *ends, SUM, self.is_vector or other.is_vector)

    def __rsub__(self, other: int) -> Index:
        return as_index(other) - self

    def __mul__(self, other: Index | int) -> Index:
        other = as_index(other)
        number = other.constant
        if number is None:
            return other * self.constant if self.constant is not None else _multiplied(self, other)
        if self.constant is not None:
            return as_index(self.constant * number)
        if self.made is not None and self.made[0] == "+":
            return self.made[1] * number + self.made[2] * number
        inner, number = self._under("*", number)
        if number in (0, 1):
            return inner if number else as_index(0)
        ends = sorted((inner.low * number, inner.high * number))
        return _made("*", inner, number, f"{_factor(inner)} * {number}", (ends[0], ends[1]), PRODUCT)

    def __rmul__(self, other: int) -> Index:
        return self * other

    def __floordiv__(self, number: int) -> Index:
        if self.constant is not None and self.low >= 0:
            return as_index(self.constant // number)
        if number == 1:
            return self
        if self._is_multiple(number):
            return self._first * (self._number // number)
        inner, number = self._under("//", number) if self.low >= 0 else (self, number)
        if inner.low < 0:
            return _made("//", inner, number, f"{_factor(inner)} // {number}", (-inf, inf), PRODUCT)
        ends = (inner.low // number, inner.high // number)
        if ends[0] == ends[1]:
            return as_index(int(ends[0]))
        return _made("//", inner, number, f"{_factor(inner)} // {number}", ends, PRODUCT)

    def __mod__(self, number: int) -> Index:
        if self.constant is not None and self.low >= 0:
            return as_index(self.constant % number)
        if number == 1 or self._is_multiple(number):
            return as_index(0)
        if self.low >= 0 and self.high < number:
            return self
        ends = (0, number - 1) if self.low >= 0 else (1 - number, number - 1)
        return _made("%", self, number, f"{_factor(self)} % {number}", ends, PRODUCT)

    def __lt__(self, end: Index | int) -> Mask:
        end = as_index(end)
        return _compared(self, "<", end, self.high < end.low, self.low >= end.high)

    def __ge__(self, start: Index | int) -> Mask:
        start = as_index(start)
        return _compared(self, ">=", start, self.low >= start.high, self.high < start.low)

    @property
    def _first(self) -> Index:
        return self.made[1] if self.made else self

    @property
    def _number(self) -> int:
        return self.made[2] if self.made else 1

    def _is_multiple(self, number: int) -> bool:
        """Whether it is something times a multiple of the number, and the quotient is exact."""
        return self.made is not None and self.made[0] == "*" and self.made[2] % number == 0

    def _under(self, operator: str, number: int) -> tuple[Index, int]:
        """The operand, and the number joined with the one that the same operator has inside already."""
        if self.made is None or self.made[0] != operator:
            return self, number
        _, inner, held = self.made
        return inner, held + number if operator == "+" else held * number


@dataclass(frozen=True)
class Mask:
    """Conditions that all have to hold; none: everything exists.

    Attributes:
        terms: texts of comparisons, and names; none twice.
        vectors: those of them that are tensors.
    """

    terms: tuple[str, ...] = ()
    vectors: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " & ".join(map(_condition, self.terms)) if len(self.terms) > 1 else "".join(self.terms)

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __and__(self, other: Mask) -> Mask:
        terms = tuple(dict.fromkeys((*self.terms, *other.terms)))
        return Mask(terms, self.vectors | other.vectors)

    def at(self, axes: str) -> Mask:
        """Vectors as an axis of a tile."""
        if not axes:
            return self
        spread = [f"{_condition(term)}{axes}" if term in self.vectors else term for term in self.terms]
        return Mask(tuple(spread), frozenset(spread) - frozenset(self.terms))

    def named(self, name: str) -> Mask:
        """The same by a name that the text gave it."""
        return condition(name, is_vector=bool(self.vectors))

    def guard(self, other: str = "0.0") -> str:
        """The arguments of a load: nothing, or the mask and the value of what does not exist."""
        return f", mask={self}" + (f", other={other}" if other else "") if self else ""


def condition(text: str, *, is_vector: bool = True) -> Mask:
    """One condition."""
    return Mask((text,), frozenset([text] if is_vector else []))


ALL = Mask()
EXTENT = Index("extent", 1, 2**31 - 1)  # of the open axes, an argument of 64 bits


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Index, b: int) -> Index: ...
def ceil_div(a: Index | int, b: int) -> Index | int:
    """a / b, rounded up."""
    return (a + (b - 1)) // b


def divides(number: int, value: Index | int) -> bool:
    """Whether a value is a multiple of the number, whatever an open extent is."""
    return as_index(value % number).constant == 0


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, at_least - 1).bit_length()


def as_index(value: Index | int) -> Index:
    """A number as an index."""
    return value if isinstance(value, Index) else Index(str(value), value, value)


def number(text: str, count: Index | int) -> Index:
    """An expression of `count` values from zero on; the number 0 where there is one value."""
    most = as_index(count).high
    return Index(text, 0, most - 1) if most > 1 else as_index(0)


def chosen(values: Sequence[int], at: Index) -> Index:
    """The value of that number: by a product where one step leads from each to the next."""
    first, *others = values
    step = others[0] - first if others else 0
    if list(values) == [first + number * step for number in range(len(values))]:
        return at * step + first
    text = str(values[-1])
    for number, value in reversed(list(enumerate(values[:-1]))):
        text = f"tl.where({at.atom} == {number}, {value}, {text})"
    return Index(text, min(values), max(values))


def counted(name: str, count: Index | int, is_wide: bool = False) -> Index:
    """A loop's variable, from zero on, or in 64 bits."""
    return Index(name, 0, as_index(count).high - 1).widened(is_wide)


def arange(count: int, namespace: str = "tl") -> Index:
    """The numbers from 0 to `count`, a vector."""
    return Index(f"{namespace}.arange(0, {count})", 0, count - 1, is_vector=True)


def sliced(count: int, lacking: int, layout: str) -> Index:
    """The numbers from 0 to `count` in Gluon, along the axis that is not `lacking` of a tile's layout."""
    where = f"gl.SliceLayout({lacking}, {layout})"
    return Index(f"gl.arange(0, {count}, layout={where})", 0, count - 1, is_vector=True)


def total(terms: Iterable[Index]) -> Index:
    """The sum of the terms, in their order."""
    found = as_index(0)
    for term in terms:
        found = found + term
    return found


def digits(index: Index, extents: Sequence[int]) -> list[Index]:
    """The coordinates of the place that `index` counts, the last axis fastest; the first has no end."""
    found: list[Index] = []
    inner = 1
    for place, extent in reversed(list(enumerate(extents))):
        found.append(index // inner % extent if place else index // inner)
        inner *= extent
    return found[::-1]


def offset(index: Index, axes: Sequence[Axis]) -> Index:
    """The offset of the element that `index` counts along the axes: `index // 49 * 2048 + index % 49`."""
    places = digits(index, [extent for extent, _ in axes])
    found = total(place * stride for place, (_, stride) in zip(places, axes, strict=True))
    if index.is_vector and not found.is_vector:  # one element, as often as the vector has it
        return Index(f"tl.zeros_like({index})", 0, 0, is_vector=True) + found
    return found


def merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes with those of extent 1 left out, and neighbours that one stride covers made into one."""
    found: list[Axis] = []
    for extent, stride in axes:
        continues = found and found[-1][1] == extent * stride
        outer = found.pop()[0] if continues else 1
        if as_index(outer * extent).high > 1:
            found.append((outer * extent, stride))
    return tuple(found)


def _made(
    operator: str, first: Index, number: int, text: str, ends: tuple[float, float], binds: int
) -> Index:
    return Index(text, ends[0], ends[1], binds, first.is_vector, (operator, first, number))


def _factor(index: Index) -> str:
    return index.text if index.binds >= PRODUCT else f"({index.text})"


def _multiplied(first: Index, second: Index) -> Index:
    ends = [one * other for one in (first.low, first.high) for other in (second.low, second.high)]
    known = not any(map(isnan, ends))  # 0 * inf says nothing
    low, high = (min(ends), max(ends)) if known else (-inf, inf)
    text = f"{_factor(first)} * {second.atom}"
    return Index(text, low, high, PRODUCT, first.is_vector or second.is_vector)


def _compared(first: Index, sign: str, second: Index, is_true: bool, is_false: bool) -> Mask:
    if is_true:
        return ALL
    if is_false and not (first.is_vector or second.is_vector):
        return condition("tl.full((), 0, tl.int1)", is_vector=False)
    return condition(f"{first} {sign} {second}", is_vector=first.is_vector or second.is_vector)


def _condition(term: str) -> str:
    """A term as an operand of `&` and of brackets: a comparison binds less."""
    depth, parts = 0, 1
    for letter in term:
        depth += (letter in "([") - (letter in ")]")
        parts += letter == " " and not depth
    return f"({term})" if parts > 1 else term
