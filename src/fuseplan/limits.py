"""Every bound on text, files and answers that come from outside, in one table.

A reader takes its bound from here: `if len(text) > limits.LINE_BYTES`. A new bound is a new `Limit`, in the
part of the table that fits; the reference page lists it, and a test demands that a reader uses it.
"""

from __future__ import annotations


class Limit(int):
    """A bound: a whole number that knows its meaning.

    Attributes:
        unit: of the number: `bytes`, `levels`, `s`.
        subject: the text, file or answer that is bounded.
        beyond: the effect on a larger one: refused, skipped, built again.
    """

    unit: str
    subject: str
    beyond: str

    def __new__(cls, value: int, unit: str, subject: str, beyond: str) -> Limit:
        made = super().__new__(cls, value)
        made.unit, made.subject, made.beyond = unit, subject, beyond
        return made


# The cache.
LOCK_SECONDS = Limit(
    60, "s", "the wait for another process that compiles the same kernel", "this process compiles too"
)


def limits() -> dict[str, Limit]:
    """Every bound by its name, in the order of the table."""
    return {name: value for name, value in globals().items() if isinstance(value, Limit)}
