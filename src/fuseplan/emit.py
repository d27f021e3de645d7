"""The source record: generated text and what its argument block holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SLOT_KINDS = ("src", "dst", "operand", "parameters", "workspace")
FIRST_SLOT = 16  # words before the pointers: task and finished counters of eight phases


@dataclass(frozen=True)
class Slot:
    """One pointer of the argument block.

    `src` and `dst` have no key; `operand` has the operand's; `parameters` points to the kernel's parameters,
    in order, in the compute dtype; `workspace` points to the shared part and after it each thread's own.
    """

    kind: str
    key: str = ""

    def __post_init__(self) -> None:
        if self.kind not in SLOT_KINDS:
            raise ValueError(f"a slot is one of {', '.join(SLOT_KINDS)}, not {self.kind!r}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.key}" if self.key else self.kind


@dataclass(frozen=True)
class Source:
    """A generated kernel: `text` in `language`; its function `entry` reads pointers in the order of `slots`.

    The workspace of a launch on `threads` threads is `workspace_bytes + threads * workspace_bytes_per_thread`
    bytes: the shared part first, then one part a thread.
    """

    text: str = field(repr=False)
    entry: str
    slots: tuple[Slot, ...]
    workspace_bytes: int = 0
    workspace_bytes_per_thread: int = 0
    language: str = "llvm"

    def workspace(self, threads: int) -> int:
        """Bytes of workspace for that many threads."""
        return self.workspace_bytes + threads * self.workspace_bytes_per_thread

    @property
    def frame(self) -> dict[str, Any]:
        """All but the text, as JSON values: what a launch needs when the object code is at hand."""
        return {
            "entry": self.entry,
            "slots": [[slot.kind, slot.key] for slot in self.slots],
            "workspace_bytes": self.workspace_bytes,
            "workspace_bytes_per_thread": self.workspace_bytes_per_thread,
            "language": self.language,
        }

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> Source:
        """The source of a cached entry: its text is empty.

        Raises:
            KeyError, TypeError, ValueError: the frame is not one that `frame` made.
        """
        return cls(
            text="",
            entry=str(frame["entry"]),
            slots=tuple(Slot(str(kind), str(key)) for kind, key in frame["slots"]),
            workspace_bytes=int(frame["workspace_bytes"]),
            workspace_bytes_per_thread=int(frame["workspace_bytes_per_thread"]),
            language=str(frame["language"]),
        )
