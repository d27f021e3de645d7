"""Compiles LLVM IR for this processor and loads it, through llvmlite: users need no compiler."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from fuseplan.backends.cpu.loader import Address
from fuseplan.errors import BuildError
from fuseplan.kernels.target import Target
from fuseplan.system import limits
from fuseplan.system.locks import held_across_forks

# llvmlite holds this lock, which has no public name, in each of its calls of LLVM. A fork waits for it.
held_across_forks(llvm.ffi.lib._lock)


@functools.cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def fingerprint() -> str:
    """Names what compiles: llvmlite's and LLVM's versions."""
    return f"llvmlite {llvmlite.__version__}, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


def host_cpu() -> tuple[str, dict[str, bool]]:
    """The processor's name and its features, as LLVM calls them."""
    return llvm.get_host_cpu_name(), dict(llvm.get_host_cpu_features())


def _target_machine(triple: str | None, cpu: str, features: str) -> llvm.TargetMachine:
    _initialize()
    if triple is None:
        target = llvm.Target.from_default_triple()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(triple)
    if triple is None:
        return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")


def _host_machine() -> llvm.TargetMachine:
    return _target_machine(None, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def _optimized(
    text: str, machine: llvm.TargetMachine, *more: str, public: Sequence[str] = ()
) -> llvm.ModuleRef:
    """The text as optimized code, with more texts linked into it; only `public` functions stay visible."""
    context = llvm.create_context()  # LLVM's own would keep every constant
    try:
        module = llvm.parse_assembly(text, context)
        for other in more:
            module.link_in(llvm.parse_assembly(other, context))
        for function in module.functions:
            if public and not function.is_declaration and function.name not in public:
                function.linkage = "private"  # no symbol tells its name
        module.verify()
    except RuntimeError as error:
        raise BuildError("LLVM refused the generated kernel", source=text, output=str(error)) from error
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # The templates tile and unroll; LLVM's own choices cost compile time and spill registers.
    options.loop_unrolling = False
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    # Each function by itself. LLVM's passes over whole modules, which inline and then simplify all again,
    # take more processor time, and kernels are no faster: silu behind a norm takes 1.15 times as long.
    passes = builder.getFunctionPassManager()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    if type(passes)._dispose is llvm.ffi.ObjectRef._dispose:
        # llvmlite 0.50 inherits the one that does nothing: 57 kB of each compile would stay.
        llvm.ffi.lib.LLVMPY_DisposeNewFunctionPassManger(passes)
    return module


def compile_object(text: str) -> bytes:
    """Object code for this processor; a BuildError where LLVM refuses the text."""
    machine = _host_machine()
    return bytes(machine.emit_object(_optimized(text, machine)))


def portable_object(text: str, kind: Target, *more: str, public: Sequence[str] = ()) -> bytes:
    """One position-independent object of several texts, for any machine of a kind, whatever this one is.

    Args:
        kind: of machine.
        *more: LLVM IR that is linked with the text.
        public: the only functions that others may link with; all of the texts' unless given.

    Raises:
        BuildError: LLVM refuses a text.
    """
    machine = _target_machine(triple_of(kind), kind.cpu, kind.features)
    return bytes(machine.emit_object(_optimized(text, machine, *more, public=public)))


def assembly(text: str, *, triple: str | None = None, cpu: str = "", features: str = "") -> str:
    """What the kernel becomes, as assembly: for this processor, or for any that LLVM knows."""
    machine = _host_machine() if triple is None else _target_machine(triple, cpu, features)
    return str(machine.emit_assembly(_optimized(text, machine)))


def triple_of(target: Target) -> str:
    """LLVM's name of the system of a kind of processor that is not this machine's."""
    return "aarch64-linux-gnu" if target.name == "neon" else "x86_64-linux-gnu"


def load_object(code: bytes, entries: Sequence[str]) -> dict[str, Address]:
    """Loads object code into this process and gives the address of each function named in `entries`.

    Raises:
        BuildError: the code cannot be linked here, or has no such function.
        MemoryError: the process has too few memory maps left.
    """
    _initialize()
    _room.take()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _host_machine())
    try:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        found = {entry: Address(engine.get_function_address(entry)) for entry in entries}
    except RuntimeError as error:
        raise BuildError(
            f"the kernel's object code cannot be loaded: {error}", source=None, output=""
        ) from error
    for entry, address in found.items():
        if not address:
            raise BuildError(f"the kernel's object code has no function {entry!r}", source=None, output="")
        address.held = engine  # llvmlite's, which frees what it loaded
    return found


def maps_left(proc: Path = Path("/proc")) -> float:
    """Memory maps that the system still gives this process; infinity where it does not count them."""
    try:
        most = int((proc / "sys/vm/max_map_count").read_text())
        return most - (proc / "self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return float("inf")


class _Room:
    """Watches the memory maps that loaded code takes, two a kernel: without one, LLVM ends the process."""

    LOADS = 64  # between two looks, since a look reads a line for each map

    def __init__(self) -> None:
        self.loads = 1

    def take(self) -> None:
        """Counts a load; a MemoryError where too few maps are left."""
        if self.loads % self.LOADS == 0 and maps_left() < limits.SPARE_MAPS:
            raise MemoryError(
                f"the kernel is not loaded: this process has fewer than {limits.SPARE_MAPS} memory maps "
                "left, and each loaded kernel takes two\n  Drop the compiled plans that you no longer need, "
                "or raise the system's limit: sysctl vm.max_map_count"
            )
        self.loads += 1


_room = _Room()
