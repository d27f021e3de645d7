"""Plans without a contraction: one pass over src, all operators applied to vectors in registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lookup import read_src
from fuseplan.backends.cpu.loops import (
    STREAMED_RUN,
    by_length,
    ceil_div,
    line_elements,
    open_tail,
    places,
    share,
    steps,
    streamed,
    unaligned,
    within,
)
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.walk import offsets, others, repeat, roaming, walk
from fuseplan.backends.parts import ends
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    accuracy_claim,
    lanes,
    pointwise_claims,
    unit_roundoff,
)
from fuseplan.messages.reasons import Claim
from fuseplan.scalar import Scalar, functions
from fuseplan.system.locks import cached_property

_TASK_BYTES = 48 * 1024  # about a microsecond's work: less is not worth another thread


@dataclass(frozen=True)
class Pointwise(CpuTemplate):
    """Chains of elementwise operators, in any layout.

    reads:  src and every operand once; expressions of the channel alone are computed once per block
    writes: dst once
    chosen: for every plan without a contraction

    Attributes:
        vectors: vectors in one step of the innermost loop.
        repeat: positions in a run, where lanes are channels.
        block_rows: runs in a task (groups of `lanes` runs, where the loop over channels goes around them).
        block_run: elements of a run in a task.
        stream: writes go past the caches.
    """

    name: ClassVar[str] = "pointwise"
    error_scale: ClassVar[str] = "the result of each function of the formulas"
    opens: ClassVar[bool] = True

    vectors: int
    repeat: int
    block_rows: int
    block_run: int
    stream: bool

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from pointwise_claims(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        large = _moved(kernel) > model.kept_bytes(target) or kernel.open_axis is not None
        for stream in (True, False) if large else (False,):
            candidate = _blocked(kernel, target, stream)
            if candidate.stream == stream:
                yield candidate

    def seconds(self, kernel: Kernel, target: Target) -> float:
        paid = model.paid(self.traffic(kernel, target), target, stream=self.stream)
        return model.seconds(kernel, target, flops=kernel.flops, traffic=paid, efficiency=0.25)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per function, relative to the function's result: there is no sum of products."""
        stages = (*kernel.prologue, *kernel.epilogue)
        return sum(max(map(functions, stage.expressions)) for stage in stages) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return _Writer(self, kernel, target).source()


def _moved(kernel: Kernel) -> int:
    """Bytes of the tensors that are as large as dst."""
    elements = sum(operand.nbytes for operand in kernel.operands if not operand.packed)
    return kernel.src.nbytes + kernel.written_bytes + elements


