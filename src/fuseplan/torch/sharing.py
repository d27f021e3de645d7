"""Plans on tensors that several processes share: how `torch.ops.fuseplan.run` takes DTensors.

Along an axis of the mesh, each process computes the whole plan; or its share of an axis that no operator sums
over; or its share of a product's features; or partial sums over its share of the channels. The way that moves
the fewest bytes between processes is taken, and tensors that lie otherwise are redistributed before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fuseplan.errors import ArgumentError, PlanError
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.parts import Split
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.messages.excerpt import ARROW
from fuseplan.op import Elementwise, Op
from fuseplan.ops.affine import Add, Bias
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Product
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.parts import Parted
from fuseplan.ops.windows import Windowed
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.plans.text import operator_text
from fuseplan.torch.kernels import NAME
from fuseplan.torch.texts import JOINS, NAMED, check_count, given_of, keys_of, plan_on

Places = tuple[Placement, ...]  # of one tensor along each axis of the mesh; or of each tensor along one
WHOLE, SUMMED = Replicate(), Partial()
KEPT = ("row", "cell")  # normalizations whose numbers belong to places along the axes that are not reduced


class _Apart(Exception):  # noqa: N818 - an answer: this way is none
    """An operator needs elements of the axis that another process has."""


@dataclass(frozen=True)
class Way:
    """How processes along one axis of the mesh compute a plan.

    Attributes:
        plan: that each of them runs.
        given: how src and the other tensors that a call gives are shared out.
        made: how the output and the results are.
    """

    plan: FusionPlan
    given: Places
    made: Places


class _Walk:
    """Follows the axis that is shared out through a plan.

    Args:
        place: how src is shared out.
        keys: of the tensors that a call gives.
        shares: whether the first contraction's features are.
    """

    def __init__(self, count: int, place: Placement, keys: Sequence[str], *, shares: bool = False) -> None:
        self._count, self._place, self._keys, self._shares = count, place, keys, shares
        self._known: dict[str, Placement] = {}
        self._pieces = 1  # of the features, each shared out by itself

    def through(self, plan: FusionPlan) -> Way:
        """The way.

        Raises:
            _Apart: it is none.
            PlanError: its plan is none.
        """
        src = plan.src.with_shape(self._share(plan.src.shape, self._place))
        given = [self._place]
        ops = [self._passed(step) for step in plan.steps]
        if self._shares or self._pieces > 1:
            raise _Apart
        given += [self._known[each.key] for each in given_of(plan)]
        made = (self._place, *(self._known[each.key] for each in plan.results))
        local = FusionPlan(src, *ops)
        whole, parts = ([each.src, *given_of(each), each.output, *each.results] for each in (plan, local))
        for one, part, place in zip(whole, parts, (*given, *made), strict=True):
            if part.shape != self._share(one.shape, place):
                raise _Apart
        return Way(local, (given[0], *(self._known[key] for key in self._keys)), made)

    def _share(self, shape: tuple[int, ...], place: Placement) -> tuple[int, ...]:
        """The extents of a process's share."""
        if not isinstance(place, Shard):
            return shape
        if shape[place.dim] % self._count:
            raise _Apart
        return tuple(each // self._count if axis == place.dim else each for axis, each in enumerate(shape))

    def _passed(self, step: Step) -> Op:
        """The operator that each process runs, and how its tensors are shared out."""
        op = step.op
        if isinstance(op, Product | Conv) and (self._shares or self._place != WHOLE):
            return self._contracted(step, op)
        tensors: tuple[Operand | Result, ...] = (*step.operands, *step.results)
        if self._place == WHOLE:
            self._known |= dict.fromkeys((each.key for each in tensors), WHOLE)
        elif self._place == SUMMED:
            if not isinstance(op, Bias | Add) or op.again:
                raise _Apart
            self._known |= dict.fromkeys((each.key for each in tensors), SUMMED)
        else:
            self._known |= {each.key: self._along(each) for each in tensors}
            self._place = Shard(self._followed(step))
        return op

    def _along(self, tensor: Operand | Result) -> Placement:
        """How an operand or a result is shared out that has some of src's axes."""
        is_block = getattr(tensor, "block", 1) > 1 or tensor.per in ("weight", "beside")
        if is_block or getattr(tensor, "updated", False):
            raise _Apart
        axes, axis = tensor.axes, self._place.dim
        return Shard(axes.index(axis)) if axis in axes else WHOLE

    def _followed(self, step: Step) -> int:
        """The axis behind an operator that computes each place along it by itself."""
        op, axis = step.op, int(self._place.dim)
        if self._pieces > 1:
            return self._joined(step, axis)
        if any(self._known.get(name) != self._place for name in op.again.values()):
            raise _Apart
        if isinstance(op, Normalization):
            is_free = op.per in KEPT and axis not in op.over(step.src)
            is_free = is_free and all(axis in each.axes for each in step.results)
        elif isinstance(op, Windowed):  # a pool
            is_free = axis in step.src.canonical_order[:2]
        else:
            is_apart = isinstance(op, Parted) and op.split(step.src).axis == axis
            is_free = isinstance(op, Elementwise) and not is_apart
        if not is_free:
            raise _Apart
        return axis - sum(each < axis for each in op.removes(step.src))

    def _joined(self, step: Step, axis: int) -> int:
        """The axis behind an operator on the features of several products, each of which is shared out."""
        op = step.op
        split = op.split(step.src) if isinstance(op, Parted) else None
        is_whole = split == Split(axis, step.src.shape[axis] // self._pieces, self._pieces, 1)
        is_alike = all(self._keys.count(each.key) == self._pieces for each in step.operands) and not op.again
        is_free = isinstance(op, Elementwise) and not op.has_parts and not op.results_made
        if not is_alike or not (is_free or is_whole):
            raise _Apart
        self._pieces = 1 if is_whole else self._pieces
        return axis

    def _contracted(self, step: Step, op: Product | Conv) -> Op:
        """A contraction; the features or the channels of its weight may be shared out."""
        batch, channels = step.src.canonical_order[0], step.src.channel_axis
        key = step.keys["weight"]
        outer = 0 if isinstance(op, Conv) or op.transposed else 1
        is_apart = op.batched if isinstance(op, Product) else op.groups > 1
        pieces = self._keys.count(key)
        if self._place == WHOLE and not is_apart and op.features % (pieces * self._count) == 0:
            self._pieces = pieces
            self._shares, self._place, self._known[key] = False, Shard(channels), Shard(outer)
            return cast(Op, replace(cast(Any, op), features=op.features // self._count))
        if self._place == Shard(channels) and not is_apart:
            self._place, self._known[key] = SUMMED, Shard(1 - outer)
            return op
        is_row = isinstance(op, Product) and not op.batched and self._place != Shard(channels)
        if not isinstance(self._place, Shard) or not (is_row or self._place == Shard(batch)):
            raise _Apart
        self._known[key] = WHOLE
        return op


def ways(plan: FusionPlan, count: int, operators: str = "") -> Iterator[Way]:
    """The ways for processes along one axis of the mesh; the first is that each computes the whole plan.

    Args:
        operators: the text that tells which operands are given in several tensors.
    """
    keys = keys_of(operators, plan)
    places = (WHOLE, *map(Shard, range(plan.src.rank)))
    for walk in (*(_Walk(count, place, keys) for place in places), _Walk(count, WHOLE, keys, shares=True)):
        try:
            yield walk.through(plan)
        except (_Apart, PlanError):
            continue


def _moved(have: Placement, want: Placement, count: int) -> float:
    """The share of a tensor's bytes that its redistribution moves."""
    if have == want or isinstance(have, Replicate):
        return 0.0
    if isinstance(have, Partial):
        return 2.0 if want == WHOLE else 1.0
    return math.inf if want == SUMMED else 1.0 if want == WHOLE else 1 / count


@functools.lru_cache(maxsize=4096)
def _best(
    operators: str, plan: FusionPlan, have: tuple[Places, ...], sizes: tuple[int, ...]
) -> tuple[str, list[Places], list[Places]]:
    """The operators that each process runs; how the tensors of a call, and what it makes, are shared out."""
    keys, sizes_of = keys_of(operators, plan), {each.key: math.prod(each.shape) for each in given_of(plan)}
    weights = [math.prod(plan.src.shape), *(sizes_of[key] / keys.count(key) for key in keys)]
    taken = []
    for axis, count in enumerate(sizes):
        found = [*ways(plan, count, operators)]
        costs = [
            sum(
                weight * _moved(places[axis], want, count)
                for weight, places, want in zip(weights, have, each.given, strict=True)
            )
            for each in found
        ]
        taken.append(found[costs.index(min(costs))])
        plan = taken[-1].plan
    front, bar, told = operators.rpartition(JOINS)
    named = NAMED.match(told)
    text = f" {ARROW} ".join(operator_text(op) for op in plan.ops)
    given, made = (
        [*zip(*(getattr(each, name) for each in taken), strict=True)] for name in ("given", "made")
    )
    return f"{front}{bar}{named[0] if named else ''}{text}", given, made


def _shared(_: type, run: Any, types: Any, args: Any, kwargs: Any = None) -> list[torch.Tensor]:
    """The operator on DTensors of one mesh: each process runs a plan on its shares.

    Raises:
        ArgumentError: a tensor is no DTensor, or of another mesh.
    """
    operators, src, given, parameters = args
    tensors = (src, *given)
    meshes = {each.device_mesh if isinstance(each, DTensor) else None for each in tensors}
    if None in meshes or len(meshes) > 1:
        told = "a plan takes DTensors of one mesh, or torch's tensors: distribute the others too"
        raise ArgumentError(f"{told}; torch.distributed.tensor.distribute_module does a module's parameters")
    plan, mesh = plan_on(operators, src), src.device_mesh
    check_count(plan, keys_of(operators, plan), given, parameters)
    have = tuple(each.placements for each in tensors)
    text, wanted, made = _best(operators, plan, have, tuple(mesh.shape))
    with torch.no_grad():
        shares = [_share(each, want) for each, want in zip(tensors, wanted, strict=True)]
        found = run(text, shares[0], shares[1:], parameters)
        specs: list[TensorSpec | Dense] = [plan.output, *(each.spec for each in plan.results)]
        return [
            DTensor.from_local(
                each, mesh, places, run_check=False, shape=torch.Size(spec.shape), stride=spec.element_strides
            )
            for each, places, spec in zip(found, made, specs, strict=True)
        ]


def _share(tensor: DTensor, want: Places) -> torch.Tensor:
    """What a process has of a tensor; of a whole one that is to be summed, an equal part."""
    pairs = [*zip(tensor.placements, want, strict=True)]
    parts = [
        count
        for count, (have, place) in zip(tensor.device_mesh.shape, pairs, strict=True)
        if have == WHOLE and place == SUMMED
    ]
    places = [WHOLE if pair == (WHOLE, SUMMED) else pair[1] for pair in pairs]
    # A result with gradients is detached in place, and torch 2.11 has no rule for that on DTensors.
    share: torch.Tensor = tensor.detach().redistribute(placements=places).to_local()
    return share / math.prod(parts) if parts else share


torch.library.register_torch_dispatch(NAME, DTensor, _shared)
