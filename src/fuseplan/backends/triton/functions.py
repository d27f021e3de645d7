"""The text of each scalar function in Triton's primitives; `dialect` says which are asked for.

The reduction of exponentials is Cody and Waite's ("Software Manual for the Elementary Functions", 1980):
x = n*ln 2 + r, with ln 2 in two parts, the first so short that its product with n is exact, fused or not.
Logarithms split x = 2^e * m with m between sqrt(1/2) and sqrt(2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fuseplan.backends.polynomials import ERF, ERF_END, EXP, LOG, TANH, TANH_SMALL
from fuseplan.backends.triton.storage import Storage
from fuseplan.backends.triton.text import Text
from fuseplan.language.dtypes import dtype_of
from fuseplan.scalar import CASTS, NUMPY

_LOG2_E = 1 / math.log(2)
_LN2_HIGH = 0.693359375  # ten bits
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDER = 1.5 * 2.0**23  # added to a small float, it leaves the nearest integer in the low bits of the sum
_EXPONENT = 23  # bits below the exponent of a float
_BIAS = 127
_EXP_LOW, _EXP_HIGH = -104.0, 89.0  # below, exp is 0; above, infinite
_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
_SMALLEST = 2.0**-126  # that is no denormal
# Of tanh and erf where results are rounded to 16 bits: up to here their first terms are enough, from here the
# hardware's exponential is.
_HALF_TANH, _HALF_ERF = 0.25, 0.06

# Of numbers alone.
_NUMBERS: dict[str, Callable[..., Any]] = NUMPY | {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "one_plus_erf": lambda x: 1 + math.erf(x),
    "brief_exp": np.exp,
}
# Functions that are one operation: the name of the result, and its text.
_PLAIN = {
    "add": ("sum", "{} + {}"),
    "sub": ("difference", "{} - {}"),
    "mul": ("product", "{} * {}"),
    "neg": ("negative", "{} * -1.0"),  # Triton's own is 0 - x, which is no negative zero
    "gt": ("above", "{} > {}"),
    "ge": ("reaches", "{} >= {}"),
}


class Functions:
    """One method a function, and what they share.

    Args:
        namespace: `tl` or `gl`.
        dtype: of the results as they are stored.
        compute: the compute dtype.
    """

    def __init__(self, text: Text, namespace: str, dtype: str, compute: str) -> None:
        self.text, self.ns, self.compute, self.is_double = text, namespace, compute, compute == "f64"
        self.is_half = dtype_of(dtype).is_narrow and not self.is_double
        self._storage = Storage(text, namespace, compute)
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
        if name in CASTS:
            return self._storage.held(CASTS[name], *args)
        if name in _PLAIN:
            stem, text = _PLAIN[name]
            return self._let(stem, text.format(*args))
        return str(getattr(self, f"_{name}")(*args))

    # ---- lines

    def _let(self, stem: str, value: str) -> str:
        return self.text.let(stem, value)

    def _choice(self, condition: str, x: str, y: str) -> str:
        return f"{self.ns}.where({condition}, {x}, {y})"

    def _like(self, number: str, x: str) -> str:
        """A number as a tensor of x's shape and dtype."""
        return self._let("number", f"{self.ns}.zeros_like({x}) + {number}")

    def _bits(self, x: str) -> str:
        size = 64 if self.is_double else 32
        return f"{x}.to({self.ns}.int{size}, bitcast=True)"

    def _float(self, bits: str) -> str:
        return f"({bits}).to({self.ns}.float32, bitcast=True)"

    def _signed(self, size: str, x: str) -> str:
        """A number without a sign, with the sign of x; of a zero too."""
        kind = f"{self.ns}.float{64 if self.is_double else 32}"
        sign = -(1 << (63 if self.is_double else 31))
        return f"({self._bits(size)} | ({self._bits(x)} & {sign})).to({kind}, bitcast=True)"

    def _polynomial(self, x: str, coefficients: tuple[float, ...]) -> str:
        """c0 + c1*x + c2*x^2 + ... by Horner's rule, two steps a line."""
        total, left = repr(coefficients[-1]), list(coefficients[-2::-1])
        while left:
            first = f"{total} * {x} + {left.pop(0)!r}"
            if left:
                first = f"({first}) * {x} + {left.pop(0)!r}"
            total = self._let("poly", first)
        return total

    # ---- arithmetic

    def _div(self, x: str, y: str) -> str:
        divisor = self._numbers.get(y, 0.0)
        is_exact = abs(math.frexp(divisor)[0]) == 0.5 and 1e-30 < abs(divisor) < 1e30
        if is_exact or (self.is_half and 1e-30 < abs(divisor) < 1e30):
            return self._let("quotient", f"{x} * {1 / divisor!r}")
        if self.is_half or self.is_double:
            return self._let("quotient", f"{x} / {y}")
        return self._let("quotient", f"{self.ns}.div_rn({x}, {y})")

    def _abs(self, x: str) -> str:
        return self._let("size", f"{self.ns}.abs({x})")

    def _maximum(self, x: str, y: str) -> str:
        return self._let("larger", self._bounded("maximum", x, y))

    def _minimum(self, x: str, y: str) -> str:
        return self._let("smaller", self._bounded("minimum", x, y))

    def _bounded(self, name: str, x: str, y: str) -> str:
        """The larger or smaller of two, and NaN where one is."""
        if x in self._numbers:
            x, y = y, x
        if not self.is_double:
            # One instruction; a maximum with zero becomes part of the rounding to 16 bits.
            return f"{self.ns}.{name}({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"
        chosen = self._choice(f"{x} {'<' if name == 'maximum' else '>'} {y}", y, x)
        return chosen if y in self._numbers else self._choice(f"{y} == {y}", chosen, y)

    def _where(self, condition: str, x: str, y: str) -> str:
        if condition in self._numbers:
            return x if self._numbers[condition] else y
        if self.is_double and x in self._numbers and y in self._numbers:
            # Of two numbers Triton makes floats.
            x = self._let("number", f"{self.ns}.full((), {x}, {self.ns}.float64)")
        return self._let("chosen", self._choice(condition, x, y))

    def _round(self, x: str) -> str:
        """From 2**fraction on all numbers are whole: adding it leaves the nearest of those below, to even."""
        whole, size = 2.0 ** (52 if self.is_double else _EXPONENT), self._abs(x)
        near = self._choice(f"{size} < {whole}", f"({size} + {whole}) - {whole}", size)
        return self._let("whole", self._signed(near, x))

    def _sqrt(self, x: str) -> str:
        exact = not (self.is_half or self.is_double)
        return self._let("root", f"{self.ns}.{'sqrt_rn' if exact else 'sqrt'}({x})")

    # ---- exponentials

    def _reduced(self, x: str, offset: int) -> tuple[str, str]:
        """e^r - 1, and the integer n + offset; x = n*ln 2 + r, abs(r) <= ln(2)/2."""
        total = self._let("total", f"{x} * {_LOG2_E!r} + {_ROUNDER + offset!r}")
        n = self._let("n", f"{total} - {_ROUNDER + offset!r}")
        r = self._let("r", f"({x} - {n} * {_LN2_HIGH!r}) - {n} * {_LN2_LOW!r}")
        q = self._let("q", f"{r} * {r} * {self._polynomial(r, EXP)} + {r}")
        return q, self._let("bits", self._bits(total))

    def _scaled(self, x: str, power: int) -> tuple[str, str]:
        """q = e^r - 1 and s = 2^(n + power), so that e^x * 2^power = s + s*q."""
        q, bits = self._reduced(x, _BIAS + power)
        return q, self._let("scale", self._float(f"{bits} << {_EXPONENT}"))

    def _limited(self, x: str, low: float, high: float) -> str:
        least = self._let("limited", self._bounded("maximum", x, self.const(low)))
        return self._let("limited", self._bounded("minimum", least, self.const(high)))

    def _exp(self, x: str) -> str:
        if self.is_half or self.is_double:
            return self._let("power", f"{self.ns}.exp({x})")
        q, bits = self._reduced(self._limited(x, _EXP_LOW, _EXP_HIGH), 2 * _BIAS)
        # 2^n in two factors, because n leaves the range of exponents where e^x is denormal or overflows.
        lower = self._let("lower", f"({bits} << {_EXPONENT - 1}) & 0x7F800000")
        upper = self._let("upper", f"({bits} << {_EXPONENT}) - {lower}")
        return self._let("power", f"({q} + 1.0) * {self._float(lower)} * {self._float(upper)}")

    def _brief_exp(self, x: str) -> str:
        """As `_exp`, but for zeros in the place of results below 2^-126: 2 instructions in the place of 5."""
        return self._let("power", f"{self.ns}.exp2({x} * {_LOG2_E!r})") if self.is_half else self._exp(x)

    def _expm1(self, x: str) -> str:
        if self.is_double:
            return self._double_expm1(x)
        # Half of it, because 2^n overflows where e^x does not yet.
        q, scale = self._scaled(self._limited(x, -18.0, _EXP_HIGH), -1)
        result = self._let("power", f"({scale} * {q} + ({scale} - 0.5)) * 2.0")
        # Equal only where x is so small that it is the result. Half a denormal loses a bit, and -0 its sign.
        return self._let("power", self._choice(f"{q} == {x}", x, result))

    def _double_expm1(self, x: str) -> str:
        """(u - 1)*x/log(u) with u = e^x, whose rounding cancels (Kahan); far from 0, u - 1."""
        u = self._let("power", f"{self.ns}.exp({x})")
        near = self._choice(f"{u} == 1.0", x, f"({u} - 1.0) * {x} / {self.ns}.log({u})")
        return self._let("power", self._choice(f"{self.ns}.abs({x}) < 1.0", near, f"{u} - 1.0"))

    def _sigmoid(self, x: str) -> str:
        if self.is_half:
            # Two approximations of the hardware; its quotient, and Triton's `exp`, take care of denormals.
            power = self._let("power", f"{self.ns}.exp2({x} * {-_LOG2_E!r})")
            root = self._let("root", f"{self.ns}.rsqrt(1.0 + {power})")
            return self._let("sigmoid", f"{root} * {root}")
        return self._let("sigmoid", f"1.0 / (1.0 + {self._exp(self.apply('neg', x))})")

    def _tanh(self, x: str) -> str:
        if self.is_half:
            return self._half_tanh(x)
        if self.is_double:
            return self._double_tanh(x)
        t = self._let("t", self._bounded("minimum", self._abs(x), self.const(10.0)))
        q, scale = self._scaled(self._let("twice", f"{t} + {t}"), 0)
        large = self._let("large", f"1.0 - 2.0 / ({scale} * {q} + ({scale} + 1.0))")
        square = self._let("square", f"{t} * {t}")
        small = self._let("small", f"{t} * {square} * {self._polynomial(square, TANH)} + {t}")
        size = self._let("size", self._choice(f"{t} < {TANH_SMALL}", small, large))
        return self._let("tanh", self._signed(size, x))

    def _half_tanh(self, x: str) -> str:
        power = self._let("power", f"{self.ns}.exp({x} + {x})")
        large = self._let("large", f"1.0 - 2.0 / (1.0 + {power})")
        square = self._let("square", f"{x} * {x}")
        small = self._let("small", f"(({square} * {2 / 15!r} - {1 / 3!r}) * {square} + 1.0) * {x}")
        return self._let("tanh", self._choice(f"{self.ns}.abs({x}) < {_HALF_TANH}", small, large))

    def _double_tanh(self, x: str) -> str:
        t = self._let("t", self._bounded("minimum", self._abs(x), self.const(20.0)))
        e = self._double_expm1(self._let("twice", f"{t} + {t}"))
        size = self._let("size", self._choice(f"{t} < 0.5", f"{e} / ({e} + 2.0)", f"1.0 - 2.0 / ({e} + 2.0)"))
        return self._let("tanh", self._signed(size, x))

    # ---- the error function

    def _erfc_exponent(self, t: str) -> str:
        """log(erfc(-t)) of t between -ERF_END and 0."""
        return self._let("exponent", f"{t} * {self._polynomial(t, ERF)} + {t}")

    def _erf(self, x: str) -> str:
        """-expm1(log(erfc(t))) with t = abs(x), one formula for small and large t."""
        if self.is_double:
            return self._let("erf", f"{self.ns}.erf({x})")
        t = self._let("t", self._bounded("maximum", f"-{self._abs(x)}", self.const(-ERF_END)))
        exponent = self._erfc_exponent(t)
        if self.is_half:
            large = self._let("large", f"1.0 - {self._exp(exponent)}")
            signed = self._choice(f"{x} < 0.0", f"-{large}", large)
            small = self._let("small", f"({2 / math.sqrt(math.pi)!r} - {x} * {x} * 0.376126389) * {x}")
            return self._let("erf", self._choice(f"{t} > -{_HALF_ERF}", small, signed))
        q, scale = self._scaled(exponent, 0)
        size = self._let("size", f"{self.ns}.abs({scale} * {q} + ({scale} - 1.0))")
        return self._let("erf", self._signed(size, x))

    def _one_plus_erf(self, x: str) -> str:
        """erfc(|x|) where x is below zero, else 2 - erfc(|x|)."""
        if self.is_double:
            return self._let("sum", f"1.0 + {self.ns}.erf({x})")
        size = self._abs(x)
        exponent = self._erfc_exponent(self.apply("neg", size))
        if self.is_half:
            found = self._exp(exponent)
        else:
            q, scale = self._scaled(exponent, 0)
            found = f"{scale} * {q} + {scale}"
        beyond = self._let("beyond", self._choice(f"{size} >= {ERF_END}", "0.0", found))
        return self._let("sum", self._choice(f"{x} < 0.0", beyond, f"2.0 - {beyond}"))

    # ---- logarithms

    def _log(self, x: str) -> str:
        if self.is_double:
            return self._let("logarithm", f"{self.ns}.log({x})")
        is_small = self._let("is_small", f"{x} < {_SMALLEST!r}")
        normal = self._let("normal", self._choice(is_small, f"{x} * {2.0**23!r}", x))
        stored = self._let("stored", self._bits(normal))
        exponent = self._exponent(stored)
        f = self._let("f", f"{self._float(f'{stored} - {exponent}')} - 1.0")
        places = self._choice(is_small, str(_EXPONENT << _EXPONENT), "0")
        return self._limits(x, self._sum(self._let("exponent", f"{exponent} - {places}"), f))

    def _log1p(self, x: str) -> str:
        if self.is_double:
            return self._double_log1p(x)
        one_more = self._let("one_more", f"{x} + 1.0")
        exponent = self._exponent(self._let("stored", self._bits(one_more)))
        # Only the exponent is taken from 1 + x, which is rounded; f = x*2^-e + (2^-e - 1) is rounded once.
        # Four times 2^-e, because 2^-e is denormal for the largest e.
        scale = self._let("scale", self._float(f"{0x40800000} - {exponent}"))
        f = self._let("f", f"({x} * {scale} + ({scale} - 4.0)) * 0.25")
        limited = self._limits(one_more, self._sum(exponent, f))
        return self._let("logarithm", self._choice(f"{x} == 0.0", x, limited))

    def _double_log1p(self, x: str) -> str:
        """log(u)*x/(u - 1) with u = 1 + x, whose rounding cancels (Kahan); far from 0, log(u)."""
        u = self._let("one_more", f"{x} + 1.0")
        logarithm = self._let("logarithm", f"{self.ns}.log({u})")
        near = self._choice(f"{u} == 1.0", x, f"{logarithm} * {x} / ({u} - 1.0)")
        return self._let("logarithm", self._choice(f"{self.ns}.abs({x}) < 1.0", near, logarithm))

    def _exponent(self, stored: str) -> str:
        """2^23 * e, of the bits of a number."""
        return self._let("exponent", f"({stored} - {_ROOT_HALF}) & {-(1 << _EXPONENT)}")

    def _sum(self, exponent: str, f: str) -> str:
        """e*ln 2 + log(1 + f)."""
        log_m = self._let("log_m", f"{f} * {f} * {self._polynomial(f, LOG)} + {f}")
        scale = math.log(2) * 2.0**-_EXPONENT
        return self._let("logarithm", f"{exponent}.to({self.ns}.float32) * {scale!r} + {log_m}")

    def _limits(self, x: str, result: str) -> str:
        """`result` where x is positive and finite, else what the logarithm of x is."""
        limit = self._let("limit", self._choice(f"{x} == 0.0", 'float("-inf")', 'float("nan")'))
        finite = self._let("logarithm", self._choice(f'{x} < float("inf")', result, x))
        return self._let("logarithm", self._choice(f"{x} <= 0.0", limit, finite))

    # ---- powers

    def _pow(self, x: str, y: str) -> str:
        if y in self._numbers:
            return self._constant_power(x, self._numbers[y])
        base = self._like(x, y) if x in self._numbers else x
        size = self._abs(base)
        y = self._like(y, base)
        result = self._let("power", self._positive_power(size, y))
        whole = self._let("whole", f"{self.ns}.floor({y}) == {y}")
        half = self._let("half", f"{y} * 0.5")
        odd = self._let("odd", f"{whole} & ({self.ns}.floor({half}) != {half})")
        result = self._let(
            "power", self._choice(f"{self._is_signed(base)} & {odd}", f"{result} * -1.0", result)
        )
        broken = self._let("broken", f"{self._is_below(base)} & ({self.ns}.floor({y}) != {y})")
        result = self._let("power", self._choice(broken, 'float("nan")', result))
        always = self._let("always", f"({base} == 1.0) | ({y} == 0.0)")
        endless = f'({size} == 1.0) & ({self.ns}.abs({y}) == float("inf"))'
        return self._let("power", self._choice(f"{always} | ({endless})", "1.0", result))

    def _is_signed(self, x: str) -> str:
        return f"({self._bits(x)} < 0)"

    @staticmethod
    def _is_below(x: str) -> str:
        """Where a power that is no integer is NaN."""
        return f'(({x} < 0.0) & ({x} > float("-inf")))'

    def _positive_power(self, size: str, y: str) -> str:
        """exp(y*log(size)): for float in double, where results are rounded to 16 bits in float."""
        if self.is_double:
            return f"{self.ns}.exp({y} * {self.ns}.log({size}))"
        if self.is_half:
            return f"{self.ns}.exp({y} * {self._log(size)})"
        double = f"{self.ns}.float64"
        product = f"{y} * {self.ns}.log({size}.to({double}))"
        return f"{self.ns}.exp({product}).to({self.ns}.float32)"

    def _constant_power(self, x: str, y: float) -> str:
        """By multiplications or a square root where that is as accurate."""
        if y == 0:
            return self.const(1.0)
        if y in (1, 2, 3, 4):
            square = f"{x} * {x}"
            by_products = {1: x, 2: square, 3: f"{square} * {x}", 4: f"({square}) * ({square})"}
            return self._let("power", by_products[int(y)])
        if y == -1:
            return self._div(self.const(1.0), x)
        if abs(y) != 0.5:
            return self._other_power(x, y)
        root = self._let("root", f"{self._sqrt(x)} + 0.0")  # as a power, it is 0 of -0 and inf of -inf
        root = self._let("root", self._choice(f'{x} == float("-inf")', 'float("inf")', root))
        return root if y > 0 else self._div(self.const(1.0), root)

    def _other_power(self, x: str, y: float) -> str:
        size = self._abs(x)
        result = self._let("power", self._positive_power(size, self.const(y)))
        if not y.is_integer():
            result = self._let("power", self._choice(self._is_below(x), 'float("nan")', result))
        elif y % 2:
            result = self._let("power", self._choice(self._is_signed(x), f"{result} * -1.0", result))
        if math.isinf(y):
            result = self._let("power", self._choice(f"{size} == 1.0", "1.0", result))
        return result
