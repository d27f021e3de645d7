"""Statistics of elements that are near: passes in which nothing moves, and terms that dst has too."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.backends.dependence import children
from fuseplan.backends.lattice import KEPT, Lattice
from fuseplan.kernels.kernel import Kernel, Stage
from fuseplan.language.reduction import Part, Statistic
from fuseplan.scalar import REBUILD, Scalar, fold, leaf, leaves_of

_SLOW = {"exp", "expm1", "log", "log1p", "tanh", "erf", "pow"}  # slower than a store and a load


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
        kept = _with_leaf(formula, part, leaf(KEPT))
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


def _with_leaf(root: Scalar, part: Scalar, name: Scalar) -> Scalar:
    if root == part:
        return name
    if not children(root):
        return root
    return Scalar(root.fn, tuple(_with_leaf(child, part, name) for child in children(root)))
