"""Compiled plans for torch's tensors, and their operands packed once for as long as these do not change."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fuseplan.backends.triton import memory
from fuseplan.backends.triton.memory import Queue
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, PlanError, Unsupported, counted
from fuseplan.execution.run import BoundPlan
from fuseplan.kernels.template import Accuracy
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.extents import OPEN
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.messages.excerpt import ARROW
from fuseplan.ops.affine import BatchNorm
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text, parse_plan
from fuseplan.torch.lying import Mark, aligned, content, laid, mark_of, packable

NAME = "fuseplan::run"  # torch's name of the operator that runs plans
Tensors = Sequence[torch.Tensor]
Reading = Callable[[torch.Tensor], torch.Tensor]  # the tensor, or a copy that a kernel can read
JOINS = " | "  # behind the operands that are given in several tensors: `weight=2:0 | linear(8) -> glu`
ACCURACY = re.compile(r"accuracy=(\S+)")  # in front of them, where it is not the default one
NAMED = re.compile(r"\s*\[([*\w]+)\]\s*->\s*")  # names of axes in front of operators, a star before open ones
KEPT = 1024  # packed sets of operands of one plan: the layers of a model that are alike share it

Packed = dict[tuple[Mark, ...], tuple[tuple[StorageWeakRef, ...], "Bindings"]]
# Batch norm in training updates these by kernels of torch's that raise no version counter.
UNCOUNTED = ("mean", "variance")


def given_of(plan: FusionPlan) -> tuple[Operand | Result, ...]:
    """The tensors besides src that a call gives, in order: operands, then old values of updated results."""
    return (*plan.operands, *(each for each in plan.results if each.updated))


def plan_on(operators: str, src: torch.Tensor) -> FusionPlan:
    """The plan of the operators on a tensor.

    Args:
        operators: a plan's text behind its input. Names of src's axes may stand in front: `[bsc] -> bias`.
        src: the tensor.

    Raises:
        PlanError: the operators do not fit the tensor, or no plan takes it.
    """
    shape, strides = (
        tuple(map(int, each)) for each in (src.shape, src.stride())
    )  # torch's open ones are fixed
    return _plan(operators, shape, strides, src.dtype)


@functools.lru_cache(maxsize=4096)
def joins_of(operators: str) -> dict[str, tuple[int, int]]:
    """The operands that a call gives in several tensors, by key: how many, and the axis that joins them."""
    words = ACCURACY.sub("", operators.rpartition(JOINS)[0]).split()
    pairs = (word.partition("=") for word in words)
    return {key: (int(told.split(":")[0]), int(told.split(":")[1])) for key, _, told in pairs}


def keys_of(operators: str, plan: FusionPlan) -> tuple[str, ...]:
    """The key of each tensor besides src that a call gives."""
    joins, given = joins_of(operators), given_of(plan)
    return tuple(each.key for each in given for _ in range(joins.get(each.key, (1, 0))[0]))


def operands_in(operators: str, plan: FusionPlan, given: Tensors) -> list[torch.Tensor]:
    """The plan's tensors besides src: those that a call gives in several tensors are joined."""
    joins, ahead = joins_of(operators), iter(given)
    if not joins:
        return list(given)
    pairs = [joins.get(each.key, (1, 0)) for each in given_of(plan)]
    parts = [(list(itertools.islice(ahead, count)), axis) for count, axis in pairs]
    return [each[0] if len(each) == 1 else torch.cat(each, axis) for each, axis in parts]


