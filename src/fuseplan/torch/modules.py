"""A run of torch's layers as one kernel, with torch's own parameters and state."""

from __future__ import annotations

import torch
from torch import nn

from fuseplan.torch.layers import Layer, computes_as_in_training, filled, layers_of, operators_of
from fuseplan.torch.operator import is_for_onnx, launched

AUTOCAST = (nn.Linear, nn.modules.conv._ConvNd)  # the layers that autocast runs in fewer bits


class Fused(nn.Sequential):  # type: ignore[misc]
    """nn.Sequential whose layers run as one kernel.

        block = fuseplan.torch.Fused(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()).eval()

    Parameters, buffers and `state_dict` are those of nn.Sequential with the same layers, and a parameter that
    is changed by torch's operators is seen. Gradients, torch.compile, torch.export, autocast and CUDA graphs
    work as with torch's layers. In training mode a run with batch norm or dropout computes what torch does,
    by torch's own layers, since these are other operators then: `is_fused` says which. A setting of a layer,
    such as `eps`, is read when the module is made, or a layer replaced.

    Attributes:
        operators: the plan's text behind its input.

    Args:
        *layers: those that `plan_of` reads.

    Raises:
        PlanError: a layer has no operator. What a kernel cannot fuse is told by the first call.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._read()

    def _read(self) -> None:
        """Keeps what each call needs: the operators, and where their operands are."""
        self._layers = tuple(self._modules.values())
        self.operators = operators_of(self)
        self._operands: list[tuple[nn.Module, str]] = []
        for layer in layers_of(self):
            for each in layer.operands:
                self._operands.append(
                    (layer.module, each) if isinstance(each, str) else self._made(layer, each)
                )

    def _made(self, layer: Layer, value: float) -> tuple[nn.Module, str]:
        """A tensor that the layer has none for: a buffer that moves with the module, and is not its state."""
        name = f"filled_{len(self._operands)}"
        self.register_buffer(name, filled(layer, value), persistent=False)
        return self, name

    @property
    def is_fused(self) -> bool:
        """Whether a call runs one kernel: not while a layer computes something else in training."""
        return not computes_as_in_training(self.modules()) and not is_for_onnx()

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        """The layers' output for a tensor that a plan takes."""
        if not self.is_fused:
            return super().forward(src)
        if self._layers != tuple(self._modules.values()):
            self._read()
        given = [getattr(module, name) for module, name in self._operands]
        kind = src.device.type
        if torch.is_autocast_enabled(kind) and any(isinstance(each, AUTOCAST) for each in self.modules()):
            dtype = torch.get_autocast_dtype(kind)
            src = src.to(dtype)
            given = [each.to(dtype) for each in given]
        return launched(self.operators, src, given)[0]
