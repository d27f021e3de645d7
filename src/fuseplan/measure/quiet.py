"""Whether other programs ran while something was measured, and waiting until they rest.

No median repairs what other programs do to threads that wait for each other: beside two busy loops on two
cores, eager PyTorch takes 51,847 us for a convolution of 71 us, in every block of samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeVar

from fuseplan.errors import ArgumentError
from fuseplan.measure.machine import nvidia_smi, others, processor_seconds
from fuseplan.measure.stats import Timing

QUIET = 0.12  # share of the processors that other programs may use during a measurement
RAN = 0.8  # share of the time that the measuring thread runs at least; it waits for its own workers too
SPREAD = 0.5  # of the blocks' medians; quiet machines stay below 0.25
SLOWED = 3.0  # times the least sample: a median above it is of calls that were interrupted
LOOK = 0.15  # seconds to look at what others use
REST = 1.0  # seconds that a GPU rests before it is looked at: its driver tells of the last one at most
QUIET_SECONDS = 60.0  # that a quiet GPU is not looked at again: a model has some thirty plans to measure

Found = TypeVar("Found")


class Watch(Protocol):
    """Looks at a machine from its making on."""

    def disturbance(self) -> str | None:
        """What took the machine from the measurement since then; None if nothing did."""


class HostWatch:
    """Looks at the processors that this process may use, and at the thread that made the watch."""

    def __init__(self) -> None:
        self._machine, self._own = processor_seconds(), time.process_time()
        self._thread, self._wall = time.thread_time(), time.perf_counter()

    def disturbance(self) -> str | None:
        """The share of other programs; or that this thread did not run, for programs that are not visible."""
        share = others(self._machine, processor_seconds(), time.process_time() - self._own)
        if share > QUIET:
            return f"other programs used {share:.0%} of the processors"
        ran = (time.thread_time() - self._thread) / (time.perf_counter() - self._wall)
        if ran < RAN:
            return f"the measuring thread ran for {ran:.0%} of the time"
        return None


class GpuWatch:
    """Looks whether a GPU works while this process gives it nothing to do.

    What begins later shows in the spread of samples.
    """

    _quiet: ClassVar[dict[int, float]] = {}  # until when, by device

    def __init__(self, device: int) -> None:
        import torch

        self._share: float | None = None
        if time.monotonic() < self._quiet.get(device, 0.0):
            return
        torch.cuda.synchronize(device)
        time.sleep(REST)
        # torch counts the GPUs that CUDA_VISIBLE_DEVICES leaves, nvidia-smi all: both know the identity.
        self._share = gpu_share(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")))
        if self.disturbance() is None:
            self._quiet[device] = time.monotonic() + QUIET_SECONDS

    def disturbance(self) -> str | None:
        """The share of the time that other programs' kernels ran."""
        if self._share is None or self._share <= QUIET:
            return None
        return f"other programs used the GPU for {self._share:.0%} of the time"


def gpu_share(uuid: str) -> float | None:
    """The share of the last second in which a GPU ran kernels; None where its driver does not tell."""
    for line in nvidia_smi("uuid", "utilization.gpu"):
        name, _, percent = line.partition(", ")
        if uuid and name.removeprefix("GPU-") == uuid.removeprefix("GPU-") and percent.isdecimal():
            return int(percent) / 100
    return None


class Patience:
    """Seconds to wait, in all, for other programs to rest.

    Raises:
        ArgumentError: the number of seconds is none, or negative.
    """

    def __init__(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
            raise ArgumentError(f"patience={seconds!r}; want seconds, a number that is not negative")
        self._left = float(seconds)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._left <= 0

    def spend(self, seconds: float) -> None:
        """Takes off time that went by otherwise."""
        self._left -= seconds

    def wait(self) -> None:
        """Returns when the processors rest, or the time is over."""
        while not self.is_over:
            begin, before = time.perf_counter(), processor_seconds()
            time.sleep(LOOK)
            if others(before, processor_seconds(), 0.0) < QUIET:
                return
            self.spend(time.perf_counter() - begin)


def undisturbed(
    measure: Callable[[], Found],
    watch: Callable[[], Watch],
    patience: float = 0.0,
    fault: Callable[[Found], str | None] = lambda _: None,
) -> tuple[Found, str | None]:
    """Measures, and again as long as other programs disturb it and patience lasts.

    Args:
        watch: begins to look at the machine.
        patience: seconds to wait for other programs to rest, the disturbed measurements among them.
        fault: the trace of other programs in what was measured; None if there is none.

    Returns:
        The last measurement, and what disturbed it; None where nothing did.
    """
    left = Patience(patience)
    while True:
        left.wait()
        begin, looking = time.perf_counter(), watch()
        found = measure()
        why = looking.disturbance() or fault(found)
        left.spend(time.perf_counter() - begin)
        if why is None or left.is_over:
            return found, why


def unsteady(timings: Mapping[str, Timing]) -> str | None:
    """Which variant's samples are too far apart to be of one machine at rest; None if none are."""
    for name, timing in timings.items():
        if timing.spread > SPREAD:
            return f"the times of {name!r} vary by {timing.spread:.0%} from block to block"
        if timing.median > SLOWED * timing.minimum:
            return f"{name!r} takes {timing.median / timing.minimum:.1f} times its least time"
    return None
