"""`torch.ops.fuseplan.run`: a plan as an operator of torch's, with shapes, kernels and gradients.

    run(str operators, Tensor src, Tensor[] given, float[] parameters) -> Tensor[]

`operators` is a plan's text behind its input, which `src` describes; `given` are the plan's operands in its
order, then the old values of the results that it updates; `parameters` are all of the plan's numbers, or
none, for those in its text. Text in front of a bar tells which operands are given in several tensors:
`weight=2:0 | linear(8)` joins two along axis 0. It gives the output, then the results. Nothing that it is
given is written.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import _C as C
from torch.autograd import forward_ad, profiler

from fuseplan.errors import ArgumentError
from fuseplan.language.layouts import shared_stride
from fuseplan.tensors.torch_tensors import DTYPES
from fuseplan.torch import meaning
from fuseplan.torch.kernels import NAME, kernel_on
from fuseplan.torch.texts import Tensors, check_count, given_of, keys_of, operands_in, plan_on

torch.library.define(
    NAME, "(str operators, Tensor src, Tensor[] given, float[] parameters) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)  # fmt: skip


def _computed(
    operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
) -> list[torch.Tensor]:
    plain = readable(src)
    return kernel_on(operators, plain)(plain, given, parameters)


torch.library.impl(NAME, ("CPU", "CUDA"), _computed)


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _described(
    operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
) -> list[torch.Tensor]:
    """The outputs without elements; extents that torch leaves open are fixed to those of this call.

    Raises:
        ArgumentError: there are more or fewer tensors than the plan takes, or they lie on several devices.
    """
    others = {each.device for each in given} - {src.device}
    if others:  # torch asks for no elements where one of the tensors is on meta
        raise ArgumentError(
            f"the tensors of `{operators}` lie on {src.device} and {', '.join(map(str, others))}"
        )
    plan = plan_on(operators, readable(src))
    check_count(plan, keys_of(operators, plan), given, parameters)
    ends = (plan.output, *(each.spec for each in plan.results))
    return [
        torch.empty_strided(each.shape, each.element_strides, dtype=DTYPES[each.dtype], device=src.device)
        for each in ends
    ]


def _saved(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.operators, src, given, ctx.parameters = inputs
    ctx.save_for_backward(src, *given)


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Of the plan's meaning by torch's own operators, which is computed once more."""
    again = torch.is_grad_enabled()  # these gradients are differentiated as well
    with torch.enable_grad(), _mixing():
        tensors = [
            each.view_as(each)
            if again and each.requires_grad
            else each.detach().requires_grad_(each.is_floating_point())
            for each in map(_flat, ctx.saved_tensors)
        ]
        src, *given = tensors
        plan = plan_on(ctx.operators, readable(src))
        made = meaning.evaluated(plan, src, operands_in(ctx.operators, plan, given), ctx.parameters)
        pairs = [
            (out, _flat(gradient))
            for out, gradient in zip(made, gradients, strict=True)
            if gradient is not None and out.requires_grad
        ]
        outs, wanted = [out for out, _ in pairs], [gradient for _, gradient in pairs]
        sources = [each for each in tensors if each.requires_grad]  # indices do not
        made = torch.autograd.grad(outs, sources, wanted, allow_unused=True, create_graph=again)
        gradient_of = dict(zip(map(id, sources), made, strict=True))
        found = [gradient_of.get(id(each)) for each in tensors]
    none: list[None] | None = None if ctx.parameters else []  # torch takes an empty list for one of tensors
    return None, found[0], found[1:], none


def _mixing() -> contextlib.AbstractContextManager[None]:
    """Lets torch's operators take DTensors beside numbers of ours, which are torch's tensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    made: contextlib.AbstractContextManager[None] = implicit_replication()
    return made


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whole along inner axes that processes share: torch before 2.13 cannot flatten these."""
    if torch.__version__ >= (2, 13) or not hasattr(tensor, "placements"):
        return tensor
    from torch.distributed.tensor import Replicate

    inner = range(1, tensor.ndim - 1)
    kept = [Replicate() if place.is_shard() and place.dim in inner else place for place in tensor.placements]
    return tensor.redistribute(placements=kept)


torch.library.register_autograd(NAME, _gradients, setup_context=_saved)


