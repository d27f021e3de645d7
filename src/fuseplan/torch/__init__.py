"""Plans inside PyTorch: an operator that torch's transforms see, layers as plans, modules of fused layers.

    run(operators, src, **operands)   a plan on torch's tensors, with gradients
    plan_of(layers, src)              the plan of one layer, or of a run of layers
    Fused(*layers)                    a module: torch's layers, run as one kernel
    AddLayerNorm, GatedMLP, ...       modules of a transformer's block, with the state of torch's
    fuse(module, *example_inputs)     a whole module, with plans in the place of what they compute
    profile(module, *example_inputs)  the time of each operator before that, and the plans that would pay
    inductor_pass()                   a pass that puts plans into Inductor's graphs

`torch.compile(module, backend="fuseplan")` does the last in torch's graphs, for training too, and
`options={"rest": "inductor"}` gives the operators that no plan computes to Inductor.

`torch.ops.fuseplan.run` is the operator below all of them. torch.compile, torch.export, autograd and CUDA
graphs treat it as they treat torch's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuseplan.torch.blocks import AddLayerNorm, AddRMSNorm, GatedMLP, SelfAttention
from fuseplan.torch.fusing import fuse
from fuseplan.torch.layers import operands_of, operators_of, plan_of
from fuseplan.torch.modules import Fused
from fuseplan.torch.operator import run
from fuseplan.torch.profiling import profile

if TYPE_CHECKING:
    from fuseplan.torch.inductor import inductor_pass
    from fuseplan.torch.losses import LinearCrossEntropy

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Fused",
    "GatedMLP",
    "LinearCrossEntropy",
    "SelfAttention",
    "fuse",
    "inductor_pass",
    "operands_of",
    "operators_of",
    "plan_of",
    "profile",
    "run",
]


_SLOW = {"inductor_pass": "inductor", "LinearCrossEntropy": "losses"}  # they import torch._dynamo: a second


def __getattr__(name: str) -> Any:
    """What the modules of `_SLOW` have, which are imported at their first use."""
    if name not in _SLOW:
        raise AttributeError(f"module 'fuseplan.torch' has no attribute {name!r}")
    return getattr(import_module(f"fuseplan.torch.{_SLOW[name]}"), name)
