"""What a fused module's graph takes of the module: its tensors, and the form that it was exported in."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fuseplan.tensors.torch_tensors import alike
from fuseplan.torch.written import SIMPLE

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ALL_HOOKS = [vars(nn.modules.module)[f"_global{name}"] for name in HOOKS]  # those of all modules
Place = tuple[dict[str, Any], str, nn.Module]  # a submodule's parameters or buffers, a name, the submodule


class Held:
    """The module's tensors that its graph takes, and the form in which the module was exported.

    Attributes:
        hooked: the hooks of submodules.

    Args:
        module: the module.
        state: the paths of parameters and buffers, and constants.
    """

    def __init__(self, module: nn.Module, state: Sequence[str | torch.Tensor]) -> None:
        self._state = [_place(module, each) for each in state]
        self._modules = [*module.modules()]
        self._modes = [each.training for each in self._modules]
        self._parents = [each for each in self._modules if each._modules]
        self._children = [dict(each._modules) for each in self._parents]
        below = self._modules[1:]  # the module's own are called around the fused call
        self._hooks = [hooks for each in below for hooks in map(vars(each).__getitem__, HOOKS)]
        self.hooked = [dict(each) for each in self._hooks if each]
        self._types = _types(self.tensors)
        self._plain = [(each, name) for each in self._modules for name in _plain(each)]
        self._values = copy.deepcopy(self.values)
        paths: dict[torch.Tensor, list[str]] = {}
        for named in (module.named_parameters, module.named_buffers):
            for path, tensor in named(remove_duplicate=False):
                paths.setdefault(tensor, []).append(path)
        self._ties = [[_place(module, path) for path in each] for each in paths.values() if len(each) > 1]
        self._seen = list[torch.Tensor](), alike()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": ([], alike())}

    def current(self) -> list[torch.Tensor] | None:
        """The tensors, in the same list where they look and lie as they did; None where anything is new."""
        tensors = self._typed(self.tensors)
        return None if tensors is None or not self.is_same() else tensors

    def is_same(self) -> bool:
        """Whether submodules, values, hooks, modes and ties are those exported, whatever the tensors."""
        return (
            [each.training for each in self._modules] == self._modes
            and [each._modules for each in self._parents] == self._children
            and [*filter(None, self._hooks)] == self.hooked
            and not any(ALL_HOOKS)
            and self.values == self._values
            and all(_tensor(*place) is _tensor(*tie[0]) for tie in self._ties for place in tie)
        )

    @property
    def values(self) -> list[Any]:
        """Numbers and words that the code of modules may read, such as whether an adapter is merged."""
        return [getattr(each, name, None) for each, name in self._plain]

    def written(self, before: list[Any]) -> None:
        """Looks no more at values that a call has written, such as counters; they were others before."""
        kept = [place for place, each in enumerate(self.values) if each == before[place]]
        self._plain = [self._plain[place] for place in kept]
        self._values = [self._values[place] for place in kept]

    def _typed(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The tensors, if they have the types that were exported; by torch's own check in one call."""
        if torch.compiler.is_compiling():
            return tensors if _types(tensors) == self._types else None
        seen, are_alike = self._seen
        if seen and all(map(operator.is_, tensors, seen)) and are_alike(*seen):
            return seen
        if _types(tensors) != self._types:
            return None
        self._seen = tensors, alike(*tensors)
        return tensors

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now."""
        return [named[name] if name in named else getattr(owner, name) for named, name, owner in self._state]


def _plain(module: nn.Module) -> Iterator[str]:
    """The attributes of a module that are numbers and words, or hold such; none of torch's own modules."""
    if type(module).__module__.startswith("torch."):
        return
    for name in vars(module).keys() - vars(nn.Module()).keys():
        value = vars(module)[name]
        inner = [*value.values()] if type(value) is dict else value
        if all(type(each) in SIMPLE for each in (inner if type(inner) in (list, tuple, set) else [inner])):
            yield name


def _types(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(each, name, None) for name in ("dtype", "device", "shape")) for each in tensors]


def _place(module: nn.Module, path: str | torch.Tensor) -> Place:
    if isinstance(path, torch.Tensor):  # an attribute is read anew: code may write it, as a hook does
        held: Iterator[Place] = (
            ({}, name, each)
            for each in module.modules()
            for name, value in vars(each).items()
            if value is path
        )
        return next(held, ({"": path}, "", module))
    owner, _, name = path.rpartition(".")
    found = module.get_submodule(owner)
    return found._buffers if name in found._buffers else found._parameters, name, found


def _tensor(named: dict[str, Any], name: str, owner: nn.Module) -> torch.Tensor:
    """A parameter or a buffer; 0.1 us where its name as an attribute takes 1.5 us."""
    return named[name] if name in named else getattr(owner, name)  # such as a parametrized one


def twin(module: nn.Module) -> nn.Module:
    """A module with the same attributes; the copy of a parametrized one, which torch's own class refuses."""
    if not is_parametrized(module):
        return copy.copy(module)
    kind: Any = type(module)
    made: nn.Module = kind.__new__(kind)
    vars(made).update(vars(module))
    return made
