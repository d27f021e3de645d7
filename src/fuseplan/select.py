"""The third stage: which template computes the kernel on the target, and with which knobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.backends import BACKENDS, backend_of
from fuseplan.backends.backend import Backend
from fuseplan.errors import Unsupported
from fuseplan.kernel import Kernel
from fuseplan.reasons import Refusal, first_refusal
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template


@dataclass(frozen=True)
class Considered:
    """A choice that was looked at: its estimate, or why its template cannot."""

    template: str
    seconds: float | None = None
    refusal: Refusal | None = None

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        refusal = self.refusal.to_json() if self.refusal else None
        return {"template": self.template, "seconds": self.seconds, "refusal": refusal}


@dataclass(frozen=True)
class Choice:
    """The template that runs the kernel, and all that were considered: the quickest first, then refusals."""

    template: Template
    considered: tuple[Considered, ...]

    @property
    def seconds(self) -> float:
        """The cost model's estimate of the chosen one."""
        return self.considered[0].seconds or 0.0

    def __str__(self) -> str:
        return self.template.text

    def to_json(self) -> dict[str, object]:
        """The choice as JSON values."""
        return {
            "template": self.template.name,
            "knobs": self.template.knobs,
            "considered": [each.to_json() for each in self.considered],
        }


def select(kernel: Kernel, target: Target, accuracy: Accuracy = "default", *, plan: str = "") -> Choice:
    """The candidate with the least estimated time; of equals, the one its template ranks first.

    Args:
        kernel: what to compute.
        target: where.
        accuracy: `default`, `strict`, or the largest error bound allowed.
        plan: the plan's text, for the refusal.

    Raises:
        Unsupported: no template of the target's backend computes the kernel; it carries each one's refusal.
    """
    timed: list[tuple[float, Template]] = []
    refusals: list[Refusal] = []
    for template in backend_of(target.backend).templates:
        refusal = first_refusal(template.limits(kernel, target, accuracy), template.name)
        if refusal is None:
            found = template.candidates(kernel, target, accuracy)
            timed += [(each.seconds(kernel, target), each) for each in found]
        else:
            refusals.append(refusal)
    if not timed:
        raise Unsupported(_nothing(kernel, target, accuracy), text=plan or kernel.text, refusals=refusals)
    timed.sort(key=lambda pair: pair[0])
    passed = [Considered(template.text, seconds) for seconds, template in timed]
    refused = [Considered(refusal.tried, refusal=refusal) for refusal in refusals]
    return Choice(timed[0][1], (*passed, *refused))


def _nothing(kernel: Kernel, target: Target, accuracy: Accuracy) -> str:
    others = [backend.name for backend in takers(kernel, target, accuracy)]
    hint = f"; target {others[0]!r} does: compile(plan, {others[0]!r})" if others else ""
    return f"no kernel on {target} computes this plan{hint}"


def takers(kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Backend]:
    """The other backends with a template that takes the kernel."""
    for backend in BACKENDS:
        if backend.name == target.backend:
            continue
        elsewhere = Target(backend.name)
        limits = (template.limits(kernel, elsewhere, accuracy) for template in backend.templates)
        if any(first_refusal(claims) is None for claims in limits):
            yield backend
