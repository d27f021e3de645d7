"""Numbers with their units, as messages and reports show them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """`804 kB`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def count_text(count: float) -> str:
    """`2.51 million`."""
    return _scaled(count, ("", "thousand", "million", "billion", "trillion"))


def seconds_text(seconds: float) -> str:
    """`8.2 us`, `1.234 ms`."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    scale = 0
    while abs(count) >= 1000 and scale < len(units) - 1:
        count, scale = count / 1000, scale + 1
    return (f"{count:.3g} {units[scale]}" if scale else f"{count:.0f} {units[0]}").rstrip()
