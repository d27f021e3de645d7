"""Plans, compiled plans and explanations in a notebook: small HTML without scripts, styles or links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fuseplan.language.tensor import Dense
from fuseplan.plans.text import operator_text


def preformatted(text: str) -> str:
    """The HTML of a text with its lines and spaces."""
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The HTML of a table; cells are code."""
    lines = ["".join(f"<th>{escape(each)}</th>" for each in head)]
    lines += ["".join(f"<td><code>{escape(str(cell))}</code></td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class PlanTable:
    """A plan that a notebook shows as a table: a row for each operator, with its operands and output."""

    def _repr_html_(self) -> str:
        plan: Any = self
        rows: list[Sequence[object]] = [("", "src", "", plan.src)]
        for step in plan.steps:
            given = [f"{each.key}: {Dense(each.shape, each.dtype)}" for each in step.operands]
            rows.append((step.index, operator_text(step.op), ", ".join(given), step.dst))
        return table(("", "operator", "operands", "output"), rows)
