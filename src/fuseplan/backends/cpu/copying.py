"""Copies of operands that each call gives: elements in the order in which a kernel reads them.

A step of training packs the weights in each pass: a linear layer's of f32[256x256] in 12 us on a Zen 4 whose
other processes are busy, in squares that are transposed in registers; NumPy takes 48.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.frame import attributes
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import I64, PTR, Module
from fuseplan.kernels.target import Target, host_target
from fuseplan.stores import cache

Copy = Callable[[int, int], None]  # to where, and from where
ELEMENTS = {4: "i32", 8: "i64"}  # by their bytes
AXES = 4
held: list[object] = []  # the code that is in use


def copier(shape: Sequence[int], steps: Sequence[int], itemsize: int) -> Copy | None:
    """A function that copies elements `steps` apart, one behind the other; None for shapes it does not take.

    Args:
        shape: the extents, outermost first.
        steps: of the axes.
        itemsize: bytes of an element.
    """
    joined = _joined(shape, steps)
    if itemsize not in ELEMENTS or not 0 < len(joined) <= AXES or 0 in shape:
        return None
    places = accumulate((extent for extent, _ in joined[:0:-1]), mul, initial=1)
    *axes, last = [(*each, place) for each, place in zip(joined, reversed([*places]), strict=True)]
    axes.sort(key=lambda axis: -abs(axis[1]))  # reads follow memory, the step of 1 last
    axes = [(1, 0, 0)] * (AXES - 1 - len(axes)) + [*axes, last]
    numbers = [ctypes.c_int64(each) for part in zip(*axes, strict=True) for each in part]
    function = _function(itemsize)
    return lambda to, begin: function(to, begin, *numbers)


def _joined(shape: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
    """The axes with their steps, without those of one element; axes that one step leads along are one."""
    made: list[tuple[int, int]] = []
    for extent, step in zip(shape, steps, strict=True):
        if extent == 1:
            continue
        if made and made[-1][1] == step * extent:
            made[-1] = made[-1][0] * extent, step
        else:
            made.append((extent, step))
    return made


@functools.cache
def _function(itemsize: int) -> Callable[..., None]:
    target = host_target()
    text = _text(itemsize, target)
    versions = (toolchain.fingerprint(), repr(toolchain.host_cpu()))
    code = cache.kept(lambda: toolchain.compile_object(text), text, *versions)
    address = toolchain.load_object(code, ["copy"])["copy"]
    made = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * (3 * AXES))(address)
    held.append(address)
    return made


def _text(itemsize: int, target: Target) -> str:
    """LLVM IR: squares where the axis before the last is read with a step of 1, rows where the last one is.

    Elements of the last axis are written one behind the other.
    """
    lanes, module = target.vector_bytes // itemsize, Module(attributes(target), target.features)
    numbers = [(I64, f"{word}{axis}") for word in ("count", "step", "place") for axis in range(AXES)]
    b = Builder(
        module, "copy", [(PTR, "to"), (PTR, "begin"), *numbers], element=ELEMENTS[itemsize], lanes=lanes
    )
    to, begin, n0, n1, n2, n3 = b.parameters[: 2 + AXES]
    steps, places = b.parameters[2 + AXES : -AXES], b.parameters[-AXES:]

    def whole(count: Value, is_taken: Value) -> Value:
        """As many as whole vectors hold; none where they are not taken."""
        return b.select(is_taken, b.op(I64, f"and i64 {count.name}, {-lanes}"), 0)

    across, along = (b.compare("eq", steps[axis], 1) for axis in (2, 3))
    columns, rows, row = whole(n2, across), whole(n3, across), whole(n3, along)
    with b.loop(0, n0) as i0, b.loop(0, n1) as i1:
        source = b.at(begin, i0 * steps[0] + i1 * steps[1])
        made = b.at(to, i0 * places[0] + i1 * places[1])

        def element(i2: Value, i3: Value) -> None:
            x = b.load(b.at(source, i2 * steps[2] + i3 * steps[3]), ELEMENTS[itemsize])
            b.store(x, b.at(made, i2 * places[2] + i3))

        def square(i2: Value, i3: Value) -> None:
            read = [b.load(b.at(source, i2 + (i3 + lane) * steps[3])) for lane in range(lanes)]
            for lane, column in enumerate(transposed(b, read)):
                b.store(column, b.at(made, (i2 + lane) * places[2] + i3))

        with b.loop(0, columns, lanes) as i2:
            with b.loop(0, rows, lanes) as i3:
                square(i2, i3)
            with b.loop(rows, n3) as i3, b.loop(i2, i2 + lanes) as at:
                element(at, i3)
        with b.loop(columns, n2) as i2:
            with b.loop(0, row, lanes) as i3:
                b.store(b.load(b.at(source, i2 * steps[2] + i3)), b.at(made, i2 * places[2] + i3))
            with b.loop(row, n3) as i3:
                element(i2, i3)
    b.finish()
    return module.text()
