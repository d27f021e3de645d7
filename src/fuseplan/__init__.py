"""Fusion plans: an input and the operators applied to it become one kernel, on CPUs and GPUs.

    plan = fuseplan.FusionPlan("f32[1x64x56x56, nhwc]", Conv2d(64, kernel=3, padding=1), Bias(), Relu())
    layer = fuseplan.compile(plan).bind(weight=w, bias=b)
    y = layer(x)

Operators are made from the classes here; the functions that formulas are made of are in `fuseplan.scalar`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fuseplan.compile import CompiledPlan, compile
from fuseplan.errors import ArgumentError, BuildError, FuseplanError, PlanError, Unsupported
from fuseplan.execution.run import BoundPlan
from fuseplan.kernels.target import Target, parse_target
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.activation import (
    Abs,
    Clamp,
    ClippedRelu,
    Elu,
    Gelu,
    Hardsigmoid,
    Hardswish,
    Identity,
    LeakyRelu,
    LogSigmoid,
    Mish,
    Power,
    Relu,
    Sigmoid,
    Silu,
    Softplus,
    Softsign,
    Tanh,
)
from fuseplan.ops.affine import (
    Add,
    AddAlong,
    BatchNorm,
    Bias,
    Div,
    Maximum,
    Minimum,
    Mul,
    MulAlong,
    Prelu,
    Scale,
)
from fuseplan.ops.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from fuseplan.ops.dropout import Dropout
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.expression import Expression
from fuseplan.ops.matmul import Linear, Matmul
from fuseplan.ops.normalization import LayerNorm, RmsNorm
from fuseplan.ops.pool import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d
from fuseplan.ops.ranges import Save, Split, Within
from fuseplan.ops.scan import Cumsum
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.tensors.arguments import Arguments
from fuseplan.tensors.arrays import empty

if TYPE_CHECKING:
    from fuseplan.backward.value import Backward
    from fuseplan.explanation import Explanation, explain
    from fuseplan.extend import register_operator, register_template
    from fuseplan.graph.rules import Rule, rule
    from fuseplan.kernels.match import unfuse
    from fuseplan.loaded import LoadedPlan, load
    from fuseplan.stores.cache import CacheInfo, cache_info, clear_cache
    from fuseplan.stores.tuned import Tuned
    from fuseplan.tuning.tune import tune
    from fuseplan.tuning.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "Abs",
    "ActivationBackward",
    "Add",
    "AddAlong",
    "ArgumentError",
    "Arguments",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Backward",
    "BatchNorm",
    "BatchNormBackward",
    "BatchNormTraining",
    "Bias",
    "BoundPlan",
    "BuildError",
    "CacheInfo",
    "Clamp",
    "ClippedRelu",
    "CompiledPlan",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Cumsum",
    "Div",
    "Dropout",
    "Elu",
    "Embedding",
    "Explanation",
    "Expression",
    "FuseplanError",
    "FusionPlan",
    "Gelu",
    "Hardsigmoid",
    "Hardswish",
    "Identity",
    "LayerNorm",
    "LeakyRelu",
    "Linear",
    "LoadedPlan",
    "LogSigmoid",
    "Matmul",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Maximum",
    "Minimum",
    "Mish",
    "Mul",
    "MulAlong",
    "PlanError",
    "Power",
    "Prelu",
    "Relu",
    "RmsNorm",
    "Rule",
    "Save",
    "Scale",
    "Sigmoid",
    "Silu",
    "Softplus",
    "Softsign",
    "Split",
    "Step",
    "Tanh",
    "Target",
    "TensorSpec",
    "Tuned",
    "Unsupported",
    "Verdict",
    "Within",
    "cache_info",
    "clear_cache",
    "compile",
    "empty",
    "explain",
    "load",
    "parse_target",
    "register_operator",
    "register_template",
    "rule",
    "tune",
    "unfuse",
]

# Names that few programs use: their modules are loaded when one is asked for.
_LATE = {
    "Backward": "fuseplan.backward.value",
    "CacheInfo": "fuseplan.stores.cache",
    "cache_info": "fuseplan.stores.cache",
    "clear_cache": "fuseplan.stores.cache",
    "Explanation": "fuseplan.explanation",
    "explain": "fuseplan.explanation",
    "LoadedPlan": "fuseplan.loaded",
    "load": "fuseplan.loaded",
    "register_operator": "fuseplan.extend",
    "register_template": "fuseplan.extend",
    "Rule": "fuseplan.graph.rules",
    "rule": "fuseplan.graph.rules",
    "tune": "fuseplan.tuning.tune",
    "Tuned": "fuseplan.stores.tuned",
    "unfuse": "fuseplan.kernels.match",
    "Verdict": "fuseplan.tuning.verdict",
}


def __getattr__(name: str) -> Any:
    """Loads the module of a name that few programs use."""
    if name not in _LATE:
        raise AttributeError(f"module 'fuseplan' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    """The public names, which completion shows; of the modules, the two that operators are written with."""
    return sorted([*__all__, "__version__", "op", "scalar"])
