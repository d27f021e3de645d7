"""MIOpen's algorithms as templates: which templates each stands for, and a plan compiled by one of them."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.compat.miopen.enums import miopenConvFwdAlgorithm_t
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import Unsupported
from fuseplan.execution.select import Choice
from fuseplan.execution.stages import decide
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.plans.plan import FusionPlan

GEMM = miopenConvFwdAlgorithm_t.miopenConvolutionFwdAlgoGEMM
DIRECT = miopenConvFwdAlgorithm_t.miopenConvolutionFwdAlgoDirect
WINOGRAD = miopenConvFwdAlgorithm_t.miopenConvolutionFwdAlgoWinograd
IMPLICIT_GEMM = miopenConvFwdAlgorithm_t.miopenConvolutionFwdAlgoImplicitGEMM

# Of every template that takes a convolution, by its name; tests hold that none is missing.
ALGORITHMS = {
    "direct": (DIRECT,),
    "planes": (DIRECT,),
    "depthwise": (DIRECT,),
    "depthwise_planes": (DIRECT,),
    "grouped": (DIRECT,),
    "grouped_planes": (DIRECT,),
    "winograd": (WINOGRAD,),
    "amx": (IMPLICIT_GEMM,),
    "product": (GEMM, IMPLICIT_GEMM),
    "hopper": (IMPLICIT_GEMM,),
    "interpreted": (DIRECT,),
}


def preferred(choice: Choice) -> Iterator[Template]:
    """All candidates of a plan, the one that would be chosen first, then by estimate."""
    yield choice.template
    yield from (each for each in choice.candidates if each != choice.template)


def algorithms(plan: FusionPlan, target: Target) -> list[miopenConvFwdAlgorithm_t]:
    """The algorithms of the templates that take a plan with a convolution, the preferred one first.

    Raises:
        Unsupported: nothing computes the plan on the target.
    """
    choice = decide(plan, target).choice
    return list(dict.fromkeys(algorithm for each in preferred(choice) for algorithm in ALGORITHMS[each.name]))


def template_by(plan: FusionPlan, target: Target, algorithm: miopenConvFwdAlgorithm_t) -> Template:
    """The preferred candidate of an algorithm.

    Raises:
        Unsupported: no template of the algorithm takes the plan; it carries their refusals.
    """
    choice = decide(plan, target).choice
    for each in preferred(choice):
        if algorithm in ALGORITHMS.get(each.name, ()):
            return each
    refusals = [each.refusal for each in choice.considered if each.refusal is not None]
    others = ", ".join(each.name for each in algorithms(plan, target))
    raise Unsupported(
        f"no kernel of {algorithm.name} on {target} computes this plan; it is computed by {others}",
        text=str(plan),
        refusals=[each for each in refusals if algorithm in ALGORITHMS.get(each.tried, ())],
    )


def compile_by(plan: FusionPlan, target: Target, by: miopenConvFwdAlgorithm_t | str | None) -> CompiledPlan:
    """The plan compiled; by templates of an algorithm alone, or by the candidate of that text, where given.

    Raises:
        Unsupported: nothing computes the plan on the target, or nothing of that algorithm does.
        BuildError: the toolchain failed.
        ArgumentError: there is no such candidate.
    """
    wanted = template_by(plan, target, by).text if isinstance(by, miopenConvFwdAlgorithm_t) else by
    return compile_plan(plan, target, template=wanted)
