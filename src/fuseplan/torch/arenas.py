"""Calls of a graph of torch's on the CPU whose plans write into memory that was planned once.

An output that stays in the graph has its place in an arena, so that no call makes new tensors, whose pages
the system would clear first, and launches on tensors that stay where they are take 1 us of the host, not 35.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fuseplan.graph.memory import arena, plan
from fuseplan.torch.cutting import WITHIN, first
from fuseplan.torch.kernels import Tensors, aligned, content, kernel_on
from fuseplan.torch.lifetimes import Lifetimes
from fuseplan.torch.operator import is_seen, launched

Marks = tuple[Any, ...]
Uncounted = list[tuple[torch.Tensor, bytes]]
Values = dict[fx.Node, Any]


class Arenas:
    """The calls of a graph that torch does not watch; concurrent ones have an arena each.

    The launches in an arena are bound for the module's tensors as they lie. After one of these was written,
    or lies elsewhere, the next call binds anew; until then an arena keeps the tensors alive.

    Args:
        module: the graph, with plans.
        own: how many of its first inputs are the module's own tensors.
    """

    def __init__(self, module: fx.GraphModule, own: int) -> None:
        self._module, self._lives = module, Lifetimes.of(module, own)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._own, self._strides = inputs[:own], [_strides(node.meta.get("val")) for node in inputs]
        self._bytes = plan([*self._lives.buffers.values()])
        self._run, self._slots = _written(module.graph, self._lives)
        self._free: list[_Arena] = []

    def __call__(self, own: Tensors, leaves: Sequence[Any]) -> Any:
        """The graph's results; None where torch watches the call, or a tensor lies unlike the example's."""
        given = [*own, *(each for each in leaves if isinstance(each, torch.Tensor))]
        if is_seen(given) or [*map(_strides, leaves)] != self._strides[len(own) :]:
            return None
        try:
            marks = (torch.get_num_threads(), *_marks(own))
        except RuntimeError:  # tensors of inference mode count no versions
            return None
        try:
            found = self._free.pop()  # atomic, so that no two calls get the same
        except IndexError:
            found = _Arena(self._lives, self._bytes)
        try:
            if found.marks != marks or any(content(each) != told for each, told in found.uncounted):
                if [*map(_strides, own)] != self._strides[: len(own)]:
                    return None
                found.bind(marks, self._module, dict(zip(self._own, own, strict=True)), self._slots)
            return self._run(found.held, *leaves)
        finally:
            self._free.append(found)

    def __copy__(self) -> Arenas:
        """The same for a copy of the module."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, _free=[])
        return made

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_free": []}


def unplanned(own: Tensors, leaves: Sequence[Any]) -> None:
    """Stands for the arenas of a graph whose memory is not planned: on a GPU, or with open extents."""


class _Arena:
    """Memory for one call at a time, and the launches in it.

    Attributes:
        marks: of the tensors that the launches are bound for.
        held: what a call is given besides its inputs.
        uncounted: the tensors that torch writes without counting, with their elements when they were packed.
    """

    def __init__(self, lives: Lifetimes, nbytes: int) -> None:
        self._lives, self._known = lives, Values()
        self.marks: Marks = ()
        self.held: list[Any] = []
        self.uncounted: Uncounted = []
        with torch.inference_mode(False):
            memory = torch.from_numpy(arena(nbytes))
            self._outs = {node: lives.out(node, memory) for node in (*lives.buffers, *lives.parts)}

    def bind(self, marks: Marks, module: fx.GraphModule, own: Values, slots: Sequence[fx.Node]) -> None:
        """Binds the launches for tensors of the module."""
        self.marks, self._known = (), own  # bound launches keep no tensor alive
        self.uncounted = []
        self._storages = [each.untyped_storage() for each in own.values()]
        for node in module.graph.nodes:
            is_held = node in self._lives.known or node in self._lives.bound
            if is_held and node not in own:
                own[node] = self._made(node, module, own)
        self.held, self.marks = [own[node] for node in slots], marks

    def _made(self, node: fx.Node, module: fx.GraphModule, known: Values) -> Any:
        if node.op == "get_attr":
            return getattr(module, str(node.target))
        if node in self._lives.bound:
            return self._launch(node, known)
        if node in self._outs:
            return self._outs[node]
        if node.target is first and node.args[0] in self._outs:
            return self._outs[node.args[0]]
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return node.target(*args, **kwargs)

    def _launch(self, node: fx.Node, known: Values) -> Callable[..., Any]:
        """A launch as a function of its src, where that is not known, that gives the output."""
        plain_operators, src, operands = node.args
        operators = node.meta[WITHIN] if node in self._lives.parts else plain_operators
        given, out = [known[each] for each in operands], self._outs.get(node)
        strides, changing = self._lives.strides[node], self._lives.changing(node)
        if src in known:
            kernel, plain = kernel_on(operators, known[src]), aligned(known[src])
            bound, late = kernel.bound(given, self.uncounted, changing)
            is_plain = out is not None and not late
            return bound.launcher(plain, out) if is_plain else partial(bound, plain, out, **late)
        bounds: list[Callable[..., Any]] = []

        def launch(src: torch.Tensor) -> Any:
            if src.stride() != strides:  # of an operator that gives another layout than it tells
                (made,) = launched(plain_operators, src, [*map(torch.clone, given)])
                return made if out is None else out.copy_(made)
            if not bounds:
                bound, late = kernel_on(operators, src).bound(given, self.uncounted, changing)
                bounds.append(partial(bound, **late))
            return bounds[0](aligned(src), out)

        return launch


def _written(graph: fx.Graph, lives: Lifetimes) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The graph of one call, and the nodes whose values it is given as a list in front of its inputs."""
    made: fx.Graph = fx.Graph()
    held = made.placeholder("held")
    slots: list[fx.Node] = []
    values: Values = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in values:
            values[node] = made.call_function(operator.getitem, (held, len(slots)))
            slots.append(node)
        return values[node]

    for node in graph.nodes:
        if node in lives.bound:
            late = () if node.args[1] in lives.known else (value(node.args[1]),)
            launch = value(node)
            values[node] = made.call_function(operator.call, (launch, *late))
        elif node.target is first and node.args[0] in lives.bound and node not in lives.known:
            values[node] = values[node.args[0]]
        elif node in lives.copied:
            for part, (_, *where) in lives.copied[node]:
                made.call_function(_copy, (value(node), value(part), *where))
        elif node.op == "output":
            made.output(fx.map_arg(node.args[0], value))
        elif node not in lives.known:
            args = {each: value(each) for each in node.all_input_nodes}
            args |= {each: made.call_method("clone", (args[each],)) for each in lives.rewritten(node)}
            values[node] = made.node_copy(node, args.__getitem__)
    return fx.GraphModule({}, made), slots


def _copy(whole: torch.Tensor, part: torch.Tensor, axis: int, begin: int, extent: int) -> None:
    """Copies a part into the value that joins it with others."""
    whole.narrow(axis, begin, extent).copy_(part)


def _marks(tensors: Tensors) -> Iterator[list[Any]]:
    """What tells that tensors lie where they did, and were not written, while they and their memory live."""
    yield [*map(id, tensors)]
    yield [*map(torch.Tensor.data_ptr, tensors)]
    yield [each._version for each in tensors]
    yield [each.shape for each in tensors]
    yield [*map(torch.Tensor.stride, tensors)]


def _strides(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, torch.Tensor) else None
