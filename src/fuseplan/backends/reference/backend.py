"""The reference backend's toolchain: there is nothing to compile."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fuseplan.backends.backend import one_by_one
from fuseplan.backends.host import HostMemory
from fuseplan.errors import BuildError
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


class ReferenceBackend:
    """Every kernel, interpreted."""

    name = "reference"
    summary = "NumPy in float64: the slow right answer"

    @cached_property
    def templates(self) -> tuple[type[Template], ...]:
        """The one there is."""
        with loading:
            from fuseplan.backends.reference.template import Interpreted

        return (Interpreted,)

    def fingerprint(self) -> str | None:
        """None: there is no object code."""
        return None

    def refuses(self, target: Target) -> str | None:
        """It runs everywhere."""
        return None

    def compile_object(self, source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        """Nothing."""
        return b""

    def compile_all(
        self, pairs: Sequence[tuple[Kernel, Template]], target: Target, *, workers: int, seconds: float
    ) -> Iterator[tuple[Source, bytes | BuildError]]:
        """One after the other, in this process."""
        return one_by_one(self, pairs, target)

    def compiles_for(self, target: Target) -> bool:
        """There is nothing to make."""
        return False

    def makes(self, template: Template) -> bool:
        """Every choice."""
        return True

    def placed(self, target: Target) -> Target:
        """The target."""
        return target

    def resources(self, code: bytes) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def listings(self, target: Target) -> tuple[str, ...]:
        """None: NumPy interprets the plan."""
        return ()

    def listing(self, kind: str, source: Source, kernel: Kernel, template: Template, target: Target) -> str:
        """Nothing: `listings` names no kind."""
        raise ValueError(kind)

    def load(self, kernel: Kernel, source: Source, code: bytes, target: Target) -> Interpretation:
        """An interpreter of the kernel."""
        with loading:
            from fuseplan.backends.reference.interpreter import Interpreter

        return Interpretation(Interpreter(kernel, source))

    def memory(self, target: Target) -> HostMemory:
        """The process's own."""
        return HostMemory()
