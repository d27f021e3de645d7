"""Tensors of torch's without elements: shape, strides, dtype and device alone.

Torch's own need torch._dynamo, which takes a second to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch


class Described(torch.Tensor):  # type: ignore[misc]
    """A tensor that no operator takes, except under a mode that follows operators."""

    @classmethod
    def of(
        cls, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        """A tensor like this."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), tuple(strides), dtype=dtype, device=device
        )
        return made

    @classmethod
    def like(cls, tensor: torch.Tensor, device: torch.device | None = None) -> Self:
        """A tensor like another, on its device or on another one."""
        return cls.of(tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} on a tensor without elements")

    def __repr__(self, **_: Any) -> str:
        return f"<{self.dtype} {tuple(self.shape)} on {self.device}>"
