"""Products of bf16 by pairs: one instruction of AVX-512 multiplies two channels and adds both to a sum.

The weight has two channels of a feature side by side, as src has them: a vector holds 16 features, and
4 bytes of src are spread. The instruction takes denormal numbers for 0, and gives 0 for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuseplan.backends.cpu import staging
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.sums import Operands, Sums, add_products
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Pad, Reshape, Step, Transpose
from fuseplan.kernels.target import Target

_BYTES = 64  # of the vectors that are multiplied so


def fits(kernel: Kernel, target: Target) -> bool:
    """Whether src lies as the instruction reads it, and the target has it: products, and 1x1 kernels."""
    is_bf16 = kernel.src.dtype == kernel.weight.dtype == "bf16" and kernel.compute_dtype == "f32"
    has_it = "+avx512bf16" in target.features.split(",") and target.vector_bytes == _BYTES
    is_read = kernel.contraction.taps == 1 and not staging.staged(kernel, stored=True).copies
    return is_bf16 and has_it and is_read


def speed(target: Target) -> float:
    """Products by pairs a second over products of f32: AMD's processors do twice as many, Intel's half.

    Measured on a Zen 4 and a Xeon with many rows; with few, pairs read half of the bytes of the weight.
    """
    return 0.5 if {"+amx-tile", "-sse4a"} & set(target.features.split(",")) else 2.0


def count(conv: Contraction) -> int:
    """Pairs of channels; the last may be one channel and a zero."""
    return -(-conv.channels_per_group // 2)


def steps(shape: tuple[int, ...]) -> tuple[Step, ...]:
    """From (.., channel, feature of a panel) to (.., pair of channels, feature, channel of the pair)."""
    *outer, channels, panel = shape
    half, at = -(-channels // 2), len(outer)
    return (
        Pad((*outer, 2 * half, panel)),
        Reshape((*outer, half, 2, panel)),
        Transpose((*range(at), at, at + 2, at + 1)),
    )


def add(
    sums: Sums, starts: Sequence[Value], conv: Contraction, operands: Callable[[Index], Operands]
) -> None:
    """Adds all products of some rows; `operands` of pairs, which lie 4 bytes apart."""
    whole = conv.channels_per_group // 2
    add_products(sums, whole, operands, _product)
    if conv.channels_per_group % 2 == 0:
        return
    b = sums.b
    vectors, _ = operands(whole)

    def last(_: int, row: int) -> Value:
        """The last channel and a zero: nothing behind it is read."""
        one = b.convert("zext", b.load(b.at(starts[row], 2 * whole, "i16"), "i16"), "i32")
        return b.splat(b.convert("bitcast", one, b.element))

    add_products(sums, 1, lambda _: (vectors, last), _product)


def _product(x: Value, y: Value, total: Value) -> Value:
    """total + x[0] * y[0] + x[1] * y[1] in each lane of 4 bytes."""
    b: Builder = total.builder
    wide, word = "<32 x bfloat>", "llvm.x86.avx512bf16.dpbf16ps.512"
    b.module.declarations.add(f"declare {total.type} @{word}({total.type}, {wide}, {wide})")
    first, second = (b.op(wide, f"bitcast {each.type} {each.name} to {wide}") for each in (x, y))
    given = f"{total.type} {total.name}, {wide} {first.name}, {wide} {second.name}"
    return b.op(total.type, f"call {total.type} @{word}({given})")
