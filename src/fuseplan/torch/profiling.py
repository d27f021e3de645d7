"""The time of each operator of a module, as torch runs it one at a time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fuseplan.execution.stages import decide
from fuseplan.reports.profile import Profile, profiled
from fuseplan.torch.cutting import fused
from fuseplan.torch.exporting import exported
from fuseplan.torch.kernels import target_of
from fuseplan.torch.reporting import report_of

RUNS = 9  # and one before them that is not counted


def profile(module: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> Profile:
    """The time of each operator of a module by torch's own kernels, and the plans that would pay.

    The operators are those of the exported module; nothing of ours is compiled. On a GPU the times are those
    of its events, and small operators take the host's time to launch them.

    Args:
        module: the module, on the device that it is to run on.
        *example_inputs: arguments of its call.
        **example_kwargs: likewise, by name.

    Raises:
        ArgumentError: torch.export does not take the module; the error tells why.
    """
    given = exported(module, example_inputs, example_kwargs)
    fusion = fused(given.graph, given.device, joins=given.device.type == "cpu")  # as `fuse` cuts it
    timed = _Timed(given.graph, given.device)
    state = given.held(module).tensors
    leaves = pytree.tree_leaves((example_inputs, example_kwargs))
    with torch.no_grad():
        for _ in range(1 + RUNS):
            timed.run(*state, *leaves)
    target, threads = target_of(given.device)
    machine = decide("f32[1x1] -> relu", target, threads=threads).target
    return profiled(report_of(fusion, given.device), fusion.cut.graph, machine, "torch", timed.seconds())


class _Timed(fx.Interpreter):  # type: ignore[misc]
    """Runs a graph, and keeps when each operator begins and ends."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._is_gpu = device.type == "cuda"
        self._taken: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node between two readings of the clock."""
        begin = self._now()
        made = super().run_node(n)
        if n.op == "call_function":
            self._taken[n.name].append((begin, self._now()))
        return made

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """The median time of each operator."""
        if self._is_gpu:
            torch.cuda.synchronize()
        return {
            name: statistics.median(self._between(*pair) for pair in pairs[1:])
            for name, pairs in self._taken.items()
        }

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) * 1e-3 if self._is_gpu else end - begin)
