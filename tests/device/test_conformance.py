"""Every one of MIOpen's own cases of fusion in full: each operand random, each result poisoned beforehand.

The reference is float64 on the same GPU, some images at a time, by products of float64 matrices (`gpu_data`):
NumPy would take hours for the 25 thousand GFLOP, and positions drawn at random would leave most of a result
unseen.
"""

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import MOST, RMS, sized
from device.guarded import inputs, output
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.gpu_data import reference
from fuseplan.plan import FusionPlan
from fuseplan.tensor import TensorSpec

LARGE = 1 << 29  # bytes; plans beyond it take turns, so that test processes may share a GPU
ELEMENTS = 1 << 25  # of a piece's src and result in float64

Tensors = Mapping[str, Any]


@contextmanager
def turn(plan: FusionPlan) -> Iterator[None]:
    """Waits until no other process has a large plan's tensors, if this plan is large; frees all at last."""
    is_large = plan.src.nbytes + plan.output.nbytes > LARGE
    with (Path(tempfile.gettempdir()) / "fuseplan-large-plan").open("w") as held:
        if is_large:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def pieces(plan: FusionPlan, tensors: Tensors) -> Iterator[tuple[slice, Any]]:
    """The reference of some images at a time: which, and what they have to be."""
    an_image = prod(plan.src.shape[1:]) + prod(plan.output.shape[1:])
    count = max(1, ELEMENTS // an_image)
    per_image = {held.key for held in plan.operands if held.operand.per == "element"} | {"src"}
    for begin in range(0, plan.src.batch, count):
        some = slice(begin, min(begin + count, plan.src.batch))
        shape = (some.stop - some.start, *plan.src.shape[1:])
        part = FusionPlan(TensorSpec(shape, plan.src.dtype, plan.src.layout), *(step.op for step in plan))
        held = {key: tensor[some] if key in per_image else tensor for key, tensor in tensors.items()}
        yield some, reference(part, held)


def errors(got: Any, plan: FusionPlan, tensors: Tensors) -> tuple[float, float]:
    """Root mean square and largest error, both over the largest value.

    What is all zeros, and should not be, is off by all of it.
    """
    squares, furthest, largest = 0.0, 0.0, 0.0
    for some, want in pieces(plan, tensors):
        off = (got[some].double() - want).abs()
        squares += float(off.square().sum())
        furthest, largest = max(furthest, float(off.amax())), max(largest, float(want.abs().amax()))
    scale = largest or 1.0  # one element may be a zero
    return (squares / got.numel()) ** 0.5 / scale, furthest / scale


@pytest.mark.parametrize("plan", [each.plan for each in sized()], ids=str)
def test_each_case_is_within_the_bounds(
    plan: FusionPlan, record_property: Callable[[str, object], None]
) -> None:
    with turn(plan):
        compiled = compile_plan(plan, "cuda")
        tensors, out = inputs(plan, 7), output(plan)
        got = compiled(out=out.tensor, **tensors)
        assert out.stands, "something was written beside the output"
        assert bool(got.isfinite().all())
        rms, most = errors(got, plan, tensors)
    dtype = plan.src.dtype
    record_property(f"conformance {dtype}", max(rms / RMS[dtype], most / MOST[dtype]))
    assert rms <= RMS[dtype]
    assert most <= MOST[dtype]
