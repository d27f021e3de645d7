"""What a compiled kernel uses of a GPU, read from what the toolchain says; and how many programs fit at once.

A record is a mapping of counts: `registers` and `spill_bytes` of a thread, `stack_bytes`, `shared_bytes` and
`threads` of a program, `programs`, those that one multiprocessor holds at a time; `serialized`, 1 where ptxas
gave up overlapping matrix instructions, which makes them many times slower; and how often an instruction that
matters stands in the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.kernels.target import Target

KIB = 1024
PTX_COUNTS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tma_loads": r"cp\.async\.bulk\.tensor[^;]*shared::c\w+\.global",
    "tma_stores": r"cp\.async\.bulk\.tensor[^;]*global\.shared",
    "async_copies": r"cp\.async\.c[ag]\.shared",
    "register_moves": r"setmaxnreg",
}
AMD_COUNTS = {
    "mfma": r"\bv_mfma",
    "wmma": r"\bv_wmma",
    "buffer_loads": r"\bbuffer_load",
    "global_loads": r"\bglobal_load",
}


@dataclass(frozen=True)
class Multiprocessor:
    """What programs share: bytes of shared memory, warps, programs, and bytes taken from each program."""

    shared_bytes: int
    warps: int
    programs: int
    reserved: int = KIB


# CUDA C++ Programming Guide, table of technical specifications; 64 K registers each.
NVIDIA = {
    "sm_80": Multiprocessor(164 * KIB, 64, 32),
    "sm_86": Multiprocessor(100 * KIB, 48, 16),
    "sm_89": Multiprocessor(100 * KIB, 48, 24),
    "sm_90": Multiprocessor(228 * KIB, 64, 32),
    "sm_100": Multiprocessor(228 * KIB, 64, 32),
    "sm_120": Multiprocessor(100 * KIB, 48, 24),
}
REGISTERS = 64 * KIB
PARTITIONS = 4  # of a multiprocessor; each has its own registers
WARP_GRANULE = 256  # registers are given out to a warp in such lots
GRANULE, MOST = 8, 255  # to a thread; and a thread's most


def together(target: Target, warps: int, resident: int) -> Iterator[tuple[str, int]]:
    """The options of programs that wait for each other."""
    yield "cooperative", 1
    yield from share(target, warps, resident)


def share(target: Target, warps: int, resident: int) -> Iterator[tuple[str, int]]:
    """The option that limits the registers of programs to their share of those of a processor."""
    most = REGISTERS // (warps * 32 * resident) // GRANULE * GRANULE
    if target.name.startswith("gfx"):
        yield "waves_per_eu", -(-warps * resident // PARTITIONS)
    elif most < MOST:
        yield "maxnreg", most


def nvidia(log: str, ptx: str, architecture: str, threads: int, shared_bytes: int) -> dict[str, int]:
    """The record of a kernel from the log of `ptxas -v` and its PTX."""
    registers = _first(r"Used (\d+) registers", log)
    return {
        "registers": registers,
        "spill_bytes": _first(r"(\d+) bytes spill stores", log) + _first(r"(\d+) bytes spill loads", log),
        "stack_bytes": _first(r"(\d+) bytes stack frame", log),
        "shared_bytes": shared_bytes,
        "threads": threads,
        "programs": nvidia_programs(architecture, registers, threads, shared_bytes),
        "serialized": int("instructions are serialized" in log),
        **_counted(PTX_COUNTS, ptx),
    }


def nvidia_programs(architecture: str, registers: int, threads: int, shared_bytes: int) -> int:
    """Programs on one multiprocessor at a time; 0 where one is too large, or the kind is not known."""
    held = NVIDIA.get(architecture)
    if held is None:
        return 0
    warps = -(-threads // 32)
    per_warp = max(1, -(-registers * 32 // WARP_GRANULE) * WARP_GRANULE)
    by_registers = REGISTERS // PARTITIONS // per_warp * PARTITIONS // warps
    by_shared = held.shared_bytes // (shared_bytes + held.reserved)
    return min(held.warps // warps, held.programs, by_registers, by_shared)


def amd(assembly: str, architecture: str, threads: int, shared_bytes: int, warp: int) -> dict[str, int]:
    """The record of a kernel from its amdgcn text."""
    vectors, accumulators = (
        _first(r"\.vgpr_count:\s+(\d+)", assembly),
        _first(r"\.agpr_count:\s+(\d+)", assembly),
    )
    spilled = _first(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    return {
        "registers": vectors,
        "accumulator_registers": accumulators,
        "spill_bytes": 4 * spilled,
        "stack_bytes": _first(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        "shared_bytes": shared_bytes,
        "threads": threads,
        "programs": amd_programs(architecture, vectors, threads // warp, shared_bytes),
        "serialized": 0,
        **_counted(AMD_COUNTS, assembly),
    }


def amd_programs(architecture: str, registers: int, waves: int, shared_bytes: int) -> int:
    """Programs on one compute unit at a time, by its registers and its shared memory."""
    is_cdna = architecture.startswith("gfx9")
    lot, available, most = (8, 512, 8) if is_cdna else (24, 1536, 16)
    shared = (160 if architecture == "gfx950" else 64 if is_cdna else 128) * KIB
    per_unit = min(most, available // (-(-max(1, registers) // lot) * lot)) * PARTITIONS
    by_shared = shared // shared_bytes if shared_bytes else per_unit
    return min(per_unit // max(1, waves), by_shared)


def _first(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _counted(patterns: dict[str, str], text: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
