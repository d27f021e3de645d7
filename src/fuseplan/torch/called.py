"""What a call of a module computes: the operators that torch dispatches, on tensors without elements.

Two calls with one record run the same operators on the same parameters, inputs and numbers, and take the
same gradients, whatever code they come from: hooks, closures, globals and patched functions all end in
operators. A record tells the results' shapes too, so that a later call is compared with it without torch's
own ways to find them, which take a second to import.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplan.torch.described import Described
from fuseplan.torch.written import SIMPLE, WORDS, read_tensors, tensors_text

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
CONTAINERS = (list, dict, set)
Record = list[list[Any]]  # of each operator: the line that tells it, and its results as values of JSON


class UnseenError(Exception):
    """The call uses a value that no record tells."""


def outline(module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What two calls with one record have in common at first sight: modules, their settings, tensors.

    Raises:
        UnseenError: a tensor is of a kind that its shape, strides, dtype and device do not describe.
    """
    lines = [torch.__version__, str(torch.get_default_dtype()), *_files(module)]
    for name, each in module.named_modules():
        told = {key: value for key, value in vars(each).items() if type(value) in SIMPLE}
        lines.append(f"{name} {type(each).__module__}.{type(each).__qualname__} {told}")
    leaves, spec = pytree.tree_flatten((tuple(inputs), dict(kwargs)))
    lines += [f"{name} {_seen(name, each)}" for name, each in _state(module).items()]
    lines += [f"{place} {_seen(str(place), each)}" for place, each in enumerate(leaves)]
    return "\n".join((*lines, str(spec)))


