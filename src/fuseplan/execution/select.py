"""The third stage: the template and the knobs that compute the kernel on the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from fuseplan.backends import BACKENDS, backend_of
from fuseplan.backends.backend import Backend
from fuseplan.errors import ArgumentError, Unsupported, did_you_mean
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, any_of
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.messages.excerpt import shown
from fuseplan.messages.reasons import Refusal, first_refusal
from fuseplan.system.locks import cached_property

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
        return {"template": self.template, "seconds": self.seconds, "refusal": refusal, "fault": self.fault}


class Weighed(NamedTuple):
    """The candidates and refusals of a choice.

    Attributes:
        considered: each candidate, the chosen one first and then by estimate, after them the refusals, and
            then the candidates whose code has a fault.
        candidates: templates to choose from, by estimate: those that can run the kernel, or a named one.
    """

    considered: tuple[Considered, ...]
    candidates: tuple[Template, ...]


@dataclass(frozen=True)
class Choice:
    """The template that runs the kernel, and all considered candidates and refusals.

    Attributes:
        template: the chosen one.
        seconds: the cost model's estimate of it.
        weigh: gives the candidates and refusals; for a choice from disk, they are estimated anew.
        tuned: the measurement behind the choice; None if the cost model or the caller chose.
        is_current: whether that measurement was made with the installed versions of the toolchain.
        faults: which checks the code of the candidates failed that were chosen before.
        keep: keeps another choice on disk in the place of this one; None where this one is not kept.
    """

    template: Template
    seconds: float
    weigh: Callable[[], Weighed] = field(repr=False, compare=False)
    tuned: Tuned | None = None
    is_current: bool = False
    faults: tuple[str, ...] = ()
    keep: Callable[[Choice], object] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def _weighed(self) -> Weighed:
        return self.weigh()

    @property
    def considered(self) -> tuple[Considered, ...]:
        """As `Weighed` has them."""
        return self._weighed.considered

    @property
    def candidates(self) -> tuple[Template, ...]:
        """As `Weighed` has them."""
        return self._weighed.candidates

    def without(self, fault: str) -> Choice | None:
        """The next candidate's choice, where this one's code has a fault; None where none is left."""
        left = tuple(each for each in self.candidates if each != self.template)
        faulty, *others = self.considered
        if not left:
            return None
        made = ranked(left[0], (*others, replace(faulty, fault=fault)), left)
        return replace(made, faults=(*self.faults, fault), keep=self.keep)

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


def ranked(
    template: Template, considered: tuple[Considered, ...], candidates: tuple[Template, ...] = ()
) -> Choice:
    """The choice of a template, which is the first considered."""
    return Choice(template, considered[0].seconds or 0.0, lambda: Weighed(considered, candidates))


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
    wanted, bracket, _ = text.partition("(")
    if bracket:
        named = _exactly(_best(kernel, target, accuracy, _named(wanted, target), plan), text)
        return ranked(named.template, named.considered, (named.template,))
    if wanted:
        return _best(kernel, target, accuracy, _named(wanted, target), plan)
    found = measured(kernel, target, accuracy) if tuned else None
    return behind(found, preferring(found, kernel, target, accuracy, plan), target)


def behind(found: Tuned | None, choice: Choice, target: Target) -> Choice:
    """The choice, with the measurement behind it where it is that one's."""
    if found is None or found.template != choice.template.text or choice.faults:
        return choice
    is_current = found.key.toolchain == backend_of(target.backend).fingerprint()
    return replace(choice, tuned=found, is_current=is_current)


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


def measured(kernel: Kernel, target: Target, accuracy: Accuracy) -> Tuned | None:
    """The fastest measured candidate, if there is a measurement."""
    from fuseplan.stores.tuned import lookup  # with all that reads files

    return lookup(kernel, target, accuracy, backend_of(target.backend).fingerprint)


def preferring(found: Tuned | None, kernel: Kernel, target: Target, accuracy: Accuracy, plan: str) -> Choice:
    """The choice among all templates, the measured candidate in front if it is one of theirs."""
    choice = _best(kernel, target, accuracy, _named("", target), plan)
    is_there = found is not None and any(found.template == each.text for each in choice.candidates)
    return _exactly(choice, found.template) if found is not None and is_there else choice


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
            return ranked(candidate, (considered, *rest), choice.candidates)
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
            estimates = template.estimated(kernel, target, accuracy)
            made = ((seconds, each) for seconds, each in estimates if makes(each))
            timed += [(seconds + each.packing_seconds(kernel, target), each) for seconds, each in made]
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
    return ranked(timed[0][1], (*passed, *refused), tuple(template for _, template in timed))


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
