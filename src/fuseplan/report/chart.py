"""Bar charts as SVG or PNG, with matplotlib (an optional package: `pip install fuseplan[plot]`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseplan.errors import ArgumentError

FORMATS = (".svg", ".png")
OURS, THEIRS, LINE = (
    "#2a6f97",
    "#c9c4bb",
    "#444444",
)  # apart in brightness too, for print and for the colour-blind
ROW_INCHES = 0.34
WIDTH_INCHES = 8.0


@dataclass(frozen=True)
class Bar:
    """One row: our speedup, and the published one where there is one."""

    label: str
    ours: float
    published: float | None = None


@dataclass(frozen=True)
class Panel:
    """Rows under one heading."""

    title: str
    bars: tuple[Bar, ...]


def speedups(panels: Sequence[Panel], title: str, note: str, place: Path) -> Path:
    """Draws how many times faster fused is than the operators one at a time, beside published figures.

    Args:
        panels: what to draw, one above the other.
        title: what the chart shows.
        note: how it was measured.
        place: the file; its suffix says the format, .svg or .png.

    Returns:
        `place`.

    Raises:
        ArgumentError: another format, matplotlib is not installed, or the file cannot be written.
    """
    if place.suffix.lower() not in FORMATS:
        raise ArgumentError(
            f"a chart is written as {' or '.join(FORMATS)}, not {place.suffix or place.name!r}"
        )
    try:
        import matplotlib
    except ImportError as error:
        raise ArgumentError("charts need matplotlib: `pip install fuseplan[plot]`") from error
    # Neither a date nor random names: the same measurements give the same file. Text stays text.
    metadata = {"Date": None} if place.suffix.lower() == ".svg" else {}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fuseplan", "font.size": 9}):
        figure = _figure(panels, title, note)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(place, metadata=metadata, bbox_inches="tight", dpi=144)
        except OSError as error:
            raise ArgumentError(f"cannot write the chart to {place}: {error}") from error
    return place


def _figure(panels: Sequence[Panel], title: str, note: str) -> Any:
    from matplotlib.figure import Figure

    rows = [len(panel.bars) for panel in panels]
    size = WIDTH_INCHES, ROW_INCHES * (sum(rows) + 3 * len(rows) + 2)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel(note, fontsize=8, color=LINE, x=0.01, ha="left")
    made = figure.subplots(len(panels), 1, height_ratios=rows, squeeze=False, sharex=True)
    for axes, panel in zip(made[:, 0], panels, strict=True):
        _draw(axes, panel)
    made[-1, 0].set_xlabel("times faster than the operators one at a time")
    keys = {bar.get_label(): bar for bar in made[0, 0].containers}
    figure.legend(list(keys.values()), list(keys), loc="outside lower right", fontsize=8, frameon=False)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    rows = range(len(panel.bars))
    height = 0.4
    axes.set_title(panel.title, loc="left")
    places, lengths = [row - height / 2 for row in rows], [bar.ours for bar in panel.bars]
    ours = axes.barh(places, lengths, height, color=OURS, label="fuseplan, this machine's CPU")
    axes.bar_label(ours, fmt="%.2f", padding=2, fontsize=7)
    told = [
        (row + height / 2, bar.published) for row, bar in zip(rows, panel.bars, strict=True) if bar.published
    ]
    if told:
        where, published = zip(*told, strict=True)
        theirs = axes.barh(where, published, height, color=THEIRS, label="MIOpen, published, GPU")
        axes.bar_label(theirs, fmt="%.2f", padding=2, fontsize=7, color=LINE)
    axes.axvline(1.0, color=LINE, linewidth=0.8)
    axes.set_yticks(list(rows), [bar.label for bar in panel.bars])
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
