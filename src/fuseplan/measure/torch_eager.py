"""A plan as eager PyTorch computes it, on the tensors that ours is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from fuseplan.measure.data import is_training
from fuseplan.measure.layers import layers, running
from fuseplan.measure.torch_stages import module_of, stage_of
from fuseplan.measure.torch_training import training_call
from fuseplan.plan import FusionPlan
from fuseplan.target import Target

CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


def eager(plan: FusionPlan, tensors: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of torch's own operators, the fewest there are for the plan.

    What it gives is a torch tensor, or where the plan has results a tuple of the output and them.

    Args:
        plan: the plan.
        tensors: `src` and every operand by its key: torch tensors, or NumPy arrays.

    Raises:
        CannotRunError: an operator has no equal in torch that is written here.
        ImportError: torch is not installed.
    """
    keys = running(plan)
    held = {key: _held(plan, as_torch(value), key in keys) for key, value in tensors.items()}
    if is_training(plan):
        return training_call(plan, held, "torch")
    stages = [stage_of(layer) for layer in layers(plan)]
    held = {key: value.to(held["src"].dtype) for key, value in held.items()}
    constant = {key: value for key, value in held.items() if key not in keys}
    return partial(module_of(stages, constant, keys).eval(), *[held[key] for key in keys])


def as_torch(value: Any) -> Any:
    """The tensor, or a NumPy array as one in the same memory; bf16 by its bits."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.itemsize == 2 and array.dtype != np.float16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _held(plan: FusionPlan, tensor: Any, is_running: bool) -> Any:
    """Weights in the layout of src, which saves torch converting them in every call."""
    import torch

    form = CHANNELS_LAST.get(plan.src.rank)
    if is_running or form is None or not plan.src.is_channels_last or tensor.dim() != plan.src.rank:
        return tensor
    return tensor.contiguous(memory_format=getattr(torch, form))


@contextlib.contextmanager
def at_its_best(plan: FusionPlan, target: Target) -> Iterator[None]:
    """While it lasts: no gradients, the plan's precision, the target's threads, and a search for algorithms.

    Raises:
        ImportError: torch is not installed.
    """
    import torch

    is_tf32 = any(step.op.attributes().get("precision") == "tf32" for step in plan.steps)
    of_gpu = (
        (torch.backends.cuda.matmul, "allow_tf32", is_tf32),
        (torch.backends.cudnn, "allow_tf32", is_tf32),
        (torch.backends.cudnn, "benchmark", True),
    )
    wanted = of_gpu if target.processors else ()
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
