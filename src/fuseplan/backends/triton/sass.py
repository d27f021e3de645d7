"""Reads machine code of sm_90: registers that are written while a matrix instruction may still read them.

`HGMMA sums, R8, descriptor, sums` reads its first factor from R8 to R11 at a time of its own choosing, until
`WARPGROUP.DEPBAR.LE gsb0, n` has waited for all but the last n groups. A group ends with an instruction that
names `gsb0` (PTX ISA, wgmma.wait_group).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fuseplan.backends.triton.assembler import SECONDS, TOOLS
from fuseplan.errors import BuildError

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
LABEL = re.compile(r"(\S+):$")
JUMP = re.compile(r"(?:BRA|CALL)\b.*`\((\S+?)\)")
ALWAYS = re.compile(r"BRA `")  # jumps without a condition of its own
UNKNOWN = ("BRX", "JMX", "JMP", "CALL.ABS", "CALL.REL.NOINC R")  # jumps to where a register says
PRODUCT = re.compile(r"HGMMA\S* R\d+, (?:R(\d+)|gdesc)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
FACTOR = 4  # registers of a thread that hold 64 x 16 halves, or 64 x 8 TF32
# Instructions that have a register first and write none.
READS = re.compile(
    r"ST|RED|BAR|LDGSTS|UTMA|UBLK|SYNCS|BRA|BRX|CALL|RET|WARP|DEPBAR|HGMMA|R2UR|R2P|CCTL|NANOSLEEP|FCHK"
)
PREDICATES = re.compile(r"[IFDP]SETP|HSETP2|PLOP3")
WIDTHS = (  # registers that an instruction writes, by its name; the first that matches
    (re.compile(r"\.128|M(T?)88\.4|[HI]MMA"), 4),
    (re.compile(r"\.64\b|WIDE|M(T?)88\.2|CS2R(?!\.32)|D(ADD|MUL|FMA|MMA|MNMX)|[FI]2[FI].*64"), 2),
)


class Line(NamedTuple):
    """An instruction without its predicate, and whether it has one."""

    text: str
    is_conditional: bool


class Pending(NamedTuple):
    """A product under way: where it stands, the registers it reads, and whether its group ends with it."""

    place: int
    registers: frozenset[int]
    ends_group: bool


class Code(NamedTuple):
    """A kernel's instructions, and at which of them a label stands."""

    lines: list[Line]
    labels: dict[str, int]


def disassembled(cubin: bytes, package: Path) -> Code:
    """The code of a cubin; read without an analysis that takes a third of the disassembler's time.

    Raises:
        BuildError: as `listed`.
    """
    return parsed(listed(cubin, package, "-ndf"))


def listed(cubin: bytes, package: Path, *options: str) -> str:
    """The instructions of a cubin, read by the disassembler in Triton's package.

    Raises:
        BuildError: there is none, or it cannot read the cubin.
    """
    tool = package / TOOLS / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [str(tool), "-c", *options, file.name]
            ran = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"{tool} cannot read the kernel's code: {error}") from error
    return ran.stdout.decode()


def parsed(text: str) -> Code:
    """The code that a disassembler's text shows."""
    code = Code([], {})
    for each in text.splitlines():
        if found := INSTRUCTION.search(each):
            code.lines.append(Line(found[2], bool(found[1])))
        elif label := LABEL.match(each.strip()):
            code.labels[label[1]] = len(code.lines)
    return code


def from_registers(code: Code) -> int:
    """How many products take their first factor from registers."""
    return sum(bool((found := PRODUCT.match(line.text)) and found[1]) for line in code.lines)


def overwritten(code: Code) -> set[tuple[str, str]]:
    """(instruction, product): the instruction may write a register that the product has not read yet.

    Every way through the code is followed. A jump to an unknown place counts as an instruction that writes.
    """
    found: set[tuple[str, str]] = set()
    seen: set[tuple[int, tuple[Pending, ...]]] = set()
    ways: list[tuple[int, tuple[Pending, ...]]] = [(0, ())]
    while ways:
        place, pending = ways.pop()
        if place >= len(code.lines) or (place, pending) in seen:
            continue
        seen.add((place, pending))
        text = code.lines[place].text
        held = written(text)
        is_lost = text.startswith(UNKNOWN)
        found |= {(text, code.lines[each.place].text) for each in pending if is_lost or held & each.registers}
        after = _after(place, text, pending)
        ways += ((next_place, after) for next_place in _next(code, place))
    return found


def _next(code: Code, place: int) -> Iterator[int]:
    """Where the code goes on behind an instruction."""
    line = code.lines[place]
    if jump := JUMP.match(line.text):
        yield code.labels[jump[1]]
    if line.is_conditional or not (ALWAYS.match(line.text) or line.text.startswith(("EXIT", "RET"))):
        yield place + 1


def _after(place: int, text: str, pending: tuple[Pending, ...]) -> tuple[Pending, ...]:
    """The products under way behind an instruction; of a loop's turns, each product's last one."""
    if product := PRODUCT.match(text):
        first = int(product[1] or 0)
        read = frozenset(range(first, first + FACTOR)) if product[1] else frozenset()
        others = (each for each in pending if each.place != place)
        return (*others, Pending(place, read, "gsb0" in text))
    if wait := WAIT.match(text):
        ends = [number for number, each in enumerate(pending) if each.ends_group]
        kept = int(wait[1], 16)
        return pending if len(ends) <= kept else pending[ends[len(ends) - kept - 1] + 1 :]
    return pending


def written(text: str) -> set[int]:
    """The registers that an instruction writes."""
    name, _, rest = text.partition(" ")
    if not rest or READS.match(name):
        return set()
    operands = [each.strip() for each in rest.split(",")]
    is_second = operands[0].startswith(("P", "UP")) and not PREDICATES.match(name)
    register = re.match(r"R(\d+)", operands[1] if is_second and len(operands) > 1 else operands[0])
    if register is None:
        return set()
    count = next((size for names, size in WIDTHS if names.search(name)), 1)
    return set(range(int(register[1]), int(register[1]) + count))
