"""The toolchain as the backend sees it; neither importing it nor telling its version imports triton."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.assembler import assembler
from fuseplan.backends.triton.signature import types_of
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.emit import Source
from fuseplan.errors import BuildError
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.template import Template

WANTED = "3.6.0"  # the version that the templates' text is written for and tested with
REMEDY = "pip install 'fuseplan[triton]'"


def fingerprint() -> str | None:
    """Triton's version and the assembler: what else the code depends on. None without Triton.

    The version is read from the package's text: importing it takes 0.3 s, its metadata 20 ms, this 2 ms.

    Raises:
        ArgumentError: the setting FUSEPLAN_PTXAS names no assembler.
    """
    package = _package()
    version = None if package is None else _version(package)
    if package is None or version is None:
        return None
    try:
        return f"triton {version}, {assembler(package)}"
    except BuildError:
        return None


@functools.cache
def _version(package: Path) -> str | None:
    try:
        head = (package / "__init__.py").read_text()[:4096]
    except OSError:
        return None
    version = re.search(r"""^__version__ = ["']([^"']+)["']""", head, re.MULTILINE)
    return version[1] if version else None


@functools.cache
def _package() -> Path | None:
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


def compile_object(source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
    """A source's artifact, packed.

    Raises:
        BuildError: triton is missing or another version, or refuses the source.
    """
    types = types_of(source, kernel, _gpu(template))
    check_installed()
    from fuseplan.backends.triton.compiler import compile_source

    return compile_source(source, types, target).pack()


def compile_all(
    pairs: Sequence[tuple[Kernel, Template]], target: Target, *, workers: int, seconds: float = 120.0
) -> Iterator[tuple[Source, bytes | BuildError]]:
    """The source of each kernel by its template and the packed artifact or why there is none, in order.

    Compilers run in `workers` processes of their own: one that crashes, or takes more than `seconds` for a
    kernel, is an error of that kernel and ends nothing else.

    Raises:
        BuildError: triton is missing, or another version.
    """
    from fuseplan.backends.triton.pool import compile_many
    from fuseplan.backends.triton.worker import Job

    check_installed()
    sources: list[Source] = []

    def jobs() -> Iterator[Job]:  # each is sent off as soon as its source is written
        for kernel, template in pairs:
            sources.append(template.emit(kernel, target))
            yield Job(sources[-1], types_of(sources[-1], kernel, _gpu(template)), target)

    for place, result in enumerate(compile_many(jobs(), workers=workers, seconds=seconds)):
        yield sources[place], result


def _gpu(template: Template) -> GpuTemplate:
    if not isinstance(template, GpuTemplate):
        raise TypeError(f"{template.text} is no template for GPUs")
    return template


def check_installed() -> None:
    """Refuses to go on without the Triton that the templates are written for.

    Raises:
        BuildError: there is none, or another.
    """
    found = fingerprint()
    if found is None:
        raise BuildError(f"compiling for a GPU needs triton {WANTED}, which is not installed: {REMEDY}")
    version = found.split(",")[0].removeprefix("triton ")
    if version.split("+")[0] != WANTED:
        raise BuildError(f"the kernels are written for triton {WANTED}; this is {version}: {REMEDY}")


def resources(code: bytes) -> Mapping[str, int]:
    """What a program of a packed artifact uses.

    Raises:
        BuildError: it is none.
    """
    return Artifact.unpack(code).resources
