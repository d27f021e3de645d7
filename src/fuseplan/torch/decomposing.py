"""`run_decompositions` of torch's exported programs, with torch's tables of operators made once a process.

torch makes them anew in every call: which of its 1,100 composite operators stay whole, and the functions that
each one dispatches to meanwhile. For three small layers this takes 0.15 of 0.2 s (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch._export.utils as listing
from torch._subclasses import fake_impls
from torch.export import exported_program

from fuseplan.system.locks import Lock

OVERRIDE, LIST = "_override_composite_implicit_decomp", "_materialize_cpp_cia_ops"
# Private names of torch 2.13. A torch that lacks one makes its tables in every call.
NAMES: tuple[tuple[ModuleType, str], ...] = (
    (exported_program, OVERRIDE),
    (listing, LIST),
    (fake_impls, "op_implementations_dict"),
    (fake_impls, "_deregister_op_impl"),
)
Kernels = dict[Any, dict[Any, Any]]  # of each operator, the function that a dispatch key calls
_override: Any = getattr(exported_program, OVERRIDE, None)
_list: Any = getattr(listing, LIST, None)
_guard = Lock()


@dataclass(frozen=True)
class _Tables:
    asked: Mapping[Any, Any]  # of each composite operator, the function that replaces it
    before: Kernels
    after: Kernels
    fakes: Mapping[Any, Any]  # of each operator, its function for tensors without memory

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        try:
            for each, kernels in self.after.items():
                _give(each, kernels)
                fake_impls.op_implementations_dict.setdefault(each, self.fakes[each])
            yield
        finally:
            for each, kernels in self.before.items():
                _give(each, kernels)
                fake_impls._deregister_op_impl(each)


_made: list[_Tables] = []  # the last ones


def run_decompositions(program: Any, table: Mapping[Any, Callable[..., Any]]) -> torch.export.ExportedProgram:
    """The program of functional operators, with those of the table replaced and composite ones whole."""
    with _guard, contextlib.ExitStack() as back:
        if all(hasattr(*each) for each in NAMES):
            for module, name, ours in (
                (exported_program, OVERRIDE, _overridden),
                (listing, LIST, functools.cache(_list)),  # it is called for each namespace
            ):
                back.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, ours)
        return program.run_decompositions(dict(table))


@contextlib.contextmanager
def _overridden(asked: Mapping[Any, Any]) -> Iterator[None]:
    """Torch's tables; those of the last call unless an operator was registered since."""
    before = _kernels(asked)
    if _made and (_made[0].asked, _made[0].before) == (asked, before):
        with _made[0].set():
            yield
        return
    with _override(asked):
        fakes = fake_impls.op_implementations_dict
        _made[:] = [_Tables(dict(asked), before, _kernels(asked), {each: fakes[each] for each in asked})]
        yield


def _kernels(operators: Mapping[Any, Any]) -> Kernels:
    return {each: dict(each.py_kernels) for each in operators}


def _give(operator: Any, kernels: Mapping[Any, Any]) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()
