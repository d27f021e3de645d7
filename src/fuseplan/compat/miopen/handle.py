"""Handles: where plans run, on which stream, how long the last one took, and the kernels made so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fuseplan.compat.miopen.algorithms import compile_by
from fuseplan.compat.miopen.call import Object, bad_parameter, not_implemented, not_initialized, told
from fuseplan.compat.miopen.enums import miopenConvFwdAlgorithm_t, miopenStatus_t
from fuseplan.compile import CompiledPlan
from fuseplan.errors import ArgumentError
from fuseplan.kernels.target import Target, parse_target
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arguments import OUT, SRC, End
from fuseplan.tensors.arrays import described, view

Algorithm = miopenConvFwdAlgorithm_t
VERSION = (3, 5, 0)  # of MIOpen, whose interface this is


def target_of(name: str, value: Any) -> Target:
    """Checks an argument that is a target."""
    if not isinstance(value, str | Target):
        raise bad_parameter(f"`{name}` is a Target or its name, such as cpu or cuda; got {told(value)}")
    return parse_target(value)


class miopenHandle_t(Object):
    """A target, a stream of it, and the kernels that were compiled for it.

    Attributes:
        target: where plans run.
        stream: where launches go: a torch stream; None is torch's current one, and all a CPU has.
        milliseconds: of the last launch that was timed.
    """

    def __init__(self, target: Target, stream: Any = None) -> None:
        super().__init__()
        self.target = target
        self.stream: Any = None
        self.is_profiling = False
        self.milliseconds: float | None = None
        self._kernels: dict[tuple[FusionPlan, Algorithm | str | None], CompiledPlan] = {}
        self.set_stream(stream)

    def set_stream(self, stream: Any) -> None:
        """Sets the stream: one of torch's, or the address of one.

        Raises:
            StatusError: the target is no GPU of this machine, or this is no stream of that GPU.
        """
        if stream is not None and self.target.device is None:
            raise bad_parameter(
                f"{self.target} is not a GPU of this machine and has no streams: "
                f"want None; got {told(stream)}"
            )
        self.stream = None if stream is None else _torch_stream(stream, self.target)

    @property
    def kernel_time(self) -> float:
        """Milliseconds of the last launch; a StatusError where it was not timed."""
        if self.milliseconds is None:
            raise not_initialized(
                "nothing was timed: call miopenEnableProfiling(handle, True) before the launch"
            )
        return self.milliseconds

    def set_allocator(self, *given: Any) -> None:
        """Takes no allocator; a StatusError where there is one, or its context."""
        if any(each is not None for each in given):
            raise not_implemented("memory comes from torch's allocator on a GPU and from the system on a CPU")

    def kernel(self, plan: FusionPlan, by: Algorithm | str | None) -> CompiledPlan:
        """The plan compiled for the target; by templates of an algorithm alone, or a candidate, where given.

        Raises:
            Unsupported: nothing computes the plan there, or nothing of that algorithm does.
            BuildError: the toolchain failed.
        """
        known = self._kernels.get((plan, by))
        if known is None:
            known = compile_by(plan, self.target, by)
            self._kernels[plan, by] = known
        return known

    def run(self, compiled: CompiledPlan, src: Any, out: Any, values: Mapping[str, Any]) -> None:
        """Launches a kernel on the stream; with profiling, waits for it and keeps its time.

        Raises:
            ArgumentError: a tensor is missing, is not what its descriptor says, or overlaps `out`.
        """
        try:
            with self._on_stream():
                self._launch(compiled, src, out, values)
        except ArgumentError:
            _check_described(SRC, src, compiled.plan.src)
            _check_described(OUT, out, compiled.plan.output)
            raise

    def _launch(self, compiled: CompiledPlan, src: Any, out: Any, values: Mapping[str, Any]) -> None:
        if not self.is_profiling:
            compiled(src, out, **values)
            return
        bound = compiled.bind(**values)
        if self.target.processors:
            self.milliseconds = _gpu_milliseconds(lambda: bound(src, out), self.target.device)
        else:
            begin = time.perf_counter()
            bound(src, out)
            self.milliseconds = 1e3 * (time.perf_counter() - begin)

    def contents(self, what: str, tensor: Any, like: Any) -> Any:
        """A copy of a tensor, which messages call `what`, made in the stream's order; `write` takes it.

        Raises:
            StatusError: it has another shape or type than `like`.
            ArgumentError: one is no tensor, or not in the memory of this machine's CPU where that is the
                target.
        """
        look = described if self.target.processors else view
        given, wanted = look(tensor, what), look(like, "the tensor to copy to")
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            raise bad_parameter(
                f"{what} is {given.text}; want {wanted.text}, like the tensor it is copied to"
            )
        if not self.target.processors:
            return given.numpy().copy()
        with self._on_stream():
            return _torch_tensor(tensor).clone()

    def write(self, contents: Any, into: Any) -> None:
        """Writes such a copy into a tensor, in the stream's order."""
        if not self.target.processors:
            view(into, "the tensor to write").numpy()[...] = contents
            return
        with self._on_stream():
            _torch_tensor(into).copy_(contents)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        import torch

        with torch.cuda.stream(self.stream):
            yield


def _torch_stream(stream: Any, target: Target) -> Any:
    """The torch stream that is given, or whose address is."""
    import torch

    if isinstance(stream, torch.cuda.Stream):
        if stream.device.index != target.device:
            raise bad_parameter(f"the stream is of {stream.device}; the handle's device is {target.device}")
        return stream
    if isinstance(stream, int) and not isinstance(stream, bool) and 0 <= stream < 1 << 64:
        return torch.cuda.ExternalStream(stream, device=target.device)
    raise bad_parameter(f"want a torch.cuda.Stream or the address of a stream; got {told(stream)}")


def _check_described(end: End, tensor: Any, spec: TensorSpec) -> None:
    buffer = described(tensor, end)
    if not buffer.matches(spec):
        raise ArgumentError(end, f" is {buffer.text}; its descriptor says {spec}")


def _torch_tensor(tensor: Any) -> Any:
    """A tensor as torch's, over its own memory but for a NumPy array, which may be read-only."""
    import torch

    if isinstance(tensor, np.ndarray):
        return torch.from_numpy(tensor.copy())
    return tensor.detach() if isinstance(tensor, torch.Tensor) else torch.from_dlpack(tensor)


def _gpu_milliseconds(launch: Callable[[], object], device: int | None) -> float:
    import torch

    stream = torch.cuda.current_stream(device)  # of the device that runs it, which may not be the current one
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    launch()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end))


def miopenGetErrorString(error: miopenStatus_t | int) -> str:
    """The name of a status; `Unknown error status` for a number that is none."""
    try:
        return miopenStatus_t(error).name
    except ValueError:
        return "Unknown error status"
