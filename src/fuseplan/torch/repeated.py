"""Bound launches of layers that share a graph: torch.compile compiles the code of equal layers once."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from fuseplan.torch.texts import Tensors

LAYERS = 128  # the most that are bound at once
LATELY = 8  # turns of all layers: one that had none in them is forgotten, with what was packed of it


class Bound(Protocol):
    """Launches that are bound for a module's tensors, or for none yet."""

    used: int  # the number of the last call
    own: Tensors | None  # the tensors; none before they are bound

    def holds(self, own: Tensors, versions: list[int]) -> bool:
        """Whether they are bound for these tensors, and none was written or lies elsewhere since."""

    def is_of(self, own: Tensors) -> bool:
        """Whether they were bound for these tensors, whatever became of the elements."""


B = TypeVar("B", bound=Bound)


class Repeated(Generic[B]):
    """Launches in one memory, for one call at a time, bound for the tensors of one layer or of several.

    A call with other tensors binds anew. Where these gave way to others before, layers take turns, and the
    launches of each are kept: to bind a layer takes milliseconds, and to launch it some 20 us.

    Attributes:
        bound: the launches, those of the last call last.
    """

    def __init__(self, make: Callable[[], B]) -> None:
        self.bound, self._make = [make()], make
        self._most, self._calls = 1, 0
        self._gone: deque[weakref.ref[Any]] = deque(maxlen=LAYERS)  # a tensor of each that gave way

    def held(self, own: Tensors, versions: list[int]) -> B | None:
        """The launches that hold for these tensors."""
        self._calls += 1
        last = self.bound[-1]
        if not last.holds(own, versions):
            places = (place for place, each in enumerate(self.bound) if each.holds(own, versions))
            place = next(places, None)
            if place is None:
                return None
            last = self.bound.pop(place)
            self.bound.append(last)
        last.used = self._calls
        return last

    def free(self, own: Tensors) -> B:
        """The launches to bind for these tensors, which are the last then."""
        oldest = self._calls - LATELY * len(self.bound)
        self.bound = [each for each in self.bound if each.used >= oldest] or self.bound[-1:]
        if own and any(each() is own[0] for each in self._gone):
            self._most = min(2 * self._most, LAYERS)
        found = next((each for each in self.bound if each.is_of(own)), None)
        if found is None and len(self.bound) < self._most:
            found = self._make()
        else:
            found = found or self.bound[0]
            self.bound.remove(found)
            if found.own and own and found.own[0] is not own[0]:
                self._gone.append(weakref.ref(found.own[0]))
        self.bound.append(found)
        found.used = self._calls
        return found
