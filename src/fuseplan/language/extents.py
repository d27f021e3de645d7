"""Extents and strides of axes: numbers, and the open extent, whose number each call gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NoReturn

import numpy as np

from fuseplan.errors import ArgumentError, PlanError
from fuseplan.messages.excerpt import shown


class _Open:
    """The extent of an open axis, `*`: it compares and prints, and arithmetic with it is refused."""

    def __str__(self) -> str:
        return "*"

    __repr__ = __str__

    def __reduce__(self) -> str:
        return "OPEN"

    def _refused(self, *_: object) -> NoReturn:
        raise PlanError(
            "an extent is open here, and a number is needed",
            remedy="Write a number for each *: in the text, or by plan.with_extents(...)",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __index__ = __int__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = _refused


OPEN: Any = _Open()


def is_integer(value: object) -> bool:
    """A whole number, NumPy's included; True and False are none."""
    return hasattr(value, "__index__") and not isinstance(value, bool | np.bool_ | _Open)


def positive(what: str, values: Sequence[Any], *, may_open: bool = True) -> tuple[int, ...]:
    """The values as numbers of 1 or more, `OPEN` for `*` and None.

    Raises:
        PlanError: one of them is something else.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PlanError(f"{what} is given for each axis", got=shown(values), want="a sequence of integers")
    listed = tuple(OPEN if value is None or str(value) == "*" else value for value in values)
    is_right = all(is_integer(value) and value >= 1 for value in numbers(listed))
    if not is_right or not (may_open or len(numbers(listed)) == len(listed)):
        raise PlanError(f"{what} must be a positive integer", got=listed, want="1 or more everywhere")
    return tuple(value if value is OPEN else int(value) for value in listed)


def numbers(extents: Iterable[int]) -> tuple[int, ...]:
    """The extents that are numbers."""
    return tuple(extent for extent in extents if extent is not OPEN)


def filled(shape: Iterable[int], extents: Iterable[int]) -> tuple[int, ...]:
    """The shape with numbers in the place of its open extents, in order.

    Raises:
        PlanError: there are more or fewer numbers than open extents.
    """
    shape, extents = tuple(shape), tuple(extents)
    if len(extents) != shape.count(OPEN):
        told = "x".join(map(str, shape))
        raise PlanError(f"an extent is given for each open axis of {told}", got=extents)
    left = iter(extents)
    return tuple(next(left) if extent is OPEN else extent for extent in shape)


def extents_in(name: str, shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """The numbers that a tensor's shape has for the open axes of the shape that is wanted.

    Raises:
        ArgumentError: the tensor has another number of axes.
    """
    if len(shape) != len(wanted):
        raise ArgumentError(f"{name} has shape {tuple(shape)}; want {'x'.join(map(str, wanted))}")
    return tuple(int(extent) for extent, known in zip(shape, wanted, strict=True) if known is OPEN)


def opened(shape: Sequence[int]) -> tuple[int, ...]:
    """The open axes."""
    return tuple(axis for axis, extent in enumerate(shape) if extent is OPEN)


def outermost_first(strides: Sequence[int]) -> list[int]:
    """The axes by their strides; open strides are those of axes around another open one."""
    far = [-inf if stride is OPEN else -stride for stride in strides]
    return sorted(range(len(strides)), key=lambda axis: (far[axis], axis))


def check_open(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuses open axes that are not the outermost ones in memory; a PlanError where there are such axes."""
    found = opened(shape)
    outer = outermost_first(strides)[: len(found)]
    if set(outer) == set(found):
        return
    raise PlanError(
        "the open axes of a tensor are its outermost ones in memory",
        got=f"extents {'x'.join(map(str, shape))}",
        want="such as f16[*x512x768] or f16[*x*x768]",
        remedy="Write a number for the other axes",
    )
