"""PyTorch on a GPU: eager and compiled. `gpu_fused` has the fused kernels that torch gives access to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from fuseplan.bench.peers.peer import Peer, Prepared
from fuseplan.measure.data import is_training
from fuseplan.measure.layers import Layer, layers, plain_layers, running
from fuseplan.measure.spaces import Tensor, Tensors
from fuseplan.measure.torch_stages import Stage, module_of, stage_of, stages_in_place
from fuseplan.measure.torch_training import training_call
from fuseplan.plan import FusionPlan


class GpuPeer(Peer):
    """A library in one of its forms, on one GPU.

    Attributes:
        is_channels_last: it is given channels last where the plan has channels first.
        is_channels_first: it is given channels first where the plan has channels last.
    """

    is_channels_last: ClassVar[bool] = False
    is_channels_first: ClassVar[bool] = False

    def takes(self, plan: FusionPlan) -> bool:
        """Whether it is measured for the plan at all: one in another layout only where there is another."""
        return not self.is_channels_last or (plan.src.layout == "nchw" and _has_contraction(plan))

    def held(self, plan: FusionPlan, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors as torch's operators take them: all in src's dtype, weights in the layout of src."""
        import torch

        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(plan.src.rank)
        is_last = self.is_channels_last or plan.src.is_channels_last
        moved = tensors.keys() if self.is_channels_last else tensors.keys() - set(running(plan))
        made = {key: tensor.to(tensors["src"].dtype) for key, tensor in tensors.items()}
        if self.is_channels_first:
            return {key: tensor.contiguous() for key, tensor in made.items()}
        for key in moved if is_last and form is not None else ():
            if made[key].dim() == plan.src.rank:
                made[key] = made[key].contiguous(memory_format=form)
        return made


def _has_contraction(plan: FusionPlan) -> bool:
    return any(step.op.kind == "contraction" for step in plan.steps)


def set_precision(plan: FusionPlan) -> None:
    """Sets torch to the precision that the plan asks for, and to the fastest algorithms it can find."""
    import torch

    is_tf32 = any(step.op.attributes().get("precision") == "tf32" for step in plan.steps)
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    torch.backends.cudnn.allow_tf32 = is_tf32
    torch.backends.cudnn.benchmark = True


class GpuTorch(GpuPeer):
    """Eager: the fewest of torch's own operators, the bias in the convolution or product."""

    name = "torch"
    is_compiled: ClassVar[bool] = False

    def layers(self, plan: FusionPlan) -> list[Layer]:
        """The operators that are called one after the other."""
        return layers(plan)

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Makes a module with the weights as its buffers; of a plan with training operators a function."""
        (tensors,) = copies
        set_precision(plan)
        if is_training(plan):
            call = training_call(plan, tensors, self.name, self.made if self.is_compiled else None)
            return Prepared(call, call)
        held, keys = self.held(plan, tensors), running(plan)
        constant = {key: tensor for key, tensor in held.items() if key not in keys}
        call = partial(
            self.made(module_of(self.stages(plan), constant, keys).eval()), *[held[key] for key in keys]
        )
        return Prepared(call, call)

    def stages(self, plan: FusionPlan) -> list[Stage]:
        """What is called one after the other."""
        return [stage_of(layer, self.name) for layer in self.layers(plan)]

    def made(self, module: Any) -> Any:
        """The module or function in the form that is measured."""
        return module


class GpuTorchChannelsLast(GpuTorch):
    """The same in channels last."""

    name = "torch:nhwc"
    is_channels_last = True


class GpuTorchSteps(GpuTorch):
    """Eager, each operator of the plan by itself, the bias too."""

    name = "torch:steps"

    def layers(self, plan: FusionPlan) -> list[Layer]:
        """Every operator of the plan."""
        return plain_layers(plan)

    def takes(self, plan: FusionPlan) -> bool:
        """Where that differs from eager as it is at its best."""
        return len(layers(plan)) != len(plain_layers(plan))


class GpuUnfusedFirst(GpuTorch):
    """Eager at its best without fusing: every operator a kernel, in place where it can be; channels first."""

    name = "unfused:nchw"
    is_channels_first = True

    def stages(self, plan: FusionPlan) -> list[Stage]:
        """In place, which spares the cache a second tensor."""
        return stages_in_place(plain_layers(plan))


class GpuUnfusedLast(GpuUnfusedFirst):
    """The same in channels last."""

    name = "unfused:nhwc"
    is_channels_first = False
    is_channels_last = True

    def takes(self, plan: FusionPlan) -> bool:
        """Every plan: the layout is its own choice."""
        return True


class GpuTorchCompile(GpuTorch):
    """torch.compile with max-autotune and frozen weights; without CUDA graphs, its kernels are timed.

    It tries its candidates in a process of its own: one that it has for grouped convolutions ends the CUDA
    context, and with it every other measurement, where it is tried in ours.
    """

    name = "torch.compile"
    is_compiled = True
    mode: ClassVar[str] = "max-autotune-no-cudagraphs"

    def made(self, module: Any) -> Any:
        """The compiled module or function; it compiles at the first call."""
        import torch
        import torch._inductor.config as inductor

        inductor.freezing = True
        inductor.autotune_in_subproc = True
        return torch.compile(module, mode=self.mode, dynamic=False)


class GpuTorchCompileDefault(GpuTorchCompile):
    """torch.compile in its default mode: convolutions and products of libraries, the rest in one kernel."""

    name = "torch.compile:default"
    mode = "default"


class GpuTorchCompileChannelsLast(GpuTorchCompile):
    """The same in channels last."""

    name = "torch.compile:nhwc"
    is_channels_last = True
