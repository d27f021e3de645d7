"""The declarations of MIOpen's functions, read from `functions.txt`: arguments in C's order, descriptions.

Everything else follows from that text: the function objects, the checks of arguments, the stub for editors,
the reference, and the tests of bad arguments. Its parts:

- `types`: by type, the arguments that have it. `Pointer` is a tensor, a stream, ...: a pointer in C; `Scalar`
  is a number where C takes its address; `Extents` is a sequence of integers.
- `lists`: arguments that many functions for batch normalization have; `{NAME}` stands for a list.
- `functions`. In a declaration
    - `*name` is an out-pointer: a result of the function is written there;
    - `name?` may be null;
    - `type name` gives an argument's type where `types` has another for that name;
    - `1<=name<=3` gives the least and the most of a number;
    - `name[count]` names the argument with the length of a sequence;
    - `name=value` is an argument that MIOpen does not have.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TEXT = (Path(__file__).parent / "functions.txt").read_text(encoding="utf-8")
TYPES, LISTS, FUNCTIONS = re.split(r"^== \w+\n", _TEXT, flags=re.M)[1:]
NULL = " | None"  # behind the type of an argument that may be null


@dataclass(frozen=True)
class Declaration:
    """A declared function.

    Attributes:
        signature: its parameters; the annotation of each is its type as text.
        bounds: the least and the most of numbers; None for no limit.
        lengths: by the name of a sequence, that of the argument with its length.
    """

    name: str
    section: str
    signature: inspect.Signature
    text: str
    bounds: dict[str, tuple[int, int | None]]
    lengths: dict[str, str]


def declarations() -> Iterator[Declaration]:
    """All functions, in the order in which they are declared."""
    section = ""
    lists = dict(re.findall(r"^(\w+): ((?:.+(?:\n    )?)+)$", LISTS, re.M))
    for match in _FUNCTION.finditer(FUNCTIONS.format(**lists)):
        if match["section"]:
            section = match["section"]
            continue
        found = list(_PARAMETER.finditer(match["parameters"]))
        yield Declaration(
            name=match["name"],
            section=section,
            signature=inspect.Signature([*map(_parameter, found)], return_annotation="miopenStatus_t"),
            text=inspect.cleandoc(match["text"]),
            bounds={each["name"]: _bounds(each) for each in found if each["least"]},
            lengths={each["name"]: each["length"] for each in found if each["length"]},
        )


_FUNCTION = re.compile(
    r"^(?:# (?P<section>.+)|(?P<name>\w+)\((?P<parameters>[^)]*)\)\n(?P<text>(?: {4}.*\n|\n(?= {4}))+))", re.M
)
_PARAMETER = re.compile(
    r"\s*(?:(?P<least>\d+)<=)?(?:(?P<type>\w+) )?(?P<out>\*?)(?P<name>\w+)(?:\[(?P<length>\w+)\])?"
    r"(?P<null>\??)(?:<=(?P<most>\d+))?(?:=(?P<default>[^,]+))?(?:,|$)"
)
_TYPE_OF = {
    name: kind
    for kind, names in re.findall(r"^(\w+):((?:\s+\w+\b(?!:))+)", TYPES, re.M)
    for name in names.split()
}


def _bounds(match: re.Match[str]) -> tuple[int, int | None]:
    return int(match["least"]), int(match["most"]) if match["most"] else None


def _parameter(match: re.Match[str]) -> inspect.Parameter:
    kind = "Ref" if match["out"] else match["type"] or _TYPE_OF[match["name"]]
    return inspect.Parameter(
        match["name"],
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=ast.literal_eval(match["default"]) if match["default"] else inspect.Parameter.empty,
        annotation=f"{kind}{NULL}" if match["null"] else kind,
    )
