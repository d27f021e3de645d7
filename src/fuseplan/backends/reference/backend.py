"""The reference backend's toolchain: there is nothing to compile."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from fuseplan.backends.backend import Backend
from fuseplan.backends.host import HostMemory
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.system.locks import cached_property, loading

if TYPE_CHECKING:
    from fuseplan.backends.reference.interpreter import Interpreter


class Interpretation:
    """A kernel that is interpreted, on one thread."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def block(self, threads: int) -> InterpretedBlock:
        """The words."""
        return InterpretedBlock(self._interpreter)

    def fixed(self, words: object, held: object) -> None:
        """None: to interpret costs far more."""

    def at(self, source: Source, extent: int) -> Interpretation:
        """An interpreter of the kernel on that extent."""
        return Interpretation(self._interpreter.at(source, extent))


class InterpretedBlock:
    """The words of one interpretation.

    Attributes:
        words: one a slot.
        bound: whose constant words they are.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self.words: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * len(interpreter.slots))()
        self.bound: object = None
        self._interpreter = interpreter

    def launch(self) -> None:
        """Computes and writes dst."""
        self._interpreter(self.words)


class ReferenceBackend(Backend):
    """Every kernel, interpreted."""

    name = "reference"
    summary = "NumPy in float64: the slow right answer"

    @cached_property
    def templates(self) -> tuple[type[Template], ...]:
        """The one there is."""
        with loading:
            from fuseplan.backends.reference.template import Interpreted

        return (Interpreted,)

    def compile_object(self, source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        return b""

    def load(self, kernel: Kernel, source: Source, code: bytes, target: Target) -> Interpretation:
        with loading:
            from fuseplan.backends.reference.interpreter import Interpreter

        return Interpretation(Interpreter(kernel, source))

    def memory(self, target: Target) -> HostMemory:
        return HostMemory()
