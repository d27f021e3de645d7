"""Which values of a graph of torch's lie in memory that is planned, and for how long."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fuseplan.graph.memory import ALIGNMENT, Buffer
from fuseplan.language.layouts import dense
from fuseplan.tensors.torch_tensors import DTYPES
from fuseplan.torch.cutting import WITHIN
from fuseplan.torch.lying import ALIGNMENT as VECTOR
from fuseplan.torch.lying import ORDER, beside, first, joined, laid_out, tells_views
from fuseplan.torch.operator import launched, readable
from fuseplan.torch.replacing import VIEWS, replacing
from fuseplan.torch.texts import joins_of, plan_on

aten = torch.ops.aten
UNWRITTEN = (aten.empty.memory_format, aten.empty_strided.default)  # their elements are any
GPU_LINE = 512  # bytes, as torch's allocator: a copy of rows that begin inside of a line takes longer
# Of Python: functions of the tensors that they read, in memory of their own or in that of one of these.
COPYING = (laid_out, first, joined, beside, operator.getitem, launched)
LAYING = (laid_out, aten.clone.default)  # copies of their first arguments
# Of torch's operators, those with functions or methods of its own: 1.1 us of the host a call, not 1.8, and of
# those that read lists 1.0, not 2.7. The first can write into memory that they are given.
WRITING = " add sub mul div neg exp log sigmoid tanh maximum minimum matmul bmm cat stack cumsum "
QUICK = f"{WRITING}relu where softmax select reshape transpose permute squeeze unsqueeze clone index_select \
unbind expand repeat roll gather scatter topk max amax sum mean masked_fill index_add zeros_like cos sin \
rsqrt pow ge gt le lt eq ne logical_not "

Part = tuple[fx.Node, int, int, int]  # of a joined value: the value, the axis, the begin, the extent


@dataclass
class Lifetimes:
    """The values of a graph, followed by tensors without elements.

    A launch is *bound* for what is known before a call, where it reads src in place; a value is
    *known* if it is the module's own, the output of a bound launch that stays in the graph, or a view of
    known values.

    Attributes:
        known: the nodes with such values.
        constant: those of them that calls do not change: the module's own, and functions of these.
        bound: the launches; src and operands may be a call's.
        strides: of these tensors of each of them.
        buffers: places for their outputs that do not leave the graph, and for values that join some.
        parts: the launches that write into such a value: the value, the axis, and the first and last place.
        written: torch's own operators that write into such places.
        copied: of each such value, the other parts with their places; likewise of copies of known values.
        steady: the other values that lie in each call as they are described: inputs and launches' outputs.
        same: the nodes that give what they read in each call; `laid_out` takes 2 us of the host to find so.
        renewed: of `VIEWS`, those that may write into their first argument: one of them made it.
    """

    known: set[fx.Node] = field(default_factory=set)
    constant: set[fx.Node] = field(default_factory=set)
    bound: set[fx.Node] = field(default_factory=set)
    strides: dict[fx.Node, list[tuple[int, ...]]] = field(default_factory=dict)
    buffers: dict[fx.Node, Buffer] = field(default_factory=dict)
    parts: dict[fx.Node, Part] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    copied: dict[fx.Node, list[tuple[fx.Node, Part]]] = field(default_factory=dict)
    steady: set[fx.Node] = field(default_factory=set)
    same: set[fx.Node] = field(default_factory=set)
    renewed: set[fx.Node] = field(default_factory=set)
    _line: int = ALIGNMENT
    _outs: dict[fx.Node, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, module: fx.GraphModule, own: Collection[fx.Node], *, on_gpu: bool) -> Lifetimes:
        """Those of a graph.

        Args:
            module: the graph, with plans.
            own: its inputs that are the module's own tensors.
            on_gpu: whether its tensors lie on a GPU, whose kernels move 16 bytes at a time.
        """
        values, own = _Values(module, VECTOR if on_gpu else 1), frozenset(own)
        made = cls(_line=GPU_LINE if on_gpu else ALIGNMENT)
        for place, node in enumerate(module.graph.nodes):
            is_function = node.op == "call_function" and made.constant.issuperset(node.all_input_nodes)
            is_own = node.op == "get_attr" or node in own
            if is_own or (is_function and (values.is_view(node) or values.is_copy(node))):
                made.constant.add(node)
                made.known.add(node)
            elif node.op == "placeholder":
                made.steady.add(node)
            elif node.target is launched:
                made._launch(node, place, values)
            elif node.target is first and node.args[0] in made.buffers:
                made.known.add(node)
            elif node.target is joined and _storage(values.found[node]) not in values.leaving:
                made._join(node, place, values)
            elif _is_in(WRITING, node):
                made._write(node, place, values)
            elif node.op == "call_function" and made.known.issuperset(node.all_input_nodes):
                made._view_or_copy(node, place, values)
            if node.target in (first, laid_out):
                made._stay(node, values)
            made._renew(node, place, values)
        return made

    def late(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a call gives a launch: its src and its operands, where they are not known."""
        return [each for each in (node.args[1], *node.args[2]) if each not in self.known]

    def changing(self, node: fx.Node) -> list[int]:
        """The places of a launch's operands with other elements in each call."""
        return [place for place, each in enumerate(node.args[2]) if each not in self.constant]

    def rewritten(self, node: fx.Node) -> list[fx.Node]:
        """The operands of an unbound launch that lie in an arena: packed copies live with their tensor."""
        given = node.args[2] if node.target is launched else ()
        return [each for each in given if each in self.known and each not in self.constant]

    def neighbours(self, graph: fx.Graph) -> list[fx.Node]:
        """Torch's own operators of each call that read another one's result, as it lies or laid out."""
        results, found = set[fx.Node](), list[fx.Node]()
        for node in graph.nodes:
            if node.op != "call_function" or node in self.known or node.target is launched:
                continue
            is_near = not results.isdisjoint(node.all_input_nodes)
            is_computing = node.target not in COPYING and not tells_views(node)
            found += [node] if is_near and is_computing else []
            results |= {node} if is_near or is_computing else set()
        return found

    def _launch(self, node: fx.Node, place: int, values: _Values) -> None:
        is_joined = joins_of(node.args[0]) and not self.known.issuperset(node.args[2])
        late = self.late(node)
        if is_joined or not values.is_read_in_place(node):
            return
        self.bound.add(node)
        if {*late} <= self.steady:  # else another plan may run
            self.steady.add(node)
        self.strides[node] = [values.found[each].stride() for each in late]
        (out,) = values.found[node]
        storage = _storage(out)
        if storage in values.leaving:
            return
        self._place(node, out, place, values.last.get(storage, place))

    def _place(self, node: fx.Node, out: torch.Tensor, begin: int, last: int) -> None:
        bits = np.dtype(f"u{out.itemsize}")  # NumPy has no bf16
        made = Buffer(tuple(out.shape), out.stride(), bits, begin, last, line=self._line)
        self.buffers[node], self._outs[node] = made, out

    def _view_or_copy(self, node: fx.Node, place: int, values: _Values) -> None:
        """A function of known values: those that only lay elements out anew have a place for them."""
        out = values.found[node]
        if values.is_view(node):
            self.known.add(node)
        elif node.target in LAYING and out.ndim and values.leaving.isdisjoint(storages(out)):
            self._place(node, out, place, values.last.get(_storage(out), place))
            self.known.add(node)
            self.copied[node] = [(node.args[0], (node, 0, 0, out.shape[0]))]

    def _stay(self, node: fx.Node, values: _Values) -> None:
        """The output of a bound launch, or a value laid out: the same tensor, unless that is a copy."""
        read, is_steady = node.args[0], node.args[0] in self.steady
        if node.target is laid_out:
            made, given = values.found[node], values.found[read]
            is_same = is_steady and _storage(made) == _storage(given) and made.stride() == given.stride()
        else:
            is_same = read in self.bound
        if is_same and (node.target is laid_out or node not in self.known):
            self.same.add(node)
        if is_same and is_steady:
            self.steady.add(node)

    def _renew(self, node: fx.Node, place: int, values: _Values) -> None:
        """A tensor that an operator of `VIEWS` made, and another one then replaces a part of."""
        if node.target in VIEWS and node.args[0].target in VIEWS and values.is_last(node, place):
            self.renewed.add(node)

    def _write(self, node: fx.Node, place: int, values: _Values) -> None:
        """A place for what an operator of torch's makes: launches that read it are bound."""
        out = values.found[node]
        if not all(isinstance(extent, int) for extent in out.shape):  # one that depends on elements
            return
        if out.is_contiguous() and out.numel() and _storage(out) not in values.leaving:
            self._place(node, out, place, values.last.get(_storage(out), place))
            self.known.add(node)
            self.written.add(node)

    def _join(self, node: fx.Node, place: int, values: _Values) -> None:
        """Places a joined value, into which launches write that nothing else reads; others are copied."""
        parts, axis, _ = node.args
        begin, first_place = 0, place
        self.copied[node] = []
        for each in parts:
            part = node, axis, begin, values.found[each].shape[axis]
            begin += part[-1]
            launch = each.args[0] if each.target is first else each
            is_own = launch in self.buffers and WITHIN in launch.meta and [*launch.users] == [each]
            if is_own and [*each.users] == [node] and [*parts].count(each) == 1:
                first_place = min(first_place, self.buffers.pop(launch).first)
                self.parts[launch] = part
            else:
                self.copied[node].append((each, part))
        out = values.found[node]
        self._place(node, out, first_place, values.last.get(_storage(out), place))
        self.known.add(node)

    def out(self, node: fx.Node, memory: torch.Tensor) -> torch.Tensor:
        """The output of a launch, or a joined value, in its place in an arena of bytes."""
        if node in self.parts:
            whole, *where = self.parts[node]
            return self.out(whole, memory).narrow(*where)
        buffer, made = self.buffers[node], self._outs[node]
        within = memory[buffer.offset : buffer.offset + buffer.nbytes].view(made.dtype)
        return within.as_strided(made.shape, made.stride())


