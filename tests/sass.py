"""Reads machine code of sm_90: registers that are written while a matrix instruction may still read them.

`HGMMA sums, R8, descriptor, sums` reads its first factor from R8 to R11 at a time of its own choosing, until
`WARPGROUP.DEPBAR.LE gsb0, n` has waited for all but the last n groups, each of which ends with an instruction
that names `gsb0` (PTX ISA, wgmma.wait_group).
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
LABEL = re.compile(r"(\.L_x_\d+):")
JUMP = re.compile(r"BRA\b.*`\((\.L_x_\d+)\)")
PRODUCT = re.compile(r"HGMMA\S* R\d+, (R(\d+)|gdesc)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
FACTOR = 4  # registers of a thread that hold 64 x 16 halves, or 64 x 8 TF32
# What has a register first and writes none.
READS = ("ST", "RED", "BAR", "LDGSTS", "UTMA", "SYNCS", "BRA", "WARPGROUP", "DEPBAR", "HGMMA", "R2UR")
PREDICATES = ("ISETP", "FSETP", "HSETP2", "DSETP", "PLOP3")
MOST_UNDER_WAY = 40  # products; a loop that never waits would make a new state at each turn


class Line(NamedTuple):
    """An instruction without its predicate, and whether it has one."""

    text: str
    is_conditional: bool


class Pending(NamedTuple):
    """A product under way: where it stands, the registers it reads, and whether its group ends with it."""

    place: int
    registers: frozenset[int]
    ends_group: bool


def disassembled(cubin: bytes) -> tuple[list[Line], dict[str, int]]:
    """The instructions, and at which of them a label stands."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, check=True).stdout.decode()
    lines: list[Line] = []
    labels: dict[str, int] = {}
    for each in text.splitlines():
        if label := LABEL.match(each.strip()):
            labels[label[1]] = len(lines)
        elif found := INSTRUCTION.search(each):
            lines.append(Line(found[1], "@" in each.partition(found[1])[0]))
    return lines, labels


def from_registers(lines: list[Line]) -> int:
    """How many products take their first factor from registers."""
    return sum(bool((found := PRODUCT.match(line.text)) and found[2]) for line in lines)


def overwritten(lines: list[Line], labels: dict[str, int]) -> set[tuple[str, str]]:
    """(what writes, the product that may not have read yet), on any way through the code."""
    found: set[tuple[str, str]] = set()
    seen: set[tuple[int, tuple[Pending, ...]]] = set()
    ways: list[tuple[int, tuple[Pending, ...]]] = [(0, ())]
    while ways:
        place, pending = ways.pop()
        if place >= len(lines) or (place, pending) in seen:
            continue
        seen.add((place, pending))
        line = lines[place]
        held = written(line.text)
        found |= {(line.text, lines[each.place].text) for each in pending if held & each.registers}
        after = _after(place, line.text, pending)
        jump = JUMP.match(line.text)
        if jump:
            ways.append((labels[jump[1]], after))
        is_end = jump or line.text.startswith("EXIT")
        if line.is_conditional or not is_end:
            ways.append((place + 1, after))
    return found


def _after(place: int, text: str, pending: tuple[Pending, ...]) -> tuple[Pending, ...]:
    """What is under way behind an instruction."""
    if product := PRODUCT.match(text):
        first = int(product[2]) if product[2] else 0
        read = frozenset(range(first, first + FACTOR)) if product[2] else frozenset()
        return (*pending, Pending(place, read, "gsb0" in text))[-MOST_UNDER_WAY:]
    if wait := WAIT.match(text):
        ends = [number for number, each in enumerate(pending) if each.ends_group]
        kept = int(wait[1], 16)
        return pending if len(ends) <= kept else pending[ends[len(ends) - kept - 1] + 1 :]
    return pending


def written(text: str) -> set[int]:
    """The registers that an instruction writes."""
    name, _, rest = text.partition(" ")
    if not rest or name.startswith(READS):
        return set()
    operands = [each.strip() for each in rest.split(",")]
    is_second = operands[0].startswith(("P", "UP")) and not name.startswith(PREDICATES)
    register = re.match(r"R(\d+)", operands[1] if is_second and len(operands) > 1 else operands[0])
    if register is None:
        return set()
    wide = {".128": 4, "M88.4": 4, ".64": 2, "WIDE": 2, "M88.2": 2}
    count = next((size for mark, size in wide.items() if mark in name), 1)
    return set(range(int(register[1]), int(register[1]) + count))
