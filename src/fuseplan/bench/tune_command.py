"""`fuseplan tune`, and the same without the packages of the command line.

python -m fuseplan.bench.tune_command SUITE_OR_PLAN... [--target cuda] [--seconds 4] [--output FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fuseplan import tuned
from fuseplan.bench.suite import Case, chosen, load
from fuseplan.bench.tuning import MOST, Outcome, TuneOptions, mean_ratio, tune_cases
from fuseplan.errors import ArgumentError, FuseplanError, counted
from fuseplan.plan import FusionPlan

ARROW = "->"  # in a plan, and in no suite's name
PLANS = "plans"  # the group of plans that are given by their text

Show = Callable[[str], object]


def tune_all(
    asked: Sequence[str], options: TuneOptions, output: Path | None, show: Show, only: str = ""
) -> list[Outcome]:
    """Tunes suites and plans, keeps what was found, and says how good the cost model was.

    Args:
        asked: suites by name or file, and plans by their text.
        options: how.
        output: a file for the choices, written anew after each case; None for the user's own alone.
        show: takes a line.
        only: cases of suites whose name or group contains it.

    Raises:
        ArgumentError: there is no such suite, the target is not this machine's, or the file cannot be
            written.
    """
    labelled = [(name, case) for name in asked for case in _cases(name, only)]
    outcomes: list[Outcome] = []
    for outcome in tune_cases([case for _, case in labelled], options):
        outcomes.append(outcome)
        show(str(outcome))
        if outcome.tuned is None:
            continue
        tuned.keep(outcome.tuned)
        if output is not None:
            tuned.write(output, [each.tuned for each in outcomes if each.tuned is not None])
    for name in dict.fromkeys(PLANS if ARROW in each else each for each in asked):
        own = [
            outcome
            for (label, _), outcome in zip(labelled, outcomes, strict=True)
            if name == (PLANS if ARROW in label else label)
        ]
        show(_summary(name, own))
    return outcomes


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
    if ARROW not in name:
        return chosen(load(name), only).cases
    return (Case(name, str(FusionPlan.parse(name)), PLANS, PLANS),)


def _summary(name: str, outcomes: Sequence[Outcome]) -> str:
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
    parser.add_argument("--workers", type=int, default=0, help="compilers at a time; 0 for one a processor")
    parser.add_argument("--patience", type=float, default=TuneOptions.patience, help="seconds for a case")
    parser.add_argument("--within", type=float, default=math.inf, help="no case begins after so many seconds")
    parser.add_argument("--only", default="", help="cases whose name or group contains it")
    parser.add_argument("--output", type=Path, help="a file for the choices")
    parser.add_argument("--merge", action="store_true", help="merge files of choices into --output")
    given = parser.parse_args(words)
    try:
        if given.merge:
            merge([Path(each) for each in given.asked], needed(given.output), print)
            return 0
        options = TuneOptions(
            given.target, given.seconds, given.most or None, accuracy_of(given.accuracy), given.threads,
            given.workers, given.patience, given.within,
        )  # fmt: skip
        outcomes = tune_all(given.asked, options, given.output, _flushed, given.only)
    except FuseplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0 if any(each.tuned for each in outcomes) else 1


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


def _flushed(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
