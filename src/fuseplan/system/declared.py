"""Options of commands, declared once: as the fields of a frozen record, with a text of help each.

The command line makes its options of them, and a tool without the command line's packages its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: of the record's field.
        word: as it is written: `--block-ms`.
        kind: `flag`, `count`, `number`, `text`, `folder`, `file` or a name that the command knows.
        default: its value where it is not given.
        help: a sentence.
        least: the least value of a count.
    """

    name: str
    word: str
    kind: str
    default: Any
    help: str
    least: int


def option(default: Any, kind: str, help: str, least: int = 1) -> Any:
    """A field of a record that is an option too."""
    return field(default=default, metadata={"kind": kind, "help": help, "least": least})


def options_of(record: type) -> Iterator[Option]:
    """The options that a record declares, in order."""
    declared: tuple[Field[Any], ...] = fields(record)
    for each in declared:
        if each.metadata:
            word = "--" + each.name.removeprefix("is_").replace("_", "-")
            yield Option(each.name, word, default=each.default, **each.metadata)
