"""Every one of MIOpen's own cases of fusion in full: each operand random, each result poisoned beforehand.

The reference is float64 on the same GPU, some images at a time, by products of float64 matrices (`float64`):
NumPy would take hours for the 25 thousand GFLOP, and positions drawn at random would leave most of a result
unseen.
"""

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import RMS, most, sized
from device.guarded import inputs, output
from fuseplan.compile import compile as compile_plan
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.data import evaluated
from fuseplan.plans.plan import FusionPlan

LARGE = 1 << 29  # bytes; plans beyond it take turns, so that test processes may share a GPU
TRIES = 20  # where other processes have the memory: each gives it back after a plan
ELEMENTS = 1 << 25  # of a piece's src and result in float64

Tensors = Mapping[str, Any]


@contextmanager
def turn(plan: FusionPlan) -> Iterator[None]:
    """Waits until no other process has a large plan's tensors, if this plan is large; frees all at last."""
    is_large = plan.src.nbytes + plan.output.nbytes > LARGE
    with (Path(tempfile.gettempdir()) / "fuseplan-large-plan").open("w") as held:
        if is_large:
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def pieces(plan: FusionPlan, tensors: Tensors) -> Iterator[tuple[str, Any, Any]]:
    """The reference of a part at a time: of what, which part, and what it has to be.

    A part is some images of a convolution, whose sums go over channels; some channels of anything else, whose
    statistics go over images.
    """
    axis = 0 if any(step.op.kind == "contraction" for step in plan) else 1
    extent = plan.src.shape[axis]
    count = max(1, ELEMENTS * extent // (plan.src.size + plan.output.size))
    for begin in range(0, extent, count):
        some = slice(begin, min(begin + count, extent))
        shape = (*plan.src.shape[:axis], some.stop - some.start, *plan.src.shape[axis + 1 :])
        part = FusionPlan(TensorSpec(shape, plan.src.dtype, plan.src.layout), *(step.op for step in plan))
        want, results = evaluated(
            part, {key: _part(plan, axis, key, each, some) for key, each in tensors.items()}
        )
        yield "out", (slice(None),) * axis + (some,), want
        yield from ((key, some, value) for key, value in results.items())


def _part(plan: FusionPlan, axis: int, key: str, tensor: Any, some: slice) -> Any:
    """What a part of the plan has of a tensor."""
    per_element = {held.key for held in plan.operands if held.per == "element"} | {"src"}
    if axis:
        return tensor[:, some] if key in per_element else tensor[some]
    return tensor[some] if key in per_element else tensor


def share(got: Tensors, plan: FusionPlan, tensors: Tensors) -> float:
    """The largest of the errors of all results, root mean square and furthest, over what is allowed.

    What is all zeros, and should not be, is off by all of it. Statistics are taken over 1 where they are
    smaller: the mean of normal numbers is near 0, and they are not.
    """
    found = {key: (0.0, 0.0, 0.0 if key == "out" else 1.0) for key in got}
    for key, some, want in pieces(plan, tensors):
        part, (squares, furthest, largest) = got[key][some], found[key]
        assert bool(part.isfinite().all())
        off = (part.double() - want).abs()
        squares += float(off.square().sum())
        furthest, largest = max(furthest, float(off.amax())), max(largest, float(want.abs().amax()))
        found[key] = (squares, furthest, largest)
    shares = [0.0]
    for key, (squares, furthest, largest) in found.items():
        dtype, scale = plan.src.dtype if key == "out" else "f32", largest or 1.0  # one element may be a zero
        shares.append((squares / got[key].numel()) ** 0.5 / (RMS[dtype] * scale))
        shares.append(furthest / most(plan, dtype, scale))
    return max(shares)


def computed(plan: FusionPlan, tensors: Tensors, target: str) -> Tensors:
    """The plan's results, each NaN beforehand, but for those that are updated."""
    device = tensors["src"].device
    out = output(plan, str(device))
    given = {
        held.key: torch.full(held.shape, torch.nan, device=device)
        for held in plan.results
        if not held.updated
    }
    given |= {key: tensor.clone() for key, tensor in tensors.items() if key in updated(plan)}
    made = compile_plan(plan, target)(out=out.tensor, **{**tensors, **given})
    assert out.stands, "something was written beside the output"
    return made._asdict() if plan.results else {"out": made}


def updated(plan: FusionPlan) -> set[str]:
    """The keys of results whose old values are read."""
    return {held.key for held in plan.results if held.updated}


def run(plan: FusionPlan, target: str = "cuda") -> float:
    """Runs the plan; the largest error as a share of what is allowed."""
    for _ in range(TRIES):
        try:
            with turn(plan):
                tensors = inputs(plan, 7, target.replace("cuda", "cuda:0"))
                return share(computed(plan, tensors, target), plan, tensors)
        except torch.OutOfMemoryError:
            time.sleep(2)
    raise AssertionError(f"there was no memory for it in {TRIES} tries")


@pytest.mark.parametrize("plan", [each.plan for each in sized()], ids=str)
def test_each_case_is_within_the_bounds(
    plan: FusionPlan, record_property: Callable[[str, object], None]
) -> None:
    found = run(plan)
    record_property(f"conformance {plan.src.dtype}", found)
    assert found <= 1


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_statistics_of_two_to_the_31_elements(
    layout: str, record_property: Callable[[str, object], None]
) -> None:
    """MIOpen has a test of this size, turned off: its offsets have 32 bits."""
    plan = FusionPlan.parse(f"f16[2x2048x1024x512, {layout}] -> batch_norm_training(running=True) -> relu")
    assert plan.src.size == 1 << 31
    found = run(plan)
    record_property("conformance f16", found)
    assert found <= 1
