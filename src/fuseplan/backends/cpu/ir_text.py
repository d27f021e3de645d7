"""What LLVM IR's text is made of: types, numbers, modules, and index arithmetic that needs no instruction."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable

I1, I64, PTR = "i1", "i64", "ptr"
BITS = {"float": 32, "double": 64, "half": 16, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "ptr": 64}

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "udiv": operator.floordiv,
    "urem": operator.mod,
}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "udiv": 1}  # as the right operand
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "slt": operator.lt,
    "sle": operator.le,
    "sgt": operator.gt,
    "sge": operator.ge,
    "ult": lambda x, y: 0 <= x < y,
}


def vector(lanes: int, element: str) -> str:
    """The type of `lanes` elements side by side."""
    return f"<{lanes} x {element}>"


@functools.cache
def element_of(kind: str) -> str:
    """The type of one element of a vector type; a scalar type is its own."""
    return kind[1:-1].partition(" x ")[2] if kind[0] == "<" else kind


@functools.cache
def lanes_of(kind: str) -> int:
    """How many elements a type has; 1 for a scalar."""
    return int(kind[1:].partition(" x ")[0]) if kind[0] == "<" else 1


def is_floating(kind: str) -> bool:
    """Whether arithmetic on the type is floating point."""
    return element_of(kind) in ("float", "double", "half")


def literal(value: float, element: str) -> str:
    """A number as LLVM writes it: floating point in hexadecimal, rounded to the element's type."""
    if element == "float":
        value = struct.unpack("f", struct.pack("f", value))[0]
    if element in ("float", "double"):
        return f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}"
    return str(int(value))


def number_of(name: str) -> int | None:
    """The integer that a name writes; None for the name of a variable."""
    return None if name[0] == "%" else int(name) if name.lstrip("-").isdigit() else None


def folded(word: str, left: str, right: str) -> str | None:
    """The name of an index operation's result where it needs no instruction: a number, or an operand."""
    x, y = number_of(left), number_of(right)
    divides = word in ("udiv", "urem")
    if x is not None and y is not None:
        # Division is unsigned: a negative dividend, or a divisor of zero, is left to LLVM.
        return None if divides and (x < 0 or y <= 0) else str(_ARITHMETIC[word](x, y))
    if y is not None and y == _NEUTRAL.get(word):
        return left
    if word in ("add", "mul") and x is not None and x == _NEUTRAL[word]:
        return right
    is_zero = (word == "mul" and 0 in (x, y)) or (word == "urem" and y == 1) or (divides and x == 0)
    return "0" if is_zero else None


def compared(how: str, left: str, right: str) -> bool | None:
    """Whether a comparison of two numbers holds; None where one is a variable."""
    x, y = number_of(left), number_of(right)
    return None if x is None or y is None else _COMPARISONS[how](x, y)


class Module:
    """Functions and the declarations they need, as one text, for a processor with some of LLVM's features."""

    def __init__(self, attributes: str = "", features: str = "") -> None:
        self.functions: list[str] = []
        self.declarations: set[str] = set()
        self.attributes, self.features = attributes, frozenset(features.split(","))

    def text(self) -> str:
        """The module as LLVM reads it."""
        tail = [f"attributes #0 = {{ nounwind {self.attributes} }}", "!0 = !{i32 1}"]
        return "\n\n".join([*self.functions, "\n".join(sorted(self.declarations)), "\n".join(tail)]) + "\n"
