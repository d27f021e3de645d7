"""Where a plan is tried: random tensors in the target's memory, the right answer, and a clock that fits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from fuseplan.arguments import dense
from fuseplan.arrays import empty
from fuseplan.dtypes import dtype_of
from fuseplan.kernel import Kernel
from fuseplan.locks import cached_property
from fuseplan.measure import data
from fuseplan.measure.clock import Protocol as HostProtocol
from fuseplan.measure.clock import interleave
from fuseplan.measure.quiet import HostWatch, Watch
from fuseplan.measure.stats import Timing
from fuseplan.plan import FusionPlan
from fuseplan.target import Target
from fuseplan.template import Template
from fuseplan.tensor import Dense, TensorSpec

Call = Callable[[], object]

OUT = "out"  # what the output is called beside the results
ROUNDS = 5
HOST_BLOCK = 0.02  # seconds
GPU_BLOCK = 0.004
SLIP = 2.0**-20  # relative error of statistics that shows how far the output moves with them


class Ground(Protocol):
    """A plan's tensors on one machine.

    Attributes:
        tensors: `src` and every operand by key, random.
    """

    tensors: Mapping[str, Any]

    def out(self) -> Any:
        """A new output tensor, every element of it NaN."""

    def results(self) -> dict[str, Any]:
        """New tensors for the plan's results by key: NaN, or the old values of what is updated."""

    def deviations(self, got: Any) -> dict[str, float]:
        """Of the output, `out`, and of each result by its key, the largest distance from float64.

        It is over the largest value of the tensor, and in the output over what rounded statistics add to it
        too: behind a mean of two elements a gradient is all cancellation. `got` is what a call gives: the
        output, or a tuple of it and the results.
        """

    def deviation(self, got: Any) -> float:
        """The largest of them."""

    def times(self, variants: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Timing]:
        """The variants, timed in turns."""

    def watch(self) -> Watch:
        """Looks from now on for other programs that use the machine."""

    def kernel_seconds(self, call: Call, count: int) -> list[float]:
        """Each of `count` calls by the machine's own clock; what runs before them is dropped."""

    def wall_seconds(self, call: Call, count: int) -> list[float]:
        """Each of `count` calls by the host's clock, until its result is there; one before is dropped."""


class HostGround:
    """In this machine's own memory."""

    def __init__(self, plan: FusionPlan, seed: int, inputs: str = "normal") -> None:
        self._plan = plan
        self.tensors: Mapping[str, Any] = data.random_arrays(plan, seed, inputs=inputs)
        self._old = {key: self.tensors[key].copy() for key in updated(plan)}

    @cached_property
    def _want(self) -> dict[str, Any]:
        """The output and the results in float64; made when a result is first compared."""
        out, results = data.evaluated(self._plan, {**self.tensors, **self._old})
        return {OUT: out, **results}

    @cached_property
    def _moved(self) -> float:
        """How far the output moves with its statistics."""
        if not data.has_statistics(self._plan):
            return 0.0
        other, _ = data.evaluated(self._plan, {**self.tensors, **self._old}, SLIP)
        with np.errstate(invalid="ignore"):  # infinities are results like any other
            apart = np.abs(other - self._want[OUT])
        return float(np.max(apart[np.isfinite(apart)], initial=0.0)) / SLIP

    def out(self) -> Any:
        """A new array."""
        return _poisoned(self._plan.output)

    def results(self) -> dict[str, Any]:
        """New arrays."""
        old = {key: array.copy() for key, array in self._old.items()}
        return {key: _poisoned(spec) for key, spec in fresh(self._plan)} | old

    def deviations(self, got: Any) -> dict[str, float]:
        """By NumPy."""
        pairs = zip(self._want.items(), tensors_of(got), strict=False)
        return {
            key: data.deviation(np.asarray(made), want, self._moved if key == OUT else 0.0)
            for (key, want), made in pairs
        }

    def deviation(self, got: Any) -> float:
        """By NumPy."""
        return max(self.deviations(got).values())

    def times(self, variants: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Timing]:
        """Seconds of the host."""
        return interleave(variants, HostProtocol(rounds, HOST_BLOCK))

    def watch(self) -> Watch:
        """At the processors."""
        return HostWatch()

    def kernel_seconds(self, call: Call, count: int) -> list[float]:
        """The host's clock: it has no other."""
        return [_seconds(call) for _ in range(1 + count)][1:]

    def wall_seconds(self, call: Call, count: int) -> list[float]:
        """As the kernel's: a call returns when its kernel has ended."""
        return self.kernel_seconds(call, count)


