"""The four kinds of error. A message has the failure, its place in the plan, got against wanted, a remedy."""

from __future__ import annotations

import copy
import difflib
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuseplan.messages.elsewhere import Answers, folded
from fuseplan.messages.excerpt import Span, bounded, operator_span, underlined
from fuseplan.messages.reasons import Refusal, named, splits

LIKE = 0.6  # share of letters in common from which on a name may be a typing mistake of another
MOST_TYPED = 40  # letters of a word; a longer one is no typing mistake, and comparing takes their square
SHOWN_REFUSALS = 3
SHOWN_LINES = 12


class FuseplanError(Exception):
    """The base class of fuseplan's errors."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return "\n".join(map(bounded, self.what.splitlines()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[FuseplanError], args: tuple[Any, ...], fields: dict[str, Any]) -> FuseplanError:
    """An error from another process, whole: by default, exceptions lose keyword arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class PlanError(FuseplanError):
    """The plan cannot be: a shape, an attribute, a word or a character is wrong.

    Attributes:
        what: the failure, in one line.
        got: the value at fault.
        want: the right value.
        remedy: advice.
        text: the plan's text, as far as it is known.
        operator: index of the operator to blame.
        span: the piece of `text` to blame; None underlines the operator.
        field: the operator's field to blame.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        want: object = None,
        remedy: str | None = None,
        text: str | None = None,
        operator: int | None = None,
        span: Span | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(what)
        self.got = got
        self.want = want
        self.remedy = remedy
        self.text = text
        self.operator = operator
        self.span = span
        self.field = field

    def located(self, text: str, operator: int | None = None, span: Span | None = None) -> PlanError:
        """The same error, in `text`: at `span`, or under the operator of that index."""
        found = copy.copy(self)
        found.text, found.operator, found.span = text, operator, span
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield super().__str__()
        details = list(self._details())
        if self.text is not None:
            yield ""
            yield from _indented(underlined(self.text, self._place()))
        elif details:
            yield ""
        yield from _indented(map(bounded, details))

    def _place(self) -> Span | None:
        if self.span is None and self.text is not None and self.operator is not None:
            return operator_span(self.text, self.operator)
        return self.span

    def _details(self) -> Iterator[str]:
        met = [f"got {self.got}"] if self.got is not None else []
        wanted = [f"want {self.want}"] if self.want is not None else []
        if met or wanted:
            yield "; ".join(met + wanted)
        if self.remedy:
            yield from self.remedy.splitlines()


class Unsupported(FuseplanError):  # noqa: N818 - it is an answer more than an error, and the word users meet
    """The plan could be, but nothing computes it here.

    Attributes:
        what: the failure and the target.
        text: the plan's text.
        refusals: one of every rule or template that was tried, the nearest miss first: in the order given,
            but those with a vain remedy last.
        options: of the command line, with which `fuseplan explain` tries the same.
    """

    def __init__(self, what: str, *, text: str, refusals: Iterable[Refusal], options: str = "") -> None:
        super().__init__(what)
        self.text = text
        self.options = options
        self.refusals = tuple(refusals)
        self.refusals = tuple(sorted(self.refusals, key=lambda each: self.advice(each) is None))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def advice(self, refusal: Refusal) -> str | None:
        """The refusal's remedy; None for a vain one: it names a rule or template that refused as well.

        That is not vain where the remedy splits the plan: the name is of what takes a part.
        """
        refused = any(each.tried in named(refusal.remedy) for each in self.refusals)
        return None if refused and not splits(refusal.remedy) else refusal.remedy

    def _lines(self) -> Iterator[str]:
        yield super().__str__()
        blamed: int | None = -1  # none yet: the plan is shown before the first refusal
        told = self._told()[:SHOWN_REFUSALS]
        for refusal in told:
            yield ""
            if refusal.operator != blamed:
                blamed = refusal.operator
                span = None if blamed is None else operator_span(self.text, blamed)
                yield from _indented(underlined(self.text, span))
            alike = [each.tried for each in self.refusals if each.is_like(refusal)]
            who = f"{', '.join(alike)}: " if any(alike) else ""
            yield from _indented([f"{who + str(refusal):<70}  [{refusal.code}]"])
            yield from _indented(filter(None, [self.advice(refusal)]))
        rest = sum(not any(each.is_like(refusal) for refusal in told) for each in self.refusals)
        if rest:
            yield ""
            asked = " ".join(part for part in (shlex.quote(self.text), self.options) if part)
            yield f"{counted(rest, 'other')} refused it too; `fuseplan explain {asked}` lists all"

    def _told(self) -> list[Refusal]:
        """The first refusal of each reason that has advice; the first of all if none has any."""
        found: dict[object, Refusal] = {}
        for each in [each for each in self.refusals if self.advice(each)] or self.refusals[:1]:
            found.setdefault((each.reason, each.operator), each)
        return list(found.values())


class BuildError(FuseplanError):
    """The toolchain failed.

    Attributes:
        what: the failure, in one line.
        source: the generated text; None if there was none.
        output: the toolchain's output.
        path: the file of `source`; None if it was not written.
    """

    def __init__(
        self, what: str, *, source: str | None = None, output: str = "", path: Path | None = None
    ) -> None:
        super().__init__(what)
        self.source = source
        self.output = output
        self.path = path

    def __str__(self) -> str:
        said = self.output.rstrip().splitlines()[-SHOWN_LINES:]
        where = [f"the source: {self.path}"] if self.path else []
        lines = _indented([*said, *where])
        return "\n".join([self.what, "", *lines]) if said or where else self.what


class UnsoundCodeError(BuildError):
    """The toolchain made code that fails a check; that of another candidate may pass."""


class ArgumentError(FuseplanError):
    """A value passed to a call does not fit the plan.

    Attributes:
        what: the message.
        parts: pieces of the message: text, and tensors as the plan has them.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts

    def told(self, name: Callable[[Any], str]) -> str:
        """The message with another name for each tensor."""
        return "".join(part if isinstance(part, str) else name(part) for part in self.parts)


