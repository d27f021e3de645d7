"""Every template on every plan it takes: right in each element, for several seeds, again and again."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from device.guarded import CANARY, Walled, inputs, output, typical, wanted, worst
from device.plans import texts
from forced import forced
from fuseplan.backends import backend_of
from fuseplan.compile import CompiledPlan
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Template
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan

KIND = parse_target("triton:sm_90")  # what the cases are made for; they run on whatever GPU there is
SEEDS = (1, 2, 3)
REPEATS, TURNS = 24, 10  # launches at once, and how often
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the size of an element


def _candidates(kind: type[Template], text: str, target: Target) -> list[Template]:
    """All that a template tries for a plan, what the cost model likes best first; none where it refuses."""
    kernel = lower(match(FusionPlan.parse(text)))
    if first_refusal(kind.limits(kernel, target, "default"), kind.name) is not None:
        return []
    listed = list(kind.candidates(kernel, target, "default"))
    return sorted(listed, key=lambda each: each.seconds(kernel, target))


def _cases() -> Iterator[Any]:
    """(template, place among its candidates, plan): the best, the middle one and the worst of each."""
    for text, kind in product(texts(), backend_of("triton").templates):
        count = len(_candidates(kind, text, KIND))
        for place in sorted({0, count // 2, count - 1}) if count else ():
            yield pytest.param(kind, place, text, id=f"{kind.name}-{place}-{text}")


CASES = list(_cases())
FIRST = [case for case in CASES if case.values[1] == 0]


def made(kind: type[Template], place: int, text: str) -> CompiledPlan:
    target = parse_target("cuda")
    listed = _candidates(kind, text, target)
    return forced(text, kind, target, listed[min(place, len(listed) - 1)])


@pytest.mark.parametrize(("kind", "place", "text"), CASES)
def test_each_element_is_within_the_bound(
    kind: type[Template], place: int, text: str, record_property: Callable[[str, object], None]
) -> None:
    compiled = made(kind, place, text)
    shares = []
    for seed in SEEDS:
        tensors = inputs(compiled.plan, seed)
        want, allowed = wanted(compiled, tensors)
        out = output(compiled.plan)
        src = tensors.pop("src")
        assert compiled.bind(**tensors)(src, out.tensor) is out.tensor
        assert torch.equal(out.tensor.isnan(), want.isnan()), "not written, or made of what is no input"
        assert out.stands, "something was written beside the output"
        shares.append(worst(out.tensor, want, allowed))
        assert typical(compiled, out.tensor, want) <= 1
    record_property(kind.name, max(shares))
    assert max(shares) <= 1, f"{compiled.choice}: {max(shares):.2f} times what the bound allows"


@pytest.mark.parametrize(("kind", "place", "text"), FIRST)
def test_launches_that_overlap_agree(kind: type[Template], place: int, text: str) -> None:
    """The same launch many times over, on two streams at once: a race would show in the bits."""
    compiled = made(kind, place, text)
    plan = compiled.plan
    tensors = inputs(plan, 7)
    want, allowed = wanted(compiled, tensors)
    bound, src = (
        compiled.bind(**{key: tensor for key, tensor in tensors.items() if key != "src"}),
        tensors["src"],
    )
    outs = [output(plan) for _ in range(REPEATS)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for turn in range(TURNS):
        for index, out in enumerate(outs):
            with torch.cuda.stream(streams[index % 2]):
                bound(src, out.tensor)
        torch.cuda.synchronize()
        assert all(out.stands for out in outs)
        assert worst(outs[0].tensor, want, allowed) <= 1, f"turn {turn}"
        first, *others = (out.tensor.view(BITS[out.tensor.itemsize]) for out in outs)
        differ = [index for index, other in enumerate(others, 1) if not torch.equal(other, first)]
        assert not differ, f"turn {turn}: launches {differ} gave other bits than the first"


def test_walls_tell_what_was_touched() -> None:
    wall = Walled((3, 4), (4, 1), torch.float32, CANARY)
    assert wall.stands
    assert bool(wall.tensor.isnan().all())
    wall.tensor.as_strided((13,), (1,))[12] = 0  # one element past the end
    assert not wall.stands
