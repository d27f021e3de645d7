"""The command `fuseplan`, and where its commands are: each is imported when it is asked for."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import click

from fuseplan.cli.options import loud_command
from fuseplan.cli.statuses import CLOSED, INTERRUPTED, MEANINGS, WRONG, error_json, known_error, status_of
from fuseplan.errors import ArgumentError, FuseplanError
from fuseplan.system import checkout

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit
QUOTE = "put the plan in quotes, such as 'f32[1x8] -> relu'"


def command_of(place: str) -> click.Command:
    """The command at a place in the package, `module:name`."""
    module, name = place.split(":")
    found: click.Command = getattr(import_module(f"fuseplan.{module}"), name)
    return found


class Commands(click.Group):
    """Prints an error's message, and ends with its exit status.

    Args:
        makers: by the name of a command, a function that imports it: a command costs what it needs alone.
    """

    def __init__(self, *args: Any, makers: Mapping[str, Callable[[], click.Command]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._makers = makers

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._makers)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self._makers and name not in self.commands:
            self.add_command(self._makers[name]())
        return self.commands.get(name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses a plan that a shell has cut at its arrows, before a `-` is taken for the standard input.

        Raises:
            click.UsageError: it has.
        """
        if is_cut(args):
            raise click.UsageError(f"the shell took `->` as a redirection{_stray_file()}: {QUOTE}", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, and flushes its output: until then a closed pipe need not show."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except (FuseplanError, MemoryError) as error:
            known = known_error(error)
            _print_error(known, ctx)
            ctx.exit(status_of(known))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except OSError as error:
            _end_without_output(error, ctx)


def _end_without_output(error: OSError, ctx: click.Context) -> NoReturn:
    """Ends the command if its output has no reader or no room, or a file no place; other errors go on."""
    if error.filename is not None and error.errno not in FULL:
        if ctx.meta.get("verbose"):
            traceback.print_exc()
        click.echo(f"{error.filename}: {error.strerror}", err=True)
        ctx.exit(WRONG)
    if error.errno not in (*FULL, errno.EPIPE) and not isinstance(error, BrokenPipeError):
        raise error
    with contextlib.suppress(OSError, ValueError):  # what is left in the buffer has nowhere to go either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno in FULL:
        click.echo(f"the output cannot be written: {error}", err=True)
        ctx.exit(WRONG)
    ctx.exit(CLOSED)


def _print_error(error: FuseplanError, ctx: click.Context) -> None:
    """The message for people, on stderr; with --json, as JSON on stdout instead."""
    if ctx.meta.get("verbose"):
        traceback.print_exc()
    if ctx.meta.get("json"):
        click.echo(json.dumps(error_json(error)))  # a line, as the commands that print a line a run do
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)


def is_cut(words: Sequence[str]) -> bool:
    """Whether a shell took the arrows of a plan without quotes as redirections.

    Of `run f32[1x8] -> bias -> relu` it leaves the words `run f32[1x8] - -`, and of `f32[1x8]->relu` the word
    `f32[1x8]-`; the names behind the arrows become files.
    """
    heads = [word for word in words if "[" in word and "->" not in word]
    return bool(heads) and ("-" in words or any(word.endswith("-") for word in heads))


def _stray_file() -> str:
    """The file that the output goes to, where the system tells."""
    with contextlib.suppress(OSError, ValueError):
        place = os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}")
        if os.path.isfile(place):
            return f", and the output went into the file {os.path.basename(place)!r}"
    return ""


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
