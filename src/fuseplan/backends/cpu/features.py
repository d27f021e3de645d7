"""Results of a contraction whose features are innermost in dst: vectors of them, finished and stored."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value


class Features:
    """The operators behind a contraction, applied to features side by side.

    In a gated product, vectors of gates and of values take turns, and two make one of dst's.

    Attributes:
        each: vectors that make one of dst's.
        between: the operators in front of a gated product, or of statistics.
        tail: the epilogue.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self.each = 2 if frame.kernel.parts else 1
        self.between = Elementwise(frame, "between")
        self.tail = Elementwise(frame, "epilogue")

    def first(self, group: Index, start: Index) -> Index:
        """The feature of dst that comes of the feature `start` of a group, which begins a vector of gates."""
        if self.each > 1:
            return start // 2
        return group * self._frame.kernel.contraction.features_per_group + start

    def store(
        self, line: Sequence[Value], element: Index, feature: Index, features: int, known: dict[object, Value]
    ) -> None:
        """Writes `features` of dst from `feature` on, of the position that begins at `element`, from sums."""
        frame, kernel = self._frame, self._frame.kernel
        extent, lanes = kernel.dst.channels, frame.lanes
        for j in range(0, len(line), self.each):
            done = j // self.each * lanes
            channel, count = feature + done, min(lanes, features - done)
            parts = {}
            for i, value in enumerate(line[j : j + self.each] if self.each > 1 else ()):
                gate = Place(0, channel + i * extent, True, count)
                parts[f"x[{i}]"] = self.between.apply(value, gate, known)
            place = Place(element + channel, channel, True, count)
            finish(frame, self.tail, line[j], place, known, parts=parts)
