"""`torch.compile(model, backend="fuseplan")`: plans in the graphs of forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext

from fuseplan.errors import ArgumentError
from fuseplan.graph.choose import Mode
from fuseplan.graph.rules import Rule
from fuseplan.graph.why import Reason
from fuseplan.torch.arenas import Arenas
from fuseplan.torch.cutting import Fusion, copied, fused
from fuseplan.torch.einsum import write_products
from fuseplan.torch.flexible import read_scores
from fuseplan.torch.heads import join_losses
from fuseplan.torch.intact import keep_attention, restore_attention
from fuseplan.torch.lifetimes import Lifetimes
from fuseplan.torch.lying import ORDER, laid_out, order_of
from fuseplan.torch.masks import fold_masks, hide_by_masks, simplify_masks, sum_masks
from fuseplan.torch.operator import launched
from fuseplan.torch.partition import partitioned
from fuseplan.torch.passes import Passes
from fuseplan.torch.restoring import Lying
from fuseplan.torch.siblings import join_siblings, multiply_by_rows
from fuseplan.torch.sites import Site
from fuseplan.torch.statistics import flatten_norms
from fuseplan.torch.trained import train_attention


@dataclass(frozen=True)
class Options:
    """What torch.compile is given as `options`; the words that each may be, its default first; and rules."""

    rest: Literal["torch", "inductor"] = "torch"
    choose: Mode = "predicted"
    dryrun: Literal[False, True] = False
    accuracy: Literal["default", "strict"] = "default"
    rules: Sequence[Rule] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """The options that a caller gave.

        Raises:
            ArgumentError: there is no such option, or it has no such value, or not beside the others.
        """
        known = {name: get_args(hint) for name, hint in get_type_hints(cls).items() if name != "rules"}
        if any(value not in known.get(name, ()) for name, value in given.items() if name != "rules"):
            told = ", ".join(f"{name}={' or '.join(map(repr, values))}" for name, values in known.items())
            raise ArgumentError(
                f"the backend fuseplan has the options {told}, rules=[...]; got {dict(given)}"
            )
        return cls(**given)


def _compiled(
    given: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    example: Sequence[Any],
    passes: Passes,
    is_inference: bool = False,
) -> Callable[..., Any]:
    """The graph with plans; as it is where its tensors lie on several devices, or on one without plans."""
    restore_attention(given)
    device = device_of(inputs)
    if device is None:
        return _boxed(given.forward)
    if is_inference:  # a backward pass is given the mask that the forward pass was
        simplify_masks(given.graph)
        hide_by_masks(given.graph)
        sum_masks(given.graph)
        read_scores(given.graph)
        flatten_norms(given.graph)
        given.recompile()
    how: dict[str, Any] = {each: getattr(options, each) for each in ("choose", "rules", "accuracy")}
    kept = _kept(given, device) if options.rest == "torch" else []
    how |= {"kept": kept, "ranges": is_inference, "inputs": example if _is_like(example, inputs) else ()}
    own = _own(given) if is_inference else []
    form = partial(fused, given, device, joins=bool(own) and device.type == "cpu", **how)
    is_beside = options.rest == "inductor" and not (own and _is_alone(form, options, own, device))
    if is_beside:
        from fuseplan.torch import inductor

        how |= inductor.HOW
        form = partial(fused, given, device, **how)
    if options.dryrun:
        passes.add(form(is_built=False, choose="predicted"), device, own)
        return _boxed(given.forward)
    if is_beside:
        return inductor.compiled(given, inputs, device, is_inference=is_inference, **how)
    made = form()
    _tell_strides(made.module.graph, kept)
    passes.add(made, device, own)
    if own:
        return _planned(made.module, own, device)
    _drop_layings(made.module, device)
    for node in made.module.graph.find_nodes(op="call_function", target=launched):
        node.target = Site()
    made.module.recompile()
    return _boxed(made.module.forward)


def _backward(
    given: fx.GraphModule, inputs: Sequence[Any], options: Options, **more: Any
) -> Callable[..., Any]:
    """The graph of a backward pass; Inductor's kernels write what products that are joined read."""
    if options.rest == "inductor":
        join_siblings(given)
    else:
        multiply_by_rows(given)
        # Inputs lie as the forward pass left them; `val` tells how torch's operators would have.
        for node, each in zip(given.graph.find_nodes(op="placeholder"), inputs, strict=True):
            if isinstance(each, torch.Tensor) and each.stride() != node.meta["val"].stride():
                node.meta[ORDER] = tuple(order_of(each))
    return _compiled(given, inputs, options, **more)


