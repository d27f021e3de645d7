"""Code for a CPU in a file: made for every machine of a kind, and loaded without llvmlite."""

from __future__ import annotations

from fuseplan.backends.cpu import loader, runtime
from fuseplan.backends.cpu.backend import Function
from fuseplan.errors import BuildError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import KINDS, Target
from fuseplan.system.locks import loading


def saved(source: Source, code: bytes, target: Target) -> bytes:
    """One object of the kernel and of the threads' runtime, for Linux on x86-64.

    Raises:
        BuildError: the target is another kind of processor, or the toolchain failed.
    """
    if target.name not in loader.FLAGS:
        known = ", ".join(f"cpu:{kind}" for kind in loader.FLAGS)
        raise BuildError(f"code for {target} cannot be saved: saved code is for {known}, on Linux")
    with loading:
        from fuseplan.backends.cpu import toolchain  # noqa: PLC0415 - who loads saved code has no llvmlite

    return toolchain.portable_object(source.text, KINDS[str(target)], runtime.pool_text(native=True))


def loaded(source: Source, code: bytes, target: Target) -> tuple[Target, Function]:
    """The target, and the kernel; the process's threads, if this is the first kernel that it runs.

    Raises:
        BuildError: this machine is of another kind, or the code is broken.
    """
    refusal = loader.refusal(target.name)
    if refusal:
        raise BuildError(f"code for {target} does not run here: {refusal}")
    found = loader.load(code, (source.entry, *runtime.FUNCTIONS))
    runtime.pool(lambda: found)
    return target, Function(found[source.entry], source)
