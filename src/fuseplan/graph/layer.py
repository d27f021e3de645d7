"""Operators of plans in a graph: the input and the operands are the node's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.graph.op import GraphOp, Tensor, check_count
from fuseplan.graph.type import Type, numpy_dtype
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op
from fuseplan.ops.conversion import Conversion
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text
from fuseplan.system.locks import cached_property


@dataclass(frozen=True)
class Layer(GraphOp):
    """An operator of plans; its inputs are src, then its operands and updated results as declared.

    Its results are the output, then the operator's own.
    """

    name: ClassVar[str] = "layer"

    op: Op

    @property
    def word(self) -> str:
        return self.op.name

    @property
    def text(self) -> str:
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
        if self.op.looks_up:
            return given[0].spec()
        is_converted = isinstance(self.op, Conversion) and given[0].is_sum
        if not (given[0].is_spec or given[0].is_quantized or is_converted):
            want = "2 to 5 axes, without an extent of 0, of f64, f32, f16, bf16, i8 or u8"
            raise PlanError(f"{self.word} takes tensors of plans", got=str(given[0]), want=want)
        shape, dtype, names = given[0].shape or (), given[0].dtype, given[0].names
        told = {"rows": ROWS[len(shape)], "channels": None}.get(self.op.reads or "", names or None)
        return TensorSpec(shape, dtype, told)

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        src = self.src(given)
        self.op.check_dtype(src)
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
        """The operator's meaning in float64, rounded to its dtype; `names` are those of src's axes."""
        dtype = given[self.op.looks_up].dtype  # a table's, not that of indices
        if isinstance(self.op, Conversion) and dtype != np.float64:
            dtype = numpy_dtype(self.op.dtype)
        src = self.src([Type(tuple(each.shape), "f64", names) for each in given])
        operands = {key: np.asarray(each, np.float64) for key, each in zip(self.keys, given[1:], strict=True)}
        out, results = self.op.evaluate(np.asarray(given[0], np.float64), operands, {}, names=src.names)
        kept = numpy_dtype("f64") if dtype == np.float64 else numpy_dtype("f32")
        return out.astype(dtype), *(each.astype(kept) for each in results.values())


@dataclass(frozen=True)
class Planned(GraphOp):
    """A whole plan: its inputs are src, then the plan's operands in order.

    Its results are the plan's output, then the plan's own. Parameters have the plan's values.
    """

    name: ClassVar[str] = "plan"
    takes: ClassVar[int | None] = None

    written: str

    @cached_property
    def plan(self) -> FusionPlan:
        """The plan; a PlanError where the text is none, and where the plan updates tensors."""
        if not isinstance(self.written, str):
            raise PlanError("plan takes the text of a plan", got=shown(self.written))
        made = FusionPlan.parse(self.written)
        if any(each.updated for each in made.results):
            raise PlanError("a plan in a graph updates no tensors", text=self.written)
        return made

    def infer(self, given: Sequence[Type]) -> tuple[Type, ...]:
        plan = self.plan
        wanted: list[tuple[str, TensorSpec | Operand]] = [("src", plan.src)]
        wanted += [(each.key, each) for each in plan.operands]
        if len(given) != len(wanted):
            raise PlanError(f"{self.text}: another number of inputs", got=len(given), want=len(wanted))
        for (key, want), each in zip(wanted, given, strict=True):
            if (each.shape, each.dtype) != (want.shape, want.dtype):
                raise PlanError(f"{self.text}: {key} is another tensor", got=str(each), want=str(want))
        made: tuple[TensorSpec | Result, ...] = (plan.output, *plan.results)
        return tuple(Type(each.shape, each.dtype) for each in made)

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        src, *operands = given
        keys = [each.key for each in self.plan.operands]
        out, results = self.plan.evaluate(src, dict(zip(keys, operands, strict=True)))
        return out, *results.values()
