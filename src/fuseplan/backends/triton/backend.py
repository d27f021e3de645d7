"""The GPU backend as the pipeline sees it; triton is imported when something is built, torch when it is run.

What it calls of the modules below it:

    toolchain.fingerprint() -> str | None             triton's version, without importing it; None without it
    toolchain.compile_object(source, kernel, template, target) -> bytes
    toolchain.resources(code) -> Mapping[str, int]    read off the artefact
    launch.load(source, code, queue) -> Loaded        `queue` is a `memory.Queue`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fuseplan.backends.backend import Backend, Loaded
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target, gpu_target
from fuseplan.kernels.template import Template
from fuseplan.system.locks import Late, cached_property

if TYPE_CHECKING:
    from fuseplan.backends.triton import launch, memory, toolchain, versions
    from fuseplan.backends.triton.memory import GpuMemory
    from fuseplan.backends.triton.templates import order
else:
    launch = Late("fuseplan.backends.triton.launch")
    memory = Late("fuseplan.backends.triton.memory")
    order = Late("fuseplan.backends.triton.templates.order")
    toolchain = Late("fuseplan.backends.triton.toolchain")
    versions = Late("fuseplan.backends.triton.versions")


class TritonBackend(Backend):
    """Triton text, compiled for any GPU, run on one of this machine's."""

    name = "triton"
    summary = "Triton generated for the plan, for NVIDIA and AMD GPUs"
    compiles_apart = True

    @cached_property
    def templates(self) -> tuple[type[Template], ...]:
        return order.TEMPLATES

    def fingerprint(self) -> str | None:
        return toolchain.fingerprint()

    def refuses(self, target: Target) -> str | None:
        """Code runs on a GPU of its own generation that torch has."""
        if target.device is not None:
            return None
        if target.name.startswith("gfx"):
            return "code for AMD GPUs is compiled to a binary, and fuseplan does not launch it"
        try:
            here = gpu_target()
        except ArgumentError as error:
            return str(error)
        return None if here.name == target.name else f"this machine's GPU ({here.cpu}) is {here}"

    def compiles_for(self, target: Target) -> bool:
        """Triton makes code for any GPU on any machine."""
        return True

    def makes(self, template: Template) -> bool:
        """The choices that the installed version of Triton compiles."""
        version = versions.version_of()
        return version is None or versions.makes(version, template)

    def placed(self, target: Target) -> Target:
        """The target on its own device, or on torch's current one."""
        return target if target.device is not None else replace(target, device=gpu_target().device)

    def compile_object(self, source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        """The binary, and what a launch has to know of it."""
        return toolchain.compile_object(source, kernel, template, target)

    def compile_all(
        self, pairs: Sequence[tuple[Kernel, Template]], target: Target, *, workers: int, seconds: float
    ) -> Iterator[tuple[Source, bytes | BuildError]]:
        """In processes of their own."""
        return toolchain.compile_all(pairs, target, workers=workers, seconds=seconds)

    def resources(self, code: bytes) -> Mapping[str, int]:
        return toolchain.resources(code)

    def listings(self, target: Target) -> tuple[str, ...]:
        return ("asm",) if target.name.startswith("gfx") else ("ptx", "sass")

    def listing(self, kind: str, source: Source, kernel: Kernel, template: Template, target: Target) -> str:
        return toolchain.listing(kind, source, kernel, template, target)

    def load(self, kernel: Kernel, source: Source, code: bytes, target: Target) -> Loaded:
        return launch.load(source, code, memory.queue(_index(target)))

    def loaded(self, source: Source, code: bytes, target: Target) -> tuple[Target, Loaded]:
        """The binary on torch's current GPU."""
        refusal = self.refuses(target)
        if refusal:
            raise BuildError(f"code for {target} does not run here: {refusal}")
        placed = self.placed(target)
        return placed, launch.load(source, code, memory.queue(placed.device or 0))

    def memory(self, target: Target) -> GpuMemory:
        return memory.GpuMemory(memory.queue(_index(target)))


def _index(target: Target) -> int:
    if target.device is None:
        raise ValueError(f"{target} has no device: load and run for the target that `placed` returned")
    return target.device
