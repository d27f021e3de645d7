"""A program with what every launch of it needs."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fuseplan.backends import backend_of
from fuseplan.backends.backend import Block, Loaded, Memory, Packed
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.extents import OPEN
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arguments import Tensor
from fuseplan.tensors.arrays import Buffer

if TYPE_CHECKING:
    from fuseplan.execution.build import Program
    from fuseplan.kernels.packing import Packing

Words = list[tuple[int, int]]  # which slot, and what
Packings = Mapping[str, "Packing | None"]  # by key; None where the kernel reads the caller's memory
Given = tuple[Any, Buffer]  # a tensor for a result, and how it lies
# Seconds, as they are estimated on one thread, below which further threads cost more than they save: a
# second thread made kernels of 4 us faster, and slowed those of 3 us down, on a Zen 5.
ALONE = 3.2e-6
_BITS: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.uint32), "f64": np.dtype(np.uint64)}


class Runner:
    """A program with what every launch of it needs; blocks are kept, so that launching allocates nothing.

    Any number of threads may launch at once: each takes a block of its own.
    """

    def __init__(
        self,
        plan: FusionPlan,
        operands: Packings,
        source: Source,
        loaded: Loaded,
        memory: Memory,
        threads: int,
        extent: int | None = None,
    ) -> None:
        self.plan, self.operands, self.memory = plan, operands, memory
        self.free: list[Block] = []
        self.plan_operands = {operand.key: operand for operand in plan.operands}
        self.results = {result.key: result for result in plan.results}
        self.views = tuple(plan.views.values())
        self._outcome = outcome_of((*self.results, *plan.views))
        self._loaded, self._threads, self._source = loaded, threads, source
        self._places = {(slot.kind, slot.key): index for index, slot in enumerate(source.slots)}

        place = self.place("extent")
        self.extent: Words = [] if extent is None or place is None else [(place, extent)]

    def at(self, extents: tuple[int, ...]) -> Runner:
        """What launches the program of an open plan for one extent of each open axis.

        Raises:
            PlanError: no tensor is so large.
        """
        plan, extent = self.plan.with_extents(*extents), prod(extents)
        source = self._source.at(extent)
        operands = {
            key: packing and (packing.at(extent) if OPEN in self.plan_operands[key].shape else packing)
            for key, packing in self.operands.items()
        }
        loaded = self._loaded.at(source, extent)
        return Runner(plan, operands, source, loaded, self.memory, self._threads, extent)

    def outcome(self, out: Any, *results: Any) -> Any:
        """What a call gives: the output, or a named tuple of it, the results and its views."""
        if not (self.results or self.views):
            return out
        return self._outcome(out, *results, *(out[index] for index in self.views))

    def place(self, kind: str, key: str = "") -> int | None:
        """Which word of the block a slot is; None where the kernel does not read it."""
        return self._places.get((kind, key))

    def required(self, kind: str, key: str = "") -> int:
        """The word of a slot that the kernel has in any case: `src`, `dst`, or a result."""
        return self._places[kind, key]

    def block(self) -> Block:
        """A new block; it belongs in `free` afterwards."""
        return self._loaded.block(self._threads)

    def fixed(self, words: Words, held: object) -> Callable[[], None] | None:
        """A launch whose words never change; None where blocks that launches share cost as little.

        It keeps alive what `held` is: the memory that the words name.
        """
        return self._loaded.fixed(words, held)

    def read(self, buffers: Mapping[str, Buffer]) -> list[tuple[Tensor, Buffer]]:
        """Operands, by key, each with how it lies."""
        return [(self.plan_operands[key], buffer) for key, buffer in buffers.items()]

    def written(self, given: Mapping[str, Given]) -> list[tuple[Tensor, Buffer]]:
        """Results, by key, each with how its tensor lies."""
        return [(self.results[key], buffer) for key, (_, buffer) in given.items()]

    def parameters(self, given: Mapping[str, float]) -> tuple[Words, list[Packed]]:
        """The plan's parameters, but for those given, as the kernel reads them: by pointer or by value."""
        dtype = dtype_of(self.plan.compute_dtype).array
        listed = [given.get(each.key, each.value) for each in self.plan.parameters]
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite there
            values = np.array(listed, np.float64).astype(dtype)
        words: Words = []
        keep: list[Packed] = []
        place = self.place("parameters")
        if place is not None:
            keep.append(self.memory.kept(values))
            words.append((place, keep[0].address))
        bits = values.view(_BITS[self.plan.compute_dtype])
        for each, word in zip(self.plan.parameters, bits, strict=True):
            place = self.place("parameter", each.key)
            if place is not None:
                words.append((place, int(word)))
        return words, keep


@functools.cache
def outcome_of(results: tuple[str, ...]) -> Callable[..., Any]:
    """The named tuple of `out` and of the results of those keys; it is pickled by them."""
    fields = namedtuple("Outcome", ("out", *results))  # type: ignore[misc]
    own = {"__slots__": (), "__reduce__": lambda outcome: (_outcome, (results, tuple(outcome)))}
    return type("Outcome", (fields,), own)


def _outcome(results: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return outcome_of(results)(*values)


def runner_of(plan: FusionPlan, kernel: Kernel, template: Template, program: Program) -> Runner | None:
    """What launches a program; None where it does not run on this machine."""
    if program.loaded is None:
        return None
    target = program.target
    memory = backend_of(target.backend).memory(target)
    operands = packings_of(kernel, template, target)
    alone = replace(target, threads=1)
    is_brief = kernel.open_axis is None and template.seconds(kernel, alone) < ALONE
    threads = 1 if is_brief else target.threads
    return Runner(plan, operands, program.source, program.loaded, memory, threads)


def packings_of(kernel: Kernel, template: Template, target: Target) -> Packings:
    """How a template's kernel reads each operand."""
    return {
        operand.key: _packing(kernel, template, target, operand) if operand.packed else None
        for operand in kernel.operands
    }


def _packing(kernel: Kernel, template: Template, target: Target, operand: KernelOperand) -> Packing:
    """How the kernel reads the tensor that the caller gives."""
    packing = template.packing(kernel, target, operand)
    if operand.given:
        return packing.behind(operand.given)
    return packing.after(operand.order) if operand.order else packing
