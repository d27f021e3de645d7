"""Modules as torch.export gives them, and the tensors that their graphs are called with.

torch.export takes seconds: its graph is kept in the cache folder under a key of what the call computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fuseplan.errors import ArgumentError
from fuseplan.stores import cache
from fuseplan.torch.called import UnseenError, outline, recorded, repeats
from fuseplan.torch.masks import simplify_masks
from fuseplan.torch.own_backward import watched
from fuseplan.torch.written import (
    UnwrittenError,
    graph_text,
    packed,
    read_graph,
    read_tensor,
    tensor_text,
    unpacked,
)

Held: TypeAlias = tuple[nn.Module, str] | torch.Tensor  # a submodule and a name there, or a constant


@dataclass(frozen=True)
class Exported:
    """A module's graph of functional ATen operators.

    Attributes:
        graph: a function of the module's tensors, in order, and the inputs.
        device: what its tensors lie on.
        state: the paths of parameters and buffers, and the constants that the module's code holds.
        in_spec, out_spec: how the call's arguments, and its results, are lists of tensors.
        functions: the names of the module's torch.autograd.Functions: the graph has their forward alone. None
            where the export could not see them, since no gradient was asked for.
        ranges: the least and the largest numbers of open extents, by torch's expressions.
    """

    graph: fx.GraphModule
    device: torch.device
    state: tuple[str | torch.Tensor, ...]
    in_spec: Any
    out_spec: Any
    functions: tuple[str, ...] | None
    ranges: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> list[Any]:
        """The inputs as torch describes them."""
        places = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        return [node.meta.get("val") for node in places[len(self.state) :]]

    def held(self, module: nn.Module) -> list[Held]:
        """Where the tensors are that the graph takes before the inputs."""
        return [each if isinstance(each, torch.Tensor) else _owner(module, each) for each in self.state]

    def to_json(self) -> list[Any]:
        """The graph as values of JSON.

        Raises:
            UnwrittenError: a part of it has no text.
        """
        try:
            specs = [pytree.treespec_dumps(each) for each in (self.in_spec, self.out_spec)]
        except NotImplementedError as error:  # of a class that torch cannot name
            raise UnwrittenError(str(error)) from None
        state = [tensor_text(each) if isinstance(each, torch.Tensor) else each for each in self.state]
        return [graph_text(self.graph.graph), str(self.device), state, specs, self.functions]

    @classmethod
    def from_json(cls, told: list[Any]) -> Exported:
        """The graph that `to_json` told."""
        graph, device, state, (in_spec, out_spec), functions = told
        return cls(
            read_graph(graph),
            torch.device(device),
            tuple(each if isinstance(each, str) else read_tensor(each) for each in state),
            pytree.treespec_loads(in_spec),
            pytree.treespec_loads(out_spec),
            None if functions is None else tuple(functions),
        )


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def tensors_of(held: Sequence[Held]) -> list[torch.Tensor]:
    """The tensors as they are now."""
    return [each if isinstance(each, torch.Tensor) else _tensor(*each) for each in held]


def _tensor(owner: nn.Module, name: str) -> torch.Tensor:
    """A parameter or a buffer; 0.2 us where its name as an attribute takes 1.5 us."""
    for named in (owner._parameters, owner._buffers):
        found = named.get(name)
        if found is not None:
            return found
    made: torch.Tensor = getattr(owner, name)  # such as a parametrized one
    return made


def exported(
    module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> Exported:
    """Exports a module as it computes in its present mode; a call that was exported before is read.

    A graph with open extents is not kept: a record of one call does not tell what others compute.

    Raises:
        ArgumentError: torch.export does not take the module, its tensors lie on several devices, or its call
            writes into buffers or inputs.
    """
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves(inputs)]
    devices = {each.device for each in tensors if isinstance(each, torch.Tensor)}
    if len(devices) != 1:
        told = ", ".join(sorted(map(str, devices))) or "none"
        raise ArgumentError(f"a module and its inputs are fused on one device; got {told}")
    device, found = devices.pop(), list[Exported]()
    if dynamic_shapes is not None:
        return _exported(module, inputs, kwargs, device, dynamic_shapes)

    def is_current(data: bytes) -> bool:
        record, told = unpacked(data)
        if not repeats(record, module, inputs, kwargs):
            return False
        found.append(Exported.from_json(told))
        return True

    def make() -> bytes:
        record = recorded(module, inputs, kwargs)
        found.append(_exported(module, inputs, kwargs, device))
        if record is None:
            raise UnwrittenError(type(module).__name__)
        return packed([record, found[0].to_json()])

    try:
        cache.kept(make, "torch.export", outline(module, inputs, kwargs), is_current=is_current)
    except (UnseenError, UnwrittenError):
        found = found or [_exported(module, inputs, kwargs, device)]
    return found[0]


def _exported(
    module: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    dynamic_shapes: Any = None,
) -> Exported:
    try:
        with warnings.catch_warnings(), watched(module) as watch:
            warnings.simplefilter("ignore")  # torch's own, of its parts
            program = torch.export.export(
                module, tuple(inputs), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
            program = program.run_decompositions({})
    except Exception as error:  # torch.export raises errors of many kinds
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"torch.export does not take {type(module).__name__}: {said}") from error
    _unchecked(program.graph_module.graph)
    simplify_masks(program.graph_module.graph)
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        listed = ", ".join(changed)
        raise ArgumentError(f"{type(module).__name__} writes into {listed}: call .eval() before fusing")
    constants = signature.inputs_to_lifted_tensor_constants.values()
    targets = [each.target for each in signature.input_specs if each.target is not None]
    state = tuple(program.constants[each] if each in constants else each for each in targets)
    call = program.call_spec
    ranges, functions = program.range_constraints, watch.functions
    return Exported(program.graph_module, device, state, call.in_spec, call.out_spec, functions, ranges)


def _unchecked(graph: fx.Graph) -> None:
    """Takes out checks of dtypes and devices: they hold for every call that has the form of the example."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
