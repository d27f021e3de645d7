"""fuseplan on a GPU, through its public functions."""

from __future__ import annotations

from functools import partial

from fuseplan.arguments import dense
from fuseplan.bench.peers.gpu_torch import GpuPeer, Tensor, Tensors
from fuseplan.bench.peers.ours import facts_of
from fuseplan.bench.peers.peer import Prepared
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.spaces import empty
from fuseplan.ops.affine import Bias
from fuseplan.plan import FusionPlan
from fuseplan.tuning.unfused import OneAtATime

POISON = float("nan")  # what an output holds before a kernel writes it


class GpuFuseplan(GpuPeer):
    """The plan as one kernel, bound to its tensors."""

    name = "fuseplan"

    def prepare(self, plan: FusionPlan, tensors: Tensors) -> Prepared:
        """Compiles and binds; all that it writes is poisoned before the first run."""
        compiled = compile_plan(plan, "cuda")
        device = tensors["src"].device
        out = empty(plan.output, device, POISON)
        results = {each.key: empty(dense(each), device) for each in plan.results}
        operands = {key: tensor for key, tensor in tensors.items() if key != "src"}
        call = partial(compiled.bind(**operands, **results), tensors["src"], out)

        def result() -> Tensor:
            for each in (out, *results.values()):
                each.fill_(POISON)
            call()
            return (out, *results.values()) if results else out

        return Prepared(call, result, facts_of(compiled))


class GpuFuseplanAgain(GpuFuseplan):
    """The same once more: how far apart two measurements of one thing are."""

    name = "fuseplan:again"


class GpuFuseplanUnfused(GpuPeer):
    """The plan's operators one at a time, each a kernel of its own: what fusing saves."""

    name = "fuseplan:unfused"

    def takes(self, plan: FusionPlan) -> bool:
        """Where there is more than one operator."""
        return len(plan) > 1

    def prepare(self, plan: FusionPlan, tensors: Tensors) -> Prepared:
        """Compiles and binds every operator."""
        call = OneAtATime(plan, tensors, target="cuda")
        return Prepared(call, call, {"target": "cuda", "nbytes": call.nbytes})


class GpuFuseplanPlain(GpuFuseplan):
    """For a plan that normalizes and adds a residual: the same convolution with bias and relu alone.

    It tells what the rest of the epilogue costs, next to what its bytes have to.
    """

    name = "fuseplan:plain"

    def takes(self, plan: FusionPlan) -> bool:
        """Plans whose residual is the one large tensor that the plainer one does not read."""
        return [step.op.name for step in plan.steps][1:] == ["batch_norm", "add", "relu"]

    def asked(self, plan: FusionPlan, tensors: Tensors) -> tuple[FusionPlan, Tensors]:
        """The plainer plan, with the shift of the normalization as its bias."""
        convolution, norm, _, relu = plan.steps
        plain = FusionPlan(plan.src, convolution.op, Bias(), relu.op)
        weight, bias = (each.key for each in plain.operands)
        (own,) = convolution.keys.values()
        return plain, {"src": tensors["src"], weight: tensors[own], bias: tensors[norm.keys["shift"]]}

    def prepare(self, plan: FusionPlan, tensors: Tensors) -> Prepared:
        """Compiles and binds the plainer plan; `added_bytes` are the residual's."""
        prepared = super().prepare(*self.asked(plan, tensors))
        facts = {**prepared.facts, "added_bytes": plan.output.nbytes}
        return Prepared(prepared.call, prepared.result, facts)
