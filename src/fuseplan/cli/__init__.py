"""The command `fuseplan`.

Its modules:

- commands: the table of all commands, which are imported when they are asked for; errors as messages and exit
  statuses; options: shared options
- plans, models, measuring, support, show, export, stored: the commands
- screen: how wide tables are, and progress bars
- trial: compiles a plan, runs it on random data and checks it
- combinations: what templates take of each combination of operators
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import NoReturn

from fuseplan.cli.statuses import BAD, INTERRUPTED, SIGNALLED
from fuseplan.errors import installing

WANTED = ("click", "rich")


def main() -> None:
    """Runs the command; says how to install its packages where they are missing.

    A warning is printed without the source line that gives it.
    """
    signal.signal(signal.SIGTERM, _ended)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the end
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"
    try:
        from fuseplan.cli.commands import fuseplan  # noqa: PLC0415 - the library itself needs neither package

        fuseplan(prog_name="fuseplan")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in WANTED:
            raise
        print(f"the command line needs {missing}: {installing('cli', *WANTED)}", file=sys.stderr)
        sys.exit(BAD)


def _ended(number: int, _: object) -> NoReturn:
    """Ends the command as an interruption does, so that it reports its findings."""
    sys.exit(SIGNALLED + number)
