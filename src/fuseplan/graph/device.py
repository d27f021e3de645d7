"""The values of a session on a GPU, as torch's tensors; a second run is recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fuseplan.execution.run import BoundPlan
from fuseplan.graph.op import GraphOp
from fuseplan.graph.ops import (
    LEAVES,
    Concat,
    Convert,
    Expand,
    Flip,
    Map,
    Pad,
    Permute,
    Reduce,
    Reshape,
    Slice,
)
from fuseplan.graph.place import GPU_LINE, Call, Compute, Placed, Step
from fuseplan.graph.room import Live, Room
from fuseplan.graph.type import numpy_dtype, word_of
from fuseplan.measure.spaces import arithmetic_of
from fuseplan.scalar import fold
from fuseplan.tensors.torch_tensors import DTYPES

Array = NDArray[Any]
TORCH = {**DTYPES, "i64": torch.int64}  # by our words; other dtypes stay in NumPy
NARROW = (torch.float16, torch.bfloat16)  # what formulas and sums are computed in f32 of
LINE = 256  # bytes: what torch's own tensors begin at a multiple of


class DeviceRoom(Room):
    """A GPU's memory.

    How values lie in the arena is told by an array in host memory that nothing touches, so that views are
    NumPy's in both kinds of rooms. Inputs have memory that stays. Where all steps of a run work on the
    device, the second run is recorded, and the following ones replay it.

    Args:
        device: torch's name of it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._inputs: dict[str, torch.Tensor] = {}
        self._is_fixed, self._has_run = False, False
        self._recorded: tuple[Any, Live] | None = None
        self._done = torch.cuda.Event() if self._device.type == "cuda" else None

    def lay(self, nbytes: int, steps: Sequence[Step]) -> None:
        nbytes = -(-max(nbytes, 1) // LINE) * LINE
        self._stand_in = np.empty(nbytes + LINE, np.uint8)
        self._memory = torch.empty(nbytes + LINE, dtype=torch.uint8, device=self._device)
        self._is_fixed = self._done is not None and all(map(_is_on_device, steps))

    def at(self, placed: Placed) -> torch.Tensor:
        return self._mirrored(placed.array(self._stand_in))

    def lying(self, placed: Placed, shape: tuple[int, ...]) -> torch.Tensor | None:
        array = placed.array(self._stand_in)
        found = array.reshape(shape)
        if not np.may_share_memory(found, self._stand_in):
            return None
        mirrored = self._mirrored(found)
        return None if mirrored.data_ptr() % GPU_LINE else mirrored

    def _mirrored(self, array: Array) -> torch.Tensor:
        """The tensor that lies in the device's arena as an array does in the stand-in."""
        begin = array.__array_interface__["data"][0] - self._stand_in.__array_interface__["data"][0]
        strides = [step // array.itemsize for step in array.strides]
        memory = self._memory.view(TORCH[word_of(array.dtype)])
        return memory.as_strided(array.shape, strides, begin // array.itemsize)

    def constant(self, value: Any) -> torch.Tensor:
        return self._uploaded(np.asarray(value))

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.data_ptr() % GPU_LINE else tensor

    def entered(self, name: str, value: Any) -> Any:
        """An input of a run, in memory that stays; a value that torch has no dtype for as it is."""
        tensor = value if isinstance(value, torch.Tensor) else _in_torch(value)
        if tensor is None:
            self._is_fixed = False
            return value
        known = self._inputs.get(name)
        if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            known = self._inputs[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._recorded = None  # it reads the memory of the one before
        return known.copy_(tensor.detach())

    def _uploaded(self, array: Array) -> Any:
        tensor = _in_torch(array)
        return array if tensor is None else tensor.to(self._device)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def evaluator(self, op: GraphOp) -> Callable[[Sequence[Any]], Sequence[Any]]:
        known = ON_DEVICE.get(type(op))

        def evaluate(given: Sequence[Any]) -> Sequence[Any]:
            if known is not None and all(isinstance(each, torch.Tensor) for each in given):
                return (known(op, *given),)
            made = op.evaluate([*map(self.to_host, given)])
            return [*map(self.from_host, made)]

        return evaluate

    def writer(self, op: GraphOp) -> Callable[[Sequence[Any], torch.Tensor], object]:
        evaluate = self.evaluator(op)
        return lambda given, dst: dst.copy_(evaluate(given)[0])

    def launcher(self, call: BoundPlan, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
        return partial(call, src, dst)  # on the stream of that time: the one that records, in turn

    def to_host(self, value: Any) -> Any:
        return in_numpy(value) if isinstance(value, torch.Tensor) else value

    def from_host(self, value: Any) -> Any:
        return self._uploaded(value) if isinstance(value, np.ndarray) else value

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The time of a call: its work follows that of the call before, on whatever stream that was."""
        if self._done is None:
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        with torch.cuda.device(self._device):
            yield
        self._done.record(stream)

    def ran(self, live: Live, run: Callable[[Live], object]) -> Mapping[str, Any]:
        if self._recorded is None and self._is_fixed and self._has_run:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run(live)
            self._recorded = graph, live
        self._has_run = True
        if self._recorded is None:
            run(live)
            return live
        graph, live = self._recorded
        graph.replay()
        return live

    def own(self, value: Any) -> Any:
        is_here = isinstance(value, torch.Tensor)
        return value.clone(memory_format=torch.contiguous_format) if is_here else super().own(value)


def _is_on_device(step: Step) -> bool:
    is_ours = not isinstance(step, Compute) or type(step.node.op) in ON_DEVICE
    return is_ours and not isinstance(step, Call)


def _in_torch(array: Array) -> torch.Tensor | None:
    """An array as a tensor with memory of its own; None where torch has no such dtype."""
    dtype = TORCH.get(word_of(array.dtype))
    if dtype is None:
        return None
    made = torch.empty(array.shape, dtype=dtype)
    into = made.view(BITS[made.itemsize]) if dtype not in HELD else made
    np.copyto(into.numpy(), array.view(into.numpy().dtype))
    return made


def in_numpy(tensor: torch.Tensor) -> Array:
    """A tensor as an array, whose dtype is ml_dtypes' where NumPy has none."""
    made = tensor.detach().cpu().contiguous()
    bits: Array = (made if made.dtype in HELD else made.view(BITS[made.itemsize])).numpy()
    return bits.view(numpy_dtype(_WORDS[made.dtype]))


BITS = {1: torch.uint8, 2: torch.int16}
HELD = tuple(TORCH[word] for word in ("f64", "f32", "f16", "i64", "i32", "i16", "i8", "u8", "bool"))
_WORDS = {dtype: word for word, dtype in TORCH.items()}


def _mapped(op: Map, *given: torch.Tensor) -> torch.Tensor:
    wide = [each.float() if each.dtype in NARROW else each for each in given]
    by = arithmetic_of(wide[0])
    const = partial(torch.full, (), dtype=wide[0].dtype, device=wide[0].device)  # a graph records no upload
    made = fold(op.expression, dict(zip(LEAVES, wide, strict=False)), {**by.table, "const": const})
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    return made.broadcast_to(shape).to(given[0].dtype)


def _reduced(op: Reduce, src: torch.Tensor) -> torch.Tensor:
    wide = src.float() if src.dtype in NARROW else src
    return _REDUCE[op.kind](wide, op.axes, keepdim=op.keepdims).to(src.dtype) if op.axes else src.clone()


def _padded(op: Pad, src: torch.Tensor) -> torch.Tensor:
    sides = [side for pair in reversed(op.padding) for side in pair]
    return torch.nn.functional.pad(src, sides, value=op.value)


_REDUCE: Mapping[str, Any] = {"mean": torch.mean, "sum": torch.sum, "amax": torch.amax, "amin": torch.amin}
# Operators of ours by torch; the others are computed by NumPy.
ON_DEVICE: Mapping[type[GraphOp], Callable[..., torch.Tensor]] = {
    Reshape: lambda op, src: src.reshape(op.shape),
    Permute: lambda op, src: src.permute(op.order),
    Slice: lambda op, src: op.evaluate([src])[0],
    Expand: lambda op, src: src.expand(op.shape),
    Flip: lambda op, src: src.flip(op.axes),
    Concat: lambda op, *given: torch.cat(given, op.axis),
    Convert: lambda op, src: src.to(TORCH[op.dtype]),
    Pad: _padded,
    Map: _mapped,
    Reduce: _reduced,
}
