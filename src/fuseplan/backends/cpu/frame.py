"""The part that every CPU kernel has: its entry, its pointers, and phases of tasks that threads share out."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64, PTR, Module
from fuseplan.backends.cpu.phases import PATIENCE, PHASES, YIELD, YIELD_DECLARATION, relax
from fuseplan.backends.cpu.storage import COMPUTED
from fuseplan.kernels.emit import FIRST_SLOT, Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template, lanes

ENTRY = "kernel"
_WIDEST = 64  # bytes of a vector of AVX-512
_MACHINE = {"neon": "aarch64", **dict.fromkeys(("avx2", "avx512", "avx512bf16", "amx"), "x86_64")}
_FROM_END = 2**32  # what a task from the end adds to the word that counts a phase's tasks
_CALLERS_ALIGNMENT = 16  # bytes: of the stack, by the x86-64 convention of calls


class Frame:
    """A kernel being written: `body` is its builder, `pointer(...)` what its slots hold.

    `kernel` is the computation with the value of the extent's slot in the place of an open extent.

    The entry loads the pointers and passes them to a second function, whose pointer parameters are declared
    not to alias, so LLVM may keep loads of operands out of loops that store.

    Args:
        choice: the template with its knobs; the text begins with its name and what it does.
        kernel: the computation, as the template sees it.
        workspace: whether the kernel has one.
        planned: the kernel as the plan says it, for the text's head, where that is another.
    """

    def __init__(
        self,
        choice: Template,
        kernel: Kernel,
        target: Target,
        *,
        workspace: bool,
        planned: Kernel | None = None,
    ) -> None:
        self.target, self.slots = target, _slots(kernel, workspace=workspace)
        described = (type(choice).__doc__ or "").partition("\n")[0]
        self.header = [choice.text, described, *(planned or kernel).text.splitlines()]
        self.lanes = lanes(kernel, target)
        self.element = COMPUTED[kernel.compute_dtype]
        # LLVM has no instructions for vectors that are wider than those that the attributes tell.
        is_narrowed = "+avx512f" in target.features and target.vector_bytes < _WIDEST
        self.module = Module(attributes(target), "" if is_narrowed else target.features)
        self._phases = 0
        self._names = [slot.key or slot.kind for slot in self.slots]
        parameters = [
            (PTR, "args"),
            (I64, "thread"),
            (I64, "threads"),
            *((_type(slot), name) for slot, name in zip(self.slots, self._names, strict=True)),
        ]
        self.body = self.builder("body", parameters, noalias=not kernel.overwrites)
        self.args, self.thread, self.threads = self.body.parameters[:3]
        self._pointers = dict(zip(self.slots, self.body.parameters[3:], strict=True))
        is_open = kernel.open_axis is not None
        self.kernel = kernel.with_extent(self.pointer("extent")) if is_open else kernel

    def builder(self, name: str, parameters: list[tuple[str, str]], *, noalias: bool = True) -> Builder:
        """A further function of the module, private to it."""
        return Builder(
            self.module,
            name,
            parameters,
            element=self.element,
            lanes=self.lanes,
            linkage="internal",
            noalias=noalias,
        )

    def pointer(self, kind: str, key: str = "") -> Value:
        """The address that a slot holds."""
        return self._pointers[Slot(kind, key)]

    @property
    def operand_pointers(self) -> dict[str, Value]:
        """The addresses of operands and results by key, and of `parameters`."""
        kinds = ("operand", "result", "parameters")
        return {slot.key or slot.kind: self._pointers[slot] for slot in self.slots if slot.kind in kinds}

    @contextmanager
    def tasks(self, count: Index) -> Iterator[Value]:
        """One phase: its block runs once for each task 0..count-1, on whichever thread takes it first.

        Even threads take tasks from the front and odd ones from the end, so that of two threads each finds
        in its own caches what it wrote for the same lines in the plan before. A depthwise kernel of 384
        channels at 14x14 took 28 us in MobileNetV2 on two cores of a Xeon, more than on one, and takes 18.
        One word counts both, the end's tasks in its upper half.
        """
        b, phase = self.body, self._phases
        if phase == PHASES:
            raise ValueError(f"a kernel has at most {PHASES} phases")
        self._phases += 1
        tag, total = b.fresh(f"phase{phase}"), b.const(count, I64)
        next_task, finished = b.at(self.args, phase, I64), b.at(self.args, PHASES + phase, I64)
        is_odd = self._is_odd()
        step = b.select(is_odd, _FROM_END, b.const(1, I64))
        b.line(f"br label %{tag}.take")
        b.label(f"{tag}.take")
        taken = b.op(I64, f"atomicrmw add ptr {next_task.name}, i64 {step.name} monotonic", "taken")
        front, end = taken % _FROM_END, taken // _FROM_END
        more = b.compare("slt", front + end, total)
        task = b.select(is_odd, total - end - 1, front)
        b.line(f"br i1 {more.name}, label %{tag}.run, label %{tag}.end")
        b.label(f"{tag}.run")
        yield task
        b.op(I64, f"atomicrmw add ptr {finished.name}, i64 1 release")
        b.line(f"br label %{tag}.take")
        b.label(f"{tag}.end")

    def _is_odd(self) -> Value:
        return self.body.compare("eq", self.thread % 2, 1)

    def following(self, task: Value, count: int) -> Value:
        """The task that a thread takes next in the phase, if all advance alike."""
        b, step = self.body, (self.threads + 1) // 2
        earlier = b.select(b.compare("slt", task, step), b.const(0, I64), task - step)
        return b.select(self._is_odd(), earlier, b.smaller(task + step, count - 1))

    def wait(self, count: Index) -> None:
        """Waits until the phase begun last has finished its `count` tasks and its writes are seen here.

        The thread with the last task may not be running, where there are more threads than processors.
        """
        b, phase = self.body, self._phases - 1
        tag, finished = b.fresh(f"wait{phase}"), b.at(self.args, PHASES + phase, I64)
        pause, declaration = relax(_MACHINE.get(self.target.name, platform.machine()))
        self.module.declarations |= {declaration, YIELD_DECLARATION}
        b.line(f"br label %{tag}.begin")
        b.label(f"{tag}.begin")
        b.line(f"br label %{tag}.look")
        b.label(f"{tag}.look")
        starts = f"[ 0, %{tag}.begin ], [ 0, %{tag}.yield ]"
        b.line(f"%{tag}.pauses = phi i64 {starts}, [ %{tag}.more, %{tag}.pause ]")
        done = b.op(I64, f"load atomic i64, ptr {finished.name} acquire, align 8")
        ready = b.compare("sge", done, b.const(count, I64))
        b.line(f"br i1 {ready.name}, label %{tag}.end, label %{tag}.pause")
        b.label(f"{tag}.pause")
        b.line(pause)
        b.line(f"%{tag}.more = add i64 %{tag}.pauses, 1")
        b.line(f"%{tag}.on = icmp slt i64 %{tag}.more, {PATIENCE}")
        b.line(f"br i1 %{tag}.on, label %{tag}.look, label %{tag}.yield")
        b.label(f"{tag}.yield")
        b.line(YIELD)
        b.line(f"br label %{tag}.look")
        b.label(f"{tag}.end")

    def source(self, *, workspace: int = 0, per_thread: int = 0, per_extent: int = 0) -> Source:
        """Ends the kernel and gives its text; the workspace sizes are bytes."""
        self.body.finish()
        entry = Builder(self.module, ENTRY, [(PTR, "args"), (I64, "thread"), (I64, "threads")], noalias=False)
        args, thread, threads = entry.parameters
        loaded = [
            entry.load(entry.at(args, FIRST_SLOT + i, I64), _type(slot)) for i, slot in enumerate(self.slots)
        ]
        words = "".join(f", {value.type} {value.name}" for value in loaded)
        entry.line(f"call void @body(ptr {args.name}, i64 {thread.name}, i64 {threads.name}{words})")
        entry.finish()
        head = "".join(f"; {line}\n" for line in self.header)
        return Source(
            head + self.module.text(),
            ENTRY,
            self.slots,
            workspace,
            per_thread,
            workspace_bytes_per_extent=per_extent,
        )


def _slots(kernel: Kernel, *, workspace: bool) -> tuple[Slot, ...]:
    """src, dst, operands, results, parameters and workspace, where there are any."""
    listed = [Slot("src"), Slot("dst"), *(Slot("operand", operand.key) for operand in kernel.operands)]
    listed += [Slot("result", output.key) for output in kernel.outputs]
    if kernel.parameters:
        listed.append(Slot("parameters"))
    if workspace:
        listed.append(Slot("workspace"))
    if kernel.open_axis is not None:
        listed.append(Slot("extent"))
    return tuple(listed)


def _type(slot: Slot) -> str:
    return I64 if slot.kind == "extent" else PTR


def attributes(target: Target) -> str:
    """The vectors' width; and that the stack begins at a multiple of it.

    A caller's stack is aligned to 16 bytes. Where spilled vectors of 64 bytes lie across cache lines, a
    convolution of 3 channels took 370 to 438 us in the place of 231 on a Zen 4, as the process's stack lay.
    """
    bits = target.vector_bytes * 8
    width = f'"min-legal-vector-width"="{bits}" "prefer-vector-width"="{bits}" "no-trapping-math"="true"'
    return width if target.vector_bytes <= _CALLERS_ALIGNMENT else f'{width} "stackrealign"'
