"""Plans that torch's own operators, or the libraries behind them, are as fast as."""

from __future__ import annotations

from fuseplan.graph.cut import Site
from fuseplan.graph.layer import Layer
from fuseplan.graph.ops import Expand
from fuseplan.ops.affine import Bias
from fuseplan.ops.gradient import LinearWeightGradient
from fuseplan.ops.matmul import Product
from fuseplan.ops.reductions import Sum

BRIEF = 10e-6  # estimated seconds of a plan that torch's own operators take less of the host's time for


def is_slow_attention(site: Site) -> bool:
    """Whether the plan is torch's own attention, and torch's kernels may be faster.

    On an H100 in bf16, the fastest of them takes of the plan's time, by the plan's kernel:
        hopper_attention: 0.86 to 1.13, 1.04 in the geometric mean of 26 shapes
        attention, one query: 0.98 to 1.01
        attention, at most as many tiles of 64 queries as processors: 1.10 to 1.22
        attention, more tiles: 0.52 to 0.94
    """
    if not any(isinstance(node.op, Layer) and node.op.op.kind == "attention" for node in site.nodes):
        return False
    if any(isinstance(node.op, Expand) for node in site.nodes):
        return False  # torch's kernels read copies of keys and values, one for each head of queries
    records = site.built
    made, target = records.kernel.attention, records.target
    tiles = made.batch * made.heads * -(-made.queries // 64)
    is_measured = target.name == "sm_90" and records.kernel.src.dtype in ("f16", "bf16")
    is_small = made.queries == 1 or (is_measured and tiles <= target.processors)
    return not is_small and records.choice.template.name != "hopper_attention"


def is_packed(site: Site) -> bool:
    """Whether the plan's kernel multiplies by a copy of the weight, which each step makes anew."""
    records = site.built
    if not isinstance(site.plan.ops[0], Product):
        return False
    weight = records.kernel.weight
    return not records.choice.template.packing(records.kernel, records.target, weight).is_plain


def is_brief(site: Site) -> bool:
    """Whether the plan is a product of a training step alone, or a sum of few rows, that takes little time.

    On a core of a Zen 3, 8 rows of 32 channels times a matrix of 10 features and a bias take 28 to 48 us as a
    plan, with the packing of weights, and 11 by torch; their gradients 15 each, and 6.
    """
    is_sum = isinstance(site.plan.ops[0], Sum) and site.plan.src.rank == 2
    return (is_sum or _is_product(site)) and site.records.choice.seconds < BRIEF


def _is_product(site: Site) -> bool:
    """Whether the plan is a product with its bias at most."""
    op, *behind = site.plan.ops
    is_one = isinstance(op, Product | LinearWeightGradient) and not site.ranges
    return is_one and all(isinstance(each, Bias) for each in behind)


def is_alone(site: Site) -> bool:
    """Whether the plan is a product of a training step, with its bias at most: cuBLAS computes it as fast."""
    op = site.plan.ops[0]
    if not _is_product(site) or not isinstance(op, Product | LinearWeightGradient):
        return False
    is_half = site.plan.src.dtype in ("f16", "bf16")
    return is_half and op.features % 8 == 0 and site.plan.src.channels % 8 == 0
