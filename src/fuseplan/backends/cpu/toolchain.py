"""Compiles LLVM IR for this processor and loads it, through llvmlite: users need no compiler."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import llvmlite
import llvmlite.binding as llvm

from fuseplan.errors import BuildError

_lock = threading.Lock()
_engines: list[object] = []  # code in use is never unloaded: a worker may be inside it


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
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=triple is None)


def _host_machine() -> llvm.TargetMachine:
    return _target_machine(None, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def _optimized(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise BuildError("LLVM refused the generated kernel", source=text, output=str(error)) from error
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # The templates tile and unroll; LLVM's own choices cost compile time and spill registers.
    options.loop_unrolling = False
    options.loop_vectorization = False
    options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


def compile_object(text: str) -> bytes:
    """Object code for this processor.

    Raises:
        BuildError: LLVM refuses the text.
    """
    with _lock:
        machine = _host_machine()
        return bytes(machine.emit_object(_optimized(text, machine)))


def assembly(text: str, *, triple: str | None = None, cpu: str = "", features: str = "") -> str:
    """What the kernel becomes, as assembly: for this processor, or for any that LLVM knows."""
    with _lock:
        machine = _host_machine() if triple is None else _target_machine(triple, cpu, features)
        return str(machine.emit_assembly(_optimized(text, machine)))


def load_object(code: bytes, entries: Sequence[str]) -> dict[str, int]:
    """Loads object code into this process and gives the address of each function named in `entries`.

    Raises:
        BuildError: the code cannot be linked here, or has no such function.
    """
    with _lock:
        _initialize()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _host_machine())
        try:
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            found = {entry: int(engine.get_function_address(entry)) for entry in entries}
        except RuntimeError as error:
            raise BuildError(
                f"the kernel's object code cannot be loaded: {error}", source=None, output=""
            ) from error
        missing = [entry for entry, address in found.items() if not address]
        if missing:
            raise BuildError(
                f"the kernel's object code has no function {missing[0]!r}", source=None, output=""
            )
        _engines.append(engine)
        return found
