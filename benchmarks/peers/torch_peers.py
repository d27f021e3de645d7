"""Further forms of PyTorch: unfused, and torch.compile in its default mode."""

from __future__ import annotations

from typing import Any

from fuseplan.bench.peers.torch_peer import Torch, TorchCompile
from fuseplan.measure.layers import layers, plain_layers
from fuseplan.plans.plan import FusionPlan


class TorchSteps(Torch):
    """Eager, each operator of the plan by itself, the bias too."""

    name = "torch:steps"

    def stages(self, plan: FusionPlan) -> list[Any]:
        """Every operator of the plan."""
        from fuseplan.measure.torch_functions import stage_of

        return [stage_of(layer, self.name) for layer in plain_layers(plan)]

    def takes(self, plan: FusionPlan) -> bool:
        """Where that differs from eager as it is at its best."""
        return len(layers(plan)) != len(plain_layers(plan))


class UnfusedFirst(Torch):
    """Eager at its best without fusing: every operator a kernel, in place where it can be; channels first."""

    name = "unfused:nchw"
    layout = "nchw"

    def stages(self, plan: FusionPlan) -> list[Any]:
        """In place, which spares the cache a second tensor."""
        from fuseplan.measure.torch_eager import in_place
        from fuseplan.measure.torch_functions import stage_of

        first, *others = plain_layers(plan)
        return [stage_of(first), *map(in_place, others)]

    def takes(self, plan: FusionPlan) -> bool:
        """Every plan: the layout is its own choice."""
        return True


class UnfusedLast(UnfusedFirst):
    """The same in channels last."""

    name = "unfused:nhwc"
    layout = "nhwc"


class TorchCompileDefault(TorchCompile):
    """torch.compile in its default mode: convolutions and products of libraries, the rest in one kernel."""

    name = "torch.compile:default"
    mode = "default"
