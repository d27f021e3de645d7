"""Where a plan is tried: random tensors in the target's memory, the right answer, and a clock that fits.

What a kernel gave is compared with float64, each tensor within the bound of its own dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.measure import data
from fuseplan.measure.clock import GPU_PROTOCOL, Clock, GpuClock, HostClock, Protocol
from fuseplan.measure.quiet import Watch
from fuseplan.measure.spaces import empty, space_of, unwritten
from fuseplan.measure.stats import Timing
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import CASTS, calls
from fuseplan.system.locks import cached_property

Call = Callable[[], object]

OUT = "out"  # what the output is called beside the results
ROUNDS = 5
HOST_BLOCK = 0.02  # seconds
GPU_BLOCK = 0.004
SLIP = 2.0**-20  # relative error of statistics that shows how far the output moves with them


class Ground:
    """A plan's tensors on one machine.

    Attributes:
        tensors: `src` and every operand by key, random.

    Args:
        seed: of the random tensors.
        device: torch's name of the tensors' device; None for NumPy's arrays.
        inputs: the distribution of `src`, as `data.INPUTS` says.

    Raises:
        MemoryError: the tensors do not fit.
    """

    def __init__(
        self, plan: FusionPlan, seed: int, device: str | None, clock: Clock, inputs: str = "normal"
    ) -> None:
        self._plan, self._device, self._clock = plan, device, clock
        self._dtypes = {OUT: plan.output.dtype} | {each.key: each.dtype for each in plan.results}
        with _memory_errors():
            self.tensors: Mapping[str, Any] = data.random_arrays(plan, seed, inputs=inputs, device=device)
            self._old = {
                each.key: space_of(self.tensors["src"]).copy(self.tensors[each.key])
                for each in plan.results
                if each.updated
            }

    def _evaluated(self, slip: float = 0.0, edge: float = 0.0) -> dict[str, Any]:
        """The output and the results in float64, off as `data.evaluated` says, as their dtypes hold them."""
        with _memory_errors():
            out, results = data.evaluated(self._plan, {**self.tensors, **self._old}, slip, edge)
            made = {OUT: out, **results}
            return {key: data.held(each, self._dtypes.get(key, "f64")) for key, each in made.items()}

    @cached_property
    def _want(self) -> dict[str, Any]:
        """The output and the results in float64; made when a result is first compared."""
        return self._evaluated()

    @cached_property
    def _edges(self) -> dict[str, Any]:
        """How far they move where numbers on the edge of a rounding, before a sum, fall to the other side."""
        if not data.is_rounded_inside(self._plan):
            return {}
        edge = 8 * dtype_of(self._plan.compute_dtype).epsilon
        sides = [self._evaluated(edge=each) for each in (edge, -edge)]
        return {
            key: sum(data.distances(each[key], want) for each in sides) for key, want in self._want.items()
        }

    @cached_property
    def _moved(self) -> float:
        """How far the output moves with its statistics."""
        if not data.has_statistics(self._plan):
            return 0.0
        with _memory_errors():
            return data.moved(self._evaluated(SLIP)[OUT], self._want[OUT]) / SLIP

    def out(self) -> Any:
        """A new output tensor, every element of it `unwritten`."""
        return self._new(self._plan.output)

    def results(self) -> dict[str, Any]:
        """New tensors for the plan's results by key: `unwritten`, or the old values of what is updated."""
        fresh = [each for each in self._plan.results if not each.updated]
        made = {each.key: self._new(each.spec) for each in fresh}
        return made | {key: space_of(old).copy(old) for key, old in self._old.items()}

    def _new(self, spec: TensorSpec | Dense) -> Any:
        return empty(spec, self._device, unwritten(spec.dtype))

    def call(self, bind: Callable[..., Callable[..., object]]) -> Call:
        """A call of a kernel on the tensors, with an output and results of its own.

        Args:
            bind: takes operands and results by key, as `CompiledPlan.bind` does; gives a call with `src` and
                the output.
        """
        given = {key: tensor for key, tensor in self.tensors.items() if key != "src"} | self.results()
        return partial(bind(**given), self.tensors["src"], self.out())

    def deviations(self, got: Any) -> dict[str, float]:
        """Of the output, `out`, and of each result by its key, the largest distance from float64.

        It is over the largest value of the tensor, and in the output over what rounded statistics add to it
        too: behind a mean of two elements a gradient is all cancellation. `got` is what a call gives: the
        output, or a tuple of it and the results.
        """
        made = got if isinstance(got, tuple) else (got,)
        besides = {OUT: self._moved}
        return {
            key: data.deviation(
                each, want, besides.get(key, 0.0), self._dtypes.get(key), self._edges.get(key, 0.0)
            )
            for (key, want), each in zip(self._want.items(), made, strict=False)
        }

    def deviation(self, got: Any) -> float:
        """The largest of them."""
        return max(self.deviations(got).values())

    def times(self, variants: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Timing]:
        """The variants, timed in turns; on a GPU with its second cache cold."""
        self._clock.protocol = replace(self._clock.protocol, rounds=rounds)
        return self._clock.interleave(variants)

    def watch(self) -> Watch:
        """Looks from now on for other programs that use the machine."""
        return self._clock.watch()

    def kernel_seconds(self, call: Call, count: int) -> list[float]:
        """Each of `count` calls by the machine's own clock; what runs before them is dropped."""
        return self._clock.block(call, count)

    def wall_seconds(self, call: Call, count: int) -> list[float]:
        """Each of `count` calls by the host's clock, until its result is there; one before is dropped."""
        return [self._clock.waited(call) for _ in range(1 + count)][1:]


