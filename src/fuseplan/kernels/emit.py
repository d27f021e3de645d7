"""The source record: generated text and what its argument block holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

SLOT_KINDS = ("src", "dst", "operand", "result", "parameters", "parameter", "workspace", "extent")
COUNTER_BYTES = 4096  # at the front of a GPU's workspace: 1024 counters of 32 bits
FIRST_SLOT = 16  # words before the pointers: task and finished counters of eight phases


@dataclass(frozen=True)
class TensorMap:
    """How a copy engine reads or writes a slot's memory: in boxes of a tensor of up to five axes.

    All sizes are elements, axes are outermost first, the innermost stride is 1. What a box has outside of the
    tensor reads as zero and is not written.

    Attributes:
        dtype: of the elements.
        shape: extents.
        strides: distance between neighbours along each axis.
        box: extents of what one copy moves.
        steps: distance between the elements of a box along each axis; all 1 unless a convolution strides.
        per_extent, axis: elements of that axis for each one along the open axes; 0: all extents are known.
        begin: bytes from the slot's memory to the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    per_extent: int = 0
    axis: int = 0
    begin: int = 0

    def at(self, extent: int) -> TensorMap:
        """The map of launches on that extent of the open axes."""
        shape = list(self.shape)
        shape[self.axis] = extent * self.per_extent or shape[self.axis]
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True)
class Programs:
    """Programs of a launch on an extent of the open axes: `across` for each tile of rows.

    Attributes:
        rows: of each element along the open axes.
        tile: rows of a tile.
        across: programs of a tile.
        most: programs, at most: they go on to further tiles; 0: any number.
    """

    rows: int
    tile: int
    across: int = 1
    most: int = 0

    def at(self, extent: int) -> int:
        """How many there are."""
        programs = self.across * -(-extent * self.rows // self.tile)
        return min(programs, self.most or programs)


@dataclass(frozen=True)
class Slot:
    """One argument of the kernel: a pointer unless said otherwise.

    `src` and `dst` have no key; `operand` and `result` have their own; `parameters` points to the kernel's
    parameters, in order, in the compute dtype; `parameter` is one of them by value, in the compute dtype;
    `workspace` points to the shared part and after it each thread's own; `extent` is that of the open axes,
    by value. With a `map`, the argument is that tensor map of the memory instead of its pointer.
    """

    kind: str
    key: str = ""
    map: TensorMap | None = None

    def __post_init__(self) -> None:
        if self.kind not in SLOT_KINDS:
            raise ValueError(f"a slot is one of {', '.join(SLOT_KINDS)}, not {self.kind!r}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.key}" if self.key else self.kind


@dataclass(frozen=True, repr=False)
class Source:
    """A generated kernel: `text` in `language`; its function `entry` reads pointers in the order of `slots`.

    The workspace of a launch on `threads` threads is `workspace_bytes + threads * workspace_bytes_per_thread`
    bytes: the shared part first, then one part a thread. With open axes the shared part has
    `workspace_bytes_per_extent` bytes more for each element along them.

    A GPU's workspace, where a kernel has one, begins with `COUNTER_BYTES` bytes that are zero before its
    first launch, and every launch leaves them zero; what lies behind them holds anything, since the plans of
    a stream share it.

    Attributes:
        language: `llvm`, `triton`, `gluon`, or `kernel` for the reference's own.
        grid: programs of a launch along three axes, where the language has a grid.
        programs: programs along the first axis, where an axis is open.
        options: what the toolchain is told besides the text: `num_warps`, `num_stages`, `maxnreg`; and how it
            is launched: `cooperative`, where all programs have to run at once, because they meet.
    """

    text: str
    entry: str
    slots: tuple[Slot, ...]
    workspace_bytes: int = 0
    workspace_bytes_per_thread: int = 0
    language: str = "llvm"
    grid: tuple[int, int, int] = (1, 1, 1)
    options: tuple[tuple[str, int], ...] = ()
    workspace_bytes_per_extent: int = 0
    programs: Programs | None = None

    def at(self, extent: int) -> Source:
        """The source of a launch on that extent of the open axes: its workspace, grid and tensor maps."""
        return replace(
            self,
            workspace_bytes=self.workspace_bytes + extent * self.workspace_bytes_per_extent,
            grid=(self.programs.at(extent), *self.grid[1:]) if self.programs else self.grid,
            slots=tuple(replace(slot, map=slot.map and slot.map.at(extent)) for slot in self.slots),
        )

    def __repr__(self) -> str:
        return self.text or f"<source of {self.entry}, whose text was not generated: its code was cached>"

    def workspace(self, threads: int) -> int:
        """Bytes of workspace for that many threads."""
        return self.workspace_bytes + threads * self.workspace_bytes_per_thread

    @property
    def frame(self) -> dict[str, Any]:
        """All but the text, as JSON values: what a launch needs when the object code is at hand."""
        told = asdict(self)
        del told["text"]
        return {**told, "slots": [list(slot.values()) for slot in told["slots"]]}

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> Source:
        """The source of a cached entry: its text is empty.

        Raises:
            KeyError, TypeError, ValueError: the frame is not one that `frame` made.
        """
        from fuseplan.system.reading import record  # noqa: PLC0415 - an import reads no files

        told = frame.get("slots", ())
        slots = [Slot(kind, key, each and record(TensorMap, each)) for kind, key, each in told]
        return record(cls, {**frame, "text": "", "slots": slots})
