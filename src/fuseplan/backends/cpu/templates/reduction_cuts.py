"""How the loops of kernels with statistics become tasks: the cuts that are worth considering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import lcm, prod

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.loops import STREAMED_RUN, line_elements
from fuseplan.backends.cpu.templates.reduction_loops import Cut, chunking, rounded, usual_parts
from fuseplan.backends.cpu.templates.reduction_sums import ROWS as SUM_ROWS
from fuseplan.backends.lattice import Lattice
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import lanes

_TASK = 2048  # elements of cells: fewer are not worth another thread
_SUM_TASK = 1 << 14  # elements of a task with sums of its own, at least
_TASK_BYTES = 48 * 1024  # of channels: less is not worth another thread
_WIDEST = 1024  # columns of a task: their states stay in the first cache
_WIDEST_OF_CHANNELS = 4096  # whose partial sums go through the first cache
_NARROWEST = 64  # bytes of a row that are worth fetching alone
_NARROWEST_OF_CHANNELS = 256
_SHORT = 128  # elements: a run of fewer is better columns, where there are rows of them
_FOLDED = 8  # times the run: with fewer rows, gathering the columns of cells costs more than it saves
_TILE = 8  # images of fewer are no columns of their own
_FOLDED_CHANNELS = 256  # elements: in shorter runs the sums of lanes cost more than columns of their own


def of_cells(make: type[Cut], kernel: Kernel, target: Target) -> Iterator[Cut]:
    """The best cut of statistics over any axes; parts are tasks where there are too few cells."""
    lattice, width = Lattice(kernel), lanes(kernel, target)
    # Whole rows come faster from the last cache than one cell's runs: group_norm(4) of
    # bf16[4x640x32x32, nhwc] took 1.7 ms on a Zen 3 core, and takes 1.2.
    is_far = lattice.element_count * kernel.src.itemsize > target.l2_bytes // 2
    is_short = (
        lattice.is_along
        and (is_far or lattice.run.extent < _SHORT)
        and lattice.element_count >= _FOLDED * lattice.run.extent
    )
    folded = is_short and lattice.can_fold and kernel.open_axis is None and not kernel.sums
    lattice = Lattice(kernel, folded=True) if folded else lattice
    # One thread goes through whole rows: the sum of 700 columns of 3000 rows took 244 us on a Zen 3 core by
    # four blocks of columns, and takes 144.
    most = 4 * target.threads if target.threads > 1 else 1
    wanted = max(1, min(most, kernel.src.size // _TASK))
    _, size, pieces = chunking(lattice, width)
    if lattice.is_along:
        # Two threads that take turns at blocks of 64 KB of a large tensor need 1.3 of the time.
        each = max(1, kernel.minimum_bytes // lattice.cell_count)
        cells = max(1, min(lattice.cell_count // wanted, 3 * target.l2_bytes // 4 // each))
        if kernel.sums:
            cells = max(-(-lattice.cell_count // SUM_ROWS), _SUM_TASK // lattice.element_count, 1)
        blocks = -(-lattice.cell_count // cells)
    else:
        run, least = lattice.run.extent, _NARROWEST // kernel.src.itemsize
        outer = lattice.cell_count * lattice.fold // run
        # Whole rows are in the caches of the thread that wrote them: the mean of 32 columns of 12544 rows
        # behind a convolution took 66 us with columns as tasks, and takes 19.
        is_whole = (
            lattice.is_reduced and len(kernel.statistics) == 1 and outer < target.threads <= pieces // size
        )
        cells = min(run, _WIDEST, run if is_whole else max(least, run * outer // wanted))
        blocks = outer * -(-run // cells)
    is_split = blocks < target.threads and kernel.open_axis is None and not kernel.sums
    parts = max(1, min(wanted // blocks, -(-pieces // size))) if is_split else 1
    elements = lattice.element_count * len(lattice.starts) * (1 if lattice.is_along else cells)
    near = parts == 1 and not folded and elements * kernel.src.itemsize <= target.l2_bytes // 2
    made = make(cells, parts, parts > 1, near, folded=folded)
    if parts == 1 and kernel.minimum_bytes > model.kept_bytes(target) and can_stream(kernel, lattice, target):
        yield replace(made, stream=True)
    yield made


def of_channels(make: type[Cut], kernel: Kernel, target: Target) -> Iterator[Cut]:
    """Cuts of statistics per channel or activation: with short runs as columns or not, whole or split."""
    large = moved(kernel) + kernel.dst.nbytes > model.kept_bytes(target)
    whole = (False,) if kernel.open_axis is not None else (False, True)
    for folded, split in product(_foldings(kernel), whole):
        lattice = Lattice(kernel, folded=folded)
        cells = _block(kernel, lattice, target, split=split)
        if not cells:
            continue
        made = make(cells, usual_parts(lattice, lanes(kernel, target)), split, folded=folded)
        if large and can_stream(kernel, lattice, target):
            yield replace(made, stream=True)
        yield made


def _foldings(kernel: Kernel) -> tuple[bool, ...]:
    """Whether short runs become columns, the better first; of as many images as are a tile."""
    lattice = Lattice(kernel)
    if not lattice.can_fold or lattice.run.extent >= 2 * _FOLDED_CHANNELS or kernel.dst.batch < _TILE:
        return (False,)
    return (True, False) if lattice.run.extent < _FOLDED_CHANNELS else (False, True)


def _block(kernel: Kernel, lattice: Lattice, target: Target, *, split: bool) -> int:
    """Columns or channels that the second cache holds, and some for each thread; 0 where there are none."""
    width, bytes_moved = lanes(kernel, target), moved(kernel)
    whole, around = extent(lattice), segments(lattice)
    wanted = max(1, min(4 * target.threads, bytes_moved // _TASK_BYTES))
    step = 1 if lattice.is_along else lcm(lattice.fold, width)  # whole vectors, of whole channels
    if kernel.open_axis is not None:
        return rounded(_TASK_BYTES * whole, bytes_moved) // bytes_moved
    widest = _WIDEST_OF_CHANNELS // step * step
    if split:
        parts = max(1, wanted // usual_parts(lattice, width)) if lattice.is_along else 1
        return _even(whole, min(rounded(-(-whole // parts), step), max(step, widest)), step)
    column = held(kernel, lattice)
    least = (
        1 if lattice.is_along else rounded(min(_NARROWEST_OF_CHANNELS // kernel.src.itemsize, whole), step)
    )
    if not lattice.is_along and least * column > kept_bytes(kernel, lattice, target):
        return 0
    fitting = min(int(3 / 4 * target.l2_bytes / column), _WIDEST_OF_CHANNELS) // step * step
    shared = rounded(-(-whole * around // wanted), step)
    return _even(whole, max(least, min(fitting, shared)), step)


def _even(whole: int, cells: int, step: int) -> int:
    """As many columns or channels, or fewer, so that the last block has about as many as the others."""
    return min(rounded(-(-whole // -(-whole // cells)), step), whole)


def moved(kernel: Kernel) -> int:
    """Bytes of the tensors as large as src, each read once."""
    together: dict[str, int] = {}
    for read in kernel.read_in_passes:
        together |= read
    return sum(together.values())


def held(kernel: Kernel, lattice: Lattice, cells: int = 1) -> float:
    """Bytes that are gone through together: a cell's, or those of so many columns."""
    return moved(kernel) * (1 if lattice.is_along else cells) / (extent(lattice) * segments(lattice))


