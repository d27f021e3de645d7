"""Triton, from a source's text to machine code: for any GPU it knows, on any machine, without a driver.

Triton's own cache of kernels is not used, and no file is left behind; `fuseplan.stores.cache` keeps the
result.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

from fuseplan.backends.triton import driver, repairs, resources, versions
from fuseplan.backends.triton.artifact import Artifact, MapLayout
from fuseplan.backends.triton.assembler import assembler, own_assembler
from fuseplan.errors import BuildError, UnsoundCodeError
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target
from fuseplan.settings import PTXAS
from fuseplan.system.locks import Lock

PACKAGE = Path(triton.__file__).parent
VERSION = versions.parsed(triton.__version__)
# What a source may ask for; Triton passes over what it does not know, which `cooperative` is for launches.
OPTIONS = frozenset(
    ("num_warps", "num_stages", "maxnreg", "cooperative", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
)
TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor of sm_100: PTX ISA, tcgen05
ALIGNED = [["tt.divisibility", 16]]
_lock = Lock()  # Triton's passes share state


def compile_source(
    source: Source, types: Sequence[str], target: Target, *, assembly: bool = False
) -> Artifact:
    """Machine code of a source.

    Args:
        target: a kind of GPU: `sm_90`, `gfx942`; its `l1_bytes` is the most shared memory a program may use.
        assembly: keep the PTX or amdgcn as well.

    Raises:
        BuildError: Triton or ptxas refuses the text, or it needs tensor maps on AMD.
        UnsoundCodeError: no repair makes the code right, or it needs what a launch here does not give: more
            shared memory than the target has, scratch memory.
    """
    if triton.knobs.runtime.interpret:
        raise BuildError(
            "TRITON_INTERPRET is set: Triton interprets in this process and cannot compile. Unset it"
        )
    gpu = gpu_target(target)
    if gpu.backend == "hip" and any(slot.map is not None for slot in source.slots):
        raise BuildError(f"the kernel needs tensor maps, which {target} does not have", source=source.text)
    with _lock, _loaded(source) as function:
        made = _Making(source, tuple(types), target, gpu, function)
        try:
            found = made.artifact()
        except BuildError:
            raise
        except Exception as error:
            raise BuildError(
                f"Triton {triton.__version__} cannot compile the kernel for {target}",
                source=source.text,
                output="\n".join(_told(error)),
            ) from error
    return found if assembly else replace(found, assembly="")


def _told(error: BaseException | None) -> Iterator[str]:
    """What an error says, and those it came from: Triton's last one says where, the first one what."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


def gpu_target(target: Target) -> GPUTarget:
    """Triton's name of the target; a BuildError where it is no kind of GPU."""
    kind, name = target.name[:3], target.name.removeprefix("sm_").rstrip("a")
    if kind == "sm_" and name.isdecimal():
        return GPUTarget("cuda", int(name), 32)
    if kind == "gfx":
        return GPUTarget("hip", target.name, target.warp or (64 if target.name.startswith("gfx9") else 32))
    raise BuildError(f"{target} is not a kind of GPU that Triton compiles for")


@contextmanager
def _loaded(source: Source) -> Iterator[Any]:
    """The text's function in the installed Triton's words, executed under a name that is the text's alone."""
    text = versions.spelled(source.text, VERSION)
    name = f"<fuseplan {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        space: dict[str, Any] = {"__name__": "fuseplan.generated"}
        try:
            exec(compile(text, name, "exec"), space)
            function = space[source.entry]
        except Exception as error:
            what = f"the kernel's text is not valid: {type(error).__name__}: {error}"
            raise BuildError(what, source=source.text) from error
        yield function
    finally:
        linecache.cache.pop(name, None)


