"""Whole modules: exported, cut into plans, and run with the module's own parameters."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseplan.errors import ArgumentError, PlanError, Unsupported, a_thing
from fuseplan.graph.choose import checked_mode
from fuseplan.graph.cut import Cut
from fuseplan.graph.rules import Rule
from fuseplan.kernels.template import Accuracy
from fuseplan.reports.report import Report
from fuseplan.reports.tried import Tried, tried
from fuseplan.torch.arenas import Arenas, unplanned
from fuseplan.torch.cutting import Fusion, fused
from fuseplan.torch.exporting import Exported, exported
from fuseplan.torch.opening import Extents
from fuseplan.torch.operator import is_for_onnx
from fuseplan.torch.own_backward import functions_of
from fuseplan.torch.reporting import report_of, trace

Form = tuple[Any, ...]  # what a call's arguments look like
OTHER_CALL = (
    "this call has other tensors, submodules, attributes, hooks, another mode or autocast than the example "
    "that the module was fused for, and runs as torch does: fuse the module with such an example too"
)
NOT_CARRIED = (
    "a fused module is code of this process and cannot be pickled: save its `state_dict()`, and fuse the "
    "module again where that is loaded; the cache makes that quick"
)
OWN_BACKWARD = (
    "the module has gradients of its own, by torch.autograd.Function ({functions}), which plans do not have: "
    "this call runs as torch does; under torch.no_grad() the module is fused"
)


def fuse(
    module: nn.Module,
    *example_inputs: Any,
    choose: str = "predicted",
    dynamic_shapes: Any = None,
    rules: Sequence[Rule] = (),
    accuracy: Accuracy = "default",
    **example_kwargs: Any,
) -> nn.Module:
    """A module that computes what `module` does, with plans in the place of the operators that they fuse.

    The module is exported as it computes in its present mode. Parameters, buffers and submodules of the
    result are those of `module`, and no class is changed: `state_dict`, `.to()` and optimizers see the same
    tensors, and a weight that is changed is seen by the next call. So are attributes that are numbers, words,
    or lists of them, but for those of torch's own modules, such as the epsilon of a norm; attributes of other
    kinds are those of the export. The result has the attribute `report`: the plans, and why
    other operators are in none; and `fusion`, which has the graph and the plans as records.

    Args:
        module: the module, on the device that it is to run on.
        *example_inputs: arguments of its call. Calls with tensors of other shapes, dtypes or devices, in
            another mode or under autocast, run the module as it was; a warning says so once. So do calls that
            need a gradient of a torch.autograd.Function's own.
        choose: `predicted`: each plan that has a kernel computes its operators, except where a stored
            measurement is against it. `measured`: plans without a stored measurement are checked against
            float64 and timed beside torch's own operators, on the values that the example's call has there,
            some 0.1 s each, and the result is stored. A plan that is slower, wrong or not to be built is left
            to torch: `fusion.cut.left` tells why.
        dynamic_shapes: the open extents of the inputs, as torch.export takes them. A plan whose open axes
            are the outermost ones has one kernel for all extents; other plans have one for each extent.
        rules: what `fuseplan.rule` made: operators of plans for formulas that they are to stand for.
        accuracy: as for `fuseplan.compile`: `strict` leaves out forms that are less exact than torch's.
        **example_kwargs: likewise, by name.

    Raises:
        ArgumentError: `choose` is another word; or torch.export does not take the module: the error tells.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"fuse takes an nn.Module and its example inputs; got {a_thing(module)}")
    how = {"choose": checked_mode(choose), "rules": rules, "accuracy": accuracy}
    example = example_inputs, example_kwargs
    made = copy.copy(module)
    made.fusion = Fused(made, exported(module, *example, dynamic_shapes), example, how)
    made.report = made.fusion.report
    made.forward = _method(made.fusion, inspect.signature(module.forward))
    return made


def _method(fusion: Fused, signature: inspect.Signature) -> MethodType:
    """The call as a method with a module's own signature: torch.compile and torch.export read both."""
    call: Any = FunctionType(Fused.__call__.__code__, globals(), "__call__")
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = signature.replace(parameters=[owner, *signature.parameters.values()])
    return MethodType(call, fusion)


