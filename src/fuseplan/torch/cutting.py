"""A graph of torch's with plans in the place of the operators that they compute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuseplan.graph.choose import Mode, chosen
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.find import find
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Permute, Slice
from fuseplan.graph.rules import Rule
from fuseplan.graph.why import Reason, Why
from fuseplan.graph.write import Joined
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.layouts import dense
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arguments import dtypes_taken
from fuseplan.tensors.torch_tensors import DTYPES, NAMES
from fuseplan.torch.described import Described
from fuseplan.torch.eager import Eager
from fuseplan.torch.gaps import HOST, is_alone, is_packed, is_slow_attention, is_torchs, saved, saved_by
from fuseplan.torch.given import stands_for, type_of
from fuseplan.torch.kernels import target_of
from fuseplan.torch.lying import (
    ORDER,
    ask_for_less,
    beside,
    by_stride,
    drop_copies,
    first,
    joined,
    laid_out,
)
from fuseplan.torch.opening import Opened, gapless, joins_rows, opened_of, points
from fuseplan.torch.operator import launched
from fuseplan.torch.reader import ReadGraph, read
from fuseplan.torch.restoring import restore
from fuseplan.torch.texts import given_of, operators_text

aten = torch.ops.aten
VIEWS = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
RESHAPES = (*VIEWS, aten.reshape.default, aten.unsqueeze.default)  # elements in their order
WITHIN = "fuseplan.within"  # in a launch's meta: the operators that write into the value which joins it


@dataclass(frozen=True)
class Fusion:
    """A graph cut into plans.

    Attributes:
        module: torch's graph, in which each site is one call.
        given: the graph before.
        cut: the plans, each of which is one call, and why each other operator is in none.
        saved: seconds that the plans are estimated to save a CPU's call; None where nothing is estimated.
    """

    module: fx.GraphModule
    given: fx.Graph
    cut: Cut
    saved: float | None = None


def fused(
    given: fx.GraphModule,
    device: torch.device,
    is_taken: Callable[[Site], bool] = lambda _: True,
    choose: Mode = "predicted",
    is_built: bool = True,
    opens: bool = True,
    inputs: Sequence[Any] = (),
    rules: Sequence[Rule] = (),
    joins: bool = False,
    ranges: bool = True,
    framework: type[Eager] = Eager,
    is_apart: Callable[[Node], bool] = is_torchs,
    accuracy: Accuracy = "default",
    kept: Collection[int] = (),
) -> Fusion:
    """Cuts a graph of functional ATen operators, whose nodes have `val`, and puts plans into a copy.

    Args:
        given: the graph.
        device: what its tensors lie on.
        is_taken: whether a site becomes a call; the operators of all others stay torch's.
        choose: as for `fuse`.
        is_built: build the kernels, and leave sites to torch whose kernel fails.
        opens: whether plans compute tensors with open extents.
        inputs: those of an example call, whose values plans are checked and timed on; random ones without.
        rules: of the caller.
        joins: plans may write into the values that join their results, where calls give them the memory.
        ranges: plans may compute several products of an input, but in training: their weights change. There,
            plans may have several results.
        framework: what computes the operators that no plan does.
        is_apart: whether it computes an operator whatever plans there are.
        accuracy: as for `fuseplan.compile`.
        kept: the places of outputs that nobody but the backward pass reads, which may lie in any order.
    """
    example, other = points(given) if opens else (given, None)
    may = {"rules": rules, "ranges": ranges, "is_apart": is_apart, "accuracy": accuracy}
    is_once = ranges and not other and is_apart is is_torchs  # calls keep what torch makes of weights
    module, found, cut = _found(example, device, joins, is_once, **may)
    opened = {site.dst: Opened() for site in cut.sites}
    if other:
        _, again, twin = _found(other, device, False, False, **may)
        cut, twin = gapless(cut, twin), gapless(twin, cut)
        opened = opened_of(found, cut, again, twin)
    cut = _without(cut, Why.OPEN_EXTENT, lambda site: site.dst not in opened)
    cut = _without(cut, Why.INDUCTOR, lambda site: not is_taken(site))
    if device.type == "cuda" and not ranges:
        cut = _without(cut, Why.PACKED, is_packed)
    if device.type == "cuda" and choose == "predicted":
        cut = _without(cut, Why.UNMEASURED, is_slow_attention)
        cut = _without(cut, Why.ALONE, lambda site: not ranges and is_alone(site))
    makers, is_estimated = found.makers, device.type == "cpu" and framework is Eager
    host = 0.0 if joins or other else HOST  # calls in arenas take little
    if is_estimated and choose == "predicted":
        cut = _without(cut, Why.HOST if host else Why.COPIED, lambda site: saved(site, makers, host) < 0)
    with _without_modes():  # tensors without elements cannot be measured
        cut = chosen(cut, framework(module, found, device, inputs, not joins), choose, is_built)
    _write(module, found, cut, opened, device, kept, changing=not ranges)
    seconds = saved_by(cut, makers, host, module.graph) if is_estimated and not other else None
    return Fusion(module, given.graph, cut, seconds)


def _write(
    module: fx.GraphModule,
    found: ReadGraph,
    cut: Cut,
    opened: Mapping[str, Opened],
    device: torch.device,
    kept: Collection[int],
    *,
    changing: bool,
) -> None:
    """Puts the plans into the graph, and takes out what nothing reads any more."""
    writer = _Writer(module, found.makers, device, changing=changing)
    for site in cut.sites:
        writer.write(site, opened[site.dst])
    for node in module.graph.nodes:
        node.target = VIEWS.get(node.target, node.target)
    drop_copies(module.graph)
    restore(module.graph, kept)
    computed = {found.makers.get(name) for site in cut.sites for node in site.nodes for name in node.outputs}
    _erase(module.graph, computed)
    ask_for_less(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()


def _erase(graph: fx.Graph, computed: Collection[fx.Node | None]) -> None:
    """Takes out what plans compute: to torch, attention with dropout is no dead code."""
    for node in reversed(graph.nodes):
        if node in computed and not node.users:
            graph.erase_node(node)


def _without_modes() -> AbstractContextManager[None]:
    """No mode of a compiler's, whose tensors have no elements. Where there is none, imports of it wait."""
    made: AbstractContextManager[None] = nullcontext()
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else made


