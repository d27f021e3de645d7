"""Writes the products of one step of a matrix product, in each arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.triton.templates.product_shape import Knobs, is_halved
from fuseplan.backends.triton.templates.three_products import write_factors
from fuseplan.backends.triton.text import Text
from fuseplan.kernel import Kernel

TRITON_TYPES = {"f64": "tl.float64", "f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16"}


def multiply(text: Text, knobs: Knobs, kernel: Kernel, x: str, weights: Sequence[str]) -> None:
    """Adds the product of a tile of src and a tile of the weight to `total`, or to `total` and `small`.

    Args:
        text: takes the lines.
        knobs: the choice.
        kernel: what is computed.
        x: name of the tile of src.
        weights: names of the weight's tiles: see `ProductWriter`.
    """
    arithmetic, compute = knobs.arithmetic, TRITON_TYPES[kernel.compute_dtype]
    if arithmetic == "tf32x3":
        _multiply_in_three(text, knobs, x, weights)
    elif arithmetic == "summed":
        first, second = _ordered(knobs, x, weights[0])
        text.line(f"total += tl.sum({first}[:, :, None] * {second}[None, :, :], 1)")
    else:
        w = weights[0]
        if arithmetic == "ieee" and kernel.src.dtype != kernel.compute_dtype:
            x, w = f"{x}.to({compute})", f"{w}.to({compute})"
        precision = "" if arithmetic == "native" else f', input_precision="{arithmetic}"'
        product = ", ".join(_ordered(knobs, x, w))
        text.line(f"total = tl.dot({product}, total{precision}, out_dtype={compute})")


def _ordered(knobs: Knobs, x: str, w: str) -> tuple[str, str]:
    """The factors as the product has them."""
    return (w, x) if knobs.swapped else (x, w)


def _multiply_in_three(text: Text, knobs: Knobs, x: str, weights: Sequence[str]) -> None:
    """x * w in three products of 11 bits each; the fourth, of what both leave, is below f32's bits.

    The weight comes in its factors, or, where features stand first, is split as src is.
    """
    write_factors(text, x, "x")
    if not is_halved(knobs):
        write_factors(text, weights[0], "w")
        weights = ("w_high", "w_left")
    w, w_left, *parts = weights
    left, other = _ordered(knobs, "x_left", w), _ordered(knobs, "x_high", w_left)
    tf32 = 'input_precision="tf32"'
    text.line(
        f"small = tl.dot({', '.join(left)}, small, {tf32})",
        f"small = tl.dot({', '.join(other)}, small, {tf32})",
        "# a tensor core cuts its sums: those of one step are added outside of it. Triton would move the",
        "# addition back inside if max_num_imprecise_acc, which says nothing of tf32, were not given.",
    )
    for part in parts or (w,):
        large = ", ".join(_ordered(knobs, "x_high", part))
        text.line(f"total += tl.dot({large}, {tf32}, max_num_imprecise_acc={knobs.depth})")
