"""How the programs of a group meet: each writes what it found, waits for the others, and reads all of it.

The workspace's counters hold one a group. Programs add one when they arrive and wait until all have arrived
as often as they did themselves; when they leave, the last one sets the counter back to zero. What is passed
on lies behind the counters, twice: while some still read of one meeting, others may write for the next; for
the one after that, all have read. What one has written before it arrives, the others see after: release and
acquire in the memory model of PTX, at the scope of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from fuseplan.backends.triton.index import DOWN, Index, arange, as_index, number, power_of_two, total
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import COUNTER_BYTES

WORD = 4
COUNTERS = COUNTER_BYTES // WORD
SECTOR = 8  # words: counters side by side in one would make programs of different groups wait for each other


class Meeting:
    """The meetings of the programs of a group; of one program, there are none.

    Args:
        programs: of a group.
        groups: of programs.
        channels: of a tile; 0: what is passed on are single numbers.
        most: numbers of a channel that are passed on at a time, at most.
        compute: Triton's name of their dtype.
        repeats: whether there is a loop around the meetings.
        exchanges: whether there is anything to pass on, or to wait for.

    Attributes:
        is_needed: whether there is anybody to meet.
        size: what all programs pass on of one number.
        workspace_bytes: counters, and what is passed on in two meetings.
    """

    def __init__(
        self,
        text: Text,
        programs: int,
        groups: int,
        channels: int,
        most: int,
        compute: str,
        *,
        repeats: bool,
        exchanges: bool = True,
    ) -> None:
        self.text, self.programs, self.groups = text, programs, groups
        self.channels, self.most, self.compute = channels, most, compute
        self.repeats, self.is_needed = repeats, exchanges and programs > 1
        self.size, word = programs * max(1, channels), 8 if compute == "tl.float64" else WORD
        passed = COUNTER_BYTES + 2 * groups * most * self.size * word
        self.workspace_bytes = passed if self.is_needed else 0
        self.met = 0  # so far in the text
        self.group, self.counter = number("group", groups), Index("workspace")

    def begin(self, launched: Index) -> tuple[Index, Index]:
        """Writes which program of which group this is, of all that are launched, and where they meet."""
        program = number("tl.program_id(0)", launched * self.programs)
        if self.is_needed and self.groups > 1:
            program = self.text.index("program", program)
        member = self.text.index("member", program % self.programs)
        group = self.text.index("group", program // self.programs)
        if self.is_needed:
            self._begin()
        return member, group

    def _begin(self) -> None:
        """Writes where the group's counter is, and where it passes things on."""
        step = SECTOR if self.groups * SECTOR <= COUNTERS else 1
        self.counter = self.text.index("counter", Index("workspace") + self.group * step)
        self.text.line(f"passed = (workspace + {COUNTERS}).to(tl.pointer_type({self.compute}))")
        if self.repeats:
            self.text.line("met = 0")

    def first(self) -> AbstractContextManager[None]:
        """Lines of what the first program of a group does for all."""
        return self.text.block("if member == 0") if self.is_needed else nullcontext()

    def exchange(self, found: Sequence[str]) -> list[str]:
        """Passes numbers on, and reads those of all: names of tensors whose first axis is the program."""
        text, size, each = self.text, self.size, max(1, self.channels)
        met = self._number()
        lane = arange(self.channels) if self.channels else as_index(0)
        text.line("# the programs of a group pass on what they found")
        room = Index(text.name("room"))
        text.line(f"{room} = {Index('passed') + (self.group * 2 + met % 2) * (self.most * size)}")
        member = number("member", self.programs)
        for place, name in enumerate(found):
            at = total([room, as_index(place * size), member * each, lane])
            text.line(f"tl.store({at}, {name})")
        self.wait(met)
        members = text.index(text.name("members"), arange(power_of_two(self.programs)))
        has_member = text.mask(text.name("has_member"), members < self.programs)
        axis = DOWN if self.channels else ""
        index = (members * each).at(axis)
        places = (total([room, as_index(place * size), index, lane]) for place in range(len(found)))
        guard = f'{has_member.at(axis).guard()}, cache_modifier=".cg"'
        return [text.let("parts", f"tl.load({place}{guard})") for place in places]

    def _number(self) -> Index:
        """Which meeting it is."""
        if not self.repeats:
            self.met += 1
            return as_index(self.met)
        self.text.line("met += 1")
        return Index("met", 1)

    def meet(self) -> None:
        """Goes on when all programs of the group have come here."""
        self.wait(self._number())

    def wait(self, met: Index) -> None:
        """Goes on when all have arrived at that meeting."""
        text, want = self.text, met * self.programs
        text.line("tl.debug_barrier()", f'tl.atomic_add({self.counter}, 1, sem="release", scope="gpu")')
        with text.block(f'while tl.atomic_add({self.counter}, 0, sem="acquire", scope="gpu") < {want}'):
            text.line("pass")

    def end(self) -> None:
        """Leaves the counter as it was found."""
        if not self.is_needed:
            return
        text, met = self.text, Index("met", 1) if self.repeats else as_index(self.met)
        left = text.let("left", f'tl.atomic_add({self.counter}, 1, sem="relaxed", scope="gpu")')
        with text.block(f"if {left} == {met * self.programs + (self.programs - 1)}"):
            text.line(f'tl.atomic_xchg({self.counter}, 0, sem="relaxed", scope="gpu")')
