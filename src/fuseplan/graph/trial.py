"""One site measured: its plans beside the framework's own operators, each beside float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fuseplan.errors import FuseplanError
from fuseplan.graph.cut import Site
from fuseplan.graph.evaluate import evaluate
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Parts
from fuseplan.graph.type import Type
from fuseplan.graph.why import Reason, Why
from fuseplan.graph.write import Bound, Joined, aligned, names_in
from fuseplan.language.tensor import Dense
from fuseplan.measure import data
from fuseplan.measure.clock import Protocol as Rounds
from fuseplan.measure.ground import allowed_deviation, machine_of
from fuseplan.measure.quiet import unsteady
from fuseplan.measure.spaces import Tensor, empty, exact, space_of
from fuseplan.measure.stats import Timing
from fuseplan.stores.sites import Key, Measured
from fuseplan.tensors.arrays import is_torch

Call = Callable[[], Tensor]
HOW = Rounds(rounds=5, block_seconds=0.004, fewest_samples=2)  # of a site: about 20 ms a plan
NOISE = 0.03  # of a time, and what its blocks spread besides: a smaller difference is none
ANOTHER = 0.1  # of the largest value: a framework that is further from float64 computes something else


class Framework(Protocol):
    """Both ways to compute a site: as the model calls them; `name` is the framework and its version."""

    name: str

    def example(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """The values of these names in the model's example call; fewer where it has none of that name.

        They are in NumPy, or on the target's GPU.
        """

    def own(self, site: Site, values: Mapping[str, Tensor]) -> Callable[[], Sequence[Tensor]]:
        """A call of the framework's own operators, which gives the site's results.

        Args:
            values: tensors by the names of the values that the site reads; in NumPy, or on the target's GPU.

        Raises:
            Exception: the operators cannot be run by themselves; its text says why.
        """

    def fused(self, site: Site, values: Mapping[str, Tensor]) -> Call:
        """A call of the site's plan.

        Raises:
            Exception: the plan's kernel cannot be built or run; its text says why.
        """


@runtime_checkable
class Wide(Protocol):
    """A framework that computes in float64 where the tensors are: on a GPU, where NumPy takes seconds."""

    def exact(self, site: Site, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The site's results by the framework's own operators on tensors in float64.

        Raises:
            Exception: the operators cannot be run so.
        """


@dataclass
class _Found:
    """What has been met at a site: plans that are right, the errors of all, and the first problem."""

    calls: dict[str, Call]
    errors: dict[str, float]
    problem: Reason | None = None


@dataclass(frozen=True)
class _Peer:
    """The framework's own operators: the call, where there is one, its error, and why there is none."""

    calls: dict[str, Call]
    error: float = 0.0
    said: str = ""