class _Making:
    """One compilation."""

    def __init__(
        self, source: Source, types: tuple[str, ...], target: Target, gpu: GPUTarget, function: Any
    ) -> None:
        self.source, self.types, self.target, self.gpu = source, types, target, gpu
        self.function = function
        unknown = dict(source.options).keys() - OPTIONS
        if unknown:
            raise self._refusal(f"the kernel asks for {min(unknown)}, which is not an option of the compiler")
        self.compiler = make_backend(gpu)
        # torch.compile points Triton at an assembler of its own, whose language ours may not know.
        ours: dict[str, Any] = {}
        if gpu.backend == "cuda":
            self.assembler = assembler(PACKAGE)
            ours["ptx_version"] = min(self.assembler.ptx, own_assembler(PACKAGE).ptx)
        self.options = self.compiler.parse_options({**versions.OPTIONS, **dict(source.options), **ours})
        self.metadata: dict[str, Any] = {"target": gpu, **vars(self.options)}
        self.texts: dict[str, str] = {}

    def _refusal(self, why: str) -> BuildError:
        return BuildError(why, source=self.source.text)

    def _unsound(self, why: str) -> UnsoundCodeError:
        return UnsoundCodeError(why, source=self.source.text)

    def artifact(self) -> Artifact:
        """Runs the stages, and refuses what cannot be launched."""
        last = self._lowered()
        shared = int(self.metadata["shared"])
        threads = int(self.metadata["num_warps"]) * int(self.options.warp_size)
        self._check(shared)
        if self.gpu.backend == "hip":
            binary, assembly = last, self.texts["amdgcn"]
            used = resources.amd(assembly, self.target.name, threads, shared, self.gpu.warp_size)
        else:
            assembly, binary, log = self._assembled(self.texts["ptx"])
            used = resources.nvidia(log, assembly, self.target.name.rstrip("a"), threads, shared)
        name = str(self.metadata["name"])
        return Artifact(
            binary, self.target.name, name, threads, shared, self.types, self._maps(), used, assembly
        )

    def _assembled(self, ptx: str) -> tuple[str, bytes, str]:
        """PTX with its cubin and the assembler's log; repaired, and assembled again where factors are lost.

        Raises:
            UnsoundCodeError: no repair helps.
        """
        text, settled = repairs.known(ptx), ""
        while text != settled:
            cubin, log = self.assembler.assembled(text, self.gpu.arch, self.source.text)
            if repairs.lacks_products(cubin) and repairs.uses_products(text):
                raise self._miscompiled("ptxas drops matrix instructions")
            if not repairs.overwrites_factors(text, cubin, PACKAGE):
                return text, cubin, log
            text, settled = repairs.settled(text), text
        raise self._miscompiled("registers are overwritten before matrix instructions have read them")

    def _miscompiled(self, fault: str) -> UnsoundCodeError:
        return self._unsound(
            f"{self.assembler} makes code for {self.target} that computes wrong results: {fault}. "
            f"Compile the plan with another template, or name an assembler of CUDA 13.3 or later in {PTXAS}"
        )

    def _lowered(self) -> Any:
        """What the last of Triton's stages gives: PTX, which is left to `assembled`, or an hsaco."""
        ast = self._ast()
        stages: dict[str, Any] = {}
        self.compiler.add_stages(stages, self.options, ast.language)
        context = ir.context()
        ir.load_dialects(context)
        self.compiler.load_dialects(context)
        module = ast.make_ir(
            self.gpu,
            self.options,
            self.compiler.get_codegen_implementation(self.options),
            self.compiler.get_module_map(),
            context,
        )
        names = list(stages)
        for name in names[names.index(ast.ext) :]:
            if name == "cubin":
                break
            module = stages[name](module, self.metadata)
            if isinstance(module, str):
                self.texts[name] = module
        return module

    def _ast(self) -> Any:
        """The function with the types of its arguments; every pointer is aligned to 16 bytes."""
        names = self.function.arg_names
        if len(names) != len(self.types):
            raise self._refusal(f"the kernel's text has {len(names)} arguments, its record {len(self.types)}")
        aligned = {(place,): ALIGNED for place, kind in enumerate(self.types) if kind.startswith("*")}
        if self.source.language != "gluon":
            return ASTSource(self.function, dict(zip(names, self.types, strict=True)), {}, aligned)
        from triton.experimental.gluon._runtime import GluonASTSource

        types = [_with_layout(kind) for kind in self.types]
        return GluonASTSource(self.function, dict(zip(names, types, strict=True)), {}, aligned)

    def _check(self, shared: int) -> None:
        if shared > self.target.l1_bytes:
            raise self._unsound(
                f"the kernel needs {shared} bytes of shared memory; a program on {self.target} has "
                f"{self.target.l1_bytes}"
            )
        columns = int(self.metadata.get("tmem_size") or 0)  # a kernel allocates and frees them itself
        if columns > TENSOR_MEMORY_COLUMNS:
            raise self._unsound(
                f"the kernel needs {columns} columns of tensor memory; {self.target} has "
                f"{TENSOR_MEMORY_COLUMNS}"
            )
        for name in ("global_scratch_size", "profile_scratch_size"):
            if self.metadata.get(name):
                raise self._unsound(
                    f"the kernel needs {name}={self.metadata[name]}, which launches do not support"
                )

    def _maps(self) -> dict[int, MapLayout]:
        places = [place for place, slot in enumerate(self.source.slots) if slot.map is not None]
        found = self.metadata.get("tensordesc_meta") or []
        if len(found) != len(places):
            raise self._unsound(
                f"the kernel has {len(places)} tensor maps, and {self.target} loads {len(found)} of them"
            )
        layouts = {
            place: MapLayout(int(each["swizzle"]), tuple(map(int, each["block_size"])))
            for place, each in zip(places, found, strict=True)
        }
        for place, layout in layouts.items():
            self._check_map(place, layout)
        return layouts

    def _check_map(self, place: int, layout: MapLayout) -> None:
        slot = self.source.slots[place]
        why = [] if slot.map is None else list(driver.problems(slot.map, layout))
        if why:
            raise self._unsound(f"there is no tensor map of {slot}: {why[0]}")


def _with_layout(kind: str) -> str:
    """A tensor map's type as Gluon wants it: with the layout of its boxes in shared memory."""
    if not kind.startswith("tensordesc<"):
        return kind
    from triton.experimental.gluon import language as gl

    element, _, box = kind.removeprefix("tensordesc<").rstrip(">").partition("[")
    extents = [int(extent) for extent in box.rstrip("]").split(",")]
    dtypes = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32, "fp64": gl.float64}
    layout = gl.NVMMASharedLayout.get_default_for(extents, dtypes[element])
    return f"tensordesc<{element}{extents},{layout!r}>"