@contextmanager
def refusing(problem: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError) -> Iterator[None]:
    """Turns an error of these kinds into an ArgumentError: the problem, and the error's own words."""
    try:
        yield
    except kinds as error:
        raise ArgumentError(f"{problem}: {error}") from error


def installing(extra: str, *packages: str) -> str:
    """How an optional part is installed: as an extra of a checkout, or its packages by themselves."""
    return f"`pip install '.[{extra}]'` in a checkout of fuseplan, or `pip install {' '.join(packages)}`"


def counted(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`: for nouns with a plural in s."""
    return f"{count} {noun}{'s' * (count != 1)}"


def a_thing(value: object) -> str:
    """What kind of thing a value is: `a list`, `an ndarray`."""
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """`a scan`, `an attention`."""
    return f"an {noun}" if noun[0].lower() in "aeio" or noun.startswith("nd") else f"a {noun}"


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known names that `word` may be a typing mistake of, all as like it as the first.

    Case, underscores and dashes make no difference. Two letters may be wrong, of long words four: words that
    share more with a name than that are often another thing, as layer_norm is beside batch_norm.
    """
    typed = folded(word)
    if not typed or len(typed) > MOST_TYPED:
        return []
    likeness = {name: _likeness(typed, folded(name)) for name in known}
    most = max(likeness.values(), default=0.0)
    return [name for name, like in likeness.items() if like == most >= LIKE]


def _likeness(typed: str, name: str) -> float:
    """The share of letters in common; 0 where more differ than a typing mistake explains."""
    share = difflib.SequenceMatcher(None, name, typed).ratio()
    wrong = (1 - share) * (len(typed) + len(name))
    is_begun = len(typed) >= 3 and name.startswith(typed)
    return share if is_begun or wrong <= (2 if len(typed) < 8 else 4) + 0.5 else 0.0


def near_miss(word: str, known: Iterable[str], elsewhere: Answers | None = None) -> str | None:
    """The likely meaning of `word` as a question: the name for another library's word, or the nearest names.

    None if no name is near. Messages that list all names use this one.
    """
    names = list(known)
    answer = (elsewhere or {}).get(folded(word), "")
    if " " in answer:
        return answer
    near = " or ".join(f"`{name}`" for name in ([answer] if answer in names else nearest(word, names)))
    return f"Did you mean {near}?" if near else None


def did_you_mean(word: str, known: Iterable[str], elsewhere: Answers | None = None) -> str:
    """Advice about an unknown `word`: the answer of `near_miss`, or else all known names."""
    names = list(known)
    return near_miss(word, names, elsewhere) or f"Known here: {', '.join(names) or 'none'}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
