"""Linear and cross-entropy as one module, which never holds the logits of all places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from fuseplan.errors import ArgumentError, Unsupported
from fuseplan.messages.excerpt import ARROW
from fuseplan.ops.embedding import INDICES
from fuseplan.ops.losses import CrossEntropy, CrossEntropyBackward
from fuseplan.plans.text import operator_text
from fuseplan.torch.blocks import autocast
from fuseplan.torch.kernels import kernel_on
from fuseplan.torch.operator import launched

BLOCK = 1 << 26  # logits that are in memory at once: 128 MB in bf16
REDUCTIONS = ("mean", "sum", "none")


class _Texts(NamedTuple):
    """The plans' operators: the product with its bias, the loss of logits, its gradient."""

    product: str
    loss: str
    gradient: str


class LinearCrossEntropy(nn.Linear):  # type: ignore[misc]
    """Cross-entropy of a linear layer's output, without the logits of all places in memory.

        head = fuseplan.torch.LinearCrossEntropy(4096, 128256, bias=False)
        head.load_state_dict(model.lm_head.state_dict())
        head(hidden, target).backward()

    The forward pass is one kernel, whose logits are in no memory. The backward pass, and the forward pass
    where no kernel computes the whole, go through the places in blocks of at most 64 M logits: a block's
    logits, their loss or their gradient, and the two products of the gradients. The backward pass computes
    the logits once more. The gradient of the weight is summed in f32.

    Arguments, parameters and `state_dict` are those of nn.Linear.

    Args:
        in_features: of src.
        out_features: classes.
        bias: whether the layer has one.
        label_smoothing: as of torch.nn.functional.cross_entropy.
        ignore_index: likewise: the class of places without a loss.
        z_loss: a factor of the square of log(sum(exp(logits))), which is added to each loss.
        reduction: `mean` over the places that are not ignored, `sum`, or `none`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ArgumentError: there is no such reduction.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        reduction: str = "mean",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise ArgumentError(f"no reduction is named {reduction!r}; there are {', '.join(REDUCTIONS)}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        product, options = f"linear({out_features})", (label_smoothing, ignore_index, z_loss)
        product = f"{product} {ARROW} bias" if bias else product
        self._texts = tuple(
            _Texts(
                product,
                operator_text(CrossEntropy(*options, indices)),
                operator_text(CrossEntropyBackward(*options, indices)),
            )
            for indices in INDICES
        )

    def forward(self, src: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of src (..., in_features) at the classes `target` (...), whole numbers.

        Returns:
            A number in f32, in f64 of src in f64; with `reduction="none"` one for each place.

        Raises:
            ArgumentError: the target's shape is not that of the places, or its dtype not i32 or i64.
        """
        if target.shape != src.shape[:-1] or target.dtype not in (torch.int32, torch.int64):
            got, want = f"{target.dtype}{list(target.shape)}", f"torch.int64{list(src.shape[:-1])}"
            raise ArgumentError(f"the target of LinearCrossEntropy: got {got}, want {want}")
        weights = [self.weight, *([] if self.bias is None else [self.bias])]
        src, *weights = autocast(src.reshape(-1, self.in_features), *weights)
        texts = self._texts[target.dtype == torch.int64]
        if src.dtype.itemsize == 2:  # a loss of two bytes would lose what the logarithm has
            texts = texts._replace(loss=f"{texts.loss} {ARROW} cast(f32)")
        made: torch.Tensor = _LinearCrossEntropy.apply(texts, target.reshape(-1), src, *weights)
        if self.reduction == "none":
            return made.reshape(target.shape)
        total = made.sum()
        return total if self.reduction == "sum" else total / (target != self.ignore_index).sum()


class _LinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The losses of rows in f32, from src, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, texts: _Texts, target: torch.Tensor, src: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """Keeps what it is given, and the logarithm of each row's sum of exponentials."""
        whole = f"{texts.product} {ARROW} {texts.loss}"
        if _is_one_kernel(whole, src.device, src.dtype, src.shape):
            losses, lse = launched(whole, src, [*weights, target])
        else:
            made = []
            for rows in _blocks(src, weights[0]):
                (logits,) = launched(texts.product, src[rows], weights)
                made.append(launched(texts.loss, logits, [target[rows]]))
            losses, lse = (torch.cat(each) for each in zip(*made, strict=True))
        ctx.texts = texts
        ctx.save_for_backward(target, lse, src, *weights)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradients of src, weight and bias, block by block."""
        target, lse, src, weight, *bias = ctx.saved_tensors
        gradient, wanted = gradients[0].to(lse.dtype), ctx.needs_input_grad[2:]
        parts = []
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        of_bias = torch.zeros_like(bias[0], dtype=torch.float32) if wanted[2:] == (True,) else None
        for rows in _blocks(src, weight):
            (logits,) = launched(ctx.texts.product, src[rows], [weight, *bias])
            (grad,) = launched(ctx.texts.gradient, logits, [target[rows], lse[rows], gradient[rows]])
            del logits
            if wanted[0]:
                parts += launched(f"matmul({src.shape[1]})", grad, [weight])
            if of_weight is not None:
                of_weight += launched(f"linear_weight_gradient({len(weight)})", src[rows], [grad])[0]
            if of_bias is not None:
                of_bias += launched("sum(0)", grad, [])[0].view(-1)
        made = (torch.cat(parts) if parts else None, of_weight, of_bias)[: len(wanted)]
        return None, None, *(None if each is None else each.to(src.dtype) for each in made)


def _blocks(src: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    """Rows whose logits are in memory at once: some of equal number, and the rest."""
    size = max(1, BLOCK // len(weight))
    return (slice(first, first + size) for first in range(0, len(src), size))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_one_kernel(text: str, device: torch.device, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a kernel computes the plan on a dense tensor."""
    return _is_built(text, device, dtype, shape)


@lru_cache(maxsize=256)
def _is_built(text: str, device: torch.device, dtype: torch.dtype, shape: torch.Size) -> bool:
    try:
        kernel_on(text, torch.empty(shape, dtype=dtype, device=device))
    except Unsupported:
        return False
    return True
