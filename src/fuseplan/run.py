"""The last stage: tensors into an argument block, and the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fuseplan.arguments import check_apart, check_keys, operand_buffer, parameter_value, want_text
from fuseplan.arrays import Buffer
from fuseplan.backends import backend_of
from fuseplan.backends.backend import Addresses, Block, Loaded, Memory, Packed
from fuseplan.build import Program
from fuseplan.emit import Source
from fuseplan.errors import ArgumentError
from fuseplan.kernel import Kernel
from fuseplan.plan import FusionPlan
from fuseplan.template import NUMPY_COMPUTE, Template
from fuseplan.tensor import TensorSpec

Words = list[tuple[int, int]]  # which slot, and what
_Taken = tuple[dict[str, float], Words, list[Packed], dict[str, Buffer]]
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
        self._loaded, self._threads = loaded, threads
        self._places = {(slot.kind, slot.key): index for index, slot in enumerate(source.slots)}

    def place(self, kind: str, key: str = "") -> int | None:
        """Which word of the block a slot is; None where the kernel does not read it."""
        return self._places.get((kind, key))

    def required(self, kind: str) -> int:
        """The word of a slot that every kernel has: `src` or `dst`."""
        return self._places[kind, ""]

    def block(self) -> Block:
        """A new block; it belongs in `free` afterwards."""
        return self._loaded.block(self._threads)

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
    (residuals), which the kernel reads where they lie. Any number of threads may call at once.
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
        self._held = [buffer.bounds for buffer in self._in_place.values()]
        self._missing = tuple(key for key in runner.operands if key not in values)
        self._make = runner.memory.maker(plan.output)
        self._address: Callable[[Any], int] = _unknown  # of a tensor like the src that passed
        self._addresses: Addresses = _both_unknown  # and of such an out

    @property
    def missing(self) -> tuple[str, ...]:
        """The operands that each call has to give."""
        return self._missing

    def __call__(self, src: Any, out: Any = None, **free: Any) -> Any:
        """Runs the kernel.

        Args:
            src: a tensor of the plan's `src`: a NumPy array, or anything in host memory with DLPack; on
                a GPU a torch tensor there, or anything with DLPack or `__cuda_array_interface__`.
            out: where to write; a new tensor of src's kind unless given.
            **free: operands that were not bound, and operands or parameters to take instead of bound ones.

        Returns:
            `out`, or the new tensor, of `plan.output`'s shape and layout.

        Raises:
            ArgumentError: a tensor is missing, is not what the plan takes, or overlaps `out`.
        """
        if free:
            return self._checked(src, out, free)
        if out is None:
            begin = self._address(src)
            if not begin:
                return self._checked(src, out, free)
            out, target = self._make(src)
        else:
            begin, target = self._addresses(src, out)
            meet = begin < target + self._dst_bytes and target < begin + self._src_bytes
            if meet or not begin or not target or (self._held and not self._is_apart(target)):
                return self._checked(src, out, free)
        self._run(begin, target)
        return out

    def _is_apart(self, target: int) -> bool:
        """Whether none of the bound operands that stay put lies between the first and last byte written."""
        end = target + self._dst_bytes
        for low, high in self._held:  # noqa: SIM110, a generator would take as long as all other checks
            if target < high and low < end:
                return False
        return True

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
        read = fitting(self._memory, src, "`src`", plan.src)
        missing = [key for key in self._missing if key not in free]
        if missing:
            raise ArgumentError(_missing_text(plan, missing))
        _, words, keep, in_place = self._taken(free)
        result = self._make(src)[0] if out is None else out
        written = fitting(self._memory, result, "`out`", plan.output)
        if out is not None:
            if written.readonly:
                raise ArgumentError("`out` is read-only: pass an array that may be written")
            view = self._memory.view
            given = {
                key: view(free[key], key, in_place=False) for key in free if key in self._runner.operands
            }
            reads = {f"operand `{key}`": each for key, each in (self._in_place | given).items()}
            check_apart(written, {"`src`": read, **reads})
        self._run(read.address, written.address, words)
        del keep, in_place  # the packed operands lived until the kernel had read them
        self._remember(src, result)
        return result

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


def _unknown(_: Any) -> int:
    return 0


def _both_unknown(_: Any, __: Any, /) -> tuple[int, int]:
    return 0, 0


def fitting(memory: Memory, tensor: Any, what: str, spec: TensorSpec) -> Buffer:
    """The tensor as a buffer.

    Raises:
        ArgumentError: it is not laid out as the spec says; both are shown.
    """
    buffer = memory.view(tensor, what)
    if buffer.matches(spec):
        return buffer
    own, remedy = "plan.output", "leave it out, and a new one is made"
    if what == "`src`":
        own, remedy = "plan.src", "compile a plan for it"
    if buffer.shape == spec.shape and buffer.dtype == spec.dtype:
        remedy = f"the layout differs: copy it into fuseplan.empty({own}), or {remedy}"
    raise ArgumentError(f"{what} is not what the plan takes\n  got {buffer.text}; want {spec}\n  {remedy}")


def _missing_text(plan: FusionPlan, missing: list[str]) -> str:
    wanted = [
        f"`{each.key}` of operator {each.step} ({plan[each.step].op.name}): {want_text(each.operand)}"
        for each in plan.operands
        if each.key in missing
    ]
    return "\n  ".join([f"{len(wanted)} operand{'s' * (len(wanted) > 1)} missing", *wanted, str(plan)])
