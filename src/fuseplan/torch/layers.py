"""Torch's layers as operators of plans: one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fuseplan.errors import PlanError
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import ARROW, shown
from fuseplan.op import Op
from fuseplan.ops import activation
from fuseplan.ops.affine import BatchNorm, Bias, Prelu
from fuseplan.ops.conv import CONVOLUTIONS, TRANSPOSED
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.matmul import Linear
from fuseplan.ops.normalization import GroupNorm, InstanceNorm, LayerNorm, RmsNorm
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text
from fuseplan.tensors.torch_tensors import NAMES


class Layer(NamedTuple):
    """One operator of a layer.

    Attributes:
        operands: in the operator's order, each the name of the layer's tensor; or, of a tensor that the layer
            has none for, the number that is each of its elements.
    """

    op: Op
    module: Any
    operands: tuple[str | float, ...] = ()


Layers = Callable[[Any], Iterator[Layer]]


def _bias(module: Any) -> Iterator[Layer]:
    if module.bias is not None:
        yield Layer(Bias(), module, ("bias",))


def _linear(module: nn.Linear) -> Iterator[Layer]:
    yield Layer(Linear(module.out_features), module, ("weight",))
    yield from _bias(module)


def _embedding(module: nn.Embedding) -> Iterator[Layer]:
    settings = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    for name, wanted in settings.items():
        if getattr(module, name) != wanted:
            raise _refused(module, f"{name}={getattr(module, name)}", f"{name}={wanted}")
    dtype = NAMES.get(module.weight.dtype, str(module.weight.dtype))
    padding = -1 if module.padding_idx is None else module.padding_idx
    op = Embedding(module.num_embeddings, module.embedding_dim, dtype=dtype, padding=padding)
    yield Layer(op, module, ("weight",))


def _convolution(module: Any) -> Iterator[Layer]:
    if module.padding_mode != "zeros":
        raise _refused(module, f"padding_mode={module.padding_mode!r}", "padding_mode='zeros'")
    low_high = module._reversed_padding_repeated_twice  # low and high of the last axis, then of those before
    padding = tuple(zip(low_high[::2], low_high[1::2], strict=True))[::-1]
    op = CONVOLUTIONS[len(module.kernel_size) - 1](
        module.out_channels, module.kernel_size, stride=module.stride, padding=padding,
        dilation=module.dilation, groups=module.groups,
    )  # fmt: skip
    yield Layer(op, module, ("weight",))
    yield from _bias(module)


def _transposed(module: Any) -> Iterator[Layer]:
    op = TRANSPOSED[len(module.kernel_size) - 1](
        module.out_channels, module.kernel_size, stride=module.stride, padding=module.padding,
        output_padding=module.output_padding, dilation=module.dilation, groups=module.groups,
    )  # fmt: skip
    yield Layer(op, module, ("weight",))
    yield from _bias(module)


def _batch_norm(module: Any) -> Iterator[Layer]:
    if module.running_mean is None:
        raise _refused(module, "track_running_stats=False", "running statistics")
    affine: tuple[str | float, ...] = ("weight", "bias") if module.affine else (1.0, 0.0)
    yield Layer(BatchNorm(epsilon=module.eps), module, ("running_mean", "running_var", *affine))


def _layer_norm(module: nn.LayerNorm) -> Iterator[Layer]:
    _check_rows(module)
    if module.weight is None:
        yield Layer(LayerNorm(affine=False, epsilon=module.eps), module)
        return
    shift = 0.0 if module.bias is None else "bias"
    yield Layer(LayerNorm(epsilon=module.eps), module, ("weight", shift))


def _rms_norm(module: Any) -> Iterator[Layer]:
    _check_rows(module)
    dtype = torch.float32 if module.weight is None else module.weight.dtype
    epsilon = usual_epsilon(dtype) if module.eps is None else module.eps
    is_affine = module.weight is not None
    yield Layer(RmsNorm(affine=is_affine, epsilon=epsilon), module, ("weight",) * is_affine)


@cache
def usual_epsilon(dtype: torch.dtype) -> float:
    """What torch's `rms_norm` adds unless it is told: for 16 bits the epsilon of f32, which it computes in.

    Its documentation, and its first versions, have that of the dtype.
    """
    with _disable_current_modes():
        made = nn.functional.rms_norm(torch.full((1,), 2.0**-12, dtype=dtype, device="cpu"), (1,))
    is_wide = made.item() > 0.1  # 0.58 with that of f32, 0.008 and 0.003 with those of f16 and bf16
    return float(torch.finfo(torch.promote_types(dtype, torch.float32) if is_wide else dtype).eps)


def _group_norm(module: nn.GroupNorm) -> Iterator[Layer]:
    op = GroupNorm(module.num_groups, affine=module.affine, epsilon=module.eps)
    yield Layer(op, module, ("weight", "bias") if module.affine else ())


def _instance_norm(module: Any) -> Iterator[Layer]:
    if module.track_running_stats:
        raise _refused(module, "track_running_stats=True", "the statistics of each image")
    op = InstanceNorm(affine=module.affine, epsilon=module.eps)
    yield Layer(op, module, ("weight", "bias") if module.affine else ())


def _check_rows(module: Any) -> None:
    if len(module.normalized_shape) != 1:
        raise _refused(module, f"normalized_shape={module.normalized_shape}", "the last axis alone")


def _prelu(module: nn.PReLU) -> Iterator[Layer]:
    yield Layer(Prelu(shared=module.num_parameters == 1), module, ("weight",))


def _softplus(module: nn.Softplus) -> Iterator[Layer]:
    if module.beta != 1:
        raise _refused(module, f"beta={module.beta}", "beta=1")
    yield Layer(activation.Softplus(), module)


def _one(made: Callable[[Any], Op]) -> Layers:
    return lambda module: iter((Layer(made(module), module),))


def _none(_: nn.Module) -> Iterator[Layer]:
    return iter(())


TABLE: dict[type[nn.Module], Layers] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    nn.PReLU: _prelu,
    nn.Softplus: _softplus,
    nn.ReLU: _one(lambda _: activation.Relu()),
    nn.ReLU6: _one(lambda _: activation.ClippedRelu(6.0)),
    nn.LeakyReLU: _one(lambda module: activation.LeakyRelu(module.negative_slope)),
    nn.ELU: _one(lambda module: activation.Elu(module.alpha)),
    nn.Hardtanh: _one(lambda module: activation.Clamp(module.min_val, module.max_val)),
    nn.GELU: _one(lambda module: activation.Gelu(module.approximate)),
    nn.SiLU: _one(lambda _: activation.Silu()),
    nn.Sigmoid: _one(lambda _: activation.Sigmoid()),
    nn.Tanh: _one(lambda _: activation.Tanh()),
    nn.Hardswish: _one(lambda _: activation.Hardswish()),
    nn.Hardsigmoid: _one(lambda _: activation.Hardsigmoid()),
    nn.Mish: _one(lambda _: activation.Mish()),
    nn.Softsign: _one(lambda _: activation.Softsign()),
    nn.Identity: _none,
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), _none),
}
IN_TRAINING = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
)  # these compute something else then


def layers_of(module: nn.Module) -> Iterator[Layer]:
    """The operators of a layer, or of a run of layers, as it computes in inference.

    Raises:
        PlanError: a layer that no operator computes, or with a setting that none has.
    """
    made = TABLE.get(type(module))
    if made is not None:
        yield from made(module)
    elif isinstance(module, nn.Sequential):
        for each in module:
            yield from layers_of(each)
    else:
        listed = ", ".join(kind.__name__ for kind in TABLE)
        raise PlanError(
            f"no operator computes {type(module).__name__}",
            got=shown(module),
            want=f"nn.Sequential of {listed}",
            remedy="A class derived from these is not taken: its forward may differ",
        )


def operators_of(module: nn.Module) -> str:
    """The operators of a layer, or of a run of layers, as a plan's text behind its input.

    Raises:
        PlanError: as `plan_of`.
    """
    return f" {ARROW} ".join(operator_text(layer.op) for layer in layers_of(module))


def operands_of(module: nn.Module) -> list[torch.Tensor]:
    """The layers' own tensors, in the order of the plan's operands; new ones where a layer has none."""
    return [
        getattr(layer.module, each) if isinstance(each, str) else filled(layer, each)
        for layer in layers_of(module)
        for each in layer.operands
    ]


def filled(layer: Layer, value: float) -> torch.Tensor:
    """A tensor for an operand that the layer has none for; it is like the layer's first one."""
    first = next(each for each in layer.operands if isinstance(each, str))
    return torch.full_like(getattr(layer.module, first), value, requires_grad=False)


def plan_of(module: nn.Module, src: TensorSpec | torch.Tensor | str) -> FusionPlan:
    """The plan of a layer, or of a run of layers in nn.Sequential, as it computes in inference.

    Args:
        module: the layers. Their tensors are the plan's operands, in the order of `operands_of(module)`.
        src: the input, or a tensor like it.

    Raises:
        PlanError: a layer has no operator, or does not fit the one in front.
    """
    spec = TensorSpec.like(src) if isinstance(src, torch.Tensor) else src
    plan = FusionPlan(spec, *(layer.op for layer in layers_of(module)))
    for operand, tensor in zip(plan.operands, operands_of(module), strict=True):
        if tensor.numel() != math.prod(operand.shape):
            got, want = (f"{operand.key} {tuple(shape)}" for shape in (tensor.shape, operand.shape))
            raise PlanError(f"the layers do not take {plan.src}", got=f"{got} of theirs", want=want)
    return plan


def computes_as_in_training(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the layers computes something else than in inference."""
    return any(each.training and isinstance(each, IN_TRAINING) for each in modules)


def _refused(module: nn.Module, got: str, want: str) -> PlanError:
    return PlanError(f"no operator computes this {type(module).__name__}", got=got, want=want)
