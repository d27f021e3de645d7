"""Where the values of a session are: in host memory, as NumPy's arrays. `device.py` has rooms of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fuseplan.execution.run import BoundPlan
from fuseplan.graph.memory import arena
from fuseplan.graph.op import GraphOp, Tensor
from fuseplan.graph.place import Placed, Step
from fuseplan.graph.write import aligned

SHORT = 8  # elements of an axis: an image of 3 channels is copied 5 times as fast channel by channel
Live = dict[str, Any]


class Room:
    """Host memory: an arena for the values with places, and arrays of their own for the others."""

    def lay(self, nbytes: int, steps: Sequence[Step]) -> None:
        """Makes the arena of a run of these steps; called once, and before the other methods."""
        self._memory = arena(nbytes)

    def at(self, placed: Placed) -> Tensor:
        """A value in the arena."""
        return placed.array(self._memory)

    def lying(self, placed: Placed, shape: tuple[int, ...]) -> Tensor | None:
        """A value of the arena in another shape; None where its elements do not lie so."""
        array = placed.array(self._memory)
        found = array.reshape(shape)
        return found if np.shares_memory(found, array) else None

    def constant(self, value: Any) -> Tensor:
        """A constant as kernels read it where it lies; the caller keeps it alive."""
        return aligned(value)

    def readable(self, tensor: Tensor) -> Tensor:
        """A value as kernels read it in a call."""
        return tensor

    def entered(self, name: str, value: Any) -> Any:
        """An input of a run."""
        return value

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Copies the elements; NumPy's inner loop is along the innermost axis of dst, which may be short."""
        innermost = int(np.argmin(dst.strides)) if dst.ndim else 0
        if dst.ndim < 2 or dst.shape[innermost] > SHORT or src.strides[innermost] == dst.strides[innermost]:
            np.copyto(dst, src)
            return
        for into, given in zip(np.moveaxis(dst, innermost, 0), np.moveaxis(src, innermost, 0), strict=True):
            np.copyto(into, given)

    def evaluator(self, op: GraphOp) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """What computes an operator of ours."""
        return op.evaluate

    def writer(self, op: GraphOp) -> Callable[[Sequence[Any], Tensor], object]:
        """What computes an operator of ours into a tensor."""
        return op.write

    def launcher(self, call: BoundPlan, src: Tensor, dst: Tensor) -> Callable[[], object]:
        """A launch on two tensors of the arena."""
        return call.launcher(src, dst)

    def to_host(self, value: Any) -> Any:
        """A value as other libraries read it: in NumPy."""
        return value

    def from_host(self, value: Any) -> Any:
        """A constant, or a value that another library made in NumPy, as operators of ours read it."""
        return value

    def turn(self) -> AbstractContextManager[None]:
        """The time of a call, in which no other one touches the arena."""
        return nullcontext()

    def ran(self, live: Live, run: Callable[[Live], object]) -> Mapping[str, Any]:
        """The values behind a run, which is given those before it."""
        run(live)
        return live

    def own(self, value: Any) -> Any:
        """An output in memory of its own, dense."""
        return np.array(value, order="C") if isinstance(value, np.ndarray) else value
