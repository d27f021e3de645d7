"""Commands that only a checkout has: they are in its folder `benchmarks`."""

from __future__ import annotations

import click

from fuseplan import checkout
from fuseplan.errors import ArgumentError

TOOLS = ("crossbuild", "demo")


def tool_command(name: str) -> click.Command:
    """The command of that name; where the package has no tools, one that says so."""
    asked = f"`fuseplan {name}`"
    try:
        found: click.Command = checkout.tool("commands", asked).COMMANDS[name]
    except ArgumentError as error:
        missing = error

        def refuse(words: tuple[str, ...]) -> None:
            raise missing

        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        settings = {"ignore_unknown_options": True}
        told = "Not in the installed package: a tool of fuseplan's sources."
        return click.Command(name, settings, refuse, [words], help=told)
    return found
