"""PyTorch, eager and compiled, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from fuseplan.bench.peers.peer import Peer, Prepared, only_in
from fuseplan.measure.clock import rotating
from fuseplan.measure.data import is_training
from fuseplan.measure.layers import CannotRunError, layers
from fuseplan.measure.spaces import Tensors
from fuseplan.plans.plan import FusionPlan


class Torch(Peer):
    """Eager: the fewest of torch's own operators, the bias in the convolution or product.

    Attributes:
        layout: `nchw` or `nhwc` for tensors that are put into that layout; else they lie as the plan has them
            on a GPU, and in channels first on a CPU.
        mode: of torch.compile on a GPU; empty where nothing is compiled.
    """

    name = "torch"
    packages = ("torch",)
    layout: ClassVar[str] = ""
    mode: ClassVar[str] = ""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        import torch

        from fuseplan.measure.torch_eager import as_arrays, eager_calls

        self._torch, self._calls, self._arrays = torch, eager_calls, as_arrays
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(False)  # for the process: entering a mode anew would be timed with every call

    def takes(self, plan: FusionPlan) -> bool:
        """Whether it is measured for the plan at all: one in another layout only where there is another."""
        has_contraction = any(step.op.kind == "contraction" for step in plan.steps)
        return self.layout != "nhwc" or (plan.src.layout == "nchw" and has_contraction)

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Makes a module with the weights as its buffers; of a plan with training operators a function."""
        if self.threads is not None:
            only_in(("f32", "bf16", "f16"), plan, self.name)
            self._set_mode(plan)
        layout = self.layout or ("" if self.threads is None else "nchw")
        compiler = self._compiler() if self.mode else None
        calls = self._calls(plan, copies, self.stages, layout=layout, compiler=compiler, peer=self.name)
        call = rotating(calls) if len(calls) > 1 else calls[0]
        if self.threads is None:
            return Prepared(call, call)
        return Prepared(call, lambda: self._arrays(calls[0]()))

    def prepare_backward(self, plan: FusionPlan, wrt: Sequence[str], tensors: Tensors) -> Prepared:
        """Through autograd."""
        if self.mode:
            raise CannotRunError(f"{self.name} is not measured with gradients of plans")
        held = {key: each.detach().requires_grad_(key in wrt) for key, each in tensors.items()}
        call = self._calls(plan, [held], self.stages, peer=self.name)[0]
        with self._torch.enable_grad():
            return self._differentiated(call(), [held[name] for name in wrt], tensors["grad"])

    def _differentiated(self, out: Any, leaves: Sequence[Any], grad: Any) -> Prepared:
        """The gradients of a result that autograd knows."""
        call = partial(self._torch.autograd.grad, out, leaves, grad, retain_graph=True)
        return Prepared(call, call)

    def stages(self, plan: FusionPlan) -> list[Any]:
        """The operators of torch that are called one after the other."""
        from fuseplan.measure.torch_functions import stage_of

        return [stage_of(layer, self.name) for layer in layers(plan)]

    def _set_mode(self, plan: FusionPlan) -> None:
        """For the life of a process on a CPU, as above; torch.compile wants no inference mode."""
        if not self.mode and not is_training(plan):
            self._torch.inference_mode().__enter__()

    def _compiler(self) -> Callable[[Any], Any]:
        """Compiles a module or function at its first call; frozen weights may be packed."""
        torch = self._torch
        import torch._inductor.config as inductor

        inductor.freezing = True
        if self.threads is not None:
            inductor.compile_threads = 1
            torch._dynamo.reset()
            return partial(torch.compile)
        # Some candidate for grouped convolutions ends the CUDA context of the process that tries it.
        inductor.autotune_in_subproc = True
        return partial(torch.compile, mode=self.mode, dynamic=False)


class TorchChannelsLast(Torch):
    """The same in channels last."""

    name = "torch:nhwc"
    layout = "nhwc"


class TorchCompile(Torch):
    """torch.compile with frozen weights; on a GPU with max-autotune, and without CUDA graphs."""

    name = "torch.compile"
    mode = "max-autotune-no-cudagraphs"


class TorchCompileChannelsLast(TorchCompile):
    """The same in channels last."""

    name = "torch.compile:nhwc"
    layout = "nhwc"
