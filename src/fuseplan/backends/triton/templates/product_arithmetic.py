"""Writes the products of one step of a matrix product, in each arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.triton.names import named
from fuseplan.backends.triton.templates.convolution_tiles import Knobs as ConvolutionKnobs
from fuseplan.backends.triton.templates.product_shape import Knobs as ProductKnobs
from fuseplan.backends.triton.templates.three_products import write_factors
from fuseplan.backends.triton.text import Text
from fuseplan.kernel import Kernel

Knobs = ProductKnobs | ConvolutionKnobs


def multiply(
    text: Text, knobs: Knobs, kernel: Kernel, x: str, weights: Sequence[str], *, small: str = ""
) -> None:
    """Adds the product of a tile of src and a tile of the weight to `total`.

    Args:
        text: takes the lines.
        knobs: the choice.
        kernel: what is computed.
        x: name of the tile of src.
        weights: names of the weight's tiles; for three products what it leaves, and its parts, behind it.
        small: name of the sum of the small ones of three products; "" adds them to `total` in each step.
    """
    arithmetic, compute = knobs.arithmetic, named(kernel.compute_dtype)
    if arithmetic == "tf32x3":
        _multiply_in_three(text, knobs, x, weights, small)
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


def _multiply_in_three(text: Text, knobs: Knobs, x: str, weights: Sequence[str], small: str) -> None:
    """x * w in three products of 11 bits each; the fourth, of what both leave, is below f32's bits.

    The weight comes in its factors, or, where it comes alone, is split as src is.
    """
    write_factors(text, x, "x")
    if len(weights) == 1:
        write_factors(text, weights[0], "w")
        weights = ("w_high", "w_left")
    w, w_left, *parts = weights
    pairs = [("x_left", w), ("x_high", w_left), *(("x_high", part) for part in parts or (w,))]
    products = [", ".join(_ordered(knobs, *pair)) for pair in pairs]
    if not small:  # as many sums as parts, each with one of the small products, leave the tensor core
        sums = ("part", "rest")[: len(parts) or 1]
        for place, factors in enumerate(products):
            name = sums[place % len(sums)]
            before = f", {name}" if place >= len(sums) else ""
            text.line(f'{name} = tl.dot({factors}{before}, input_precision="tf32")')
        text.line(*(f"total += {name}" for name in sums))
        return
    text.line(
        *(f'{small} = tl.dot({factors}, {small}, input_precision="tf32")' for factors in products[:2]),
        "# a tensor core cuts its sums: those of one step are added outside of it. Triton would move the",
        "# addition back inside if max_num_imprecise_acc, which says nothing of tf32, were not given.",
    )
    for factors in products[2:]:
        text.line(f'total += tl.dot({factors}, input_precision="tf32", max_num_imprecise_acc={knobs.depth})')