class Fused:
    """The call of a fused module, and what is known of it.

    Attributes:
        cut: the graph, its plans, each of which is a call, and why each other operator is in none.
        report: what became of each operator of torch's.
    """

    def __init__(self, module: nn.Module, given: Exported, example: Any, how: Mapping[str, Any]) -> None:
        self._held = given.held(module)
        inputs = (*self._held.tensors, *pytree.tree_leaves(example))
        self._extents = Extents(given.inputs, given.ranges)
        is_planned = not self._extents.axes
        joins = is_planned and given.device.type == "cpu"
        made: Fusion = fused(given.graph, given.device, inputs=inputs, joins=joins, **how)
        self.cut: Cut = made.cut
        self.report: Report = replace(report_of(made, given.device), unkept=given.unkept)
        trace(lambda: self.report)
        self._module, self._graph = module, made.module
        self._in, self._out = given.in_spec, given.out_spec
        count = self._in.num_leaves
        flat = pytree.tree_structure(((0,) * count, {}))
        self._flat = count if self._in == flat else -1  # how many tensors a call takes that has nothing else
        own = range(len(given.state))
        self._planned = Arenas(made.module, own, given.device) if is_planned else unplanned
        self._form, self._is_told = self._form_of(pytree.tree_leaves(example)), False
        self._functions = given.functions

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if is_for_onnx():
            return type(self._module).forward(self._module, *inputs, **kwargs)
        is_flat = len(inputs) == self._flat and not kwargs
        if is_flat and all(isinstance(each, torch.Tensor) for each in inputs):
            leaves, spec = [*inputs], self._in  # 0.3 us, and 7 otherwise
        else:
            leaves, spec = pytree.tree_flatten((inputs, kwargs))
        own = self._held.current()
        is_known = own is not None and spec == self._in and self._form_of(leaves) == self._form
        if own is None or not is_known or not self._extents.hold(leaves):
            return self._unfused(inputs, kwargs)
        if self._functions != () and self._backward_is_own(inputs, kwargs, leaves):
            return self._unfused(inputs, kwargs, OWN_BACKWARD)
        try:
            made = None if torch.compiler.is_compiling() else self._planned(own, leaves)
            made = self._graph(*own, *leaves) if made is None else made
        except (PlanError, Unsupported):
            if not self._extents.axes:
                raise
            return self._unfused(inputs, kwargs)  # no plan has these extents, such as 0
        return pytree.tree_unflatten(made, self._out)

    def tried(self, name: str) -> Tried:
        """All plans that were tried for one of torch's operators, by its name in the report.

        Raises:
            ArgumentError: the module has no operator of this name, or it folds.
        """
        return tried(self.cut, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        """The call of a copy of the module; the graph has no tensors of the module's."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._module, made._held = copy.deepcopy(self._module, memo), copy.deepcopy(self._held, memo)
        made._planned = copy.copy(self._planned)
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_CARRIED)

    def _backward_is_own(self, inputs: Any, kwargs: Any, leaves: list[Any]) -> bool:
        """Whether a gradient is asked for that a torch.autograd.Function of the module defines."""
        if not torch.is_grad_enabled():
            return False
        tensors = (each for each in (*self._held.tensors, *leaves) if isinstance(each, torch.Tensor))
        if not any(each.requires_grad for each in tensors):
            return False
        if self._functions is None:
            plain = copy.copy(self._module)
            del plain.forward
            self._functions = functions_of(plain, inputs, kwargs)
        return self._functions != ()

    def _unfused(self, inputs: Any, kwargs: Any, why: str = OTHER_CALL) -> Any:
        if not self._is_told:
            self._is_told = True
            warnings.warn(why.format(functions=", ".join(self._functions or ())), stacklevel=4)
        before = copy.deepcopy(self._held.values)
        made = type(self._module).forward(self._module, *inputs, **kwargs)
        self._held.written(before)
        return made

    def _form_of(self, leaves: Sequence[Any]) -> Form:
        """What tensors look like besides their open extents, and other values themselves."""
        forms = [
            (self._shape(place, each), each.dtype, each.device) if isinstance(each, torch.Tensor) else each
            for place, each in enumerate(leaves)
        ]
        return (*forms, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))

    def _shape(self, place: int, tensor: torch.Tensor) -> tuple[int | None, ...]:
        opened = self._extents.axes.get(place)
        if opened is None:
            return tuple(tensor.shape)
        return tuple(None if axis in opened else extent for axis, extent in enumerate(tensor.shape))
