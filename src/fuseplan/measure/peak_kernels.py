"""The smallest kernels that show what a processor can do: multiply-adds from registers, reads, copies.

Each is one function with the calling convention of any kernel (docs/design/0001-records.md). A launch has
`tasks` tasks; each works on memory of its own, so it does not matter which thread takes which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64, PTR, Module
from fuseplan.backends.cpu.tile_registers import FACTORS, TILE_BYTES, Tiles
from fuseplan.kernels.target import Target

ACCUMULATORS = 12  # more than latency times ports of a core (4 x 2), and few enough for 16 registers
VECTORS_A_STEP = 8


@dataclass(frozen=True)
class PeakKernel:
    """A kernel to measure with.

    Attributes:
        entry: the function's name, which says what it measures: `fma`, `tiles`, `read`, `copy`, `stream`.
        flops: floating point operations of a launch.
        nbytes: bytes a launch reads and writes.
    """

    entry: str
    text: str
    flops: int = 0
    nbytes: int = 0


def fma_kernel(target: Target, tasks: int, steps: int) -> PeakKernel:
    """Independent chains of multiply-adds: `steps` of each in every task. Reads and writes almost nothing."""
    module, lanes = _start(target)
    builder, args = _function(module, "fma", lanes)
    factor = _pointer(builder, args, 0)

    def work(task: Value) -> None:
        scale = builder.load(factor)
        chains = [builder.variable(builder.vector, float(i + 1)) for i in range(ACCUMULATORS)]
        with builder.loop(0, steps):
            for chain in chains:
                chain.set(builder.fma(chain.get(), scale, scale))
        total = chains[0].get()
        for chain in chains[1:]:
            total = total + chain.get()
        # One cache line and more between the tasks: a shared line would be fought for.
        builder.store(total, builder.at(_pointer(builder, args, 1), task * (4 * lanes)))

    _each_task(builder, args, tasks, work)
    builder.finish()
    return PeakKernel("fma", module.text(), flops=2 * ACCUMULATORS * lanes * steps * tasks)


def tile_kernel(target: Target, tasks: int, steps: int) -> PeakKernel:
    """Products of two by two tiles of bf16 that the first cache holds: `steps` of them in every task."""
    module, lanes = _start(target)
    builder, args = _function(module, "tiles", lanes)
    tiles, factors = Tiles(builder, FACTORS["bf16"]), _pointer(builder, args, 0)
    tiles.begin()

    def work(_: Value) -> None:
        with builder.loop(0, steps):
            tiles.add(2, factors, builder.at(factors, 2 * TILE_BYTES, "i8"), 1, factors, 0)

    _each_task(builder, args, tasks, work)
    tiles.end()
    builder.finish()
    return PeakKernel("tiles", module.text(), flops=2 * 32**3 * steps * tasks)


def memory_kernel(target: Target, entry: str, tasks: int, region: int, repeats: int) -> PeakKernel:
    """Each task goes `repeats` times over `region` bytes of its own: reads them, or copies half to half.

    Args:
        entry: `read`, `copy`, or `stream`, a copy whose stores go past the caches.
        region: bytes of one, a multiple of 16 vectors.
    """
    module, lanes = _start(target)
    builder, args = _function(module, entry, lanes)
    elements = region // 4
    body = _reading if entry == "read" else _copying

    def work(task: Value) -> None:
        base = builder.at(_pointer(builder, args, 1), task * elements)
        sink = builder.at(_pointer(builder, args, 0), task * (4 * lanes))
        body(builder, base, sink, elements, repeats, entry == "stream")

    _each_task(builder, args, tasks, work)
    if entry == "stream":
        builder.line("fence seq_cst")
    builder.finish()
    return PeakKernel(entry, module.text(), nbytes=region * repeats * tasks)


def _reading(builder: Builder, base: Value, sink: Value, elements: int, repeats: int, _: bool) -> None:
    sums = [builder.variable(builder.vector, 0.0) for _ in range(VECTORS_A_STEP)]
    with builder.loop(0, repeats), builder.loop(0, elements, VECTORS_A_STEP * builder.lanes) as index:
        for step, total in enumerate(sums):
            total.set(total.get() + builder.load(_step(builder, base, index, step), align=64))
    result = sums[0].get()
    for total in sums[1:]:
        result = result + total.get()
    builder.store(result, sink)


def _copying(builder: Builder, base: Value, _: Value, elements: int, repeats: int, stream: bool) -> None:
    half = elements // 2
    with builder.loop(0, repeats), builder.loop(0, half, VECTORS_A_STEP * builder.lanes) as index:
        for step in range(VECTORS_A_STEP):
            place = _step(builder, base, index, step)
            builder.store(builder.load(place, align=64), builder.at(place, half), align=64, stream=stream)


def _step(builder: Builder, base: Value, index: Index, step: int) -> Value:
    return builder.at(builder.at(base, index), step * builder.lanes)


def _start(target: Target) -> tuple[Module, int]:
    return Module(f'"prefer-vector-width"="{target.vector_bytes * 8}"'), target.vector_bytes // 4


def _function(module: Module, entry: str, lanes: int) -> tuple[Builder, Value]:
    parameters = ((PTR, "args"), (I64, "thread"), (I64, "threads"))
    builder = Builder(module, entry, parameters, element="float", lanes=lanes)
    return builder, builder.parameters[0]


def _pointer(builder: Builder, args: Value, slot: int) -> Value:
    return builder.load(builder.at(args, 16 + slot, I64), PTR)


def _each_task(builder: Builder, args: Value, tasks: int, work: Callable[[Value], None]) -> None:
    """Takes tasks until there are none left. A thread can meet no more than all of them."""
    with builder.loop(0, tasks, name="turn"):
        task = builder.op(I64, f"atomicrmw add ptr {args.name}, i64 1 monotonic", "task")
        with builder.when(builder.compare("slt", task, tasks)):
            work(task)
