"""The page on reports of models: the records of their JSON, and the reasons in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard, get_args, get_type_hints

from docs.pages.docstrings import parse, prose
from fuseplan.bench.markdown import table
from fuseplan.graph.why import Why
from fuseplan.reports import report as told
from fuseplan.reports.difference import Difference
from fuseplan.reports.profile import SCHEMA, Profile

WHOLES = ((told.SCHEMA, told.Report), (SCHEMA, Profile), ("fuseplan diff", Difference))


def reports() -> Iterator[str]:
    """The records of each JSON of models, and the catalogue of reasons."""
    yield "`fuseplan explain`, `profile` and `diff` print the JSON of these records with `--json`. The member"
    yield "`schema` names the version of a record: members are added, removed or given another meaning with"
    yield "another version. Numbers of bytes are whole; times are in seconds."
    for schema, whole in WHOLES:
        yield from ("", f"## {schema}")
        for kind in _records(whole):
            yield from _record(kind)
    yield from ("", "## Reasons", "")
    yield "An operator in no plan, and the end of a plan, have one of these codes, or that of a"
    yield "[refused plan](reasons.md)."
    yield ""
    rows = [[f"`{each.code}`", prose(each.sentence), prose(each.remedy)] for each in Why]
    yield from table(["code", "means", "what to do"], rows)


def _records(whole: type) -> list[type]:
    """A record, and those in it, each once."""
    found = [whole]
    for kind in found:
        inner = dict.fromkeys(
            each for hint in get_type_hints(kind).values() for each in (hint, *get_args(hint))
        )
        found += [each for each in inner if _is_record(each) and each not in found]
    return found


def _is_record(each: Any) -> TypeGuard[type]:
    return isinstance(each, type) and dataclasses.is_dataclass(each)


def _record(kind: Any) -> Iterator[str]:
    docstring = parse(kind.__doc__)
    meanings = {
        name: text for names, text in docstring.sections.get("Attributes", ()) for name in names.split(", ")
    }
    types = {each.name: str(each.type) for each in dataclasses.fields(kind)}
    yield from ("", f"### {kind.__name__}", "", prose(docstring.summary), "")
    rows = [[f"`{name}`", f"`{written}`", prose(meanings[name])] for name, written in types.items()]
    yield from table(["member", "type", "meaning"], rows)
