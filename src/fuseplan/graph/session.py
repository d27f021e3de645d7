"""A graph that runs: plans compiled and bound once, memory planned once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fuseplan.compile import CompiledPlan
from fuseplan.errors import ArgumentError
from fuseplan.execution.open_run import OpenBoundPlan
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.evaluate import check_inputs
from fuseplan.graph.graph import Graph
from fuseplan.graph.memory import plan
from fuseplan.graph.op import Tensor
from fuseplan.graph.packed import Packs
from fuseplan.graph.place import Call, Compute, Copy, Held, Launch, Placed, Step, made_by, place
from fuseplan.graph.room import Live, Room
from fuseplan.graph.schedule import Unit, schedule
from fuseplan.graph.type import type_of
from fuseplan.graph.write import Late, names_in
from fuseplan.kernels.target import Target
from fuseplan.system.locks import Lock

Action = Callable[[Live], object]


class Library(Protocol):
    """What runs another library's operators."""

    def prepare(self, graph: Graph, unit: Unit) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A function of the unit's `reads` that gives its `writes`."""


class Session:
    """A cut graph, ready to run.

    Attributes:
        placement: the steps of a run, and the buffers.
        compiled: the compiled plan of each site, in order.
        arena_bytes: memory for all values of a run that plans and NumPy make.

    Args:
        libraries: what runs the operators of other libraries, by the library's word.
        release: called when constants were packed: they are not needed for long.
        packs: what other sessions have packed, of plans that serve every batch.
        room: where the values are; in host memory unless given.

    Any number of threads may call; one runs at a time, since all runs use the same memory.
    """

    def __init__(
        self,
        cut: Cut,
        libraries: Mapping[str, Library] | None = None,
        release: Callable[[], object] = lambda: None,
        packs: Packs | None = None,
        room: Room | None = None,
    ) -> None:
        self.cut, self._libraries, self._release = cut, libraries or {}, release
        self._packs, self._room = packs or Packs(), room or Room()
        self.units = schedule(cut)
        self.placement = place(cut, self.units)
        self.arena_bytes = plan(self.placement.buffers)
        self._room.lay(self.arena_bytes, self.placement.steps)
        self._guard = Lock()
        self._built: dict[Any, CompiledPlan] = {}
        self._lent: list[
            Tensor
        ] = []  # constants that kernels read where they lie: bound plans keep none alive
        self.compiled = [
            self._compiled(each.site) for each in self.placement.steps if isinstance(each, Launch)
        ]
        steps = self.placement.steps
        dropped = self.placement.dropped
        largest = sorted(range(len(steps)), key=lambda index: -_packed(steps[index]))
        actions = {index: self._action(steps[index]) for index in largest}  # packing needs memory besides
        self._actions = [(actions[index], dropped.get(index, ())) for index in range(len(steps))]
        self._outputs = [(name, self._where(name)) for name in cut.graph.outputs]

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the graph; the outputs by name, in memory of their own.

        Raises:
            ArgumentError: an input is missing, unknown, or another tensor.
        """
        check_inputs(self.cut.graph, given)
        with self._guard, self._room.turn():
            live, own = self._room.ran(self._before(given), self._run), self._room.own
            return {name: own(live[name] if where is None else where) for name, where in self._outputs}

    def _before(self, given: Mapping[str, Any]) -> Live:
        """The values before a run."""
        inputs = {name: self._room.entered(name, each) for name, each in given.items()}
        return {**self.cut.graph.constants, **inputs}

    def _run(self, live: Live) -> None:
        for action, dropped in self._actions:
            action(live)
            for name in dropped:
                del live[name]

    def to_host(self, value: Any) -> Any:
        """An output in NumPy."""
        return self._room.to_host(value)

    def steps(self, given: Mapping[str, Any]) -> Iterator[tuple[Step, dict[str, Any]]]:
        """Runs the graph, and gives each step with the values that it makes, in memory of their own.

        Raises:
            ArgumentError: as for a call.
        """
        check_inputs(self.cut.graph, given)
        with self._guard, self._room.turn():
            live, own = self._before(given), self._room.own
            for step, (action, dropped) in zip(self.placement.steps, self._actions, strict=True):
                action(live)
                places = {name: self._where(name) for name in made_by(step)}
                yield (
                    step,
                    {
                        name: self.to_host(own(live[name] if at is None else at))
                        for name, at in places.items()
                    },
                )
                for name in dropped:
                    del live[name]

    def _where(self, name: str) -> Tensor | None:
        placed = self.placement.at.get(name)
        return None if placed is None else self._room.at(placed)

    def _compiled(self, site: Site) -> CompiledPlan:
        key = site.plan, site.built.choice.template
        if key not in self._built:
            self._built[key] = site.compiled()
        return self._built[key]

    def _action(self, step: Step) -> Action:
        """A step as a function of the values that a run holds."""
        if isinstance(step, Launch):
            return self._launch(step)
        if isinstance(step, Copy):
            take, dst, copy = self._taker(step.src), self._room.at(step.dst), self._room.copy
            return lambda live: copy(dst, take(live).reshape(dst.shape))
        if isinstance(step, Compute):
            return self._compute(step)
        return self._call(step)

    def _taker(self, held: Held) -> Callable[[Live], Any]:
        if isinstance(held, Placed):
            tensor = self._room.at(held)
            return lambda live: tensor
        if held in self.cut.graph.constants:
            constant = self._room.from_host(self.cut.graph.constants[held])
            return lambda live: constant
        return lambda live: live.get(held)

    def _host_taker(self, held: Held) -> Callable[[Live], Any]:
        """What gives a value in NumPy."""
        if isinstance(held, str) and held in self.cut.graph.constants:
            constant = self.cut.graph.constants[held]
            return lambda live: constant
        take, to_host = self._taker(held), self._room.to_host
        return lambda live: to_host(take(live))

    def _launch(self, step: Launch) -> Action:
        bound = {key: self._room.at(each) for key, each in step.bound.items()}
        constants = {key: each for key, each in step.site.operands.items() if not names_in(each)}
        shapes = {each.key: each.shape for each in step.site.plan.operands}
        known = self.cut.graph.constants
        fixed = {
            key: self._room.constant(known[each]).reshape(shapes[key])
            for key, each in step.given.items()
            if isinstance(each, str) and each in known
        }
        lent = {
            key: self._room.lying(each, shapes[key])
            for key, each in step.given.items()
            if isinstance(each, Placed)
        }
        bound |= fixed | {key: each for key, each in lent.items() if each is not None}
        compiled = self._compiled(step.site)
        if compiled.plan.is_open:
            call = self._packs.bound(compiled, constants, self._room.constant)
            assert isinstance(call, OpenBoundPlan)  # of such a plan
            call = call.at(step.site.plan.src.shape[:1]).further(bound, borrow=True)
        else:
            bound |= {key: self._room.constant(each) for key, each in constants.items()}
            call = compiled.borrow(bound)
        self._lent += [bound[key] for key in call.lent & bound.keys()]
        self._release()
        src, dst = self._room.at(step.src), self._room.at(step.dst)
        late = {key: each for key, each in step.given.items() if key not in call.lent | fixed.keys()}
        if not late:
            run = self._room.launcher(call, src, dst)
            return lambda live: run()
        given = {key: (self._taker(each), shapes[key]) for key, each in late.items()}
        readable = self._room.readable

        def launch(live: Live) -> None:
            call(
                src, dst, **{key: readable(take(live).reshape(shape)) for key, (take, shape) in given.items()}
            )

        return launch

    def _compute(self, step: Compute) -> Action:
        takers = [self._taker(each) for each in step.inputs]
        outputs = step.node.outputs
        if step.dst is not None:
            write, dst = self._room.writer(step.node.op), self._room.at(step.dst)
            return lambda live: write([take(live) for take in takers], dst)
        evaluate = self._room.evaluator(step.node.op)

        def compute(live: Live) -> None:
            made = evaluate([take(live) for take in takers])
            live.update(zip(outputs, made, strict=False))

        return compute

    def _call(self, step: Call) -> Action:
        library = self._libraries.get(step.unit.library)
        if library is None:
            raise ArgumentError(f"nothing runs the operators of {step.unit.library!r}")
        run = library.prepare(self.cut.graph, step.unit)
        takers, from_host = [self._host_taker(each) for each in step.inputs], self._room.from_host
        names = step.unit.writes
        types = [self.cut.graph.types[name] for name in names]

        def call(live: Live) -> None:
            for name, want, made in zip(names, types, run([take(live) for take in takers]), strict=True):
                if want.shape is not None and type_of(made).shape != want.shape:
                    raise ArgumentError(f"{name} is {type_of(made)}, and the model's shapes make it {want}")
                live[name] = from_host(made)

        return call


def _packed(step: Step) -> int:
    """Elements of constants that are packed for a step."""
    operands = step.site.operands.values() if isinstance(step, Launch) else ()
    return sum(math.prod(each.shape) for each in operands if isinstance(each, np.ndarray | Late))


def room_on(target: Target) -> Room:
    """The memory of a target's device.

    Raises:
        ArgumentError: the target is a kind of GPU, and none of this machine's.
    """
    if not target.processors:
        return Room()
    if target.device is None:
        raise ArgumentError(
            f"{target} is a kind of GPU, for reports alone: a model runs on 'cuda' or 'cuda:1'"
        )
    from fuseplan.graph.device import DeviceRoom  # noqa: PLC0415 - torch is optional

    return DeviceRoom(f"cuda:{target.device}")
