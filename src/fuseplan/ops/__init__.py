"""Operators: what a plan is made of.

To add one, write its class in a module here and name it in that module's tuple.
"""

from __future__ import annotations

from fuseplan.errors import PlanError, did_you_mean
from fuseplan.messages.elsewhere import answers, folded
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.ops.affine import AFFINE
from fuseplan.ops.attention import Attention, AttentionGradient
from fuseplan.ops.conv import CONVOLUTIONS, TRANSPOSED
from fuseplan.ops.conversion import CONVERSIONS
from fuseplan.ops.dropout import Dropout
from fuseplan.ops.dynamic import DynamicQuantize
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.expression import Expression
from fuseplan.ops.gradient import GRADIENTS
from fuseplan.ops.losses import LOSSES
from fuseplan.ops.matmul import Linear, Matmul
from fuseplan.ops.normalization import GROUP_NORMALIZATIONS, ROW_NORMALIZATIONS
from fuseplan.ops.parts import PARTED
from fuseplan.ops.pool import POOLS
from fuseplan.ops.ranges import RANGES, Save
from fuseplan.ops.reductions import REDUCTIONS
from fuseplan.ops.row_gradients import ROW_GRADIENTS
from fuseplan.ops.scan import Cumsum, UnaryOp
from fuseplan.ops.training import TRAINING

OPERATORS: tuple[type[Op], ...] = (
    *CONVOLUTIONS,
    *TRANSPOSED,
    *POOLS,
    Matmul,
    Linear,
    *GRADIENTS,
    Attention,
    AttentionGradient,
    *AFFINE,
    Dropout,
    Embedding,
    Save,
    *RANGES,
    *ACTIVATIONS,
    *CONVERSIONS,
    *PARTED,
    *ROW_NORMALIZATIONS,
    *GROUP_NORMALIZATIONS,
    *REDUCTIONS,
    Cumsum,
    DynamicQuantize,
    *LOSSES,
    *TRAINING,
    *ROW_GRADIENTS,
    Expression,
)
BY_NAME: dict[str, type[Op]] = {operator.name: operator for operator in OPERATORS}
UNARY = tuple(each for each in OPERATORS if issubclass(each, UnaryOp))

_THEIRS = {folded(theirs): each.name for each in OPERATORS for theirs in (each.torch, each.onnx) if theirs}


def no_operator(word: str) -> PlanError:
    """The error about a word that is no operator: it tells the name in a plan, or what there is instead."""
    theirs = _THEIRS | dict(answers("operators"))
    instead = theirs.get(folded(word), "")
    if " " in instead:
        return PlanError(f"{word} is not in fuseplan", remedy=instead)
    remedy = did_you_mean(word, BY_NAME, theirs)
    return PlanError(f"there is no operator {shown(word)}", remedy=remedy)
