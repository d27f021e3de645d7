"""A plan as PyTorch computes it, on the tensors that ours is given.

The module imports torch: other modules import it when it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import is_training
from fuseplan.measure.layers import CannotRunError, Layer, layers, plain_layers, running
from fuseplan.measure.spaces import Tensor, Tensors, torch_dtype
from fuseplan.measure.torch_functions import BACKWARD, Stage, per_channel, stage_of
from fuseplan.measure.torch_row_gradients import saved
from fuseplan.plans.plan import FusionPlan


def in_place(layer: Layer) -> Stage:
    """What torch calls for an operator behind another one.

    Raises:
        CannotRunError: torch is not taught it here.
    """
    if layer.name == "relu":
        return lambda x, held: x.relu_()
    if layer.name == "bias":
        add, key = per_channel(layer, torch.Tensor.add_), layer.keys["bias"]
        return lambda x, held: add(x, bias=held[key])
    return stage_of(layer)


class Stages(torch.nn.Module):  # type: ignore[misc]
    """A module that applies stages in order.

    Args:
        constant: its buffers, by the plan's keys.
        keys: of the tensors that a call gives, in order; the first is `src`.
        results: keys of the tensors that it gives besides the output.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        constant: Mapping[str, Any],
        keys: Sequence[str],
        results: Sequence[str],
    ) -> None:
        super().__init__()
        self._stages, self._constant, self._keys, self._results = stages, [*constant], keys, results
        for key, tensor in constant.items():
            self.register_buffer(key, tensor)

    def forward(self, *given: Any) -> Any:
        """The output; with results a tuple."""
        held = {key: getattr(self, key) for key in self._constant} | dict(zip(self._keys, given, strict=True))
        x = held["src"]
        for stage in self._stages:
            x = stage(x, held)
        return (x, *(held[key] for key in self._results)) if self._results else x


Results = tuple[Tensor, ...]  # the output, then the plan's results in its order
Compiler = Callable[[Callable[..., Results]], Callable[..., Results]]

CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}
EPSILON = 1e-5  # of a backward pass, which does not use it: its statistics are given


def eager(plan: FusionPlan, tensors: Tensors) -> Callable[[], Any]:
    """A call of torch's own operators, the fewest for the plan; see `eager_calls`."""
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
    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.itemsize == 2 and array.dtype != np.float16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> Any:
    """The elements in NumPy, in host memory of their own; those of bf16 and fp8 as their bits."""
    dtype = next(each for each in DTYPES.values() if torch_dtype(each.name) == tensor.dtype)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return octets.view(dtype.array).reshape(tensor.shape).copy()


def as_arrays(made: Any) -> Any:
    """A tensor, or each of several, in NumPy."""
    return tuple(map(as_array, made)) if isinstance(made, tuple) else as_array(made)


def as_taken(plan: FusionPlan, tensors: Tensors, keys: Sequence[str], layout: str = "") -> dict[str, Tensor]:
    """The tensors as torch's operators take them; `keys` are those that come anew with every call."""
    made = {key: as_torch(value) for key, value in tensors.items()}
    if layout:
        made = {key: tensor.contiguous() for key, tensor in made.items()}
    form = CHANNELS_LAST.get(plan.src.rank, "")
    is_last = layout == "nhwc" or (not layout and plan.src.is_channels_last)
    for key in made if is_last and form else ():
        if made[key].dim() == plan.src.rank and (layout or key not in keys):
            made[key] = made[key].contiguous(memory_format=getattr(torch, form))
    return made


@contextlib.contextmanager
def of_gpu(plan: FusionPlan) -> Iterator[None]:
    """While it lasts: torch's settings for the plan's precision, and for the fastest algorithms."""
    is_tf32 = any(step.op.attributes().get("precision") == "tf32" for step in plan.steps)
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = is_tf32, is_tf32, True
    try:
        yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@contextlib.contextmanager