class GpuGround:
    """In a GPU's memory."""

    def __init__(self, plan: FusionPlan, seed: int, device: int, inputs: str = "normal") -> None:
        from fuseplan.measure import gpu_clock, gpu_data  # noqa: PLC0415 - torch is optional

        self._plan, self._device, self._data = plan, f"cuda:{device}", gpu_data
        self.tensors: Mapping[str, Any] = gpu_data.random_tensors(plan, seed, self._device, inputs=inputs)
        self._old = {key: self.tensors[key].clone() for key in updated(plan)}
        self._clock = gpu_clock.GpuClock(device, gpu_clock.GpuProtocol(block_seconds=GPU_BLOCK))

    @cached_property
    def _want(self) -> dict[str, Any]:
        """The output and the results in float64; made when a result is first compared."""
        with _memory_errors():
            out, results = self._data.evaluated(self._plan, {**self.tensors, **self._old})
        return {OUT: out, **results}

    @cached_property
    def _moved(self) -> float:
        """How far the output moves with its statistics."""
        if not data.has_statistics(self._plan):
            return 0.0
        with _memory_errors():
            other, _ = self._data.evaluated(self._plan, {**self.tensors, **self._old}, SLIP)
            apart = (other - self._want[OUT]).abs().nan_to_num(0.0, 0.0, 0.0)
            return float(apart.amax().item()) / SLIP

    def out(self) -> Any:
        """A new tensor."""
        return self._data.empty(self._plan.output, self._device, float("nan"))

    def results(self) -> dict[str, Any]:
        """New tensors."""
        old = {key: tensor.clone() for key, tensor in self._old.items()}
        made = {key: self._data.empty(spec, self._device, float("nan")) for key, spec in fresh(self._plan)}
        return made | old

    def deviations(self, got: Any) -> dict[str, float]:
        """By torch, on the device."""
        pairs = zip(self._want.items(), tensors_of(got), strict=False)
        return {
            key: self._data.deviation(made, want, self._moved if key == OUT else 0.0)
            for (key, want), made in pairs
        }

    def deviation(self, got: Any) -> float:
        """By torch, on the device."""
        return max(self.deviations(got).values())

    def times(self, variants: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Timing]:
        """Seconds of the GPU, its second cache cold."""
        self._clock.protocol = replace(self._clock.protocol, rounds=rounds)
        return self._clock.interleave(variants)

    def watch(self) -> Watch:
        """At the GPU, before anything is measured."""
        from fuseplan.measure.gpu_machine import GpuWatch  # noqa: PLC0415 - as above

        return GpuWatch(self._clock.device.index)

    def kernel_seconds(self, call: Call, count: int) -> list[float]:
        """CUDA events, the second cache cold."""
        return self._clock.block(call, count)

    def wall_seconds(self, call: Call, count: int) -> list[float]:
        """From a call, the GPU idle and its second cache cold, until it is idle again."""
        return [self._clock.waited(call) for _ in range(1 + count)][1:]


def updated(plan: FusionPlan) -> list[str]:
    """Keys of the results whose old values are read."""
    return [each.key for each in plan.results if each.result.updated]


def fresh(plan: FusionPlan) -> list[tuple[str, Dense]]:
    """The other results: key, and how the tensor lies."""
    return [(each.key, dense(each)) for each in plan.results if not each.result.updated]


def tensors_of(got: Any) -> tuple[Any, ...]:
    """The output and the results that a call gives."""
    return got if isinstance(got, tuple) else (got,)


def _poisoned(spec: TensorSpec | Dense) -> Any:
    made = empty(spec)
    bits = made.view(np.uint16) if spec.dtype == "bf16" else made
    bits[...] = 0x7FC0 if spec.dtype == "bf16" else np.nan
    return made


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ground_of(plan: FusionPlan, target: Target, seed: int = 0, inputs: str = "normal") -> Ground:
    """Where a plan is tried for a target: one of this machine's. `src` looks as `data.INPUTS` says.

    Raises:
        MemoryError: the tensors do not fit; or, when a result is first compared, what float64 needs besides.
    """
    if target.device is None:
        return HostGround(plan, seed, inputs)
    with _memory_errors():
        return GpuGround(plan, seed, target.device, inputs)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Torch's out of memory, as Python's: torch is imported only where it is used."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        raise MemoryError(str(error)) from error


def allowed_deviation(kernel: Kernel, template: Template, dtype: str | None = None) -> float:
    """The largest right deviation over the largest value, of the output or of a result of that dtype.

    One rounding to the dtype; four times the template's bound, since a sum's terms may add up to
    a few times the sum; and 64 roundings of the compute dtype for the elementwise operators.
    """
    rounding = dtype_of(dtype or kernel.dst.dtype).epsilon
    return rounding + 4 * template.error_bound(kernel) + 64 * dtype_of(kernel.compute_dtype).epsilon
