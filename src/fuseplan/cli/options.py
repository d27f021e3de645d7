"""Options that commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click


class Duration(click.FloatRange):
    """A number that is finite and not negative: `nan` is above no bound and below none."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: the text is no such number.
        """
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


DURATION = Duration()

Command = TypeVar("Command", bound=Callable[..., Any])


def accuracy_option(_: click.Context, __: click.Parameter, value: str) -> str | float:
    """A word, or the number that it is."""
    try:
        return float(value)
    except ValueError:
        return value


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta["json"] = value  # errors are printed by the group, which does not see this option
    return value


AS_JSON = click.option("--json", "as_json", is_flag=True, callback=_remember_json, help="Print JSON.")
TARGET = click.option("--target", default="cpu", show_default=True, help="cpu, cuda, triton:sm_90, ...")
THREADS = click.option(
    "--threads", type=int, help="The most threads a launch on a CPU uses; all unless given."
)
SEED = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random data."
)
PATIENCE = click.option(
    "--patience",
    type=DURATION,
    default=0.0,
    show_default=True,
    help="Seconds to wait, in all, until other programs rest.",
)
ACCURACY = click.option(
    "--accuracy",
    default="default",
    show_default=True,
    callback=accuracy_option,
    help="default, strict, or the largest error bound allowed.",
)
TEMPLATE = click.option("--template", help="The only template to consider, as explain prints it.")


def plan_command(command: Command) -> Command:
    """The argument and options of every command on a plan."""
    for option in (AS_JSON, TEMPLATE, ACCURACY, THREADS, TARGET, click.argument("plan")):
        command = option(command)
    return command
