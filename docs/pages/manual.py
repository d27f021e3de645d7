"""The pages of the reference about what one calls: Python's public names, and the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

import fuseplan.torch
from docs.pages.docstrings import markdown, parse, prose
from fuseplan.bench.markdown import table
from fuseplan.cli import commands
from fuseplan.cli.statuses import MEANINGS
from fuseplan.errors import installing
from fuseplan.system.locks import cached_property
from fuseplan.system.reading import Record

Kind = inspect.Parameter
MARKS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}

# By what one does with them; operators have a page of their own.
PUBLIC = {
    "Plans": ("TensorSpec", "FusionPlan", "Step", "unfuse"),
    "Compiling": ("compile", "CompiledPlan", "Target", "parse_target", "load", "LoadedPlan"),
    "Running": ("Arguments", "BoundPlan", "empty"),
    "Explaining": ("explain", "Explanation"),
    "Gradients": ("Backward",),
    "Measured choices": ("tune", "Tuned", "Verdict"),
    "In PyTorch": (
        *("torch.fuse", "torch.run", "torch.plan_of", "torch.operators_of", "torch.operands_of"),
        *("torch.Fused", "torch.AddLayerNorm", "torch.AddRMSNorm", "torch.SelfAttention", "torch.GatedMLP"),
        "torch.LinearCrossEntropy",
    ),
    "Extending": ("register_operator", "register_template", "rule", "Rule"),
    "The cache": ("cache_info", "CacheInfo", "clear_cache"),
    "Errors": ("FuseplanError", "PlanError", "Unsupported", "BuildError", "ArgumentError"),
}
# Classes that users call; others come out of calls.
MADE = (
    *("TensorSpec", "FusionPlan", "Target", "Arguments", "torch.Fused", "torch.SelfAttention"),
    *("torch.GatedMLP", "torch.LinearCrossEntropy"),
)


def public_names() -> Iterator[str]:
    """What `import fuseplan` offers besides the operators, from the docstrings."""
    yield "All of these are names of `fuseplan`; the operators, which are names of it too, have"
    yield "[a page of their own](operators.md)."
    told: set[type] = set()
    for group, names in PUBLIC.items():
        yield from ("", f"## {group}")
        for name in names:
            value: Any = attrgetter(name)(fuseplan)
            yield from _public_class(name, value, told) if inspect.isclass(value) else _function(name, value)


def _public_class(name: str, value: type, before: set[type]) -> Iterator[str]:
    """A class with its members, and those of its bases that are not in `before`: the bases are then."""
    told = parse(value.__doc__)
    called = f"{name}{signature(value)}" if name in MADE else name
    yield from ("", f"### {name}", "", "```python", called, "```", "", prose(told.summary))
    yield from markdown(told)
    bases = [each for each in value.__mro__ if each.__module__.startswith("fuseplan") and each not in before]
    before.update(each for each in bases if each is not Record)  # whose method is told with each
    for member, found in {key: each for base in reversed(bases) for key, each in vars(base).items()}.items():
        if member == "__call__":
            yield from _method(name.lower().removesuffix("plan"), found)
        elif not member.startswith("_") and isinstance(found, property | cached_property):
            yield from ("", f"`.{member}`: {prose(parse(found.__doc__).summary)}")
        elif not member.startswith("_") and isinstance(found, classmethod):
            yield from _method(f"{name}.{member}", found.__func__)
        elif not member.startswith("_") and inspect.isfunction(found):
            yield from _method(f".{member}", found)


def _method(called: str, function: Callable[..., Any]) -> Iterator[str]:
    told = parse(function.__doc__)
    yield from ("", f"`{called}{signature(function, is_method=True)}`: {prose(told.summary)}")
    yield from markdown(told)


def _function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    told = parse(function.__doc__)
    yield from ("", f"### {name}", "", "```python", f"{name}{signature(function)}", "```", "")
    yield prose(told.summary)
    yield from markdown(told)


def signature(called: Callable[..., Any], *, is_method: bool = False) -> str:
    """What a function or a class is called with, annotations as they are written."""
    made = inspect.signature(called)
    listed = list(made.parameters.values())[is_method:]
    parts: list[str] = []
    kind = None
    for each in listed:
        if kind is Kind.POSITIONAL_ONLY and each.kind is not Kind.POSITIONAL_ONLY:
            parts.append("/")
        if each.kind is Kind.KEYWORD_ONLY and kind not in (Kind.KEYWORD_ONLY, Kind.VAR_POSITIONAL):
            parts.append("*")
        parts.append(MARKS.get(each.kind.name, "") + each.name + _annotated(each))
        kind = each.kind
    is_told = not inspect.isclass(called) and made.return_annotation not in (Kind.empty, "None")
    return f"({', '.join(parts)})" + (f" -> {made.return_annotation}" if is_told else "")


def _annotated(each: inspect.Parameter) -> str:
    is_told = each.annotation is not Kind.empty
    kind = f": {each.annotation}" if is_told else ""
    if each.default is Kind.empty:
        return kind
    default = getattr(each.default, "__name__", None) or repr(each.default)  # a function by its name
    return f"{kind} = {default}" if is_told else f"={default}"


def command_line() -> Iterator[str]:
    """Each command with its arguments and options."""
    yield prose(_paragraphs(commands.fuseplan.help)[0])
    yield ""
    yield from map(prose, _paragraphs(commands.fuseplan.help)[1:])
    yield ""
    yield f"It needs the extra `cli`: {installing('cli', 'click', 'rich')}."
    yield "`python -m fuseplan` is the same command."
    yield ""
    yield from table(["exit status", "means"], [[str(status), told] for status, told in MEANINGS.items()])
    yield from _commands("fuseplan", commands.fuseplan)


def _commands(name: str, group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for word in sorted(group.list_commands(context)):
        command = group.get_command(context, word)
        assert command is not None
        called = f"{name} {word}"
        if isinstance(command, click.Group):
            yield from _commands(called, command)
            continue
        arguments = [each.human_readable_name for each in command.params if isinstance(each, click.Argument)]
        yield from ("", f"## {called}", "", "```text", " ".join([called, *arguments, "[OPTIONS]"]), "```")
        for paragraph in _paragraphs(command.help):
            yield from ("", prose(paragraph))
        yield ""
        yield from table(["option", "default", "meaning"], [_option(each) for each in command.params])


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(each.split()) for each in inspect.cleandoc(text or "").split("\n\n")]


def _option(each: click.Parameter) -> list[str]:
    choices = "|".join(dict.fromkeys(each.type.choices)) if isinstance(each.type, click.Choice) else ""
    word = each.human_readable_name if isinstance(each, click.Argument) else ", ".join(each.opts)
    meaning = getattr(each, "help", None) or ""
    listed = f"one of `{choices}`" if choices else ""
    is_told = isinstance(each.default, str | int | float | Path) and not isinstance(each.default, bool)
    default = f"`{each.default}`" if is_told and each.default != "" else ""
    return [f"`{word}`", default, " ".join(part for part in (meaning, listed) if part)]
