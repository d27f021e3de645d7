"""Transposes a square of vectors in registers: L vectors of L lanes, rows in, columns out.

Two levels, as the hardware has them: squares inside 128-bit lanes by interleaving, then the 128-bit lanes
themselves. For 16 floats that is 64 two-source shuffles, each one instruction on AVX-512; for 8 floats 24 on
AVX2.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import BITS, element_of, lanes_of

_LANE_BITS = 128


def transposed(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """Column i of the square whose rows are given, for each i."""
    lanes = lanes_of(rows[0].type)
    if lanes != len(rows):
        raise ValueError(f"a square has as many rows as lanes: got {len(rows)} rows of {lanes}")
    width = min(lanes, _LANE_BITS // BITS[element_of(rows[0].type)])
    groups = lanes // width
    # inner[g][q]: in 128-bit lane l, column l*width + q of rows g*width ... g*width + width - 1
    inner = [_square(b, rows[g * width : (g + 1) * width], width) for g in range(groups)]
    columns: list[Value | None] = [None] * lanes
    for q in range(width):
        for lane, column in enumerate(_lanes(b, [inner[g][q] for g in range(groups)], width)):
            columns[lane * width + q] = column
    return [column for column in columns if column is not None]


def _square(b: Builder, rows: Sequence[Value], width: int) -> list[Value]:
    """Transposes the width x width squares that stand in each 128-bit lane."""
    if width == 1:
        return list(rows)
    if width == 2:
        return [_interleaved(b, rows[0], rows[1], 1, high, 2) for high in (False, True)]
    low01, high01 = (_interleaved(b, rows[0], rows[1], 1, high, 4) for high in (False, True))
    low23, high23 = (_interleaved(b, rows[2], rows[3], 1, high, 4) for high in (False, True))
    pairs = ((low01, low23), (high01, high23))
    return [_interleaved(b, first, second, 2, high, 4) for first, second in pairs for high in (False, True)]


def _lanes(b: Builder, groups: Sequence[Value], width: int) -> list[Value]:
    """Vector l has 128-bit lane l of each group, in order."""
    if len(groups) == 1:
        return list(groups)
    if len(groups) == 2:
        return [_picked(b, groups[0], groups[1], (lane, 2 + lane), width) for lane in (0, 1)]
    halves = [
        [_picked(b, groups[g], groups[g + 1], lanes, width) for g in (0, 2)]
        for lanes in ((0, 1, 4, 5), (2, 3, 6, 7))
    ]
    return [
        _picked(b, first, second, lanes, width)
        for first, second in halves
        for lanes in ((0, 2, 4, 6), (1, 3, 5, 7))
    ]


def _interleaved(b: Builder, first: Value, second: Value, size: int, high: bool, width: int) -> Value:
    """In each 128-bit lane, blocks of `size` from the low or high half of first and second in turn."""
    lanes = lanes_of(first.type)
    picked: list[int] = []
    for start in range(0, lanes, width):
        half = start + (width // 2 if high else 0)
        for block in range(half, half + width // 2, size):
            picked += [block + i for i in range(size)] + [lanes + block + i for i in range(size)]
    return b.shuffle(first, second, picked)


def _picked(b: Builder, first: Value, second: Value, lanes: Sequence[int], width: int) -> Value:
    """128-bit lanes of first followed by second, picked by number."""
    return b.shuffle(first, second, [lane * width + i for lane in lanes for i in range(width)])
