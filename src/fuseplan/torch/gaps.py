"""What copies of values with gaps cost a CPU's plan, beside torch's operators, which need none."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, takewhile
from math import prod

import torch
from torch import fx

from fuseplan.graph.cut import Site
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Foreign
from fuseplan.language.tensor import TensorSpec
from fuseplan.torch.lying import order_of

# On a Zen 5: seconds of the host for one of torch's operators between others, seconds that a copy takes for a
# row without gaps, bytes a second of values in caches.
OPERATOR, ROW, BYTES_A_SECOND = 3e-6, 7e-9, 60e9
ARITHMETIC = ("aten.add", "aten.sub", "aten.mul", "aten.div")  # torch's functions are slow between gaps


def is_torchs(node: Node) -> bool:
    """Whether torch computes a node, and as fast on channels first.

    Its max_pool2d of f32[2x32x32x32] takes 34 us of a Zen 3 core on channels last, and 366 else.
    """
    return isinstance(node.op, Foreign) and "max_pool2d" not in node.op.operator


def copies_too_much(site: Site, makers: Mapping[str, fx.Node]) -> bool:
    """Whether a plan of torch's arithmetic needs copies that take longer than it is estimated to save.

    A product and a sum of 64x16x10 elements with gaps took 13 to 16 us as a plan with copies, and 10.6 as
    torch's operators. A call of two layers of splines took 1.15 times torch's time so, and takes 0.93.

    Args:
        site: the plan.
        makers: torch's nodes by the names of their values.
    """
    if site.beside or not all(node.origin.kind.startswith(ARITHMETIC) for node in site.nodes):
        return False
    specs = {each.key: each.spec for each in site.plan.operands if each.spec is not None}
    read = {name: specs[key] for key, name in site.operands.items() if isinstance(name, str) and key in specs}
    read[site.src] = site.plan.src
    gapless = (name for name, spec in read.items() if not isinstance(spec, TensorSpec) or spec.is_dense)
    copying = sum(_copying(makers[name].meta["val"]) for name in gapless)
    output, calls = site.plan.output, len({node.origin.name for node in site.nodes})
    passes = 2 * (calls - 1) * output.size * output.itemsize
    return copying > calls * OPERATOR + passes / BYTES_A_SECOND


def _copying(tensor: torch.Tensor) -> float:
    """Seconds that a copy without gaps takes; 0 where the tensor has none."""
    axes = [axis for axis in reversed(order_of(tensor)) if tensor.shape[axis] > 1]
    extents, strides = [tensor.shape[axis] for axis in axes], [tensor.stride(axis) for axis in axes]
    ends = accumulate(extents, int.__mul__, initial=1)
    lain = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(strides, ends, strict=False)))
    moved = 2 * tensor.numel() * tensor.itemsize / BYTES_A_SECOND
    return ROW * prod(extents[lain:]) + moved if lain < len(axes) else 0.0
