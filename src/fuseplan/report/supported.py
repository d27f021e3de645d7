"""The supported table, asked of rules and templates: `python -m fuseplan.report.supported docs`.

Writes `supported.md` and `supported.json`. A row stands for the product of its combinations, layouts and
dtypes; `fuseplan.report.combinations` asks for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fuseplan.report.combinations import ACTIVATIONS, AXES, COMBINATIONS, MODES, Cell, Geometry, cells
from fuseplan.report.docstrings import prose, table
from fuseplan.target import parse_target

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


@dataclass(frozen=True)
class Row:
    """Cells that agree: every combination in every layout and dtype.

    Attributes:
        template: which.
        combinations, layouts, dtypes: their product are the cells.
        code: why none of them is taken; else empty.
        refused: axes and values that are not taken, with the reason's code.
        modes, activations: those that are not taken.
        taken: geometries that are taken, which tests run.
    """

    template: str
    combinations: tuple[str, ...]
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    code: str
    refused: tuple[tuple[str, str, str], ...]
    modes: tuple[str, ...]
    activations: tuple[str, ...]
    taken: tuple[Geometry, ...]

    def axis(self, name: str) -> str:
        """What is taken on an axis: `any`, or the values."""
        out = {value for axis, value, _ in self.refused if axis == name}
        return ", ".join(value for value in AXES[name] if value not in out) if out else "any"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, with what is taken on each axis."""
        told: dict[str, Any] = {
            "algorithm": self.template,
            "combinations": list(self.combinations),
            "layouts": list(self.layouts),
            "dtypes": list(self.dtypes),
        }
        if self.code:
            return told | {"reason": self.code}
        return told | {
            **{axis: self.axis(axis) for axis in AXES},
            "modes": [mode for mode in MODES if mode not in self.modes],
            "activations": [name for name in ACTIVATIONS if name not in self.activations],
            "reasons": list(dict.fromkeys(code for _, _, code in self.refused)),
            "geometries": [each.to_json() for each in self.taken],
        }


@cache
def asked(target: str) -> tuple[Cell, ...]:
    """The cells of a target."""
    return tuple(cells(parse_target(target)))


def rows(found: Iterable[Cell]) -> Iterator[Row]:
    """Cells that agree in one row."""
    same: dict[Any, list[Cell]] = {}
    for each in found:
        key = (each.template, each.code, each.refused, *_missing(each), each.taken)
        same.setdefault(key, []).append(each)
    for (template, code, *rest), held in same.items():
        places: dict[str, tuple[tuple[str, str], ...]] = {}
        for each in held:
            places[each.combination] = (*places.get(each.combination, ()), (each.layout, each.dtype))
        for names, where in alike(places):
            dtypes_of: dict[str, tuple[str, ...]] = {}
            for layout, dtype in where:
                dtypes_of[layout] = (*dtypes_of.get(layout, ()), dtype)
            for layouts, dtypes in alike(dtypes_of):
                yield Row(template, names, layouts, dtypes, code, *rest)


def _missing(cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modes and activations that a cell does not take, of those it could."""
    modes = MODES if "N" in cell.combination and not cell.code else ()
    acts = tuple(ACTIVATIONS) if "A" in cell.combination and not cell.code else ()
    return (
        tuple(mode for mode in modes if mode not in cell.modes),
        tuple(name for name in acts if name not in cell.activations),
    )


def alike(found: Mapping[str, Value]) -> list[tuple[tuple[str, ...], Value]]:
    """Names that have equal values, together."""
    same: dict[Value, list[str]] = {}
    for name, value in found.items():
        same.setdefault(value, []).append(name)
    return [(tuple(names), value) for value, names in same.items()]


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
    return [[" ".join(names), *by_target] for names, by_target in alike(told)]


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
