"""Attention in steps of training: one operator of torch's that plans compute, and one for its gradients.

AOT autograd makes kernels of torch's out of attention before a backend sees it. These operators come through.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from fuseplan.backward.value import Backward
from fuseplan.errors import PlanError, Unsupported
from fuseplan.execution.kept import selected
from fuseplan.execution.select import Choice
from fuseplan.graph.attention import are_repeated, attention
from fuseplan.graph.layer import Planned
from fuseplan.graph.type import Type
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.attend import Attend, AttendGradient
from fuseplan.language.layouts import same_strides
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.attention import Attention
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.torch_tensors import DTYPES, NAMES
from fuseplan.torch.intact import SDPA, WITH_GRADIENTS, arguments_of, is_plain
from fuseplan.torch.kernels import target_of
from fuseplan.torch.lying import laid
from fuseplan.torch.sites import called
from fuseplan.torch.texts import operators_text, plan_on

NAME, GRADIENTS = "fuseplan::trained_attention", "fuseplan::attention_gradients"
WRT = ("src", "key", "value")
# The views that repeat heads, the last one first, by the names of torch's functions and methods.
REPEATING = (("reshape", "view", "flatten"), ("expand",), ("getitem", "unsqueeze"))
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
Tensors = Sequence[torch.Tensor]

# `operators` is the text of attention behind its input; `beside` is its bias or its mask, or nothing.
torch.library.define(
    NAME,
    "(Tensor query, Tensor key, Tensor value, Tensor[] beside, str operators) -> (Tensor, Tensor)",
    tags=TAGS,
)
torch.library.define(
    GRADIENTS,
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor[] beside, Tensor out, Tensor lse, "
    "str operators) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def _computed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beside: Tensors, operators: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = called(operators, query, [key, value, *beside])
    return out, lse


def _described(query: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_on(given[-1], query)
    (lse,) = plan.results
    out = query.new_empty_strided(plan.output.shape, plan.output.element_strides)
    return out, query.new_empty(lse.shape, dtype=DTYPES[lse.dtype])


class _Backward(NamedTuple):
    """The gradients of attention.

    Attributes:
        made: the graph.
        inputs: the names of query, key, value, and what stands beside them.
        steps: of each plan its operators, the names of its inputs, and of its outputs.
        output: how the gradient of the output lies.
    """

    made: Backward
    inputs: Sequence[str]
    steps: Sequence[tuple[str, Sequence[str], Sequence[str]]]
    output: TensorSpec


@lru_cache(maxsize=256)
def _backward(
    operators: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> _Backward:
    plan = plan_on(operators, torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    made: Backward = plan.backward(WRT)
    first, *nodes = made.graph.nodes
    plans = [node.op.plan for node in nodes if isinstance(node.op, Planned)]  # these gradients have no views
    steps = [
        (operators_text(each), node.inputs, node.outputs) for each, node in zip(plans, nodes, strict=True)
    ]
    return _Backward(made, first.inputs, steps, plan.output)


def _gradients_of(operators: str, query: torch.Tensor) -> _Backward:
    shape, strides = (tuple(map(int, each)) for each in (query.shape, query.stride()))
    return _backward(operators, shape, strides, query.dtype)


def _differentiated(grad: torch.Tensor, query: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    key, value, beside, out, lse, operators = given
    made, inputs, steps, output = _gradients_of(operators, query)
    live = dict(zip(inputs, (query, key, value, *beside), strict=True))
    live |= {"out": out, "lse": lse, "grad": laid(grad, output)}
    for text, (src, *others), outputs in steps:
        live |= zip(outputs, called(text, live[src], [live[name] for name in others]), strict=True)
    return tuple(live[made.gradients[name]] for name in WRT)


def _described_gradients(_: torch.Tensor, query: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    *_, by_key, by_query = _gradients_of(given[-1], query).made.plans
    specs = by_query.output, by_key.output, by_key.results[0].spec
    return tuple(query.new_empty_strided(each.shape, each.element_strides) for each in specs)


def _saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, beside, ctx.operators = inputs
    ctx.save_for_backward(query, key, value, *output, *beside)


def _gradients(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, *beside = ctx.saved_tensors
    made = torch.ops.fuseplan.attention_gradients(grad, query, key, value, beside, out, lse, ctx.operators)
    return *made, [None] * len(beside), None


torch.library.impl(NAME, ("CPU", "CUDA"), _computed)
torch.library.impl(GRADIENTS, ("CPU", "CUDA"), _differentiated)
torch.library.register_fake(NAME, _described)
torch.library.register_fake(GRADIENTS, _described_gradients)
torch.library.register_autograd(NAME, _gradients, setup_context=_saved)


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    shape: Sequence[int],
    operators: str,
) -> torch.Tensor:
    """Attention by the operator; `shape` is the mask's, as plans read it."""
    beside = [] if mask is None else [mask.reshape(shape)]
    is_dense = same_strides(query.shape, query.stride(), _spec(query).element_strides)
    dense = query if is_dense else query.contiguous()
    out, _ = torch.ops.fuseplan.trained_attention(dense, key, value, beside, operators)
    made: torch.Tensor = out
    return made