def readable(src: torch.Tensor) -> torch.Tensor:
    """The tensor, or a dense copy where elements share memory, as `expand` makes them, or are negated."""
    src = src.resolve_neg()
    if src.is_contiguous() or shared_stride(src.stride(), src.shape) is None:
        return src
    return src.contiguous()


def launched(
    operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float] = ()
) -> list[torch.Tensor]:
    """The operator's outputs, for tensors and numbers in its order."""
    if not is_seen((src, *given)):
        return _computed(operators, src, given, parameters)
    if not torch.compiler.is_compiling():
        _check_transform()
    if "torch.distributed.tensor" in sys.modules:
        import fuseplan.torch.sharing  # noqa: F401 - how the operator takes DTensors, whose import takes 0.5 s
    made: list[torch.Tensor] = torch.ops.fuseplan.run(operators, src, given, parameters)
    return made


def is_seen(tensors: Tensors) -> bool:
    """Whether anything of torch's watches calls with these tensors.

    Otherwise the operator's kernel is called without torch's dispatcher, which takes 30 us.
    """
    is_here = tensors[0].device.type in ("cpu", "cuda")
    return is_watched() or not is_here or any(type(each) not in PLAIN for each in tensors)


def is_watched() -> bool:
    """Whether anything of torch's watches all calls: gradients, a trace, a mode, a transform, a profiler."""
    return torch.is_grad_enabled() or is_observed()


def is_observed() -> bool:
    """Whether anything but gradients does."""
    return bool(
        torch.compiler.is_compiling()
        or C._is_tracing()
        or profiler._is_profiler_enabled
        or C._len_torch_dispatch_stack()
        or C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or C._functorch.peek_interpreter_stack() is not None
    )


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation follows calls, for which a plan has no rules."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_for_onnx() -> bool:
    """Whether torch.onnx records a call: ONNX has no word for plans, and takes torch's operators."""
    is_traced = torch.compiler.is_compiling() or torch._C._is_tracing()
    return bool(is_traced and torch.onnx.is_in_onnx_export())


def _check_transform() -> None:
    """Refuses torch.func.jvp, for which torch would take the derivative of its operator for 0.

    Raises:
        ArgumentError: the call is inside of one.
    """
    top = torch._C._functorch.peek_interpreter_stack()
    if top is not None and top.key() == torch._C._functorch.TransformType.Jvp:
        raise ArgumentError(
            "plans have no forward-mode derivative, which torch.func.jvp asks for: take torch.autograd.grad, "
            "or the module as it was before it was fused"
        )


PLAIN = (torch.Tensor, torch.nn.Parameter)


def run(operators: str, src: torch.Tensor, **given: Any) -> Any:
    """Runs operators on a torch tensor as one kernel, with gradients, also under torch's transforms.

    Args:
        operators: a plan's text without its input: `linear(3072) -> bias -> gelu`. The input is `src` as it
            lies: its shape, dtype and strides.
        src: a tensor on the CPU or a CUDA device.
        **given: operands by the plan's keys, as the operators' reference says; parameters where they differ
            from the text; old values of the results that the plan updates.

    Returns:
        The output, or a tuple of it and the plan's results in its order, all new tensors.

    The gradients are those of the same operators in torch, computed from src and the operands in the backward
    pass: they may be taken twice, and torch.compile makes kernels of them.

    Raises:
        PlanError: the operators do not fit `src`.
        Unsupported: no kernel computes the plan; the error says why.
        ArgumentError: an operand is missing, unknown, or not what the plan takes.
    """
    plan = plan_on(operators, readable(src))
    keys, numbers = [each.key for each in given_of(plan)], [each.key for each in plan.parameters]
    unknown, missing = given.keys() - {*keys, *numbers}, [key for key in keys if key not in given]
    if unknown or missing:
        told = f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(sorted(unknown))}"
        raise ArgumentError(f"`{plan}` takes {', '.join([*keys, *numbers]) or 'nothing'} besides src; {told}")
    values = [float(given.get(each.key, each.value)) for each in plan.parameters]
    changed = any(key in given for key in numbers)
    made = launched(operators, src, [given[key] for key in keys], values if changed else [])
    views = [made[0][index] for index in plan.views.values()]
    return (*made, *views) if plan.results or views else made[0]
