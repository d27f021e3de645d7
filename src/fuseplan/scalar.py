"""The arithmetic of one element, written once.

A `Scalar` is an expression: a tree of functions over leaves and constants. Folding it through a table gives
it a meaning: NumPy's functions make it the float64 reference, a backend's make it machine code. The functions
are the twenty of `FUNCTIONS`; every other one is a composition of them, in `DERIVED`. `CASTS` are rounding to
stored elements, which operators that change the dtype are made of. Functions of `INDEXED` are given the
index of the element, a whole number of 64 bits that only they read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.language.dtypes import CONVERTED, narrow, widen
from fuseplan.language.words import NUMPY_WORDS
from fuseplan.language.words import random as drawn
from fuseplan.messages.excerpt import shown
from fuseplan.system import limits

T = TypeVar("T")

# Each function and the number of its arguments.
FUNCTIONS = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "abs": 1, "maximum": 2, "minimum": 2, "pow": 2,
    "exp": 1, "expm1": 1, "log": 1, "log1p": 1, "sqrt": 1, "tanh": 1, "erf": 1,
    "round": 1, "where": 3, "gt": 2, "ge": 2,
}  # fmt: skip
COMPARISONS = ("gt", "ge")
CASTS = {f"as_{name}": name for name in CONVERTED}  # x as an element of that dtype holds it
INDEXED = {"number": 1, "random": 3}  # their first argument is the leaf of an index
SPLIT = "Give it as several operators"


def _infix(fn: str, *, is_swapped: bool = False) -> Callable[[Scalar, Scalar | float], Scalar]:
    """Python's operator that builds a node of a function of two arguments."""

    def apply(node: Scalar, other: Scalar | float) -> Scalar:
        return call(fn, other, node) if is_swapped else call(fn, node, other)

    return apply


