"""The CPU backend as the pipeline sees it; llvmlite is imported when something is built."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fuseplan.backends.backend import Backend
from fuseplan.backends.host import HostMemory
from fuseplan.errors import BuildError
from fuseplan.kernels.emit import FIRST_SLOT, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import KINDS, Target, host_target
from fuseplan.kernels.template import Template
from fuseplan.system.locks import Late, cached_property
from fuseplan.tensors.arrays import address_of, lasting_bytes

if TYPE_CHECKING:
    from fuseplan.backends.cpu import copying, loader, runtime, toolchain
    from fuseplan.backends.cpu.templates import order
else:
    copying = Late("fuseplan.backends.cpu.copying")
    loader = Late("fuseplan.backends.cpu.loader")
    runtime = Late("fuseplan.backends.cpu.runtime")
    order = Late("fuseplan.backends.cpu.templates.order")
    toolchain = Late("fuseplan.backends.cpu.toolchain")


class Function:
    """A kernel at an address."""

    def __init__(self, address: int, source: Source) -> None:
        self.address, self.source = address, source

    def block(self, threads: int) -> FunctionBlock:
        """Counters, words and a workspace for so many threads."""
        return FunctionBlock(self, threads)

    def fixed(self, words: object, held: object) -> None:
        """None: a block has a workspace, which launches share, and words that stay cost nothing."""

    def at(self, source: Source, extent: int) -> Function:
        """The entry with the workspace of launches on one extent."""
        return Function(self.address, source)


class FunctionBlock:
    """The argument block of docs/design/0001-records.md, and its workspace.

    Attributes:
        words: its words after the counters.
        bound: whose constant words it holds.
        launch: one foreign call; the GIL is released meanwhile.
    """

    __slots__ = ("_storage", "_workspace", "bound", "launch", "words")

    def __init__(self, function: Function, threads: int) -> None:
        slots = function.source.slots
        self._storage = (ctypes.c_int64 * (FIRST_SLOT + len(slots)))()
        self.words: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * len(slots)).from_buffer(
            self._storage, 8 * FIRST_SLOT
        )
        self.bound: object = None
        self._workspace = lasting_bytes(function.source.workspace(threads))
        for index, slot in enumerate(slots):
            if slot.kind == "workspace":
                self.words[index] = address_of(self._workspace)
        launcher = runtime.pool().launcher(function.address, threads)
        self.launch: Callable[[], None] = partial(launcher, ctypes.addressof(self._storage))


class CpuBackend(Backend):
    """Generated LLVM IR, compiled by llvmlite, run on the process's own threads."""

    name = "cpu"
    summary = "LLVM IR generated for the plan, compiled by llvmlite"

    @cached_property
    def templates(self) -> tuple[type[Template], ...]:
        return order.TEMPLATES

    def fingerprint(self) -> str | None:
        return toolchain.fingerprint()

    def refuses(self, target: Target) -> str | None:
        """Code runs where the processor has every feature that it may use."""
        host = host_target()
        if target.name == host.name:
            return None
        held = set(host.features.split(","))
        lacking = [feature[1:] for feature in target.features.split(",") if feature and feature not in held]
        return f"this processor ({host.cpu}) has no {', '.join(lacking)}" if lacking else None

    def compile_object(self, source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        return toolchain.compile_object(source.text)

    def listings(self, target: Target) -> tuple[str, ...]:
        return ("asm",)

    def listing(self, kind: str, source: Source, kernel: Kernel, template: Template, target: Target) -> str:
        """The assembly for the target's processor, whichever this machine has."""
        triple = None if target.is_host else toolchain.triple_of(target)
        return toolchain.assembly(source.text, triple=triple, cpu=target.cpu, features=target.features)

    def load(self, kernel: Kernel, source: Source, code: bytes, target: Target) -> Function:
        return Function(toolchain.load_object(code, [source.entry])[source.entry], source)

    def saved(self, source: Source, code: bytes, target: Target) -> bytes:
        """One object of the kernel and of the threads' runtime, for Linux on x86-64."""
        if target.name not in loader.FLAGS:
            known = ", ".join(f"cpu:{kind}" for kind in loader.FLAGS)
            raise BuildError(f"code for {target} cannot be saved: saved code is for {known}, on Linux")
        return toolchain.portable_object(source.text, KINDS[str(target)], runtime.pool_text(native=True))

    def loaded(self, source: Source, code: bytes, target: Target) -> tuple[Target, Function]:
        """The kernel, and the process's threads, if this is the first kernel that it runs."""
        refusal = loader.refusal(target.name)
        if refusal:
            raise BuildError(f"code for {target} does not run here: {refusal}")
        found = loader.load(code, (source.entry, *runtime.FUNCTIONS))
        runtime.pool(lambda: found)
        return target, Function(found[source.entry], source)

    def memory(self, target: Target) -> HostMemory:
        return HostMemory(_copier)


def _copier(shape: Sequence[int], steps: Sequence[int], itemsize: int) -> Callable[[int, int], None] | None:
    """As `copying` gives it; None where llvmlite is not installed, which a plan from a file needs not."""
    try:
        return copying.copier(shape, steps, itemsize)
    except ImportError:
        return None
