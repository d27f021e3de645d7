"""The report on many lines of the driver: the right lines, their errors, and each failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from fuseplan.bench.markdown import table
from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS, Relu
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text
from fuseplan.system.gathering import gathered

Record = Mapping[str, Any]


def driver_report(head: Record, records: Sequence[Record]) -> str:
    """Markdown: a row for plans that differ in their activation alone, a column a dtype and order of axes.

    Args:
        head: the run's target, machine, versions and date, by name.
        records: each line's outcome: `line` and `right`, and for a line that ran `plan` and `checks`.
    """
    ran = [record for record in records if "plan" in record]
    failed = [record for record in records if not record.get("right")]
    lines = [
        "# Lines of the driver",
        "",
        *(f"- {name}: {value}" for name, value in head.items()),
        f"- lines: {len(records)}, right: {len(records) - len(failed)}, failed: {len(failed)}",
        "",
        "A cell holds the number of right lines, and the number of all lines where some are wrong. Brackets",
        "hold the largest error among them, as a share of the allowed error.",
        "",
        *_cells(ran),
        *(_failures(failed) if failed else ()),
    ]
    return "\n".join(lines) + "\n"


def _cells(ran: Sequence[Record]) -> Iterator[str]:
    grouped = gathered((_place(FusionPlan.parse(record["plan"])), record) for record in ran)
    columns = list(dict.fromkeys(column for _, column in grouped))
    rows = dict.fromkeys(row for row, _ in grouped)
    yield from table(
        ["operators", *columns],
        [[f"`{row}`", *(_cell(grouped.get((row, column), ())) for column in columns)] for row in rows],
    )


def _place(plan: FusionPlan) -> tuple[str, str]:
    """The row and the column of a plan."""
    order = "last" if plan.src.is_channels_last else "first"
    return " -> ".join(map(_row_text, plan.ops)), f"{plan.src.dtype}, channels {order}"


def _row_text(op: Op) -> str:
    """The operator, `activation` in the place of which one it is or is the gradient of."""
    if isinstance(op, ACTIVATIONS):
        return "activation"
    inner = op.inner_names()
    if not inner:
        return operator_text(op, parameters=False)
    of_relu = replace(cast(Any, op), **dict.fromkeys(inner, Relu()))
    return operator_text(of_relu, parameters=False).replace("relu", "activation")


def _cell(records: Sequence[Record]) -> str:
    right = [record for record in records if record["right"]]
    if not records:
        return ""
    shares = [check["error"] / check["allowed"] for record in right for check in record["checks"]]
    count = str(len(right)) if len(right) == len(records) else f"**{len(right)} of {len(records)}**"
    return f"{count} ({max(shares):.2f})" if shares else count


def _failures(failed: Sequence[Record]) -> Iterator[str]:
    yield from ("", "## Failed", "")
    for record in failed:
        why = record.get("message") or "; ".join(filter(None, map(_wrong, record["checks"])))
        yield f"- `{record['line']}`: {why.splitlines()[0]}"


def _wrong(check: Record) -> str | None:
    """The fault of a tensor; None for a right one."""
    if check["error"] is None:
        return f"{check['tensor']} is not finite where the float64 reference is finite, or the reverse"
    if check["error"] <= check["allowed"]:
        return None
    return f"{check['tensor']} is {check['error']:.1e} from float64, at most {check['allowed']:.1e}"
