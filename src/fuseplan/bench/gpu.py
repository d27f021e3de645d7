"""Runs a suite on a GPU: every result checked against float64 before it is timed, all peers interleaved.

All peers are in this process, since the GPU is what they share and what is timed. Of a case, all peers are
prepared, checked, then timed in turns; then its tensors are let go.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuseplan.backward.run import viewed
from fuseplan.backward.value import Backward
from fuseplan.bench.options import Options, Step, now
from fuseplan.bench.peers import known
from fuseplan.bench.peers.peer import Peer, Prepared
from fuseplan.bench.results import Row, dtypes_of, timed_row, wrong
from fuseplan.errors import ArgumentError, FuseplanError, installing
from fuseplan.graph.layer import Planned
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.cases import Case, Cases
from fuseplan.measure.clock import GPU_CLOCK, GpuClock
from fuseplan.measure.data import deviation, evaluated, random_arrays
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.machine import gpu_machine, gpu_versions
from fuseplan.measure.peaks import Floor, GpuPeaks, gpu_peaks, measured_gpu_peaks
from fuseplan.measure.spaces import Tensor, Tensors, space_on
from fuseplan.measure.stats import Timing
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.locks import cached_property


@dataclass(frozen=True)
class Results:
    """The results of a plan, which one kernel computes."""

    plan: FusionPlan

    def tensors(self, seed: int, device: str) -> dict[str, Tensor]:
        """What every peer is given."""
        return random_arrays(self.plan, seed, device=device)

    def prepared(self, peer: Peer, tensors: Tensors) -> Prepared:
        """The plan made ready in a peer, as `Peer.prepare`."""
        return peer.prepare(self.plan, [tensors])

    def wanted(self, peer: Peer, tensors: Tensors) -> tuple[Tensor, ...]:
        """What a peer should give, in float64."""
        out, results = evaluated(*peer.asked(self.plan, tensors))
        return (out, *results.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of what a peer gives."""
        return dtypes_of(self.plan)

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Ours, one after the other."""
        return [lower(match(self.plan))]


@dataclass(frozen=True)
class Gradients(Results):
    """The gradients of some inputs, as `FusionPlan.backward` has them; the forward pass is done before.

    Attributes:
        wrt: `src` and operands.
    """

    wrt: tuple[str, ...]

    @cached_property
    def backward(self) -> Backward:
        """The plans of the gradients."""
        made: Backward = self.plan.backward(self.wrt)
        return made

    def tensors(self, seed: int, device: str) -> dict[str, Tensor]:
        space, out = space_on(device), self.plan.output
        grad = space.fill(space.empty(out), out, space.draws(seed + 1).normal(out.shape))
        return {**super().tensors(seed, device), "grad": grad}

    def prepared(self, peer: Peer, tensors: Tensors) -> Prepared:
        return peer.prepare_backward(self.plan, self.wrt, tensors)

    def wanted(self, peer: Peer, tensors: Tensors) -> tuple[Tensor, ...]:
        values = dict(tensors)
        for node in self.backward.graph.nodes:
            given = [values[name] for name in node.inputs]
            if isinstance(node.op, Planned):
                keys = ("src", *(each.key for each in node.op.plan.operands))
                out, results = evaluated(node.op.plan, dict(zip(keys, given, strict=True)))
                made: Sequence[Tensor] = (out, *results.values())
            else:
                made = [viewed(node.op, given[0])]
            values |= zip(node.outputs, made, strict=True)
        return tuple(values[name] for name in self.backward.gradients.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        of = {"src": self.plan.src.dtype} | {each.key: each.dtype for each in self.plan.operands}
        return tuple(of[name] for name in self.wrt)

    @property
    def kernels(self) -> Sequence[Kernel]:
        return [lower(match(each)) for each in self.backward.plans]


def subject_of(case: Case) -> Results:
    """What is measured of a case."""
    plan = FusionPlan.parse(case.plan)
    return Gradients(plan, tuple(case.gradients.split())) if case.gradients else Results(plan)


DEVICE = "cuda"  # torch's name of the tensors' device
SHOWN = 300  # characters of a library's own message


def run(suite: Cases, options: Options, progress: Step = lambda _: None) -> Iterator[list[Row]]:
    """The rows of each case as it is done; an ArgumentError where torch is not installed, or finds no GPU."""
    needs_gpu()
    import torch

    torch.set_grad_enabled(False)  # for the process: entering a mode anew would be timed with every call
    torch.cuda.set_device(options.device)
    bench = _Bench(suite, options, progress)
    for case in suite.cases:
        yield bench.rows(case)


def needs_gpu() -> None:
    """Checks that there is a GPU that torch can use.

    Raises:
        ArgumentError: torch is not installed, or finds no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise ArgumentError(f"benchmarks on a GPU need torch: {installing('torch', 'torch')}") from error
    if not torch.cuda.is_available():
        raise ArgumentError(f"torch {torch.__version__} finds no GPU on this machine")


