"""Reads an error as a person does: what stands above its carets."""

from __future__ import annotations

from fuseplan.errors import PlanError


def above_carets(error: PlanError) -> str:
    """The piece of the shown text that has carets under it; a lone caret may stand behind the text's end."""
    lines = str(error).splitlines()
    rows = [row for row, line in enumerate(lines) if line.strip() and not line.strip("^ ")]
    assert len(rows) == 1, f"one line of carets is shown:\n{error}"
    row = rows[0]
    begin, end = lines[row].index("^"), len(lines[row])
    return lines[row - 1][begin:end]
