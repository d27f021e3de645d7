"""Statistics of elements that are near: passes in which nothing moves, and terms that dst has too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

from fuseplan.backends.dependence import children
from fuseplan.backends.lattice import KEPT, Lattice
from fuseplan.kernels.kernel import Kernel, Stage
from fuseplan.language.reduction import Part, Statistic, before
from fuseplan.scalar import REBUILD, Scalar, fold, leaf, leaves_of, where

_SLOW = {"exp", "exp_below", "expm1", "log", "log1p", "tanh", "erf", "pow"}  # slower than a store and a load


def levels(statistic: Statistic) -> tuple[tuple[Part, ...], ...]:
    """The parts by passes over all elements: a later pass finds the parts of the pass before it made."""
    last = [part for part in statistic.parts if part.moved is not None]
    terms = [part.term if part.settled is None else part.settled for part in last]
    settled = (replace(part, term=term, moved=None) for part, term in zip(last, terms, strict=True))
    return tuple(part for part in statistic.parts if part.moved is None), tuple(settled)


def kept_part(kernel: Kernel) -> tuple[Scalar | None, tuple[Stage, ...]]:
    """The part of the last statistic's terms that dst's formula has; the epilogue that reads it as `KEPT`.

    None where there is none, where dst's formula reads the element besides, or where the element's stages
    have further results or read an axis in parts.
    """
    if not kernel.statistics or kernel.parts or any(stage.saves for stage in kernel.prologue):
        return None, ()
    statistic, (first, *behind) = kernel.statistics[-1], kernel.epilogue
    numbers = dict(zip(statistic.names, statistic.numbers, strict=True))
    given = {name: numbers.get(name, leaf(name)) for name in leaves_of(first.expression)}
    formula = fold(first.expression, given, REBUILD)
    terms = frozenset[Scalar]().union(*(slow(part.term) for level in levels(statistic) for part in level))
    for part in sorted(terms & slow(formula), key=lambda part: part.size, reverse=True):
        kept = _changed(formula, {part: leaf(KEPT)}.get)
        if "x" not in leaves_of(kept):
            return part, (replace(first, expression=kept), *behind)
    return None, ()


def keeps_elements(kernel: Kernel, lattice: Lattice) -> bool:
    """Whether the first pass writes elements behind the prologue for the others, which then read one tensor.

    They do where the prologue has slow functions, or reads other tensors in a narrower dtype than it
    computes: a sum in f32 is made again as fast as it is read, and one in bf16 in 1.15 of the time. They do
    not where a later formula reads a value that the prologue saves: that has its own rounding.
    """
    if not kernel.statistics or kernel.parts or not kernel.prologue:
        return False
    read = frozenset[str]().union(*(leaves_of(stage.expression) for stage in kernel.prologue))
    later = [stage.expression for stage in kernel.epilogue]
    later += [part.term for statistic in kernel.statistics for part in statistic.parts]
    if any(stage.saves and stage.saves in leaves_of(each) for stage in kernel.prologue for each in later):
        return False
    if any(slow(stage.expression) for stage in kernel.prologue):
        return True
    beside = (lattice.tensors.index(operand.key) for operand in kernel.operands if operand.key in read)
    reads_more = any(axis.steps[place] for place in beside for axis in lattice.cells)
    return reads_more and kernel.src.dtype != kernel.compute_dtype


def slow(root: Scalar) -> frozenset[Scalar]:
    """The parts of an expression whose function is slow."""
    below = frozenset[Scalar]().union(*map(slow, children(root)))
    return below | {root} if root.fn in _SLOW else below


def largest(statistics: Iterable[Statistic]) -> dict[str, Scalar]:
    """The element whose maximum a leaf is, by the leaf's name: that of a state's part, or of a number."""
    found: dict[str, Scalar] = {}
    for statistic in statistics:
        names = dict(zip(statistic.names, statistic.numbers, strict=True))
        for part in (part for part in statistic.parts if part.join == "maximum"):
            found |= dict.fromkeys((part.name, before(part.name)), part.term)
            found |= {name: part.term for name, number in names.items() if number == leaf(part.name)}
    return found


def below(root: Scalar, largest: Mapping[str, Scalar]) -> Scalar:
    """The expression with `exp_below` for each exponential of what is at most a maximum, less the maximum.

    Rows of 516 elements take 0.8 of the time in softmax; numbers below the normal ones become 0.
    """

    def change(node: Scalar) -> Scalar | None:
        return Scalar("exp_below", node.args) if node.fn == "exp" and is_below(node.args[0]) else None

    def is_below(node: Scalar) -> bool:
        if node.fn != "sub":
            return False
        value, most = node.args
        tops = [leaf(name) for name, term in largest.items() if value in (term, leaf(before(name)))]
        return most in tops or any(most == where(top > -inf, top, 0) for top in tops)

    return _changed(root, change)


def quick(part: Part, largest: Mapping[str, Scalar]) -> Part:
    """The part with `below` of its formulas."""
    moved = None if part.moved is None else below(part.moved, largest)
    return replace(part, term=below(part.term, largest), moved=moved)


def _changed(root: Scalar, change: Callable[[Scalar], Scalar | None]) -> Scalar:
    """The expression with another in the place of each part for which there is one."""
    made = root if not children(root) else change(root)
    if made is not None:
        return made
    return Scalar(root.fn, tuple(_changed(child, change) for child in children(root)))
