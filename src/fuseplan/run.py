"""The last stage: tensors into an argument block, and the launch."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from fuseplan.arguments import (
    OUT,
    SRC,
    End,
    Tensor,
    check_apart,
    check_keys,
    dense,
    operand_buffer,
    parameter_value,
    result_buffer,
    want_text,
)
from fuseplan.arrays import Buffer
from fuseplan.backends import backend_of
from fuseplan.backends.backend import Addresses, Block, Loaded, Memory, Packed
from fuseplan.build import Program
from fuseplan.emit import Source
from fuseplan.errors import ArgumentError, counted
from fuseplan.kernel import Kernel
from fuseplan.plan import FusionPlan
from fuseplan.template import NUMPY_COMPUTE, Template
from fuseplan.tensor import TensorSpec

Words = list[tuple[int, int]]  # which slot, and what
Bounds = list[tuple[int, int]]  # first byte, and the one past the last
Given = tuple[Any, Buffer]  # a tensor for a result, and how it lies
Placed = tuple[int, Any, Callable[[Any], tuple[Any, int]] | None]  # its word, the tensor, or what makes one
_Taken = tuple[dict[str, float], Words, list[Packed], dict[str, Buffer]]
NOT_CARRIED = (
    "a compiled plan is code of this process and cannot be pickled or copied: pickle its plan, and compile "
    "that where it is needed; the cache makes that quick"
)
_BITS: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.uint32), "f64": np.dtype(np.uint64)}


class Runner:
    """A program with what every launch of it needs; blocks are kept, so that launching allocates nothing.

    Any number of threads may launch at once: each takes a block of its own.
    """

    def __init__(
        self,
        plan: FusionPlan,
        kernel: Kernel,
        template: Template,
        source: Source,
        loaded: Loaded,
        memory: Memory,
        threads: int,
    ) -> None:
        self.plan, self.kernel, self.template, self.memory = plan, kernel, template, memory
        self.free: list[Block] = []
        self.operands = {operand.key: operand for operand in kernel.operands}
        self.plan_operands = {operand.key: operand for operand in plan.operands}
        self.results = {result.key: result for result in plan.results}
        self.outcome = outcome_of(tuple(self.results))
        self._loaded, self._threads = loaded, threads
        self._places = {(slot.kind, slot.key): index for index, slot in enumerate(source.slots)}

    def place(self, kind: str, key: str = "") -> int | None:
        """Which word of the block a slot is; None where the kernel does not read it."""
        return self._places.get((kind, key))

    def required(self, kind: str, key: str = "") -> int:
        """The word of a slot that the kernel has in any case: `src`, `dst`, or a result."""
        return self._places[kind, key]

    def block(self) -> Block:
        """A new block; it belongs in `free` afterwards."""
        return self._loaded.block(self._threads)

    def read(self, buffers: Mapping[str, Buffer]) -> list[tuple[Tensor, Buffer]]:
        """Operands, by key, each with how it lies."""
        return [(self.plan_operands[key], buffer) for key, buffer in buffers.items()]

    def written(self, given: Mapping[str, Given]) -> list[tuple[Tensor, Buffer]]:
        """Results, by key, each with how its tensor lies."""
        return [(self.results[key], buffer) for key, (_, buffer) in given.items()]

    def packed(self, key: str, buffer: Buffer, *, keep: bool) -> Packed:
        """The operand as the kernel reads it."""
        return self.memory.packed(self.template, self.kernel, self.operands[key], buffer, keep=keep)

    def parameters(self, given: Mapping[str, float]) -> tuple[Words, list[Packed]]:
        """The plan's parameters, but for those given, as the kernel reads them: by pointer or by value."""
        dtype = NUMPY_COMPUTE[self.kernel.compute_dtype]
        listed = [given.get(each.key, each.parameter.value) for each in self.plan.parameters]
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite there
            values = np.array(listed, np.float64).astype(dtype)
        words: Words = []
        keep: list[Packed] = []
        place = self.place("parameters")
        if place is not None:
            keep.append(self.memory.kept(values))
            words.append((place, keep[0].address))
        bits = values.view(_BITS[self.kernel.compute_dtype])
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
    return Runner(plan, kernel, template, program.source, program.loaded, memory, target.threads)


