"""Products of several channels at once: one instruction multiplies neighbours and adds them to a sum.

The weight has as many channels of a feature side by side as fill 4 bytes of src, as src has them: 4 bytes of
src are spread. Integers have sums of 32 bits, which are exact.

AVX-512's instruction of bf16 takes denormal numbers for 0, and gives 0 for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import vector
from fuseplan.backends.cpu.staging import Held, staged
from fuseplan.backends.cpu.sums import Operands, Sums, add_products
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Pad, Reshape, Step, Transpose
from fuseplan.kernels.target import Target
from fuseplan.language.bounds import EXACT_IN_I32, Bounds, bounds_of
from fuseplan.language.dtypes import dtype_of

_PAIR, _UNIT = 2, 4  # bytes of src, and of a sum


@dataclass(frozen=True)
class Dot:
    """How products are added to sums.

    Attributes:
        feature: LLVM's, of a processor that has the instruction.
        nbytes: of its vectors.
        dtype: of src's elements as it reads them.
        channels: that it adds to a sum.
        word: of the instruction; without one, src's numbers are spread and multiplied.
        speed: products a second over those of as long vectors of f32.
        sums: LLVM's type of a sum.
    """

    feature: str
    nbytes: int
    dtype: str
    channels: int
    word: str
    speed: float
    sums: str = "i32"

    @property
    def lanes(self) -> int:
        """Sums in a vector."""
        return self.nbytes // _UNIT

    @property
    def element(self) -> str:
        """LLVM's type of an element of src."""
        return f"i{8 * _UNIT // self.channels}"

    @property
    def is_apart(self) -> bool:
        """Whether a product is added to its sum by another instruction, which takes a cycle."""
        return not self.word or "pmadd" in self.word

    def unit(self, dtype: str) -> str:
        """LLVM's type of as many bits as channels of a feature have that are multiplied at once."""
        return f"i{8 * dtype_of(dtype).itemsize * self.channels}"

    def steps(self, run: int) -> int:
        """Instructions for so many products; the last may have zeros behind its channels."""
        return -(-run // self.channels)

    def holds(self, numbers: Bounds) -> bool:
        """Whether it multiplies all integers between two."""
        low, high = bounds_of(self.dtype)
        shift = self.shift(numbers)
        return low <= numbers[0] + shift and numbers[1] + shift <= high

    def shift(self, numbers: Bounds) -> int:
        """The number that is added to src's, so that 8 bits hold the integers between two."""
        return int(bounds_of(self.dtype)[0] - numbers[0]) if self.channels == _UNIT else 0


_OF_BF16 = Dot("+avx512bf16", 64, "bf16", 2, "x86.avx512bf16.dpbf16ps.512", 2.0, "float")
# A product and its sum share three units of AVX2's processors, and two of AVX-512's, of which f32 has two:
# 24 products a cycle beside 16, as measured on a Zen 3. Other speeds are those of the processors' documents.
_OF_INTEGERS = (
    Dot("+avx512vnni", 64, "u8", 4, "x86.avx512.vpdpbusd.512", 4.0),
    Dot("+avx512vnni", 64, "i16", 2, "x86.avx512.vpdpwssd.512", 2.0),
    Dot("+avx512bw", 64, "i16", 2, "x86.avx512.pmaddw.d.512", 1.0),
    Dot("+avxvnniint8", 32, "i8", 4, "x86.avx2.vpdpbssd.256", 4.0),
    Dot("+avxvnni", 32, "u8", 4, "x86.avx512.vpdpbusd.256", 4.0),
    Dot("+avxvnni", 32, "i16", 2, "x86.avx512.vpdpwssd.256", 2.0),
    Dot("+avx2", 32, "i16", 2, "x86.avx2.pmadd.wd", 1.5),
    Dot("+dotprod", 16, "i8", 4, "aarch64.neon.sdot.v4i32.v16i8", 4.0),
    Dot("+sse2", 16, "i16", 2, "x86.sse2.pmadd.wd", 1.5),
)


def of(kernel: Kernel, target: Target) -> Dot | None:
    """The best that the target has for the kernel's factors; None where sums are better made of others."""
    if kernel.contraction.pool is not None or kernel.contraction.is_transposed:
        return None
    if kernel.weight.dtype == "i8":
        is_exact = kernel.largest_sum < EXACT_IN_I32
        usual = Dot("", target.vector_bytes, "i32", 1, "", 1.0)
        rows = (*_OF_INTEGERS, usual) if is_exact else ()
        return next((each for each in rows if _has(target, each) and each.holds(kernel.factors)), None)
    is_bf16 = kernel.src.dtype == kernel.weight.dtype == "bf16" and kernel.compute_dtype == "f32"
    is_read = kernel.contraction.taps == 1 and not staged(kernel, held=Held("bf16", "i16")).copies
    return _OF_BF16 if is_bf16 and is_read and _has(target, _OF_BF16) else None


def pairs(kernel: Kernel, target: Target) -> Dot | None:
    """How pairs of integers of 16 bits are multiplied; None where the target cannot, or of others."""
    rows = (each for each in _OF_INTEGERS if each.channels == _PAIR and _has(target, each))
    return next(rows, None) if kernel.largest_sum else None


def fastest(target: Target) -> float:
    """Products of integers a second over those of vectors of f32, by the best that the target has."""
    return max((each.speed for each in _OF_INTEGERS if _has(target, each)), default=1.0)


def _has(target: Target, dot: Dot) -> bool:
    has_it = not dot.feature or dot.feature in target.features.split(",")
    return has_it and target.vector_bytes == dot.nbytes


def speed(dot: Dot, target: Target) -> float:
    """Products a second over those of vectors of f32: of bf16, AMD's do twice as many, Intel's half.

    Measured on a Zen 4 and a Xeon with many rows; with few, pairs read half of the bytes of the weight.
    """
    is_intels = {"+amx-tile", "-sse4a"} & set(target.features.split(","))
    return 0.5 if dot.sums == "float" and is_intels else dot.speed


def held(dot: Dot, kernel: Kernel) -> Held:
    """How the loops read src."""
    return Held(dot.dtype, dot.element, dot.shift(kernel.factors))


def run_of(conv: Contraction) -> int:
    """Products of a run: without groups or gaps, channels of neighbouring taps along a line follow others."""
    is_merged = conv.groups == 1 and conv.dilation[-1:] == (1,)
    return conv.channels_per_group * (conv.kernel[-1] if is_merged else 1)


def packed(dot: Dot, conv: Contraction, outer: tuple[int, ...], panel: int) -> tuple[Step, ...]:
    """From (.., tap, channel, feature of a panel) to (.., run, step, feature, channel of a step)."""
    run = run_of(conv)
    shape, count, at = (*outer, conv.depth // run), dot.steps(run), len(outer) + 1
    return (
        Reshape((*shape, run, panel)),
        Pad((*shape, count * dot.channels, panel)),
        Reshape((*shape, count, dot.channels, panel)),
        Transpose((*range(at), at, at + 2, at + 1)),
    )


def add(
    dot: Dot, sums: Sums, starts: Sequence[Value], run: int, operands: Callable[[Index], Operands]
) -> None:
    """Adds a run of products to the sums of some rows; `operands` of steps, which lie 4 bytes apart."""
    whole, left = divmod(run, dot.channels)
    add_whole(dot, sums, whole, operands)
    if not left:
        return
    b = sums.b
    vectors, _ = operands(whole)
    kind = f"i{8 * _UNIT // dot.channels * left}"

    def last(_: int, row: int) -> Value:
        """The last channels and zeros: nothing behind these is read."""
        at = b.at(starts[row], whole * dot.channels, dot.element)
        return b.splat(b.convert("zext", b.load(at, kind, align=1), "i32"), dot.lanes)

    add_whole(dot, sums, 1, lambda _: (vectors, last))


def add_whole(dot: Dot, sums: Sums, steps: int, operands: Callable[[Index], Operands]) -> None:
    """Adds the products of so many steps."""
    add_products(sums, steps, operands, partial(_product, dot))


def weights(dot: Dot, b: Builder, pointer: Value, dtype: str) -> Value:
    """A vector of the weight, widened where memory has it in fewer bits."""
    if dtype != "i8" or dot.channels == _UNIT:
        return b.load(pointer, vector(dot.lanes, "i32"))
    narrow = b.load(pointer, vector(dot.lanes * dot.channels, "i8"))
    return _cast(b, b.convert("sext", narrow, dot.element), vector(dot.lanes, "i32"))


def _product(dot: Dot, x: Value, y: Value, total: Value) -> Value:
    """total + x[0] * y[0] + x[1] * y[1] .. in each lane of 4 bytes."""
    b: Builder = total.builder
    if not dot.word:
        return total + x * y
    element = "bfloat" if dot.sums == "float" else dot.element
    given = [_cast(b, each, vector(dot.lanes * dot.channels, element)) for each in (x, y)]
    made = b.call(f"llvm.{dot.word}", total.type, *([] if dot.is_apart else [total]), *given)
    return total + made if dot.is_apart else made


def _cast(b: Builder, value: Value, kind: str) -> Value:
    return b.op(kind, f"bitcast {value.type} {value.name} to {kind}") if value.type != kind else value
