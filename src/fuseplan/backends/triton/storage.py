"""Widens elements that were loaded, and rounds results to the elements that are stored, as lines of text.

fp8 is moved as its bits. Not every GPU has instructions that convert it, and those for e5m2 saturate, which
has infinities: `NATIVE` has what instructions round as `dtypes.narrow` does. Triton's names of the dtypes are
here, those of arguments' types in the table of `dtypes`.
"""

from __future__ import annotations

from collections.abc import Callable

from fuseplan.backends.triton.text import Text
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import FP8, dtype_of

_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NAMES |= {"u8": "uint8", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64"}

# What NVIDIA's instructions convert, by Triton's names, and the first GPUs that have them. A number takes
# some fourteen instructions by its bits, half of one by these.
NATIVE, SINCE = {"f8e4m3": "float8e4nv"}, 89


def converted_by(target: Target) -> frozenset[str]:
    """The fp8 dtypes that a GPU's own instructions convert."""
    kind = target.name.removeprefix("sm_")
    return frozenset(NATIVE if kind.isdecimal() and int(kind) >= SINCE else ())


def named(dtype: str, namespace: str = "tl") -> str:
    """The dtype in a kernel's text: `tl.float16`."""
    return f"{namespace}.{_NAMES[dtype_of(dtype).triton]}"


class Storage:
    """Conversions between elements in memory and the compute dtype.

    Args:
        namespace: `tl` or `gl`: what the text calls the language.
        compute: the compute dtype.
    """

    def __init__(self, text: Text, namespace: str, compute: str) -> None:
        self.text, self.ns, self.compute = text, namespace, compute

    def widen(self, dtype: str, stored: str, name: str = "x") -> str:
        """Elements of a dtype in the compute dtype; the name of the result."""
        if dtype == self.compute:
            return stored
        if dtype in self.text.converts:
            number = self._as("f32", self._bits(stored, NATIVE[dtype]))
            return self.text.let(name, number if self.compute == "f32" else self._as(self.compute, number))
        if dtype in FP8:
            return self._call(f"from_{dtype}", "code", stored, lambda: self._from_fp8(dtype), name)
        return self.text.let(name, self._as(self.compute, stored))

    def narrow(self, dtype: str, x: str) -> str:
        """Numbers of the compute dtype as elements of a dtype; text of the result."""
        row = dtype_of(dtype)
        if dtype == self.compute:
            return x
        if dtype == "bool":
            return self._as(dtype, f"({x} != 0.0)")
        if not row.is_float:
            return self._call(f"to_{dtype}", "x", x, lambda: self._to_integer(dtype), "stored")
        if dtype in FP8 and dtype not in self.text.converts:
            return self._call(f"to_{dtype}", "x", x, lambda: self._to_fp8(dtype), "stored")
        if self.compute == "f64" and dtype != "f32":
            x = self._call("cut_off", "x", x, self._cut_off, "cut")
        if dtype in FP8:
            return self._bits(f"{x}.to({self.ns}.{NATIVE[dtype]})", "uint8")
        return self._as(dtype, x)

    def held(self, dtype: str, x: str) -> str:
        """Numbers of the compute dtype, rounded to elements of a dtype; the name of the result."""
        return self.widen(dtype, self.narrow(dtype, x), "held")

    def _call(self, function: str, argument: str, value: str, write: Callable[[], str], name: str) -> str:
        """Calls a function of one argument, whose body is written once."""
        into = [self.text.name(name)]
        return self.text.call(function, {argument: value}, lambda: [write()], into)[0]

    def _as(self, dtype: str, x: str) -> str:
        return f"{x}.to({named(dtype, self.ns)})"

    def _bits(self, x: str, kind: str) -> str:
        return f"{x}.to({self.ns}.{kind}, bitcast=True)"

    def _to_integer(self, dtype: str) -> str:
        """Without the fraction, saturated; NaN becomes 0. Triton's numbers are float32: 2^31 - 1 is none."""
        row, ns, let = dtype_of(dtype), self.ns, self.text.let
        number = let("number", f"{ns}.where(x == x, x, 0.0)")
        least, above = row.least, row.largest + (dtype == "i32")
        inside = let("inside", f"{ns}.minimum({ns}.maximum({number}, {least}), {above})")
        if dtype == "i32":
            inside = let("inside", f"{ns}.minimum({inside}.to({ns}.int64), {int(row.largest)})")
        return let("whole", self._as(dtype, inside))

    def _cut_off(self) -> str:
        """float64 as float32 with the last bit set where inexact: a second rounding cannot meet a tie."""
        ns, let = self.ns, self.text.let
        near = let("near", f"x.to({ns}.float32)")
        back = let("back", f"{near}.to({ns}.float64)")
        bits = let("bits", self._bits(near, "int32"))
        below = f"{ns}.where({ns}.abs({back}) > {ns}.abs(x), {bits} - 1, {bits})"
        return let("cut", self._bits(f"({below} | ({back} != x).to({ns}.int32))", "float32"))

    def _from_fp8(self, dtype: str) -> str:
        """Both lie in the upper bits of a half; e4m3 has a bit of exponent less, and one NaN of each sign."""
        ns, let = self.ns, self.text.let
        bits = let("bits", f"code.to({ns}.int16)")
        if dtype == "f8e5m2":
            return let("x", self._as(self.compute, self._bits(f"({bits} << 8)", "float16")))
        half = self._bits(f"((({bits} & 0x7F) << 7) | (({bits} & 0x80) << 8))", "float16")
        x = let("x", f"{self._as(self.compute, half)} * 256.0")
        return let("x", f'{ns}.where(({bits} & 0x7F) == 0x7F, float("nan"), {x})')

    def _to_fp8(self, dtype: str) -> str:
        """As the CPU's storage does it: `Fp8` has the numbers."""
        fp8, ns, let = FP8[dtype], self.ns, self.text.let
        x = self._cut_off() if self.compute == "f64" else "x"
        bits = let("bits", self._bits(x, "int32"))
        size = let("size", f"{bits} & 0x7FFFFFFF")
        odd = f"(({size} >> {fp8.cut}) & 1)"
        normal = let("normal", f"({size} + {odd} - {-fp8.rounder}) >> {fp8.cut}")
        # Added to this number, a float loses the bits that a denormal result has not.
        total = let("total", f"{self._bits(size, 'float32')} + {fp8.unit!r}")
        small = let("small", f"{self._bits(total, 'int32')} - {fp8.denormal}")
        code = let("code", f"{ns}.minimum({ns}.where({size} < {fp8.normal}, {small}, {normal}), {fp8.top})")
        code = let("code", f"{ns}.where(x == x, {code}, {fp8.nan})")
        return let("code", f"({code} | (({bits} >> 24) & 0x80)).to({ns}.uint8)")
