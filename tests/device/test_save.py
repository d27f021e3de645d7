"""Saved values on a GPU: each template, its output and every value, in tensors with walls around them."""

from collections.abc import Iterator
from typing import Any

import pytest

from device.guarded import inputs, output
from device.repeats import deviation, old, walls
from device.test_numeric import KIND, _candidates, made
from fuseplan.backends import backend_of
from fuseplan.kernels.template import Template
from fuseplan.measure.data import evaluated
from numeric.test_save import TEXTS, plan_of

LARGE = (
    "512x768 -> add -> save(total) -> layer_norm -> add(other=total)",
    "1024x512 -> linear(768) -> bias -> save(pre) -> gelu",
    "8x64x28x28, nhwc -> conv2d(64, kernel=3, padding=1) -> batch_norm -> save(pre) -> relu",
)


def _cases() -> Iterator[Any]:
    """(template, place among its candidates, plan): the best and the worst of each, in two dtypes."""
    texts = [str(plan_of(dtype, text)) for text in (*TEXTS, *LARGE) for dtype in ("f16", "f32")]
    for text in texts:
        for kind in backend_of("triton").templates:
            count = len(_candidates(kind, text, KIND))
            for place in sorted({0, count - 1}) if count else ():
                yield pytest.param(kind, place, text, id=f"{kind.name}-{place}-{text}")


@pytest.mark.parametrize(("kind", "place", "text"), list(_cases()))
def test_every_value_is_within_the_bound(kind: type[Template], place: int, text: str) -> None:
    compiled = made(kind, place, text)
    plan = compiled.plan
    tensors = inputs(plan, 1)
    want, exact = evaluated(plan, tensors)
    operands = {key: tensor for key, tensor in tensors.items() if key != "src" and key not in exact}
    out, results = output(plan), walls(plan)
    compiled.bind(**operands)(tensors["src"], out.tensor, **old(tensors, results))
    assert out.stands
    assert all(wall.stands for wall in results.values())
    assert deviation(plan, out.tensor, want, plan.output.dtype) <= 1
    for each in plan.results:
        got = results[each.key].tensor
        assert deviation(plan, got, exact[each.key], each.spec.dtype) <= 1, each.key
