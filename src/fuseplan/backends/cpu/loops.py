"""Loops that templates share: whole pieces and what is left, positions along axes, stores past the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64

STREAMED_RUN = 32  # vectors: in shorter runs the ends, which cannot be streamed, are too large a part
LINE_BYTES = 64  # of a cache line


def pieces(
    b: Builder,
    extent: int,
    size: int,
    part: Callable[[Index, int], None],
    *,
    name: str,
    within: tuple[Index, Index] | None = None,
    numbered: bool = False,
) -> None:
    """Calls part(first, count) for whole pieces of an extent in a loop, then for what is left, if anything.

    Args:
        size: elements of a whole piece.
        part: writes the code of one piece.
        within: the first element, and the one behind the last, where these are not all: an end behind the
            whole pieces is the extent's.
        numbered: `within` and `first` count pieces, not elements.
    """
    step = 1 if numbered else size
    whole, rest = extent // size * step, extent % size
    start, stop = within or (0, whole)
    if whole:
        with b.loop(start, b.smaller(stop, whole), step, name=name) as first:
            part(first, size)
    if rest and within is None:
        part(whole, rest)
    elif rest:
        with b.when(b.compare("sgt", b.const(stop, I64), whole)):
            part(whole, rest)


def ceil_div(count: Any, size: Any) -> Any:
    """count / size, rounded up: a number of numbers, else a value."""
    return (count + size - 1) // size


def within(b: Builder, number: Index, size: Index, count: Index) -> tuple[Index, Index]:
    """Where a part begins and ends, by its number: of `size` elements, the last one perhaps of fewer."""
    if isinstance(size, int) and isinstance(count, int) and size >= count:
        return 0, count
    start = number * size
    return start, b.smaller(start + size, count)


def cut(number: Index, parts: Any, count: Any) -> tuple[Index, Index]:
    """Where one of so many parts of a count begins and ends, by its number: parts differ by one at most."""
    if isinstance(parts, int) and parts == 1:
        return 0, count
    return number * count // parts, (number + 1) * count // parts


def larger(b: Builder, a: Index, other: Index) -> Value:
    """The larger of two indices."""
    left, right = b.const(a, I64), b.const(other, I64)
    return b.select(b.compare("sgt", left, right), left, right)


def even(frame: Frame, count: int, parts: Index, usual: int, size: int = 1) -> Index:
    """Elements of a task, where each of `parts` has `count` pieces of `size`: `usual`, of a number of parts.

    Of a value, as many as leave four tasks a thread: all of them where there are so many parts. One thread
    shares nothing, and loops of known length are quicker: of a pool by 1.1.
    """
    if isinstance(parts, int) or frame.target.threads == 1:
        return usual
    tasks = frame.body.smaller(ceil_div(frame.threads * 4, parts), count)
    found: Index = ceil_div(count, tasks) * size
    return found


def share(b: Builder, count: Index, least: int, threads: Value) -> Value:
    """The part of a count that a task takes, of a value: four tasks a thread, or as many as have `least`."""
    return b.const(ceil_div(count, b.smaller(threads * 4, count // least + 1)), I64)


def batches(b: Builder, start: Index, stop: Index, size: int, part: Callable[[Index, int], None]) -> None:
    """part(first, count) for the rows start..stop-1: `size` at a time, then one at a time."""
    whole = start + (stop - start) // size * size
    for low, high, step in ((start, whole, size), (whole, stop, 1)):
        with b.loop(low, high, step, name="row") as row:
            part(row, step)


def places(index: Index, extents: Sequence[int]) -> list[Index]:
    """The position along each axis of a number that counts all of them, the last axis fastest."""
    found: list[Index] = []
    inner = extents[1:]
    for extent in reversed(inner):
        found.insert(0, index % extent)
        index = index // extent
    return [index, *found] if extents else []


def offset_of(at: Iterable[Index], steps: Iterable[int]) -> Index:
    """Elements to a place, from the position along each axis and the elements of a step along it."""
    offset: Index = 0
    for index, step in reversed(list(zip(at, steps, strict=True))):
        offset = index * step + offset
    return offset


@contextmanager
def nested(b: Builder, extents: Iterable[int], name: str) -> Iterator[list[Value]]:
    """A loop inside another for each extent: the counters, the outermost first."""
    with ExitStack() as nest:
        yield [nest.enter_context(b.loop(0, extent, name=name)) for extent in extents]


def steps(b: Builder, start: Index, stop: Index, unroll: int, visit: Callable[[Index, int], None]) -> Index:
    """visit(first, number) for the vectors of start..stop-1, `unroll` at a time; returns their end."""
    lanes, length = b.lanes, stop - start
    whole, even = start + length // (lanes * unroll) * (lanes * unroll), start + length // lanes * lanes
    with b.loop(start, whole, lanes * unroll, name="step") as first:
        for number in range(unroll):
            visit(first + number * lanes, number)
    with b.loop(whole, even, lanes, name="vector") as first:
        visit(first, 0)
    return even


class Write(Protocol):
    """Writes the code that computes and stores some elements of a run."""

    def __call__(self, at: Index, count: int, *, stream: bool = False) -> None:
        """`count` elements from `at` on; `stream`: past the caches, whole vectors at aligned addresses."""


def open_tail(b: Builder, start: Index, even: Index, stop: Index, write: Write) -> None:
    """Writes even..stop-1, fewer than a vector: by a vector that begins early, or element by element."""
    is_long = b.compare("sge", b.const(stop - start, I64), b.lanes)
    begin = b.select(is_long, b.const(stop, I64), even)
    with b.when(b.compare("slt", b.const(even, I64), begin)):
        write(stop - b.lanes, b.lanes)
    with b.loop(begin, stop, name="element") as i:
        write(i, 1)


def unaligned(b: Builder, address: Value, line: int) -> Value:
    """Elements from an address to the next cache line, which has so many."""
    number = b.op(I64, f"ptrtoint ptr {address.name} to i64")
    return (0 - number // (LINE_BYTES // line)) % line


def streamed(
    b: Builder, lead: Value, line: int, start: Index, stop: Index, unroll: int, write: Write
) -> None:
    """Writes the cache lines of a run past the caches, the first `lead` elements after its start.

    The ends of a run share a line with other runs. They are written as usual, by whole vectors, and so is the
    line beside each: where vectors overlap, both write the same values. Past the caches, a line that a vector
    has a part of must leave them first: on a Zen 4, 2 threads wrote 65,536 rows of 100 elements in 20.4 ms
    that way, and in 2.5 ms as usual.
    """
    lanes = b.lanes
    first = b.select(b.compare("ne", lead, 0), start + lead + line, b.const(start, I64))
    rest = (stop - first) % line
    last = b.select(b.compare("ne", rest, 0), stop - rest - line, b.const(stop, I64))

    def plain(begin: Index, end: Value) -> None:
        with b.loop(begin, end, lanes, name="end") as at:
            write(b.smaller(at, end - lanes), lanes)

    plain(start, first)
    steps(b, first, last, unroll, lambda at, _: write(at, lanes, stream=True))
    plain(last, b.const(stop, I64))


def line_elements(itemsize: int) -> int:
    """Elements of a cache line."""
    return LINE_BYTES // itemsize


def by_length(
    b: Builder, length: Index, line: int, long: Callable[[], None], short: Callable[[], None]
) -> None:
    """Code for runs of four cache lines or more, which can be streamed, and code for shorter ones."""
    known = b.const(length, I64)
    for how, part in (("sge", long), ("slt", short)):
        with b.when(b.compare(how, known, 4 * line)):
            part()
