"""Stages of a plan in PyTorch, put together: what every form of torch that is measured is made of.

The module imports torch: other modules import it when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuseplan.measure.layers import Layer
from fuseplan.measure.torch_functions import Stage, per_channel, stage_of


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
