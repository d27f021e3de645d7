"""Plans beside TorchInductor: products, convolutions, attention and rotations. All else is Inductor's.

Inductor fuses reductions, pools and chains of elementwise operators with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._guards import detect_fake_mode, tracing
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.ir import FallbackKernel, IRNode, TensorBox
from torch._inductor.lowering import constrain_to_fx_strides, make_fallback, register_lowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fuseplan.torch.operator  # noqa: F401 - registers the operator
from fuseplan.graph.cut import Site
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.op import Op
from fuseplan.stores.cache import fingerprint
from fuseplan.torch.cutting import fused
from fuseplan.torch.eager import Eager
from fuseplan.torch.reporting import report_of, trace

PEER = f"Inductor of torch {torch.__version__}"
RUN = torch.ops.fuseplan.run.default


class PlanKernel(FallbackKernel):  # type: ignore[misc]
    """A call of a plan in Inductor's program, which is a `Site` where that program is Python."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        if type(wrapper) is PythonWrapperCodegen:
            name = f"fuseplan_{self.get_name()}"
            wrapper.add_import_once("from fuseplan.torch.sites import Site as FuseplanSite")
            wrapper.header.writeline(f"{name} = FuseplanSite()")
            self.python_kernel_name = name
        super().codegen(wrapper)


def _lowered(*args: Any, **kwargs: Any) -> Any:
    made = PlanKernel.create(RUN, *args, **kwargs)
    return pytree.tree_map_only(IRNode, TensorBox.create, made)


make_fallback(RUN, constrain_to_fx_strides, warn=False)
register_lowering(RUN, type_promotion_kind=None)(_lowered)


def _is_taken(op: Op) -> bool:
    """Whether plans compute an operator: a product, a convolution, attention, or a rotation of parts."""
    is_turn = op.has_parts and bool(op.operand_fields)
    return op.kind == "attention" or "weight" in op.operand_fields or is_turn


def has_weights(site: Site) -> bool:
    """Whether the site's plan has such an operator; Inductor looks up rows in the kernel that reads them."""
    is_lookup = len(site.plan.ops) == 1 and site.plan.ops[0].looks_up
    return not is_lookup and any(map(_is_taken, site.plan.ops))


def _is_apart(node: Node) -> bool:
    """Whether Inductor computes an operator whatever plans there are."""
    return not (isinstance(node.op, Layer) and _is_taken(node.op.op))


class Compiled(Eager):
    """Inductor's kernels for a site's operators, in the place of torch's own ones."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.name = PEER

    def ready(self, module: fx.GraphModule, given: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """The operators as Inductor compiles them by themselves."""
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(each) for each in given]
        with tracing(None):  # the graph that holds the site is being compiled
            made = _inner(_decomposed(module, fakes, mode), fakes, mode, is_inference=True)
        return lambda *tensors: made([*tensors])


# Of `fused`, here.
HOW: dict[str, Any] = {"is_taken": has_weights, "opens": False, "framework": Compiled, "is_apart": _is_apart}


def compiled(
    given: fx.GraphModule,
    fakes: Sequence[Any],
    device: torch.device,
    *,
    is_inference: bool = False,
    **how: Any,
) -> Callable[..., Any]:
    """A graph of ATen operators with plans, and Inductor's kernels for the rest.

    Args:
        given: the graph, as autograd leaves it.
        fakes: tensors like those of its calls.
        device: what they lie on.
        is_inference: no gradient is taken: Inductor chooses layouts then.
        **how: as for `fused`.
    """
    traced = _traced(given, fakes, device, **how)
    return _inner(traced, fakes, detect_fake_mode(fakes), is_inference=is_inference)


def _inner(
    traced: fx.GraphModule, inputs: Sequence[Any], mode: Any, *, is_inference: bool
) -> Callable[..., Any]:
    """A graph of the operators that Inductor takes, compiled; it takes a list of tensors, and empties it."""
    with V.set_fake_mode(mode):
        joint_graph_passes(traced)  # Inductor's own, of which one makes random numbers its own
    if is_inference:  # others are saved for the backward pass
        output = next(iter(reversed(traced.graph.nodes)))
        places = [place for place, each in enumerate(output.args[0]) if isinstance(each, fx.Node)]
        output.meta["user_visible_output_idxs"] = places  # lie as torch's do: Inductor pads values of its own
    with patch.object(mode, "allow_non_fake_inputs", True):  # constants of plans have elements
        made: Callable[..., Any] = compile_fx_inner(traced, list(inputs), is_inference=is_inference)
    return made


def _traced(given: fx.GraphModule, fakes: Sequence[Any], device: torch.device, **how: Any) -> fx.GraphModule:
    """The graph with plans, in the operators that Inductor takes."""
    fusion = fused(given, device, **how)
    trace(lambda: report_of(fusion, device))
    return _decomposed(fusion.module, fakes, detect_fake_mode(fakes))


def _decomposed(module: fx.GraphModule, inputs: Sequence[Any], mode: Any) -> fx.GraphModule:
    """A graph in the operators that Inductor takes."""
    with mode, patch.object(mode, "allow_non_fake_inputs", True):  # folded weights have elements
        traced: fx.GraphModule = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
    return traced


class InductorPass(CustomGraphPass):  # type: ignore[misc]
    """Puts plans into Inductor's graph, in place. Graphs on several devices stay as they are."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph."""
        inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
        devices = {each.device for each in inputs if isinstance(each, torch.Tensor)}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            return
        owner = graph.owning_module
        made = _traced(owner, inputs, devices.pop(), **HOW, ranges=False)
        for name, value in made.named_buffers():
            owner.register_buffer(name, value, persistent=False)
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
        graph.output(graph.graph_copy(made.graph, {}))

    def uuid(self) -> Any:
        """The package's fingerprint: Inductor keeps no graph that another version wrote."""
        return fingerprint()


def inductor_pass() -> InductorPass:
    """A pass for Inductor's own pipeline.

        torch.compile(model, options={"post_grad_custom_pre_pass": fuseplan.torch.inductor_pass()})

    Inductor has taken some operators apart by then: the same in `torch.compile(model, backend="fuseplan",
    options={"rest": "inductor"})` finds longer plans.
    """
    return InductorPass()
