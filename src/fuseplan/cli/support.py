"""The command `fuseplan supported`: which operators, dtypes and layouts a target's templates take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from fuseplan.backends import BACKENDS, backend_of
from fuseplan.cli.combinations import AXES, Row, alike, cells
from fuseplan.cli.combinations import rows as combination_rows
from fuseplan.cli.options import AS_JSON, TARGET, loud_command
from fuseplan.cli.screen import Screen, print_json, print_table
from fuseplan.errors import PlanError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.language.dtypes import DTYPES
from fuseplan.language.layouts import LAYOUTS, ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.reasons import first_refusal
from fuseplan.op import Op
from fuseplan.ops import OPERATORS
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.gathering import gathered
from fuseplan.system.reading import Record


@dataclass(frozen=True)
class Support(Record):
    """The templates that take an operator's samples of one dtype and layout, by themselves."""

    operator: str
    kind: str
    dtype: str
    layout: str
    templates: tuple[str, ...]


def supported(target: Target) -> Iterator[Support]:
    """Every operator in every dtype and layout that its samples have the rank for."""
    for operator in OPERATORS:
        samples = [(TensorSpec.parse(text), op) for text, op in operator.samples()]
        ranks = dict.fromkeys((src.rank, op.reads) for src, op in samples)
        for layout in (layout for rank, reads in ranks for layout in _layouts(rank, reads)):
            for dtype in DTYPES:
                plans = _plans(samples, dtype, layout)
                yield from (
                    Support(operator.name, operator.kind, dtype, layout, _takers(plans, target))
                    for _ in plans[:1]
                )


def _plans(samples: Sequence[tuple[TensorSpec, Op]], dtype: str, layout: str) -> list[FusionPlan]:
    """The samples that have such a layout, and whose operator takes the dtype."""
    return [
        FusionPlan(TensorSpec(src.shape, dtype, layout), op)
        for src, op in samples
        if layout in _layouts(src.rank, op.reads) and _takes(op, src.with_dtype(dtype))
    ]


def _takes(op: Op, src: TensorSpec) -> bool:
    """Whether the operator computes with elements of src's dtype."""
    try:
        op.check_dtype(src)
    except PlanError:
        return False
    return True


def _layouts(rank: int, reads: str | None) -> tuple[str, ...]:
    return (ROWS[rank],) if reads == "rows" else LAYOUTS[rank]


def _takers(plans: Sequence[FusionPlan], target: Target) -> tuple[str, ...]:
    """Templates that take at least one of the plans, in their order of preference."""
    kernels = [lower(match(plan)) for plan in plans]
    templates = backend_of(target.backend).templates
    return tuple(
        template.name
        for template in templates
        if any(first_refusal(template.limits(kernel, target, "default")) is None for kernel in kernels)
    )


def grouped(rows: list[Support]) -> Iterator[tuple[str, str, str, str]]:
    """Operators, layouts, dtypes, templates: one line for all that agree in the last three."""
    own = gathered((row.operator, row) for row in rows)
    lines = gathered((line, operator) for operator, held in own.items() for line in _lines(held))
    yield from ((" ".join(operators), *line) for line, operators in lines.items())


def _lines(rows: list[Support]) -> Iterator[tuple[str, str, str]]:
    """Of one operator: layouts that agree in everything, then dtypes that agree in their templates."""
    ordered = sorted(rows, key=lambda row: (len(row.layout), row.layout))
    for names, held in alike((row.layout, (row.dtype, row.templates)) for row in ordered):
        for templates in dict.fromkeys(templates for _, templates in held):
            dtypes = " ".join(dtype for dtype, own in held if own == templates)
            yield " ".join(names), dtypes, ", ".join(templates) or "none"


@click.command("supported")
@TARGET
@click.option(
    "--combinations", is_flag=True, help="List combinations of operators instead, with each algorithm."
)
@AS_JSON
@loud_command
def supported_command(target: str, combinations: bool, as_json: bool) -> None:
    """List the operators, layouts and dtypes that a target supports, with their templates."""
    known = parse_target(target)
    if combinations:
        _print_combinations(known, as_json)
        return
    rows = list(supported(known))
    if as_json:
        print_json({"target": str(known), "supported": [row.to_json() for row in rows]})
        return
    columns = ("operator", "layouts", "dtypes", "templates")
    print_table(f"what {known} computes", columns, grouped(rows))
    backends = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS)
    Screen().tell(f"Elementwise operators fuse before and after any contraction. Backends: {backends}")


def _print_combinations(target: Target, as_json: bool) -> None:
    listed = list(combination_rows(cells(target)))
    if as_json:
        print_json({"target": str(target), "combinations": [row.to_json() for row in listed]})
        return
    columns = ("combinations", "algorithm", "layouts", "dtypes", "only")
    print_table(f"what {target} computes", columns, (_cells(row) for row in listed if not row.code))


def _cells(row: Row) -> tuple[str, ...]:
    only = [f"{axis} {row.axis(axis)}" for axis in AXES if row.axis(axis) != "any"]
    names = (row.combinations, (row.template,), row.layouts, row.dtypes)
    return *map(" ".join, names), "; ".join(only)
