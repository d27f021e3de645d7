"""Modules as torch.export gives them, and the tensors that their graphs are called with.

torch.export takes seconds: its graph is kept in the cache folder under a key of what the call computes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fuseplan.errors import ArgumentError
from fuseplan.stores import cache
from fuseplan.torch.called import UnseenError, outline, recorded, repeats
from fuseplan.torch.decomposing import run_decompositions
from fuseplan.torch.einsum import Products
from fuseplan.torch.flexible import FLEX, READ, read_scores
from fuseplan.torch.held import HOOKS, Held, twin
from fuseplan.torch.masks import hide_by_masks, join_batches, simplify_masks, sum_masks
from fuseplan.torch.statistics import flatten_norms
from fuseplan.torch.written import (
    UnwrittenError,
    graph_text,
    packed,
    read_graph,
    read_tensor,
    tensor_text,
    unpacked,
)

aten = torch.ops.aten
SPECIALIZED = re.compile(
    r"You marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)"
)
ENOUGH = "give an example with an extent of 2 or more there: torch.export takes an extent of 1 as fixed"
NOT_OPEN = "leave it out of dynamic_shapes: the module computes with that extent alone"
LIKE_ARGUMENTS = "give `dynamic_shapes` by the names of the arguments, or a tuple of one for each"
COMPILED = 'torch.compile(module, backend="fuseplan") takes modules of any kind'
NO_TREE = (
    "return tensors in tuples, lists or dicts: a model of transformers does with `config.use_cache = False`"
)
OPEN = "its extents are open, and a record of one call does not tell what others compute"
NOT_CALLED = "does `module(*example_inputs)` run?"
# Files of torch's and Python's own, and code that they make.
FOREIGN = (*(os.path.dirname(each) + os.sep for each in (torch.__file__, os.__file__, __file__)), "<")


@dataclass(frozen=True)
class Exported:
    """A module's graph of functional ATen operators.

    Attributes:
        graph: a function of the module's tensors, in order, and the inputs.
        device: what its tensors lie on.
        state: the paths of parameters and buffers, and the constants that the module's code holds.
        in_spec, out_spec: how the call's arguments, and its results, are lists of tensors.
        ranges: the least and the largest numbers of open extents, by torch's expressions.
        unkept: why the next start exports the module again; empty where it reads this graph.
    """

    graph: fx.GraphModule
    device: torch.device
    state: tuple[str | torch.Tensor, ...]
    in_spec: Any
    out_spec: Any
    ranges: Mapping[Any, Any] = field(default_factory=dict)
    unkept: str = ""

    @property
    def inputs(self) -> list[Any]:
        """The inputs as torch describes them."""
        places = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        return [node.meta.get("val") for node in places[len(self.state) :]]

    def held(self, module: nn.Module) -> Held:
        """Where the tensors are that the graph takes before the inputs."""
        return Held(module, self.state)

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
        return [graph_text(self.graph.graph), str(self.device), state, specs]

    @classmethod
    def from_json(cls, told: list[Any]) -> Exported:
        """The graph that `to_json` told."""
        graph, device, state, (in_spec, out_spec) = told
        return cls(
            read_graph(graph),
            torch.device(device),
            tuple(each if isinstance(each, str) else read_tensor(each) for each in state),
            pytree.treespec_loads(in_spec),
            pytree.treespec_loads(out_spec),
        )


@patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)  # an error tells it
def exported(
    module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> Exported:
    """Exports a module as it computes in its present mode; a call that was exported before is read.

    A graph with open extents is not kept: a record of one call does not tell what others compute.

    Raises:
        ArgumentError: torch.export does not take the module, its tensors lie on several devices, or its call
            writes into buffers or inputs.
    """
    module = _unhooked(module)
    inputs, kwargs = _apart(module, (tuple(inputs), dict(kwargs)))
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves(inputs)]
    devices = {each.device for each in tensors if isinstance(each, torch.Tensor)}
    if len(devices) != 1:
        told = ", ".join(sorted(map(str, devices))) or "none"
        raise ArgumentError(f"a module and its inputs are fused on one device; got {told}")
    device, found = devices.pop(), list[Exported]()
    if dynamic_shapes is not None:
        return replace(_exported(module, inputs, kwargs, device, dynamic_shapes), unkept=OPEN)

    def is_current(data: bytes) -> bool:
        record, told = unpacked(data)
        if not repeats(record, module, inputs, kwargs):
            return False
        found.append(Exported.from_json(told))
        return True

    def make() -> bytes:
        found.append(_exported(module, inputs, kwargs, device))
        if any(node.target in (READ, FLEX) for node in found[0].graph.graph.nodes):
            raise UnwrittenError(
                "functions of FlexAttention are code, of which a record of a call tells nothing"
            )
        return packed([recorded(module, inputs, kwargs), found[0].to_json()])

    try:
        cache.kept(make, "torch.export", outline(module, inputs, kwargs), is_current=is_current)
    except (UnseenError, UnwrittenError) as error:
        made = found[0] if found else _exported(module, inputs, kwargs, device)
        return replace(made, unkept=str(error))
    return found[0]


def _unhooked(module: nn.Module) -> nn.Module:
    """The module without its own hooks, which are called around the fused call; those of submodules stay."""
    made = twin(module)
    vars(made).update(
        {name: type(hooks)() for name, hooks in vars(module).items() if name in HOOKS and hooks}
    )
    return made if any(vars(module)[name] for name in HOOKS) else module


def _apart(module: nn.Module, given: Any) -> Any:
    """The arguments without a tensor twice, or one of the module's: torch.export takes both for one input."""
    seen = {id(each) for each in (*module.parameters(), *module.buffers())}

    def other(value: Any) -> Any:
        if id(value) in seen and isinstance(value, torch.Tensor):
            value = value.detach().requires_grad_(value.requires_grad)
        seen.add(id(value))
        return value

    return pytree.tree_map(other, given)


