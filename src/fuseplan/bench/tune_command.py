"""`fuseplan tune`, and the same without the packages of the command line.

python -m fuseplan.bench.tune_command SUITE_OR_PLAN... [--target cuda] [--seconds 4] [--output FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fuseplan import tuned
from fuseplan.bench.suite import PLANS, Case, chosen, load
from fuseplan.bench.tuning import MOST, Outcome, TuneOptions, mean_ratio, tune_cases
from fuseplan.errors import ArgumentError, FuseplanError, counted
from fuseplan.excerpt import ARROW
from fuseplan.tuned import Tuned

Show = Callable[[str], object]
Labelled = Sequence[tuple[str, Case]]


def cases_of(asked: Sequence[str], only: str = "") -> Labelled:
    """The cases of suites by name or file, and of plans by their text; each with its suite, or `plans`.

    `only` chooses the cases of suites whose name or group contains it.

    Raises:
        ArgumentError: there is no such suite, or none of its cases is chosen.
        PlanError: a text is no plan.
    """
    return [(PLANS if ARROW in name else name, case) for name in asked for case in _cases(name, only)]


def tune_all(
    labelled: Labelled, options: TuneOptions, output: Path | None, done: Callable[[Outcome], object]
) -> dict[str, list[Outcome]]:
    """Tunes cases and keeps what was found.

    Args:
        labelled: the cases, from `cases_of`.
        options: how.
        output: a file for the choices, written anew after each case; None for the user's own alone.
        done: called with each outcome.

    Returns:
        The outcomes by label.

    Raises:
        ArgumentError: the target is not this machine's, or the file cannot be written.
    """
    found: dict[str, list[Outcome]] = {}
    choices: list[Tuned] = []
    for (label, _), outcome in zip(
        labelled, tune_cases([case for _, case in labelled], options), strict=True
    ):
        found.setdefault(label, []).append(outcome)
        done(outcome)
        if outcome.tuned is None:
            continue
        choices.append(outcome.tuned)
        tuned.keep(outcome.tuned)
        if output is not None:
            tuned.write(output, choices)
    return found


def merge(files: Sequence[Path], output: Path, show: Show) -> int:
    """Writes the choices of several files into one; of those with one key, the one measured last.

    Raises:
        ArgumentError: a file cannot be read or written, or holds something else.
    """
    choices = tuned.merged(files)
    tuned.write(output, choices)
    show(f"{counted(len(choices), 'choice')} in {output}")
    return len(choices)


def _cases(name: str, only: str) -> tuple[Case, ...]:
    suite = load(name)
    return suite.cases if suite.name == PLANS else chosen(suite, only).cases


def summary(name: str, outcomes: Sequence[Outcome]) -> str:
    """How good the cost model was in a suite's cases."""
    mean = mean_ratio(outcomes)
    tuned_count = sum(each.tuned is not None for each in outcomes)
    told = "nothing to compare" if mean is None else f"untuned over tuned {mean:.3f}, geometric mean"
    worst = max((each for each in outcomes if each.ratio), key=lambda each: each.ratio or 0.0, default=None)
    last = "" if worst is None else f"; at worst {worst.ratio:.3f}, {worst.case.name} ({worst.case.group})"
    return f"{name}: {tuned_count} of {len(outcomes)} tuned; {told}{last}"


def main(words: Sequence[str] | None = None) -> int:
    """Tunes, or merges; the exit status is 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m fuseplan.bench.tune_command")
    parser.add_argument("asked", nargs="+", metavar="SUITE_OR_PLAN", help="with --merge, files of choices")
    parser.add_argument("--target", default="cpu", help="cpu or cuda")
    parser.add_argument("--seconds", type=float, default=TuneOptions.seconds, help="a case, about")
    parser.add_argument("--most", type=int, default=MOST, help="candidates of a case; 0 for all")
    parser.add_argument("--accuracy", default="default")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--workers", type=int, default=0, help="compiling processes; 0 for one per processor")
    parser.add_argument("--timeout", type=float, default=TuneOptions.timeout, help="seconds for a case")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="seconds after which no further case begins"
    )
    parser.add_argument("--only", default="", help="tune the cases whose name or group contains this text")
    parser.add_argument("--output", type=Path, help="a file for the choices")
    parser.add_argument("--merge", action="store_true", help="merge files of choices into --output")
    given = parser.parse_args(words)
    try:
        if given.merge:
            merge([Path(each) for each in given.asked], needed(given.output), print)
            return 0
        options = TuneOptions(
            given.target, given.seconds, given.most or None, accuracy_of(given.accuracy), given.threads,
            given.workers, given.timeout, given.within,
        )  # fmt: skip
        found = tune_all(cases_of(given.asked, given.only), options, given.output, _flushed)
    except FuseplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for name, outcomes in found.items():
        _flushed(summary(name, outcomes))
    return status(found)


def status(found: Mapping[str, Sequence[Outcome]]) -> int:
    """0 where a case was tuned, 1 where none was."""
    return 0 if any(each.tuned for outcomes in found.values() for each in outcomes) else 1


def accuracy_of(text: str) -> str | float:
    """A word, or the number that it is."""
    try:
        return float(text)
    except ValueError:
        return text


def needed(output: Path | None) -> Path:
    """The file that merged choices go to.

    Raises:
        ArgumentError: none is named.
    """
    if output is None:
        raise ArgumentError("--merge writes a file: name it with --output")
    return output


def _flushed(told: object) -> None:
    print(told, flush=True)


if __name__ == "__main__":
    sys.exit(main())
