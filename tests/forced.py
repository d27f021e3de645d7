"""Compiles a plan with a template of the test's choice, whatever the cost model thinks of it."""

from dataclasses import replace

from fuseplan.compile import CompiledPlan
from fuseplan.execution.build import build
from fuseplan.execution.select import Considered, ranked
from fuseplan.execution.stages import Records
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, host_target
from fuseplan.kernels.template import Template
from fuseplan.messages.reasons import Refusal, first_refusal
from fuseplan.plans.plan import FusionPlan

REGISTERS = {16: 32, 32: 16, 64: 32}  # as many as the machines with vectors of so many bytes have


def narrowed(vector_bytes: int, threads: int = 1) -> Target:
    """This machine, as if its vectors were that wide: LLVM splits or narrows them as the processor needs."""
    registers = REGISTERS[vector_bytes]
    return replace(host_target(), vector_bytes=vector_bytes, vector_registers=registers, threads=threads)


def refusal_of(plan: FusionPlan | str, kind: type[Template], target: Target) -> Refusal | None:
    """Why the template does not take the plan; None where it does."""
    kernel = lower(match(FusionPlan.parse(plan) if isinstance(plan, str) else plan))
    return first_refusal(kind.limits(kernel, target, "default"), kind.name)


def forced(
    plan: FusionPlan | str, kind: type[Template], target: Target, template: Template | None = None
) -> CompiledPlan:
    """The plan with the template's first candidate, or with the one given; compiled anew, nothing cached."""
    plan = FusionPlan.parse(plan) if isinstance(plan, str) else plan
    plan.freeze()
    matched = match(plan)
    kernel = lower(matched)
    refusal = refusal_of(plan, kind, target)
    assert refusal is None, f"{kind.name} refuses {plan}: {refusal}"
    chosen = template or next(iter(kind.candidates(kernel, target, "default")))
    choice = ranked(chosen, (Considered(chosen.text, chosen.seconds(kernel, target)),))
    records = Records(plan, target, "default", matched, kernel, choice)
    return CompiledPlan(records, build(choice, kernel, target, use_cache=False))
