"""Operators and templates from outside the package."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TypeVar

import numpy as np

from fuseplan.backends import backend_of
from fuseplan.errors import ArgumentError
from fuseplan.kernels.template import Template
from fuseplan.op import Elementwise
from fuseplan.ops import BY_NAME, OPERATORS
from fuseplan.plans.plan import FusionPlan

OperatorClass = TypeVar("OperatorClass", bound=type[Elementwise])
TemplateClass = TypeVar("TemplateClass", bound=type[Template])


def register_operator(kind: OperatorClass) -> OperatorClass:
    """Lets texts and JSON of plans name an elementwise operator of your own; may be used as a decorator.

    Plans in Python take such operators without it. The registration lasts as long as the process: a worker
    process and the command know fuseplan's own operators.

    Args:
        kind: a class that `fuseplan.op.operator` made. Its `samples` are tried; without one of its own, the
            class is made without arguments.

    Returns:
        The class.

    Raises:
        ArgumentError: it is no such class, another operator has its name, or a sample fails.
    """
    is_operator = isinstance(kind, type) and issubclass(kind, Elementwise)
    if not is_operator or "__dataclass_fields__" not in vars(kind):
        raise ArgumentError(
            f"{kind!r} is not an elementwise operator: write a class of fuseplan.op.Elementwise and decorate "
            "it with fuseplan.op.operator"
        )
    known = BY_NAME.get(kind.name)
    if not kind.name.isidentifier() or kind.name in ("x", "inf"):
        raise ArgumentError(f"an operator's name is a word in a plan's text; got {kind.name!r}")
    if known is not None and (known in OPERATORS or not _is_again(kind, known)):
        raise ArgumentError(f"`{kind.name}` is an operator already, {_place(known)}: set another `name`")
    try:
        BY_NAME[kind.name] = kind
        _try(kind)
    except Exception as error:  # the class is the caller's: its methods may raise anything
        BY_NAME.pop(kind.name)
        raise ArgumentError(f"a sample of {kind.name} fails: {error}") from error
    return kind


def _try(kind: type[Elementwise]) -> None:
    """Makes plans of the samples, and their texts, formulas and values."""
    for src, op in kind.samples():
        plan = FusionPlan(src, op)
        if FusionPlan.parse(str(plan)) != plan:
            raise ArgumentError(f"{plan} is another plan when it is parsed")
        arrays = {each.key: np.ones(each.shape) for each in plan.operands}
        plan.reference(np.ones(plan.src.shape), arrays)


def register_template(kind: TemplateClass, backend: str = "cpu") -> TemplateClass:
    """Lets a backend choose a template of your own, by its cost model, beside fuseplan's.

    Args:
        kind: a class of `fuseplan.backends.cpu.template.CpuTemplate`, or for GPUs of
            `fuseplan.backends.triton.template.GpuTemplate`: a frozen dataclass whose fields are its knobs.
        backend: `cpu` or `triton`.

    Returns:
        The class.

    Raises:
        ArgumentError: it is no such class, or another template of the backend has its name.
    """
    made = backend_of(backend)
    is_template = isinstance(kind, type) and issubclass(kind, Template) and dataclasses.is_dataclass(kind)
    if not is_template or inspect.isabstract(kind):
        raise ArgumentError(
            f"{kind!r} is not a template: write a frozen dataclass of fuseplan.kernels.template.Template "
            "with all its methods"
        )
    others = tuple(each for each in made.templates if not _is_again(kind, each))
    for known in others:
        if known.name == kind.name:
            raise ArgumentError(
                f"`{kind.name}` is a template of {backend} already, {_place(known)}: set another `name`"
            )
    vars(made)["templates"] = (kind, *others)  # where the backend's cached property keeps them
    return kind


def _is_again(kind: type, known: type) -> bool:
    """Whether a class is another one defined again, as a notebook's cell does when it runs twice."""
    return (kind.__module__, kind.__qualname__) == (known.__module__, known.__qualname__)


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