def _exported(
    module: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    dynamic_shapes: Any = None,
) -> Exported:
    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")  # torch's own, of its parts
            program = _program(module, inputs, kwargs, dynamic_shapes)
            program = run_decompositions(program, {aten.copy.default: _copied})
    except Exception as error:  # torch.export raises errors of many kinds, and prints its graph
        raise ArgumentError(f"torch.export does not take {_told(module, error)}") from error
    sys.stderr.write(said.getvalue())
    _unchecked(program.graph_module.graph)
    simplify_masks(program.graph_module.graph)
    hide_by_masks(program.graph_module.graph)
    sum_masks(program.graph_module.graph)
    join_batches(program.graph_module.graph)
    flatten_norms(program.graph_module.graph)
    signature = program.graph_signature
    lifted = signature.inputs_to_lifted_tensor_constants
    held = {name: program.constants[each] for name, each in lifted.items()}
    _write_numbers(program.graph_module.graph, held)
    read_scores(program.graph_module.graph, held)
    changed = [each.target for each in signature.output_specs if each.target]  # results have none
    if changed:
        remedy = "call .eval() before fusing where these are statistics; or " if module.training else ""
        told = f"{type(module).__name__} writes into {', '.join(changed)}"
        raise ArgumentError(f"{told}, which fuse does not: {remedy}{COMPILED}")
    constants = lifted.values()
    targets = [each.target for each in signature.input_specs if each.target is not None]
    state = tuple(program.constants[each] if each in constants else each for each in targets)
    call = program.call_spec
    ranges = program.range_constraints
    return Exported(program.graph_module, device, state, call.in_spec, call.out_spec, ranges)


def _program(
    module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    def made() -> torch.export.ExportedProgram:
        return torch.export.export(
            module, tuple(inputs), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )

    try:
        with Products():
            return made()
    except Exception as error:  # of several kinds, by torch's version
        if not any("flex_attention" in each.filename for each in traceback.extract_tb(error.__traceback__)):
            raise
    with torch.no_grad():  # torch traces FlexAttention under no mode of ours; a CPU has it without gradients
        return made()


def _copied(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The tensor that `dst.copy_(src)` leaves in dst, with its strides, by operators that have a derivative.

    `aten.copy`, which an export writes for in-place operators on a part of a tensor, has none.
    """
    made = src.to(dst, non_blocking=non_blocking).expand(dst.shape)
    return aten.slice_scatter.default(dst, made) if dst.ndim else made.clone()


def _told(module: nn.Module, error: Exception) -> str:
    """The module, torch's reason, the line of the module's code that has it, and what to do."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(" If this type")[0]
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [each for each in frames if not each.filename.startswith(FOREIGN)]
    place = f"\n  {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    is_own = type(error).__module__ == "builtins"
    is_own = is_own and (bool(own) or not isinstance(error, AssertionError | AttributeError))  # else torch's
    remedy = NO_TREE if "in output, which" in reason else NOT_CALLED if is_own else COMPILED
    if is_own and isinstance(error, RuntimeError | TypeError):  # the module's, or torch.export's
        remedy += f" If so, {COMPILED}"
    if "`dynamic_shapes`" in reason:
        reason, remedy = reason.partition(" Alternatively")[0], LIKE_ARGUMENTS
    fixed = dict(SPECIALIZED.findall(str(error)))
    if fixed:
        held = " and ".join(f"{name} = {count}" for name, count in fixed.items())
        reason = f"dynamic_shapes opens {', '.join(fixed)}, and its graph has {held} alone"
        remedy = ENOUGH if "1" in fixed.values() else NOT_OPEN
    return f"{type(module).__name__}: {reason}{place}\n  {remedy}"


def _write_numbers(graph: fx.Graph, held: Mapping[str, torch.Tensor]) -> None:
    """Writes the numbers that a module's code holds where they are copied: formulas have them as such."""
    for copied in graph.find_nodes(op="call_function", target=aten.clone.default):
        number = held.get(copied.args[0].name)
        if number is not None and not number.ndim:
            copied.target, copied.args = aten.full.default, ([], number.item())
            copied.kwargs = {"dtype": number.dtype, "device": number.device}


def _unchecked(graph: fx.Graph) -> None:
    """Takes out checks of dtypes and devices: they hold for every call that has the form of the example."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