class BoundPlan:
    """A compiled plan with operands packed and kept: what is left to a call is the kernel.

    Made by `CompiledPlan.bind`. Bound operands were copied when they were bound, but for operands per element
    (residuals), which the kernel reads where they lie. Bound results are written by every call. Any number of
    threads may call at once.
    """

    def __init__(self, runner: Runner, values: Mapping[str, Any]) -> None:
        plan = runner.plan
        check_keys(plan, values)
        self._runner, self._free_blocks, self._memory = runner, runner.free, runner.memory
        self._src_word, self._dst_word = runner.required("src"), runner.required("dst")
        self._src_bytes, self._dst_bytes = (spec.span * spec.itemsize for spec in (plan.src, plan.output))
        self._numbers: dict[str, float] = {}
        self._numbers, self._words, self._keep, self._in_place = self._taken(values, keep=True)
        if self._keep:
            self._memory.settle()
        self._makers = {key: self._memory.maker(dense(each)) for key, each in runner.results.items()}
        self._bound = self._given(values)
        self._results, words = self._placed(self._bound)
        self._words += words
        written = runner.written(self._bound)
        check_apart(written, runner.read(self._in_place))
        self._written = [buffer.bounds for _, buffer in written]
        self._held = [*self._written, *(buffer.bounds for buffer in self._in_place.values())]
        needed = (*runner.operands, *(key for key, each in runner.results.items() if each.result.updated))
        self._missing = tuple(key for key in needed if key not in values)
        self._make = self._memory.maker(plan.output)
        self._address: Callable[[Any], int] = _unknown  # of a tensor like the src that passed
        self._addresses: Addresses = _both_unknown  # and of such an out

    @property
    def missing(self) -> tuple[str, ...]:
        """The operands, and the results that are updated, that each call has to give."""
        return self._missing

    def __call__(self, src: Any, out: Any = None, **free: Any) -> Any:
        """Runs the kernel.

        Args:
            src: a tensor of the plan's `src`: a NumPy array, or anything in host memory with DLPack; on
                a GPU a torch tensor there, or anything with DLPack or `__cuda_array_interface__`.
            out: where to write; a new tensor of src's kind unless given.
            **free: operands that were not bound, and operands or parameters to take instead of bound ones;
                tensors for results, which are new ones unless given or bound.

        Returns:
            `out`, or the new tensor, of `plan.output`'s shape and layout. Where the plan has results, a named
            tuple of it, `out`, and of them by their keys.

        Raises:
            ArgumentError: a tensor is missing, is not what the plan takes, or overlaps one that is written.
        """
        if free:
            return self._checked(src, out, free)
        if out is None:
            begin = self._address(src)
            if not begin or (self._written and _meets(begin, begin + self._src_bytes, self._written)):
                return self._checked(src, out, free)
            out, target = self._make(src)
        else:
            begin, target = self._addresses(src, out)
            meet = begin < target + self._dst_bytes and target < begin + self._src_bytes
            if meet or not begin or not target or (self._held and self._hits(begin, target)):
                return self._checked(src, out, free)
        if self._results:
            return self._launch(src, begin, out, target, self._results, [])
        self._run(begin, target)
        return out

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_CARRIED)

    def __repr__(self) -> str:
        missing = f", each call gives {', '.join(self._missing)}" if self._missing else ""
        return f"<bound{missing}: {self._runner.plan}>"

    def _hits(self, src: int, target: int) -> bool:
        """Whether `out` meets a bound tensor that stays put, or src one that is written."""
        if _meets(target, target + self._dst_bytes, self._held):
            return True
        return bool(self._written) and _meets(src, src + self._src_bytes, self._written)

    def _given(self, values: Mapping[str, Any]) -> dict[str, Given]:
        """The tensors given for results, each with how it lies."""
        runner, view = self._runner, self._memory.view
        return {
            key: (values[key], result_buffer(runner.plan, result, values[key], view))
            for key, result in runner.results.items()
            if key in values
        }

    def _placed(self, given: Mapping[str, Given]) -> tuple[list[Placed], Words]:
        """Each result's word, tensor, and what makes one where none is given; the words of given ones."""
        places = {key: self._runner.required("result", key) for key in self._makers}
        results: list[Placed] = [
            (place, given[key][0], None) if key in given else (place, None, self._makers[key])
            for key, place in places.items()
        ]
        return results, [(places[key], buffer.address) for key, (_, buffer) in given.items()]

    def _launch(
        self, src: Any, begin: int, out: Any, target: int, results: list[Placed], words: Words
    ) -> Any:
        """A launch with results: what is given, and new ones in the place of the others."""
        tensors = []
        for place, given, make in results:
            if make is None:
                tensors.append(given)
                continue
            made, address = make(src)
            words.append((place, address))
            tensors.append(made)
        self._run(begin, target, words)
        return self._runner.outcome(out, *tensors)

    def _run(self, src: int, dst: int, words: Words | tuple[()] = ()) -> None:
        try:
            block = self._free_blocks.pop()  # atomic, so two threads never get the same
        except IndexError:
            block = self._runner.block()
        try:
            listed = block.words
            if block.bound is not self:
                for index, word in self._words:
                    listed[index] = word
                block.bound = self
            if words:
                block.bound = None  # the words of one call are nobody's constants
                for index, word in words:
                    listed[index] = word
            listed[self._src_word] = src
            listed[self._dst_word] = dst
            block.launch()
        finally:
            self._free_blocks.append(block)

    def _checked(self, src: Any, out: Any, free: Mapping[str, Any]) -> Any:
        """The call with every check, from scratch; how the tensors that passed look is remembered."""
        plan = self._runner.plan
        check_keys(plan, free)
        read = fitting(self._memory, src, SRC, plan.src)
        missing = [key for key in self._missing if key not in free]
        if missing:
            raise ArgumentError(_missing_text(plan, missing))
        _, words, keep, in_place = self._taken(free)
        result = self._make(src)[0] if out is None else out
        target = fitting(self._memory, result, OUT, plan.output)
        if out is not None and target.readonly:
            raise ArgumentError(OUT, " is read-only: pass an array that may be written")
        given = self._given(free)
        written = self._runner.written(self._bound | given)
        if out is not None:
            written.insert(0, (OUT, target))
        if written:
            runner, view = self._runner, self._memory.view
            named = {
                key: view(free[key], runner.plan_operands[key], in_place=False)
                for key in free
                if key in runner.operands
            }
            check_apart(written, [(SRC, read), *runner.read(self._in_place | named)])
        outcome: Any = result
        if self._results:
            results, places = self._placed(self._bound | given)
            outcome = self._launch(src, read.address, result, target.address, results, words + places)
        else:
            self._run(read.address, target.address, words)
        del keep, in_place  # the packed operands lived until the kernel had read them
        self._remember(src, result)
        return outcome

    def _remember(self, src: Any, out: Any) -> None:
        """Lets calls with tensors that look like these pass by less; not where each call gives operands."""
        if self._missing:
            return
        form, pair = self._memory.form_of(src), self._memory.pair_of(src, out)
        if form is not None and pair is not None:
            self._address, self._addresses = form.address, pair

    def _taken(self, values: Mapping[str, Any], *, keep: bool = False) -> _Taken:
        """Operands and parameters as the kernel reads them: numbers, words, their memory, what stays put."""
        runner = self._runner
        words: Words = []
        held: list[Packed] = []
        in_place: dict[str, Buffer] = {}
        for key, operand in runner.operands.items():
            place = runner.place("operand", key)
            if key not in values or place is None:
                continue
            buffer = operand_buffer(runner.plan, runner.plan_operands[key], values[key], self._memory.view)
            if operand.per == "element":
                in_place[key] = buffer
                words.append((place, buffer.address))
                continue
            held.append(runner.packed(key, buffer, keep=keep))
            words.append((place, held[-1].address))
        given = {each.key: values[each.key] for each in runner.plan.parameters if each.key in values}
        numbers = self._numbers | {key: parameter_value(runner.plan, key, given[key]) for key in given}
        if given or keep:
            more, memory = runner.parameters(numbers)
            words += more
            held += memory
        return numbers, words, held, in_place


