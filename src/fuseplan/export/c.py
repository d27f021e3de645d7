"""An object file with C functions that run a plan's kernel on a CPU, and the header that declares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fuseplan.backends.cpu import toolchain
from fuseplan.backends.host import HostMemory
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.execution.stages import Records
from fuseplan.export.packings import exported_packings, pack_function
from fuseplan.kernels.emit import FIRST_SLOT, Slot
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import KINDS
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import Dense
from fuseplan.tensors.arguments import check_keys, operand_buffer

ALIGNMENT = 64
EXTENT = "elements along the open axes (*), 1 or more: of several axes, the product"
THREADS = """\
/* The same on several threads. Before each run, prepare a block of {block} bytes, aligned to 8. Then
 * every thread calls run once, with a number of its own from 0 to threads - 1. A call returns when no work is
 * left to take; dst is complete when all calls have returned.
 */"""

TILES = """\
/* The code uses the processor's tiles (AMX). Linux ends a process that does so without permission: before the
 * first run, ask once with syscall(SYS_arch_prctl, 0x1023, 18), which gives 0 where it is granted.
 */"""


@dataclass(frozen=True)
class Argument:
    """A parameter of the C function.

    Attributes:
        ctype: of what it points to, or its own.
        writes: whether the kernel writes there.
        told: what it is, for the header.
        is_value: whether it is no pointer.
    """

    name: str
    ctype: str
    writes: bool
    told: str
    is_value: bool = False

    @property
    def text(self) -> str:
        """Its declaration."""
        if self.is_value:
            return f"{self.ctype} {self.name}"
        return f"{'' if self.writes else 'const '}{self.ctype} *{self.name}"


class CObject:
    """What a plan becomes for a C program.

    Args:
        records: the decided plan, for a kind of CPU; that machine need not be this one.
        name: of the C function, and the beginning of the others'.
        weights: operands by key whose packed elements the object holds; the C function does not take them.

    Raises:
        ArgumentError: the name is none in C, or an operand is unknown or wrong.
        BuildError: the target is no kind of CPU that other machines are of, or an operand cannot be packed.
    """

    def __init__(self, records: Records, name: str, weights: Mapping[str, Any]) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ArgumentError(f"{name!r} is no name of a C function: give another with --name")
        kind = KINDS.get(str(records.target))
        if kind is None or kind.backend != "cpu":
            known = ", ".join(each for each, held in KINDS.items() if held.backend == "cpu")
            raise BuildError(f"there is no object file for {records.target}: take {known}")
        self._records, self._kind, self.name = records, kind, name
        self._plan, self._source = records.plan, records.source
        self.packings = exported_packings(records)
        self._held = self._embedded(weights)
        taken = (slot for slot in self._source.slots if slot not in self._held)
        self._arguments = {slot: self._argument(slot) for slot in taken}

    def _embedded(self, weights: Mapping[str, Any]) -> dict[Slot, bytes]:
        """The contents of the slots that the object holds: parameters, and packed operands."""
        check_keys(self._plan, weights)
        memory, held = HostMemory(), {}
        for operand in self._plan.operands:
            packing = self.packings[operand.key]
            if operand.key not in weights or packing is None:
                continue
            buffer = operand_buffer(self._plan, operand, weights[operand.key], memory.view)
            held[Slot("operand", operand.key)] = memory.packed(packing, buffer, keep=True).array.tobytes()
        compute = dtype_of(self._plan.compute_dtype).array
        values = [each.value for each in self._plan.parameters]
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite there
            held[Slot("parameters")] = np.array(values, np.float64).astype(compute).tobytes()
        return {slot: content for slot, content in held.items() if slot in self._source.slots}

    def _argument(self, slot: Slot) -> Argument:
        plan, key = self._plan, slot.key
        if slot.kind == "src":
            return Argument("src", dtype_of(plan.src.dtype).c, False, str(plan.src))
        if slot.kind == "dst":
            return Argument("dst", dtype_of(plan.output.dtype).c, True, str(plan.output))
        if slot.kind == "extent":
            return Argument("extent", "int64_t", False, EXTENT, is_value=True)
        if slot.kind == "workspace":
            told = f"{self._workspace} bytes, aligned to {ALIGNMENT}; may hold anything"
            return Argument("workspace", "void", True, told)
        if slot.kind == "result":
            result = next(each for each in plan.results if each.key == key)
            told = f"{result.spec}, {'read and ' if result.updated else ''}written"
            # A plan may call a value of its own as C calls something else.
            name = f"{key}_saved" if result.per == "element" else key
            return Argument(name, dtype_of(result.spec.dtype).c, True, told)
        return self._operand(key, self.packings[key])

    def _operand(self, key: str, packing: Packing | None) -> Argument:
        operand = next(each for each in self._plan.operands if each.key == key)
        if packing is None:
            return Argument(key, dtype_of(operand.dtype).c, False, str(self._plan[operand.step].dst))
        told = (
            f"{prod(packing.extents)} packed elements of {self.name}_pack_{key}, aligned to {ALIGNMENT} bytes"
        )
        return Argument(key, dtype_of(packing.made).c, False, told)

    def _macro(self, word: str) -> str:
        return f"{self.name}_{word}".upper()

    @property
    def _workspace(self) -> str:
        """The macro of the workspace's size, with its parameters."""
        return f"{self._macro('WORKSPACE_BYTES')}(threads{', extent' * self._plan.is_open})"

    @property
    def arguments(self) -> list[Argument]:
        """The parameters of the C function, in order."""
        return list(self._arguments.values())

    @property
    def object(self) -> bytes:
        """The object file: position-independent code that needs the C library alone."""
        name = self.name
        public = (name, f"{name}_prepare", f"{name}_run")
        return toolchain.portable_object(self._source.text, self._kind, self._entries(), public=public)

    def _entries(self) -> str:
        """LLVM IR of the C functions, and of the constants that they hand to the kernel."""
        name, entry, slots = self.name, self._source.entry, self._source.slots
        constants = {slot: f"@held{place}" for place, slot in enumerate(slots) if slot in self._held}
        types = {each.name: "i64" if each.is_value else "ptr" for each in self.arguments}
        taken = ", ".join(f"{kind} %{given}" for given, kind in types.items())
        words = FIRST_SLOT + len(slots)
        lines = [
            f"{constant} = internal constant [{len(self._held[slot])} x i8] {_bytes(self._held[slot])}, "
            f"align {ALIGNMENT}"
            for slot, constant in constants.items()
        ]
        lines += [
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
            f"declare void @{entry}(ptr, i64, i64)",
            f"define void @{name}_prepare(ptr %block_, {taken}) {{",
            f"  call void @llvm.memset.p0.i64(ptr align 8 %block_, i8 0, i64 {8 * FIRST_SLOT}, i1 false)",
        ]
        for place, slot in enumerate(slots):
            given = "" if slot in constants else self._arguments[slot].name
            value = f"{types[given]} %{given}" if given else f"ptr {constants[slot]}"
            lines += [
                f"  %at{place}_ = getelementptr i64, ptr %block_, i64 {FIRST_SLOT + place}",
                f"  store {value}, ptr %at{place}_",
            ]
        lines += [
            "  ret void\n}",
            f"define void @{name}_run(ptr %block_, i64 %thread_, i64 %threads_) {{",
            f"  call void @{entry}(ptr %block_, i64 %thread_, i64 %threads_)",
            "  ret void\n}",
            f"define void @{name}({taken}) {{",
            f"  %block_ = alloca [{words} x i64], align 16",
            f"  call void @{name}_prepare(ptr %block_, {taken})",
            f"  call void @{name}_run(ptr %block_, i64 0, i64 1)",
            "  ret void\n}",
        ]
        return "\n".join(lines) + "\n"

    @property
    def header(self) -> str:
        """The header, for C and C++."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        name, guard = self.name, self._macro("H")
        taken = ", ".join(each.text for each in self.arguments)
        plan, template = str(self._plan).replace("*/", "* /"), self._records.choice.template.text
        yield f"/* {plan}\n *\n * Code for {self._records.target}, by fuseplan's {template}.\n */"
        if "ldtilecfg" in self._source.text:
            yield TILES
        yield f"#ifndef {guard}\n#define {guard}\n\n#include <stddef.h>\n#include <stdint.h>\n"
        yield '#ifdef __cplusplus\nextern "C" {\n#endif\n'
        yield from self._sizes()
        yield "\n/* Runs the plan on the calling thread. What is written overlaps nothing else.\n *"
        yield from (f" *   {each.name}: {each.told}" for each in self.arguments)
        yield from (f" *   ({slot} is in the object)" for slot in self._held)
        yield f" */\nvoid {name}({taken});\n"
        yield THREADS.format(block=self._macro("BLOCK_BYTES"))
        yield f"void {name}_prepare(void *block, {taken});"
        yield f"void {name}_run(void *block, int64_t thread, int64_t threads);\n"
        yield from self._packers()
        yield f"#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {guard} */"

    def _sizes(self) -> Iterator[str]:
        shared, each = self._source.workspace_bytes, self._source.workspace_bytes_per_thread
        if Slot("workspace") in self._arguments:
            more = f" + (size_t){self._source.workspace_bytes_per_extent} * (size_t)(extent)"
            size = f"((size_t){shared} + (size_t){each} * (size_t)(threads){more * self._plan.is_open})"
            yield f"#define {self._workspace} {size}"
        yield f"#define {self._macro('BLOCK_BYTES')} {8 * (FIRST_SLOT + len(self._source.slots))}"

    def _packers(self) -> Iterator[str]:
        """The functions that pack the operands that the C function takes."""
        for slot in self._arguments:
            packing = self.packings.get(slot.key) if slot.kind == "operand" else None
            if packing is None:
                continue
            macro = self._macro(f"{slot.key}_elements")
            yield f"/* Packs {slot.key}, {Dense(packing.shape, packing.dtype)}, into {macro} elements. */"
            yield f"#define {macro} {prod(packing.extents)}"
            yield pack_function(f"{self.name}_pack_{slot.key}", packing) + "\n"


def _bytes(content: bytes) -> str:
    """Bytes as LLVM writes them."""
    return 'c"' + re.sub("(..)", r"\\\1", content.hex()) + '"'
