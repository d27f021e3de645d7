"""What a backend is to the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.template import Template

Launch = Callable[[int], None]  # runs a loaded kernel on the argument block at an address


class Backend(Protocol):
    """Templates, and the toolchain that makes code of their source; that is imported when first used."""

    @property
    def name(self) -> str:
        """The first word of its targets."""

    @property
    def summary(self) -> str:
        """What it is, in a few words."""

    @property
    def templates(self) -> tuple[type[Template], ...]:
        """Its templates, the best first."""

    def fingerprint(self) -> str | None:
        """The toolchain's versions, part of the cache's key; None where there is no code worth storing."""

    def refuses(self, target: Target) -> str | None:
        """Why code for a target of this backend cannot run on this machine; None if it can."""

    def compile_object(self, source: Source, target: Target) -> bytes:
        """Object code of a source.

        Raises:
            BuildError: the toolchain refuses it.
        """

    def load(self, kernel: Kernel, source: Source, code: bytes) -> int:
        """Loads object code and gives its address; `source` may be without text.

        Raises:
            BuildError: the code is not what this toolchain makes.
        """

    def launcher(self, address: int, threads: int) -> Launch:
        """A callable that runs what was loaded on so many threads, and returns when all is written."""
