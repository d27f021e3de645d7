"""Bar charts as SVG or PNG, with matplotlib, an optional package: the extra `plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseplan.errors import ArgumentError, installing

FORMATS = (".svg", ".png")
# Apart in brightness too, for print and for the colour-blind: ours dark, others light.
OURS, OURS_TOO, THEIRS, THEIRS_TOO, LINE, MARK = (
    "#2a6f97",
    "#7fb2cf",
    "#a39b8b",
    "#d8d3ca",
    "#444444",
    "#f4a261",
)
BAR_INCHES, GAP_INCHES = 0.14, 0.06
WIDTH_INCHES = 8.0


@dataclass(frozen=True)
class Series:
    """One figure of every row: a bar, or a mark on the row."""

    name: str
    color: str
    is_mark: bool = False


@dataclass(frozen=True)
class Bar:
    """One row: a length for each series, None where there is none."""

    label: str
    lengths: tuple[float | None, ...]


@dataclass(frozen=True)
class Panel:
    """Rows under one heading."""

    title: str
    bars: tuple[Bar, ...]


def speedups(
    panels: Sequence[Panel],
    series: Sequence[Series],
    title: str,
    note: str,
    place: Path,
    axis: str = "times faster than the operators one at a time",
) -> Path:
    """Draws ratios of times: one panel above the other, a line at 1.

    Args:
        panels: what to draw, one above the other.
        series: the bars of a row.
        title: what the chart shows.
        note: how it was measured.
        place: the file; its suffix says the format, .svg or .png.
        axis: what the ratios are.

    Returns:
        `place`.

    Raises:
        ArgumentError: another format, matplotlib is not installed, or the file cannot be written.
    """
    check_chart(place)
    import matplotlib

    # Neither a date nor random names: the same measurements give the same file. Text stays text.
    metadata = {"Date": None} if place.suffix.lower() == ".svg" else {}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fuseplan", "font.size": 9}):
        figure = _figure(panels, series, title, note, axis)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(place, metadata=metadata, bbox_inches="tight", dpi=144)
        except OSError as error:
            raise ArgumentError(f"cannot write the chart to {place}: {error}") from error
    return place


def check_chart(place: Path) -> None:
    """Checks that a chart can be drawn, before what it shows is measured.

    Raises:
        ArgumentError: the file's suffix says another format, or matplotlib is not installed.
    """
    if place.suffix.lower() not in FORMATS:
        raise ArgumentError(
            f"a chart is written as {' or '.join(FORMATS)}, not {place.suffix or place.name!r}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"charts need matplotlib: {installing('plot', 'matplotlib')}")


def _figure(panels: Sequence[Panel], series: Sequence[Series], title: str, note: str, axis: str) -> Any:
    from matplotlib.figure import Figure

    rows = [len(panel.bars) for panel in panels]
    row_inches = GAP_INCHES + BAR_INCHES * _bars(series)
    size = WIDTH_INCHES, row_inches * sum(rows) + 0.7 * len(rows) + 1.0
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel(note, fontsize=8, color=LINE, x=0.01, ha="left")
    made = figure.subplots(len(panels), 1, height_ratios=rows, squeeze=False, sharex=True)
    for axes, panel in zip(made[:, 0], panels, strict=True):
        _draw(axes, panel, series)
    made[-1, 0].set_xlabel(axis)
    drawn = [axes.get_legend_handles_labels() for axes in made[:, 0]]
    keys = {name: handle for handles, names in drawn for handle, name in zip(handles, names, strict=True)}
    figure.legend(list(keys.values()), list(keys), loc="outside lower right", fontsize=8, frameon=False)
    return figure


def _bars(series: Sequence[Series]) -> int:
    return sum(not each.is_mark for each in series)


def _draw(axes: Any, panel: Panel, series: Sequence[Series]) -> None:
    height = BAR_INCHES / (GAP_INCHES + BAR_INCHES * _bars(series))
    axes.set_title(panel.title, loc="left")
    for place, each in enumerate(series):
        apart = 0.0 if each.is_mark else (place - (_bars(series) - 1) / 2) * height
        told = [(row + apart, bar.lengths[place]) for row, bar in enumerate(panel.bars)]
        there = [(at, length) for at, length in told if length is not None]
        if not there:
            continue
        where, lengths = zip(*there, strict=True)
        if each.is_mark:
            axes.scatter(
                lengths, where, 70, each.color, marker="|", linewidths=2.0, label=each.name, zorder=3
            )
            continue
        drawn = axes.barh(where, lengths, height, color=each.color, label=each.name)
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=7, color=LINE)
    axes.axvline(1.0, color=LINE, linewidth=0.8)
    axes.set_yticks(list(range(len(panel.bars))), [bar.label for bar in panel.bars])
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
