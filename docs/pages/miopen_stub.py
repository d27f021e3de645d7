"""`fuseplan.miopen` for type checkers and editors: `python -m docs.pages.miopen_stub STUB`.

Its names are collected when it is imported, which no checker can follow; so a stub lists them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from fuseplan.miopen import NAMES

HEAD = """\
# Written by `make docs` from the code: change it there.
from collections.abc import Sequence
from typing import Any
from fuseplan.kernels.target import Target
"""
# The Python types of arguments, by the types in declarations.
PASSED = {
    "Pointer": "Any",
    "Scalar": "float | Ref",
    "Extents": "Sequence[int] | Ref",
    "Arguments": "Sequence[miopenTensorArgument_t] | Ref",
    "Where": "str | Target | Ref",
    "Ref": "Ref",
}


def stub() -> str:
    """The stub's text: classes by where they are defined, enumerators, functions."""
    classes = [name for name, value in NAMES.items() if inspect.isclass(value)]
    members = [name for name, value in NAMES.items() if isinstance(value, IntEnum)]
    functions = [name for name, value in NAMES.items() if inspect.isfunction(value)]
    return "\n".join([
        *(HEAD, *(f"from {NAMES[name].__module__} import {name} as {name}" for name in classes)),
        *("", "NAMES: dict[str, Any]"),
        *("", *(f"{name}: {type(NAMES[name]).__name__}" for name in members)),
        *("", *map(_function, functions), ""),
    ])  # fmt: skip


def _function(name: str) -> str:
    function = NAMES[name]
    signature = inspect.signature(function)
    return f"def {name}({', '.join(_parameters(signature))}) -> {signature.return_annotation}: ..."


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    for each in signature.parameters.values():
        default = "" if each.default is each.empty else " = ..."
        yield f"{each.name}: {_passed(str(each.annotation))}{default}"


def _passed(annotation: str) -> str:
    """The Python type of a parameter: the value, or a `Ref` that holds it."""
    wanted, _, null = annotation.partition(" | ")
    taken = PASSED.get(wanted) or (f"{wanted} | int | Ref" if _is_enumeration(wanted) else f"{wanted} | Ref")
    return f"{taken} | None" if null and taken != "Any" else taken


def _is_enumeration(name: str) -> bool:
    value: Any = NAMES.get(name)
    return inspect.isclass(value) and issubclass(value, IntEnum)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(stub(), encoding="utf-8")
