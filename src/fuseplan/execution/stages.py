"""The stages before the toolchain: plan -> match -> kernel -> choice -> source, pure functions of values."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuseplan.errors import ArgumentError
from fuseplan.execution.select import Choice, select
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.fields import as_float
from fuseplan.messages.excerpt import shown
from fuseplan.plans.plan import FusionPlan, as_plan
from fuseplan.system import limits
from fuseplan.system.locks import cached_property

if TYPE_CHECKING:
    from fuseplan.kernels.match import Match

WORDS = ("default", "strict")


@dataclass(frozen=True)
class Records:
    """What each stage made of a plan."""

    plan: FusionPlan
    target: Target
    accuracy: Accuracy
    match: Match
    kernel: Kernel
    choice: Choice

    @cached_property
    def source(self) -> Source:
        """The generated source; emitted when first asked for, since a cached compile needs none."""
        return self.choice.template.emit(self.kernel, self.target)


def decide(
    plan: FusionPlan | str,
    target: Target | str = "cpu",
    *,
    threads: int | None = None,
    accuracy: Accuracy = "default",
    template: str | None = None,
    tuned: bool = True,
    use_cache: bool = False,
) -> Records:
    """Takes a plan through the stages; no toolchain is needed, for any target.

    Stored measurements decide between candidates unless `tuned` is False. With `use_cache`, the choice among
    all is looked for on disk, and kept there.

    Raises:
        PlanError: the text is no plan.
        Unsupported: nothing fuses the plan, or no template of the target computes it.
        ArgumentError: the target, the threads, the accuracy or the template cannot be.
    """
    from fuseplan.kernels.lower import lower  # with the first plan: `import fuseplan` does without both
    from fuseplan.kernels.match import match

    plan = as_plan(plan)
    plan.freeze()
    known = parse_target(target)
    if threads is not None or not known.processors:
        known = with_threads(known, known.threads if threads is None else threads)
    accuracy = checked_accuracy(accuracy)
    matched = match(plan)
    kernel = lower(matched)
    if use_cache and template is None and tuned:
        from fuseplan.execution.kept import selected  # with all that reads files

        choice = selected(kernel, known, accuracy, plan=str(plan))
    else:
        choice = select(kernel, known, accuracy, template=template, tuned=tuned, plan=str(plan))
    return Records(plan, known, accuracy, matched, kernel, choice)


def with_threads(target: Target, threads: int) -> Target:
    """The target with so many threads a launch.

    Raises:
        ArgumentError: it is none that a launch can have; or the target is a GPU, which uses all it has.
    """
    if target.processors:
        raise ArgumentError(
            f"threads={shown(threads)} is for CPUs; {target} is a GPU, used as a whole: leave it out"
        )
    return replace(target, threads=checked_threads(threads))


def checked_threads(threads: int) -> int:
    """The number of threads; an ArgumentError where it is none that a launch can have."""
    is_count = isinstance(threads, numbers.Integral) and not isinstance(threads, bool)
    if not is_count or not 1 <= threads <= limits.THREADS:
        raise ArgumentError(f"threads={shown(threads)}; want a whole number from 1 to {limits.THREADS}")
    return int(threads)


def checked_accuracy(accuracy: Accuracy) -> Accuracy:
    """The accuracy; an ArgumentError where it is no word that is known and no positive number."""
    if isinstance(accuracy, str) and accuracy in WORDS:
        return accuracy
    try:
        bound = as_float(accuracy)
    except ValueError:
        bound = 0.0
    if bound > 0:
        return bound
    raise ArgumentError(
        f"accuracy={shown(accuracy)}; want 'default', 'strict' (no Winograd except F(2x2, 3x3)), or the "
        "largest error bound allowed, a positive float"
    )
