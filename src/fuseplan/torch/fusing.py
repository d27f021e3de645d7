"""Whole modules: exported, cut into plans, and run with the module's own parameters."""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseplan.errors import ArgumentError, PlanError, Unsupported, a_thing
from fuseplan.graph.choose import Mode, checked_mode, left_whole
from fuseplan.graph.cut import Cut
from fuseplan.graph.rules import Rule
from fuseplan.graph.why import Reason, Why
from fuseplan.kernels.template import Accuracy
from fuseplan.reports.report import Report
from fuseplan.reports.tried import Tried, tried
from fuseplan.stores import sites
from fuseplan.tensors.torch_tensors import Likeness, alike
from fuseplan.torch.arenas import Arenas, unplanned
from fuseplan.torch.cutting import Fusion, fused
from fuseplan.torch.exporting import Exported, exported
from fuseplan.torch.held import twin
from fuseplan.torch.lifetimes import storages
from fuseplan.torch.opening import Extents
from fuseplan.torch.operator import PLAIN, is_for_onnx, is_observed, is_transformed
from fuseplan.torch.recomputed import has_own_gradients, is_random, recorded
from fuseplan.torch.reporting import report_of, trace
from fuseplan.torch.turns import key_of, lost, timed

PLANS = "plans in torch's graph"
Form = tuple[Any, ...]  # what a call's arguments look like
Passed = tuple[list[torch.Tensor], Likeness, list[bool]]
NOTHING: Passed = [], alike(), []
OTHER_CALL = (
    "this call has other tensors, submodules, attributes, hooks, another mode or autocast than the example "
    "that the module was fused for, and runs as torch does: fuse the module with such an example too"
)
NOT_CARRIED = (
    "a fused module is code of this process and cannot be pickled: save its `state_dict()`, and fuse the "
    "module again where that is loaded; the cache makes that quick"
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
    tensors, and a weight that is changed is seen by the next call. So are attributes that are tensors; and
    numbers, words, and lists of these, but for those of torch's own modules, such as the epsilon of a norm.
    Attributes of other kinds are those of the export. The result has the attribute `report`: the plans, and
    why other operators are in none; and `fusion`, which has the graph and the plans as records.

    Args:
        module: the module, on the device that it is to run on.
        *example_inputs: arguments of its call. Calls with tensors of other shapes, dtypes or devices, in
            another mode or under autocast, run the module as it was; a warning says so once.
        choose: `predicted`: each plan that has a kernel computes its operators, except where a stored
            measurement is against it, or where a CPU would first copy what torch's arithmetic reads as it
            lies; none does where all lose together by the copies between them. `measured`: plans without a
            stored measurement are checked against float64 and timed beside torch's own operators, on the
            values that the example's call has there, some 0.1 s each, and the result is stored. A plan that
            is slower, wrong or not to be built is left to torch: `fusion.cut.left` tells why. So are all,
            where the whole call takes longer with them.
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
    made = twin(module)
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
        self._module, self._graph = module, made.module
        self._in, self._out = given.in_spec, given.out_spec
        self._is_one = self._out == pytree.tree_structure(0)
        count = self._in.num_leaves
        flat = pytree.tree_structure(((0,) * count, {}))
        self._flat = count if self._in == flat else -1  # how many tensors a call takes that has nothing else
        own = range(len(given.state))
        self._planned = Arenas(made.module, own, given.device) if is_planned else unplanned
        self._form, self._is_told = self._form_of(pytree.tree_leaves(example)), False
        self._plain, self._is_planned, self._device = given.graph, is_planned, given.device
        self._is_differentiated, self._flags = is_random(given.graph.graph), dict[Form, list[bool]]()
        self._passed: dict[bool, Passed] = {}  # what the last call of plans tells of the next, by grad mode
        if made.saved is not None and made.saved < 0:
            made = self._left(made, Reason(Why.HOST, f"all plans lose {made.saved * -1e6:.1f} us"))
        self.cut: Cut = made.cut
        is_measured = how["choose"] == "measured" or any(site.measured for site in made.cut.sites)
        if is_planned and is_measured and not self._is_differentiated:
            made = self._faster(made, inputs, example, **how)
        self.cut = made.cut
        kept = self._planned.kept if made.cut.sites and isinstance(self._planned, Arenas) else ()
        self.report: Report = replace(report_of(made, given.device, kept), unkept=given.unkept)
        trace(lambda: self.report)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        made = None if is_observed() or kwargs else self._again(inputs)
        if made is not None:
            return self._given(made)
        if not self.cut.sites or is_for_onnx() or is_transformed():
            return self._own(inputs, kwargs)
        is_flat = len(inputs) == self._flat and not kwargs
        if is_flat and all(isinstance(each, torch.Tensor) for each in inputs):
            leaves, spec = [*inputs], self._in  # 0.3 us, and 7 otherwise
        else:
            leaves, spec = pytree.tree_flatten((inputs, kwargs))
        own = self._held.current()
        is_known = own is not None and spec == self._in and self._form_of(leaves) == self._form
        if own is None or not is_known or not self._extents.hold(leaves):
            return self._unfused(inputs, kwargs)
        is_recorded = torch.is_grad_enabled() and not torch.compiler.is_exporting()
        if is_recorded and any(torch.is_tensor(each) and each.requires_grad for each in (*own, *leaves)):
            return self._recorded(own, leaves, inputs, kwargs)
        try:
            with torch.no_grad() if is_recorded else nullcontext():
                made = self._computed(own, leaves)
        except (PlanError, Unsupported):
            if not self._extents.axes:
                raise
            return self._unfused(inputs, kwargs)  # no plan has these extents, such as 0
        self._pass(own, leaves, [])
        return self._given(made)

    def _again(self, inputs: tuple[Any, ...]) -> Any:
        """The results of a call that looks like the one before: one check of torch's tells. Else None.

        A call of `Linear(32, 32)` takes 25 us so and 48 with each check by itself; recording, 44 and 92.
        """
        is_recording = torch.is_grad_enabled()
        own, are_alike, flags = self._passed.get(is_recording, NOTHING)
        is_plain = len(inputs) == self._flat and not any(getattr(each, "is_nested", True) for each in inputs)
        is_like = is_plain and are_alike(*own, *inputs) and all(map(operator.is_, self._held.tensors, own))
        if not is_like or not self._held.is_same():
            return None
        run = partial(self._run, own, inputs)
        if flags:
            return recorded(run, self._differentiated, flags, *own, *inputs)
        with torch.no_grad() if is_recording else nullcontext():
            return run()

    def _pass(self, own: list[torch.Tensor], leaves: list[Any], flags: list[bool]) -> None:
        """Notes what later calls like this one are compared with."""
        planned = None if is_observed() else self._planned
        is_plain = {*map(type, (*own, *leaves))} <= {*PLAIN}
        if isinstance(planned, Arenas) and is_plain and planned.takes(leaves):
            self._passed[torch.is_grad_enabled()] = own, alike(*own, *leaves), flags

    def _run(self, own: list[torch.Tensor], leaves: Sequence[Any]) -> Any:
        """The graph's results, of tensors that look as an arena's do."""
        made = self._planned.run(own, leaves) if isinstance(self._planned, Arenas) else None
        return self._graph(*own, *leaves) if made is None else made

    def _given(self, made: Any) -> Any:
        """The graph's results as the module gives them."""
        return made[0] if self._is_one else pytree.tree_unflatten(made, self._out)

    def _faster(
        self, made: Fusion, inputs: Sequence[Any], args: Any, *, choose: Mode, accuracy: Accuracy, **_: Any
    ) -> Fusion:
        """The fusion, without its plans where the whole call takes longer with them, as it was measured."""
        peer = f"torch {torch.__version__}"
        key = key_of(self._plain.code, inputs, f"{PLANS} {accuracy}", peer)
        found = sites.KEPT.records().get(key)
        if made.cut.sites and found is None and choose == "measured":
            with torch.no_grad():
                calls = {PLANS: lambda: self(*args[0], **args[1]), peer: lambda: self._own(*args)}
                found = timed(key, calls, self._device)
            sites.keep(found)
        reason = lost(found)
        return self._left(made, reason) if reason else made

    def _left(self, made: Fusion, reason: Reason) -> Fusion:
        """The graph without its plans."""
        return Fusion(self._plain, made.given, left_whole(made.cut, reason))

    def _computed(self, own: list[torch.Tensor], leaves: list[Any]) -> Any:
        """The graph's results."""
        made = None if torch.compiler.is_compiling() else self._planned(own, leaves)
        return self._graph(*own, *leaves) if made is None else made

    def _recorded(self, own: list[torch.Tensor], leaves: list[Any], inputs: Any, kwargs: Any) -> Any:
        """A call that records gradients, as torch does it the first time.

        Later calls have plans, as long as no gradient was taken: a backward pass of such a call runs torch's
        operators once more, so that training steps with plans take longer than torch's own.
        """
        is_plain = self._is_planned and not (self._is_differentiated or self._held.hooked)
        if is_observed() or not is_plain:
            return self._own(inputs, kwargs)
        given, is_shared = (*own, *leaves), not {*map(type, own)} <= {*PLAIN}  # with other processes
        key = tuple(torch.is_tensor(each) and each.requires_grad for each in given)
        flags = self._flags.get(key)
        if flags is None:
            made = self._own(inputs, kwargs)
            found = pytree.tree_leaves(made)
            is_new = is_shared or {*storages(found)}.isdisjoint(storages(given))  # views are to be torch's
            flags = [torch.is_tensor(each) and each.requires_grad for each in found]
            self._flags[key] = flags if is_new and not has_own_gradients(found) else []
            if not is_shared:
                return made
        if not self._flags[key]:
            return self._own(inputs, kwargs)
        if is_shared:
            return pytree.tree_unflatten(self._graph(*given), self._out)
        self._pass(own, leaves, flags)
        return self._given(
            recorded(partial(self._computed, own, leaves), self._differentiated, flags, *given)
        )

    def _differentiated(self, *given: Any) -> Any:
        self._is_differentiated = True
        self._passed.clear()
        return self._plain(*given)

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
        made._planned, made._passed = copy.copy(self._planned), {}
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_CARRIED)

    def _unfused(self, inputs: Any, kwargs: Any) -> Any:
        if not self._is_told:
            self._is_told = True
            warnings.warn(OTHER_CALL, stacklevel=4)
        return self._own(inputs, kwargs)

    def _own(self, inputs: Any, kwargs: Any) -> Any:
        """The call as the module has it; attributes that it writes are looked at no more."""
        before = copy.deepcopy(self._held.values) if self.cut.sites else []
        made = type(self._module).forward(self._module, *inputs, **kwargs)
        if self.cut.sites:
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
            return (-1,) if tensor.is_nested else tuple(tensor.shape)
        return tuple(None if axis in opened else extent for axis, extent in enumerate(tensor.shape))
