"""The page that compares fuseplan with MIOpen's Fusion API: `python -m docs.pages.miopen docs`.

Writes `miopen.md` from `miopen.toml`, with MIOpen's published combinations beside the combinations that
rules and templates support: those of `supported.json`, which `docs.pages.supported` writes before.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docs.pages.supported import listed
from fuseplan.bench.markdown import table
from fuseplan.cli.combinations import ACTIVATIONS, AXES, MODES, Cell, alike

WRITTEN = "<!-- Written by `make docs` from docs/miopen.toml: change it there. -->"
COMBINATIONS = ("CB", "CA", "CBA", "CN", "CNA", "CBN", "CBNA", "CSBA", "NA", "NA-train", "NA-backward")
TARGETS = {"cpu:avx2": "fuseplan, CPU", "triton:sm_90": "fuseplan, NVIDIA GPU"}
ANSWERS = ("done", "better", "refused")
ABOUT = """\
This page lists every feature of MIOpen's Fusion API, the same feature of fuseplan, and the tests that
show it. `better` means that fuseplan does more than MIOpen; `refused` means that the call gives an error
with the reason."""
LETTERS = """\
Each letter is one operator: Convolution, Scaled residual, Bias, batch Normalization, Activation. fuseplan
computes any order as it is written; the table has MIOpen's orders. "Any convolution" means any filter,
stride, dilation, padding and groups, with one to three spatial axes, channels first or last. [What is
supported](supported.md) names the algorithm of each combination, on AMD GPUs too, and has a test for each
cell. Matrix products fuse as convolutions do."""

Told = dict[str, Any]


def told(folder: Path) -> Told:
    """The content of `miopen.toml`."""
    return tomllib.loads((folder / "miopen.toml").read_text(encoding="utf-8"))


def page(folder: Path) -> str:
    """The page of all rows."""
    data = told(folder)
    rows = data["row"]
    counted = ", ".join(f"{sum(each['answer'] == name for each in rows)} {name}" for name in ANSWERS)
    summary = f"Of {len(rows)} rows: {counted}."
    lines = [
        *(
            WRITTEN,
            "",
            "# Beside MIOpen's Fusion API",
            "",
            ABOUT,
            summary,
            "",
            "## Combinations",
            "",
            LETTERS,
            "",
        ),
        *_beside(data, folder),
        *("", "## Row by row", ""),
        *table(["", "of", "MIOpen has", "", "fuseplan", "tests"], [_row(each) for each in rows]),
        *("", "## Its table of supported fusions", ""),
        *_published(data),
    ]
    return "\n".join(lines) + "\n"


def _row(row: Told) -> list[str]:
    return [
        *(str(row["number"]), row["group"], row["has"], row["answer"], row["does"]),
        ", ".join(_linked(each) for each in row["tests"]),
    ]


def _linked(test: str) -> str:
    place, name = test.split("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{place})"


def _published(data: Told) -> Iterator[str]:
    yield f"As MIOpen's documentation {data['published-version']} prints it, row by row:"
    yield ""
    fields = ("combination", "dtypes", "algorithm", "stride", "filter", "modes", "activations", "other")
    yield from table(list(fields), [[row.get(name, "") for name in fields] for row in data["published"]])


def _beside(data: Told, folder: Path) -> Iterator[str]:
    """MIOpen's own words of each combination, and the part of it that each target supports."""
    heads = ["", f"MIOpen's table ({data['published-version']})", *TARGETS.values()]
    cells = [list(listed(folder, target)) for target in TARGETS]
    words = {name: (_theirs(data, name), *(_ours(taken, name) for taken in cells)) for name in COMBINATIONS}
    yield from table(heads, [[" ".join(names), *cells] for names, (cells,) in alike(words.items())])


def _theirs(data: Told, combination: str) -> str:
    """The rows of MIOpen's table for a combination, in words."""
    rows = [row for row in data["published"] if row["combination"] == combination]
    return "<br>".join(dict.fromkeys(_words(row) for row in rows)) or "not in it"


def _words(row: Told) -> str:
    filters = row.get("filter", "").split("; ")
    shown = f"{filters[0].split(', ')[0]} to {filters[-1]}" if len(filters) > 1 else filters[0]
    parts = (row.get("algorithm", ""), shown, row["dtypes"], f"activations: {row['activations']}")
    return "; ".join(part for part in parts if part)


def _ours(cells: Iterable[Cell], combination: str) -> str:
    """The cases of a combination that some template of a target takes, in words."""
    taken = [each for each in cells if each.combination == combination]
    if not taken:
        return "refused"
    parts = [_axes(taken)] if "C" in combination else []
    if "N" in combination:
        parts += [f"modes: {_all_of(MODES, [mode for each in taken for mode in each.modes])}"]
    if "A" in combination:
        parts += [
            f"activations: {_all_of(ACTIVATIONS, [name for each in taken for name in each.activations])}"
        ]
    parts += [", ".join(dict.fromkeys(each.dtype for each in taken))]
    return "; ".join([*parts, f"{len({each.layout for each in taken})} layouts"])


def _all_of(every: Iterable[str], found: list[str]) -> str:
    listed = [name for name in every if name in found]
    return f"all {len(listed)}" if listed == list(every) else ", ".join(listed)


def _axes(taken: list[Cell]) -> str:
    """The axes of a convolution on which some template takes every value that was asked for."""
    held = {(axis, getattr(each, axis)) for cell in taken for each in cell.taken for axis in AXES}
    whole = [axis for axis, values in AXES.items() if all((axis, value) in held for value in values)]
    return "any convolution" if whole == list(AXES) else f"any {', '.join(whole)}"


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    (docs / "miopen.md").write_text(page(docs), encoding="utf-8")