@functools.lru_cache(maxsize=4096)
def _plan(operators: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> FusionPlan:
    operators = operators.rpartition(JOINS)[2]
    strides = tuple(step or int(extent == 1) for step, extent in zip(strides, shape, strict=True))
    found = NAMED.match(operators)
    if found is None:  # the operators name the axes
        return FusionPlan.parse(f"{TensorSpec(shape, dtype, strides=strides)} {ARROW} {operators}")
    ops = parse_plan(f"f32[{'x'.join('1' * len(shape))}] {ARROW} {operators[found.end() :]}")[1]
    return FusionPlan(TensorSpec(shape, dtype, strides=strides, names=found[1].replace("*", "")), *ops)


def operators_text(
    plan: FusionPlan,
    opened: Sequence[int] = (),
    joins: Mapping[str, tuple[int, int]] | None = None,
    accuracy: Accuracy = "default",
) -> str:
    """The operators of a plan as `plan_on` reads them.

    Args:
        plan: the plan.
        opened: the axes of src for all of whose extents there is one kernel.
        joins: the operands that a call gives in several tensors, as `joins_of` gives them.
        accuracy: as for `fuseplan.compile`.
    """
    words = [f"accuracy={accuracy}"] if accuracy != "default" else []
    front = " ".join((*words, *(f"{key}={count}:{axis}" for key, (count, axis) in (joins or {}).items())))
    text = f"{front}{JOINS if front else ''}"
    if not plan.src.has_channel_names or opened:
        names = "".join(f"*{name}" if axis in opened else name for axis, name in enumerate(plan.src.names))
        text += f"[{names}] {ARROW} "
    return text + f" {ARROW} ".join(operator_text(op) for op in plan.ops)


def _opened(plan: FusionPlan, operators: str) -> FusionPlan | None:
    """The plan with open axes, where the text in front of its operators has some and a plan can have them."""
    found = NAMED.match(operators.rpartition(JOINS)[2])
    if found is None or "*" not in found[1]:
        return None
    src = plan.src
    axes = [axis for axis, star in enumerate(re.findall(r"(\*?)\w", found[1])) if star]
    named = (src.layout, src.names), (f"{src.layout} of {src.names}", None)
    for opened, (layout, names) in itertools.product(
        (axes, axes[:1]), named
    ):  # all of them, or rows of one size
        shape = [OPEN if axis in opened else extent for axis, extent in enumerate(src.shape)]
        with contextlib.suppress(PlanError):
            made = TensorSpec(shape, src.dtype, layout, names=names)
            if made.with_extents(*(src.shape[axis] for axis in opened)) == src:
                return FusionPlan(made, *plan.ops)
    return None


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
        made = self.held(given).plan(aligned(src), **values)
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

    def packed(self, bound: BoundPlan) -> list[int]:
        """The places of the operands of which a bound plan has copies, or a CPU may need one elsewhere."""
        lent = bound.lent if self._queue else ()
        return [place for place in self.constant if self._keys[place] not in lent]

    def read(self, bound: BoundPlan) -> list[tuple[int, int]]:
        """The places of the other operands, which it reads where they lie, and their words."""
        packed = self.packed(bound)
        return [(place, bound.word_of(key)[0]) for place, key in enumerate(self._keys) if place not in packed]

    def held(self, given: Tensors) -> Bindings:
        """The plan with the constant operands bound, as they were packed before where they are the same."""
        constant = [given[place] for place in self.constant]
        if True in [each.is_inference() for each in constant]:  # these count no versions
            return Bindings(self._bind(given), {}, {}, False)
        marks = tuple(map(mark_of, constant))
        held = self._packed.get(marks)
        if held is None or not held[1].is_current(given):
            if self._queue and self._queue.is_capturing():
                # Packed whenever the graph runs, in memory of the graph's.
                return Bindings(self._bind(given), {}, {}, False)
            self._drop()
            storages = tuple(StorageWeakRef(each.untyped_storage()) for each in constant)
            bound = self._bind(given)
            copied = [place for place in self.constant if self._keys[place] not in bound.lent]
            versions = {place: given[place]._version for place in copied}
            held = self._packed[marks] = storages, Bindings(bound, versions, self._told(given, copied), True)
        return held[1]

    @property
    def updates(self) -> bool:
        """Whether the plan has results that it makes of their old values."""
        return bool(self._updated)

    def moved(self, given: Tensors) -> dict[int, TensorSpec | Dense]:
        """The places of the operands per element that a call copies, since they lie otherwise, and how."""
        pairs = ((place, spec, given[place]) for place, spec in self._per_call.items())
        return {place: spec for place, spec, each in pairs if each.data_ptr() != laid(each, spec).data_ptr()}

    def _told(self, given: Mapping[int, torch.Tensor] | Tensors, packed: Collection[int]) -> dict[int, bytes]:
        """The elements of packed tensors that torch writes without counting."""
        uncounted = (place for place in packed if place in self._uncounted and given[place].is_cpu)
        return {place: content(given[place]) for place in uncounted}

    def _bind(self, given: Sequence[torch.Tensor | None]) -> BoundPlan:
        held = {place: each for place in self.constant if (each := given[place]) is not None}
        pairs = [(each, aligned(each)) for each in held.values()]
        values = {self._keys[place]: made for place, (_, made) in zip(held, pairs, strict=True)}
        for key, (_, axis) in self._joins.items():
            parts = [held[place] for place in self.constant if self._keys[place] == key]
            values[key] = torch.cat([*map(aligned, parts)], axis)
        if not self._joins and all(made.data_ptr() == each.data_ptr() for each, made in pairs):
            return self._compiled.borrow(values)
        return self._compiled.bind(**values)  # nobody else keeps a copy alive

    def _drop(self) -> None:
        """Forgets what was packed of memory that is gone; the oldest, where there is too much of it."""
        gone = [
            marks
            for marks, (storages, *_) in self._packed.items()
            if any(each.expired() for each in storages)
        ]
        for marks in gone or list(self._packed)[: max(0, len(self._packed) - KEPT + 1)]:
            del self._packed[marks]


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
    plan = _plan(operators, tuple(shape), strides, dtype)
    opened, found = _opened(plan, operators), ACCURACY.match(operators)
    accuracy: Accuracy = "default" if found is None else found[1] if found[1].isalpha() else float(found[1])
    if opened is not None:
        with contextlib.suppress(Unsupported):
            return Kernel(plan, _compiled(opened, target, threads, accuracy), _queue(target), operators)
    return Kernel(plan, _compiled(plan, target, threads, accuracy), _queue(target), operators)


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
    plan: FusionPlan, target: str, threads: int | None, accuracy: Accuracy
) -> tuple[CompiledPlan, Packed]:
    return compile_plan(plan, target, threads=threads, accuracy=accuracy), {}


def check_count(
    plan: FusionPlan, wanted: Sequence[str], operands: Tensors, parameters: Sequence[float]
) -> None:
    """Checks that there are as many tensors, by their keys, and numbers as the plan takes.

    Raises:
        ArgumentError: there are not; the message lists the keys.
    """
    if len(operands) != len(wanted):
        told = f"`{plan}` takes {counted(len(wanted), 'tensor')} besides src ({', '.join(wanted)})"
        raise ArgumentError(f"{told}, got {len(operands)}")
    numbers = [each.key for each in plan.parameters]
    if parameters and len(parameters) != len(numbers):
        told = f"`{plan}` takes {counted(len(numbers), 'parameter')} ({', '.join(numbers)}), or none"
        raise ArgumentError(f"{told}, got {len(parameters)}")