def measured(
    graph: Graph, site: Site, framework: Framework, key: Key, example: Mapping[str, Tensor]
) -> tuple[Measured, bool]:
    """What a site brings, with its constants as they are; whether to keep it.

    The tensors are those of `example`, by the names of the values, and random ones where it has none.
    A plan is right where its error is at most twice that of the framework's own operators, and the bound that
    its kernel states. The fastest plan that is right has the site, unless the framework is faster. Failures
    may pass, and are not to be kept. Times that other programs disturb decide nothing.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        device, clock = machine_of(site.records.target.device)
        values = _values(graph, site, device, example)
        want = _want(graph, site, framework, values)
    except Exception as error:  # a failure of one site never fails the model
        said = f"not measured: {problem_of(error)}"
        return Measured(
            key, str(site.plan), framework.name, None, _allowed([site], 0.0), date, said=said
        ), False
    peer = _own(site, framework, values, want)
    forms = list(forms_of(site))
    allowed = _allowed(forms, peer.error)
    found = _checked(forms, framework, values, want, allowed)
    watch = clock.watch()
    clock.protocol = HOW
    calls = found.calls | peer.calls
    times = clock.interleave(calls) if len(calls) > 1 else {}
    disturbance = watch.disturbance() or unsteady(times)
    steady = {} if disturbance else times
    plan = _fastest(found.calls, steady, str(site.plan))
    reason = found.problem if not found.calls else _lost(framework.name, plan, steady, peer.error)
    made = Measured(
        key,
        plan,
        framework.name,
        _finite(found.errors.get(plan)),
        allowed,
        date,
        _finite(peer.error) if peer.calls else None,
        {name: timing.median for name, timing in times.items()},
        reason.code if reason else "",
        reason.got if reason else peer.said,
        disturbance,
    )
    return made, reason is None or reason.why is not Why.FAILED


def launch(site: Site, values: Mapping[str, Tensor]) -> Call:
    """A call of a site's plan with all operands bound, into a tensor that is made once.

    Raises:
        FuseplanError: the kernel is not built, or does not take the tensors.
    """
    shapes = {each.key: each.shape for each in site.plan.operands}
    operands = {
        key: _bound(each, values).reshape(shapes[key]) if names_in(each) else aligned(each)
        for key, each in site.operands.items()
    }
    src = _bound(site.beside or site.src, values).reshape(site.plan.src.shape)
    call = site.compiled().bind(**operands)
    dst = empty(site.plan.output, src.device if is_torch(src) else None)
    if site.plan.results or site.plan.views:
        return lambda: call(src, dst)
    run = call.launcher(src, dst)  # as models launch it

    def launched() -> Tensor:
        run()
        return dst

    return launched


def _bound(bound: Bound, values: Mapping[str, Tensor]) -> Tensor:
    parts = [values[name] for name in names_in(bound)]
    return np.concatenate(parts, bound.axis) if isinstance(bound, Joined) else parts[0]


def meaning(graph: Graph, site: Site, values: Mapping[str, Tensor]) -> Any:
    """The site's value in float64, by the graph's own operators one at a time."""
    read = {name for node in site.nodes for name in node.inputs}
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    parts = Parts(dict.fromkeys(values, Type(None, "?")), list(site.nodes), [*site.results], constants)
    given = {name: wide(each, graph.types[name].dtype) for name, each in values.items()}
    made = evaluate(parts, given, {}, graph.types)
    return site.whole([made[name] for name in site.results])


def _want(graph: Graph, site: Site, framework: Framework, values: Mapping[str, Tensor]) -> Any:
    """The site's value in float64, where the tensors are; in host memory where the framework has none."""
    if isinstance(framework, Wide) and is_torch(values[site.src]) and not site.ranges:
        with contextlib.suppress(Exception):  # `meaning` tells the same
            return site.whole(framework.exact(site, values))
    return meaning(graph, site, values)


def wide(tensor: Tensor, dtype: str | None = None) -> Any:
    """A tensor's elements in float64, in host memory."""
    made = exact(tensor, dtype)
    return made.cpu().numpy() if is_torch(made) else made


def problem_of(error: BaseException) -> str:
    """An error's kind and its first line."""
    said = (str(error).strip().splitlines() or [""])[0]
    return said if isinstance(error, FuseplanError) else f"{type(error).__name__}: {said}"


