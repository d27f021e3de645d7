"""fuseplan through its public functions, in the forms that are measured, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from fuseplan.bench.peers.peer import Peer, Prepared
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.kernels.template import Accuracy
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.measure.clock import rotating
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.spaces import Tensor, Tensors, empty, space_of, unwritten
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arrays import is_torch
from fuseplan.tuning.verdict import OneAtATime


class Fuseplan(Peer):
    """The plan as one kernel, bound to its tensors."""

    name = "fuseplan"
    accuracy: ClassVar[Accuracy] = "default"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Compiles once and binds each copy of the tensors; `result` poisons all that it writes before.

        Raises:
            CannotRunError: a call changes what the next one reads.
        """
        if any(each.updated for each in plan.results):
            raise CannotRunError("running statistics change with every call, and are not measured")
        compiled = compile_plan(plan, self.target, threads=self.threads, accuracy=self.accuracy)
        specs: dict[str, TensorSpec | Dense] = {"out": plan.output}
        specs |= {each.key: each.spec for each in plan.results}
        outputs: list[dict[str, Tensor]] = []
        calls = []
        for tensors in copies:
            src = tensors["src"]
            made = {key: empty(spec, src.device if is_torch(src) else None) for key, spec in specs.items()}
            rest: dict[str, Any] = {key: tensor for key, tensor in tensors.items() if key != "src"}
            rest |= {key: tensor for key, tensor in made.items() if key != "out"}
            calls.append(partial(compiled.bind(**rest), src, made["out"]))
            outputs.append(made)

        def result() -> Any:
            for key, tensor in outputs[0].items():
                space_of(tensor).fill(tensor, specs[key], unwritten(specs[key].dtype))
            calls[0]()
            return tuple(outputs[0].values()) if len(specs) > 1 else outputs[0]["out"]

        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result, facts_of(compiled))

    def prepare_backward(self, plan: FusionPlan, wrt: Sequence[str], tensors: Tensors) -> Prepared:
        """Runs the forward plan; the kernels of the gradients follow one another."""
        made = plan.backward(wrt)
        compiled = made.compile(self.target, accuracy=self.accuracy)
        operands = {each.key: tensors[each.key] for each in compiled.forward.plan.operands}
        out, names = compiled.forward(tensors["src"], **operands), made.graph.nodes[0].outputs
        known = dict(tensors) | dict(zip(names, out if len(names) > 1 else [out], strict=True))
        call = partial(compiled, tensors["grad"], **{name: known[name] for name in compiled.reads})
        told = [facts_of(each) for each in compiled.kernels]
        facts = {"template": ", ".join(dict.fromkeys(each["template"] for each in told))}
        facts |= {"target": told[0]["target"]}
        facts |= {name: sum(each[name] for each in told) for name in ("nbytes", "flops")}
        return Prepared(call, call, facts)

    @property
    def target(self) -> str:
        """The machine."""
        return "cuda" if self.threads is None else "cpu"


def facts_of(compiled: CompiledPlan) -> dict[str, Any]:
    """What a result line says of a kernel of ours."""
    template = compiled.choice.template
    return {
        "template": template.name,
        "knobs": template.knobs,
        "target": str(compiled.target),
        "nbytes": compiled.traffic.total,
        "flops": template.flops(compiled.kernel),
    }


class FuseplanAgain(Fuseplan):
    """The same once more: how far apart two measurements of one thing are."""

    name = "fuseplan:again"


class FuseplanUnfused(Fuseplan):
    """The plan's operators one at a time, each a kernel of its own: what fusing saves."""

    name = "fuseplan:unfused"

    def takes(self, plan: FusionPlan) -> bool:
        """Where there is more than one operator."""
        return len(plan) > 1

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Compiles and binds every operator, for each copy of the tensors."""
        calls = [OneAtATime(plan, tensors, self.threads, self.target) for tensors in copies]
        facts = {"target": self.target, "nbytes": calls[0].nbytes}
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], calls[0], facts)
