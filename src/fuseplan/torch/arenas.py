"""Calls of a graph of torch's whose plans write into memory that was planned once, on a CPU or a GPU.

An output that stays in the graph has its place in an arena, so that no call makes new tensors, whose pages a
CPU's system would clear first. Launches on tensors that stay where they are take 1 us of the host, not 35.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fuseplan.execution.run import BoundPlan
from fuseplan.graph.memory import arena as room_of
from fuseplan.graph.memory import plan
from fuseplan.language.layouts import same_strides
from fuseplan.tensors.torch_tensors import alike
from fuseplan.torch.cutting import WITHIN
from fuseplan.torch.kernels import Kernel, kernel_on, queue_of
from fuseplan.torch.lifetimes import Lifetimes, storages
from fuseplan.torch.lying import Reading, aligned, content, copier, first, in_room
from fuseplan.torch.operator import PLAIN, is_watched, launched
from fuseplan.torch.repeated import Repeated
from fuseplan.torch.slots import call_of
from fuseplan.torch.texts import Tensors

Uncounted = list[tuple[torch.Tensor, bytes]]
Values = dict[fx.Node, Any]
_versions = operator.attrgetter("_version")


class Arenas:
    """The calls of a graph that torch does not watch.

    Calls at once have an arena each, and so have the streams of a GPU: on one stream, a call begins when the
    call before it is done. A call that a CUDA graph records has memory of the graph's, and ordinary launches.

    The launches in an arena are bound for the module's tensors as they lie. After one of these was written,
    or lies elsewhere, the next call binds anew; until then an arena keeps the tensors alive.

    Args:
        module: the graph, with plans.
        own: which of its inputs are the module's own tensors, by their places.
        device: of its tensors.
    """

    def __init__(self, module: fx.GraphModule, own: Collection[int], device: torch.device) -> None:
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._module, self._device, self._own = module, device, [inputs[place] for place in own]
        self._on_gpu = queue_of(device) is not None
        self._lives = Lifetimes.of(module, self._own, on_gpu=self._on_gpu)
        self._strides = [
            _strides(node.meta.get("val")) for place, node in enumerate(inputs) if place not in own
        ]
        self._bytes = plan([*self._lives.buffers.values()])
        graph, self._slots = call_of(module.graph, self._lives)
        self._run: Callable[..., Any] = graph.forward
        self._free: dict[int, list[Repeated[_Arena]]] = {}  # by stream
        self._kept: list[Values] = []  # of recorded calls

    @property
    def kept(self) -> set[str]:
        """Torch's operators that read nothing but the module's tensors: calls keep what they make."""
        return {node.name for node in self._lives.constant if isinstance(node.target, torch._ops.OpOverload)}

    def __call__(self, own: Tensors, others: Sequence[Any]) -> Any:
        """The graph's results; None where torch watches the call, or a tensor lies unlike the example's.

        The same list of the module's tensors again says that they look as they did in the call before.
        """
        return None if is_watched() or not self.takes(others) else self.run(own, others)

    def takes(self, others: Sequence[Any]) -> bool:
        """Whether tensors are plain ones, and lie as the example's."""
        is_plain = all(type(each) in PLAIN for each in others if isinstance(each, torch.Tensor))
        return is_plain and [*map(_strides, others)] == self._strides

    def run(self, own: Tensors, others: Sequence[Any]) -> Any:
        """The same for a call that torch does not watch, with tensors that an arena takes."""
        try:
            versions = [*map(_versions, own)]
        except RuntimeError:  # tensors of inference mode count no versions
            return None
        queue = queue_of(self._device) if self._on_gpu else None
        stream = queue.stream() if queue else 0
        if queue and stream and queue.is_capturing():
            found, known = self._arena().bound[0], self._unchanging(own, versions)
            is_bound = self._bind(found, own, versions, known, is_recorded=True)
            return self._run(found.held, *others) if is_bound else None
        free = self._free.setdefault(stream, [])
        try:
            arena = free.pop()  # atomic, so that no two calls get the same
        except IndexError:
            arena = self._arena()
        try:
            held = arena.held(own, versions)
            if held is None:
                held = arena.free(own)
                if queue and held.held:
                    queue.wait()  # launches read packed tensors that nobody may keep from now on
                if not self._bind(held, own, versions):
                    return None
                if queue:
                    queue.wait()  # graphs that other streams run read what was computed of weights
            return self._run(held.held, *others)
        finally:
            free.append(arena)

    def _arena(self) -> Repeated[_Arena]:
        with torch.inference_mode(False):
            if self._device.type == "cpu":
                memory = torch.from_numpy(room_of(self._bytes))
            else:
                memory = torch.empty(self._bytes + 1, dtype=torch.uint8, device=self._device)
            return Repeated(partial(_Arena, self._lives, memory))

    def _unchanging(self, own: Tensors, versions: list[int]) -> Values:
        """What follows from the module's own tensors alone, of calls before. It is kept: graphs read it."""
        known = (each for free in self._free.values() for arena in free for each in arena.bound)
        holding = (each for each in known if each.holds(own, versions))
        found = next(holding, None)
        made = found.values(self._lives.constant) if found else {}
        self._kept.append(made)
        return made

    def _bind(
        self,
        found: _Arena,
        own: Tensors,
        versions: list[int],
        known: Mapping[fx.Node, Any] = MappingProxyType({}),
        *,
        is_recorded: bool = False,
    ) -> bool:
        """Binds an arena's launches, unless a tensor lies unlike the example's."""
        if [*map(_strides, own)] != [_strides(node.meta.get("val")) for node in self._own]:
            return False
        values = {**known, **dict(zip(self._own, own, strict=True))}
        found.bind(own, versions, self._module, values, self._slots, is_recorded)
        return True

    def __copy__(self) -> Arenas:
        """The same for a copy of the module."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, _free={}, _kept=[])
        return made

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_free": {}, "_kept": []}


def unplanned(own: Tensors, others: Sequence[Any]) -> None:
    """Stands for the arenas of a graph whose memory is not planned: with open extents."""


class _Arena:
    """Memory for one call at a time, and the launches in it.

    Attributes:
        held: what a call is given besides its inputs.
        own, used: those of `Bound`.
    """

    def __init__(self, lives: Lifetimes, memory: torch.Tensor) -> None:
        self._lives, self._known = lives, Values()
        self.own: Tensors | None = None
        self.used = 0
        self._versions: list[int] = []
        self._looks: list[Any] = []
        self._are_alike = alike()
        self.held: list[Any] = []
        self._outs = {node: lives.out(node, memory) for node in (*lives.buffers, *lives.parts)}

    def holds(self, own: Tensors, versions: list[int]) -> bool:
        """Whether the launches are bound for these tensors, and none was written or lies elsewhere since."""
        return (
            self.own is not None
            and (own is self.own or (self.is_of(own) and self._look_same(own)))
            and [*map(torch.Tensor.data_ptr, own)] == self._places
            and self._threads == torch.get_num_threads()
            and (versions == self._versions or self._are_read_in_place(versions))
            and all(content(each) == told for each, told in self._uncounted)
        )

    def is_of(self, own: Tensors) -> bool:
        """Whether the launches were bound for these tensors, whatever became of the elements."""
        return self.own is not None and all(map(operator.is_, own, self.own))

    def values(self, nodes: Collection[fx.Node]) -> Values:
        """Those of some nodes that the launches are bound with."""
        return {node: self._known[node] for node in nodes}

    def _are_read_in_place(self, versions: list[int]) -> bool:
        """Whether launches read all tensors where they lie that were written."""
        pairs = zip(self.own or (), versions, self._versions, strict=True)
        if not self._copied.isdisjoint(storages([each for each, new, old in pairs if new != old])):
            return False
        self._versions = versions
        return True

    def _look_same(self, own: Tensors) -> bool:
        if self._are_alike(*own):
            return True
        if [*map(_look, own)] != self._looks:
            return False
        self._are_alike = alike(*own)  # modes of torch, such as inference, are part of the check
        return True

    def bind(
        self,
        own: Tensors,
        versions: list[int],
        module: fx.GraphModule,
        known: Values,
        slots: Sequence[fx.Node],
        is_recorded: bool,
    ) -> None:
        """Binds the launches for tensors of the module.

        Args:
            own: the tensors.
            versions: how often each was written.
            module: the graph.
            known: the tensors by their nodes.
            slots: the nodes whose values a call is given.
            is_recorded: a CUDA graph records the one call.
        """
        self.own, self._known, self._kept = None, known, list[Any]()  # bound launches keep no tensor alive
        self._uncounted, self._copied = Uncounted(), set[int]()  # storages that launches have copies of
        self._is_recorded, self._threads = is_recorded, torch.get_num_threads()
        self._places, self._versions = [*map(torch.Tensor.data_ptr, own)], versions
        self._looks, self._are_alike = [*map(_look, own)], alike(*own)
        self._kept += [each.untyped_storage() for each in own]
        for node in module.graph.nodes:
            is_held = node in self._lives.known or node in self._lives.bound
            if is_held and node not in known:
                known[node] = self._made(node, module, known)
        self.held, self.own = [known[node] for node in slots], own

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
        made = node.target(*args, **kwargs)
        read = {*storages([known[each] for each in node.all_input_nodes])}
        self._copied |= set() if read.issuperset(storages(made)) else read
        return made

    def _launch(self, node: fx.Node, known: Values) -> Callable[..., Any]:
        """A launch as a function of its tensors that are not known, that gives the output."""
        plain_operators, src, operands = node.args
        operators = node.meta[WITHIN] if node in self._lives.parts else plain_operators
        given, out = [known.get(each) for each in operands], self._outs.get(node)
        strides, changing = self._lives.strides[node], self._lives.changing(node)
        heads: list[torch.Tensor] = []
        if src in known:
            heads = [aligned(known[src])]
            self._kept += heads
            self._copied |= set() if heads[0].data_ptr() == known[src].data_ptr() else {*storages(known[src])}
        bounds: list[_Call] = []
        if heads and not strides:
            call = self._bound(kernel_on(operators, known[src]), given, changing, out)
            is_fixed = out is not None and not call.keys and not self._is_recorded
            return call.plan.launcher(heads[0], out) if is_fixed else partial(call, *heads)

        def launch(*late: torch.Tensor) -> Any:
            nonlocal strides
            head, *others = *heads, *late
            lying = [each.stride() for each in late]
            if lying != strides:
                if not _lie_so(late, strides):  # of an operator with another layout than it tells
                    ahead = iter(others)
                    whole = [torch.clone(next(ahead) if each is None else each) for each in given]
                    (made,) = launched(plain_operators, head, whole)
                    return made if out is None else out.copy_(made)
                strides = lying
            if not bounds:
                bounds.append(self._bound(kernel_on(operators, head), given, changing, out))
            return bounds[0](head, *others)

        return launch

    def _bound(
        self,
        kernel: Kernel,
        given: Sequence[torch.Tensor | None],
        changing: Collection[int],
        out: torch.Tensor | None,
    ) -> _Call:
        """A bound plan as a function of the tensors that are not; notes those of which it has copies."""
        plan, late, copied, uncounted, readings = kernel.bound(given, changing)
        self._copied |= {*storages(copied)}
        self._uncounted += uncounted
        return _Call(plan, readings, late, out)


class _Call:
    """A launch that is given src and the operands that are not bound.

    The first call is checked. Later ones have tensors that lie likewise: they take 3 us, not 10.

    Attributes:
        plan: the plan.
        keys: the operands.

    Args:
        plan: the plan.
        readings: what makes each operand readable that is not bound, by key.
        late: those of them that lie in the arena; calls give the others, in order.
        out: where it writes; a new tensor where there is none.
    """

    def __init__(
        self,
        plan: BoundPlan,
        readings: Mapping[str, Reading],
        late: Mapping[str, torch.Tensor],
        out: torch.Tensor | None,
    ) -> None:
        self.plan, self._late, self._out = plan, late, out
        self.keys = [*(key for key in readings if key not in late), *late]
        self._readings = [readings[key] for key in self.keys]
        self._given = None if out is None else (out, out.data_ptr())
        self._words = list[int]()
        self._steps: list[int] | None = None

    def __call__(self, src: torch.Tensor, *given: torch.Tensor) -> Any:
        tensors = (*given, *self._late.values())
        read, head = [*map(operator.call, self._readings, tensors)], aligned(src)
        places = [*map(torch.Tensor.data_ptr, read)]
        if self._steps is not None and not any(map(operator.mod, places, self._steps)):
            words = [*zip(self._words, places, strict=True)]
            return self.plan.unchecked(head, head.data_ptr(), words, self._given)[0]
        made = self.plan(head, self._out, **dict(zip(self.keys, read, strict=True)))
        found, rooms = self.plan.places(), dict[str, Reading | None]()
        for key, each in zip(self.keys, read, strict=True):
            if key not in found:
                word, packing = self.plan.word_of(key)
                found[key], rooms[key] = (word, 1), in_room(each, packing)
        if None not in rooms.values():
            self._words, self._steps = ([found[key][part] for key in self.keys] for part in (0, 1))
            pairs = zip(self.keys, self._readings, tensors, read, strict=True)
            self._readings = [
                rooms.get(key) or (aligned if each.data_ptr() == tensor.data_ptr() else copier(each, reading))
                for key, reading, tensor, each in pairs
            ]
        return made


def _lie_so(tensors: Tensors, strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether the strides of tensors are these, but for axes of one element."""
    return all(
        same_strides(each.shape, each.stride(), want) for each, want in zip(tensors, strides, strict=True)
    )


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()


def _strides(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, torch.Tensor) else None
