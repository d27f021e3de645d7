"""PyTorch, eager and compiled, in both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fuseplan.bench.peers.peer import Array, Arrays, Peer, Prepared, only_f32
from fuseplan.measure.clock import rotating
from fuseplan.measure.data import is_training
from fuseplan.measure.layers import layers, plain_layers, running
from fuseplan.measure.torch_stages import Stage, module_of, stage_of, stages_in_place
from fuseplan.measure.torch_training import training_call
from fuseplan.plan import FusionPlan


class Torch(Peer):
    """Eager PyTorch under inference_mode, channels first."""

    name = "torch"
    packages = ("torch",)
    is_channels_last: ClassVar[bool] = False
    is_compiled: ClassVar[bool] = False

    def __init__(self, threads: int) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(threads)
        if self.is_compiled:
            # Freezing lets the compiler pack weights; without a gradient mode they count as constants.
            import torch._inductor.config as inductor

            inductor.freezing = True
            inductor.compile_threads = 1
            torch.set_grad_enabled(False)

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Makes a module with the weights as its buffers, and puts each copy's tensors into its layout."""
        only_f32(plan, self.name)
        if is_training(plan):
            return self._training(plan, copies)
        torch = self._torch
        keys = running(plan)
        constant = {key: self._tensor(array) for key, array in copies[0].items() if key not in keys}
        module = module_of(self.stages(plan), constant, keys).eval()
        if self.is_compiled:
            torch._dynamo.reset()
            module = torch.compile(module)
        inputs = [[self._tensor(arrays[key]) for key in keys] for arrays in copies]
        mode = torch.no_grad if self.is_compiled else torch.inference_mode
        mode().__enter__()  # for the life of the process: entering anew would be timed with every call

        def result() -> Array:
            return np.array(module(*inputs[0]).contiguous().numpy())

        calls = [lambda given=given: module(*given) for given in inputs]
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)

    def _training(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Torch's own function for each copy; of the running statistics, none."""
        torch = self._torch
        torch.set_grad_enabled(False)
        compiler = torch.compile if self.is_compiled else None
        tensors = [{key: self._tensor(array) for key, array in arrays.items()} for arrays in copies]
        calls = [training_call(plan, given, self.name, compiler) for given in tensors]

        def result() -> tuple[Array, ...]:
            return tuple(np.array(each.contiguous().numpy()) for each in calls[0]())

        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)

    def stages(self, plan: FusionPlan) -> list[Stage]:
        """What is called one after the other: the fewest of torch's own operators."""
        return [stage_of(layer, self.name) for layer in layers(plan)]

    def _tensor(self, array: Array) -> Any:
        tensor = self._torch.from_numpy(np.ascontiguousarray(array))
        last = {4: self._torch.channels_last, 5: self._torch.channels_last_3d}.get(tensor.dim())
        return tensor.contiguous(memory_format=last) if self.is_channels_last and last else tensor


class TorchChannelsLast(Torch):
    """Eager PyTorch under inference_mode, channels last."""

    name = "torch:nhwc"
    is_channels_last = True


class TorchCompile(Torch):
    """torch.compile with freezing, channels first."""

    name = "torch.compile"
    is_compiled = True


class TorchCompileChannelsLast(Torch):
    """torch.compile with freezing, channels last."""

    name = "torch.compile:nhwc"
    is_channels_last = True
    is_compiled = True


class UnfusedFirst(Torch):
    """Eager at its best without fusing: every operator a kernel, in place where it can be; channels first."""

    name = "unfused:nchw"

    def stages(self, plan: FusionPlan) -> list[Stage]:
        """Every operator of the plan by itself, the bias too."""
        return stages_in_place(plain_layers(plan))


class UnfusedLast(UnfusedFirst):
    """The same in channels last."""

    name = "unfused:nhwc"
    is_channels_last = True
