"""Loads saved object code without a compiler: an ELF object for x86-64, placed and linked in memory.

The objects are position-independent code of one module. They refer to their own sections, and to the few
functions of the C library in `SYMBOLS`. (System V Application Binary Interface, AMD64 supplement, 4.4.)
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuseplan.errors import BuildError
from fuseplan.system import tiles

SYMBOLS = ("memset", "memcpy", "memmove", "sched_yield", "syscall")
# The flags that Linux shows of a processor on which code of each kind runs; `target.KINDS` has LLVM's names.
_AVX2 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "popcnt"])
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
FLAGS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}

_HEADER, _SECTION, _SYMBOL, _RELOCATION = map(
    struct.Struct, ("<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ", "<QQq")
)
_X86_64, _OBJECT = 62, 1
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8
_ALLOCATED = 2
_UNDEFINED = 0
_WORD, _RELATIVE, _CALL = 1, 2, 4  # R_X86_64_64, R_X86_64_PC32, R_X86_64_PLT32
_JUMP = b"\xff\x25\x00\x00\x00\x00"  # to the address in the eight bytes behind it
_JUMP_BYTES = 16


class Address(int):
    """Where a function of loaded code begins; its code is freed with the last of its addresses."""

    held: object  # what the code lies in


def refusal(kind: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Why saved code of a kind of processor does not run on this machine; None if it does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"this machine is {sys.platform} on {platform.machine()}; saved code runs on linux on x86_64"
    if kind not in FLAGS:
        return f"there is no kind of processor {kind!r}: saved code is for {', '.join(FLAGS)}"
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    held = next((set(value.split()) for name, _, value in lines if name.strip() == "flags"), set())
    lacking = sorted(FLAGS[kind] - held)
    if lacking:
        return f"this processor has no {', '.join(lacking)}"
    is_refused = kind == "amx" and not tiles.permitted()
    return "Linux does not let this process use the processor's tiles (AMX)" if is_refused else None


def load(code: bytes, entries: Sequence[str]) -> dict[str, Address]:
    """Places object code in this process and gives the address of each function named in `entries`.

    Raises:
        BuildError: the code is no such object, or has no such function.
        OSError: the process gets no memory that can be executed.
    """
    try:
        return _Image(code).addresses(entries)
    except (KeyError, IndexError, struct.error, ValueError) as error:
        raise BuildError(f"the object code cannot be linked: {error}") from error


@dataclass(frozen=True)
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


class _Image:
    """An object's sections in memory of their own, relocated, and then executable and no longer writable."""

    def __init__(self, code: bytes) -> None:
        self._sections = tuple(_sections(code))
        self._places, size = self._placed()
        self._jumps: dict[str, int] = {}
        self._jumps_at = size
        self._memory = mmap.mmap(-1, size + _JUMP_BYTES * len(SYMBOLS), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for index, place in self._places.items():
            each = self._sections[index]
            if each.kind != _NO_BITS:
                self._memory[place : place + each.size] = _content(code, each)
        table = next(each for each in self._sections if each.kind == _SYMBOLS)
        self._symbols = tuple(_SYMBOL.iter_unpack(_content(code, table)))
        self._names = _content(code, self._sections[table.link])
        for each in self._sections:
            if each.kind == _RELOCATIONS and each.info in self._places:
                for offset, info, addend in _RELOCATION.iter_unpack(_content(code, each)):
                    self._relocate(self._places[each.info] + offset, info >> 32, info & 0xFFFFFFFF, addend)
        self._protect()

    def _placed(self) -> tuple[dict[int, int], int]:
        """Where each section that the code needs begins, and the bytes of all."""
        places, end = {}, 0
        for index, each in enumerate(self._sections):
            if each.flags & _ALLOCATED:
                places[index] = end = -(-end // max(1, each.alignment)) * max(1, each.alignment)
                end += each.size
        return places, -(-end // _JUMP_BYTES) * _JUMP_BYTES

    def _relocate(self, place: int, symbol: int, kind: int, addend: int) -> None:
        value = self._value(symbol) + addend
        if kind == _WORD:
            struct.pack_into("<Q", self._memory, place, value)
        elif kind in (_RELATIVE, _CALL):
            struct.pack_into("<i", self._memory, place, value - self._base - place)
        else:
            raise ValueError(f"it has a relocation of kind {kind}")

    def _value(self, symbol: int) -> int:
        """The address of a symbol; of one outside of the object, that of a jump to it."""
        name, _, _, section, value, _ = self._symbols[symbol]
        if section == _UNDEFINED:
            return self._base + self._jump(self._name(name))
        return int(self._base + self._places[section] + value)

    def _jump(self, name: str) -> int:
        """Functions of the C library may lie further away than a call reaches."""
        if name not in SYMBOLS:
            raise ValueError(f"it refers to {name!r}")
        if name not in self._jumps:
            place = self._jumps[name] = self._jumps_at + _JUMP_BYTES * len(self._jumps)
            found = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0
            self._memory[place : place + _JUMP_BYTES - 2] = _JUMP + struct.pack("<Q", found)
        return self._jumps[name]

    def _name(self, at: int) -> str:
        return self._names[at : self._names.index(b"\0", at)].decode()

    def _protect(self) -> None:
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if protect(self._base, len(self._memory), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "the system gives no memory that can be executed")

    def addresses(self, entries: Sequence[str]) -> dict[str, Address]:
        """Where functions begin."""
        found = {self._name(each[0]): place for place, each in enumerate(self._symbols) if each[3]}
        addresses = {}
        for entry in entries:
            addresses[entry] = Address(self._value(found[entry]))
            addresses[entry].held = self
        return addresses


def _sections(code: bytes) -> Iterator[_Section]:
    magic, kind, machine, _, _, _, begin, _, _, _, _, size, count, _ = _HEADER.unpack_from(code)
    if not magic.startswith(b"\x7fELF\x02\x01") or (kind, machine) != (_OBJECT, _X86_64):
        raise ValueError("it is no ELF object for x86-64")
    for index in range(count):
        _, kind, flags, _, offset, length, link, info, alignment, _ = _SECTION.unpack_from(
            code, begin + index * size
        )
        yield _Section(kind, flags, offset, length, link, info, alignment)


def _content(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.size]
