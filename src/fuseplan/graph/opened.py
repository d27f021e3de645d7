"""Plans with an open axis for the sites of a model: one kernel serves every extent of its batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from fuseplan.errors import PlanError, Unsupported
from fuseplan.execution.kept import selected
from fuseplan.execution.select import Choice
from fuseplan.execution.stages import Records, decide
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.why import Reason, Why
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.extents import OPEN
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.plan import FusionPlan

AS_FAST = 1.1  # of the estimated time: a kernel that was chosen for another extent serves this one too


def open_plan(plan: FusionPlan, axes: Sequence[int]) -> FusionPlan:
    """The plan with open axes; the operators may name the axes, or the layout alone.

    Raises:
        PlanError: no plan has these open axes.
    """
    src = plan.src
    shape = [OPEN if axis in axes else extent for axis, extent in enumerate(src.shape)]
    problem = PlanError("the tensor has gaps between its elements", got=str(src))
    for layout, names in (src.layout, src.names), (f"{src.layout} of {src.names}", None):
        try:
            made = TensorSpec(shape, src.dtype, layout if src.layout else None, src.strides, names)
            if made.with_extents(*(src.shape[axis] for axis in axes)) == src:
                return FusionPlan(made, *plan.ops)
        except PlanError as error:
            problem = error
    raise problem


class OpenKernels:
    """The kernels of plans with an open batch, shared by the cuts of a model for several extents.

    A kernel has the template that is best for the extent it was first met with. An extent for which every
    known kernel is estimated to be slower than `AS_FAST` allows has a kernel of its own, for all extents too.

    Args:
        varying: the values whose types depend on the batch.
        outermost: of these, the values whose outermost extent alone does.
    """

    def __init__(self, varying: Collection[str], outermost: Collection[str]) -> None:
        self._varying, self._outermost = varying, outermost
        self._known: dict[str, list[Records]] = {}  # by the text of the open plan

    def serve(self, cut: Cut) -> Cut:
        """The cut whose sites launch kernels with an open batch, where there are such kernels."""
        return replace(cut, sites=tuple(map(self._served, cut.sites)))

    def _served(self, site: Site) -> Site:
        if site.src not in self._varying:
            return site
        others = tuple(partial(self._form, form) for form in site.others)
        return replace(site, opened=self._found(site), others=others)

    def _form(self, form: Callable[[], Site | Reason]) -> Site | Reason:
        """The other form of a site, served likewise."""
        found = form()
        return self._served(found) if isinstance(found, Site) else found

    def _found(self, site: Site) -> Records | Reason:
        """The records of the open plan with the kernel for the site; why there is none."""
        if site.src not in self._outermost:
            return Reason(Why.OPEN_EXTENT, site.src)
        made = site.records
        try:
            plan = open_plan(site.plan, (0,))
            known = self._known.setdefault(str(plan), [])
            base = known[0] if known else decide(plan, made.target, accuracy=made.accuracy, use_cache=True)
        except PlanError as error:
            return Reason(Why.REFUSED, error.what)
        except Unsupported as error:
            return Reason(Why.REFUSED, str(plan), error.refusals)
        kernel = base.kernel.with_extent(site.plan.src.shape[0])
        best = _chosen(base, kernel)
        times = [(each.choice.template.seconds(kernel, made.target), each) for each in known]
        seconds, fastest = min(times, key=lambda pair: pair[0], default=(0.0, None))
        if fastest is not None and seconds <= AS_FAST * best.seconds:
            return fastest
        known.append(replace(base, choice=best))
        return known[-1]


def _chosen(base: Records, kernel: Kernel) -> Choice:
    """The choice for an extent; that for the representative where the extent is too small to tell."""
    try:
        return selected(kernel, base.target, base.accuracy, plan=str(base.plan))
    except Unsupported:
        return base.choice
