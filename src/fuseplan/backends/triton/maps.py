"""Tensor maps as the driver encodes them, from a slot's TensorMap and the layout that the kernel expects."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from fuseplan.backends.triton.artifact import MapLayout
from fuseplan.kernels.emit import TensorMap
from fuseplan.language.dtypes import dtype_of

ELEMENTS = {"i8": 0, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}  # CUtensorMapDataType
ENCODED_BYTES = 128
ALIGNMENT = 64  # of an encoded map, which is an argument by value
MOST_AXES = 5
WIDEST_BOX = 256
WIDEST_STEP = 8
STRIDE_BYTES = 16  # every stride is a multiple of it
SWIZZLED = {1: 32, 2: 64, 3: 128}  # bytes of a box's rows, at most


class MapEncoding:
    """The arguments of cuTensorMapEncodeTiled but for the memory: innermost axis first, as the driver counts.

    A box's extents are what the copy spans, so that a step of 2 doubles them.
    """

    __slots__ = ("box", "dtype", "extents", "rank", "steps", "strides", "swizzle")

    def __init__(self, mapped: TensorMap, layout: MapLayout) -> None:
        size = dtype_of(mapped.dtype).itemsize
        spans = [extent * step for extent, step in zip(layout.box, mapped.steps, strict=True)]
        self.dtype, self.rank, self.swizzle = ELEMENTS[mapped.dtype], len(mapped.shape), layout.swizzle
        self.extents = _reversed(ctypes.c_uint64, mapped.shape)
        self.strides = _reversed(ctypes.c_uint64, [stride * size for stride in mapped.strides[:-1]])
        self.box = _reversed(ctypes.c_uint32, spans)
        self.steps = _reversed(ctypes.c_uint32, mapped.steps)


def _reversed(kind: Any, values: Sequence[int]) -> Any:
    return (kind * max(1, len(values)))(*reversed(values))


def problems(mapped: TensorMap, layout: MapLayout) -> Iterator[str]:
    """Why the copy engine cannot have such a map; none if it can."""
    size, rank = dtype_of(mapped.dtype).itemsize, len(mapped.shape)
    if not 1 <= rank <= MOST_AXES or {len(each) for each in _axes(mapped, layout)} != {rank}:
        yield f"it has {rank} axes; want 1 to {MOST_AXES}, the same everywhere"
        return
    if mapped.strides[-1] != 1 or mapped.steps[-1] != 1:
        yield "its innermost axis is not contiguous"
    if any(stride * size % STRIDE_BYTES or not 0 < stride * size < 2**40 for stride in mapped.strides[:-1]):
        yield f"a stride is not a multiple of {STRIDE_BYTES} bytes"
    if any(not 1 <= step <= WIDEST_STEP for step in mapped.steps):
        yield f"a step is not 1 to {WIDEST_STEP}"
    if any(
        not 1 <= extent * step <= WIDEST_BOX for extent, step in zip(layout.box, mapped.steps, strict=True)
    ):
        yield f"a box spans more than {WIDEST_BOX} elements along an axis"
    row = layout.box[-1] * size
    if row % STRIDE_BYTES or row > SWIZZLED.get(layout.swizzle, row):
        yield f"a box has rows of {row} bytes"
    if any(not 1 <= extent <= 2**32 for extent in mapped.shape):
        yield "an extent is not 1 to 2^32"


def _axes(mapped: TensorMap, layout: MapLayout) -> tuple[tuple[int, ...], ...]:
    return mapped.shape, mapped.strides, mapped.steps, mapped.box, layout.box
