"""Modules as torch.export gives them, and the tensors that their graphs are called with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fuseplan.errors import ArgumentError


@dataclass(frozen=True)
class Exported:
    """A module's graph of functional ATen operators.

    Attributes:
        program: torch's record of it.
        device: what its tensors lie on.
    """

    program: Any
    device: torch.device

    @property
    def graph(self) -> fx.GraphModule:
        """The graph: a function of parameters, buffers, constants and inputs."""
        made: fx.GraphModule = self.program.graph_module
        return made

    def held(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """The submodules with the parameters and buffers that the graph takes first, and the names there."""
        signature = self.program.graph_signature
        paths = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.values()
        split = (path.rpartition(".") for path in paths)
        return [(module.get_submodule(owner), name) for owner, _, name in split]

    @property
    def constants(self) -> list[torch.Tensor]:
        """The tensors that the graph takes next: those that the module's code holds."""
        lifted = self.program.graph_signature.inputs_to_lifted_tensor_constants
        return [self.program.constants[name] for name in lifted.values()]


def exported(module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Exported:
    """Exports a module as it computes in its present mode.

    Raises:
        ArgumentError: torch.export does not take the module, its tensors lie on several devices, or its call
            writes into buffers or inputs.
    """
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves(inputs)]
    devices = {each.device for each in tensors if isinstance(each, torch.Tensor)}
    if len(devices) != 1:
        told = ", ".join(sorted(map(str, devices))) or "none"
        raise ArgumentError(f"a module and its inputs are fused on one device; got {told}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its parts
            program = torch.export.export(module, tuple(inputs), dict(kwargs), strict=False)
            program = program.run_decompositions({})
    except Exception as error:  # torch.export raises errors of many kinds
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"torch.export does not take {type(module).__name__}: {said}") from error
    _unchecked(program.graph_module.graph)
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        listed = ", ".join(changed)
        raise ArgumentError(f"{type(module).__name__} writes into {listed}: call .eval() before fusing")
    return Exported(program, devices.pop())


def _unchecked(graph: fx.Graph) -> None:
    """Takes out checks of dtypes and devices: they hold for every call that has the form of the example."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
