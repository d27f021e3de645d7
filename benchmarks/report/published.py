"""docs/published.md and its charts: `python -m benchmarks.report.published RESULTS PAGE`.

Of each device and thread count it shows the last recorded run of `fuseplan bench published`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks import recorded as results
from benchmarks.recorded import device_of
from benchmarks.report.chart import OURS, OURS_TOO, THEIRS, THEIRS_TOO, Bar, Panel, Series, speedups
from benchmarks.shapes import COMBINATIONS, Published, published, sources
from benchmarks.suite import PUBLISHED_AIMS, UNFUSED
from fuseplan.bench.markdown import table
from fuseplan.bench.results import Row
from fuseplan.bench.table import is_on_gpu, lines
from fuseplan.errors import counted

WRITTEN = "<!-- Written by `make docs` from benchmarks/results: measure again, do not edit. -->"
FILES = "published_*.jsonl"
CHARTS = "charts"  # the folder beside the page
KERNEL = (Series("fuseplan, kernel time", OURS), Series("MIOpen, published, kernel time", THEIRS))
WALL = (Series("fuseplan, wall time", OURS_TOO), Series("MIOpen, published, wall time", THEIRS_TOO))

INTRODUCTION = """\
MIOpen published how much faster its fused kernels are than separate operators: 13 convolutions with bias
and activation (CBA) and 8 batch normalizations with activation (NA), with 64 images each. `fuseplan bench
published` measures the same shapes. Every figure on this page comes from its recorded results.

- **Fused** is the plan as one kernel of fuseplan. **One at a time** is the fastest set of separate
  kernels of other libraries, never of fuseplan: eager torch with one call per operator, in place where
  possible; on a CPU also onnxruntime without graph optimizations. If the plan has channels last, torch
  runs with channels first (`nchw`) or last (`nhwc`), whichever is faster. If the plan has channels first,
  torch has channels first too; the column *either layout* is the ratio with the other layout allowed, its
  conversions not counted.
- **The fastest other** is the fastest library that computes the plan in its own best way, fused where
  possible: cuDNN's and cuBLASLt's fused kernels and torch.compile on a GPU; onnxruntime, openvino and
  torch.compile on a CPU. ncnn takes one image per call and is not measured.
- **Kernel time** on a GPU lies between CUDA events around a call, with a cold L2 cache. **Wall time** is
  the time on the host's clock from the call until its result is available. On a CPU both are the same.
- [Measured](measured.md) describes the measurement and the checks.
- MIOpen's speedups are its own, in f32, on a GPU that it does not name. Its table has several rows for
  some NA shapes, with different times; this page shows their geometric mean."""


@dataclass(frozen=True)
class Point:
    """A published shape in one dtype and layout.

    Attributes:
        shape, group: which.
        ours, unfused, other: our row, the fastest of one operator at a time, the fastest other library's.
        waited: the least wall time of one operator at a time, which another form of it may have.
        anyhow: the least kernel time of one operator at a time, its tensors in either layout.
    """

    shape: Published
    group: str
    ours: Row
    unfused: Row
    waited: float | None
    anyhow: float
    other: Row | None

    @property
    def kernel(self) -> float:
        """How many times faster fused is, kernel time."""
        return _seconds(self.unfused) / _seconds(self.ours)

    @property
    def wall(self) -> float | None:
        """How many times faster fused is, wall time; None where it was not measured apart."""
        if self.waited is None or self.ours.latency is None:
            return None
        return self.waited / self.ours.latency

    @property
    def ahead(self) -> float | None:
        """The fastest other's time over ours."""
        return None if self.other is None else _seconds(self.other) / _seconds(self.ours)


def points(rows: Iterable[Row]) -> list[Point]:
    """What rows of one device and thread count say; shapes without both times are left out."""
    shapes = {(each.combination, each.name): each for each in published()}
    rows, found = sorted(rows, key=lambda row: row.group), []
    for line in lines(rows):
        unfused = min(filter(_is_unfused, line.peers), key=_seconds, default=None)
        others = [row for row in line.peers if not _is_unfused(row)]
        walls = [row.latency for row in line.peers if _is_unfused(row) and row.latency is not None]
        if line.ours.median and unfused is not None:
            shape = shapes[line.group.split(",")[0], line.case]
            other = min(others, key=_seconds, default=None)
            anyhow = min(
                row.median for row in rows if row.plan == line.ours.plan and _is_unfused(row) and row.median
            )
            waited = min(walls, default=None)
            found.append(Point(shape, line.group, line.ours, unfused, waited, anyhow, other))
    return found


