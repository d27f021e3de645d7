"""Graphs of torch's with open extents: with numbers, for which plans are found, and the calls they are for.

An open extent is an expression of torch's over symbols. Plans are found twice, for the numbers of the example
and for others that no extent of the graph has. A plan stays where both are the same operators on the same
values: none of its numbers depends on an open extent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import fx

from fuseplan.execution.stages import decide
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.write import Joined
from fuseplan.ops.attention import Attention
from fuseplan.plans.plan import FusionPlan
from fuseplan.torch.described import Described
from fuseplan.torch.reader import ReadGraph
from fuseplan.torch.texts import given_of, operators_text

Numbers = dict[Any, int]  # by torch's symbols


def points(given: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """The graph with the example's extents, and with others; no second graph where no extent is open."""
    extents = [extent for node in given.graph.nodes for extent in _extents(node.meta.get("val"))]
    opened = [extent for extent in extents if isinstance(extent, torch.SymInt)]
    if not opened:
        return given, None
    solver = opened[0].node.shape_env
    known = solver.backed_var_to_val if hasattr(solver, "backed_var_to_val") else solver.var_to_val
    symbols = {symbol for extent in opened for symbol in extent.node.expr.free_symbols if symbol in known}
    example = {symbol: int(known[symbol]) for symbol in symbols}
    taken, other = {extent for extent in extents if type(extent) is int} | {*example.values()}, Numbers()
    for symbol in sorted(symbols, key=str):
        other[symbol] = _another(example[symbol], solver.var_to_range.get(symbol), taken)
        taken.add(other[symbol])
    return _at(given, example), _at(given, other)


@dataclass(frozen=True)
class Opened:
    """What calls of a site say of open extents.

    Attributes:
        axes: of src.
        shapes: of operands that lie as other extents than torch's, by their keys; -1 for an open extent.
    """

    axes: tuple[int, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, site: Site, twin: Site) -> Self:
        """Of a site, and the same with other numbers for the open extents."""
        one, two = (dict(_shapes(each)) for each in (site, twin))
        shapes = {
            key: tuple(a if a == b else -1 for a, b in zip(shape, two[key], strict=True))
            for key, shape in one.items()
        }
        src = zip(site.plan.src.shape, twin.plan.src.shape, strict=True)
        return cls(tuple(axis for axis, (a, b) in enumerate(src) if a != b), shapes)


def _shapes(site: Site) -> Iterator[tuple[str, tuple[int, ...]]]:
    for each in given_of(site.plan):
        yield each.key, each.shape


def opened_of(found: ReadGraph, cut: Cut, other: ReadGraph, twin: Cut) -> dict[str, Opened]:
    """The sites that are the same with other extents, by the values that they make."""
    twins = {site.dst: site for site in twin.sites}
    pairs = [(site, twins[site.dst]) for site in cut.sites if site.dst in twins]
    alike = [pair for pair in pairs if _look(pair[0], found.makers) == _look(pair[1], other.makers)]
    made = {site.dst: (site, Opened.of(site, each)) for site, each in alike}
    return {dst: opened for dst, (site, opened) in made.items() if _is_told(site, opened, found.makers)}


def gapless(cut: Cut, twin: Cut) -> Cut:
    """The cut, whose attention reads keys without gaps where their strides are others in the twin."""
    texts, other = ({site.dst: operators_text(site.plan) for site in each.sites} for each in (cut, twin))
    sites = (site if texts[site.dst] == other.get(site.dst) else _gapless(site) for site in cut.sites)
    return replace(cut, sites=tuple(sites))


def _gapless(site: Site) -> Site:
    op, *behind = site.plan.ops
    if not isinstance(op, Attention) or not (op.key_strides or op.value_strides):
        return site
    made, plain = site.records, replace(op, key_strides=(), value_strides=())
    plan = FusionPlan(site.plan.src, plain, *behind)
    records = decide(plan, made.target, accuracy=made.accuracy, use_cache=True)
    return replace(site, plan=plan, records=records, others=())


def joins_rows(site: Site, makers: dict[str, fx.Node]) -> bool:
    """Whether torch's value has the rows as one axis that the plan's src has as several."""
    return bool(makers[site.src].meta["val"].ndim < site.plan.src.rank)


def _is_told(site: Site, opened: Opened, makers: dict[str, fx.Node]) -> bool:
    """Whether a reshape has one open extent at most, which is then told, or drops axes of extent 1."""
    if len(opened.axes) > 1 and joins_rows(site, makers):
        return False
    shapes = dict(_shapes(site))
    values = {key: value for key, value in site.operands.items() if isinstance(value, str)}
    return all(
        opened.shapes[key].count(-1) < 2
        or shapes[key] in (shape := tuple(makers[value].meta["val"].shape), (*filter((1).__ne__, shape),))
        for key, value in values.items()
    )


