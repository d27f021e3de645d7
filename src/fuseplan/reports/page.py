"""A report as one page of HTML that needs nothing besides itself."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fuseplan.messages.quantities import bytes_text, seconds_text
from fuseplan.reports.report import (
    MeasuredRow,
    OperatorRow,
    ReasonRow,
    Report,
    SiteRow,
    listed,
    measured_text,
)
from fuseplan.system.gathering import gathered

STYLE, SCRIPT = (Path(__file__).with_name(f"page.{ending}") for ending in ("css", "js"))
NUMBERS = (3, 4, 5, 6)  # columns of the table of plans
HEAD = ("", "plan and kernel", "operators", "before", "after", "by the model", "measured")
STATES = ("fused", "left", "view", "folded")


def page(report: Report, title: str) -> str:
    """The page: a summary, the graph with a box a kernel, the plans, the reasons and the copies."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="dim">{escape(report.target)}, {escape(report.schema)}</p>',
            *_tiles(report),
            *_graph(report),
            *_plans(report),
            *_reverted(report),
            *_reasons("In no plan", report.left, "reason", " open"),
            *_reasons("Why plans end", report.ends, "reason end", ""),
            *_copies(report),
            f"</main><script>{SCRIPT.read_text()}</script></body></html>",
        ]
    )


def _tiles(report: Report) -> Iterator[str]:
    states = collections.Counter(row.state for row in report.operators)
    shares = "".join(f'<i class="{state}" style="flex:{states[state]}"></i>' for state in STATES)
    told = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    launches = report.launches
    by = {"kernels": launches.kernels, f"by {report.ours}": launches.numpy, "by copies": launches.copies}
    by |= {f"by {name}": count for name, count in launches.libraries.items()}
    after = ", ".join(f"{count} {word}" for word, count in by.items() if count)
    copied = bytes_text(sum(each.moved for each in report.copies))
    before = f"{bytes_text(report.moved_before)} → {bytes_text(report.moved_after)}"
    yield '<div class="tiles">'
    yield _tile("operators", str(len(report.operators)), told, shares)
    yield _tile(
        "launches", f"{launches.before} → {launches.after}", after, _share(launches.after, launches.before)
    )
    yield _tile(
        "traffic", before, f"{copied} of it by copies", _share(report.moved_after, report.moved_before)
    )
    yield "</div>"


def _tile(word: str, number: str, told: str, bar: str) -> str:
    head = f'<div class="card"><span class="dim">{word}</span><b>{escape(number)}</b>'
    return f'{head}<div class="dim">{escape(told)}</div><div class="bar">{bar}</div></div>'


def _share(part: int, whole: int) -> str:
    return f'<i style="flex:{part}"></i><span style="flex:{max(0, whole - part)}"></span>'


@dataclass
class _Box:
    """A kernel, or an operator that is in no plan, and the boxes whose values it reads."""

    name: str
    rank: int
    reads: list[str]
    html: str
    is_left: bool


def _graph(report: Report) -> Iterator[str]:
    yield '<h2>Graph</h2><p class="dim">A box is one launch; views and folded operators are not shown.'
    yield "A click unfolds a box.</p>"
    yield '<div class="legend"><span>a plan\'s kernel</span><span class="left">in no plan</span>'
    yield '<span class="skip">a value that is read further below</span></div>'
    yield '<div class="card" id="graph"><svg></svg>'
    for rank, boxes in sorted(gathered((box.rank, box) for box in _boxes(report)).items()):
        yield f'<div class="rank" data-rank="{rank}">'
        for box in boxes:
            kind, reads = "box left" if box.is_left else "box", " ".join(box.reads)
            yield f'<details class="{kind}" id="{box.name}" data-reads="{reads}">{box.html}</details>'
        yield "</div>"
    yield "</div>"


def _boxes(report: Report) -> list[_Box]:
    """The boxes with their ranks: each stands below all boxes that it reads."""
    rows = {row.name: row for row in report.operators}
    sites = {site.number: site for site in report.sites}
    places = {row.name: f"o{place}" for place, row in enumerate(report.operators)}
    at = {row.name: [f"s{number}" for number in row.sites] or [places[row.name]] for row in report.operators}
    running = [row for row in report.operators if row.state in ("fused", "left")]
    members = gathered((box, row) for row in running for box in at[row.name])
    found: dict[str, _Box] = {}
    for name, inside in members.items():
        site = sites.get(int(name[1:])) if name.startswith("s") else None
        html = _of_site(site, inside) if site else _of_operator(inside[0])
        reads = {box for row in inside for box in _read(row, rows, at)} - {name}
        found[name] = _Box(name, 0, sorted(reads & members.keys()), html, site is None)
    _rank(found)
    return list(found.values())


def _read(row: OperatorRow, rows: Mapping[str, OperatorRow], at: Mapping[str, list[str]]) -> Iterator[str]:
    """The boxes that an operator reads; through views, those of the values that they show."""
    for name in row.reads:
        if rows[name].state in ("fused", "left"):
            yield from at[name]
        else:
            yield from _read(rows[name], rows, at)