def _is_unfused(row: Row) -> bool:
    return row.peer.split(":")[0] == UNFUSED


def _seconds(row: Row) -> float:
    assert row.median is not None  # lines hold timed rows only
    return row.median


def page(folder: Path) -> str:
    """The page, from the files of results in a folder."""
    told = [line for device, found in _devices(folder) for line in _section(device, found)]
    listed = [f"- {name}: {where}." for name, where in sources().items()]
    head = [WRITTEN, "", "# MIOpen's published fusions, measured here", "", INTRODUCTION, ""]
    return "\n".join([*head, "Sources of MIOpen's figures:", "", *listed, *told]) + "\n"


def charts(folder: Path, place: Path) -> list[Path]:
    """Draws two charts a device, CBA and NA, into a folder.

    Args:
        folder: of results.
        place: where the charts go.

    Raises:
        ArgumentError: matplotlib is not installed, or a file cannot be written.
    """
    return [
        _chart(device, [each for each in found if each.shape.combination == combination], place)
        for device, found in _devices(folder)
        for combination in _combinations(found)
    ]


def _combinations(found: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(each.shape.combination for each in found))


def _devices(folder: Path) -> Iterator[tuple[str, list[Point]]]:
    """A device with its thread count, and its points."""
    rows = [row for place in sorted(folder.glob(FILES)) for row in results.latest(results.read(place))]
    named: dict[str, list[Row]] = {}
    for row in rows:
        named.setdefault(_device(row), []).append(row)
    for device in sorted(named):
        if found := points(named[device]):
            yield device, found


def _device(row: Row) -> str:
    device = device_of(row.machine)
    return device if is_on_gpu(row) else f"{device}, {counted(row.threads, 'thread')}"


def chart_name(device: str, combination: str) -> str:
    """The file of a chart: `published-<device>-cba.svg`."""
    slug = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"published-{slug}-{combination.lower()}.svg"


def _chart(device: str, found: Sequence[Point], place: Path) -> Path:
    has_wall = any(each.wall for each in found)
    panels = []
    for group in dict.fromkeys(each.group for each in found):
        mine = [each for each in found if each.group == group]
        panels.append(Panel(_titled(mine), tuple(_bar(each, has_wall) for each in mine)))
    series = [KERNEL[0], WALL[0], KERNEL[1], WALL[1]] if has_wall else list(KERNEL)
    combination = found[0].shape.combination
    when = max(each.ours.run for each in found)[:10]
    note = f"{device}, {when}; batch 64, medians. MIOpen: its table of 2018."
    title = f"{COMBINATIONS[combination]}: one fused kernel"
    return speedups(panels, series, title, note, place / chart_name(device, combination))


def _titled(found: Sequence[Point]) -> str:
    form = found[0].group.split(", ")[1]
    told = geometric_mean(each.kernel for each in found)
    theirs = geometric_mean(each.shape.kernel_speedup for each in found)
    return f"{form}: {told:.2f} in geometric mean; MIOpen {theirs:.2f}"


def _bar(point: Point, has_wall: bool) -> Bar:
    shape = point.shape
    if not has_wall:
        return Bar(shape.name, (point.kernel, shape.kernel_speedup))
    return Bar(shape.name, (point.kernel, point.wall, shape.kernel_speedup, shape.wall_speedup))


def _section(device: str, found: Sequence[Point]) -> Iterator[str]:
    ours = found[0].ours
    target = "cuda" if is_on_gpu(ours) else "cpu"
    option = "" if target == "cuda" else f" --threads {ours.threads}"
    rows = [row for each in found for row in _rows(each)]
    versions = {name: told for row in rows for name, told in row.versions.items()}
    when = f"{max(row.run for row in rows)[:10]}, {results.commits(rows)}"
    yield from ("", f"## {device}", "")
    yield f"`fuseplan bench published --target {target}{option}`. {when}; " + (
        ", ".join(f"{name} {version}" for name, version in versions.items()) + "." + _quiet(found)
    )
    for combination in _combinations(found):
        yield from ("", f"![{COMBINATIONS[combination]}]({CHARTS}/{chart_name(device, combination)})")
    yield from ("", *_means(found))
    for group in dict.fromkeys(each.group for each in found):
        yield from ("", f"### {group}", "")
        yield from _shapes([each for each in found if each.group == group])
    yield from _losses(found)


