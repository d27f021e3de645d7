"""Plans with statistics on a GPU: each template, its output and every result, again and again."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import fuseplan
from device.guarded import inputs, output
from device.repeats import deviation, repeated
from device.test_numeric import KIND, _candidates, made
from fuseplan.backends import backend_of
from fuseplan.compile import CompiledPlan
from fuseplan.kernels.template import Template
from fuseplan.measure.data import evaluated
from fuseplan.plans.plan import FusionPlan
from training import CHAINS

TENSORS = ("f32[3x17x9x11]", "f16[8x64x57x55, nhwc]", "bf16[33x40x6x6]", "f32[5x37x6x7, nhwc]", "f16[64x129]")
SEEDS = (1, 2)
REPEATS = 12


def _cases() -> Iterator[Any]:
    """(template, place among its candidates, plan): the best, the middle one and the worst of each."""
    for (tensor, chain), kind in product(product(TENSORS, CHAINS), backend_of("triton").templates):
        text = f"{tensor} -> {chain}"
        count = len(_candidates(kind, text, KIND))
        for place in sorted({0, count // 2, count - 1}) if count else ():
            yield pytest.param(kind, place, text, id=f"{kind.name}-{place}-{text}")


CASES = list(_cases())


@pytest.mark.parametrize(("kind", "place", "text"), CASES)
def test_every_result_is_within_the_bound(kind: type[Template], place: int, text: str) -> None:
    compiled = made(kind, place, text)
    plan = compiled.plan
    for seed in SEEDS:
        tensors = inputs(plan, seed)
        want, exact = evaluated(plan, tensors)
        out, *results = repeated(compiled, tensors, exact, REPEATS)
        assert deviation(plan, out, want, plan.output.dtype) <= 1
        for tensor, (key, value) in zip(results, exact.items(), strict=True):
            assert deviation(plan, tensor, value, plan.src.compute_dtype) <= 1, key


@pytest.mark.parametrize("tensor", ["f32[32x64x28x28]", "f32[32x64x28x28, nhwc]", "f32[256x64x2x2]"])
@pytest.mark.parametrize("mode", ["spatial", "per_activation"])
def test_a_large_mean_costs_no_digits(tensor: str, mode: str) -> None:
    plan = FusionPlan.parse(f"{tensor} -> batch_norm_training({mode})")
    tensors = inputs(plan, 1)
    tensors["src"].add_(1000.0)
    want, exact = evaluated(plan, tensors)
    got = fuseplan.compile(plan, "cuda")(**tensors)
    assert (got.out.double() - want).abs().amax() < 2e-3, "numbers near 1000 lie 6e-5 apart"
    for key in ("saved_mean", "saved_inverse_variance"):
        torch.testing.assert_close(getattr(got, key).double(), exact[key], rtol=2e-6, atol=0)


def bound_step(text: str) -> tuple[CompiledPlan, dict[str, Any], Any]:
    compiled = fuseplan.compile(text, "cuda")
    tensors = inputs(compiled.plan, 3)
    keys = [each.key for each in compiled.plan.results]
    results = {key: tensors.get(key, torch.zeros(64, device="cuda")) for key in keys}
    operands = {key: tensor for key, tensor in tensors.items() if key != "src"}
    return compiled, tensors, compiled.bind(**(operands | results))


def test_a_step_is_recorded_in_a_graph() -> None:
    """The programs of a recorded launch meet too, and update the running statistics at every replay."""
    compiled, tensors, bound = bound_step(
        "f16[16x64x14x14, nhwc] -> batch_norm_training(running=True) -> relu"
    )
    plan, out = compiled.plan, output(compiled.plan)
    start = {key: tensors[key].clone() for key in ("running_mean", "running_variance")}
    bound(tensors["src"], out.tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(tensors["src"], out.tensor)
    for key, value in start.items():
        tensors[key].copy_(value)
    for _ in range(5):
        before = {key: tensors[key].clone() for key in start}
        tensors["src"].mul_(1.25)
        out.tensor.fill_(float("nan"))
        graph.replay()
        want, exact = evaluated(plan, tensors | before)
        assert deviation(plan, out.tensor, want, "f16") <= 1
        for key in start:
            assert deviation(plan, tensors[key], exact[key], "f32") <= 1


def test_two_streams_do_not_meet() -> None:
    """Launches on two streams at once have counters of their own."""
    text = "f32[16x64x14x14] -> batch_norm_backward(relu, statistics=recomputed)"
    calls = [bound_step(text) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in calls]
    wants = [evaluated(compiled.plan, tensors)[0] for compiled, tensors, _ in calls]
    torch.cuda.synchronize()
    got: list[Any] = [None, None]
    for _ in range(20):
        for place, (stream, (_, tensors, bound)) in enumerate(zip(streams, calls, strict=True)):
            with torch.cuda.stream(stream):
                got[place] = bound(tensors["src"])
    torch.cuda.synchronize()
    for (compiled, _, _), outcome, want in zip(calls, got, wants, strict=True):
        assert deviation(compiled.plan, outcome.out, want, "f32") <= 1