def _values(graph: Graph, site: Site, device: str | None, example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors for the values that the site reads, in their own shapes and dtypes; they lie as in the plan."""
    drawn = data.random_arrays(site.plan, 0, device=device)
    dtypes = {each.key: each.dtype for each in site.plan.operands} | {"src": site.plan.src.dtype}
    made = {}
    for name, key, piece in _pieces(graph, site, drawn):
        tensor, want = piece, graph.types[name]
        if dtypes[key] != want.dtype:
            tensor = space_of(tensor).rounded(exact(tensor, dtypes[key]), want.dtype, want.dtype)
        made[name] = tensor if tuple(tensor.shape) == want.shape else tensor.reshape(want.shape)
        if name in example:
            spec = Dense(want.shape or (), want.dtype)
            space_of(tensor).fill(made[name], spec, exact(example[name], want.dtype).reshape(spec.shape))
    return made


def _pieces(graph: Graph, site: Site, drawn: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """The values of a site, the plan's keys of them, and their parts of the tensors of these keys."""
    for key, bound in (*site.operands.items(), ("src", site.beside or site.src)):
        axis, begin = bound.axis if isinstance(bound, Joined) else 0, 0
        for name in names_in(bound):
            end = begin + (graph.types[name].shape or ())[axis] if isinstance(bound, Joined) else None
            yield name, key, drawn[key][(slice(None),) * axis + (slice(begin, end),)]
            begin = end or 0


def forms_of(site: Site) -> Iterator[Site]:
    """The site, and its other forms where the plans of these have kernels."""
    yield site
    yield from (form for form in (find() for find in site.others) if isinstance(form, Site))


def _own(site: Site, framework: Framework, values: Mapping[str, Tensor], want: Any) -> _Peer:
    try:
        call = framework.own(site, values)
        return _Peer(
            {framework.name: call}, _error(site.whole([_beside(each, want) for each in call()]), want)
        )
    except Exception as error:  # of another library, of any kind
        return _Peer({}, said=f"{framework.name} was not run: {problem_of(error)}")


def _checked(
    forms: list[Site], framework: Framework, values: Mapping[str, Tensor], want: Any, allowed: float
) -> _Found:
    """The plans that are right; the first problem is of the site's own plan.

    A plan of factors that are not rounded takes longer, and is tried where none with these is right.
    """
    found = _Found({}, {})
    for form in forms:
        if found.calls and _rounds(forms[0]) and not _rounds(form):
            continue
        name = str(form.plan)
        try:
            call = framework.fused(form, values)
            error = _error(_beside(call(), want), want)
        except Exception as failed:  # a failure of one site never fails the model
            found.problem = found.problem or Reason(Why.FAILED, problem_of(failed))
            continue
        if error <= allowed:
            found.calls[name] = call
        else:
            said = f"{error:.1e} of the largest value, at most {allowed:.1e}"
            found.problem = found.problem or Reason(Why.INACCURATE, said)
        found.errors[name] = error
    return found


def _error(made: Any, want: Any) -> float:
    """The largest distance of a result from float64, over the largest value."""
    is_like = math.prod(made.shape) == math.prod(want.shape)
    return data.deviation(made, want.reshape(made.shape)) if is_like else math.inf


def _beside(made: Tensor, want: Any) -> Any:
    """A result in float64, where the one that is right is."""
    return exact(made) if is_torch(want) else wide(made)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _allowed(forms: list[Site], peer_error: float) -> float:
    """The largest error that is right, beside a framework with an error of its own.

    Whether the framework has rounded factors, its error tells, and so the least bound of the forms counts.
    """
    stated = (allowed_deviation(form.built.kernel, form.built.choice.template) for form in forms)
    return 2 * min(peer_error, ANOTHER) + min(stated)


def _rounds(site: Site) -> bool:
    """Whether the factors of the site's products are rounded."""
    contraction = site.built.kernel.contraction
    return contraction is not None and contraction.precision != "full"


def _fastest(calls: Mapping[str, Call], times: Mapping[str, Timing], first: str) -> str:
    """The plan with the site: the first form unless another is faster by more than noise."""
    if first not in calls:
        return next(iter(calls), first)
    faster = [name for name in calls if name in times and _is_slower(times[first], times[name])]
    return min(faster, key=lambda name: times[name].median, default=first)


def _is_slower(one: Timing, other: Timing) -> bool:
    """Whether a time is larger than another by more than noise."""
    return one.median > (1 + NOISE + max(one.spread, other.spread)) * other.median


def _lost(peer: str, plan: str, times: Mapping[str, Timing], peer_error: float) -> Reason | None:
    """Why the framework has the site; None where the plan has it."""
    if not peer_error <= ANOTHER:
        return Reason(Why.DISAGREES, f"{peer} is {peer_error:.1e} of the largest value away")
    if peer not in times or not _is_slower(times[plan], times[peer]):
        return None
    return Reason(Why.SLOWER, f"{times[plan].median * 1e6:.1f} us, {peer} {times[peer].median * 1e6:.1f}")
