"""Plans with training operators as PyTorch computes them: eager, or compiled.

A plan is batch_norm_training and what torch has behind it; or batch_norm_backward with saved statistics. What
torch calls for them is what its layers and their gradients end in, without autograd around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fuseplan.measure.layers import CannotRunError, Layer, plain_layers
from fuseplan.plans.plan import FusionPlan

Tensor = Any
Tensors = Mapping[str, Tensor]
Results = tuple[Tensor, ...]  # the output, then the plan's results in its order
Compiler = Callable[[Callable[..., Results]], Callable[..., Results]]

EPSILON = 1e-5  # of a backward pass, which does not use it: its statistics are given


def training_call(
    plan: FusionPlan, tensors: Tensors, peer: str, compiler: Compiler | None = None
) -> Callable[[], Results]:
    """Binds what torch calls for the plan.

    Args:
        plan: one of those above, with statistics per channel, saved.
        tensors: `src`, operands and old running statistics by key; the vectors in f32, as torch's layers hold
            them.
        peer: who is measured.
        compiler: makes kernels of a function; without one, torch's operators are called, cuDNN's where its
            layers choose them.

    Raises:
        CannotRunError: the plan is another.
    """
    from fuseplan.measure.torch_functions import stage_of
    from fuseplan.measure.torch_stages import in_place

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
    import torch

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
    import torch

    from fuseplan.measure.torch_functions import BACKWARD

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
