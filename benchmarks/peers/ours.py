"""Further forms of fuseplan: more accurate, and a plainer plan."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.bench.peers.ours import Fuseplan
from fuseplan.bench.peers.peer import Prepared
from fuseplan.measure.spaces import Tensors
from fuseplan.ops.affine import Bias
from fuseplan.plans.plan import FusionPlan


class FuseplanStrict(Fuseplan):
    """Without the faster and less accurate form of Winograd."""

    name = "fuseplan:strict"
    accuracy = "strict"


class FuseplanPlain(Fuseplan):
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

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Compiles and binds the plainer plan; `added_bytes` are the residual's."""
        asked = [self.asked(plan, tensors) for tensors in copies]
        prepared = super().prepare(asked[0][0], [tensors for _, tensors in asked])
        facts = {**prepared.facts, "added_bytes": plan.output.nbytes}
        return Prepared(prepared.call, prepared.result, facts)
