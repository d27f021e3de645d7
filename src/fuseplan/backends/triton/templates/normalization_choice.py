"""Which ways to cut a kernel with reductions are worth trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fuseplan.backends.triton.templates.normalization_tiles import Cut
from fuseplan.backends.triton.templates.pointwise_writer import ceil_div, power_of_two
from fuseplan.kernel import Kernel
from fuseplan.scalar import leaves_of
from fuseplan.target import Target

REGISTERS = 65536  # of a processor
MOST = 255  # of a thread
OWN = 56  # registers of a thread that hold no kept tile


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


def read_per_pass(kernel: Kernel) -> list[int]:
    """Bytes of the tensors per element that each pass reads; the last is the one that writes dst."""
    sizes = {op.key: op.nbytes for op in kernel.operands if op.per == "element"}
    inner = frozenset().union(*(leaves_of(stage.expression) for stage in kernel.prologue))
    passes = [reduction.expressions for reduction in kernel.reductions]
    passes.append(tuple(stage.expression for stage in kernel.epilogue))
    found = []
    for formulas in passes:
        used = frozenset().union(*map(leaves_of, formulas))
        used |= inner if "x" in used else frozenset()
        found.append(sum(sizes[key] for key in sizes if key in used) + kernel.src.nbytes * ("x" in used))
    return found


def kept_bytes(kernel: Kernel) -> int:
    """Bytes of what a kernel that keeps its tiles has to hold."""
    return kernel.src.nbytes + sum(op.nbytes for op in kernel.operands if op.per == "element")


def shapes(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """Forms, and columns of a tile of rows; 0 for planes."""
    area, channels = prod(kernel.dst.spatial), kernel.dst.channels
    if kernel.reduced_per == "activation":
        across = area * channels
        yield from (("rows", columns) for columns in (32, 64, 128) if columns < 2 * across)
    elif kernel.dst.is_channels_last or area == 1:
        widths = [width // kernel.dst.itemsize for width in (32, 64, 128, 256)]
        fitting = [columns for columns in widths if columns < 2 * channels]
        yield from (("rows", columns) for columns in fitting or [power_of_two(channels)])
    else:
        yield "planes", 0
        if area <= 256:
            yield from (("rows", columns) for columns in (256, 512, 1024) if area <= columns)


def choices(kernel: Kernel, target: Target) -> Iterator[Choice]:
    """All that are worth a thought."""
    vector = 16 // kernel.dst.itemsize
    for form, columns in shapes(kernel):
        for warps, resident in ((4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2)):
            tile = warps * 32 * vector
            rows, width = (1, tile) if form == "planes" else (max(1, tile // columns), columns)
            for unrolled in (0, 2, 4):
                made = Choice(form, rows, width, unrolled, 1, 1, warps, resident)
                yield from grids(kernel, target, made)


def grids(kernel: Kernel, target: Target, choice: Choice) -> Iterator[Choice]:
    """The numbers of groups and of programs in each that fill the GPU."""
    cut = Cut(kernel, choice)
    places = target.processors * choice.resident
    most = ceil_div(cut.extent, cut.block * max(1, choice.unrolled))
    for groups in sorted({min(cut.tiles, places), *divisors(cut.tiles, places)}):
        programs = min(most, max(1, places // groups))
        made = Choice(**{**choice.__dict__, "groups": groups, "programs": programs})
        if fits(kernel, made):
            yield made
    if cut.tiles > places // 2:
        made = Choice(**{**choice.__dict__, "groups": cut.tiles})
        if fits(kernel, made):
            yield made


def divisors(tiles: int, places: int) -> Iterator[int]:
    """Numbers of groups that have equally many tiles."""
    for each in (1, 2, 4, 8):
        groups = ceil_div(tiles, each)
        if groups <= places:
            yield groups


def fits(kernel: Kernel, choice: Choice) -> bool:
    """Whether the registers of a processor hold the programs."""
    cut = Cut(kernel, choice)
    threads = 32 * choice.warps
    if threads * choice.resident > 2048:
        return False
    room = min(MOST, REGISTERS // (threads * choice.resident))
    each = choice.rows * choice.columns / threads
    if cut.is_kept:
        need = cut.steps * each * kept_bytes(kernel) / kernel.dst.size / 4
        return cut.steps <= 64 and need + OWN <= room
    return room >= 64
