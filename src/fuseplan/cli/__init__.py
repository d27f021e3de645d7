"""The command `fuseplan`.

Its modules:

- commands: options, and what each command calls
- driver: MIOpenDriver's letters, one line or many; lines: the lines of a sweep; driving: one line, run
- trial: compiles a plan, runs it on random data and checks it
- support: which operators, dtypes and layouts the templates of a target take
"""

from __future__ import annotations

import signal
import sys
import warnings
from typing import NoReturn

WANTED = ("click", "rich")
SIGNALLED = 128  # the exit status is that and the signal's number, as a shell has it


def main() -> None:
    """Runs the command; says what to install where its packages are missing.

    Warnings are told without the source line that gives them.
    """
    try:
        from fuseplan.cli.commands import fuseplan  # noqa: PLC0415 - the library itself needs neither package
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in WANTED:
            raise
        print(
            f"the command line needs {missing}, which is not installed: pip install 'fuseplan[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    signal.signal(signal.SIGTERM, _ended)
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"
    fuseplan(prog_name="fuseplan")


def _ended(number: int, _: object) -> NoReturn:
    """Ends the command as an interruption does, so that what was found is told."""
    sys.exit(SIGNALLED + number)
