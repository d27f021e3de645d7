"""`fuseplan bench SUITE --target cuda`, without the packages of the command line.

python -m fuseplan.bench.gpu_command SUITE [--peers torch,cudnn] [--only 3x3] [--results FOLDER] ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fuseplan.bench.command import GPU_LIBRARIES, Options, bench, plain
from fuseplan.bench.special import special
from fuseplan.errors import FuseplanError
from fuseplan.measure.clock import GPU_PROTOCOL


def main(words: Sequence[str] | None = None) -> int:
    """Runs one suite; the exit status is 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m fuseplan.bench.gpu_command")
    parser.add_argument("suite")
    parser.add_argument(
        "--peers",
        default="",
        help=f"names with commas between them; fuseplan is this library: {GPU_LIBRARIES}",
    )
    parser.add_argument("--rounds", type=int, default=Options.rounds)
    parser.add_argument("--block-ms", type=float, default=GPU_PROTOCOL.block_seconds * 1e3)
    parser.add_argument(
        "--only",
        default="",
        help="measure the cases whose name or group contains this text; `a & b` wants both",
    )
    parser.add_argument("--run", default="", help="a name that several commands share as one run")
    parser.add_argument("--host", action="store_true", help="also time the host, and CUDA graphs")
    parser.add_argument("--results", type=Path, default=Options.folder, help="folder to append to")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--commit", default="", help="the commit of a copy of the sources without git")
    given = parser.parse_args(words)
    options = Options(
        True, given.peers, given.rounds, given.block_ms, given.only, given.results, run=given.run,
        commit=given.commit, is_host=given.host, device=given.device,
    )  # fmt: skip
    try:
        (special(given.suite, options) or bench)(given.suite, options, plain())
    except FuseplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