def _found(
    given: fx.GraphModule, device: torch.device, joins: bool, is_once: bool, **may: Any
) -> tuple[fx.GraphModule, ReadGraph, Cut]:
    """A copy of a graph, what is read of it, and the plans between values that torch's nodes make."""
    name, threads = target_of(device)
    target = replace(parse_target(name), repacks=device.type == "cpu" and not may["ranges"])
    module = copied(given)
    found = read(module, joins, is_once)
    for node, name in found.values.items():
        maker = found.makers.get(name, node)
        if maker is not node and type_of(node.meta.get("val")).shape is not None and stands_for(maker, node):
            node.replace_all_uses_with(maker)
    last = {name for name, node in found.makers.items() if _is_channels_last(node)}
    weights = _weights(found)
    how: dict[str, Any] = {"joins": joins, "results": not may["ranges"], **may}
    cut = find(found.graph, target, threads=threads, weights=weights, last=last, **how)
    cut = _without(
        cut,
        Why.INNER_VALUE,
        lambda site: not {*site.results, *site.further, *site.reads} <= found.makers.keys(),
    )
    return module, found, cut


def _without(cut: Cut, why: Why, is_left: Callable[[Site], bool]) -> Cut:
    """The cut without the plans that are left to torch, for one reason."""
    reasons = {id(node): Reason(why, site.dst) for site in cut.sites if is_left(site) for node in site.nodes}
    sites = tuple(site for site in cut.sites if not is_left(site))
    return replace(cut, sites=sites, left={**cut.left, **reasons})


def _weights(found: ReadGraph) -> set[str]:
    """The inputs, and what torch makes of these alone, that are second factors of products."""
    layers = (node for node in found.graph.nodes if isinstance(node.op, Layer) and "weight" in node.op.keys)
    return {node.inputs[1] for node in layers} & (found.graph.inputs.keys() | found.weights)


def _is_channels_last(node: fx.Node) -> bool:
    """Whether torch has the channels of the value next to each other, and not its positions."""
    if ORDER in node.meta:
        return bool(node.meta[ORDER][2:] and node.meta[ORDER][-1] == 1)
    strides = node.meta["val"].stride()
    return len(strides) > 2 and all(int(strides[1]) < int(each) for each in strides[2:])


