"""The toolchain as the backend sees it; neither importing it nor telling its version imports triton."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence

from fuseplan.backends.triton import sass, versions
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.assembler import assembler
from fuseplan.errors import BuildError, installing
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import dtype_of

REMEDY = installing("triton", "torch", f"'triton>={versions.OLDEST}'")


def fingerprint() -> str | None:
    """Triton's version and the assembler: what else the code depends on. None without Triton.

    Raises:
        ArgumentError: the setting FUSEPLAN_PTXAS names no assembler.
    """
    folder = versions.package()
    version = None if folder is None else versions.text_of(folder)
    if folder is None or version is None:
        return None
    try:
        return f"triton {version}, {assembler(folder)}"
    except BuildError:
        return None


def compile_object(source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
    """A source's artifact, packed; a BuildError where triton is missing or too old, or refuses the source."""
    return artifact(source, kernel, template, target, assembly=False).pack()


def artifact(
    source: Source, kernel: Kernel, template: Template, target: Target, *, assembly: bool = True
) -> Artifact:
    """A source's artifact, with its assembly; compiled anew.

    Raises:
        BuildError: triton is missing or another version, or refuses the source.
    """
    types = types_of(source, kernel, template, target)
    check_installed()
    from fuseplan.backends.triton.compiler import compile_source

    return compile_source(source, types, target, assembly=assembly)


def listing(kind: str, source: Source, kernel: Kernel, template: Template, target: Target) -> str:
    """A source's instructions: `ptx` or `sass` for NVIDIA, `asm` for AMD.

    Raises:
        BuildError: triton is missing or another version, or refuses the source; or its disassembler fails.
    """
    made = artifact(source, kernel, template, target)
    package = versions.package()
    return sass.listed(made.binary, package) if package and kind == "sass" else made.assembly


def compile_all(
    pairs: Sequence[tuple[Kernel, Template]], target: Target, *, workers: int, seconds: float = 120.0
) -> Iterator[tuple[Source, bytes | BuildError]]:
    """The source of each kernel by its template and the packed artifact or why there is none, in order.

    Compilers run in `workers` processes of their own: one that crashes, or takes more than `seconds` for a
    kernel, is an error of that kernel and ends nothing else.

    Raises:
        BuildError: triton is missing, or too old.
    """
    from fuseplan.backends.triton.pool import Job, compile_many

    check_installed()
    sources: list[Source] = []

    def jobs() -> Iterator[Job]:  # each is sent off as soon as its source is written
        for kernel, template in pairs:
            sources.append(template.emit(kernel, target))
            yield Job(sources[-1], types_of(sources[-1], kernel, template, target), target)

    for place, result in enumerate(compile_many(jobs(), workers=workers, seconds=seconds)):
        yield sources[place], result


def check_installed() -> None:
    """Refuses to go on without a Triton that the templates are written for; warns once of an untested one.

    Raises:
        BuildError: there is none, or it is older than `versions.OLDEST`.
    """
    version, oldest = versions.version_of(), versions.OLDEST
    if version is None:
        raise BuildError(
            f"compiling for a GPU needs triton {oldest} or later, which is not installed: {REMEDY}. "
            "`explain`, and `show` to the stage `source`, need none"
        )
    told = versions.dotted(version)
    if version < versions.parsed(oldest):
        raise BuildError(f"the kernels need triton {oldest} or later; this is {told}: {REMEDY}")
    if versions.is_untested(version):
        _warn(f"triton {told} is newer than {versions.NEWEST}, the newest that the kernels are tested with")


@functools.cache
def _warn(what: str) -> None:
    """Warns once a process."""
    warnings.warn(what, RuntimeWarning, stacklevel=4)


def resources(code: bytes) -> Mapping[str, int]:
    """What a program of a packed artifact uses; a BuildError where it is none."""
    return Artifact.unpack(code).resources


# Counters are the workspace's usual content; a kernel casts it where it keeps something else.
_KINDS = {"workspace": "*i32", "extent": "i64"}


def types_of(source: Source, kernel: Kernel, template: Template, target: Target) -> tuple[str, ...]:
    """Triton's type of every argument, in the order of the slots.

    A tensor map is a `tensordesc`, a parameter by value a number of the compute dtype, the extent of open
    axes an `i64`, for no value of which the code is specialised. Everything else is a pointer: to src's,
    dst's and a result's dtype, to the dtype an operand is packed in, to int32 for the workspace.
    """
    return tuple(_type(slot, kernel, template, target) for slot in source.slots)


def _type(slot: Slot, kernel: Kernel, template: Template, target: Target) -> str:
    if slot.map is not None:
        return f"tensordesc<{dtype_of(slot.map.dtype).triton}[{', '.join(map(str, slot.map.box))}]>"
    if slot.kind == "parameter":
        return dtype_of(kernel.compute_dtype).triton
    if slot.kind in _KINDS:
        return _KINDS[slot.kind]
    return "*" + dtype_of(_element(slot, kernel, template, target)).triton


def _element(slot: Slot, kernel: Kernel, template: Template, target: Target) -> str:
    """The dtype that a pointer points to."""
    if slot.kind == "parameters":
        return kernel.compute_dtype
    if slot.kind == "result":
        return next(output.dtype for output in kernel.outputs if output.key == slot.key)
    if slot.kind == "src" and kernel.lookup:
        return kernel.lookup.indices
    if slot.kind != "operand":
        return (kernel.src if slot.kind == "src" else kernel.dst).dtype
    operand = kernel.operand(slot.key)
    return template.packing(kernel, target, operand).dtype if operand.packed else operand.dtype