@dataclass(frozen=True, slots=True)
class Scalar:
    """One node: a function's name and its arguments; `leaf` holds a name, `const` a float.

    Python's operators build further nodes. `size` is the number of nodes as the expression is written,
    `depth` the longest way down. Comparisons are conditions: they stand in `where` and nowhere else. `==`
    compares expressions, not elements.
    """

    fn: str
    args: tuple[Any, ...]
    depth: int = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        depth, size = 0, 1
        for arg in self.args:
            if isinstance(arg, Scalar):
                depth, size = max(depth, arg.depth), size + arg.size
        object.__setattr__(self, "depth", depth + 1)
        object.__setattr__(self, "size", size)
        # Kept, because a tree without it would be walked again and again.
        object.__setattr__(self, "_hash", hash((self.fn, self.args)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Scalar, (self.fn, self.args)  # hashes of texts differ between processes

    @property
    def is_condition(self) -> bool:
        """A comparison, not a number."""
        return self.fn in COMPARISONS

    __add__, __radd__ = _infix("add"), _infix("add", is_swapped=True)
    __sub__, __rsub__ = _infix("sub"), _infix("sub", is_swapped=True)
    __mul__, __rmul__ = _infix("mul"), _infix("mul", is_swapped=True)
    __truediv__, __rtruediv__ = _infix("div"), _infix("div", is_swapped=True)
    __pow__, __rpow__ = _infix("pow"), _infix("pow", is_swapped=True)
    __gt__, __lt__ = _infix("gt"), _infix("gt", is_swapped=True)
    __ge__, __le__ = _infix("ge"), _infix("ge", is_swapped=True)

    def __neg__(self) -> Scalar:
        return neg(self)

    def __pos__(self) -> Scalar:
        return self

    def __abs__(self) -> Scalar:
        return call("abs", self)

    def __round__(self) -> Scalar:
        return call("round", self)

    def __bool__(self) -> bool:
        raise PlanError(
            "an expression is not true or false: its element is not known yet",
            got="a Scalar in `if`, `and`, `or`, `not`, `min` or `max`",
            remedy="Choose with where(condition, a, b), minimum(a, b) or maximum(a, b)",
        )


def leaf(name: str) -> Scalar:
    """A value given when the expression is folded."""
    return Scalar("leaf", (name,))


def const(value: float) -> Scalar:
    """A number. Negative zero becomes the negation of zero, so that equal constants are the same number."""
    number = float(value)
    if math.isnan(number):
        raise PlanError("a constant must be a number or an infinity", got="nan")
    if number == 0 and math.copysign(1, number) < 0:
        return Scalar("neg", (Scalar("const", (0.0,)),))
    return Scalar("const", (number,))


def scalar(value: Scalar | float) -> Scalar:
    """The value as an expression: numbers become constants.

    Raises:
        PlanError: it is no number and no expression.
    """
    if isinstance(value, Scalar):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise PlanError("an expression takes numbers and expressions", got=shown(value))
    try:
        return const(float(value))
    except OverflowError:
        raise PlanError("a number of an expression must fit in a float", want="at most 1.8e308") from None


def call(fn: str, *values: Scalar | float) -> Scalar:
    """The function `fn` of FUNCTIONS applied to `values`.

    Raises:
        PlanError: a value is no number and no expression; a comparison stands where a number belongs; or
            the whole is larger than the limits allow.
    """
    args = tuple(map(scalar, values))
    if any(arg.is_condition for arg in (args[1:] if fn == "where" else args)):
        raise PlanError(
            "a comparison is a condition, not a number",
            got=f"a comparison in `{fn}`",
            want="a comparison as the first argument of `where`",
        )
    node = Scalar(fn, args)
    if node.depth > limits.EXPRESSION_DEPTH or node.size > limits.EXPRESSION_NODES:
        raise PlanError(
            "the expression is too large for one element",
            got=f"{node.size} functions, {node.depth} deep",
            want=f"at most {limits.EXPRESSION_NODES}, {limits.EXPRESSION_DEPTH} deep",
            remedy=SPLIT,
        )
    return node


def neg(x: Scalar | float) -> Scalar:
    """-x; of a constant, the negative constant."""
    inner = scalar(x)
    return const(-inner.args[0]) if inner.fn == "const" else call("neg", inner)


def maximum(a: Scalar | float, b: Scalar | float) -> Scalar:
    """The larger; NaN if either is."""
    return call("maximum", a, b)


def minimum(a: Scalar | float, b: Scalar | float) -> Scalar:
    """The smaller; NaN if either is."""
    return call("minimum", a, b)


def _of_one(fn: str, told: str) -> Callable[[Scalar | float], Scalar]:
    """A function of FUNCTIONS with one argument."""

    def apply(x: Scalar | float) -> Scalar:
        return call(fn, x)

    apply.__name__ = apply.__qualname__ = fn
    apply.__doc__ = told
    return apply


exp = _of_one("exp", "The exponential.")
expm1 = _of_one("expm1", "exp(x) - 1, accurate near 0.")
log = _of_one("log", "The natural logarithm.")
log1p = _of_one("log1p", "log(1 + x), accurate near 0.")
sqrt = _of_one("sqrt", "The square root.")
tanh = _of_one("tanh", "The hyperbolic tangent.")
erf = _of_one("erf", "The error function, 2/sqrt(pi) * integral of exp(-t*t) from 0 to x.")


def where(condition: Scalar, a: Scalar | float, b: Scalar | float) -> Scalar:
    """The element of a where the condition holds, else b."""
    if not isinstance(condition, Scalar) or not condition.is_condition:
        problem = "the first argument of `where` must be a comparison"
        got = text(condition) if isinstance(condition, Scalar) else shown(condition)
        raise PlanError(problem, got=got, want="where(x > 0, a, b)")
    return call("where", condition, a, b)


def index(axis: str = "") -> Scalar:
    """The element's place along an axis of the operator's input, by the axis' letter; among all elements.

    Both count from 0 in logical order, however the elements lie. The derivative is 0.
    """
    return Scalar("number", (leaf(f"index({axis})"),))


def random(seed: Scalar | float, offset: Scalar | float = 0) -> Scalar:
    """A number from 0 to 1, even and independent for each element, seed and offset: the same on all targets.

    Philox 4x32-10 of the element's place among all elements. Of seed and offset the whole part counts, from
    -2**31 to 2**31 - 1; as numbers of f32 they are exact up to 2**24. The derivative is 0.
    """
    return Scalar("random", (leaf("index()"), scalar(seed), scalar(offset)))


def indices_of(root: Scalar) -> frozenset[str]:
    """The names of the leaves that are indices: `index(c)`, or `index()` for all axes."""
    return frozenset(name for name in leaves_of(root) if name.startswith("index("))


def relu(x: Scalar | float) -> Scalar:
    """The larger of x and 0."""
    return maximum(x, 0)


def sigmoid(x: Scalar | float) -> Scalar:
    """1/(1 + exp(-x)), by the exponential that cannot overflow."""
    decay = exp(-abs(scalar(x)))
    return where(scalar(x) >= 0, 1, decay) / (1 + decay)


def softplus(x: Scalar | float) -> Scalar:
    """log(1 + exp(x)), by the exponential that cannot overflow."""
    return maximum(x, 0) + log1p(exp(-abs(scalar(x))))


# Functions that an expression may use besides FUNCTIONS: compositions of them.
DERIVED: dict[str, Callable[..., Scalar]] = {"relu": relu, "sigmoid": sigmoid, "softplus": softplus}


def fold(root: Scalar, leaves: Mapping[str, T], table: Mapping[str, Callable[..., T]]) -> T:
    """The meaning of `root`, by the meanings of leaves in `leaves` and of functions in `table`.

    `table` has an entry for each of FUNCTIONS, and `const`, which is given a float. Equal parts are computed
    once.
    """
    known: dict[Scalar, T] = {}

    def meaning(node: Scalar) -> T:
        if node.fn == "leaf":
            return leaves[node.args[0]]
        if node not in known:
            args = node.args if node.fn == "const" else [meaning(arg) for arg in node.args]
            known[node] = table[node.fn](*args)
        return known[node]

    return meaning(root)


# The meaning of each function as itself: folding through it puts other expressions in the place of leaves.
REBUILD: dict[str, Callable[..., Scalar]] = {
    "const": const,
    **{fn: partial(call, fn) for fn in (*FUNCTIONS, *CASTS, *INDEXED)},
}


def replaced(root: Scalar, values: Mapping[str, Scalar]) -> Scalar:
    """The expression with others in the place of some leaves, by name."""
    return fold(root, {**{name: leaf(name) for name in leaves_of(root)}, **values}, REBUILD)


# The float64 meaning of each function. NumPy has no erf; the C library's is right to the last place or so.
NUMPY: dict[str, Callable[..., Any]] = {
    "const": np.float64,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "abs": np.abs, "maximum": np.maximum, "minimum": np.minimum, "pow": np.float_power,
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "round": np.rint, "where": np.where, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _held(dtype: str, x: Any) -> Any:
    """Float64 numbers as elements of a dtype hold them."""
    return widen(narrow(np.asarray(x, np.float64), dtype), dtype).astype(np.float64)


NUMPY |= {fn: partial(_held, dtype) for fn, dtype in CASTS.items()} | NUMPY_WORDS
NUMPY["random"] = partial(drawn, NUMPY)


@lru_cache(maxsize=1 << 14)  # shared parts are met again and again: without it, in exponential time
def leaves_of(root: Scalar) -> frozenset[str]:
    """Names of the leaves."""
    if root.fn in ("leaf", "const"):
        return frozenset(root.args if root.fn == "leaf" else ())
    return frozenset().union(*map(leaves_of, root.args))


def _nodes(root: Scalar) -> dict[Scalar, None]:
    """The nodes of an expression from the root down; a shared part once."""
    met: dict[Scalar, None] = {}

    def visit(node: Scalar) -> None:
        if node not in met:
            met[node] = None
            for child in node.args if node.fn not in ("leaf", "const") else ():
                visit(child)

    visit(root)
    return met


def calls(root: Scalar) -> list[str]:
    """The functions of an expression; a shared part once."""
    return [node.fn for node in _nodes(root) if node.fn not in ("leaf", "const")]


def functions(expression: Scalar) -> int:
    """How many scalar functions one element takes; a shared part counts once."""
    return len(calls(expression))


# How infix functions print: the sign, how tightly it binds, and how tightly its sides must bind.
_INFIX = {
    "gt": (" > ", 1, 2, 2), "ge": (" >= ", 1, 2, 2),
    "add": (" + ", 2, 2, 3), "sub": (" - ", 2, 2, 3),
    "mul": (" * ", 3, 3, 4), "div": (" / ", 3, 3, 4),
    "pow": ("**", 5, 6, 4),
}  # fmt: skip
_UNARY, _ATOM = 4, 6
LONG = 8  # nodes; `told` writes a longer part once


def text(root: Scalar) -> str:
    """The expression as Python writes it, with the fewest parentheses; `parse_expression` reads it back."""
    return _printed(root, {})[0]


def told(root: Scalar) -> str:
    """The text, with a number for each long part that stands in it again: `$0 / (1 + $0) with $0 = ...`.

    The derivative of mish behind a norm has 10,000 characters in full.
    """
    met = Counter(child for node in _nodes(root) for child in node.args if isinstance(child, Scalar))
    again = sorted((node for node in met if met[node] > 1 and node.size > LONG), key=lambda node: node.size)
    names = {node: f"${number}" for number, node in enumerate(again)}
    parts = [f"{name} = {_printed(node, {**names, node: ''})[0]}" for node, name in names.items()]
    return _printed(root, names)[0] + (f" with {', '.join(parts)}" if parts else "")


def _printed(node: Scalar, names: Mapping[Scalar, str]) -> tuple[str, int]:
    """The text, and how tightly it binds."""
    if names.get(node):
        return names[node], _ATOM
    if node.fn == "leaf":
        return str(node.args[0]), _ATOM
    if node.fn == "number":
        return _printed(node.args[0], names)
    if node.fn == "const":
        return number(node.args[0]), _UNARY if node.args[0] < 0 else _ATOM
    if node.fn == "neg":
        return "-" + _within(node.args[0], _UNARY, names), _UNARY
    if node.fn in _INFIX:
        sign, binds, left, right = _INFIX[node.fn]
        return _within(node.args[0], left, names) + sign + _within(node.args[1], right, names), binds
    args = node.args[1:] if node.fn == "random" else node.args  # each element's own index
    return f"{node.fn}({', '.join(_printed(each, names)[0] for each in args)})", _ATOM


def _within(node: Scalar, needed: int, names: Mapping[Scalar, str]) -> str:
    printed, binds = _printed(node, names)
    return printed if binds >= needed else f"({printed})"


def number(value: float) -> str:
    """The shortest text that reads back as this number."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
