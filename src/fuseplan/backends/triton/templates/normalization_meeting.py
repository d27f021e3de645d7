"""How the programs of a group meet: each writes what it found, waits for the others, and reads all of it.

The workspace's counters hold one a group. Programs add one when they arrive and wait until all have arrived
as often as they did themselves; when they leave, the last one sets the counter back to zero. What is passed
on lies behind the counters, twice: while some still read of one meeting, others may write for the next; for
the one after that, all have read. What one has written before it arrives, the others see after: release and
acquire in the memory model of PTX, at the scope of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.triton.templates.pointwise_writer import power_of_two
from fuseplan.backends.triton.text import Text
from fuseplan.emit import COUNTER_BYTES

WORD = 4
COUNTERS = COUNTER_BYTES // WORD
SECTOR = 8  # words: counters side by side in one would make programs of different groups wait for each other


class Meeting:
    """The meetings of the programs of a group; of one program, there are none.

    Args:
        text: takes the lines.
        programs: of a group.
        groups: of programs.
        channels: of a tile; 0: what is passed on are single numbers.
        most: numbers of a channel that are passed on at a time, at most.
        compute: Triton's name of their dtype.
        repeats: whether there is a loop around the meetings.
    """

    def __init__(
        self, text: Text, programs: int, groups: int, channels: int, most: int, compute: str, *, repeats: bool
    ) -> None:
        self.text, self.programs, self.groups = text, programs, groups
        self.channels, self.most, self.compute = channels, most, compute
        self.repeats = repeats
        self.met = 0  # so far in the text

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to meet."""
        return self.programs > 1

    @property
    def size(self) -> int:
        """What all programs pass on of one number."""
        return self.programs * max(1, self.channels)

    @property
    def workspace_bytes(self) -> int:
        """Counters, and what is passed on in two meetings."""
        if not self.is_needed:
            return 0
        size = 8 if self.compute == "tl.float64" else WORD
        return COUNTER_BYTES + 2 * self.groups * self.most * self.size * size

    def begin(self) -> None:
        """Writes where the group's counter is, and where it passes things on."""
        if not self.is_needed:
            return
        step = SECTOR if self.groups * SECTOR <= COUNTERS else 1
        self.text.line(
            f"counter = workspace + group * {step}" if step > 1 else "counter = workspace + group",
            f"passed = (workspace + {COUNTERS}).to(tl.pointer_type({self.compute}))",
        )
        if self.repeats:
            self.text.line("met = 0")

    def exchange(self, found: Sequence[str]) -> list[str]:
        """Passes numbers on, and reads those of all: names of tensors whose first axis is the program."""
        text, size = self.text, self.size
        number, lane = self._number(), f" + tl.arange(0, {self.channels})" if self.channels else ""
        text.line("# the programs of a group pass on what they found")
        room = text.let("room", f"passed + (group * 2 + {number} % 2) * {self.most * size}")
        for place, name in enumerate(found):
            text.line(f"tl.store({room} + {place * size} + member * {max(1, self.channels)}{lane}, {name})")
        self._wait(number)
        count = power_of_two(self.programs)
        if not self.channels:
            index = f"tl.arange(0, {count})"
            mask = f"{index} < {self.programs}"
        else:
            index = f"tl.arange(0, {count})[:, None] * {self.channels}{lane}"
            mask = f"tl.arange(0, {count})[:, None] < {self.programs}"
        masked = f", mask={mask}, other=0.0" if count > self.programs else ""
        return [
            text.let("parts", f'tl.load({room} + {place * size} + {index}{masked}, cache_modifier=".cg")')
            for place in range(len(found))
        ]

    def _number(self) -> str:
        """Which meeting it is."""
        if not self.repeats:
            self.met += 1
            return str(self.met)
        self.text.line("met += 1")
        return "met"

    def _wait(self, number: str) -> None:
        text = self.text
        text.line("tl.debug_barrier()", 'tl.atomic_add(counter, 1, sem="release", scope="gpu")')
        with text.block(
            f'while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < {number} * {self.programs}'
        ):
            text.line("pass")

    def end(self) -> None:
        """Leaves the counter as it was found."""
        if not self.is_needed:
            return
        text, number = self.text, "met" if self.repeats else str(self.met)
        left = text.let("left", 'tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")')
        with text.block(f"if {left} == {number} * {self.programs} + {self.programs - 1}"):
            text.line('tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")')
