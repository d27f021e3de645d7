"""The group of all commands: errors become messages and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from fuseplan.cli.statuses import CLOSED, INTERRUPTED, WRONG, error_json, known_error, status_of
from fuseplan.errors import FuseplanError

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
