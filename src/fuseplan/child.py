"""Python processes that this one starts: they import from its folders, never from where it was started."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from fuseplan.settings import environment

PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])


def python(*arguments: str) -> list[str]:
    """The command of a Python process; with `-P` it does not look into the working directory for modules."""
    return [sys.executable, "-P", *arguments]


def python_environment(*first: str, **changes: str) -> dict[str, str]:
    """The environment of such a process: with the module search path of this one but the working directory.

    Folders that are given come before it. The package's own folder stays even if it is the working directory:
    its code runs already.
    """
    searched = list(first)
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed holds no module
        here = os.path.realpath(os.curdir)
        paths = [path for path in map(os.path.realpath, sys.path) if path != here]
        searched += [*([] if PACKAGE_ROOT in paths else [PACKAGE_ROOT]), *paths]
    path = {"PYTHONPATH": os.pathsep.join(searched)} if searched else {}
    return environment(**path, **changes)
