"""The reference backend's toolchain: there is nothing to compile."""

from __future__ import annotations

import itertools

from fuseplan.backends.backend import Launch
from fuseplan.backends.reference.interpreter import Interpreter
from fuseplan.backends.reference.template import Interpreted
from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.template import Template


class ReferenceBackend:
    """Every kernel, interpreted."""

    name = "reference"
    summary = "NumPy in float64: the slow right answer"
    templates: tuple[type[Template], ...] = (Interpreted,)

    def __init__(self) -> None:
        self._loaded: dict[int, Interpreter] = {}
        self._numbers = itertools.count(1)

    def fingerprint(self) -> str | None:
        """None: there is no object code."""
        return None

    def refuses(self, target: Target) -> str | None:
        """It runs everywhere."""
        return None

    def compile_object(self, source: Source, target: Target) -> bytes:
        """Nothing."""
        return b""

    def load(self, kernel: Kernel, source: Source, code: bytes) -> int:
        """An interpreter of the kernel; its address is a number that only `launcher` understands."""
        number = next(self._numbers)
        self._loaded[number] = Interpreter(kernel, source)
        return number

    def launcher(self, address: int, threads: int) -> Launch:
        """The interpreter, which has one thread."""
        return self._loaded[address]