def _meets(begin: int, end: int, held: Bounds) -> bool:
    """Whether what lies from `begin` to `end` meets any of the others."""
    for low, high in held:  # noqa: SIM110, a generator would take as long as all other checks
        if begin < high and low < end:
            return True
    return False


def _unknown(_: Any) -> int:
    return 0


def _both_unknown(_: Any, __: Any, /) -> tuple[int, int]:
    return 0, 0


def fitting(memory: Memory, tensor: Any, end: End, spec: TensorSpec) -> Buffer:
    """The tensor for an end of a plan as a buffer.

    Raises:
        ArgumentError: it is not laid out as the spec says; both are shown.
    """
    buffer = memory.view(tensor, end)
    if buffer.matches(spec):
        return buffer
    own, remedy = "plan.output", "leave it out, and a new one is made"
    if end is SRC:
        own, remedy = "plan.src", "compile a plan for it"
    if buffer.shape == spec.shape and buffer.dtype == spec.dtype:
        remedy = f"the layout differs: copy it into fuseplan.empty({own}), or {remedy}"
    raise ArgumentError(end, f" is not what the plan takes\n  got {buffer.text}; want {spec}\n  {remedy}")


def _missing_text(plan: FusionPlan, missing: list[str]) -> str:
    told = {each.key: (each.step, want_text(each.operand)) for each in plan.operands}
    updated = {each.key: (each.step, f"{dense(each)}, to be updated") for each in plan.results}
    wanted = [
        f"`{key}` of operator {step} ({plan[step].op.name}): {want}"
        for key, (step, want) in (told | updated).items()
        if key in missing
    ]
    what = "operand" if set(missing) <= told.keys() else "tensor"
    return "\n  ".join([f"{counted(len(wanted), what)} missing", *wanted, str(plan)])