def copied(given: fx.GraphModule) -> fx.GraphModule:
    """The graph's nodes once more, with what torch knows of their values."""
    graph: fx.Graph = fx.Graph()
    graph.output(graph.graph_copy(given.graph, {}))
    made = fx.GraphModule(given, graph)
    made.meta = dict(given.meta)
    return made


class _Writer:
    """Writes calls of plans into a graph."""

    def __init__(
        self, module: fx.GraphModule, makers: dict[str, fx.Node], device: torch.device, *, changing: bool
    ) -> None:
        self._module, self._graph, self._makers, self._device = module, module.graph, {**makers}, device
        self._changing = changing  # the weights are others in each call
        self._places = {node: place for place, node in enumerate(self._graph.nodes)}
        self._named: dict[fx.Node, list[str]] = {}  # the values that a node makes
        for name, node in makers.items():
            self._named.setdefault(node, []).append(name)
        self._constants: list[str] = []
        self._laid_out: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        self._readings: dict[tuple[fx.Node, tuple[int, ...], torch.dtype], fx.Node] = {}

    def write(self, site: Site, opened: Opened) -> None:
        """A site's call in the place of the operator that makes its last value.

        Args:
            site: the site.
            opened: what each call says of open extents.
        """
        heads = [self._makers[name] for name in site.results]
        with self._graph.inserting_before(min(heads, key=self._places.__getitem__).next):
            src = self._src(site, opened.axes)
            given = given_of(site.plan)
            operands = [node for each in given for node in self._operand(site, each, opened.shapes)]
            plan = FusionPlan(site.plan.src, *site.plan.ops[:-1]) if site.into else site.plan
            is_product = any(each.role == "weight" for each in site.built.kernel.operands)
            how = site.joins, site.records.accuracy, is_product and site.records.target.repacks
            text = operators_text(plan, opened.axes, *how)
            call = self._graph.call_function(launched, (text, src, operands))
            made = self._graph.call_function(first, (call,))
            results = [self._view(made, op) for op in site.ranges.values()] or [made]
            for name, place in site.further.items():
                heads.append(self._makers[name])
                results.append(self._graph.call_function(operator.getitem, (call, place)))
        for head, result in zip(heads, results, strict=True):
            self._replace(head, result)
        if site.ranges:
            is_lain = self._is_lain(src, site.plan.src)
            for result, op in zip(results, site.ranges.values(), strict=False):
                order = op.order if isinstance(op, Permute) and is_lain else ()
                result.meta[ORDER] = tuple(map(order.index, range(len(order))))
        elif self._is_lain(src, site.plan.src):
            made.meta[ORDER] = tuple(by_stride(plan.output.element_strides))
        if site.into:
            call.meta[WITHIN] = operators_text(site.plan, opened.axes, *how)
            join, order = self._makers[site.into.value], tuple(by_stride(plan.output.element_strides))
            join.target, join.args, join.kwargs = joined, (join.args[0], site.into.axis, order), {}
            join.meta[ORDER] = order

    def _view(self, made: fx.Node, op: Slice | Permute) -> fx.Node:
        """A view of a plan's result."""
        if isinstance(op, Permute):
            return self._graph.call_function(aten.permute.default, (made, [*op.order]))
        return self._graph.call_function(aten.slice.Tensor, (made, op.axis, op.begin, op.end))

    def _replace(self, head: fx.Node, made: fx.Node) -> None:
        """Puts a plan's result into the place of torch's."""
        made.meta = {key: each for key, each in head.meta.items() if key != ORDER}
        head.replace_all_uses_with(made)
        self._named[made] = self._named.pop(head)
        self._makers |= dict.fromkeys(self._named[made], made)

    def _src(self, site: Site, opened: tuple[int, ...]) -> fx.Node:
        """The input: an elementwise plan reads it as it lies, where no layout was wanted."""
        if site.beside:
            parts = [self._makers[name] for name in site.beside.names]
            return self._graph.call_function(beside, (parts, site.beside.axis))
        node, spec = self._makers[site.src], site.plan.src
        if joins_rows(site, self._makers):
            told = tuple(-1 if axis in opened else extent for axis, extent in enumerate(spec.shape))
            node = self._read_as(node, spec.shape, node.meta["val"].dtype, told)
        is_plain = tuple(by_stride(spec.element_strides)) == tuple(range(spec.rank))
        if is_plain and all(op.kind == "elementwise" for op in site.plan.ops):
            return node
        return self._lain(node, spec)

    def _is_lain(self, node: fx.Node, spec: TensorSpec) -> bool:
        """Whether the value is known to lie as a plan has it; calls may give inputs in any order."""
        order = tuple(by_stride(spec.element_strides))
        known = node.meta.get(ORDER), node.args[1] if node.target is laid_out else None
        return not spec.is_dense or order in known  # ranges are of plans' results

    def _lain(self, node: fx.Node, spec: TensorSpec | Dense) -> fx.Node:
        """The value with its axes in memory in the order that a plan has them in; a range as it lies."""
        order = tuple(by_stride(spec.element_strides))
        is_range = isinstance(spec, TensorSpec) and not spec.is_dense
        if is_range or node.meta.get(ORDER) == order:
            return node
        if (node, order) not in self._laid_out:
            self._laid_out[node, order] = self._graph.call_function(laid_out, (node, order, True))
        return self._laid_out[node, order]

    def _operand(
        self, site: Site, operand: Operand | Result, opened: Mapping[str, tuple[int, ...]]
    ) -> Iterator[fx.Node]:
        value = site.operands[operand.key]
        if isinstance(value, Joined):
            yield from (self._makers[name] for name in value.names)
        elif isinstance(value, str):
            taken = dtypes_taken(operand, site.plan[operand.step].src.dtype)
            yield self._value(value, operand, opened.get(operand.key, operand.shape), taken)
        else:
            yield self._constant(np.asarray(value))

    def _value(
        self, value: str, operand: Operand | Result, opened: tuple[int, ...], taken: Sequence[str]
    ) -> fx.Node:
        node, shape = self._makers[value], operand.shape
        node = self._read_as(node, shape, node.meta["val"].dtype, opened)  # (f, 1, 1) as (f,)
        if operand.spec is not None:
            node = self._read_as(node, shape, DTYPES[operand.dtype], opened)  # as a wider src has it
            return self._lain(node, operand.spec)
        # A kernel widens it when it is bound; here it may have other elements in each call.
        is_changing = node.op == "call_function" or self._changing
        if not is_changing and NAMES.get(node.meta["val"].dtype) in taken:
            return node
        return self._read_as(node, shape, DTYPES[operand.dtype], opened)

    def _read_as(
        self, node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype, told: tuple[int, ...]
    ) -> fx.Node:
        """The value in another shape or dtype: one call for all sites that read it so.

        Args:
            node: the value.
            shape: of the example.
            dtype: of the result.
            told: the shape as a call of torch's is told it, with -1 for an open extent.
        """
        if (tuple(node.meta["val"].shape), node.meta["val"].dtype) == (shape, dtype):
            return node
        is_told = told.count(-1) < 2  # else the value has further axes, of extent 1
        while is_told and node.target in RESHAPES:
            node = node.args[0]
        key, call, was = (node, told, dtype), node, node.meta["val"]
        if key not in self._readings:
            if tuple(was.shape) != shape:
                ones = [axis for axis, extent in enumerate(was.shape) if extent == 1]
                how = (aten.reshape.default, told) if is_told else (aten.squeeze.dims, ones)
                call = self._graph.call_function(how[0], (call, how[1]))
            if was.dtype != dtype:
                call = self._graph.call_function(aten._to_copy.default, (call,), {"dtype": dtype})
            call.meta["val"] = Described.of(shape, dense(shape, range(len(shape))), dtype, was.device)
            self._readings[key] = call
        return self._readings[key]

    def _constant(self, value: NDArray[Any]) -> fx.Node:
        name = f"constant_{len(self._constants)}"
        self._constants.append(name)
        with _without_modes():  # the tensor has elements
            tensor = torch.from_numpy(np.ascontiguousarray(value)).to(self._device)
        self._module.register_buffer(name, tensor, persistent=False)
        return self._graph.get_attr(name)