def ground_of(plan: FusionPlan, target: Target, seed: int = 0, inputs: str = "normal") -> Ground:
    """Where a plan is tried for a target: one of this machine's. `src` looks as `data.INPUTS` says.

    Raises:
        MemoryError: the tensors do not fit; or, when a result is first compared, what float64 needs besides.
    """
    return Ground(plan, seed, *machine_of(target.device), inputs)


def machine_of(device: int | None) -> tuple[str | None, Clock]:
    """The device of tensors, by torch's name for it, and the clock: of the host, or of the GPU of that index.

    Raises:
        MemoryError: the GPU has no room for the clock's buffer.
    """
    if device is None:
        return None, HostClock(Protocol(block_seconds=HOST_BLOCK))
    with _memory_errors():
        return f"cuda:{device}", GpuClock(device, replace(GPU_PROTOCOL, block_seconds=GPU_BLOCK))


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

    One rounding to the dtype, and to each dtype on the way; four times the template's bound, since a sum's
    terms may add up to a few times the sum; and 64 roundings of the compute dtype for the elementwise
    operators.
    """
    stages = () if dtype else (*kernel.prologue, *kernel.epilogue)
    casts = [CASTS[fn] for stage in stages for fn in calls(stage.expression) if fn in CASTS]
    rows = [*map(dtype_of, casts), dtype_of(dtype or kernel.dst.dtype)]
    rounding = sum(row.epsilon if row.is_float else 1 / row.largest for row in rows)
    return rounding + 4 * template.error_bound(kernel) + 64 * dtype_of(kernel.compute_dtype).epsilon


@dataclass(frozen=True)
class Check:
    """A tensor beside float64.

    Attributes:
        tensor: `out`, or a result's key.
        error: the largest deviation, over the largest value.
        allowed: the most that is right.
    """

    tensor: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether the error is within what rounding explains."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        whole = "the largest output" if self.tensor == OUT else f"the largest {self.tensor}"
        return f"{self.error:.1e} of {whole}, at most {self.allowed:.1e}"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; null for an error that is not finite, which JSON has no number for."""
        error = self.error if math.isfinite(self.error) else None
        return {"tensor": self.tensor, "error": error, "allowed": self.allowed}


def checks_of(kernel: Kernel, template: Template, errors: Mapping[str, float]) -> tuple[Check, ...]:
    """Each tensor's error, by `Ground.deviations`, beside what its dtype allows."""
    dtypes = {each.key: each.dtype for each in kernel.outputs}
    return tuple(
        Check(key, error, allowed_deviation(kernel, template, dtypes.get(key)))
        for key, error in errors.items()
    )


def first_wrong(kernel: Kernel, template: Template, errors: Mapping[str, float]) -> Check | None:
    """The first tensor that is not right; None where all are."""
    return next((each for each in checks_of(kernel, template, errors) if not each.is_right), None)
