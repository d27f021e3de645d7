"""Operators: what a plan is made of.

To add one, write its class in a module here and name it in that module's tuple.
"""

from __future__ import annotations

from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.ops.affine import AFFINE
from fuseplan.ops.conv import CONVOLUTIONS
from fuseplan.ops.expression import Expression
from fuseplan.ops.matmul import Matmul
from fuseplan.ops.training import TRAINING

OPERATORS: tuple[type[Op], ...] = (*CONVOLUTIONS, Matmul, *AFFINE, *ACTIVATIONS, *TRAINING, Expression)
BY_NAME: dict[str, type[Op]] = {operator.name: operator for operator in OPERATORS}
