"""`fuseplan bench SUITE` without the packages of the command line: `python -m benchmarks SUITE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.arguments import finished, parsed
from benchmarks.command import bench_suite
from fuseplan.bench.command import plain
from fuseplan.bench.options import Options


def main(words: Sequence[str] | None = None) -> int:
    """Runs one suite; the exit status is 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("suite")
    parser.add_argument("--device", type=int, default=Options.device, help="the GPU's index")
    parser.add_argument("--commit", default="", help="the commit of a copy of the sources without git")
    given = parsed(parser, Options, words)
    suite = given.pop("suite")

    def work() -> int:
        bench_suite(suite, Options(**given), plain())
        return 0

    return finished(work)


if __name__ == "__main__":
    sys.exit(main())
