"""Plans that torch's operators are estimated to beat: by copies, by the host's time, or by their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, takewhile
from math import prod

import torch
from torch import fx

from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Expand, Foreign
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.affine import Bias
from fuseplan.ops.gradient import LinearWeightGradient
from fuseplan.ops.matmul import Product
from fuseplan.torch.lying import is_copied, laid_out, order_of

# On a Zen 5: seconds of the host for one of torch's operators between others, seconds that a copy takes for a
# row without gaps, bytes a second of values in caches.
OPERATOR, ROW, BYTES_A_SECOND = 3e-6, 7e-9, 60e9
# There: seconds of the host for a call of a plan outside of an arena, for a copy without gaps, and for one in
# another order of axes, with the bytes a second of such a copy; of torch's convolutions before they compute;
# and by how much of a plan's estimated time torch's own kernels take longer.
HOST, COPY, LAYING, LAID_A_SECOND, CONVOLUTION, BETTER = 15e-6, 2e-6, 3e-6, 10e9, 40e-6, 0.25
# Whose operators take as long before they compute: batch norm, and parts of results, such as the gradients of
# convolutions, of which one takes nearly as long as all. Gradients of activations take 240 us, not 31, where
# one of their inputs has channels last and the other has not, as plans leave them.
LASTS = ("nwc", "nhwc", "ndhwc")
PART, GRADIENT = "getitem", "_backward"
LONG = ("convolution", "batch_norm", PART)
ARITHMETIC = ("aten.add", "aten.sub", "aten.mul", "aten.div")  # torch's functions are slow between gaps


def is_torchs(node: Node) -> bool:
    """Whether torch computes a node, and as fast on channels first.

    Its max_pool2d of f32[2x32x32x32] takes 34 us of a Zen 3 core on channels last, and 366 else.
    """
    return isinstance(node.op, Foreign) and "max_pool2d" not in node.op.operator


def saved(site: Site, makers: Mapping[str, fx.Node], host: float = 0.0) -> float:
    """Seconds that a CPU's plan saves beside torch's operators, measured or estimated.

    A product and a sum of 64x16x10 elements with gaps took 13 to 16 us as a plan with copies, and 10.6 as
    torch's operators. A call of two layers of splines took 1.15 times torch's time so, and takes 0.93.

    Args:
        site: the plan.
        makers: torch's nodes by the names of their values.
        host: seconds of the host for a call of the plan.
    """
    found = site.measured
    if found and {found.plan, found.peer} <= found.seconds.keys():
        return found.seconds[found.peer] - found.seconds[found.plan]
    output, calls = site.plan.output, len({node.origin.name for node in site.nodes})
    passes = 2 * (calls - 1) * output.size * output.itemsize / BYTES_A_SECOND
    return calls * OPERATOR + passes + _better(site, host) - host - _copied(site, makers)


def saved_by(cut: Cut, makers: Mapping[str, fx.Node], host: float, graph: fx.Graph) -> float:
    """Seconds that the plans of a graph save, without those for values that are laid out for them.

    Where several are parts of one operator's results, what that takes before it computes counts once.
    """
    laid = [node.args[0] for node in graph.find_nodes(op="call_function", target=laid_out) if is_copied(node)]
    moved = sum(2 * int(value.meta["val"].nbytes) for value in laid)
    names = [node.outputs[0] for site in cut.sites for node in site.nodes if PART in node.origin.kind]
    parts = [makers[name].args[0] for name in names if name in makers]
    saving = sum(saved(site, makers, host) for site in cut.sites) - CONVOLUTION * (len(parts) - len({*parts}))
    return saving - LAYING * len(laid) - moved / LAID_A_SECOND


def _better(site: Site, host: float) -> float:
    """Seconds by which torch's own kernels are estimated to take longer than the plan's arithmetic."""
    ops, seconds = site.plan.ops, site.built.choice.seconds
    kinds = " ".join(node.origin.kind for node in site.nodes)
    is_mixed = GRADIENT in kinds and site.plan.src.layout in LASTS
    if is_mixed or any(each in kinds for each in LONG):
        return CONVOLUTION + BETTER * seconds
    is_product = any(isinstance(op, Product | LinearWeightGradient) for op in ops)
    is_like = bool(host) and site.plan.src.dtype == "f32"  # weights that are packed in each call
    is_like = is_like if is_product else all(op.kind == "elementwise" for op in ops)
    return 0.0 if is_like else BETTER * seconds


def _copied(site: Site, makers: Mapping[str, fx.Node]) -> float:
    """Seconds for copies of what lies with gaps; for calls alone beside torch's functions, slow there."""
    if site.beside:
        return 0.0
    specs = {each.key: each.spec for each in site.plan.operands if each.spec is not None}
    read = {name: specs[key] for key, name in site.operands.items() if isinstance(name, str) and key in specs}
    if any(op.kind != "elementwise" for op in site.plan.ops):  # else the kernel is made for src as it lies
        read[site.src] = site.plan.src
    gapless = (name for name, spec in read.items() if not isinstance(spec, TensorSpec) or spec.is_dense)
    copies = [each for name in gapless if (each := _copying(makers[name].meta["val"]))]
    is_slow = all(node.origin.kind.startswith(ARITHMETIC) for node in site.nodes)
    return COPY * len(copies) + (sum(copies) if is_slow else 0.0)


def _copying(tensor: torch.Tensor) -> float:
    """Seconds that a copy without gaps takes; 0 where the tensor has none."""
    axes = [axis for axis in reversed(order_of(tensor)) if tensor.shape[axis] > 1]
    extents, strides = [tensor.shape[axis] for axis in axes], [tensor.stride(axis) for axis in axes]
    ends = accumulate(extents, int.__mul__, initial=1)
    lain = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(strides, ends, strict=False)))
    moved = 2 * tensor.numel() * tensor.itemsize / BYTES_A_SECOND
    return ROW * prod(extents[lain:]) + moved if lain < len(axes) else 0.0


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


def is_alone(site: Site) -> bool:
    """Whether the plan is a product of a training step, with its bias at most: cuBLAS computes it as fast."""
    op, *behind = site.plan.ops
    if not isinstance(op, Product | LinearWeightGradient) or site.ranges:
        return False
    if any(not isinstance(each, Bias) for each in behind):
        return False
    is_half = site.plan.src.dtype in ("f16", "bf16")
    return is_half and op.features % 8 == 0 and site.plan.src.channels % 8 == 0
