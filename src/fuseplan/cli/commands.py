"""The command `fuseplan`, and where its commands are: each is imported when it is asked for."""

from __future__ import annotations

from functools import partial

import click

from fuseplan.cli.group import Commands, command_of
from fuseplan.cli.options import loud_command
from fuseplan.cli.statuses import MEANINGS
from fuseplan.errors import ArgumentError
from fuseplan.system import checkout


def tool(name: str) -> click.Command:
    """A command that only a checkout has; where the package is installed without it, it says so."""
    try:
        found: click.Command = checkout.tool("commands", f"`fuseplan {name}`").COMMANDS[name]
        return found
    except ArgumentError as error:
        return _refusing(name, error)


def _refusing(name: str, error: ArgumentError) -> click.Command:
    def refuse(words: tuple[str, ...]) -> None:
        raise error

    words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(
        name, settings, refuse, [words], help="Not in the installed package: a tool of fuseplan's sources."
    )


PLACES = {
    "bench": "cli.measuring:bench_command",
    "cache": "cli.stored:cache",
    "compare": "cli.models:compare_command",
    "diff": "cli.models:diff_command",
    "driver": "compat.miopen_driver.cli:driver_command",
    "explain": "cli.plans:explain_command",
    "export": "cli.export:export_command",
    "fuse": "cli.models:fuse_command",
    "profile": "cli.models:profile_command",
    "run": "cli.plans:run",
    "show": "cli.show:show",
    "supported": "cli.support:supported_command",
    "tune": "cli.measuring:tune_command",
    "verdict": "cli.measuring:verdict_command",
}


@click.group(
    cls=Commands,
    makers={name: partial(command_of, place) for name, place in PLACES.items()}
    | {name: partial(tool, name) for name in ("crossbuild", "demo")},
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit statuses: " + "; ".join(f"{status} {meaning}" for status, meaning in MEANINGS.items()) + ".",
)
@click.version_option(None, "-V", "--version", package_name="fuseplan")
@loud_command
def fuseplan() -> None:
    """A fusion plan becomes one kernel.

    PLAN is a plan's text, in quotes: 'f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu'. A
    dash, -, stands for a plan on the standard input, and @FILE for a plan in a file.
    """
