"""Texts read by Python's own grammar: operator calls and expressions, each piece knowing where it stands."""

from __future__ import annotations

import ast

from fuseplan.errors import PlanError, Span

LONGEST = 10_000  # characters; what a person writes is far shorter, and the grammar's stack is not endless


def python_expression(text: str, what: str, want: str) -> ast.expr:
    """The syntax tree of a one-line Python expression; `span_of` tells where a node stands in `text`.

    Raises:
        PlanError: `text` is none: it says that this is not `what`, and shows `want` as an example.
    """
    if len(text) > LONGEST:
        raise PlanError(f"{what} has at most {LONGEST} characters", got=f"{len(text)} characters")
    flat = text.translate({ord(control): " " for control in "\t\n\r\v\f"})
    body = flat.strip()
    try:
        # Without the line's end, what is missing at the end would be blamed on the beginning.
        return ast.parse(body + "\n", mode="eval").body
    except SyntaxError as error:
        skipped = len(flat) - len(flat.lstrip())
        begin, end = (
            min(skipped + max(1, offset or 1) - 1, len(text)) for offset in (error.offset, error.end_offset)
        )
        problem = f"this is not {what}: {error.msg}"
        raise PlanError(problem, want=want, text=text, span=(begin, max(begin, end))) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise PlanError(f"this is not {what}: {error}", want=want, text=text, span=(0, len(text))) from None


def span_of(text: str, node: ast.AST) -> Span:
    """Where `node`, a piece of `python_expression(text)`, stands in `text`.

    Python's grammar counts bytes of UTF-8; a span counts characters.
    """
    skipped = len(text) - len(text.lstrip())
    body = text[skipped:].encode()
    begin, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", None)
    return skipped + len(body[:begin].decode()), skipped + len(body[:end].decode())