def _kept(given: fx.GraphModule, device: torch.device) -> list[int]:
    """The places of a forward pass's outputs that its backward pass alone reads, on a CPU."""
    context = TracingContext.try_get()
    told = context.fw_metadata if context and context.output_strides is not None else None
    if told is None or device.type != "cpu" or _is_open(given) or told.num_symints_saved_for_bw is None:
        return []
    (outputs,) = next(iter(reversed(given.graph.nodes))).args
    return [*range(len(outputs))[told.tensors_saved_for_backwards_slice]]


def _tell_strides(graph: fx.Graph, kept: Sequence[int]) -> None:
    """Tells torch how the kept outputs lie: the backward pass is compiled for tensors that lie so."""
    if kept:
        lying, (outputs,) = Lying(), next(iter(reversed(graph.nodes))).args
        made = [lying.of(each) if place in kept else None for place, each in enumerate(outputs)]
        strides = [each.stride() if isinstance(each, torch.Tensor) else None for each in made]
        TracingContext.get().output_strides.extend(strides)


def _is_alone(
    form: Callable[..., Fusion], options: Options, own: Sequence[int], device: torch.device
) -> bool:
    """Whether plans leave Inductor nothing to fuse: no operator of a call's that reads another one's result.

    Launches in an arena take less of the host's time than those in Inductor's programs.
    """
    if options.choose == "measured":  # sites are timed beside Inductor's kernels
        return False
    module = form(is_built=False).module
    inputs = module.graph.find_nodes(op="placeholder")
    lives = Lifetimes.of(module, [inputs[place] for place in own], on_gpu=device.type == "cuda")
    return not lives.neighbours(module.graph)


def _own(given: fx.GraphModule) -> list[int]:
    """The places of the module's own tensors among a graph's inputs; none with open extents, or untold."""
    context = TracingContext.try_get()
    told = context.fw_metadata if context else None
    if told is None or _is_open(given):
        return []
    return [place for place in told.static_input_indices if place not in told.mutated_inp_runtime_indices]


def _is_open(given: fx.GraphModule) -> bool:
    """Whether an input is an extent that torch leaves open, or has one."""
    inputs = [node.meta.get("val") for node in given.graph.nodes if node.op == "placeholder"]
    extents = (each for value in inputs if isinstance(value, torch.Tensor) for each in value.shape)
    return any(isinstance(each, torch.SymInt) for each in (*inputs, *extents))


def _drop_layings(module: fx.GraphModule, device: torch.device) -> None:
    """Removes the nodes that lay out values that lie so: torch's compiler sees to how inputs lie."""
    if _is_open(module):
        return
    for node in Lifetimes.of(module, (), on_gpu=device.type == "cuda").same:
        if node.target is laid_out:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _planned(module: fx.GraphModule, own: Sequence[int], device: torch.device) -> Callable[..., Any]:
    """A graph whose values lie in arenas."""
    arenas = Arenas(module, own, device)
    count = sum(node.op == "placeholder" for node in module.graph.nodes)
    others = [place for place in range(count) if place not in own]

    def call(*inputs: Any) -> Any:
        made = arenas([inputs[place] for place in own], [inputs[place] for place in others])
        return module.forward(*inputs) if made is None else made

    return _boxed(call)


