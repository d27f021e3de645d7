"""Modules of a transformer's block as plans, with the parameters of torch's layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from fuseplan.errors import ArgumentError
from fuseplan.messages.excerpt import ARROW
from fuseplan.plans.text import operator_text
from fuseplan.torch.layers import TABLE, filled
from fuseplan.torch.operator import launched


class _AddNorm(nn.Module):  # type: ignore[misc]
    """A norm of the sum of two tensors."""

    kind: ClassVar[type[nn.Module]]

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        (layer,) = TABLE[self.kind](self)
        self._operators = f"add {ARROW} save(sum) {ARROW} {operator_text(layer.op)}"
        self._operands = [each if isinstance(each, str) else "filled" for each in layer.operands]
        for value in (each for each in layer.operands if not isinstance(each, str)):
            self.register_buffer("filled", filled(layer, value), persistent=False)

    def forward(self, src: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of src + residual, and the sum, both of src's shape."""
        given = [getattr(self, name) for name in self._operands]
        made, total = launched(self._operators, src, [residual, *given])
        return made, total


class AddLayerNorm(_AddNorm, nn.LayerNorm):  # type: ignore[misc]
    """nn.LayerNorm of a sum, which is a second result: `normalized, total = norm(src, residual)`.

    One kernel reads both tensors once. A pre-norm block adds to `total` again: it is the next residual.
    Arguments, parameters and `state_dict` are those of nn.LayerNorm over the last axis; `eps` is read when
    the module is made.

    Raises:
        PlanError: `normalized_shape` has more axes.
    """

    kind = nn.LayerNorm


class AddRMSNorm(_AddNorm, nn.RMSNorm):  # type: ignore[misc]
    """nn.RMSNorm of a sum, which is a second result: `normalized, total = norm(src, residual)`.

    As `AddLayerNorm`; arguments, parameters and `state_dict` are those of nn.RMSNorm over the last axis.
    """

    kind = nn.RMSNorm


class GatedMLP(nn.Module):  # type: ignore[misc]
    """down(activation(gate(x)) * up(x)) in two kernels: SwiGLU, GEGLU and their relatives.

        mlp = fuseplan.torch.GatedMLP(4096, 11008)

    The first kernel computes both products with their gate, and nothing of the gate is in memory. The weights
    of `gate_proj` and `up_proj` are joined once, for as long as they do not change.

    The parameters have the names that models of transformers give them: `gate_proj`, `up_proj`, `down_proj`,
    each an nn.Linear.

    Args:
        in_features: of src and of the output.
        hidden_features: of the gate.
        bias: whether the three layers have a bias.
        activation: of the gate, an operator's text: `silu`, `gelu`, `gelu(tanh)`, `relu`, `sigmoid`.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: str = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(in_features, hidden_features, **made)
        self.up_proj = nn.Linear(in_features, hidden_features, **made)
        self.down_proj = nn.Linear(hidden_features, in_features, **made)
        self.activation = activation

    def forward(self, src: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The block's output; `residual` is added to it by the second kernel."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        features = 2 * gate.out_features
        act = f"glu({self.activation}, gate=first)"
        if gate.bias is None:
            weights, text = [gate.weight, up.weight], f"weight=2:0 | linear({features}) -> {act}"
        else:
            weights = [gate.weight, up.weight, gate.bias, up.bias]
            text = f"weight=2:0 bias=2:0 | linear({features}) -> bias -> {act}"
        src, *weights = autocast(src, *weights)
        return _projected(down, launched(text, src, weights)[0], residual)


class SelfAttention(nn.MultiheadAttention):  # type: ignore[misc]
    """nn.MultiheadAttention of one tensor with itself, in three kernels: projections, attention, projection.

        attention = fuseplan.torch.SelfAttention(768, 12)
        attention.load_state_dict(layer.self_attn.state_dict())

    Parameters and `state_dict` are those of nn.MultiheadAttention with equal sizes of query, key and value.
    The heads are views of the joined projection, and the scores are in no memory. Batches come first.

    Args:
        embed_dim: features of src and of the output.
        num_heads: a divisor of these.
        bias: whether the projections have one.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=bias, batch_first=True, device=device, dtype=dtype)

    def forward(
        self,
        src: torch.Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention of (batch, places, features).

        Args:
            src: the tensor.
            is_causal: a place sees itself and those before it.
            key_padding_mask: of bool, (batch, places): the keys that no query sees are true.
            attn_mask: (places, places): true where a query (axis 0) does not see a key, or numbers that are
                added to the scores.
            residual: of src's shape, added to the output by the last kernel.

        Returns:
            Of src's shape. Where torch gives NaN for a place that sees nothing, its attention here is 0.

        Raises:
            ArgumentError: src or a mask is not as told.
        """
        if src.dim() != 3:
            raise ArgumentError(
                f"SelfAttention takes (batch, places, features), got a shape of {tuple(src.shape)}"
            )
        images, places, features = src.shape
        masks, attributes = _masks(key_padding_mask, attn_mask, images, places)
        weights = [self.in_proj_weight, *([] if self.in_proj_bias is None else [self.in_proj_bias])]
        bias = "" if self.in_proj_bias is None else " -> bias"
        src, *weights = autocast(src, *weights)
        packed = launched(f"linear({3 * features}){bias}", src, weights)[0]
        heads = packed.view(images, places, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        text = f"[bhsd] -> attention({', '.join([f'is_causal={is_causal}', *attributes])})"
        given = [each if each.dtype == torch.bool else each.to(query.dtype) for each in masks]
        (made,) = launched(text, query, [key, value, *given])
        return _projected(self.out_proj, made.transpose(1, 2).reshape(src.shape), residual)


def _masks(
    padding: torch.Tensor | None, mask: torch.Tensor | None, images: int, places: int
) -> tuple[list[torch.Tensor], list[str]]:
    """The operands of attention, true where a key is seen, in the plan's order, and the attributes."""
    wanted = (
        ("key_padding_mask", padding, (images, places), (torch.bool,)),
        ("attn_mask", mask, (places, places), (torch.bool, torch.float32, torch.float16, torch.bfloat16)),
    )
    for name, given, shape, dtypes in wanted:
        if given is not None and (given.shape != shape or given.dtype not in dtypes):
            got, told = f"{given.dtype}{list(given.shape)}", " or ".join(map(str, dtypes))
            raise ArgumentError(f"{name}: got {got}, want {told} of shape {list(shape)}")
    hidden = [(padding, "bt")] if padding is not None else []
    if mask is not None and mask.dtype == torch.bool:
        both = mask if padding is None else padding[:, None] | mask
        hidden = [(both, "st" if padding is None else "bst")]
    biases: list[torch.Tensor] = [mask] if mask is not None and mask.dtype.is_floating_point else []
    attributes = ["bias_axes=st"] * len(biases) + [f"mask_axes={axes}" for _, axes in hidden]
    return [*biases, *(~each for each, _ in hidden)], attributes


def _projected(layer: nn.Linear, src: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """A linear layer's output, with a tensor added to it."""
    weights = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    src, *weights = autocast(src, *weights)
    text = f"linear({layer.out_features})" + ("" if layer.bias is None else " -> bias")
    if residual is None:
        (made,) = launched(text, src, weights)
    else:
        (made,) = launched(f"{text} -> add", src, [*weights, residual.to(src.dtype)])
    return made


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype that autocast computes products in, if it is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each.to(dtype) for each in tensors)
