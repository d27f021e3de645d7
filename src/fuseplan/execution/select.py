"""The third stage: the template and the knobs that compute the kernel on the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuseplan.backends import BACKENDS, backend_of
from fuseplan.backends.backend import Backend
from fuseplan.errors import ArgumentError, Unsupported, did_you_mean
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, any_of
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.messages.excerpt import shown
from fuseplan.messages.reasons import Refusal, first_refusal

if TYPE_CHECKING:
    from fuseplan.stores.tuned import Tuned

USUAL = {"triton": "cuda"}  # names of usual targets that differ from their backend's


@dataclass(frozen=True)
class Considered:
    """A candidate with its estimate, or a template with its refusal.

    `fault` says which check the code of a candidate failed that was built; None where it failed none.
    """

    template: str
    seconds: float | None = None
    refusal: Refusal | None = None
    fault: str | None = None

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        refusal = self.refusal.to_json() if self.refusal else None
        return {
            "template": self.template,
            "seconds": self.seconds,
            "refusal": refusal,
            "fault": self.fault,
        }


@dataclass(frozen=True)
class Choice:
    """The template that runs the kernel, and all considered candidates and refusals.

    Attributes:
        template: the chosen one.
        considered: each candidate, the chosen one first and then by estimate, after them the refusals, and
            then the candidates whose code has a fault.
        candidates: templates to choose from, by estimate: those that can run the kernel, or a named one.
        tuned: the measurement behind the choice; None if the cost model or the caller chose.
        is_current: whether that measurement was made with the installed versions of the toolchain.
    """

    template: Template
    considered: tuple[Considered, ...]
    candidates: tuple[Template, ...] = ()
    tuned: Tuned | None = None
    is_current: bool = False

    @property
    def seconds(self) -> float:
        """The cost model's estimate of the chosen one."""
        return self.considered[0].seconds or 0.0

    def without(self, fault: str) -> Choice | None:
        """The next candidate's choice, where this one's code has a fault; None where none is left."""
        left = tuple(each for each in self.candidates if each != self.template)
        faulty, *others = self.considered
        return Choice(left[0], (*others, replace(faulty, fault=fault)), left) if left else None

    def __str__(self) -> str:
        return self.template.text

    def to_json(self) -> dict[str, object]:
        """The choice as JSON values."""
        return {
            "template": self.template.name,
            "knobs": self.template.knobs,
            "considered": [each.to_json() for each in self.considered],
            "tuned": {**self.tuned.to_json(), "is_current": self.is_current} if self.tuned else None,
        }


def select(
    kernel: Kernel,
    target: Target,
    accuracy: Accuracy = "default",
    *,
    template: str | None = None,
    tuned: bool = True,
    plan: str = "",
) -> Choice:
    """The fastest measured candidate, or else the candidate with the least estimated time.

    Equal candidates keep the order of their template.

    Args:
        accuracy: `default`, `strict`, or the largest error bound allowed.
        template: the only one to consider: a template's name, or a candidate as `explain` prints it.
        tuned: use a stored measurement if there is one; else the cost model decides.
        plan: the plan's text, for the refusal.

    Raises:
        Unsupported: no template of the target's backend computes the kernel; it carries each one's refusal.
        ArgumentError: the backend has no such template, or that template no such candidate for the kernel.
    """
    text = _text_of(template, target)
    wanted, _, knobs = text.partition("(")
    choice = _best(kernel, target, accuracy, _named(wanted, target), plan)
    if knobs:
        named = _exactly(choice, text)
        return replace(named, candidates=(named.template,))
    return _measured(choice, kernel, target, accuracy) if tuned and not wanted else choice


def _text_of(template: str | None, target: Target) -> str:
    """The template's text on one line, since explain may have folded it; empty for any template.

    Raises:
        ArgumentError: it begins with no name.
    """
    if template is None:
        return ""
    if not isinstance(template, str):
        raise ArgumentError(f"template={shown(template)}; want a template's name, or a candidate's text")
    text = " ".join(template.split())
    if text.startswith("("):
        known = ", ".join(each.name for each in backend_of(target.backend).templates)
        raise ArgumentError(f"template={shown(template)} names no template; {target} has {known}")
    return text


