"""Bound plans with open axes: each extent that was met has a bound plan of its own, of the same kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from fuseplan.errors import ArgumentError, PlanError
from fuseplan.execution.run import BoundPlan
from fuseplan.execution.runner import Runner
from fuseplan.language.extents import OPEN, extents_in, filled
from fuseplan.system import limits
from fuseplan.system.untraced import skip_frames, untraced
from fuseplan.tensors.arguments import OUT, SRC, check_keys, fitting

Extents = tuple[int, ...]


class OpenBoundPlan(BoundPlan):
    """A compiled plan with open axes and packed operands: the extents of a call are those of its `src`.

    Made by `CompiledPlan.bind`. Operands without open axes were packed once, for all extents. Bound operands
    and results with open axes fix the extents of all calls. Any number of threads may call at once.
    """

    def __init__(self, runner: Runner, values: Mapping[str, Any], borrow: bool = False) -> None:
        skip_frames()
        plan = runner.plan
        check_keys(plan, values)
        self._runner, self._axes = runner, plan.src.open_axes
        given = (each for kind in (plan.operands, plan.results) for each in kind)
        self._open = {each.key: each.shape for each in given if OPEN in each.shape}
        self._late = {key: value for key, value in values.items() if key in self._open}
        packed = {key: value for key, value in values.items() if key not in self._open}
        self._shortest = BoundPlan(runner.at((1,) * len(self._axes)), packed, borrow)
        self._missing = tuple(key for key in self._shortest.missing if key not in self._late)
        self._of = itemgetter(*self._axes)
        self._met: dict[Any, BoundPlan] = {}  # by the extent, or by several

    @property
    def lent(self) -> set[str]:
        """As of a bound plan: operands without open axes that calls of all extents read where they lie."""
        return self._shortest.lent

    @untraced
    def __call__(self, src: Any, out: Any = None, *bare: Any, **free: Any) -> Any:
        """Runs the kernel on as many elements as `src` has.

        Args:
            src: a tensor of the plan's `src`, of any extents along its open axes; of an extent of 0, the
                results are empty.
            out: where to write; a new tensor of src's kind unless given.
            *bare: refused: operands are given by name.
            **free: as in the call of a bound plan without open axes; open axes are as long as in `src`.

        Returns:
            `out`, or the new tensor; with results, a named tuple of it and of them by their keys.

        Raises:
            ArgumentError: a tensor is missing, does not match the plan or the extents of `src`, or overlaps
                one that is written.
        """
        if not (bare or free):  # what a call takes less here is up to a third of its time
            try:
                known = self._met[self._of(src.shape)]
            except (AttributeError, IndexError, KeyError, TypeError):
                pass
            else:
                return known(src, out)
        extents = self._extents(src)
        if free:
            self._check_extents(extents, free)
        bound = self._met.get(self._of(dict(zip(self._axes, extents, strict=True))))
        if bound is None:
            if 0 in extents:
                return self._empty(extents, src, out, free)
            bound = self.at(extents)
        return bound(src, out, *bare, **free)

    def launcher(self, src: Any, out: Any) -> Callable[[], object]:
        """As of a bound plan, for the extents of these tensors."""
        return self.at(self._extents(src)).launcher(src, out)

    def _extents(self, src: Any) -> Extents:
        memory, wanted = self._runner.memory, self._runner.plan.src
        shape = memory.view(src, SRC).shape
        if len(shape) != wanted.rank:
            fitting(memory.view, src, SRC, wanted)
        return extents_in("src", shape, wanted.shape)

    def at(self, extents: Extents) -> BoundPlan:
        """The bound plan with numbers for its open axes, which calls on these extents share.

        Raises:
            ArgumentError: a bound tensor has other extents, or no tensor has these.
        """
        self._check_extents(extents, self._late)
        try:
            runner = self._runner.at(extents)
        except PlanError as error:
            raise ArgumentError(
                SRC, f" has extents that no tensor of the plan can have\n  {error}"
            ) from error
        bound = BoundPlan(runner, self._late, base=self._shortest)
        while len(self._met) >= limits.EXTENTS_KEPT:
            self._met.pop(next(iter(self._met)), None)
        self._met[self._of(runner.plan.src.shape)] = bound
        return bound

    def _check_extents(self, extents: Extents, given: Mapping[str, Any]) -> None:
        """Refuses tensors whose open axes have other extents than those of src.

        Raises:
            ArgumentError: there is one.
        """
        for key, wanted in self._open.items():
            if key not in given:
                continue
            shape = self._runner.memory.view(given[key], key, in_place=False).shape
            if len(shape) == len(wanted) and (own := extents_in(key, shape, wanted)) != extents:
                told = " and ".join("x".join(map(str, each)) for each in (own, extents))
                raise ArgumentError(
                    f"`{key}` and `src` have open axes, which must be as long in both\n"
                    f"  got {told}; want {'x'.join(map(str, extents))} in `{key}`, as in `src`"
                )

    def _empty(self, extents: Extents, src: Any, out: Any, free: Mapping[str, Any]) -> Any:
        """The results of a src without elements: what was given, and new tensors without elements."""
        runner, memory = self._runner, self._runner.memory
        self._check_extents(extents, self._late)
        check_keys(runner.plan, free)
        for tensor, end, spec in ((src, SRC, runner.plan.src), (out, OUT, runner.plan.output)):
            buffer = None if tensor is None else memory.view(tensor, end)
            if buffer and (buffer.shape, buffer.dtype) != (filled(spec.shape, extents), spec.dtype):
                fitting(memory.view, tensor, end, spec)
        near = runner.at(tuple(max(1, extent) for extent in extents)).plan
        specs = {"out": near.output} | {each.key: each.spec for each in near.results}
        given = self._late | dict(free) | ({} if out is None else {"out": out})
        shapes = {"out": runner.plan.output.shape} | {key: self._open[key] for key in runner.results}
        made = [
            given[key] if key in given else _part(memory.maker(spec)(src)[0], filled(shapes[key], extents))
            for key, spec in specs.items()
        ]
        return runner.outcome(*made)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenBoundPlan:
        """The same with copies of the tensors that calls read or write in place."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._late, made._met = copy.deepcopy(self._late, memo), {}
        made._shortest = copy.deepcopy(self._shortest, memo)
        return made


def _part(tensor: Any, shape: tuple[int, ...]) -> Any:
    """The first elements of a tensor along each axis."""
    return tensor[tuple(map(slice, shape))]
