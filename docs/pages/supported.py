"""The supported table, asked of rules and templates: `python -m docs.pages.supported docs`.

Writes `supported.md` and `supported.json`. A row stands for the product of its combinations, layouts and
dtypes; `fuseplan.cli.combinations` asks for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from docs.pages.docstrings import prose
from fuseplan.backends import backend_of
from fuseplan.bench.markdown import table
from fuseplan.cli.combinations import (
    ACTIVATIONS,
    AXES,
    COMBINATIONS,
    MODES,
    Cell,
    Geometry,
    alike,
    cells,
    rows,
)
from fuseplan.kernels.target import parse_target

Value = TypeVar("Value", bound=Hashable)
Table = dict[str, Any]  # JSON: the whole table, or a row

TARGETS = ("cpu:avx2", "triton:sm_90", "triton:gfx942")
WRITTEN = "<!-- Written by `make docs` from rules and templates: change them. -->"
LETTERS = """\
Each letter of a combination is one operator: Convolution, Matmul (a linear layer), Bias, batch
Normalization, Activation, Scaled residual (`add`). A combination without a suffix is inference; `-train`
computes the statistics, and `-backward` computes the gradients. The table is made by asking the rules and
the templates' limits about probe plans. Tests run every cell: `tests/numeric/test_cells.py --whole` on a
CPU, `tests/device/test_cells.py` on a GPU for sm_90. `tests/crossbuild/test_cells.py` compiles some cells of
sm_90 and gfx942 on any machine; no kernel for gfx942 has run yet. `tests/test_supported.py --whole` checks
each cell, and the reason of each refusal. CPUs with other vectors than AVX2 support the same cells, except
for the widths of narrow groups."""


def listed(folder: Path, target: str) -> Iterator[Cell]:
    """The cells that the written table says are taken."""
    table = json.loads((folder / "supported.json").read_text(encoding="utf-8"))
    for row in table["targets"][target]:
        if "reason" in row:
            continue
        for combination, layout, dtype in product(row["combinations"], row["layouts"], row["dtypes"]):
            yield Cell(
                combination,
                row["algorithm"],
                layout,
                dtype,
                taken=tuple(Geometry(**each) for each in row["geometries"]),
                modes=tuple(row["modes"]),
                activations=tuple(row["activations"]),
            )


def takers(target: str, combination: str, told: Table) -> tuple[str, ...]:
    """The templates that take a combination in some layout and dtype, in their order."""
    found = {row["algorithm"] for row in _rows(told, target, combination) if "reason" not in row}
    templates = backend_of(parse_target(target).backend).templates
    return tuple(each.name for each in templates if each.name in found)


def reasons(target: str, combination: str, told: Table) -> tuple[str, ...]:
    """The codes of all refusals of a combination."""
    return tuple(dict.fromkeys(row["reason"] for row in _rows(told, target, combination) if "reason" in row))


def _rows(told: Table, target: str, combination: str) -> Iterator[Table]:
    return (row for row in told["targets"][target] if combination in row["combinations"])


def summary(told: Table) -> list[list[str]]:
    """A row for all combinations that agree: the templates of each target, or why there is none."""
    found = {name: tuple(_told(target, name, told) for target in TARGETS) for name in COMBINATIONS}
    return [[" ".join(names), *by_target] for names, (by_target,) in alike(found.items())]


def _told(target: str, combination: str, told: Table) -> str:
    names = takers(target, combination, told)
    return ", ".join(names) if names else f"refused: {_linked(reasons(target, combination, told))}"


def _linked(codes: Iterable[str]) -> str:
    return ", ".join(f"[`{code}`](reference/reasons.md#{code})" for code in codes)


def page(told: Table) -> str:
    """The table as Markdown."""
    lines = [WRITTEN, "", "# What is supported", "", LETTERS, ""]
    lines += table(["combination", *(f"`{name}`" for name in TARGETS)], summary(told))
    lines += ["", f"Layouts and dtypes stand below. Activations: {_listed(ACTIVATIONS)}."]
    lines += [f"Batch normalization: {_listed(MODES)}.", ""]
    lines += [
        "The tested values of each property of a convolution; the table says `any` where all are supported:",
        "",
    ]
    lines += [f"- {axis}: {', '.join(values)}" for axis, values in AXES.items()]
    for target in TARGETS:
        lines += _section(target, told["targets"][target])
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section(target: str, every: Sequence[Table]) -> list[str]:
    heads = ["combinations", "algorithm", "layouts", "dtypes", *AXES, "modes", "activations", "refuses with"]
    taken = [_taken(row) for row in every if "reason" not in row]
    left: dict[tuple[str, ...], list[str]] = {}
    for row in every:
        if "reason" in row:
            names, template, *rest = _where(row)
            left.setdefault((names, *rest, _linked([row["reason"]])), []).append(template)
    refused = [[names, ", ".join(templates), *rest] for (names, *rest), templates in left.items()]
    return [
        *("", f"## {target}", ""),
        *table(heads, taken),
        *("", "Combinations that a template does not support, with the reason:", ""),
        *table(["combinations", "algorithm", "layouts", "dtypes", "reason"], refused),
    ]


def _where(row: Table) -> list[str]:
    return [
        " ".join(row["combinations"]),
        row["algorithm"],
        " ".join(row["layouts"]),
        " ".join(row["dtypes"]),
    ]


def _taken(row: Table) -> list[str]:
    letters = "".join(row["combinations"])
    axes = [row[axis] if "C" in letters or axis == "channels" else "" for axis in AXES]
    modes = _but(MODES, row["modes"]) if "N" in letters else ""
    activations = _but(ACTIVATIONS, row["activations"]) if "A" in letters else ""
    return [*_where(row), *axes, modes, activations, _linked(row["reasons"])]


def _but(every: Iterable[str], taken: Sequence[str]) -> str:
    missing = [each for each in every if each not in taken]
    return prose(f"all but {_listed(missing)}") if missing else "all"


def document() -> Table:
    """The table as JSON values."""
    return {
        "combinations": list(COMBINATIONS),
        "axes": {axis: list(values) for axis, values in AXES.items()},
        "targets": {
            target: [row.to_json() for row in rows(cells(parse_target(target)))] for target in TARGETS
        },
    }


def spread(told: Table) -> str:
    """JSON with one row a line."""
    targets = ",\n".join(
        f"  {json.dumps(target)}: [\n   " + ",\n   ".join(map(json.dumps, listed)) + "\n  ]"
        for target, listed in told["targets"].items()
    )
    rest = ",\n".join(
        f" {json.dumps(key)}: {json.dumps(value)}" for key, value in told.items() if key != "targets"
    )
    return f'{{\n{rest},\n "targets": {{\n{targets}\n }}\n}}\n'


def written() -> dict[str, str]:
    """Each file's text by its name."""
    told = document()
    return {"supported.md": page(told), "supported.json": spread(told)}


if __name__ == "__main__":
    for name, text in written().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
