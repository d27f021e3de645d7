"""Which ways to cut a kernel with reductions are worth trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from fuseplan.backends.triton.elementwise import formulas_of
from fuseplan.backends.triton.resources import REGISTERS
from fuseplan.backends.triton.templates.normalization_cost import kept_bytes
from fuseplan.backends.triton.templates.normalization_tiles import Cut
from fuseplan.backends.triton.templates.pointwise import calls
from fuseplan.backends.triton.templates.pointwise_writer import ceil_div, power_of_two
from fuseplan.kernel import Kernel
from fuseplan.target import Target

WIDTHS = (32, 64, 128, 256)  # bytes of a row in a tile
MOST = 255  # registers of a thread
MOST_THREADS = 2048  # of a processor
KEEPING, READING = 36, 20  # registers for all else
PLACE = 1.5  # registers that hold where a tile lies
LONG = {"exp", "expm1", "log", "log1p", "tanh", "erf", "pow"}
INSIDE = 8  # registers for an element inside of one of these
PASSED = 0.75  # registers for each number of the others that a thread reads at a time
RESIDENT = ((4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2))  # warps, programs of a processor
FEWEST = {4: 2, 8: 1, 16: 1}


@dataclass(frozen=True)
class Choice:
    """The template's knobs."""

    form: str
    rows: int
    columns: int
    unrolled: int
    programs: int
    groups: int
    warps: int
    resident: int


def shapes(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """Forms, and columns of a tile of rows; 0 for planes."""
    area, channels = prod(kernel.dst.spatial), kernel.dst.channels
    per_place = kernel.reduced_per == "activation"
    if per_place or kernel.dst.is_channels_last or area == 1:
        across = area * channels if per_place else channels
        widths = [width // kernel.dst.itemsize for width in WIDTHS]
        fitting = [columns for columns in widths if columns < 2 * across]
        yield from (("rows", columns) for columns in fitting or [power_of_two(across)])
    else:
        yield "planes", 0
        if area <= 256:
            yield from (("rows", columns) for columns in (256, 512, 1024) if area <= columns)


def choices(kernel: Kernel, target: Target) -> Iterator[Choice]:
    """All that are worth a thought."""
    vector = 16 // kernel.dst.itemsize
    for form, columns in shapes(kernel):
        for warps, resident in RESIDENT:
            tile = warps * target.warp * vector
            rows, width = (1, tile) if form == "planes" else (max(1, tile // columns), columns)
            for unrolled in (0, 2, 4):
                made = Choice(form, rows, width, unrolled, 1, 1, warps, resident)
                yield from grids(kernel, target, made)


def grids(kernel: Kernel, target: Target, choice: Choice) -> Iterator[Choice]:
    """The numbers of groups and of programs in each that fill the GPU."""
    cut = Cut(kernel, choice)
    places = target.processors * choice.resident
    found = {(min(places // groups, cut.blocks), groups) for groups in shares(cut.tiles, places)}
    found |= {(1, cut.tiles)}  # more than are there at a time, if need be: alone, nobody waits
    for programs, groups in sorted(found):
        made = replace(choice, programs=programs, groups=groups)
        is_double = programs == 1 and choice.resident > FEWEST[choice.warps]
        if not is_double and fits(kernel, target, made):
            yield made


def shares(tiles: int, places: int) -> Iterator[int]:
    """Numbers of groups that have as many tiles each, or nearly, and places for two programs or more."""
    yield from (ceil_div(tiles, each) for each in range(1, 17) if 2 * ceil_div(tiles, each) <= places)


def fits(kernel: Kernel, target: Target, choice: Choice) -> bool:
    """Whether the registers of a processor hold the programs."""
    threads = target.warp * choice.warps
    if threads * choice.resident > MOST_THREADS:
        return False
    return registers(kernel, choice, threads) <= min(MOST, REGISTERS // (32 * choice.warps * choice.resident))


def has_long_functions(kernel: Kernel) -> bool:
    """Whether a formula calls one that is many instructions."""
    return any(not LONG.isdisjoint(calls(formula)) for formula in formulas_of(kernel))


def registers(kernel: Kernel, choice: Choice, threads: int) -> float:
    """What a thread needs, nearly: of 330 kernels that spill more than 100 bytes, it foresees nine in ten."""
    cut, each = Cut(kernel, choice), choice.rows * choice.columns / threads
    tensors = kept_bytes(kernel) / kernel.src.nbytes
    words, place = tensors * kernel.src.itemsize / 4, PLACE
    if not cut.is_aligned:  # each element has a register of its own, and so has its place
        words, place = max(tensors, words), each
    read = each * words * (cut.steps if cut.is_kept else choice.unrolled)
    wide = each * (2 + tensors + (INSIDE if has_long_functions(kernel) else 0))
    numbers = max(len(reduction.names) for reduction in kernel.reductions)
    passed = numbers * power_of_two(choice.programs) * max(1, cut.numbers) / threads
    meeting = PASSED * passed if choice.programs > 1 else 0.0
    if cut.is_kept:
        return KEEPING + read + cut.steps * place + max(wide, meeting)
    return READING + max(read + choice.unrolled * place + wide, meeting)
