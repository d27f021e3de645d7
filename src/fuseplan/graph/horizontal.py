"""Products and convolutions of one input as one launch: their features are ranges of one result."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from fuseplan.errors import PlanError, Unsupported
from fuseplan.execution.stages import Records
from fuseplan.graph.cut import Attempt, Site
from fuseplan.graph.graph import Graph
from fuseplan.graph.layouts import strides_of
from fuseplan.graph.memory import Buffer, are_beside
from fuseplan.graph.node import Node
from fuseplan.graph.norms import in_order
from fuseplan.graph.op import Tensor
from fuseplan.graph.ops import VIEWS, Foreign, Slice
from fuseplan.graph.type import Type, bits_of
from fuseplan.graph.why import Reason, Why
from fuseplan.graph.write import Bound, Joined, joined, names_in
from fuseplan.language.layouts import same_strides
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.quantities import seconds_text
from fuseplan.op import Elementwise, Op
from fuseplan.ops.activation import Identity
from fuseplan.ops.attention import Attention
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Product
from fuseplan.ops.parts import Parted
from fuseplan.plans.plan import FusionPlan

NEAR = 0.01  # of the time: estimates that are this close tell nothing, and one launch is less than several
Decide = Callable[[FusionPlan], Records | Unsupported]
DIFFERENT = Reason(Why.APART, "no other product has its operators, or its result lies in a joined value")


def together(graph: Graph, sites: Sequence[Site], decide: Decide) -> tuple[list[Site], list[Attempt]]:
    """The sites, where those that are one product of an input are joined if that takes no longer; all tried.

    Their operators are the same but for the number of features, and their operands have an element a feature.
    Sites that read a result, or a view of it, read a range of the joined one where it lies: their plans have
    strides then.

    Args:
        decide: what the stages make of a plan.
    """
    found = _Sites(graph, {site.dst: site for site in sites}, decide, [])
    of_input: dict[str, list[str]] = {}
    for site in sites:
        if _features(site.plan.ops[0]):
            of_input.setdefault(site.src, []).append(site.dst)
    for names in of_input.values():
        found.join([found.sites[name] for name in names])
    for site in [each for each in found.sites.values() if each.ranges]:
        found.turn(site)
    return list(found.sites.values()), found.attempts


def _features(op: Op) -> int:
    """The features of a contraction that may be a part of one with more; 0 of another operator."""
    is_product = isinstance(op, Product) and not op.batched
    return cast(Any, op).features if is_product or (isinstance(op, Conv) and op.groups == 1) else 0


def _own(site: Site, features: int) -> FusionPlan:
    """The plan of a site with another number of features."""
    first, *behind = site.plan.ops
    return FusionPlan(site.plan.src, replace(cast(Any, first), features=features), *behind)


def _is_by_feature(plan: FusionPlan) -> bool:
    """Whether each feature of the result is computed by itself, with operands that have an element for it."""
    return not plan.results and all(
        isinstance(step.op, Elementwise)
        and not (step.op.has_parts or step.op.again or step.indices)
        and all(each.per == "channel" for each in step.operands)
        for step in plan.steps[1:]
    )


@dataclass(frozen=True)
class _Trial:
    """A joined site and the sites that read ranges of it.

    Attributes:
        sites: by the values that they make.
        gain: seconds that all of them take less than apart.
        costs: seconds that readers of each result take more, and copies of it: infinite where a reader takes
            no range.
        said: the first such reader, and the result that it takes whole.
    """

    sites: dict[str, Site]
    gain: float
    costs: dict[str, float]
    said: str


@dataclass
class _Sites:
    """The sites by the value that they make, and what was tried."""

    graph: Graph
    sites: dict[str, Site]
    decide: Decide
    attempts: list[Attempt]
    inside: dict[int, str] = field(default_factory=dict)  # the value that each node's site makes

    def __post_init__(self) -> None:
        self._add(self.sites)

    def join(self, members: Sequence[Site]) -> None:
        """Joins sites that read one value as far as that takes less time; the others have the reason."""
        groups: dict[Any, list[Site]] = {}
        for site in members:
            key = site.dst if site.into or not _is_by_feature(site.plan) else _own(site, 1)
            groups.setdefault(key, []).append(site)
        made = {site.dst: reason for group in groups.values() for site, reason in self._joined(group)}
        for name, reason in made.items() if len(members) > 1 else ():
            self.sites[name] = replace(self.sites[name], apart=reason)

    def turn(self, joined: Site) -> None:
        """Joins rotations of heads, such as queries and keys, that lie side by side in a joined result."""
        lies = _results(joined)
        ahead = [*lies]
        for name in ahead:
            for node in self.graph.readers[name]:
                if isinstance(node.op, VIEWS):
                    self._view(node, lies)
                    ahead += node.outputs
        groups: dict[Any, list[Site]] = {}
        for site in self.sites.values():
            if site.src in lies and _is_by_head(site.plan):
                src, bound = site.plan.src, tuple(site.operands.items())
                key = site.plan.ops, src.names, src.element_strides, bound
                groups.setdefault(key, []).append(site)
        for members in groups.values():
            made = self._side_by_side(sorted(members, key=lambda site: lies[site.src].ctypes.data), lies)
            trial = made and self._tried(made, members, lies)
            if made and trial and trial.gain > -NEAR * sum(site.records.choice.seconds for site in members):
                self._take(made, members, trial)

    def _side_by_side(self, members: Sequence[Site], lies: Mapping[str, Tensor]) -> Site | None:
        """Rotations as one of all their heads; None where these do not lie side by side."""
        first, axis = members[0], members[0].plan.src.names.find("h")
        if len(members) < 2 or axis < 0 or not are_beside([lies[site.src] for site in members], axis):
            return None
        place = self.graph.place
        if max(place(site.src) for site in members) > min(place(site.dst) for site in members):
            return None
        src = first.plan.src
        ends = [*itertools.accumulate((site.plan.src.shape[axis] for site in members), initial=0)]
        shape = (*src.shape[:axis], ends[-1], *src.shape[axis + 1 :])
        read = TensorSpec(shape, src.dtype, strides=src.element_strides, names=src.names)
        records = self.decide(FusionPlan(read, *first.plan.ops))
        if isinstance(records, Unsupported):
            return None
        pairs = zip(members, itertools.pairwise(ends), strict=True)
        return replace(
            first,
            plan=records.plan,
            records=records,
            nodes=in_order(self.graph, [node for site in members for node in site.nodes]),
            dst=" ".join(site.dst for site in members),
            beside=Joined(tuple(site.src for site in members), axis),
            ranges={site.dst: Slice(axis, *between) for site, between in pairs},
        )

    def _joined(self, members: list[Site]) -> list[tuple[Site, Reason]]:
        """Joins sites of one plan; those that stay apart, and why."""
        left, reason = list[tuple[Site, Reason]](), DIFFERENT
        while len(members) > 1:
            found = self._one(members)
            if isinstance(found, Reason):
                reason = found
                break
            trial = self._tried(found, members)
            if trial.gain > -NEAR * sum(site.records.choice.seconds for site in members):
                self._take(found, members, trial)
                return left
            reason = Reason(Why.APART, trial.said or f"{found.plan}: {seconds_text(-trial.gain)} more")
            self.attempts.append(Attempt(found.nodes, str(found.plan), reason))
            worst = max(members, key=lambda site: trial.costs[site.dst])
            if not trial.costs[worst.dst]:
                break
            left.append((worst, reason))
            members = [site for site in members if site is not worst]
        return [*left, *((site, reason) for site in members)]

    def _take(self, made: Site, members: Sequence[Site], trial: _Trial) -> None:
        """Puts a joined site in the place of the members."""
        for site in members:
            del self.sites[site.dst]
        self._add(trial.sites)
        self.attempts.append(Attempt(made.nodes, str(made.plan), made.ended, is_site=True))

    def _add(self, sites: Mapping[str, Site]) -> None:
        self.sites |= sites
        self.inside |= {id(node): site.dst for site in sites.values() for node in site.nodes}

    def _site(self, node: Node) -> Site | None:
        return self.sites.get(self.inside.get(id(node), ""))

    def _ahead(self, names: Collection[str]) -> list[int]:
        """The places of the nodes that read values, in order: of a site, those that make its results."""
        found = set[int]()
        for node in (each for name in filter(None, names) for each in self.graph.readers[name]):
            site = self._site(node)
            found |= {*map(self.graph.place, site.results)} if site else {self.graph.places[id(node)]}
        return sorted(found)

    def _one(self, members: Sequence[Site]) -> Site | Reason:
        """The sites as one, or why there is none."""
        first = members[0]
        ends = list(itertools.accumulate((_features(site.plan.ops[0]) for site in members), initial=0))
        plan = _own(first, ends[-1])
        operands = {each.key: self._operand(members, each.key) for each in plan.operands}
        bound = {key: each for key, each in operands.items() if each is not None}
        dst = " ".join(site.dst for site in members)
        if len(bound) < len(operands) or dst in self.graph.types:
            return Reason(Why.APART, "an operand is computed, or of another dtype or shape than the others'")
        records = self.decide(plan)
        if isinstance(records, Unsupported):
            return Reason(Why.REFUSED, str(plan), records.refusals)
        axis = plan.output.channel_axis
        pairs = zip(members, itertools.pairwise(ends), strict=True)
        return replace(
            first,
            plan=plan,
            records=records,
            nodes=in_order(self.graph, [node for site in members for node in site.nodes]),
            dst=dst,
            operands=bound,
            others=(),
            rules=tuple(dict.fromkeys(rule for site in members for rule in site.rules)),
            ranges={site.dst: Slice(axis, *between) for site, between in pairs},
        )

    def _operand(self, members: Sequence[Site], key: str) -> Bound | None:
        """The operands of sites as one, along their features."""
        types, op = self.graph.types, members[0].plan.ops[0]
        for site in members:
            (shape,) = (each.shape for each in site.plan.operands if each.key == key)
            if any(types[name].shape != shape for name in names_in(site.operands[key])):
                return None
        is_matrix = isinstance(op, Product) and not op.transposed and len(shape) > 1
        return joined(self.graph, [site.operands[key] for site in members], 1 if is_matrix else 0)

    def _tried(
        self, made: Site, members: Sequence[Site], known: Mapping[str, Tensor] | None = None
    ) -> _Trial:
        """A joined site, and all that reads its ranges, in the order of the graph.

        Args:
            made: the joined site.
            members: the sites in its place.
            known: how values lie that other joined sites make.
        """
        lies, owner = {**(known or {}), **_results(made)}, {site.dst: site.dst for site in members}
        sites, costs, said = {made.dst: made}, dict.fromkeys(owner, 0.0), ""
        ahead, done = self._ahead(owner), -1
        while ahead:
            place = heapq.heappop(ahead)
            if place <= done:
                continue
            node, done = self.graph.nodes[place], place
            site = self._site(node)
            read = [name for name in (site.reads if site else node.inputs) if name in lies and name in owner]
            if not read or (site and (site.dst in sites or not {*site.results} & {*node.outputs})):
                continue
            seconds, blamed = math.inf, read[0]
            if site:
                again = self._reading(site, lies)
                if isinstance(again, Site):
                    sites[site.dst] = again
                    seconds = again.records.choice.seconds - site.records.choice.seconds
                    is_moved = again.plan.output.element_strides != site.plan.output.element_strides
                    lies |= _results(again) if is_moved else {}
                else:
                    blamed = again if again in owner else blamed
                    said = said or f"`{site.plan}` reads no range of {made.plan}: {again}"
            elif isinstance(node.op, VIEWS):
                seconds = self._view(node, lies)
            else:  # NumPy's operators take ranges as they are
                seconds = sum(map(self._copied, read)) if isinstance(node.op, Foreign) else 0.0
            results = site.results if site else node.outputs
            owner |= dict.fromkeys(results, owner[blamed])
            for place in self._ahead(results):
                heapq.heappush(ahead, place)
            costs[owner[blamed]] += seconds
        for name in filter(owner.__contains__, filter(lies.__contains__, self.graph.outputs)):
            costs[owner[name]] += self._copied(name)
        before = sum(site.records.choice.seconds for site in members)
        gain = before - made.records.choice.seconds - sum(costs.values())
        return _Trial(sites, gain, costs, said)

    def _reading(self, site: Site, lies: Mapping[str, Tensor]) -> Site | str:
        """A site whose tensors lie in other ways; the name of a value that it does not read so."""
        src = site.plan.src
        try:
            if site.src in lies:
                strides = _strides(lies[site.src], src.shape)
                src = TensorSpec(src.shape, src.dtype, strides=strides, names=src.names)
            plan = FusionPlan(src, *(self._lying(op, site, src, lies) for op in site.plan.ops))
        except PlanError:
            return site.src
        before = {each.key: each.spec for each in site.plan.operands}
        for each in plan.operands:
            name, spec = site.operands.get(each.key), before[each.key]
            if spec is None or each.spec is None or not isinstance(name, str):
                continue
            lying = _strides(lies[name], spec.shape) if name in lies else spec.element_strides
            if lying is None or not same_strides(spec.shape, lying, each.spec.element_strides):
                return name if name in lies else site.src
        records = self.decide(plan)
        is_moved = plan.output.element_strides != site.plan.output.element_strides
        if isinstance(records, Unsupported) or (is_moved and site.into):
            return next(name for name in site.reads if name in lies)
        return replace(site, plan=plan, records=records, others=())

    def _lying(self, op: Op, site: Site, src: TensorSpec, lies: Mapping[str, Tensor]) -> Op:
        """The operator; attention with the strides of a key and a value that do not lie as usual."""
        if not isinstance(op, Attention):
            return op
        usual = replace(op, key_strides=(), value_strides=())
        specs = {each.name: each.spec for each in usual.operands(src)}
        for each in site.plan.operands:
            name, spec = site.operands.get(each.key), specs.get(each.name)
            if (
                each.name not in ("key", "value")
                or spec is None
                or not isinstance(name, str)
                or name not in lies
            ):
                continue
            lying = _strides(lies[name], spec.shape)
            if lying is not None and not same_strides(spec.shape, lying, spec.element_strides):
                usual = replace(usual, **{f"{each.name}_strides": lying})  # type: ignore[arg-type]
        return usual

    def _view(self, node: Node, lies: dict[str, Tensor]) -> float:
        """Adds a view of a value, or the copy where its elements do not lie so; the seconds of that."""
        (before,), (name,) = node.inputs, node.outputs
        (made,) = node.op.evaluate([lies[before]])
        is_view = np.may_share_memory(made, lies[before])
        lies[name] = made if is_view else _alone(self.graph.types[name], strides_of(self.graph.types[name]))
        return 0.0 if is_view else self._copied(name)

    def _copied(self, name: str) -> float:
        """Seconds to copy a value."""
        made = self.graph.types[name]
        records = self.decide(FusionPlan(made.spec(), Identity())) if made.is_spec else None
        return records.choice.seconds if isinstance(records, Records) else math.inf


def _is_by_head(plan: FusionPlan) -> bool:
    """Whether a plan is one operator on parts of an axis, which turns each head by the same tensors."""
    op, axis = plan.ops[0], plan.src.names.find("h")
    if len(plan.ops) > 1 or not isinstance(op, Parted) or op.split(plan.src).axis == axis:
        return False
    return all(axis not in each.axes for each in plan.operands)


def _results(site: Site) -> dict[str, Tensor]:
    """Tensors that lie as a site's results do, in memory that nobody touches."""
    whole = _alone(site.plan.output, site.plan.output.element_strides)
    return {name: op.evaluate([whole])[0] for name, op in site.ranges.items()} or {site.dst: whole}


def _alone(made: Type | TensorSpec, strides: Sequence[int]) -> Tensor:
    return Buffer(made.shape or (), tuple(strides), bits_of(made.dtype), 0, 0).alone()


def _strides(lying: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a value in the shape that an operator of plans has; None where its elements lie else."""
    array = lying.reshape(shape)
    is_view = np.may_share_memory(array, lying)
    return tuple(step // array.itemsize for step in array.strides) if is_view else None
