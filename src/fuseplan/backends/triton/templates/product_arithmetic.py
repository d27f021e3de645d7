"""Writes the products of one step of a sum, in each arithmetic.

`tf32x3` takes an f32 as two numbers of 11 bits and multiplies them on tensor cores in three products. A
tensor core adds eight products at a time, and cuts off what does not fit beside the largest of them and the
sum so far. So the sums of a step leave it and are added in f32; where the whole sum is short, the product of
the rounded factors leaves it after every eight: two sums a step of FINE_STEP, each with half of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.product_tiles import Knobs, sum_dtype
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import HALF_UNIT

FINE_STEP = 16  # a step of this depth or less is summed in two
FINE_DEPTH = 256  # sums shorter than this take such steps, to be as exact as IEEE's


def multiply(text: Text, knobs: Knobs, kernel: Kernel, x: str, weights: Sequence[str]) -> None:
    """Adds the product of a tile of src and a tile of the weight to `total`.

    Args:
        knobs: the choice; where products of `tf32x3` are `apart`, the small ones are added to `small`.
        x: name of the tile of src.
        weights: names of the weight's tiles; for three products what it leaves, and its parts, behind it.
    """
    arithmetic, sums, w = knobs.arithmetic, named(sum_dtype(knobs, kernel)), weights[0]
    if arithmetic == "tf32x3":
        _multiply_in_three(text, knobs, x, weights)
        return
    if arithmetic in ("ieee", "summed") and kernel.weight.dtype != kernel.compute_dtype:
        x, w = f"{x}.to({sums})", f"{w}.to({sums})"
    first, second = _ordered(knobs, x, w)
    if arithmetic == "summed":
        text.line(f"total += tl.sum({first}[:, :, None] * {second}[None, :, :], 1)")
    else:
        precision = "" if arithmetic == "native" else f', input_precision="{arithmetic}"'
        text.line(f"total = tl.dot({first}, {second}, total{precision}, out_dtype={sums})")


def halves(knobs: Knobs) -> tuple[str, ...]:
    """The part of a step that each sum takes, as masks of the vector `depth`; none where the step is one."""
    middle = knobs.depth // 2
    is_fine = knobs.is_halved and knobs.depth <= FINE_STEP and not knobs.maps
    return (f"(depth < {middle})", f"(depth >= {middle})") if is_fine else ()


def _ordered(knobs: Knobs, x: str, w: str) -> tuple[str, str]:
    """The factors as the product has them."""
    return (w, x) if knobs.swapped else (x, w)


def _multiply_in_three(text: Text, knobs: Knobs, x: str, weights: Sequence[str]) -> None:
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
    if not knobs.apart:  # as many sums as parts, each with one of the small products, leave the tensor core
        sums = ("partial", "rest")[: len(parts) or 1]
        for place, factors in enumerate(products):
            name = sums[place % len(sums)]
            before = f", {name}" if place >= len(sums) else ""
            text.line(f'{name} = tl.dot({factors}{before}, input_precision="tf32")')
        text.line(*(f"total += {name}" for name in sums))
        return
    text.line(
        *(f'small = tl.dot({factors}, small, input_precision="tf32")' for factors in products[:2]),
        "# a tensor core cuts its sums: those of one step are added outside of it. Triton would move the",
        "# addition back inside if max_num_imprecise_acc, which says nothing of tf32, were not given.",
    )
    for factors in products[2:]:
        text.line(f'total += tl.dot({factors}, input_precision="tf32", max_num_imprecise_acc={knobs.depth})')


def write_factors(text: Text, x: str, stem: str) -> None:
    """Writes `x_high`, which is x rounded to 11 bits, and `x_left`, which that leaves; x is `stem` there.

    An infinity is all in what is left: the other factor's whole stands against it, which has its sign.
    """
    high = f"{stem}_high"
    text.line(
        f"{high} = ({x}.to(tl.int32, bitcast=True) + {HALF_UNIT}) & {-2 * HALF_UNIT}",
        f"{high} = {high}.to(tl.float32, bitcast=True)",
        f"{high} = tl.where(tl.abs({high}) == float('inf'), 0.0, {high})",
        f"{stem}_left = {x} - {high}",
    )
