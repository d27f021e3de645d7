"""The indices that a formula of one element reads: the element's place along an axis, or among all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fuseplan.errors import PlanError
from fuseplan.language.extents import OPEN
from fuseplan.language.layouts import dense
from fuseplan.language.reduction import indices
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.scalar import Scalar, fold, indices_of, leaves_of

EXACT_IN_F32 = 2**24  # indices below it


def steps_of(name: str, spec: TensorSpec) -> tuple[int, ...]:
    """The number that a step along each axis adds to the index of that name.

    Raises:
        PlanError: the tensor has no such axis, or the steps depend on an open extent.
    """
    axis = name.removeprefix("index(").removesuffix(")")
    if axis and axis not in spec.names:
        problem = f"the tensor has no axis {shown(axis)}"
        raise PlanError(problem, got=str(spec), want=f"one of {', '.join(spec.names)}")
    if axis:
        return tuple(int(each == axis) for each in spec.names)
    steps = dense(spec.shape, range(spec.rank))
    if OPEN in steps:
        raise PlanError("the first axis alone may be open where elements are counted", got=str(spec))
    return steps


def evaluated(
    root: Scalar, leaves: Mapping[str, Any], spec: TensorSpec, table: Mapping[str, Callable[..., Any]]
) -> Any:
    """A formula's value at all elements of a tensor; `leaves` has all values but for indices."""
    places = {name: table["const"](indices(spec.shape, steps_of(name, spec))) for name in indices_of(root)}
    return fold(root, {**leaves, **places}, table)


def check_indices(root: Scalar, src: TensorSpec) -> None:
    """Checks that src has the axes that a formula counts along, and numbers for their places.

    Raises:
        PlanError: it has not.
    """
    steps = {name: steps_of(name, src) for name in indices_of(root)}
    for name in _numbers(root) if steps and src.compute_dtype == "f32" else ():
        pairs = [(extent, step) for extent, step in zip(src.shape, steps[name], strict=True) if step]
        extents = [extent for extent, _ in pairs]
        if OPEN in extents or sum((extent - 1) * step for extent, step in pairs) >= EXACT_IN_F32:
            raise PlanError(
                f"{name} may be too large for a number of f32",
                got=str(src),
                want="indices below 2^24",
                remedy="Count along one axis of known extent, or compute in f64",
            )


def _numbers(root: Scalar) -> frozenset[str]:
    """The indices that are numbers of a formula, and not the places of random numbers."""
    if root.fn == "number":
        return leaves_of(root)
    below = (_numbers(each) for each in root.args if isinstance(each, Scalar))
    return frozenset[str]().union(*below)