def at_its_best(plan: FusionPlan, target: Target) -> Iterator[None]:
    """While it lasts: no gradients, the plan's precision, the target's threads, and a search for algorithms.

    Raises:
        ImportError: torch is not installed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if target.processors else target.threads)
    try:
        with of_gpu(plan) if target.processors else contextlib.nullcontext(), torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)


def training_call(
    plan: FusionPlan, tensors: Tensors, peer: str, compiler: Compiler | None = None
) -> Callable[[], Results]:
    """Binds what torch calls for a plan with training operators: eager, or compiled.

    What torch calls is what its layers and their gradients end in, without autograd around it.

    Args:
        plan: batch_norm_training and what torch has behind it, or batch_norm_backward, with statistics per
            channel, saved.
        tensors: `src`, operands and old running statistics by key; the vectors in f32, as torch's layers hold
            them.
        compiler: makes kernels of a function; without one, torch's operators are called, cuDNN's where its
            layers choose them.

    Raises:
        CannotRunError: the plan is another.
    """
    from fuseplan.measure.torch_eager import in_place

    first, *rest = plain_layers(plan)
    if first.attributes.get("mode") != "spatial" or not first.attributes.get("saved", True):
        raise CannotRunError(f"{peer} is measured with statistics per channel, saved")
    if first.name == "batch_norm_training":
        stages = [stage_of(layer, peer) if compiler else in_place(layer) for layer in rest]
        return _forward(first, stages, tensors, compiler)
    if first.name == "batch_norm_backward" and first.attributes["statistics"] == "saved" and not rest:
        return _backward(first, tensors, compiler)
    raise CannotRunError(f"{peer} does not run this training plan in these measurements")


def _forward(
    layer: Layer, stages: Sequence[Any], tensors: Tensors, compiler: Compiler | None
) -> Callable[[], Results]:
    """What a layer calls, and what comes behind it, in place where torch can; the running ones are copies."""
    names = [each.key for each in layer.step.results if each.updated]
    running = [tensors[key].clone() for key in names]
    how = True, layer.parameters.get("momentum", 0.0), layer.parameters["epsilon"]
    given = tensors["src"], tensors[layer.keys["scale"]], tensors[layer.keys["shift"]]
    old, held = running or [None, None], dict(tensors)

    def behind(x: Tensor) -> Tensor:
        for stage in stages:
            x = stage(x, held)
        return x

    def eager(*given: Tensor) -> Results:
        made = torch._batch_norm_impl_index(*given, *old, *how, True)
        return behind(made[0]), made[1], made[2], *running

    def compiled(*given: Tensor) -> Results:
        dst, mean, inverse = torch.native_batch_norm(*given, *old, *how)
        return behind(dst), mean, inverse, *running

    return partial(compiler(compiled) if compiler else eager, *given)


def _backward(layer: Layer, tensors: Tensors, compiler: Compiler | None) -> Callable[[], Results]:
    """Eager, the gradient of an activation reads a tensor that the forward pass left; compiled, made anew."""
    keys, of = layer.keys, layer.attributes["activation"]
    has_relu, has_any = of.name == "relu", of.name != "identity"
    if has_any and not (has_relu if compiler else of.name in BACKWARD):
        raise CannotRunError(f"the backward pass of {of.name} is not measured in torch")
    x, gradient, scale = tensors[keys["input"]], tensors["src"], tensors[keys["scale"]]
    mean, inverse = tensors[keys["mean"]], tensors[keys["inverse_variance"]]
    shift = tensors[keys["shift"]] if has_any else torch.zeros_like(scale)

    def compiled(x: Tensor, gradient: Tensor, *vectors: Tensor) -> Results:
        if has_relu:
            gradient = torch.where(before_relu(x, *vectors) > 0, gradient, 0)
        scale, _, *saved = vectors
        made = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, None, None, *saved, True, EPSILON, [True] * 3
        )
        return tuple(made)

    if compiler:
        return partial(compiler(compiled), x, gradient, scale, shift, mean, inverse)
    forward = torch._batch_norm_impl_index(x, scale, shift, None, None, True, 0.0, EPSILON, True)
    chosen, reserved = forward[4], forward[3]
    before = before_relu(x, scale, shift, mean, inverse).to(x.dtype)

    def eager() -> Results:
        behind = BACKWARD[of.name](gradient, before, layer.parameters) if has_any else gradient
        saved = mean, inverse, True, EPSILON, [True] * 3
        return tuple(
            torch.ops.aten._batch_norm_impl_index_backward(
                chosen, x, behind, scale, None, None, *saved, reserved
            )
        )

    return eager


def before_relu(x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """What the forward pass applies relu to; of NumPy's arrays too."""
    shape = (1, -1, *[1] * (len(x.shape) - 2))
    scale, shift, mean, inverse = (each.reshape(shape) for each in (scale, shift, mean, inverse))
    return (x - mean) * inverse * scale + shift
