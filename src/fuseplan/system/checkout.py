"""Tools that only a checkout of the sources has: its folder `benchmarks` beside `src`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fuseplan.errors import ArgumentError

CHECKOUT = Path(__file__).resolve().parents[3]


def has_tools() -> bool:
    """Whether this package is imported from a checkout."""
    return (CHECKOUT / "benchmarks" / "__init__.py").is_file()


def tool(module: str, asked: str) -> ModuleType:
    """The module `benchmarks.<module>` of the checkout.

    Args:
        asked: what needs it, for the message.

    Raises:
        ArgumentError: the package is installed without its sources.
    """
    if not has_tools():
        raise ArgumentError(
            f"{asked} is a tool of fuseplan's sources, and the installed package has no tools: run it in a "
            "checkout, after `pip install -e '.[cli,plot]'` there"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(f"benchmarks.{module}")
