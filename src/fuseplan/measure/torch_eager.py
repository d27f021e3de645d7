"""A plan as PyTorch computes it, on the tensors that ours is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import is_training
from fuseplan.measure.layers import layers, running
from fuseplan.measure.spaces import Tensor, Tensors, torch_dtype
from fuseplan.measure.torch_training import Compiler, training_call
from fuseplan.plans.plan import FusionPlan

CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


def eager(plan: FusionPlan, tensors: Tensors) -> Callable[[], Any]:
    """A call of torch's own operators, the fewest for the plan; see `eager_calls`."""
    from fuseplan.measure.torch_functions import stage_of

    (call,) = eager_calls(plan, [tensors], lambda plan: [stage_of(layer) for layer in layers(plan)])
    return call


def eager_calls(
    plan: FusionPlan,
    copies: Sequence[Tensors],
    stages: Callable[[FusionPlan], list[Any]],
    *,
    layout: str = "",
    compiler: Compiler | None = None,
    peer: str = "torch",
) -> list[Callable[[], Any]]:
    """A call for each copy of a plan's tensors; the weights are those of the first copy.

    A call gives a torch tensor, or where the plan has results a tuple of the output and them.

    Args:
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
    from fuseplan.measure.torch_row_gradients import saved
    from fuseplan.measure.torch_stages import Stages

    first, *others = copies
    listed = [as_taken(plan, first, keys, layout)]
    listed += [as_taken(plan, {key: each[key] for key in keys}, keys, layout) for each in others]
    dtype = listed[0]["src"].dtype
    listed = [{key: _alike(value, dtype) for key, value in held.items()} for held in listed]
    left = [
        {key: each for layer in layers(plan) for key, each in saved(layer, held).items()} for held in listed
    ]
    constant = {key: value for key, value in listed[0].items() if key not in keys}
    results = [each.key for each in plan.results]
    module = Stages(stages(plan), constant, [*keys, *left[0]], results).eval()
    made = compiler(module) if compiler else module
    called = zip(listed, left, strict=True)
    return [partial(made, *(held[key] for key in keys), *more.values()) for held, more in called]


def _alike(tensor: Tensor, dtype: Any) -> Tensor:
    """As torch's functions want it beside a src of that dtype: numbers in the dtype, indices in i64."""
    if tensor.dtype.is_floating_point:
        return tensor.to(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else tensor
    return tensor.long() if tensor.dtype.itemsize == 4 else tensor


def as_torch(value: Any) -> Tensor:
    """The tensor, or a NumPy array as one in the same memory; bf16 by its bits."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.itemsize == 2 and array.dtype != np.float16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> Any:
    """The elements in NumPy, in host memory of their own; those of bf16 and fp8 as their bits."""
    import torch

    dtype = next(each for each in DTYPES.values() if torch_dtype(each.name) == tensor.dtype)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return octets.view(dtype.array).reshape(tensor.shape).copy()


def as_arrays(made: Any) -> Any:
    """A tensor, or each of several, in NumPy."""
    return tuple(map(as_array, made)) if isinstance(made, tuple) else as_array(made)


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
