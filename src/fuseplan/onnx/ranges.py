"""Rows of the table whose results are ranges of a value: views, which no launch copies."""

from __future__ import annotations

from fuseplan.graph.ops import Slice
from fuseplan.graph.why import Why
from fuseplan.onnx.given import Given, LeftError


def slices(given: Given) -> str:
    """A range along each of some axes."""
    given.floats_of_first()
    shape, name = given.shape(), given.inputs[0]
    starts, ends = given.integers(1, "starts") or (), given.integers(2, "ends") or ()
    axes = given.integers(3, "axes") or tuple(range(len(starts)))
    steps = given.integers(4) or (1,) * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            raise LeftError(Why.NOT_IN_TABLE, f"Slice with a step of {step}")
        begin, stop, _ = slice(start, end, step).indices(shape[axis])
        if (begin, stop, step) != (0, shape[axis], 1):
            name = given.add(Slice(axis % len(shape), begin, max(begin, stop), step), name)
    return name


def split(given: Given) -> tuple[str, ...]:
    """Ranges that follow one another: of the sizes that are told, else of one, the last perhaps shorter."""
    given.floats_of_first()
    shape, count = given.shape(), len(given.node.output)
    axis = given.attribute("axis", 0) % len(shape)
    extent = shape[axis]
    most = -(-extent // count)
    sizes = given.integers(1, "split") or tuple(max(0, min(most, extent - i * most)) for i in range(count))
    ends = [sum(sizes[: place + 1]) for place in range(count)]
    return tuple(
        given.add(Slice(axis, end - size, end), given.inputs[0])
        for size, end in zip(sizes, ends, strict=True)
    )