def recorded(module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Record:
    """The record of a call in the module's present state and mode.

    Raises:
        UnseenError: the call reads elements, writes attributes of a module, or uses a tensor that is neither
            a parameter, a buffer, an input nor its own; or it fails.
    """
    return _followed(_Recording(), module, inputs, kwargs)


def repeats(record: Record, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is what a record tells."""
    try:
        return _followed(_Repeating(record), module, inputs, kwargs) == record
    except UnseenError:
        return False


def _followed(calls: _Calls, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Record:
    try:
        with warnings.catch_warnings(), _as_exported(), _unchanged(module):
            warnings.simplefilter("ignore")  # the call's own
            leaves, spec = pytree.tree_flatten((tuple(inputs), dict(kwargs)))
            held = {name: calls.given(name, each) for name, each in _state(module).items()}
            args, named = pytree.tree_unflatten(
                [calls.given(f"input {place}", each) for place, each in enumerate(leaves)], spec
            )
            with calls:
                made, spec = pytree.tree_flatten(torch.func.functional_call(module, held, args, named))
            return [*calls.record, [f"{calls.told(made)} {spec}", None]]
    except UnseenError:
        raise
    except Exception as error:  # of the module, or of torch: torch.export tells it then
        told = (str(error).strip().splitlines() or [""])[0]
        raise UnseenError(f"after {len(calls.record)} operators: {type(error).__name__}: {told}") from error


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _seen(name: str, value: Any) -> str:
    """A value that the call is given, a tensor by its description; an UnseenError where it has none."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    is_plain = type(value) in PLAIN and value.layout is torch.strided
    if not is_plain or value.is_conj() or value.is_neg() or value.is_inference():
        raise UnseenError(name)
    return f"{type(value).__name__} {tensors_text(value)} {value.requires_grad}"


class _Followed(Described):
    """A tensor of a call that is followed: where it comes from, and torch's tensor of no device."""

    place: str
    inner: torch.Tensor


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Follows the operators of a call.

    Attributes:
        record: of the operators so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record: Record = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch._dynamo is told to leave this alone: its import takes a second."""
        return False

    def given(self, name: str, value: Any) -> Any:
        """A tensor like one that the call is given, without elements; another value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        made = _Followed.like(value)
        made.place, made._is_param = name, isinstance(value, nn.Parameter)
        made.inner = self.without_device(value)
        return made.requires_grad_(value.requires_grad)

    def without_device(self, value: torch.Tensor) -> Any:
        """What operators are run on to find the shapes of their results; None where they are known."""
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensors = [each for each in pytree.tree_leaves((args, named)) if isinstance(each, _Followed)]
        is_literal = func is torch.ops.aten.lift_fresh.default and not tensors
        told = _literal(args[0]) if is_literal else f"{self.told(args)} {self.told(named)}"
        line = f"{func} {told} {torch.is_grad_enabled()}"
        if torch.Tag.inplace_view in func.tags:
            _lie_otherwise(func, args, named)
        made = self.run(line, func, args, named, tensors)
        self.record.append([line, self._results(made, tensors)])
        return made

    def run(self, line: str, func: Any, args: Any, named: dict[str, Any], tensors: list[_Followed]) -> Any:
        """An operator's results."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """The name of the next operator's result."""
        return f"%{len(self.record)}"

    def _results(self, made: Any, tensors: list[_Followed]) -> Any:
        """Results as values of JSON; a tensor that the operator was given is its place among these."""
        for place, each in enumerate(tensors):
            if made is each:
                return place
        return tensors_text(made)

    def told(self, value: Any) -> str:
        """An argument: of a tensor where it comes from, and the operator whose gradient made it.

        Raises:
            UnseenError: nothing tells it.
        """
        if isinstance(value, _Followed):
            return value.place if value.grad_fn is None else f"{value.place} {value.grad_fn.name()}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(map(self.told, value))})"
        if isinstance(value, dict):
            return self.told([each for pair in value.items() for each in pair])
        if isinstance(value, slice):
            return f"slice{self.told([value.start, value.stop, value.step])}"
        if type(value) not in (*SIMPLE, *WORDS, torch.device):
            raise UnseenError(type(value).__name__)
        return repr(value)


class _Recording(_Calls):
    """Finds the shapes of results by torch's own operators, on tensors of no device."""

    def without_device(self, value: torch.Tensor) -> Any:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def run(self, line: str, func: Any, args: Any, named: dict[str, Any], tensors: list[_Followed]) -> Any:
        inner, inner_named = pytree.tree_map(_without_device, (args, named))
        made = func(*inner, **inner_named)
        if any(each.shape != each.inner.shape or each.stride() != each.inner.stride() for each in tensors):
            raise UnseenError(f"{func} changes a shape")
        for each in tensors:
            if made is each.inner:
                return each
        devices = [each.device for each in (*tensors, *args) if isinstance(each, torch.Tensor)]
        device = named.get("device") or next((each for each in devices if each.type != "cpu"), "cpu")
        return _wrapped(made, self.place, torch.device(device))


class _Repeating(_Calls):
    """Takes results from a record, as long as the operators are those of the record."""

    def __init__(self, known: Record) -> None:
        super().__init__()
        self._known = known

    def run(self, line: str, func: Any, args: Any, named: dict[str, Any], tensors: list[_Followed]) -> Any:
        known, results = self._known[len(self.record)]
        if line != known:
            raise UnseenError(line)
        return (
            tensors[results]
            if isinstance(results, int)
            else _placed(read_tensors(results, _Followed), self.place)
        )


def _wrapped(made: Any, place: str, device: torch.device) -> Any:
    """What an operator made of tensors of no device."""
    if isinstance(made, list | tuple):
        return type(made)(_wrapped(each, f"{place}.{index}", device) for index, each in enumerate(made))
    if not isinstance(made, torch.Tensor):
        return made
    found = _Followed.like(made, device)
    found.place, found.inner = place, made
    return found


def _placed(made: Any, place: str) -> Any:
    """Tensors with the places where they come from."""
    if isinstance(made, tuple):
        return tuple(_placed(each, f"{place}.{index}") for index, each in enumerate(made))
    if isinstance(made, _Followed):
        made.place = place
    return made


def _lie_otherwise(func: Any, args: Any, named: dict[str, Any]) -> None:
    """Gives a followed tensor the new shape and strides of an operator that moves no element.

    Torch's own operators use these: an average pool of channels-last calls `as_strided_` on its result.
    """
    was_meta = torch._C._meta_in_tls_dispatch_include()
    with torch._C._DisableTorchDispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args, **named)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(was_meta)


def _literal(value: torch.Tensor) -> str:
    """A tensor of numbers that stand in the code."""
    elements = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()
    return f"{value.dtype} {value.device} {elements}"


def _without_device(value: Any) -> Any:
    """An argument for an operator on tensors of no device."""
    if isinstance(value, _Followed):
        return value.inner
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _files(module: nn.Module) -> Iterator[str]:
    """The files of the modules' code, of which reports name the lines."""
    names = {type(each).__module__ for each in module.modules()}
    for name in sorted(each for each in names if not each.startswith("torch.")):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and os.path.exists(path):
            found = os.stat(path)
            yield f"{path} {found.st_size} {found.st_mtime_ns}"


@contextlib.contextmanager
def _as_exported() -> Iterator[None]:
    """Code that asks whether it is exported is told so."""
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Takes back what a call writes into attributes of modules; an UnseenError where no word tells it.

    A number or a word that is written, such as a window's size, changes nothing that the call has computed.
    """
    held: list[tuple[Any, Any]] = [(vars(each), dict(vars(each))) for each in module.modules()]
    values = [value for _, kept in held for value in kept.values() if isinstance(value, CONTAINERS)]
    held += [(value, value.copy()) for value in values]
    try:
        yield
    finally:
        changed = [pair for pair in held if not _is_same(*pair)]
        written = [name for pair in changed for name in _untold(*pair)]
        for now, before in changed:
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
    if written:
        raise UnseenError(f"the call writes {', '.join(written)} of a module")


def _untold(now: Any, before: Any) -> list[str]:
    """What was written into a container, except for numbers and words under names that had some."""
    if not isinstance(now, dict):
        return [f"into a {type(now).__name__}"]
    names = (name for name in before | now if now.get(name, now) is not before.get(name, before))
    return [
        str(name)
        for name in names
        if type(now.get(name, now)) not in SIMPLE or type(before.get(name, before)) not in SIMPLE
    ]


def _is_same(now: Any, before: Any) -> bool:
    """Whether a container has the very elements that it had."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(name in before and before[name] is value for name, value in now.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(one is other for one, other in zip(now, before, strict=True))
