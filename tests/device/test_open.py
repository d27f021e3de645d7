"""Open axes on a GPU: one kernel at many extents, in tensors with walls around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from device.guarded import inputs, output
from device.repeats import deviation
from device.test_numeric import KIND
from fuseplan.backends import backend_of
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.template import Template
from fuseplan.measure.data import evaluated
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan
from numeric.test_gpu_open import PLANS

LARGE = (
    "f16[*x64x56x56, nhwc] -> batch_norm -> add -> relu",
    "bf16[*x512x768] -> linear(3072) -> bias -> gelu",
    "f32[*x1024] -> linear(256) -> bias",
    "f16[*x1283] -> linear(771) -> bias",
    "f16[*x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "f16[*x64x28x28] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
)
EXTENTS = (1, 3, 64, 129, 2, 1)


def _cases() -> Iterator[Any]:
    """(template, plan): each template that takes the plan."""
    for text in dict.fromkeys((*(text for _, text in PLANS), *LARGE)):
        kernel = lower(match(FusionPlan.parse(text)))
        for kind in backend_of("triton").templates:
            if first_refusal(kind.claims(kernel, KIND, "default")) is None:
                yield pytest.param(kind, text, id=f"{kind.name}-{text}")


@pytest.mark.parametrize(("kind", "text"), list(_cases()))
def test_one_kernel_serves_every_extent(kind: type[Template], text: str) -> None:
    compiled = compile_plan(text, "cuda", template=kind.name)
    others = [3] * (len(compiled.plan.src.open_axes) - 1)
    for extent in EXTENTS:
        plan = compiled.plan.with_extents(extent, *others)
        tensors = inputs(plan, extent)
        want, _ = evaluated(plan, tensors)
        out = output(plan)
        src = tensors.pop("src")
        compiled.bind(**tensors)(src, out.tensor)
        assert out.stands
        assert deviation(plan, out.tensor, want, plan.output.dtype) <= 1


def test_a_bound_plan_takes_turns_among_extents() -> None:
    bound = compile_plan("f16[*x64] -> relu", "cuda").bind()
    for rows in (4, 900, 4, 1, 900, 0):
        src = torch.randn(rows, 64, device="cuda", dtype=torch.float16)
        assert torch.equal(bound(src), src.relu())
    with pytest.raises(ArgumentError, match="does not match"):
        bound(torch.ones(4, 65, device="cuda", dtype=torch.float16))


def test_offsets_beyond_2_to_the_31() -> None:
    """Elements that 32-bit offsets do not reach."""
    rows = 2**15 + 3
    if torch.cuda.mem_get_info()[0] < 10 * rows * 2**16:
        pytest.skip("needs 20 GiB of free memory")
    src = torch.randn(rows, 2**16, device="cuda", dtype=torch.float16)
    got = compile_plan("f16[*x65536] -> bias -> relu", "cuda")(src, bias=torch.ones(2**16, device="cuda"))
    for part in (slice(0, 3), slice(rows - 3, None)):
        assert torch.equal(got[part], (src[part].float() + 1).relu().half())