def device_of(tensors: Sequence[Any]) -> torch.device | None:
    """The one device of tensors, where plans run on it."""
    devices = {each.device for each in tensors if isinstance(each, torch.Tensor)}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type in ("cpu", "cuda") else None


def _is_like(example: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether the tensors of a call are those that a graph takes: a backward pass takes others."""
    return len(example) == len(inputs) and all(
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.dtype, one.device, one.stride()) == (other.dtype, other.device, other.stride())
        and one.shape == other.shape
        for one, other in zip(example, inputs, strict=True)
    )


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    boxed: Callable[..., Any] = make_boxed_func(function)
    return boxed


def compile_graph(
    given: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that torch.compile calls with each of its graphs.

    Values, shapes and strides of outputs are torch's. Extents that torch leaves open are open in plans;
    beside Inductor, operators on such tensors are Inductor's. On a CPU, a plan of a training step that saves
    less than its call takes is left to torch. So is the whole graph, without autograd's compiler, where all
    plans save less than that takes: 0.4 ms a step and 4 us an operator. The reports say so.

    Args:
        given: the graph.
        inputs: tensors like those of its calls.
        options: `rest` names what computes the operators that no plan does: `torch`, its operators one by one
            (the default), or `inductor`, which also computes plans without weights, unless plans leave it
            nothing to fuse. `choose` is that of `fuseplan.torch.fuse`; beside Inductor, a site is timed
            beside the kernels that Inductor makes of its operators, and then the graph beside Inductor's own
            of the whole graph. `dryrun=True` prints the report on each graph; nothing is compiled, and torch
            runs the graph. `rules` is what `fuseplan.rule` made.
        mode: refused: torch's modes are Inductor's.

    Raises:
        ArgumentError: there is no such option, or it has no such value; or a mode is given.
    """
    if mode is not None:
        remedy = "options={'choose': 'measured'} measures plans"
        raise ArgumentError(f"mode={mode!r} is Inductor's, and the backend fuseplan has none: {remedy}")
    how = Options.read(options or {})
    if how.rest == "inductor" and device_of(inputs) is not None:
        from fuseplan.torch import whole

        with_plans = partial(_with_plans, given, inputs, how)
        return whole.faster(given, inputs, how.choose, how.accuracy, how.dryrun, with_plans)
    return _with_plans(given, inputs, how)


def _with_plans(
    given: fx.GraphModule, example: Sequence[Any], how: Options, lost: Reason | None = None
) -> Callable[..., Any]:
    """The graph, with plans in its forward and its backward pass.

    Args:
        given: the graph.
        example: inputs of a call.
        how: the options.
        lost: why Inductor has the whole graph, for the report.
    """
    plain, passes, graphs = copied(given), Passes(lost, how.dryrun), set[bool]()
    write_products(given)
    fold_masks(given)
    keep_attention(given, example)
    join_losses(given, example)
    train_attention(given, example)

    def compiled(
        graph: fx.GraphModule, inputs: Sequence[Any], is_inference: bool = False
    ) -> Callable[..., Any]:
        graphs.add(is_inference)
        return _compiled(graph, inputs, how, example, passes, is_inference)

    with _both_passes():
        made: Callable[..., Any] = aot_autograd(
            fw_compiler=compiled,
            bw_compiler=partial(_backward, options=how, example=(), passes=passes),
            inference_compiler=partial(compiled, is_inference=True),
            partition_fn=partitioned,
        )(given, example)
    is_lost = passes.decided(1 if True in graphs else 2) and not (how.dryrun or lost)
    return plain.forward if is_lost else made


def _both_passes() -> AbstractContextManager[None]:
    """Torch compiles a backward pass before its first call, where it can be told so."""
    name = "force_non_lazy_backward_lowering"
    made: AbstractContextManager[None] = config.patch(name, True) if hasattr(config, name) else nullcontext()
    return made
