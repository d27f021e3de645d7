"""Compiled plans for torch's tensors, and their operands packed once for as long as these do not change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fuseplan.backends.triton import memory
from fuseplan.backends.triton.memory import Queue
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, Unsupported
from fuseplan.execution.passed import Look
from fuseplan.execution.run import BoundPlan
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.ops.affine import BatchNorm
from fuseplan.plans.plan import FusionPlan
from fuseplan.torch.lying import Mark, Reading, aligned, content, laid, mark_of, packable
from fuseplan.torch.texts import (
    ACCURACY,
    JOINS,
    REPACKS,
    Tensors,
    check_count,
    joins_of,
    keys_of,
    opened_in,
    plan_of_look,
)

NAME = "fuseplan::run"  # torch's name of the operator that runs plans
LOOKS = 8  # calls in a row with new operands, after which one of so many is looked at
KEPT = 1024  # packed sets of operands of one plan: the layers of a model that are alike share it

Marks = tuple[Mark, ...]
Storages = tuple[StorageWeakRef, ...]
Packed = dict[Marks, tuple[Storages, "Bindings"]]
# Batch norm in training updates these by kernels of torch's that raise no version counter.
UNCOUNTED = ("mean", "variance")


class Bindings(NamedTuple):
    """A plan with its constant operands bound.

    Attributes:
        plan: the plan.
        versions: of the packed operands, by their places: how often they were written before.
        told: of those that torch writes without counting, the elements.
        is_kept: whether it holds for later calls on the same tensors, while the packed ones are not written.
    """

    plan: BoundPlan
    versions: Mapping[int, int]
    told: Mapping[int, bytes]
    is_kept: bool

    def is_current(self, given: Tensors) -> bool:
        """Whether nothing wrote into a packed tensor."""
        counted = all(given[place]._version == version for place, version in self.versions.items())
        return counted and all(content(given[place]) == told for place, told in self.told.items())


class Bound(NamedTuple):
    """A plan with operands bound.

    Attributes:
        plan: the plan.
        late: the given operands that each call has to give nevertheless, by key.
        copied: the tensors of which it has packed copies.
        uncounted: those of them that torch writes without counting, with their elements.
        readings: the keys of these and of the operands that are not given, in order, and the function that
            makes each of them readable.
    """

    plan: BoundPlan
    late: dict[str, torch.Tensor]
    copied: list[torch.Tensor]
    uncounted: list[tuple[torch.Tensor, bytes]]
    readings: Mapping[str, Reading]


class Kernel:
    """A plan compiled for a device, and its operands as the kernel reads them.

    An operand that the kernel reads as torch stores it is neither copied nor kept alive. Of the others a
    packed copy is kept for as long as the tensor's memory lives, and made again when its version counter
    shows that it was written. Statistics of batch norm, which torch writes without counting, are compared on
    the CPU. What else writes so, as `tensor.data` does, is not seen.

    Attributes:
        plan: the plan.
        constant: the places, among the tensors besides src, of operands that may be packed.
    """

    def __init__(
        self, plan: FusionPlan, compiled: tuple[CompiledPlan, Packed], queue: Queue | None, operators: str
    ) -> None:
        self.plan, self._queue = plan, queue
        self._compiled, self._packed = compiled
        self._seen: dict[Marks, tuple[Storages, list[int]]] = {}  # once, and not packed
        self._new_in_a_row = 0
        given: tuple[Operand | Result, ...] = (*plan.operands, *plan.results)
        specs = {each.key: each.spec for each in given if each.spec is not None}
        self._joins, self._keys = joins_of(operators), keys_of(operators, plan)
        self._updated = tuple(each.key for each in plan.results if each.updated)
        self._per_call = {place: specs[key] for place, key in enumerate(self._keys) if key in specs}
        self.constant = tuple(place for place, key in enumerate(self._keys) if key not in specs)
        statistics = [each.key for each in plan.operands if isinstance(plan[each.step].op, BatchNorm)]
        self._uncounted = tuple(
            place for place, key in enumerate(self._keys) if key in statistics and key.startswith(UNCOUNTED)
        )

    def __call__(self, src: torch.Tensor, given: Tensors, parameters: Sequence[float]) -> list[torch.Tensor]:
        """The output, and the plan's results in order; nothing given is written.

        Raises:
            ArgumentError: there are more or fewer tensors or numbers than the plan takes.
        """
        if parameters or len(given) != len(self._keys):
            check_count(self.plan, self._keys, given, parameters)
        pairs = ((self._keys[place], laid(given[place], spec)) for place, spec in self._per_call.items())
        values: dict[str, Any] = dict(pairs)
        values |= {key: values[key].clone() for key in self._updated}
        if parameters:
            values |= dict(zip((each.key for each in self.plan.parameters), parameters, strict=True))
        known = self.known(given)
        if known is None:
            values |= self._constants(given, packable)
        plan = known.plan if known else self.unbound
        made = plan(aligned(src), **values)
        return list(made[: 1 + len(self.plan.results)]) if isinstance(made, tuple) else [made]

    def bound(self, given: Sequence[torch.Tensor | None], changing: Collection[int]) -> Bound:
        """The plan with the given operands bound.

        Args:
            given: the tensors besides src, but for those that each call gives.
            changing: the places of those with other elements in each call, which cannot be packed once.
        """
        held = {place: each for place, each in enumerate(given) if each is not None}
        is_kept = {*changing}.isdisjoint(self.constant) and len(held) == len(given)
        made = self.held(given).plan if is_kept else self._bind(given)
        apart = [place for place in self.constant if place in held and self._keys[place] not in made.lent]
        lain = {place: laid(held[place], spec) for place, spec in self._per_call.items() if place in held}
        apart += [place for place, each in lain.items() if each.data_ptr() != held[place].data_ptr()]
        late = {place: held[place] for place in apart if place in changing}
        if not late.keys().isdisjoint(self.constant):
            made = self._bind([None if place in late else each for place, each in enumerate(given)])
        packed = [place for place in apart if place not in changing]
        further = made.further({self._keys[place]: each for place, each in lain.items() if place not in late})
        told = self._told(held, [place for place in packed if place in self.constant])
        readings = {
            key: partial(laid, spec=self._per_call[place]) if place in self._per_call else packable
            for place, key in enumerate(self._keys)
            if place not in held or place in late
        }
        in_calls = {self._keys[place]: each for place, each in late.items()}
        uncounted = [(held[place], each) for place, each in told.items()]
        return Bound(further, in_calls, [held[place] for place in packed], uncounted, readings)

    def looks(self, given: Tensors) -> dict[int, Look | None]:
        """How the constant operands look, by place; none where a call gives one in several tensors."""
        places = () if self._joins else self.constant
        return {place: self.unbound.look(self._keys[place], aligned(given[place])) for place in places}

    def read(self, looks: Mapping[int, Look | None], given: Tensors) -> list[tuple[int, int]]:
        """The places of operands that the kernel reads where they lie, and their words.

        A constant one on a CPU is none of them, which may need a copy elsewhere.
        """
        addresses = {place: given[place].data_ptr() for place in looks if self._queue}
        lent = [
            place
            for place, begin in addresses.items()
            if (look := looks[place]) and look.packed(given[place], begin)[0] == begin
        ]
        old = dict(self.old)
        places = (*(place for place in self._per_call if place not in old), *lent)
        return [(place, self.unbound.word_of(self._keys[place])[0]) for place in places]

    def held(self, given: Tensors) -> Bindings:
        """The plan with the constant operands bound, as they were packed before where they are the same."""
        marks = self._marks(given)
        return self._found(marks, given) or self._kept(marks, given)

    def _marks(self, given: Tensors) -> Marks | None:
        """What tells the constant operands from others; None where they count no versions."""
        constant = [given[place] for place in self.constant]
        return None if True in [each.is_inference() for each in constant] else tuple(map(mark_of, constant))

    def _found(self, marks: Marks | None, given: Tensors) -> Bindings | None:
        """What was packed of the constant operands, while nothing wrote into them."""
        held = None if marks is None else self._packed.get(marks)
        return held[1] if held and held[1].is_current(given) else None

    def known(self, given: Tensors) -> Bindings | None:
        """The plan with the constant operands bound; None where a call sees them for the first time.

        To bind them takes 300 us of a CPU's call, and most of those of a training step are never seen again.
        To look takes 20 us: after several calls in a row with new ones, few are looked at.
        """
        self._new_in_a_row += 1
        is_skipped = self._new_in_a_row > LOOKS and self._new_in_a_row % LOOKS
        if is_skipped and not self._packed and not self._is_captured:
            return None
        marks = self._marks(given)
        found = self._found(marks, given)
        if found is None and self._is_new(marks, given):
            return None
        self._new_in_a_row = 0
        return found or self._kept(marks, given)

    def _is_new(self, marks: Marks | None, given: Tensors) -> bool:
        """Whether a call sees the constant operands, as they were written last, for the first time."""
        if marks is None or self._is_captured:
            return marks is None
        versions = [given[place]._version for place in self.constant]
        if marks in self._seen and self._seen.pop(marks)[1] == versions:
            return False
        _drop(self._seen)
        self._seen[marks] = self._storages(given), versions
        return True

    def _kept(self, marks: Marks | None, given: Tensors) -> Bindings:
        """The plan with the constant operands bound now."""
        bound = self._bind(given)
        if marks is None or self._is_captured:  # packed whenever the graph runs, in memory of the graph's
            return Bindings(bound, {}, {}, False)
        _drop(self._packed)
        copied = [place for place in self.constant if self._keys[place] not in bound.lent]
        versions = {place: given[place]._version for place in copied}
        made = Bindings(bound, versions, self._told(given, copied), True)
        self._packed[marks] = self._storages(given), made
        return made

    def _storages(self, given: Tensors) -> Storages:
        return tuple(StorageWeakRef(given[place].untyped_storage()) for place in self.constant)

    @property
    def _is_captured(self) -> bool:
        return bool(self._queue and self._queue.is_capturing())

    @functools.cached_property
    def unbound(self) -> BoundPlan:
        """The plan for calls that give all operands."""
        return self._bind([None] * len(self._keys))

    @property
    def old(self) -> list[tuple[int, int]]:
        """The places of old values that results are made of, with the words of these results."""
        places = ((place, key) for place, key in enumerate(self._keys) if key in self._updated)
        return [(place, self.unbound.word_of(key)[0]) for place, key in places]

    def moved(self, given: Tensors) -> dict[int, TensorSpec | Dense]:
        """The places of the operands per element that a call copies, since they lie otherwise, and how."""
        pairs = ((place, spec, given[place]) for place, spec in self._per_call.items())
        return {place: spec for place, spec, each in pairs if each.data_ptr() != laid(each, spec).data_ptr()}

    def _told(self, given: Mapping[int, torch.Tensor] | Tensors, packed: Collection[int]) -> dict[int, bytes]:
        """The elements of packed tensors that torch writes without counting."""
        uncounted = (place for place in packed if place in self._uncounted and given[place].is_cpu)
        return {place: content(given[place]) for place in uncounted}

    def _bind(self, given: Sequence[torch.Tensor | None]) -> BoundPlan:
        held, values = self._held(given), self._constants(given, aligned)
        if not self._joins and all(
            values[self._keys[place]].data_ptr() == each.data_ptr() for place, each in held.items()
        ):
            return self._compiled.borrow(values)
        return self._compiled.bind(**values)  # nobody else keeps a copy alive

    def _held(self, given: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {place: each for place in self.constant if (each := given[place]) is not None}

    def _constants(self, given: Sequence[torch.Tensor | None], reading: Reading) -> dict[str, torch.Tensor]:
        """The constant operands that are given, readable, by key."""
        held = [(self._keys[place], each) for place, each in self._held(given).items()]
        values = {key: reading(each) for key, each in held if key not in self._joins}
        for key, (_, axis) in self._joins.items():
            if parts := [aligned(each) for name, each in held if name == key]:
                values[key] = torch.cat(parts, axis)
        return values


def _drop(packed: dict[Marks, tuple[Storages, Any]]) -> None:
    """Forgets what was kept of memory that is gone; the oldest, where there is too much of it."""
    gone = [marks for marks, (storages, _) in packed.items() if any(each.expired() for each in storages)]
    for marks in gone or list(packed)[: max(0, len(packed) - KEPT + 1)]:
        del packed[marks]


def kernel_on(operators: str, src: torch.Tensor) -> Kernel:
    """The kernel of the operators for a tensor, on the tensor's device, compiled once.

    Raises:
        PlanError: the operators do not fit the tensor.
        Unsupported: no kernel computes the plan.
        ArgumentError: fuseplan runs nothing on the tensor's device.
    """
    return _kernel_of(operators, src.shape, src.stride(), src.dtype, *target_of(src.device))


@functools.lru_cache(maxsize=4096)
def _kernel_of(
    operators: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    target: str,
    threads: int | None,
) -> Kernel:
    """By the tensor's look, which is compared faster than a plan."""
    plan = plan_of_look(operators, tuple(shape), strides, dtype)
    opened, found = opened_in(plan, operators), ACCURACY.match(operators)
    accuracy: Accuracy = "default" if found is None else found[1] if found[1].isalpha() else float(found[1])
    repacks = REPACKS in operators.rpartition(JOINS)[0].split()
    machine = replace(parse_target(target), repacks=True) if repacks else target
    if opened is not None:
        with contextlib.suppress(Unsupported):
            return Kernel(plan, _compiled(opened, machine, threads, accuracy), _queue(target), operators)
    return Kernel(plan, _compiled(plan, machine, threads, accuracy), _queue(target), operators)


def target_of(device: torch.device) -> tuple[str, int | None]:
    """The target for tensors on a device, and the most threads of a launch.

    Raises:
        ArgumentError: fuseplan runs nothing there.
    """
    if device.type == "cpu":
        return "cpu", torch.get_num_threads()
    if device.type == "cuda":
        return f"cuda:{device.index or 0}", None
    raise ArgumentError(f"a tensor is on {device}: plans run on the CPU and on CUDA devices")


def queue_of(device: torch.device) -> Queue | None:
    """Where launches on a GPU's tensors go; None on the CPU."""
    return _queue(target_of(device)[0])


def _queue(target: str) -> Queue | None:
    kind, _, index = target.partition(":")
    return memory.queue(int(index)) if kind == "cuda" else None


@functools.lru_cache(maxsize=4096)
def _compiled(
    plan: FusionPlan, target: str | Target, threads: int | None, accuracy: Accuracy
) -> tuple[CompiledPlan, Packed]:
    return compile_plan(plan, target, threads=threads, accuracy=accuracy), {}
