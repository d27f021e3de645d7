"""A machine with GPUs, as far as the run path can tell: torch's CPU tensors pose as theirs.

Launches go to the fake driver, which may run a meaning in Python on the memory that the arguments name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_driver import FakeDriver, Launch
from fuseplan.backends.triton import TRITON, memory
from fuseplan.backends.triton import driver as drivers
from fuseplan.backends.triton.memory import Queue
from fuseplan.kernels import target as targets
from fuseplan.kernels.template import Template

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10,
)


def torch_with(*gpus: Any, hip: str | None = None, cuda: str | None = "13.0", current: int = 0) -> Any:
    """What torch says of the GPUs that it sees."""
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(hip=hip, cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            current_device=lambda: current,
            get_device_properties=lambda index: gpus[index],
        ),
    )


class PretendQueue(Queue):
    """A stream that the test chooses, on a device whose tensors are the CPU's."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.now = 7
        self.capturing = False
        self.waits = 0
        self._rooms: dict[int, Any] = {}
        self.stream = lambda: self.now  # type: ignore[assignment]

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_capturing(self) -> bool:
        return self.capturing

    def wait(self) -> None:
        self.waits += 1


@dataclass
class Meaningful(FakeDriver):
    """A driver that also does what a launch is for.

    Attributes:
        meaning: is given the launch that was recorded.
    """

    meaning: Callable[[Launch], None] = field(default=lambda launch: None)

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        before = len(self.launches)
        status = super().launch(config, function, parameters, extra)
        for launch in self.launches[before:]:
            self.meaning(launch)
        return status


@dataclass
class Machine:
    """Two GPUs.

    Attributes:
        driver: what was launched.
        queues: of each device that was used.
    """

    driver: Meaningful
    queues: dict[int, PretendQueue]

    @property
    def launches(self) -> list[Launch]:
        return self.driver.launches


@contextlib.contextmanager
def machine(*templates: type[Template]) -> Iterator[Machine]:
    """This process with two GPUs, on which the backend has the given templates."""
    made = Machine(Meaningful(), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_torch_with_gpu", lambda: torch_with(H100, H100))
        patch.setattr(memory, "queue", lambda device: made.queues.setdefault(device, PretendQueue(device)))
        patch.setattr(drivers, "driver", lambda: made.driver)
        patch.setattr(TRITON, "templates", templates, raising=False)
        patch.setattr("fuseplan.execution.build._programs", {})
        yield made
