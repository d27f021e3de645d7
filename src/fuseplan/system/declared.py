"""Options of commands, declared once: as the fields of a frozen record, with a text of help each."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, kind: str, help: str, least: int = 1) -> Any:
    """A field of a record that is an option of a command too: `block_ms` is `--block-ms`.

    Args:
        default: its value where it is not given.
        kind: `flag`, `count`, `number`, `text`, `folder`, `file` or a name that the command knows.
        help: a sentence.
        least: the least value of a count.
    """
    return field(default=default, metadata={"kind": kind, "help": help, "least": least})
