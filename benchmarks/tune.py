"""`fuseplan tune`, without the packages of the command line: `python -m benchmarks.tune SUITE_OR_PLAN...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.arguments import finished, parsed
from fuseplan.tuning.cases import TuneOptions, cases_of, merge, status, summary, tune_all


def main(words: Sequence[str] | None = None) -> int:
    """Tunes, or merges; the exit status is 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune")
    parser.add_argument("asked", nargs="+", metavar="SUITE_OR_PLAN", help="with --merge, files of choices")
    given = parsed(parser, TuneOptions, words)
    return finished(partial(tune, given.pop("asked"), TuneOptions(**given)))


def tune(asked: Sequence[str], options: TuneOptions) -> int:
    """Tunes the cases of suites and plans, or merges files; the exit status."""
    if options.is_merge:
        merge([Path(each) for each in asked], options.output, print)
        return 0
    found = tune_all(cases_of(asked, options.only), options, partial(print, flush=True))
    for name, outcomes in found.items():
        print(summary(name, outcomes))
    return status(found)


if __name__ == "__main__":
    sys.exit(main())
