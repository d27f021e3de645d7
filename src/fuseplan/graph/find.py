"""Finding: a graph cut into plans, and a row for each operator of the framework."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fuseplan.errors import PlanError, Unsupported
from fuseplan.execution.stages import Records, decide
from fuseplan.graph import attended, attention, layouts
from fuseplan.graph.alternatives import OnSrc, as_it_lies, exact, faster, seconds_of
from fuseplan.graph.cut import Attempt, Cut, Site, bound
from fuseplan.graph.folding import centre_of, taken_up
from fuseplan.graph.formulas import formula_of
from fuseplan.graph.fronts import Front, fronts, spines, src_of
from fuseplan.graph.gates import of_halves, of_two
from fuseplan.graph.graph import Graph
from fuseplan.graph.horizontal import together
from fuseplan.graph.integers import of_integers, read_as_integers
from fuseplan.graph.joins import as_given, in_place
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.norms import in_order, spelled
from fuseplan.graph.ops import VIEWS, Convert, Foreign
from fuseplan.graph.pads import Anchor, anchors
from fuseplan.graph.region import Region, is_widened, regions
from fuseplan.graph.rotations import TURN, Rotation, ended_norms, normed, readings, rotation
from fuseplan.graph.rules import Rule
from fuseplan.graph.why import Reason, Why
from fuseplan.graph.write import Stage, Unwritten, written
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops import UNARY
from fuseplan.ops.activation import Identity
from fuseplan.ops.conversion import Cast
from fuseplan.ops.matmul import Product
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.locks import cached_property

Nodes = tuple[Node, ...]


def find(
    graph: Graph,
    target: Target | str = "cpu",
    *,
    threads: int | None = None,
    accuracy: Accuracy = "default",
    weights: Collection[str] = (),
    last: Collection[str] = (),
    joins: bool = True,
    ranges: bool = True,
    results: bool = False,
    rules: Sequence[Rule] = (),
    is_apart: Callable[[Node], bool] = lambda node: isinstance(node.op, Foreign),
) -> Cut:
    """Cuts a graph into plans that the target computes; nothing is compiled.

    Args:
        accuracy: as for `fuseplan.compile`.
        weights: inputs that may be weights. They may change, so nothing is folded into them.
        last: values that lie channels last where no plan makes or reads them; all others lie in order.
        joins: plans may write into the values that join their results.
        ranges: one plan may compute several products of an input, whose weights are joined.
        results: plans may make several values of the graph.
        rules: of the caller, the first that holds first.
        is_apart: whether a library computes a node, and no plan.

    Raises:
        ArgumentError: the target, the threads or the accuracy cannot be.
    """
    inputs = frozenset(weights), frozenset(last)
    finder = _Finder(graph, target, threads, accuracy, *inputs, joins, results, rules, is_apart)
    finder.find()
    sites, tried = together(graph, finder.sites, finder._decided) if ranges else (finder.sites, [])
    sites.sort(key=lambda site: min(graph.place(name) for name in site.results))
    return Cut(graph, tuple(sites), finder.left, (*finder.tried, *tried))


@dataclass
class _Finder:
    graph: Graph
    target: Target | str
    threads: int | None
    accuracy: Accuracy
    weights: frozenset[str]
    last: frozenset[str]
    joins: bool
    results: bool
    rules: Sequence[Rule]
    is_apart: Callable[[Node], bool]
    sites: list[Site] = field(default_factory=list)
    claimed: set[int] = field(default_factory=set)
    left: dict[int, Reason] = field(default_factory=dict)
    tried: list[Attempt] = field(default_factory=list)
    known: dict[str, Records | Unsupported] = field(default_factory=dict)
    forms: dict[str, OnSrc] = field(default_factory=dict)  # of sites, on another src
    rotated: dict[str, str] = field(default_factory=dict)  # the src of a rotation's plan, by its result

    def find(self) -> None:
        self._rotations()
        self._attentions()
        self._anchors("contraction", "attention")
        for found in filter(None, (spelled(self.graph, node) for node in self.graph.nodes)):
            if not any(id(node) in self.claimed for node in found.nodes):
                layer = Layer(found.op)
                self._anchored(Node(layer, (found.src,), (found.dst,)), layer, found.nodes)
        self._anchors("normalization", *(each.kind for each in UNARY))
        self._anchors("embedding")
        for node in self.graph.nodes:
            if id(node) not in self.claimed and not isinstance(node.op, VIEWS):
                self._alone(node)

    def _rotations(self) -> None:
        for found in filter(None, (rotation(self.graph, node) for node in self.graph.nodes)):
            stage = Stage(found.op, {"cos": found.cos, "sin": found.sin})
            ended = Reason(Why.CONSUMER, found.dst)
            made = (
                self._site(src, [stage], found.nodes, found.src, found.dst, ended)
                for src in readings(self.graph, found)
            )
            alone = (site for site in made if isinstance(site, Site))
            site = self._behind_norm(found, stage, ended) or next(alone, None)
            if site is not None:
                self._keep(site)
                self.rotated[found.dst] = found.src

    def _behind_norm(self, found: Rotation, stage: Stage, ended: Reason) -> Site | None:
        """The site of a norm of heads and the rotation behind it, where it takes no longer than both."""
        inner = normed(self.graph, found)
        if inner is None or inner not in self._normed:
            return None
        (node, layer, pieces), region = self._normed[inner]
        src = TensorSpec(self.graph.types[inner].shape or (), self.graph.types[inner].dtype, names="bshd")
        try:
            stages = [centre_of(self.graph, node, layer), *written(self.graph, region, src, self.rules)]
        except Unwritten:
            return None
        for values, nodes, front in self._fronts(node, layer, pieces):
            norm, read = [*front, *stages], src_of(self.graph, values, front, src)
            whole = (*nodes, *pieces, *region.nodes, self.graph.made_by[found.src], *found.nodes)
            most = seconds_of(read, (norm, [stage]), self._decided)
            made = self._site(read, [*norm, stage], in_order(self.graph, whole), values, found.dst, ended)
            if isinstance(made, Site) and made.records.choice.seconds <= most:
                return replace(made, dst=f"{inner} {found.dst}", ranges={found.dst: TURN})
        return None

    @cached_property
    def _normed(self) -> Mapping[str, tuple[Anchor, Region]]:
        """Norms in pieces, by the values that they end with."""
        return ended_norms(self.graph, self.claimed)

    def _attentions(self) -> None:
        """The sites of attention that is written out, by the products that it ends with."""
        for node in self.graph.nodes:
            found = attended.anchors(self.graph, node)
            reason = found if isinstance(found, Reason) else None
            for made, layer, pieces in () if isinstance(found, Reason) else found:
                if id(node) not in self.claimed:
                    self._anchored(made, layer, pieces)
                    reason = self.left.pop(id(made), None)
            if reason is not None:
                self.left[id(node)] = reason

    def _anchors(self, *kind: str) -> None:
        layers = (
            node
            for node in self.graph.nodes
            if isinstance(node.op, Layer) and {node.op.op.kind, node.op.word} & {*kind}
        )
        for layer, anchor in ((each, anchor) for each in layers for anchor in self._forms(each)):
            if id(layer) not in self.claimed:
                self._anchored(*anchor)
        self._lay()

    def _forms(self, node: Node) -> Iterator[Anchor]:
        """An anchor with nodes in front of it as its own attributes, where that can be; then as it is."""
        is_attention = isinstance(node.op, Layer) and node.op.op.kind == "attention"
        return attention.anchors(self.graph, node) if is_attention else anchors(self.graph, node)

    def _anchored(self, node: Node, layer: Layer, pieces: Nodes) -> None:
        """The site around a contraction or an operator with statistics, which a node or its pieces are."""
        further = [name for name in node.outputs[1:] if name]
        # A region may read what follows from a result that others read.
        if further and (not self.results or any(self.graph.readers[name] for name in further)):
            self.left[id(node)] = Reason(Why.FORMULA, f"{layer.word} has several results")
            return
        if "weight" in layer.keys and node.inputs[1] not in self._known:
            self.left[id(node)] = Reason(Why.WEIGHT_NOT_CONSTANT, node.inputs[1])
            return
        given = [self.graph.types[name] for name in node.inputs]
        src = layer.src(given)
        if attention.has_few_queries(layer.op, src, str(self.target)):
            self.left[id(node)] = Reason(Why.SLOWER, "one query on a CPU fills one lane of a vector")
            return
        lying = self.rotated.get(node.inputs[0], node.inputs[0])
        layout = layouts.layout_for(self.graph, lying, layer, given[0])
        if layout and (layer.op.reads != "rows" or layer.op.kind == "attention"):  # rows have own names
            src = TensorSpec(src.shape, src.dtype, layout)
        strides = layouts.strides_in(self.graph, node.inputs[0]) if layer.op.kind == "attention" else None
        ranged = [TensorSpec(src.shape, src.dtype, strides=strides, names=src.names)] if strides else []
        for each in (*ranged, src):
            reason = self._grown(node, layer, pieces, each)
            if reason is None:
                return
        self.left[id(node)] = reason or Reason(Why.REFUSED)

    def _grown(self, node: Node, layer: Layer, pieces: Nodes, src: TensorSpec) -> Reason | None:
        """Keeps the site of an anchor with the largest region behind it; else, why there is none."""
        reason = None
        for region in regions(self.graph, node.outputs[0], self.claimed, is_inside=True):
            if is_widened(self.graph, region.head):
                continue
            on = partial(exact, layer, partial(self._with, node, pieces, region, reason))
            found = on(src)
            if isinstance(found, Site):
                self.forms[found.dst] = on
                self._keep(found)
                return None
            reason = reason or found
        return reason or Reason(Why.REFUSED)

    def _lay(self) -> None:
        """Lays tensors of plans as the framework has them, where it computes what is around."""
        lain = partial(as_it_lies, self.graph, self.last, self.is_apart, self.claimed, self._decided)
        self.sites = [lain(site, self.forms.get(site.dst)) for site in self.sites]

    def _with(
        self, node: Node, pieces: Nodes, region: Region, before: Reason | None, layer: Layer, src: TensorSpec
    ) -> Site | Reason:
        """The site of an anchor and the region behind it, or why there is none."""
        try:
            stages = written(self.graph, region, layer.op.output(src), self.rules)
        except Unwritten as error:
            return self._no((*pieces, *region.nodes), error.reason)
        centre = centre_of(self.graph, node, layer)
        ended = before or region.ended
        further = {name: place for place, name in enumerate(node.outputs) if place and name}

        def form(middle: list[Stage], before: Iterable[Front] = ()) -> Site | Reason:
            for values, nodes, front in before or self._fronts(node, layer, pieces):
                made, whole = [*front, *middle], (*nodes, *pieces, *region.nodes)
                read = src_of(self.graph, values, made, src)
                site = self._site(read, made, whole, values, region.head, ended)
                if isinstance(site, Site):
                    return replace(site, further=further)
            return site

        plain = [centre, *stages]
        taken = taken_up(plain)
        gated = self._gated(node, layer, src, region, taken, ended)
        if gated is not None:
            return gated
        site = form(taken)
        is_folded = [each.op for each in taken] != [each.op for each in plain]
        if is_folded and isinstance(site, Site):
            site = replace(site, others=(partial(form, plain),))
        for each in of_integers(self.graph, node, layer, pieces, plain):
            site = faster(form([], [each]), site)
        return site

    def _gated(
        self, node: Node, layer: Layer, src: TensorSpec, region: Region, stages: list[Stage], ended: Reason
    ) -> Site | None:
        """The site of a product that is gate and value, where this takes no longer than without."""
        if not isinstance(layer.op, Product) or layer.op.batched:
            return None
        made = layer.op.output(src)

        def write(region: Region) -> list[Stage]:
            return written(self.graph, region, made, self.rules)

        def behind(node: Node, region: Region) -> list[Stage]:
            return taken_up([centre_of(self.graph, node, layer), *write(region)])

        halves = of_halves(self.graph, region, stages, self.claimed, write)
        for found in (*of_two(self.graph, node, region, self.claimed, behind), *halves):
            nodes = in_order(self.graph, (node, *region.nodes, *found.nodes))
            reason = ended if found.end is region else found.end.ended
            site = self._site(src, found.stages, nodes, node.inputs[0], found.end.head, reason)
            if isinstance(site, Site) and site.records.choice.seconds <= seconds_of(
                src, found.apart, self._decided
            ):
                return site
        return None

    def _fronts(self, node: Node, layer: Layer, pieces: Nodes) -> Iterator[Front]:
        """What may stand in front of an anchor; at last, nothing."""
        name = node.inputs[0]
        if layer.op.kind in ("attention", "elementwise"):
            return iter([(name, (), [])])
        if layer.op.kind == "contraction":
            return iter([*read_as_integers(self.graph, name, pieces), (name, (), [])])
        spec = layer.src([self.graph.types[each] for each in node.inputs])
        return fronts(self.graph, name, pieces, spec, self.claimed, self._known, self.rules)

    @property
    def _known(self) -> Collection[str]:
        """Constants and weights."""
        return self.graph.constants.keys() | self.weights

    def _alone(self, node: Node) -> None:
        """The site of formulas without a contraction or statistics."""
        reason = self._never(node)
        if reason is not None:
            self.left.setdefault(id(node), reason)
            return
        reasons = []
        for spine in spines(self.graph, node, self._known):
            for region in regions(self.graph, spine, self.claimed, is_inside=False):
                computing = [each for each in region.nodes if not isinstance(each.op, Convert)]
                has_node = any(each is node for each in region.nodes)
                is_last = isinstance(region.nodes[-1].op, Convert) if region.nodes else False
                if not computing or not has_node or (is_last and is_widened(self.graph, region.head)):
                    continue
                found = self._pointwise(region)
                if isinstance(found, Site):
                    self._keep(found)
                    return
                reasons.append(found)
        blamed = Reason(Why.BROADCAST, "no input has the shape of the result")
        if isinstance(node.op, Convert):
            blamed = Reason(Why.NO_PLAN, node.op.word)
        self.left[id(node)] = reasons[-1] if reasons else blamed

    def _never(self, node: Node) -> Reason | None:
        """Why a node can be in no plan of formulas."""
        if id(node) in self.left:
            return self.left[id(node)]
        if isinstance(node.op, Foreign):
            return node.why or Reason(Why.NOT_IN_TABLE, node.op.operator)
        made = self.graph.types[next(filter(None, node.outputs))]
        if not (made.is_float or made.is_quantized):
            return Reason(Why.DTYPE, str(made))
        if not (made.is_spec or made.is_quantized):
            return Reason(Why.SHAPE, str(made))
        return None if formula_of(self.graph, node) else Reason(Why.NO_PLAN, node.op.word)

    def _pointwise(self, region: Region) -> Site | Reason:
        reason = Reason(Why.FORMULA)
        for spec in layouts.readings(self.graph, region.start, region.nodes):
            try:
                stages = written(self.graph, region, spec, self.rules)
            except Unwritten as error:
                reason = self._no(region.nodes, error.reason)
                continue
            stages = stages or [Stage(Identity())]
            found = self._site(spec, stages, region.nodes, region.start, region.head, region.ended)
            if isinstance(found, Site):
                return found
            reason = found
        return reason

    def _site(
        self, src: TensorSpec, stages: Sequence[Stage], nodes: Nodes, start: str, head: str, ended: Reason
    ) -> Site | Reason:
        """The site of a plan, or why the plan is refused."""
        dtype = self.graph.types[head].dtype
        try:
            plan = FusionPlan(src, *(stage.op for stage in stages))
            if plan.output.dtype != dtype:
                stages = [*stages, Stage(Cast(dtype))]
                plan = FusionPlan(src, *(stage.op for stage in stages))
        except PlanError as error:
            return self._no(nodes, Reason(Why.REFUSED, error.what))
        records = self._decided(plan)
        if isinstance(records, Unsupported):
            return self._no(nodes, Reason(Why.REFUSED, str(plan), records.refusals), str(plan))
        named = tuple(dict.fromkeys(stage.rule for stage in stages if stage.rule))
        beside = tuple(each for stage in stages for each in stage.nodes)
        nodes = in_order(self.graph, (*nodes, *beside)) if beside else nodes
        return Site(plan, records, nodes, start, head, bound(plan, stages), ended, rules=named)

    def _decided(self, plan: FusionPlan) -> Records | Unsupported:
        """The records of a plan; blocks that a model repeats are decided once."""
        text = str(plan)
        if text in self.known:
            return self.known[text]
        try:
            made = decide(plan, self.target, threads=self.threads, accuracy=self.accuracy, use_cache=True)
        except Unsupported as error:
            return self.known.setdefault(text, error)
        return self.known.setdefault(text, made)

    def _no(self, nodes: Nodes, reason: Reason, plan: str = "") -> Reason:
        """Keeps an attempt that makes no site, and gives its reason."""
        self.tried.append(Attempt(nodes, plan, reason))
        return reason

    def _keep(self, site: Site) -> None:
        if self.joins and not site.ranges:
            site = in_place(self.graph, as_given(self.graph, site, self._decided, self.last), self._decided)
        self.sites.append(site)
        self.tried.append(Attempt(site.nodes, str(site.plan), site.ended, is_site=True))
        self.claimed |= {id(node) for node in site.nodes}