def _rank(boxes: Mapping[str, _Box]) -> None:
    """Gives each box the rank behind the last that it reads."""
    for _ in boxes:
        is_done = True
        for box in boxes.values():
            rank = max((boxes[name].rank + 1 for name in box.reads), default=0)
            is_done &= rank <= box.rank
            box.rank = max(rank, box.rank)
        if is_done:
            return


def _of_site(site: SiteRow, inside: Sequence[OperatorRow]) -> str:
    src, *ops = site.plan.split(" -> ")
    words = " → ".join(each.partition("(")[0] for each in ops)
    lines = [
        f"<p><code>{escape(site.plan)}</code></p>",
        f'<p class="dim">kernel</p><p><code>{escape(site.template)}</code></p>',
        f'<p class="dim">{bytes_text(site.before)} before, {bytes_text(site.after)} after; '
        f"{seconds_text(site.seconds)} by the model</p>",
        f'<p class="dim">{escape(measured_text(site.measured))}</p>' if site.measured else "",
        *map(_operator, inside),
        f'<p class="dim">ends: <code>{escape(site.code)}</code> {escape(site.got)}</p>',
    ]
    head = f'<span class="dim">{site.number}</span> {escape(words)} <code class="dim">{escape(src)}</code>'
    return _folded(head, lines)


def _of_operator(row: OperatorRow) -> str:
    lines = [_operator(row), f"<p><code>{escape(row.code)}</code> {escape(row.got)}</p>"]
    return _folded(f'{escape(row.kind)} <span class="dim">{escape(row.name)}</span>', lines)


def _folded(head: str, lines: Iterable[str]) -> str:
    return f'<summary>{head}</summary><div class="inside">{"".join(lines)}</div>'


def _operator(row: OperatorRow) -> str:
    line = f'<br><code class="dim">{escape(row.line)}</code>' if row.line else ""
    told = f'<span class="dim">{escape(row.kind)}, {bytes_text(row.moved)}</span>'
    return f"<p>{escape(row.name)} {told}{line}</p>"


def _plans(report: Report) -> Iterator[str]:
    """A row for each distinct plan, those that save the most bytes first."""
    alike = gathered(((site.plan, site.template), site) for site in report.sites)
    yield '<h2>Plans</h2><div class="card table"><table>'
    yield _row("th", HEAD, NUMBERS)
    for sites in sorted(alike.values(), key=lambda sites: sum(site.after - site.before for site in sites)):
        first = sites[0]
        plan = f'<code>{escape(first.plan)}</code><br><code class="dim">{escape(first.template)}</code>'
        names = escape(listed([", ".join(site.operators) for site in sites], 2))
        before, after = (sum(getattr(site, name) for site in sites) for name in ("before", "after"))
        seconds = seconds_text(sum(site.seconds for site in sites))
        numbers = listed([str(site.number) for site in sites], 3)
        cells = (numbers, plan, names, bytes_text(before), bytes_text(after), seconds, _gain(first.measured))
        yield _row("td", cells, NUMBERS)
    yield "</table></div>"


def _gain(measured: MeasuredRow | None) -> str:
    """The measured time, and how many times as fast as the framework it is."""
    if measured is None or measured.seconds is None:
        return ""
    gain = f'<br><span class="dim">{measured.gain:.2f} ×</span>' if measured.gain else ""
    return f"{seconds_text(measured.seconds)}{gain}"


def _reverted(report: Report) -> Iterator[str]:
    if not report.reverted:
        return
    yield '<h2>Left to the framework</h2><div class="card table"><table>'
    yield _row("th", ("plan", "operators", "why"))
    for each in report.reverted:
        why = f"<code>{escape(each.code)}</code> {escape(each.got)}"
        yield _row("td", (f"<code>{escape(each.plan)}</code>", escape(", ".join(each.operators)), why))
    yield "</table></div>"


def _row(kind: str, cells: Sequence[str], numbers: Sequence[int] = ()) -> str:
    classes = (" class=number" if place in numbers else "" for place in range(len(cells)))
    made = (f"<{kind}{named}>{cell}</{kind}>" for named, cell in zip(classes, cells, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def _reasons(title: str, reasons: Sequence[ReasonRow], kind: str, is_open: str) -> Iterator[str]:
    if reasons:
        yield f"<h2>{title}</h2>"
    for reason in reasons:
        between = f'<span class="dim">{bytes_text(reason.between)} between kernels</span>'
        yield f'<div class="card {kind}"><div class="head"><code>{escape(reason.code)}</code>'
        yield f"<span>{reason.count} ×</span>{between}</div><p>{escape(reason.sentence)}</p>"
        yield f'<p class="dim">{escape(reason.remedy)}</p><details{is_open}><summary>where</summary>'
        for what, names in reason.cases.items():
            yield f'<p>{escape(what)}: <span class="dim">{escape(", ".join(names))}</span></p>'
        yield "</details></div>"


def _copies(report: Report) -> Iterator[str]:
    if not report.copies:
        return
    yield '<h2>Copies</h2><div class="card table"><table>'
    yield _row("th", ("value", "bytes", "for"), numbers=(1,))
    for each in report.copies:
        yield _row(
            "td", (escape(each.value), bytes_text(each.moved), f"<code>{escape(each.reader)}</code>"), (1,)
        )
    yield "</table></div>"
