"""Launches of one kernel again and again: between walls, within the error bound, and each time the same."""

from typing import Any

import torch

from device.guarded import inputs, output
from device.test_numeric import made
from device.test_training import deviation, walls
from fuseplan.kernels.template import Template
from fuseplan.measure.data import evaluated

REPEATS = 8


def assert_repeated(kind: type[Template], place: int, text: str) -> None:
    """Fails unless each launch of that candidate gives every output and result within its bound."""
    compiled = made(kind, place, text)
    plan = compiled.plan
    tensors = inputs(plan, 1)
    want, exact = evaluated(plan, tensors)
    bound = compiled.bind(**{key: tensor for key, tensor in tensors.items() if key != "src"})
    seen: list[tuple[Any, ...]] = []
    for _ in range(REPEATS):
        out, results = output(plan), walls(plan)
        bound(tensors["src"], out.tensor, **{key: wall.tensor for key, wall in results.items()})
        assert out.stands
        assert all(wall.stands for wall in results.values())
        seen.append((out.tensor, *(wall.tensor for wall in results.values())))
    assert deviation(plan, seen[0][0], want, plan.output.dtype) <= 1
    for tensor, (key, value) in zip(seen[0][1:], exact.items(), strict=True):
        assert deviation(plan, tensor, value, plan.src.dtype) <= 1, key
    for again in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], again, strict=True))
