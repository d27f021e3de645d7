"""What MIOpen published of its fusions, and the shapes it measured as plans."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

PLACE = Path(__file__).resolve().parent / "published.toml"
BATCH = 64
COMBINATIONS = {"CBA": "Convolution, bias, relu", "NA": "Batch normalization, relu"}


@dataclass(frozen=True)
class Published:
    """A shape, and how many times faster MIOpen reports fused to be than the operators one at a time.

    Attributes:
        combination: `CBA` or `NA`.
        channels, size: of src, which is square.
        table, table_wall: kernel and wall time in each row of its table of 2018 that has the shape.
        graph: kernel time in the graph of its documentation.
        features, kernel: of the convolution; None for NA.
    """

    combination: str
    channels: int
    size: int
    table: tuple[float, ...]
    table_wall: tuple[float, ...]
    graph: float
    features: int | None = None
    kernel: int | None = None

    @property
    def name(self) -> str:
        """As MIOpen labels it: channels, height, width; for CBA also features and kernel."""
        src = f"{self.channels}-{self.size}-{self.size}"
        return src if self.features is None else f"{src}-{self.features}-{self.kernel}x{self.kernel}"

    @property
    def kernel_speedup(self) -> float:
        """Of the table, kernel time: the geometric mean of its rows."""
        return geometric_mean(self.table)

    @property
    def wall_speedup(self) -> float:
        """Of the table, wall time."""
        return geometric_mean(self.table_wall)

    def plan(self, dtype: str, layout: str, batch: int = BATCH) -> str:
        """The plan's text."""
        src = f"{dtype}[{batch}x{self.channels}x{self.size}x{self.size}, {layout}]"
        if self.features is None:
            return f"{src} -> batch_norm -> relu"
        padding = ", padding=1" if self.kernel == 3 else ""
        return f"{src} -> conv2d({self.features}, kernel={self.kernel}{padding}) -> bias -> relu"


@functools.cache
def published() -> tuple[Published, ...]:
    """The 13 shapes of CBA, then the 8 of NA."""
    return tuple(
        Published(**{**entry, "table": tuple(entry["table"]), "table_wall": tuple(entry["table_wall"])})
        for entry in _read()["shape"]
    )


def sources() -> dict[str, str]:
    """Where the figures stand: of the `table`, and of the `graph`."""
    return dict(_read()["sources"])


def _read() -> dict[str, Any]:
    return tomllib.loads(PLACE.read_text(encoding="utf-8"))