def _spec(query: torch.Tensor) -> TensorSpec:
    """How a query lies, or how it is copied where it has gaps: plans give no gradient of such a tensor."""
    shape, dtype = tuple(query.shape), NAMES[query.dtype]
    made = TensorSpec(shape, dtype, strides=query.stride(), names="bhsd")
    return made if made.layout else TensorSpec(shape, dtype, "bhsd", names="bhsd")


class _Call:
    """The tensors of a call, as `attention` reads a graph's, and the operator that it makes of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.types = {name: Type(tuple(each.shape), NAMES[each.dtype]) for name, each in tensors.items()}
        self.op: Attention | None = None

    def type_of(self, name: str) -> Type:
        return self.types[name]

    def add(self, op: Any, *inputs: str) -> str:
        del op
        return inputs[0]

    def layer(self, op: Any, *inputs: str) -> str:
        self.op = op
        return inputs[0]


def train_attention(given: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Puts `attended` in the place of attention without dropout, in a graph of Dynamo's with gradients.

    Attention stays torch's where no plan takes its tensors, and where torch's kernels may be faster.
    """
    if not torch.is_grad_enabled() or not is_plain(given, inputs, WITH_GRADIENTS):
        return
    for node in given.graph.find_nodes(op="call_function", target=SDPA):
        told = arguments_of(node)
        forms = () if told is None else ({**told, **_grouped(told)}, told)
        told, plan = next(((each, plan) for each in forms if (plan := _plan_of(each))), (None, None))
        if told is not None and plan is not None:
            axes = {each.name: each.shape for each in plan.operands if each.name in ("bias", "mask")}
            shape = next(iter(axes.values()), ())
            tensors = [told[name] for name in ("query", "key", "value", "attn_mask")]
            node.target, node.args, node.kwargs = attended, (*tensors, shape, operators_text(plan)), {}
    given.recompile()


def _grouped(told: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the same attention: keys and values of which each head is read by several queries."""
    bases = {name: _repeated(told[name]) for name in ("key", "value")}
    return {} if None in bases.values() else {**bases, "enable_gqa": True}


def _repeated(node: Any) -> fx.Node | None:
    """The value (b, h, t, d) of which each head is repeated n times in a value (b, h * n, t, d)."""
    chain = [node]
    for names in REPEATING:
        last = chain[-1]
        name = last.target if last.op == "call_method" else getattr(last.target, "__name__", "")
        if name not in names or not last.args or not isinstance(last.args[0], fx.Node):
            return None
        chain.append(last.args[0])
    values = [each.meta["example_value"] for each in chain]  # `x.split(1)[0]` is of several
    whole, wide, one, base = (tuple(getattr(each, "shape", ())) for each in values)
    return chain[3] if are_repeated(whole, wide, one, base) and _keeps_all(chain[2]) else None


def _keeps_all(node: fx.Node) -> bool:
    """Whether a view has all elements in their order: `x[:, :, None]`, or `unsqueeze`."""
    index = node.args[1] if node.target is operator.getitem else ()
    parts = index if isinstance(index, tuple) else (index,)
    return all(each is None or each is Ellipsis or each == slice(None) for each in parts)


def _plan_of(told: Mapping[str, Any]) -> FusionPlan | None:
    """The plan of a call; None where there is none, or torch may be faster."""
    named = {"query": "query", "key": "key", "value": "value", "attn_mask": "mask"}
    nodes = {name: told[field] for field, name in named.items() if told[field] is not None}
    if not all(isinstance(each, fx.Node) for each in nodes.values()) or told["scale"] == 0:
        return None
    tensors = {name: each.meta["example_value"] for name, each in nodes.items()}
    if not all(type(extent) is int for each in tensors.values() for extent in (*each.shape, *each.stride())):
        return None
    query, key = tensors["query"], tensors["key"]
    is_wanted = any(tensors[name].requires_grad for name in ("query", "key", "value"))
    is_constant = "mask" not in tensors or not tensors["mask"].requires_grad
    is_grouped = query.ndim == key.ndim == len("bhsd") and query.shape[1] != key.shape[1]
    if not is_wanted or not is_constant or (is_grouped and not told["enable_gqa"]):
        return None
    try:
        call = _Call(tensors)
        op = Attention(is_causal=told["is_causal"], scale=told["scale"] or 0.0, return_lse=True)
        attention(call, ("query", "key", "value"), "mask" if "mask" in tensors else None, op)
        plan = FusionPlan(_spec(query), call.op or op)
        return plan if is_fast(plan, query.device) else None
    except (PlanError, Unsupported):
        return None


def is_fast(plan: FusionPlan, device: torch.device) -> bool:
    """Whether attention and its gradients have Hopper's kernels, or kernels that are estimated to be faster.

    Raises:
        Unsupported: there is none for a plan.
    """
    if device.type != "cuda":
        return False
    target, made = parse_target(target_of(device)[0]), plan.backward(WRT)
    kernels = [lower(match(each)) for each in (made.forward, *made.plans)]
    attending = [each for each in kernels if isinstance(each.centre, Attend | AttendGradient)]
    return all(_is_hoppers(selected(each, target)) for each in attending)


def _is_hoppers(choice: Choice) -> bool:
    """Whether Hopper's template computes the kernel, or could: smaller tiles may suit few heads better."""
    if choice.template.name.startswith("hopper"):  # estimates nothing again
        return True
    return any(each.name.startswith("hopper") for each in choice.candidates)
