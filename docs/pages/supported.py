"""The supported table, asked of rules and templates: `python -m docs.pages.supported docs`.

Writes `supported.md` and `supported.json`. A row stands for the product of its combinations, layouts and
dtypes; `fuseplan.cli.combinations` asks for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from docs.pages.docstrings import prose
from fuseplan.bench.markdown import table
from fuseplan.cli.combinations import (
    ACTIVATIONS,
    AXES,
    COMBINATIONS,
    MODES,
    Cell,
    Geometry,
    Row,
    alike,
    cells,
    rows,
)
from fuseplan.kernels.target import parse_target

Value = TypeVar("Value", bound=Hashable)

TARGETS = ("cpu:avx2", "triton:sm_90", "triton:gfx942")
WRITTEN = "<!-- Written by `make docs` from rules and templates: change them. -->"
LETTERS = """\
Each letter of a combination is one operator: Convolution, Matmul (a linear layer), Bias, batch
Normalization, Activation, Scaled residual (`add`). A combination without a suffix is inference; `-train`
computes the statistics, and `-backward` computes the gradients. The table is made by asking the rules and
the templates' limits about probe plans. Tests run every cell: `tests/numeric/test_cells.py --whole` on a
CPU, `tests/device/test_cells.py` on a GPU for sm_90. `tests/crossbuild/test_cells.py` compiles some cells of
sm_90 and gfx942 on any machine; no kernel for gfx942 has run yet. `tests/test_supported.py` checks the
reason of each refusal. CPUs with other vectors than AVX2 support the same cells, except for the widths of
narrow groups."""


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


@cache
def asked(target: str) -> tuple[Cell, ...]:
    """The cells of a target."""
    return tuple(cells(parse_target(target)))


def takers(target: str, combination: str) -> tuple[str, ...]:
    """The templates that take a combination in some layout and dtype."""
    mine = (each for each in asked(target) if each.combination == combination and not each.code)
    return tuple(dict.fromkeys(each.template for each in mine))


def reasons(target: str, combination: str) -> tuple[str, ...]:
    """The codes of all refusals of a combination."""
    mine = (each.code for each in asked(target) if each.combination == combination)
    return tuple(dict.fromkeys(code for code in mine if code))


def summary() -> list[list[str]]:
    """A row for all combinations that agree: the templates of each target, or why there is none."""
    told = {name: tuple(_told(target, name) for target in TARGETS) for name in COMBINATIONS}
    return [[" ".join(names), *by_target] for names, (by_target,) in alike(told.items())]


def _told(target: str, combination: str) -> str:
    names = takers(target, combination)
    return ", ".join(names) if names else f"refused: {_linked(reasons(target, combination))}"


def _linked(codes: Iterable[str]) -> str:
    return ", ".join(f"[`{code}`](reference/reasons.md#{code})" for code in codes)


def page() -> str:
    """The table as Markdown."""
    lines = [WRITTEN, "", "# What is supported", "", LETTERS, ""]
    lines += table(["combination", *(f"`{name}`" for name in TARGETS)], summary())
    lines += ["", f"Layouts and dtypes stand below. Activations: {_listed(ACTIVATIONS)}."]
    lines += [f"Batch normalization: {_listed(MODES)}.", ""]
    lines += [
        "The tested values of each property of a convolution; the table says `any` where all are supported:",
        "",
    ]
    lines += [f"- {axis}: {', '.join(values)}" for axis, values in AXES.items()]
    for target in TARGETS:
        lines += _section(target)
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section(target: str) -> list[str]:
    every = list(rows(asked(target)))
    heads = ["combinations", "algorithm", "layouts", "dtypes", *AXES, "modes", "activations", "refuses with"]
    taken = [_taken(row) for row in every if not row.code]
    left: dict[tuple[str, ...], list[str]] = {}
    for row in every:
        if row.code:
            names, template, *rest = _where(row)
            left.setdefault((names, *rest, _linked([row.code])), []).append(template)
    refused = [[names, ", ".join(templates), *rest] for (names, *rest), templates in left.items()]
    return [
        *("", f"## {target}", ""),
        *table(heads, taken),
        *("", "Combinations that a template does not support, with the reason:", ""),
        *table(["combinations", "algorithm", "layouts", "dtypes", "reason"], refused),
    ]


def _where(row: Row) -> list[str]:
    return [" ".join(row.combinations), row.template, " ".join(row.layouts), " ".join(row.dtypes)]


def _taken(row: Row) -> list[str]:
    letters = "".join(row.combinations)
    axes = [row.axis(axis) if "C" in letters or axis == "channels" else "" for axis in AXES]
    modes = _but(row.modes) if "N" in letters else ""
    activations = _but(row.activations) if "A" in letters else ""
    codes = dict.fromkeys(code for _, _, code in row.refused)
    return [*_where(row), *axes, modes, activations, _linked(codes)]


def _but(missing: tuple[str, ...]) -> str:
    return prose(f"all but {_listed(missing)}") if missing else "all"


def document() -> str:
    """The table as JSON."""
    told = {
        "combinations": list(COMBINATIONS),
        "axes": {axis: list(values) for axis, values in AXES.items()},
        "targets": {target: [row.to_json() for row in rows(asked(target))] for target in TARGETS},
    }
    return _spread(told)


def _spread(told: dict[str, Any]) -> str:
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
    return {"supported.md": page(), "supported.json": document()}


if __name__ == "__main__":
    for name, text in written().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
