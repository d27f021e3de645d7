"""Operators of plans in a graph: the input and the operands are the node's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.graph.op import GraphOp, Tensor, check_count
from fuseplan.graph.type import Type, numpy_dtype
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op
from fuseplan.plans.text import operator_text


@dataclass(frozen=True)
class Layer(GraphOp):
    """An operator of plans; its inputs are src, then its operands and updated results as declared.

    Its results are the output, then the operator's own.
    """

    name: ClassVar[str] = "layer"

    op: Op

    @property
    def word(self) -> str:
        """The operator's word."""
        return self.op.name

    @property
    def text(self) -> str:
        """The operator's text in a plan."""
        return operator_text(self.op)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the inputs after src."""
        operands = [name for name, made in self.op.operand_fields.items() if made.when(self.op)]
        results = self.op.result_fields.items()
        return (*operands, *(name for name, made in results if made.updated and made.when(self.op)))

    def count(self) -> int:
        """One, and one an operand."""
        return 1 + len(self.keys)

    def src(self, given: Sequence[Type]) -> TensorSpec:
        """The operator's input, its axes named as the operator reads them.

        Raises:
            PlanError: no tensor of plans.
        """
        check_count(self, given)
        if not given[0].is_spec:
            want = "2 to 5 axes, without an extent of 0, of f64, f32, f16 or bf16"
            raise PlanError(f"{self.word} takes tensors of plans", got=str(given[0]), want=want)
        shape, dtype, names = given[0].shape or (), given[0].dtype, given[0].names
        told = {"rows": ROWS[len(shape)], "channels": None}.get(self.op.reads or "", names or None)
        return TensorSpec(shape, dtype, told)

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        """The output's type, and those of the operator's results."""
        src = self.src(given)
        dst = self.op.output(src)
        wanted = {each.name: each.shape for each in self.op.operands(src)}
        wanted |= {each.name: each.shape for each in self.op.results(src)}
        for key, each in zip(self.keys, given[1:], strict=True):
            if each.shape != wanted[key]:
                want = "x".join(map(str, wanted[key]))
                raise PlanError(f"{self.word}: {key} has another shape", got=str(each), want=want)
        names = dst.names if self.op.reads or given[0].names else ""
        results = (Type(each.shape, each.dtype) for each in self.op.results(src))
        return Type(dst.shape, dst.dtype, names), *results

    def evaluate(self, given: Sequence[Tensor], names: str = "") -> tuple[Tensor, ...]:
        """The operator's meaning in float64, rounded to src's dtype; `names` are those of src's axes."""
        dtype = given[0].dtype
        src = self.src([Type(tuple(each.shape), "f64", names) for each in given])
        operands = {key: np.asarray(each, np.float64) for key, each in zip(self.keys, given[1:], strict=True)}
        out, results = self.op.evaluate(np.asarray(given[0], np.float64), operands, {}, names=src.names)
        kept = numpy_dtype("f64") if dtype == np.float64 else numpy_dtype("f32")
        return out.astype(dtype), *(each.astype(kept) for each in results.values())