def _look(site: Site, makers: dict[str, fx.Node]) -> tuple[Any, ...]:
    """All of a site but the extents that are values' own: numbers that are written, and folded weights."""
    shapes = dict(_shapes(site))
    operands = [
        (key, value, tuple(makers[value].meta["val"].shape) == shapes[key])
        if isinstance(value, str)
        else (key, value if isinstance(value, Joined) else np.asarray(value).tobytes())
        for key, value in site.operands.items()
    ]
    return (
        operators_text(site.plan),
        site.plan.src.layout,
        site.src,
        [node.origin for node in site.nodes],
        operands,
    )


def _extents(value: Any) -> Iterator[Any]:
    """All extents and strides of a value, or of several."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield from (*value.shape, *value.stride())
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _extents(each)


def _another(number: int, allowed: Any, taken: set[int]) -> int:
    """The next larger number that is no extent yet; a smaller one where torch allows no larger one."""
    low = 2 if allowed is None else max(2, int(allowed.lower))
    high = None if allowed is None or not allowed.upper.is_Integer else int(allowed.upper)
    larger = range(
        number + 1, min(number + len(taken) + 2, number + len(taken) + 2 if high is None else high + 1)
    )
    found = [each for each in (*larger, *range(number - 1, low - 1, -1)) if each not in taken]
    return found[0] if found else number


def _at(given: fx.GraphModule, numbers: Numbers) -> fx.GraphModule:
    """The graph with numbers for symbols in what is known of its tensors."""
    made: fx.Graph = fx.Graph()
    made.output(made.graph_copy(given.graph, {}))
    for node in made.nodes:
        if "val" in node.meta:
            node.meta = {**node.meta, "val": _described(node.meta["val"], numbers)}
    return fx.GraphModule(given, made)


def _described(value: Any, numbers: Numbers) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_described(each, numbers) for each in value)
    extents = list(_extents(value))
    if all(type(each) is int for each in extents):
        return value
    found = [_number(each, numbers) for each in extents]
    if None in found:  # known at run time alone
        return value
    rank = value.ndim
    return Described.of(found[:rank], found[rank:], value.dtype, value.device)  # type: ignore[arg-type]


def _number(extent: Any, numbers: Mapping[Any, int]) -> int | None:
    """An extent with numbers for its symbols; None where it has others."""
    if not isinstance(extent, torch.SymInt):
        return int(extent)
    made = extent.node.expr.xreplace(numbers)
    return None if getattr(made, "free_symbols", None) else int(made)


class Extents:
    """The open extents of the inputs of an exported module.

    Attributes:
        axes: the open axes of each input, by its place.

    Args:
        inputs: the graph's inputs as torch describes them, in order.
        ranges: the least and the largest number of each expression, as torch.export tells them.
    """

    def __init__(self, inputs: Sequence[Any], ranges: Mapping[Any, Any]) -> None:
        self._open = {
            (place, axis): extent.node.expr
            for place, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
            for axis, extent in enumerate(value.shape)
            if isinstance(extent, torch.SymInt)
        }
        opened = (value.shape[axis] for (place, axis) in self._open for value in (inputs[place],))
        self._solver = next((extent.node.shape_env for extent in opened), None)
        self._ranges = ranges
        self.axes = {place: {axis for at, axis in self._open if at == place} for place, _ in self._open}
        self._met: dict[tuple[int, ...], bool] = {}
        self._bounds = self._apart()

    def _apart(self) -> list[tuple[int, float]] | None:
        """The least and the largest number of each open extent; None where they depend on each other."""
        symbols = [*self._open.values()]
        is_apart = all(each.is_Symbol for each in symbols) and len({*symbols}) == len(symbols)
        if not is_apart or (self._solver is not None and self._solver.guards):
            return None
        found = [self._ranges.get(each) for each in symbols]
        return [(0, math.inf) if each is None else (int(each.lower), float(each.upper)) for each in found]

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether a call's tensors have extents that the graph is for.

        Torch's expressions are asked where they say more than bounds; torch.compile does not follow these.
        """
        numbers = tuple(leaves[place].shape[axis] for place, axis in self._open)
        if self._bounds is not None:
            return all(
                low <= number <= high for number, (low, high) in zip(numbers, self._bounds, strict=True)
            )
        if numbers not in self._met:
            self._met[numbers] = self._holds(numbers)
        return self._met[numbers]

    def _holds(self, numbers: tuple[int, ...]) -> bool:
        pairs = list(zip(self._open.values(), numbers, strict=True))
        known = {expression: number for expression, number in pairs if expression.is_Symbol}
        if any(int(expression.xreplace(known)) != number for expression, number in pairs):
            return False
        if any(number not in self._ranges.get(expression, (number,)) for expression, number in pairs):
            return False
        solver = self._solver
        guards = (
            [] if solver is None else [guard.expr.xreplace(solver.replacements) for guard in solver.guards]
        )
        return all(each.xreplace(known) == True for each in guards)  # noqa: E712 - sympy's
