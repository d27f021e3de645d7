"""Options that commands share."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from fuseplan.backends import BACKENDS
from fuseplan.kernels.target import KINDS
from fuseplan.system import limits


class Duration(click.FloatRange):
    """A number that is finite and not negative: `nan` is above no bound and below none."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; a click.BadParameter where the text is no such number."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


DURATION = Duration()
MODES = ("predicted", "measured")  # how a model leaves plans out: `graph.choose.Mode`, imported late

Command = TypeVar("Command", bound=Callable[..., Any])


def accuracy_option(_: click.Context, __: click.Parameter, value: str) -> str | float:
    """A word, or the number that it is."""
    try:
        return float(value)
    except ValueError:
        return value


def counts_option(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """Thread counts with commas between them; a click.BadParameter where a word is none."""
    with contextlib.suppress(ValueError):
        counts = tuple(int(word) for word in value.split(","))
        if all(0 < count <= limits.THREADS for count in counts):
            return counts
    raise click.BadParameter(f"want whole numbers from 1 to {limits.THREADS}, with commas between them")


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta["json"] = value  # errors are printed by the group, which does not see this option
    return value


def _be_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:  # the group's option and a command's are one
        ctx.meta["quiet"] = True
        warnings.simplefilter("ignore")


def _be_verbose(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["verbose"] = True


class PlanText(click.types.StringParamType):
    """A plan's text, or where it stands: `-` is the standard input, `@FILE` a file."""

    name = "plan"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; lines of the input that begin with # are comments.

        Raises:
            click.BadParameter: the file cannot be read.
        """
        if value != "-" and not value.startswith("@"):
            return str(value)
        try:
            text = sys.stdin.read() if value == "-" else Path(value[1:]).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{value} cannot be read: {error}", param, ctx)
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
        return " ".join(" ".join(lines).split())


def completing(words: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """How shells complete a word: by the words that begin so, each once."""

    def complete(_: click.Context, __: click.Parameter, begin: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in dict.fromkeys(words()) if word.startswith(begin)]

    return {"shell_complete": complete}


PLAN = PlanText()
TARGETS = completing(lambda: ("cpu", "cuda", *KINDS))
QUIET = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_be_quiet,
    help="Print results alone: no warnings, no progress.",
)
VERBOSE = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_be_verbose,
    help="Print all candidates and refusals, and the traceback of an error.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, callback=_remember_json, help="Print JSON.")
TARGET = click.option(
    "--target",
    **TARGETS,
    metavar="TARGET",
    default="cpu",
    show_default=True,
    help="The machine: cpu, cuda (this machine's GPU), or a kind such as cpu:avx2 and triton:sm_90.",
)
THREADS = click.option(
    "--threads", type=int, help="The most threads of a launch on a CPU; one per processor unless given."
)
SEED = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The seed of the random data."
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
    help="default, strict, or a number: the largest error bound that is allowed.",
)
TEMPLATE = click.option(
    "--template",
    **completing(lambda: (template.name for backend in BACKENDS for template in backend.templates)),
    metavar="TEMPLATE",
    help="The only template to consider: its name, or a candidate as explain prints it.",
)


CHOOSE = click.option(
    "--choose",
    type=click.Choice(MODES),
    default=MODES[0],
    show_default=True,
    help="Of a model: leave plans that are slower than ONNX Runtime to it, measured now unless stored.",
)
SHAPES = click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=1x3x224x224",
    help="The shape of an input of a model, where the model leaves extents open; they are 1 unless given.",
)


def declared(record: type, more: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """The options that a record declares; `more` is added to their help, by their names."""

    def decorate(command: Command) -> Command:
        for each in reversed([each for each in fields(record) if each.metadata]):
            command = _declared(each, (more or {}).get(each.name, ""))(command)
        return command

    return decorate


def _declared(each: Field[Any], more: str) -> Callable[[Command], Command]:
    kind, help = each.metadata["kind"], each.metadata["help"]
    known: dict[str, dict[str, Any]] = {
        "flag": {"is_flag": True},
        "count": {"type": click.IntRange(each.metadata["least"])},
        "number": {"type": DURATION},
        "counts": {"callback": counts_option},
        "target": TARGETS,
        "threads": {"type": int},
        "accuracy": {"callback": accuracy_option},
        "folder": {"type": click.Path(path_type=Path, file_okay=False)},
        "file": {"type": click.Path(path_type=Path)},
    }
    how = known.get(kind, {})
    default: Any = each.default
    default = ",".join(map(str, default)) if kind == "counts" else default
    is_shown = bool(default) and kind != "flag"
    word = "--" + each.name.removeprefix("is_").replace("_", "-")
    return click.option(word, each.name, default=default, show_default=is_shown, help=help + more, **how)


def is_model(text: str) -> bool:
    """Whether the text in the place of a plan is the name of a model's file."""
    return text.lower().endswith(".onnx")


def refuse_told(ctx: click.Context, whose: str, *names: str) -> None:
    """Refuses options that are told to a command which would not read them.

    Args:
        whose: what the options belong to.

    Raises:
        click.UsageError: one of them is on the command line.
    """
    told = [each for each in names if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE]
    words = [param.opts[-1] for param in ctx.command.params if param.name in told]
    if words:
        raise click.UsageError(f"{' and '.join(words)}: of {whose} alone")


def loud_command(command: Command) -> Command:
    """The options of every command that may print less or more."""
    return QUIET(VERBOSE(command))


@dataclass(frozen=True)
class Asked:
    """A plan on the command line, and how it is compiled."""

    plan: str
    target: str
    threads: int | None
    accuracy: str | float
    template: str | None
    as_json: bool

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of `compile` besides plan and target."""
        return {"threads": self.threads, "accuracy": self.accuracy, "template": self.template}


def plan_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument and options of every command on a plan; the command is given them as `asked`."""

    @functools.wraps(command)
    def run(*arguments: Any, **given: Any) -> Any:
        asked = Asked(**{each.name: given.pop(each.name) for each in fields(Asked)})
        return command(*arguments, asked=asked, **given)

    decorated: Callable[..., Any] = run
    plan = click.argument("plan", type=PLAN)
    for option in (QUIET, VERBOSE, AS_JSON, TEMPLATE, ACCURACY, THREADS, TARGET, plan):
        decorated = option(decorated)
    return decorated
