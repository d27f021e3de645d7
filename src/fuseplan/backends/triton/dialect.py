"""The functions of `fuseplan.scalar` as text of Triton or Gluon.

Only primitives are used that plain Triton, its interpreter and Gluon have, on NVIDIA and AMD alike. NaN stays
NaN, infinities have their limits. Of a zero and a negative zero, `maximum` and `minimum` give either.

The largest errors seen, in units of the last place; `tests/numeric/test_gpu_dialect.py` holds the bounds:

|     | exp | expm1 | log | log1p | tanh | erf | pow | sqrt, div |
| --- | --- | ----- | --- | ----- | ---- | --- | --- | --------- |
| f32 | 1.0 | 1.4   | 1.1 | 1.4   | 1.4  | 1.6 | 0.5 | 0.5       |
| f64 | 0.7 | 2.2   | 0.6 | 1.7   | 2.7  | 1.0 | 1.6 for each unit of abs(log of the result) | 0.5 |

Where results are stored as f16, bf16 or fp8, the arithmetic is still float, but exponentials, roots and
quotients are the hardware's approximations, and powers are those of a float logarithm: what they add to the
rounding of the result is less than a hundredth of its last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import frexp

import numpy as np

from fuseplan.backends.triton.functions import Functions
from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.text import Text
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.words import NUMPY_WORDS, uniform
from fuseplan.scalar import CASTS, FUNCTIONS, Scalar, call, calls, const, sigmoid

# Bounds of the errors of functions that are not rounded once, in units of the last place.
PLACES = {
    "f32": {"exp": 1.05, "expm1": 1.6, "log": 1.15, "log1p": 1.6, "tanh": 1.5, "erf": 1.85, "pow": 2.0},
    "f64": {"exp": 1.1, "expm1": 2.6, "log": 1.1, "log1p": 2.1, "tanh": 3.2, "erf": 1.6, "pow": 1300.0},
}
# Of float as the hardware approximates it, relative: an exponential of at most 88 times a rounding.
ROUGH = {
    "exp": 2.0**-17,
    "tanh": 2.0**-17,
    "erf": 2.0**-17,
    "pow": 2.0**-17,
    "div": 2.0**-22,
    "sqrt": 2.0**-22,
}


def simplified(root: Scalar) -> Scalar:
    """The expression with forms that a GPU computes in fewer steps, and no less exactly.

    sigmoid(z) is 1/(1 + exp(-z)): a reciprocal of infinity is zero, so nothing overflows. 1 + tanh(z) is
    2*sigmoid(2*z), and 1 + erf(z) is taken from erfc(|z|): neither cancels where z is far below zero.
    """
    known: dict[Scalar, Scalar] = {}

    def made(node: Scalar) -> Scalar:
        if node.fn in ("leaf", "const"):
            return node
        if node not in known:
            found = shorter(node)
            found = Scalar(node.fn, tuple(map(made, node.args))) if found is None else found
            known[node] = _gathered(found) if found.fn == "mul" else found
        return known[node]

    def shorter(node: Scalar) -> Scalar | None:
        if node.fn == "div" and node.args[0].fn == "where":
            z = node.args[0].args[0].args[0]
            return Scalar("sigmoid", (made(z),)) if node == sigmoid(z) else None
        if node.fn != "add" or const(1) not in node.args:
            return None
        other = node.args[1] if node.args[0] == const(1) else node.args[0]
        if other.fn == "tanh":
            return call("mul", 2, Scalar("sigmoid", (_gathered(call("mul", 2, made(other.args[0]))),)))
        return Scalar("one_plus_erf", (made(other.args[0]),)) if other.fn == "erf" else None

    return made(root)


def _gathered(node: Scalar) -> Scalar:
    """A product of two that begin with numbers, with one in front, where joining these rounds nothing."""
    (first, one), (second, other) = map(_numbered, node.args)
    is_exact = _is_power_of_two(first) or _is_power_of_two(second)
    if first == 1 or second == 1 or not is_exact or one == const(1) == other:
        return node
    rest = other if one == const(1) else one if other == const(1) else Scalar("mul", (one, other))
    return rest if first * second == 1 else call("mul", first * second, rest)


def _numbered(node: Scalar) -> tuple[float, Scalar]:
    """A number and what it is multiplied with."""
    if node.fn == "const":
        return float(node.args[0]), const(1)
    if node.fn == "mul" and node.args[0].fn == "const":
        return float(node.args[0].args[0]), node.args[1]
    return 1.0, node


def _is_power_of_two(number: float) -> bool:
    return abs(frexp(number)[0]) == 0.5


def relative_error(name: str, dtype: str) -> float:
    """The largest relative error of one function of stored elements, where its result is a normal number."""
    row = dtype_of(dtype)
    if row.is_narrow and name in ROUGH:
        return ROUGH[name]
    return PLACES[row.compute].get(name, 0.5) * dtype_of(row.compute).epsilon


def table(
    text: Text, namespace: str = "tl", dtype: str = "f32", compute: str | None = None
) -> dict[str, Callable[..., str]]:
    """The meaning of each scalar function, and of what `simplified` makes, as lines of `text`.

    Values are names and numbers in the text, of the compute dtype; those of `gt` and `ge` are conditions.
    The text imports `triton.language as tl` in either namespace.

    Args:
        namespace: `tl` or `gl`: what the text calls the language.
        dtype: of the stored results; says how exact the functions have to be.
        compute: the compute dtype; that of `dtype` unless told.
    """
    known = Functions(text, namespace, dtype, compute or dtype_of(dtype).compute)
    names = (*FUNCTIONS, *CASTS, "sigmoid", "one_plus_erf", "brief_exp")
    made = {"const": known.const} | {name: partial(known.apply, name) for name in names}
    words = Words(text, namespace, known.compute, made)
    return made | words.rows | {"random": words.random}


def relative_errors(formulas: Iterable[Scalar], dtype: str) -> float:
    """The sum of the relative errors of all functions in some formulas: see `relative_error`."""
    return sum(relative_error(name, dtype) for formula in formulas for name in calls(formula))


Table = dict[str, Callable[..., str]]


class Words:
    """The meaning of each function of `words.WORDS`, and of `number` and `random`; of numbers, a number.

    Args:
        namespace: `tl` or `gl`.
        compute: the compute dtype.
        table: the meaning of the other functions.
    """

    def __init__(self, text: Text, namespace: str, compute: str, table: Table) -> None:
        self.text, self.ns = text, namespace
        self._storage = Storage(text, namespace, compute)
        number = named(compute, namespace)
        self.rows: Table = {
            "number": lambda x: text.let("number", f"{x}.to({number})"),
            "low": lambda index: text.let("low", f"{index}.to({namespace}.uint32)"),
            "high": lambda index: text.let(
                "high", f"({index}.to({namespace}.int64) >> 32).to({namespace}.uint32)"
            ),
            "word": self._word,
            "bits": str,
            "mul_low": partial(self._row, "mul_low", "{} * {}"),
            "mul_high": partial(self._row, "mul_high", f"{namespace}.umulhi({{}}, {{}})"),
            "plus": partial(self._row, "plus", "{} + {}"),
            "xor": partial(self._row, "xor", "{} ^ {}"),
            "spread": lambda x: text.let("sign", f"({self._signed(x)} >> 31).to({namespace}.uint32)"),
        }
        self._table = table | self.rows

    def _row(self, name: str, text: str, x: str, y: str) -> str:
        if x.isdigit() and y.isdigit():
            return str(NUMPY_WORDS[name](*map(np.uint64, (x, y))))
        if y == "0" and name in ("plus", "xor"):
            return x
        return self.text.let(name, text.format(x, y))

    def _signed(self, x: str) -> str:
        return f"{x}.to({self.ns}.int32, bitcast=True)"

    def _word(self, x: str) -> str:
        if not x.isidentifier():
            return str(NUMPY_WORDS["word"](float(x)))
        return self.text.let("word", f"{self._storage.narrow('i32', x)}.to({self.ns}.uint32)")

    def random(self, index: str, seed: str, offset: str) -> str:
        """A call of a function of random numbers, which is written once for variable words."""
        words = {"seed": self._word(seed), "offset": self._word(offset)}
        given = {name: word for name, word in words.items() if not word.isdigit()}
        own = {name: name if name in given else word for name, word in words.items()}
        name = "_".join(["random", *(word for word in words.values() if word.isdigit())])

        def write() -> list[str]:
            return [uniform(self._table, "index", own["seed"], own["offset"])]

        return self.text.call(name, {"index": index, **given}, write, [self.text.name("drawn")])[0]