def _rows(point: Point) -> Iterator[Row]:
    yield from (point.ours, point.unfused)
    if point.other is not None:
        yield point.other


def _quiet(found: Sequence[Point]) -> str:
    shares = [row.others for each in found for row in _rows(each) if row.others is not None]
    return f" Other programs used {sum(shares) / len(shares):.0%} of the machine." if shares else ""


def _means(found: Sequence[Point]) -> Iterator[str]:
    """Geometric means of each group, beside MIOpen's and what we want."""
    heads = ["geometric means", "shapes", "kernel time", "wanted", "least", "either layout", "wall time",
             "MIOpen's, kernel", "MIOpen's, wall", "fastest other / ours", "least"]  # fmt: skip
    rows = []
    aims = PUBLISHED_AIMS["cuda" if is_on_gpu(found[0].ours) else "cpu"]
    for group in dict.fromkeys(each.group for each in found):
        mine = [each for each in found if each.group == group]
        kernel, walls = [each.kernel for each in mine], [each.wall for each in mine if each.wall]
        ahead = [each.ahead for each in mine if each.ahead]
        wanted = aims.get(mine[0].shape.combination)
        anyhow = [each.anyhow / _seconds(each.ours) for each in mine]
        shapes = [each.shape for each in mine]
        rows.append([
            group, str(len(mine)), f"{geometric_mean(kernel):.2f}", "" if wanted is None else f"{wanted:.2f}",
            f"{min(kernel):.2f}", _mean(anyhow), _mean(walls),
            _mean([each.kernel_speedup for each in shapes]), _mean([each.wall_speedup for each in shapes]),
            _mean(ahead), f"{min(ahead):.2f}" if ahead else "",
        ])  # fmt: skip
    yield from table(heads, rows)


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}" if ratios else ""


def _shapes(found: Sequence[Point]) -> Iterator[str]:
    has_wall = any(each.wall for each in found)
    is_gpu = is_on_gpu(found[0].ours)
    unit, scale = ("us", 1e6) if is_gpu else ("ms", 1e3)
    heads = ["shape", f"fused, {unit}", f"one at a time, {unit}", "times faster",
             *(["fused, wall", "one at a time, wall", "times faster"] if has_wall else []),
             f"fastest other, {unit}", "over ours", "MIOpen's table", "its wall time",
             "its graph"]  # fmt: skip
    yield from table(heads, [_cells(each, scale, has_wall) for each in found])


def _cells(point: Point, scale: float, has_wall: bool) -> list[str]:
    def shown(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * scale:.{1 if scale > 1e4 else 2}f}"

    def named(row: Row) -> str:
        return f"{shown(row.median)} ({row.peer.removeprefix(f'{UNFUSED}:')})"

    shape, other = point.shape, point.other
    cells = [shape.name, shown(point.ours.median), named(point.unfused), f"{point.kernel:.2f}"]
    if has_wall:
        cells += [shown(point.ours.latency), shown(point.waited), f"{point.wall or 0:.2f}"]
    cells += [named(other), f"{point.ahead:.2f}"] if other is not None else ["", ""]
    return [*cells, f"{shape.kernel_speedup:.2f}", f"{shape.wall_speedup:.2f}", f"{shape.graph:.2f}"]


def _losses(found: Sequence[Point]) -> Iterator[str]:
    """Where fusing loses, where another library is faster, and where MIOpen's own figure is not reached."""
    told = {
        "Fused is slower than one at a time": [each for each in found if each.kernel < 1],
        "Another library is faster": [each for each in found if (each.ahead or 1.0) < 1],
        "Fusing gains less than in MIOpen's table": [
            each for each in found if each.kernel < each.shape.kernel_speedup
        ],
    }
    yield ""
    for what, listed in told.items():
        names = [f"{each.shape.name} ({each.group.split(', ')[1]})" for each in listed]
        yield f"- {what}: {', '.join(names) if names else 'nowhere'}."
    if is_on_gpu(found[0].ours):
        yield from ("", "[Measured](measured.md) lists the attempts on these shapes.")


if __name__ == "__main__":
    where, written = Path(sys.argv[1]), Path(sys.argv[2])
    written.write_text(page(where), encoding="utf-8")
    for drawn in charts(where, written.parent / CHARTS):
        print(drawn)
