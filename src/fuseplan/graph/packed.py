"""Constants packed once for all sessions of a model: those for other batches launch the same kernels."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from fuseplan.compile import CompiledPlan
from fuseplan.execution.run import BoundPlan
from fuseplan.graph.write import Late


class Packs:
    """Bound plans with their constants, by the plan, its kernel, and where or what the constants are.

    A bound plan is kept, and so are the constants that its kernel reads where they lie. A constant in a
    mapped file is known by its place there, another one by its elements.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[BoundPlan, Any]] = {}

    def bound(
        self, compiled: CompiledPlan, constants: Mapping[str, Any], lay: Callable[[Any], Any]
    ) -> BoundPlan:
        """The plan with its constants bound, as `lay` gives them to kernels.

        Raises:
            ArgumentError: a constant is not what the plan takes.
        """
        marks = tuple((key, _mark(each)) for key, each in sorted(constants.items()))
        key = str(compiled.plan), compiled.records.choice.template.text, marks
        if key not in self._known:
            values = {name: lay(each) for name, each in constants.items()}
            made = compiled.borrow(values)
            places = {name: each for name, each in constants.items() if isinstance(each, np.ndarray)}
            self._known[key] = made, (places, {name: values[name] for name in made.lent & values.keys()})
        return self._known[key][0]


def _mark(each: Any) -> Any:
    """What two constants have in common that are the same."""
    if isinstance(each, Late):
        make = each.make
        return (make.func, *map(_mark, make.args)) if isinstance(make, partial) else object()
    if isinstance(each, tuple):
        return tuple(map(_mark, each))
    if not isinstance(each, np.ndarray):
        return each
    look, base = (each.dtype.str, each.shape), each
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, mmap.mmap):
        return (*look, each.strides, each.__array_interface__["data"][0])
    return (*look, hashlib.sha256(np.ascontiguousarray(each).tobytes()).digest())
