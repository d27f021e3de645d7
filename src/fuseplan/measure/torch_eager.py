"""A plan as PyTorch computes it, on the tensors that ours is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fuseplan.kernels.target import Target
from fuseplan.measure.data import is_training
from fuseplan.measure.layers import layers, running
from fuseplan.measure.spaces import Tensor, Tensors
from fuseplan.measure.torch_stages import Stage, module_of, stage_of
from fuseplan.measure.torch_training import Compiler, training_call
from fuseplan.plans.plan import FusionPlan

CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


def eager(plan: FusionPlan, tensors: Tensors) -> Callable[[], Any]:
    """A call of torch's own operators, the fewest for the plan; see `eager_calls`."""
    (call,) = eager_calls(plan, [tensors], lambda plan: [stage_of(layer) for layer in layers(plan)])
    return call


def eager_calls(
    plan: FusionPlan,
    copies: Sequence[Tensors],
    stages: Callable[[FusionPlan], list[Stage]],
    *,
    layout: str = "",
    compiler: Compiler | None = None,
    peer: str = "torch",
) -> list[Callable[[], Any]]:
    """A call for each copy of a plan's tensors; the weights are those of the first copy.

    A call gives a torch tensor, or where the plan has results a tuple of the output and them.

    Args:
        plan: the plan.
        copies: `src` and every operand by its key: torch tensors, or NumPy arrays.
        stages: the calls of torch for a plan without training operators.
        layout: `nchw` or `nhwc` to put all tensors into; else weights alone are put into the layout of src,
            which saves torch converting them in every call.
        compiler: torch.compile with its options; None for eager calls.
        peer: the name in refusals.

    Raises:
        CannotRunError: an operator has no equal in torch that is written here.
        ImportError: torch is not installed.
    """
    keys = running(plan)
    if is_training(plan):
        held = [as_taken(plan, tensors, keys, layout) for tensors in copies]
        return [training_call(plan, each, peer, compiler) for each in held]
    first, *others = copies
    listed = [as_taken(plan, first, keys, layout)]
    listed += [as_taken(plan, {key: each[key] for key in keys}, keys, layout) for each in others]
    dtype = listed[0]["src"].dtype
    constant = {key: value.to(dtype) for key, value in listed[0].items() if key not in keys}
    module = module_of(stages(plan), constant, keys).eval()
    made = compiler(module) if compiler else module
    return [partial(made, *(held[key].to(dtype) for key in keys)) for held in listed]


def as_torch(value: Any) -> Tensor:
    """The tensor, or a NumPy array as one in the same memory; bf16 by its bits."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.itemsize == 2 and array.dtype != np.float16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_taken(plan: FusionPlan, tensors: Tensors, keys: Sequence[str], layout: str = "") -> dict[str, Tensor]:
    """The tensors as torch's operators take them; `keys` are those that come anew with every call."""
    import torch

    made = {key: as_torch(value) for key, value in tensors.items()}
    if layout:
        made = {key: tensor.contiguous() for key, tensor in made.items()}
    form = CHANNELS_LAST.get(plan.src.rank, "")
    is_last = layout == "nhwc" or (not layout and plan.src.is_channels_last)
    for key in made if is_last and form else ():
        if made[key].dim() == plan.src.rank and (layout or key not in keys):
            made[key] = made[key].contiguous(memory_format=getattr(torch, form))
    return made


def of_gpu(plan: FusionPlan) -> tuple[tuple[Any, str, bool], ...]:
    """Torch's settings for the plan's precision, and for the fastest algorithms: place, name, value."""
    import torch

    is_tf32 = any(step.op.attributes().get("precision") == "tf32" for step in plan.steps)
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (cuda, "allow_tf32", is_tf32), (cudnn, "allow_tf32", is_tf32), (cudnn, "benchmark", True)


@contextlib.contextmanager
def at_its_best(plan: FusionPlan, target: Target) -> Iterator[None]:
    """While it lasts: no gradients, the plan's precision, the target's threads, and a search for algorithms.

    Raises:
        ImportError: torch is not installed.
    """
    import torch

    wanted = of_gpu(plan) if target.processors else ()
    before = [getattr(place, name) for place, name, _ in wanted]
    threads = torch.get_num_threads()
    for place, name, value in wanted:
        setattr(place, name, value)
    torch.set_num_threads(threads if target.processors else target.threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)
        for (place, name, _), value in zip(wanted, before, strict=True):
            setattr(place, name, value)
