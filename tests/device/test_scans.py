"""Sums along an axis on a GPU: in one block, block by block, and lines side by side."""

from itertools import product

import pytest

from device.repeats import assert_repeated
from device.test_numeric import KIND, _candidates
from fuseplan.backends.triton.templates.scan import GpuScan

DTYPES = ("f16", "bf16", "f32", "f64")
PLANS = (
    "[33x40] -> cumsum",
    "[1000x768] -> scale -> cumsum(reverse=True) -> gelu",
    "[3x70001] -> relu -> cumsum(exclusive=True)",
    "[8x131072] -> cumsum(exclusive=True, reverse=True)",
    "[70001x3] -> cumsum(0, reverse=True) -> add",
    "[513x129] -> bias -> cumsum(0)",
    "[3x301x70] -> cumsum(1, exclusive=True) -> tanh",
    "[2x40x57x55, nhwc] -> relu -> cumsum(2) -> bias",
    "[2x40x57x55, nhwc] -> cumsum(1, reverse=True)",
    "[2x30x50x7, strides=1:10000:200:20] -> add -> cumsum(1)",
)
CASES = [
    pytest.param(place, dtype + chain, id=f"{place}-{dtype}{chain}")
    for dtype, chain in product(DTYPES, PLANS)
    for place in range(len(_candidates(GpuScan, dtype + chain, KIND)))
]


@pytest.mark.parametrize(("place", "text"), CASES)
def test_every_output_is_within_the_bound(place: int, text: str) -> None:
    assert_repeated(GpuScan, place, text)