class _Bench:
    """What the cases of a run have in common."""

    def __init__(self, suite: Cases, options: Options, progress: Step) -> None:
        self._suite, self._options, self._progress = suite.name, options, progress
        self._machine = gpu_machine(options.device)
        stored = gpu_peaks(self._machine.gpu)
        self._peaks: GpuPeaks = stored or measured_gpu_peaks(self._machine.gpu, options.device)[0]
        self._clock = GpuClock(options.device, options.protocol)
        self._began = now()

    def rows(self, case: Case) -> list[Row]:
        """Prepares the plan in every peer, times those that are right, and tells of the others."""
        from fuseplan.measure.torch_eager import of_gpu

        subject = subject_of(case)
        named = (known(True).by_name[name]() for name in self._options.names)
        peers = [peer for peer in named if peer.takes(subject.plan)]
        tensors = subject.tensors(self._options.seed, DEVICE)
        with of_gpu(subject.plan):
            found = {peer.name: self._prepared(case, peer, subject, tensors) for peer in peers}
            live = {name: each.prepared for name, each in found.items() if each.prepared is not None}
            self._progress(f"{case.name}: timing")
            calls = {name: prepared.call for name, prepared in live.items()}
            timed, host = self._clock.interleave(calls), self._host(calls)
        listed = [
            self._row(case, subject, name, each, timed.get(name), host.get(name, {}))
            for name, each in found.items()
        ]
        del live, calls, found, tensors
        _let_go()
        return listed

    def _prepared(self, case: Case, peer: Peer, subject: Results, tensors: Tensors) -> _Found:
        """One peer made ready and checked. A library may fail in any way; that is its refusal, not ours."""
        self._progress(f"{case.name}: {peer.name}")
        begin = time.perf_counter()
        try:
            prepared = subject.prepared(peer, tensors)
            got = prepared.result()
            setup = time.perf_counter() - begin
            given, want = got if isinstance(got, tuple) else (got,), subject.wanted(peer, tensors)
            compared = zip(given, want, subject.dtypes, strict=True)
            errors = [deviation(made, exact, dtype=dtype) for made, exact, dtype in compared]
        except (CannotRunError, FuseplanError) as why:
            return _Found(refused=str(why))
        except Exception as why:
            return _Found(refused=f"{type(why).__name__}: {str(why)[:SHOWN]}")
        why_not, error = wrong(errors, subject.dtypes, subject.plan.src.dtype), max(errors)
        return _Found(prepared, setup, error) if why_not is None else _Found(refused=why_not, error=error)

    def _host(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        waited = self._clock.latency(calls)
        found: dict[str, dict[str, float]] = {name: {"latency": each.median} for name, each in waited.items()}
        if not self._options.is_host:
            return found
        for name, wall in self._clock.wall(calls).items():
            found[name]["wall"] = wall.median
        for name, call in calls.items():
            try:
                found[name]["replay"] = self._clock.replay([call])
            except RuntimeError:  # what cannot be captured has no such time
                continue
        return found

    def _row(
        self,
        case: Case,
        subject: Results,
        name: str,
        found: _Found,
        timing: Timing | None,
        host: Mapping[str, Any],
    ) -> Row:
        told = self._options.stamp(self._suite, case, self._machine.to_json(), self._began)
        told |= {"peer": name, "versions": gpu_versions(), "clock": GPU_CLOCK, "error": found.error}
        if found.prepared is None or timing is None:
            return Row(**told, refused=found.refused)
        facts, kernels = dict(found.prepared.facts), subject.kernels
        added = facts.pop("added_bytes", None)
        told |= {"added": None if added is None else added / self._peaks.bytes_a_second["dram"]}
        told |= {"setup": found.setup, **host}
        floors = [self._peaks.floor(each) for each in kernels]
        bound = max(floors, key=lambda each: each.seconds).bound
        least = Floor(sum(each.seconds for each in floors), bound)
        return timed_row(told, kernels, facts, timing, lambda _: least)


@dataclass
class _Found:
    """A peer with a plan: made ready, or why not."""

    prepared: Prepared | None = None
    setup: float = 0.0
    error: float | None = None
    refused: str | None = None


def _let_go() -> None:
    """Gives back what the case before held, for the next to be measured like the first."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # compiled modules of earlier cases would be looked through at every call
    gc.collect()
    torch.cuda.empty_cache()
