"""Choices on disk: a template and its knobs by the kernel, the target, and the code and tools that decide.

A file is a part of the cache, which sees to the code, to files that are damaged, and to many processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from fuseplan.backends import backend_of
from fuseplan.backends.backend import Backend
from fuseplan.execution.select import Choice, Weighed, behind, measured, preferring
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, machine_text
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.stores import cache, foreign
from fuseplan.system.reading import json_of, record

if TYPE_CHECKING:
    from fuseplan.stores.tuned import Tuned


def selected(kernel: Kernel, target: Target, accuracy: Accuracy = "default", *, plan: str = "") -> Choice:
    """The choice of `select` among all templates: the one on disk, or the one made now, which is kept.

    The 27 kernels of ResNet-50 have 1,969 candidates on an H200, whose estimates take 0.25 s.

    Raises:
        Unsupported: no template computes the kernel; this is not kept.
    """
    found = measured(kernel, target, accuracy)
    choose = partial(preferring, found, kernel, target, accuracy, plan)
    return behind(found, _kept(choose, found, kernel, target, accuracy), target)


def _kept(
    choose: Callable[[], Choice], found: Tuned | None, kernel: Kernel, target: Target, accuracy: Accuracy
) -> Choice:
    backend = backend_of(target.backend)
    try:
        toolchain = backend.fingerprint()
    except ImportError:  # the build says what to install
        return choose()
    if toolchain is None or any(foreign.fingerprint(each) != "" for each in backend.templates_met):
        return choose()
    preferred = found.template if found else ""
    extents = str(kernel.src.shape)  # an open axis has none in the text, and may have any in the estimate
    lasting = ("repacks",) if target.repacks else ()
    machine = machine_text(target), toolchain, preferred, *lasting
    parts = ("choice", kernel.text, extents, repr(accuracy), *machine)
    made: list[Choice] = []

    def is_current(data: bytes) -> bool:
        try:
            made.append(_read(data, choose, backend))
        except (AttributeError, ImportError, TypeError, ValueError):
            return False
        return True

    def make() -> bytes:
        made.append(choose())
        return _told(made[0])

    cache.kept(make, *parts, is_current=is_current)
    return replace(made[0], keep=partial(_keep, parts))


def _keep(parts: Sequence[str], choice: Choice) -> None:
    told = _told(choice)
    cache.kept(lambda: told, *parts, is_current=lambda data: data == told)


def _told(choice: Choice) -> bytes:
    """The choice as a file has it."""
    kind = type(choice.template)
    told = [kind.__module__, kind.__name__, choice.template.knobs, choice.seconds, choice.faults]
    return json.dumps(told).encode()


def _read(data: bytes, choose: Callable[[], Choice], backend: Backend) -> Choice:
    """The choice that `_told` told; of its template alone the module is imported."""
    module, name, knobs, seconds, faults = json_of(data)
    own = f"fuseplan.backends.{backend.name}."
    kind = getattr(import_module(module), name) if module.startswith(own) else None
    if not isinstance(kind, type) or not issubclass(kind, Template):
        raise ValueError(f"{module}.{name} is no template of {backend.name}")
    weigh = partial(_weighed_again, choose, faults)
    return Choice(record(kind, knobs), float(seconds), weigh, faults=tuple(map(str, faults)))


def _weighed_again(choose: Callable[[], Choice], faults: list[str]) -> Weighed:
    choice = choose()
    for fault in faults:
        choice = choice.without(fault) or choice
    return Weighed(choice.considered, choice.candidates)