def _measured(choice: Choice, kernel: Kernel, target: Target, accuracy: Accuracy) -> Choice:
    """The choice with the fastest measured candidate in front, if there is a measurement."""
    from fuseplan.stores.tuned import lookup  # with all that reads files

    toolchain = backend_of(target.backend).fingerprint
    found = lookup(kernel, target, accuracy, toolchain)
    if found is None or all(found.template != each.text for each in choice.candidates):
        return choice
    is_current = found.key.toolchain == toolchain()
    return replace(_exactly(choice, found.template), tuned=found, is_current=is_current)


def _named(wanted: str, target: Target) -> tuple[type[Template], ...]:
    """The backend's templates, or the one of that name."""
    every = backend_of(target.backend).templates
    named = tuple(each for each in every if each.name == wanted)
    if wanted and not named:
        hint = did_you_mean(wanted, [each.name for each in every])
        raise ArgumentError(f"{target} has no template {shown(wanted)}. {hint}")
    return named or every


def _exactly(choice: Choice, text: str) -> Choice:
    """The candidate that prints as `text`, in front of the others."""
    for place, (considered, candidate) in enumerate(zip(choice.considered, choice.candidates, strict=False)):
        if considered.template == text:
            rest = choice.considered[:place] + choice.considered[place + 1 :]
            return Choice(candidate, (considered, *rest), choice.candidates)
    listed = "\n  ".join(each.text for each in choice.candidates)
    raise ArgumentError(f"no candidate prints as {shown(text)}; for this plan there are\n  {listed}")


def _best(
    kernel: Kernel, target: Target, accuracy: Accuracy, templates: tuple[type[Template], ...], plan: str
) -> Choice:
    timed: list[tuple[float, Template]] = []
    refusals: list[Refusal] = []
    makes = backend_of(target.backend).makes
    for template in templates:
        refusal = first_refusal(template.claims(kernel, target, accuracy), template.name)
        if refusal is None:
            found = (each for each in template.candidates(kernel, target, accuracy) if makes(each))
            timed += [(each.seconds(kernel, target), each) for each in found]
        else:
            refusals.append(refusal)
    if not timed:
        refusals.reverse()  # the last is the most general one
        refusals.sort(key=lambda refusal: -refusal.held)  # the nearest miss comes first
        alone = templates[0].name if len(templates) < len(backend_of(target.backend).templates) else None
        what = _nothing(kernel, target, accuracy, alone)
        options = _options(target, accuracy)
        raise Unsupported(what, text=plan or kernel.text, refusals=refusals, options=options)
    timed.sort(key=lambda pair: pair[0])
    passed = [Considered(template.text, seconds) for seconds, template in timed]
    refused = [Considered(refusal.tried, refusal=refusal) for refusal in refusals]
    return Choice(timed[0][1], (*passed, *refused), tuple(template for _, template in timed))


def _options(target: Target, accuracy: Accuracy) -> str:
    """The command line's options for the target and accuracy, without defaults."""
    machine = "cpu" if target.is_host and target.device is None else str(target)
    machine = machine if target.device is None else f"cuda:{target.device}"
    options = {"--target": machine, "--accuracy": accuracy}
    usual = ("cpu", "default")
    return " ".join(f"{name} {value}" for name, value in options.items() if value not in usual)


def _nothing(kernel: Kernel, target: Target, accuracy: Accuracy, alone: str | None) -> str:
    if alone:
        return f"the template {alone} does not compute this plan on {target}; leave template= out to try all"
    others = [USUAL.get(backend.name, backend.name) for backend in takers(kernel, target, accuracy)]
    hint = f"; target {others[0]!r} does: compile(plan, {others[0]!r})" if others else ""
    return f"no kernel on {target} computes this plan{hint}"


def takers(kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Backend]:
    """The other backends with a template that takes the kernel."""
    for backend in BACKENDS:
        if backend.name == target.backend:
            continue
        elsewhere = any_of(backend.name)
        limits = (template.claims(kernel, elsewhere, accuracy) for template in backend.templates)
        if any(first_refusal(claims) is None for claims in limits):
            yield backend