class _Values:
    """A graph's values as tensors of the meta device, which share memory where torch's would.

    Attributes:
        found: by node.
        last: the place of the last node that reads a storage.
        leaving: the storages of results, and of what an operator may keep that does not tell.
    """

    def __init__(self, module: fx.GraphModule, vector: int) -> None:
        self._vector = vector  # bytes that tensors begin on a multiple of where a launch reads them in place
        self.found: dict[fx.Node, Any] = {}
        self.last: dict[int, int] = {}
        self.leaving: set[int] = set()
        for place, node in enumerate(module.graph.nodes):
            for storage in self._read(node):
                self.last[storage] = place
            self.found[node] = self._made(node, module)

    def is_view(self, node: fx.Node) -> bool:
        """Whether all memory of the value is that of values which it reads."""
        return {*storages(self.found[node])} <= {*self._read(node)}

    def is_copy(self, node: fx.Node) -> bool:
        """Whether the value is a function of what it reads, in memory of its own that stays in the graph."""
        is_known = node.target in COPYING or tells_views(node) or _is_repeatable(node)
        return is_known and self.leaving.isdisjoint(storages(self.found[node]))

    def is_last(self, node: fx.Node, place: int) -> bool:
        """Whether a node is the last to read its first argument's memory, of which it reads nothing else."""
        storage = _storage(self.found[node.args[0]])
        others = [number for each in node.args[1:2] for number in storages(self.found[each])]
        return self.last[storage] == place and storage not in {*others, *self.leaving}

    def is_read_in_place(self, node: fx.Node) -> bool:
        """Whether a launch gives its output alone, and reads src in place."""
        operators, src, given = node.args
        value = self.found[src]
        plan = plan_on(operators, readable(value))
        return (
            not plan.results
            and not plan.views
            and all(user.target is first for user in node.users)
            and readable(value) is value
            and not any(each.is_neg() for each in (value, *map(self.found.__getitem__, given)))
            and value.storage_offset() * value.itemsize % self._vector == 0
        )

    def _is_larger(self, node: fx.Node) -> bool:
        """Whether a value has more bytes than each tensor that its operator reads, so that it is no view.

        Images made larger are: that operator of the meta device imports sympy, 0.4 s.
        """
        made = node.meta.get("val")
        if not isinstance(made, torch.Tensor) or not all(type(extent) is int for extent in made.shape):
            return False
        read = pytree.tree_leaves([self.found[each] for each in node.all_input_nodes])
        most = max((each.untyped_storage().nbytes() for each in read if torch.is_tensor(each)), default=0)
        # Torch counts no elements where an open extent turned out to be a number.
        return bool(made.is_contiguous()) and prod(made.shape) * made.itemsize > most

    def _read(self, node: fx.Node) -> Iterator[int]:
        for each in node.all_input_nodes:
            yield from storages(self.found[each])

    @torch.no_grad()  # type: ignore[untyped-decorator]  # as of calls: `beside` copies where torch records
    def _made(self, node: fx.Node, module: fx.GraphModule) -> Any:
        if node.op == "get_attr":
            return pytree.tree_map_only(torch.Tensor, _empty, getattr(module, str(node.target)))
        if node.target is launched:
            operators, src, _ = node.args
            plan = plan_on(operators, readable(self.found[src]))
            ends = (plan.output, *(each.spec for each in plan.results))
            return [_like(each.shape, each.element_strides, DTYPES[each.dtype]) for each in ends]
        if node.target is joined:  # torch.cat of the meta device imports torch._dynamo: a second
            made = node.meta["val"]
            return _like(made.shape, dense(made.shape, node.args[2]), made.dtype)
        is_known = node.target in COPYING or (_may_view(node) and not self._is_larger(node))
        if node.op == "call_function" and is_known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.found.__getitem__)
            try:
                return node.target(*args, **kwargs)
            except Exception:  # of many kinds, by operators that the meta device lacks
                self.leaving |= {*self._read(node)}
        if node.op == "output" or "c10d" in str(node.target):  # processes exchange it while others go on
            self.leaving |= {*self._read(node)}
        made = node.meta.get("val")
        if node.op == "placeholder" and ORDER in node.meta:  # as the forward pass left it
            return _like(made.shape, dense(made.shape, node.meta[ORDER]), made.dtype)
        return pytree.tree_map_only(torch.Tensor, _empty, made)


def _is_in(names: str, node: fx.Node) -> bool:
    """Whether a node calls one of ATen's operators of these names."""
    is_op = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    return is_op and f" {node.target._opname} " in names


def function_of(node: fx.Node, *, in_place: bool) -> Any:
    """The function that computes a node: torch's own, or ours, in the place of an operator of ATen's.

    `in_place`: it may write into its first argument.
    """
    if node.target in VIEWS:
        return replacing(node, in_place=in_place)
    name = node.target._opname if _is_in(QUICK, node) else ""
    return getattr(torch, name, None) or getattr(torch.Tensor, name, node.target)


def _may_view(node: fx.Node) -> bool:
    """Whether a value may share memory with those that its operator reads."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    composite = "CompositeImplicitAutograd"  # such operators tell nothing of their parts
    return tells_views(node) or torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), composite)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether an operator of ATen's gives the same for the same tensors, and writes into none."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or operator in UNWRITTEN:
        return False
    return not operator._schema.is_mutable and torch.Tag.nondeterministic_seeded not in operator.tags


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return _like(tensor.shape, tensor.stride(), tensor.dtype)


def _like(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def storages(value: Any) -> Iterator[int]:
    """The numbers of the storages of all tensors in a value."""
    return (_storage(each) for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor))