def kept_bytes(kernel: Kernel, lattice: Lattice, target: Target) -> int:
    """Of how many bytes a later pass need not go to memory: long rows also come fast from the last cache."""
    own, share = 3 * target.l2_bytes // 4, target.l3_bytes // (4 * target.threads)
    is_long = (
        lattice.is_along or lattice.fold > 1 or (kernel.reductions and kernel.reductions.per == "activation")
    )
    return max(own, share) if is_long else own


def extent(lattice: Lattice) -> int:
    """Of what a block is a part: columns of a run, or cells."""
    return lattice.cell_count if lattice.is_along else lattice.run.extent


def segments(lattice: Lattice) -> int:
    """Runs of columns."""
    return 1 if lattice.is_along else prod(axis.extent for axis in lattice.outer_cells)


def can_stream(kernel: Kernel, lattice: Lattice, target: Target) -> bool:
    """Whether dst is written in long runs, or in whole cache lines if the first begins one."""
    dst, line = lattice.tensors.index("dst"), line_elements(kernel.dst.itemsize)
    if lattice.run.steps[dst] != 1 or lattice.is_reduced or kernel.parts or kernel.sums:
        return False
    if kernel.open_axis is not None:
        return False
    kept = lattice.cells if lattice.is_along else lattice.outer_cells
    around = [axis.steps[dst] for axis in (*lattice.outer_elements, *kept)]
    has_lines = all(begin % line == 0 for begin in (*around, lattice.run.extent))
    if not lattice.is_along:
        return has_lines and lattice.run.extent >= 4 * line
    least = 4 * line if has_lines and kernel.has_cells else STREAMED_RUN * lanes(kernel, target)
    return lattice.run.extent >= least and (kernel.has_cells or lattice.run.steps[0] == 1)
