"""Places of kernels with statistics over any axes, and the formulas of elements there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fuseplan.backends.cpu.elementwise import Formulas, Place
from fuseplan.backends.cpu.ir import Index, Value


class Leaves(dict[str, Value]):
    """Values of leaves at one place: they are loaded when a formula asks for them."""

    def __init__(self, load: Callable[[str], Value]) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, name: str) -> Value:
        self[name] = self._load(name)
        return self[name]


@dataclass(frozen=True)
class Spot(Place):
    """A vector's place: offsets of its first lane in each tensor, and the values of leaves there."""

    offsets: Mapping[str, Index] = field(default_factory=dict)
    leaves: Leaves = field(default_factory=lambda: Leaves(_no_leaf))


def _no_leaf(name: str) -> Value:
    raise KeyError(name)


class SpotFormulas(Formulas):
    """Formulas whose leaves a `Spot` has; only parameters are found elsewhere."""

    def _leaf(self, name: str, x: Value | None, place: Place) -> Value:
        if name == "x" or name in self._parameters:
            return super()._leaf(name, x, place)
        assert isinstance(place, Spot)
        return place.leaves[name]


@dataclass(frozen=True)
class Chain:
    """Stages of which one may read parts: those in front of it, its formulas, those behind it."""

    front: SpotFormulas
    made: tuple[SpotFormulas, ...] = ()
    behind: SpotFormulas | None = None
