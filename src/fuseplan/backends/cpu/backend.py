"""The CPU backend as the pipeline sees it; llvmlite is imported when something is built."""

from __future__ import annotations

from fuseplan.backends.backend import Launch
from fuseplan.backends.cpu.templates import TEMPLATES
from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target, host_target
from fuseplan.template import Template


class CpuBackend:
    """Generated LLVM IR, compiled by llvmlite, run on the process's own threads."""

    name = "cpu"
    summary = "LLVM IR generated for the plan, compiled by llvmlite"
    templates: tuple[type[Template], ...] = TEMPLATES

    def fingerprint(self) -> str | None:
        """Versions of llvmlite and LLVM."""
        from fuseplan.backends.cpu import toolchain

        return toolchain.fingerprint()

    def refuses(self, target: Target) -> str | None:
        """Code runs where the processor has every feature that it may use."""
        host = host_target()
        if target.name == host.name:
            return None
        held = set(host.features.split(","))
        lacking = [feature[1:] for feature in target.features.split(",") if feature and feature not in held]
        return f"this processor ({host.cpu}) has no {', '.join(lacking)}" if lacking else None

    def compile_object(self, source: Source, target: Target) -> bytes:
        """Object code for this processor."""
        from fuseplan.backends.cpu import toolchain

        return toolchain.compile_object(source.text)

    def load(self, kernel: Kernel, source: Source, code: bytes) -> int:
        """The address of the kernel's entry."""
        from fuseplan.backends.cpu import toolchain

        return toolchain.load_object(code, [source.entry])[source.entry]

    def launcher(self, address: int, threads: int) -> Launch:
        """One foreign call a launch; the GIL is released meanwhile."""
        from fuseplan.backends.cpu import runtime

        return runtime.pool().launcher(address, threads)
