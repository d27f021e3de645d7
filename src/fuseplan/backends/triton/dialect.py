"""The functions of `fuseplan.scalar` as text of Triton or Gluon.

Only primitives are used that plain Triton, its interpreter and Gluon have, on NVIDIA and AMD alike. NaN stays
NaN, infinities have their limits. Of a zero and a negative zero, `maximum` and `minimum` give either.

Where the tensors are f16 or bf16, the arithmetic is still float, but functions take the hardware's
approximations, whose errors are hundreds of times smaller than the rounding of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from fuseplan.backends.triton.text import Text
from fuseplan.scalar import FUNCTIONS, NUMPY, Scalar, call, const, sigmoid

COMPUTE = {"f64": "float64", "f32": "float32", "f16": "float32", "bf16": "float32"}
_LOG2_E = 1 / math.log(2)
# ln 2 in two parts: the first has ten bits, so that its product with an exponent is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDER = 1.5 * 2.0**23  # added to a small float, it leaves the nearest integer in the low bits of the sum
_EXPONENT = 23  # bits below the exponent of a float
_BIAS = 127
_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)


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
            known[node] = Scalar(node.fn, tuple(map(made, node.args))) if found is None else found
        return known[node]

    def shorter(node: Scalar) -> Scalar | None:
        if node.fn == "div" and node.args[0].fn == "where":
            z = node.args[0].args[0].args[0]
            return Scalar("sigmoid", (made(z),)) if node == sigmoid(z) else None
        if node.fn != "add" or const(1) not in node.args:
            return None
        other = node.args[1] if node.args[0] == const(1) else node.args[0]
        if other.fn == "tanh":
            return call("mul", 2, Scalar("sigmoid", (call("mul", 2, made(other.args[0])),)))
        return Scalar("one_plus_erf", (made(other.args[0]),)) if other.fn == "erf" else None

    return made(root)


def table(text: Text, namespace: str = "tl", dtype: str = "f32") -> dict[str, Callable[..., str]]:
    """The meaning of each scalar function, and of what `simplified` makes, as lines of `text`.

    Values are names and numbers in the text, of the compute dtype; those of `gt` and `ge` are conditions.

    Args:
        text: takes the lines.
        namespace: `tl` or `gl`: what the text calls the language.
        dtype: of the stored tensors; says how exact the functions have to be.
    """
    known = _Functions(text, namespace, dtype)
    names = (*FUNCTIONS, "sigmoid", "one_plus_erf")
    return {"const": known.const} | {name: partial(known.apply, name) for name in names}


class _Functions:
    """One method a function."""

    def __init__(self, text: Text, namespace: str, dtype: str) -> None:
        self.text, self.ns = text, namespace
        self.is_double, self.is_half = dtype == "f64", dtype in ("f16", "bf16")
        self.compute = f"{namespace}.{COMPUTE[dtype]}"
        self._numbers: dict[str, float] = {}

    def const(self, value: float) -> str:
        """A number, rounded to the compute dtype; one too large for it is infinite."""
        with np.errstate(over="ignore"):
            number = float(value) if self.is_double else float(np.float32(value))
        written = repr(float(value)) if math.isfinite(number) else f'float("{number}")'
        self._numbers[written] = number
        return written

    def apply(self, name: str, *args: str) -> str:
        """A function of values; of numbers alone, a number."""
        if all(arg in self._numbers for arg in args):
            with np.errstate(all="ignore"):
                return self.const(float(_NUMBERS[name](*(self._numbers[arg] for arg in args))))
        made: str = getattr(self, f"_{name}")(*args)
        return made

    # ---- arithmetic

    def _let(self, stem: str, value: str) -> str:
        return self.text.let(stem, value)

    def _add(self, x: str, y: str) -> str:
        return self._let("sum", f"{x} + {y}")

    def _sub(self, x: str, y: str) -> str:
        return self._let("difference", f"{x} - {y}")

    def _mul(self, x: str, y: str) -> str:
        return self._let("product", f"{x} * {y}")

    def _div(self, x: str, y: str) -> str:
        if y in self._numbers and (self.is_half or math.frexp(self._numbers[y])[0] in (0.5, -0.5)):
            return self._let("quotient", f"{x} * {1 / self._numbers[y]!r}")
        exact = not (self.is_half or self.is_double)
        return self._let("quotient", f"{self.ns}.div_rn({x}, {y})" if exact else f"{x} / {y}")

    def _neg(self, x: str) -> str:
        return self._let("negative", f"-{x}")

    def _abs(self, x: str) -> str:
        return self._let("size", f"{self.ns}.abs({x})")

    def _maximum(self, x: str, y: str) -> str:
        return self._let("larger", self._bounded("<", x, y))

    def _minimum(self, x: str, y: str) -> str:
        return self._let("smaller", self._bounded(">", x, y))

    def _bounded(self, sign: str, x: str, y: str) -> str:
        """y where x is beyond it, else x, and NaN where one is."""
        if x in self._numbers:
            x, y = y, x
        chosen = f"{self.ns}.where({x} {sign} {y}, {y}, {x})"
        return chosen if y in self._numbers else f"{self.ns}.where({y} == {y}, {chosen}, {y})"

    def _gt(self, x: str, y: str) -> str:
        return self._let("above", f"{x} > {y}")

    def _ge(self, x: str, y: str) -> str:
        return self._let("reaches", f"{x} >= {y}")

    def _where(self, condition: str, x: str, y: str) -> str:
        return self._let("chosen", f"{self.ns}.where({condition}, {x}, {y})")

    def _sqrt(self, x: str) -> str:
        exact = not (self.is_half or self.is_double)
        return self._let("root", f"{self.ns}.{'sqrt_rn' if exact else 'sqrt'}({x})")

    # ---- exponentials

    def _exp(self, x: str) -> str:
        return self._let("power", f"{self.ns}.exp({x})")

    def _expm1(self, x: str) -> str:
        return self._let("power", f"{self.ns}.exp({x}) - 1.0")

    def _sigmoid(self, x: str) -> str:
        return self._let("sigmoid", f"1.0 / (1.0 + {self._exp(self._neg(x))})")

    def _tanh(self, x: str) -> str:
        return self._let("tanh", f"1.0 - 2.0 / (1.0 + {self._exp(self._let('twice', f'{x} + {x}'))})")

    def _erf(self, x: str) -> str:
        return self._let("erf", f"{self.ns}.erf({x})")

    def _one_plus_erf(self, x: str) -> str:
        return self._let("sum", f"1.0 + {self._erf(x)}")

    # ---- logarithms and powers

    def _log(self, x: str) -> str:
        return self._let("logarithm", f"{self.ns}.log({x})")

    def _log1p(self, x: str) -> str:
        return self._let("logarithm", f"{self.ns}.log(1.0 + {x})")

    def _pow(self, x: str, y: str) -> str:
        return self._let("power", f"{self.ns}.exp({y} * {self.ns}.log({x}))")


_NUMBERS = NUMPY | {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "one_plus_erf": lambda x: 1 + math.erf(x),
}
