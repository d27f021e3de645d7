"""Texts in Python's own grammar: calls of operators, and expressions; pieces know their place in the text."""

from __future__ import annotations

import ast
import math
import re

from fuseplan.errors import PlanError
from fuseplan.messages.excerpt import ARROW, Span, bounded, shown, stripped
from fuseplan.system import limits
from fuseplan.system.limits import Limit

QUOTED = re.compile(r"""("|')(?:\\.|(?!\1).)*\1""")
NUMBER = re.compile(r"(?<!\w)\.?[0-9][\w.]*")  # a word that begins with a digit
PLAIN_NUMBER = re.compile(r"0[xX][0-9a-fA-F_]+|[0-9_]*\.?[0-9_]*(?:[eE][0-9]*)?[jJ]?")
ESCAPE = re.compile(r"\\.?")
# An arrow as it is not written: the last four are a word processor's dashes and arrows.
SIGN = re.compile(r"\s*([-=~>|+&,;:/\u2013\u2014\u2192\u21d2]*)\s*")
GOES_ON = re.compile(SIGN.pattern + r"[A-Za-z_]")
HEAD = re.compile(r"""[A-Za-z_]\w*\s*(?:\((?:[^()"']|"[^"]*"|'[^']*'|\((?:[^()]|\([^()]*\))*\))*\))?""")
PIECES = 4  # levels of Python's tree, at most, for one of a formula
PLAIN_ESCAPE = re.compile(r"\\[\\'\"bfnrtux]")


def python_expression(text: str, what: str, want: str) -> ast.expr:
    """The syntax tree of a one-line Python expression; `span_of` tells where a node stands in `text`.

    Raises:
        PlanError: `text` is no expression; the message names `what` and shows `want` as an example.
    """
    check_length(text, f"the text of {what}", limits.OPERATOR_CHARACTERS)
    flat = text.translate({ord(control): " " for control in "\t\n\r\v\f"})
    _check_tokens(flat)
    body = flat.strip()
    try:
        # Without the line's end, Python blames the beginning for a piece that is missing at the end.
        made = ast.parse(body + "\n", mode="eval").body
        _check_depth(made)
        return made
    except SyntaxError as error:
        skipped = len(flat) - len(flat.lstrip())
        begin, end = (
            min(skipped + max(1, offset or 1) - 1, len(text)) for offset in (error.offset, error.end_offset)
        )
        problem = f"this is not {what}: {error.msg}"
        raise PlanError(problem, want=want, text=text, span=(begin, max(begin, end))) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise PlanError(f"this is not {what}: {error}", want=want, text=text, span=(0, len(text))) from None


def _check_depth(tree: ast.expr) -> None:
    """Refuses a tree that functions which call themselves cannot walk; Python does only by its own settings.

    Raises:
        RecursionError: it is too deep.
    """
    level: list[ast.AST] = [tree]
    for _ in range(PIECES * limits.EXPRESSION_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise RecursionError(f"it is more than {limits.EXPRESSION_DEPTH} levels deep")


def check_length(text: str, what: str, most: Limit) -> None:
    """Refuses a text that is longer than its kind may be; a PlanError where it is."""
    if len(text) > most:
        raise PlanError(f"{what} has at most {most} {most.unit}", got=len(text), text=text)


def check_joined(text: str) -> None:
    """Refuses an operator's text that goes on behind the operator without an arrow, or with another sign.

    Raises:
        PlanError: the text goes on; carets stand under the sign or, without one, under the rest.
    """
    head = HEAD.match(text)
    if head is not None and GOES_ON.match(text, head.end()):
        raise no_arrow(text, head.end())


def no_arrow(text: str, place: int) -> PlanError:
    """The error about a plan's text that goes on at `place` without an arrow, or with another sign."""
    sign = SIGN.match(text, place)
    assert sign is not None  # an empty one matches
    written = f" {ARROW} ".join(filter(None, (text[:place].strip(), text[sign.end() :].strip())))
    problem, span = f"{ARROW} is missing in front of this", stripped(text, place, len(text))
    if sign[1]:
        problem, span = f"an operator follows {ARROW}, not {shown(sign[1])}", sign.span(1)
    return PlanError(problem, want=bounded(written), text=text, span=span)


def _check_tokens(text: str) -> None:
    """Refuses numbers and escapes that Python's grammar would take with a warning of its own."""
    outside = QUOTED.sub(lambda found: " " * len(found[0]), text)
    for kind, plain, where, what in (
        (NUMBER, PLAIN_NUMBER, outside, "a number"),
        (ESCAPE, PLAIN_ESCAPE, text, "an escape: write \\\\ for a backslash"),
    ):
        for found in kind.finditer(where):
            if not plain.fullmatch(found[0]):
                raise PlanError(f"{shown(found[0])} is not {what}", text=text, span=found.span())


def number(value: float) -> float:
    """A number of a text as a float; a PlanError where it is larger than any float."""
    try:
        made = float(value)
    except OverflowError:
        made = math.inf
    if math.isinf(made):
        raise PlanError("the number is too large for a float", want="at most 1.8e308, or the word inf")
    return made


def span_of(text: str, node: ast.AST) -> Span:
    """Where `node`, a piece of `python_expression(text)`, stands in `text`.

    Python's grammar counts bytes of UTF-8; a span counts characters.
    """
    skipped = len(text) - len(text.lstrip())
    body = text[skipped:].encode()
    begin, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", None)
    return skipped + len(body[:begin].decode()), skipped + len(body[:end].decode())
