"""Factors of `tf32x3`: an f32 as two numbers of 11 bits, multiplied on tensor cores in three products.

A tensor core adds eight products at a time, and cuts off what does not fit beside the largest of them and the
sum so far. So the sums of a step leave it and are added in f32; where the whole sum is short, the product of
the rounded factors leaves it after every eight: two sums a step of FINE_STEP, each with half of the weight.
"""

from __future__ import annotations

from fuseplan.backends.triton.text import Text
from fuseplan.packing import HALF_UNIT

FINE_STEP = 16  # a step of this depth or less is summed in two
FINE_DEPTH = 256  # sums shorter than this take such steps, to be as exact as IEEE's


def write_factors(text: Text, x: str, stem: str) -> None:
    """Writes `x_high`, which is x rounded to 11 bits, and `x_left`, which that leaves; x is `stem` there.

    An infinity is all in what is left: the other factor's whole stands against it, which has its sign.
    """
    high = f"{stem}_high"
    text.line(
        f"bits = ({x}.to(tl.int32, bitcast=True) + {HALF_UNIT}) & {-2 * HALF_UNIT}",
        f"{high} = bits.to(tl.float32, bitcast=True)",
        f"{high} = tl.where(tl.abs({high}) == float('inf'), 0.0, {high})",
        f"{stem}_left = {x} - {high}",
    )


def halves(depth: int) -> tuple[str, ...]:
    """The part of a step that each sum takes, as masks of the vector `depth`; none where the step is one."""
    middle = depth // 2
    return (f"(depth < {middle})", f"(depth >= {middle})") if depth <= FINE_STEP else ()