def _blocked(kernel: Kernel, target: Target, stream: bool) -> Pointwise:
    """Knobs with about four tasks a thread, fewer where a task would be too small to be worth handing out."""
    width, plain = lanes(kernel, target), walk(kernel)
    step, room = 4 * width, _scratch_room(kernel, target)
    path = plain.repeated(repeat(plain, width, room, 2 * STREAMED_RUN if stream else 4))
    if 2 * _moved(kernel) > target.l3_bytes:
        # Parts of rows cost more than values from the second cache: on a Zen 4 core, rows of 1056 channels in
        # two parts, 64 MB in all, took 4.0 ms, whole ones 1.7.
        room *= max(1, target.l2_bytes // (4 * target.l1_bytes))
    tasks = max(1, min(4 * target.threads, _moved(kernel) // _TASK_BYTES))
    units = path.rows * -(-path.channels // width)
    chunks = -(-path.run.extent // (room // step * step)) if path.period and path.repeats == 1 else 1
    if units < tasks and path.repeats == 1:
        chunks = max(chunks, min(-(-tasks // units), path.run.extent // (4 * step) or 1))
    block_run = -(-path.run.extent // chunks)
    if chunks > 1:
        block_run = -(-block_run // step) * step
    chunks = -(-path.run.extent // block_run)
    parts = max(1, min(units, tasks // chunks))
    streams = stream and block_run >= STREAMED_RUN * width and path.run.src == 1 and not kernel.parts
    return Pointwise(4, path.repeats, -(-units // parts), block_run, streams)


def _scratch_room(kernel: Kernel, target: Target) -> int:
    """Elements of a run whose channels' values fit half the first cache; never less than a few vectors."""
    values = sum(operand.is_channel for operand in kernel.operands)
    fitting = target.l1_bytes // 2 // (max(1, values) * model.itemsize(kernel))
    return max(16 * lanes(kernel, target), fitting)


@dataclass(frozen=True)
class _Line:
    """One run: where it begins in dst, src and an image, its channel, where a task enters, what is known.

    `others` are its places in the operands with axes of their own.
    """

    dst: Index
    src: Index
    image: Index
    channel: Index
    origin: Index
    known: dict[object, Value]
    others: tuple[Index, ...] = ()


class _Writer:
    """Writes one kernel."""

    def __init__(self, knobs: Pointwise, kernel: Kernel, target: Target) -> None:
        self.frame = Frame(knobs, kernel, target, workspace=False)
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.knobs, self.kernel = knobs, self.frame.kernel
        self.path = walk(self.kernel).repeated(knobs.repeat)
        self.is_open = kernel.open_axis is not None
        self.least = max(1, _TASK_BYTES * kernel.dst.size // _moved(kernel))  # elements of a task
        self.most = model.kept_bytes(target) * kernel.src.batch // _moved(kernel)
        self.block_run = self._block_run()
        self.stages = Elementwise(self.frame, "epilogue")
        self.ends = ends(kernel)
        self.of_parts = [
            [Elementwise(self.frame, end.role, number=number) for number in range(len(end.starts))]
            for end in self.ends
        ]
        self.roaming = [operand.key for _, operand in roaming(kernel)]
        self.src, self.dst = self.frame.pointer("src"), self.frame.pointer("dst")
        self.activation = any(operand.is_inside for operand in kernel.operands)
        self.uniform: dict[object, Value] = {}

    def _block_run(self) -> int:
        """Elements of a run in a task."""
        extent = self.path.run.extent
        if not isinstance(extent, int):
            step = self.lanes * self.knobs.vectors
            return ceil_div(share(self.b, extent, self.least, self.frame.threads), step) * step
        # A run over several positions is not split: a task has the values of all its channels.
        block = min(self.knobs.block_run, extent) if self.path.repeats == 1 else extent
        if block < extent and block % self.lanes:
            raise ValueError(f"a part of a run is whole vectors of {self.lanes}, not {block} elements")
        return block

    def _block_rows(self, units: Index) -> Index:
        """Runs in a task, or groups of runs."""
        if isinstance(units, int):
            return self.knobs.block_rows
        each = self.path.run.extent * (self.lanes if self.path.channel else 1)
        return share(self.b, units, max(1, self.least // each), self.frame.threads)

    @cached_property
    def hoisted(self) -> list[Scalar]:
        """What is computed once a channel and kept in memory; an operand as it is, is in memory already."""
        nodes = self.stages.invariants(channel=True)
        return nodes if self.path.repeats > 1 else [node for node in nodes if node.fn != "leaf"]

    @cached_property
    def scratch(self) -> dict[Scalar, Value]:
        """Room for each hoisted value of all channels that a task meets at once."""
        if not self.path.along_channels and self.path.channel is None:
            return {}
        extent = self.block_run if self.path.along_channels else self.lanes
        return {node: self.b.buffer(extent + 2 * self.lanes) for node in self.hoisted}

    def source(self) -> Source:
        """The whole kernel: one phase of tasks, each some rows of a part of the run."""
        b, path = self.b, self.path
        groups = -(-path.channels // self.lanes)
        units, extent = path.rows * groups, path.run.extent
        block_rows = self._block_rows(units)
        chunks, blocks = ceil_div(extent, self.block_run), ceil_div(units, block_rows)
        with self.frame.tasks(blocks * chunks) as task:
            start, stop = within(b, task % chunks, self.block_run, extent)
            begin, end = within(b, task // chunks, block_rows, units)
            self._share(start, stop)
            with b.loop(begin, end, name="row") as unit:
                self._unit(unit // groups, unit % groups, start, stop)
            if self.knobs.stream:
                # Stores past the caches are seen before the task counts as finished.
                b.line("fence seq_cst")
        return self.frame.source()

    def _share(self, start: Index, stop: Index) -> None:
        """What is the same for the whole task."""
        whole = Place(0, 0, False, self.lanes)
        for node in self.stages.invariants(channel=False):
            self.stages.evaluate(node, whole, self.uniform)
        if self.path.along_channels:
            self._fill_run(start, stop)
        elif self.path.channel is None:
            self.stages.prepare(whole, self.uniform)

    def _unit(self, row: Index, group: Index, start: Index, stop: Index) -> None:
        """One row: its run, or the runs of `lanes` channels."""
        begin = offsets(self.path.outer, row)
        if self.path.short:
            stop = self.b.select(self._is_last(row), self.path.short, self.b.const(stop, I64))
        if self.path.channel is None:
            places = others(self.path.outer, row, len(self.roaming))
            self._run(_Line(*begin, 0, start, self.uniform, places), start, stop)
            return
        self._channels(begin, group, start, stop)

    def _is_last(self, row: Index) -> Value:
        """Whether the row is the last along `outer[-1]`."""
        outer = self.path.outer
        position = places(row, [axis.extent for axis in outer])[-1]
        return self.b.compare("eq", self.b.const(position, I64), outer[-1].extent - 1)

    # ---- what depends on the channel

    def _fill_run(self, start: Index, stop: Index) -> None:
        """Lanes are channels: the values of a task's part of the run, one after the other."""
        b, path, step = self.b, self.path, self.lanes
        if not self.scratch:
            return
        period: Index = path.period if path.repeats > 1 else stop - start
        with b.loop(0, period, step, name="fill") as i:
            self._fill(i, start + i if path.repeats == 1 else i, self.lanes)
        if path.repeats == 1:
            return
        with b.loop(1, path.repeats, name="copy") as turn, b.loop(0, path.period, step, name="fill") as i:
            for room in self.scratch.values():
                b.store(b.load(b.at(room, i)), b.at(room, turn * path.period + i))

    def _fill(self, at: Index, channel: Index, count: int) -> None:
        """The values of `lanes` channels; operands are padded to whole vectors, so all may be read."""
        place, known = Place(0, channel, True, count), dict(self.uniform)
        for node, room in self.scratch.items():
            self.b.store(self.stages.evaluate(node, place, known), self.b.at(room, at))

    def _channels(self, begin: tuple[Index, Index, Index], group: Index, start: Index, stop: Index) -> None:
        """The runs of one group of channels, each with its channel's values in all lanes."""
        b, axis = self.b, self.path.channel
        if axis is None:
            raise ValueError("there is no loop over channels")
        first = group * self.lanes
        if self.scratch:
            self._fill(0, first, self.lanes)
        with b.loop(first, b.smaller(first + self.lanes, axis.extent), name="channel") as channel:
            known, place = dict(self.uniform), Place(0, channel, False, self.lanes)
            for node in self.stages.invariants(channel=True):
                if node in self.scratch:
                    spread = b.broadcast(self.scratch[node], channel - first)
                    self.stages.keep(node, place, spread, known)
                else:
                    self.stages.evaluate(node, place, known)
            dst, src, image = begin
            dst, src = channel * axis.dst + dst, channel * axis.src + src
            image = channel * axis.image + image if axis.image else image
            self._run(_Line(dst, src, image, channel, start, known), start, stop)

    # ---- a run

    def _run(self, line: _Line, start: Index, stop: Index) -> None:
        """Elements start..stop-1 of a run."""
        if not self.knobs.stream:
            self._plain(line, start, stop)
            return
        if not self.is_open and self._shortest() >= 4 * line_elements(self.kernel.dst.itemsize):
            self._streamed(line, start, stop)
            return
        length, streamed, plain = stop - start, partial(self._streamed, line), partial(self._plain, line)
        if self.is_open:  # of tensors that the last cache holds, every run counts as short
            is_large = self.b.compare("sgt", self.frame.pointer("extent"), self.most)
            length = self.b.select(is_large, self.b.const(length, I64), 0)
        each = line_elements(self.kernel.dst.itemsize)
        by_length(self.b, length, each, partial(streamed, start, stop), partial(plain, start, stop))

    def _ends(self) -> dict[int, int]:
        """Where the last part of a run may end, and where that part begins."""
        ends = [self.path.run.extent, *([self.path.short] if self.path.short else [])]
        return {end: (end - 1) // self.block_run * self.block_run for end in ends}

    def _shortest(self) -> int:
        return min(self.block_run, *(end - start for end, start in self._ends().items()))

    def _plain(self, line: _Line, start: Index, stop: Index) -> None:
        b, lanes, step = self.b, self.lanes, self.lanes * self.knobs.vectors
        length = stop - start
        if isinstance(length, int) and length <= 2 * step:
            for done in range(0, length - length % lanes, lanes):
                self._vector(line, start + done, lanes)
        else:
            even = steps(b, start, stop, self.knobs.vectors, lambda i, _: self._vector(line, i, lanes))
            if not all(isinstance(end, int) for end in (self.path.run.extent, self.path.short)):
                open_tail(b, start, even, stop, partial(self._vector, line))
                return
        for end, begin in self._ends().items():
            self._tail(line, stop, end, begin)

    def _tail(self, line: _Line, stop: Index, end: int, begin: int) -> None:
        """What is left of a run that ends at `end`: a vector that begins early, or a part of one."""
        rest = end % self.lanes
        if not rest:
            return
        with ExitStack() as guard:
            if not isinstance(stop, int):
                guard.enter_context(self.b.when(self.b.compare("eq", stop, end)))
            if end - begin >= self.lanes:
                self._vector(line, end - self.lanes, self.lanes)
            else:
                self._vector(line, end - rest, rest)

    def _streamed(self, line: _Line, start: Index, stop: Index) -> None:
        """The run's aligned vectors go past the caches."""
        b, dst = self.b, self.kernel.dst
        where = b.at(self.dst, line.dst + start, storage.element_type(dst.dtype))
        each = line_elements(dst.itemsize)
        lead, write = unaligned(b, where, each), partial(self._vector, line)
        streamed(b, lead, each, start, stop, self.knobs.vectors, write)

    def _vector(self, line: _Line, i: Index, count: int, *, stream: bool = False) -> None:
        """`count` elements of a run from its element i on."""
        if self.kernel.parts:
            self._parts(line, i, count)
            return
        b, along = self.b, self.path.along_channels
        inside = line.image + i * self.path.run.image if self.activation else None
        place = Place(line.dst + i, i if along else line.channel, along, count, inside)
        known = dict(line.known)
        rooms = self.scratch if along else {}
        for node, room in rooms.items():
            self.stages.keep(node, place, b.load(b.at(room, i - line.origin)), known)
        step = self.path.run.src
        x = read_src(self.frame, line.src + i * step, count, step)
        finish(self.frame, self.stages, x, place, known, stream=stream)

    def _parts(self, line: _Line, i: Index, count: int) -> None:
        """`count` places of a run from its place i on: each part of src is read, each part of dst written."""
        b, run, known = self.b, self.path.run, dict(line.known)
        steps = zip(self.roaming, line.others, run.others, strict=True)
        places = {key: (begin + i * step, step) for key, begin, step in steps}
        before, behind = (
            [Place(begin + i * step + start, 0, False, count, None, step, places) for start in end.starts]
            for end, begin, step in zip(self.ends, (line.src, line.dst), (run.src, run.dst), strict=True)
        )
        given: dict[str, Value] = {}
        for number, (stages, place) in enumerate(zip(self.of_parts[0], before, strict=True)):
            x = storage.read_at(b, self.kernel.src.dtype, self.src, place.element, count, run.src)
            given[f"x[{number}]"] = stages.apply(x, place, known)
        for stages, place in zip(self.of_parts[1], behind, strict=True):
            finish(self.frame, stages, x, place, known, parts=given)
