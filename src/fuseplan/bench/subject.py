"""What is measured of a plan: its results, or the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.backward.run import viewed
from fuseplan.backward.value import Backward
from fuseplan.bench.peers.peer import Peer, Prepared
from fuseplan.bench.results import dtypes_of
from fuseplan.graph.layer import Planned
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.cases import Case
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import Tensor, Tensors, space_on
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.locks import cached_property


@dataclass(frozen=True)
class Results:
    """The results of a plan, which one kernel computes."""

    plan: FusionPlan

    def tensors(self, seed: int, device: str) -> dict[str, Tensor]:
        """What every peer is given."""
        return random_arrays(self.plan, seed, device=device)

    def prepared(self, peer: Peer, tensors: Tensors) -> Prepared:
        """The plan made ready in a peer, as `Peer.prepare`."""
        return peer.prepare(self.plan, [tensors])

    def wanted(self, peer: Peer, tensors: Tensors) -> tuple[Tensor, ...]:
        """What a peer should give, in float64."""
        out, results = evaluated(*peer.asked(self.plan, tensors))
        return (out, *results.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of what a peer gives."""
        return dtypes_of(self.plan)

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Ours, one after the other."""
        return [lower(match(self.plan))]


@dataclass(frozen=True)
class Gradients(Results):
    """The gradients of some inputs, as `FusionPlan.backward` has them; the forward pass is done before.

    Attributes:
        wrt: `src` and operands.
    """

    wrt: tuple[str, ...]

    @cached_property
    def backward(self) -> Backward:
        """The plans of the gradients."""
        made: Backward = self.plan.backward(self.wrt)
        return made

    def tensors(self, seed: int, device: str) -> dict[str, Tensor]:
        space, out = space_on(device), self.plan.output
        grad = space.fill(space.empty(out), out, space.draws(seed + 1).normal(out.shape))
        return {**super().tensors(seed, device), "grad": grad}

    def prepared(self, peer: Peer, tensors: Tensors) -> Prepared:
        return peer.prepare_backward(self.plan, self.wrt, tensors)

    def wanted(self, peer: Peer, tensors: Tensors) -> tuple[Tensor, ...]:
        values = dict(tensors)
        for node in self.backward.graph.nodes:
            given = [values[name] for name in node.inputs]
            if isinstance(node.op, Planned):
                keys = ("src", *(each.key for each in node.op.plan.operands))
                out, results = evaluated(node.op.plan, dict(zip(keys, given, strict=True)))
                made: Sequence[Tensor] = (out, *results.values())
            else:
                made = [viewed(node.op, given[0])]
            values |= zip(node.outputs, made, strict=True)
        return tuple(values[name] for name in self.backward.gradients.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        of = {"src": self.plan.src.dtype} | {each.key: each.dtype for each in self.plan.operands}
        return tuple(of[name] for name in self.wrt)

    @property
    def kernels(self) -> Sequence[Kernel]:
        return [lower(match(each)) for each in self.backward.plans]


def subject_of(case: Case) -> Results:
    """What is measured of a case."""
    plan = FusionPlan.parse(case.plan)
    return Gradients(plan, tuple(case.gradients.split())) if case.gradients else Results(plan)
