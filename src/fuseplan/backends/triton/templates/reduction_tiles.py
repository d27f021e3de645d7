"""How elements become numbers in the text of kernels with statistics: joins, and tiles with their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd

from fuseplan.backends.triton.index import Index, Mask
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.text import Text
from fuseplan.language.reduction import Part

# Bytes that a thread reads at a time, or stores where rows are held in pieces. RMS norm times a tensor,
# of 2753 rows of 16,656 elements, from bf16 to f32, took 100 us on an H200 for 159.
VECTOR = 16

State = dict[str, str]  # names of tensors by the names of parts
Functions = Mapping[str, Callable[..., str]]
# How a tile's terms are joined; functions of two values are written where a kernel needs them.
JOINED = {
    "add": "{ns}.sum({term}, {axis})",
    "mul": "{ns}.reduce({term}, {axis}, product)",
    "maximum": "{ns}.reduce({term}, {axis}, larger)",
    "minimum": "{ns}.reduce({term}, {axis}, smaller)",
}
_PICKED = "{}.{}(x, other, tl.PropagateNan.ALL)"
PAIRED = {
    "mul": ("product", "x * other"),
    "maximum": ("larger", _PICKED.format("{ns}", "maximum")),
    "minimum": ("smaller", _PICKED.format("{ns}", "minimum")),
}


def neighbours(vector: int, count: int) -> int:
    """The elements of a row that a lane joins at a time, where loads take fewer than a whole vector.

    Triton gives a thread as many lanes as a load takes, if these lie side by side: with eight elements of a
    lane in other warps, cross-entropy of 27167 rows of 4508 took 654 us on an H200, and 65 as whole rows.
    """
    access = gcd(vector, count)
    return max(access, vector // access)


@dataclass(frozen=True)
class ReductionKnobs(GpuTemplate):
    """The fields of `GpuReduction`, which says what they mean."""

    cells: int
    elements: int
    programs: int
    warps: int
    lanes: bool = False
    resident: int = 0
    ahead: int = 0

    def holds(self, count: int) -> bool:
        """Whether a program, or those of a group, have all of a cell's elements in registers."""
        return self.ahead > 0 or self.elements * self.programs >= count


def write_pairs(text: Text, parts: Iterable[Part], namespace: str = "tl") -> None:
    """Writes the functions of two values by which parts join theirs."""
    for name, joined in (PAIRED[join] for join in sorted({part.join for part in parts} & PAIRED.keys())):
        with text.function(f"{name}(x, other)"):
            text.line(f"return {joined.format(ns=namespace)}")


class Leaves(dict[str, str]):
    """Names of leaves' values at one place: a load is written when a formula asks for it."""

    def __init__(self, load: Callable[[str], str], known: Mapping[str, str]) -> None:
        super().__init__(known)
        self._load = load

    def __missing__(self, name: str) -> str:
        self[name] = self._load(name)
        return self[name]


@dataclass(frozen=True)
class Tile:
    """Elements of some cells, or the cells themselves.

    Attributes:
        along: the elements' offsets in each tensor.
        exists: which elements exist.
        part: of an axis in parts.
        leaves: values of leaves there; of elements, `x` is behind the prologue.
    """

    along: Mapping[str, Index]
    exists: Mask
    part: int
    leaves: Leaves


def once(table: Functions) -> Functions:
    """The functions of a table; of calls with the same values one is written, while their names last."""
    made: dict[tuple[str, ...], str] = {}

    def called(name: str, *values: str) -> str:
        if (name, *values) not in made:
            made[name, *values] = table[name](*values)
        return made[name, *values]

    return {name: partial(called, name) for name in table}


def name_of(part: Part) -> str:
    """The name of a part in the text."""
    return part.name.replace(".", "_")
