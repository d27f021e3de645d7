"""Rows of tables on a GPU, in kernels of elements and of statistics; indices without a row give NaN."""

import pytest
import torch

import fuseplan
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.torch_tensors import DTYPES

PLANS = (
    "i64[5x37] -> embedding(97, features=518{d})",
    "i32[1021] -> embedding(1000, features=64{d}, from_end=True) -> gelu",
    "i64[8x128] -> embedding(30522, features=768{d}) -> add -> layer_norm",
    "i64[3x7x11] -> embedding(97, features=70{d}) -> save(rows) -> rms_norm",
    "i64[8x128, strides=1:8] -> embedding(97, features=33{d}) -> softmax(1)",
    "i64[8x129] -> embedding(97, features=130{d}) -> sum(1)",
)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("text", PLANS)
def test_rows_are_torchs(text: str, dtype: str) -> None:
    plan = FusionPlan.parse(text.format(d="" if dtype == "f32" else f", dtype={dtype}"))
    generator = torch.Generator("cuda").manual_seed(1)
    op, src = plan.ops[0], torch.empty_strided(plan.src.shape, plan.src.element_strides, dtype=torch.int64)
    rows = op.rows  # type: ignore[attr-defined]
    src = src.cuda().random_(0, rows, generator=generator).to(DTYPES[plan.src.dtype])
    given = {
        each.key: torch.randn(each.shape, generator=generator, device="cuda", dtype=DTYPES[each.dtype])
        for each in plan.operands
    }
    got = fuseplan.compile(plan, "cuda")(src, **given)
    first = FusionPlan(plan.src, op)
    table = torch.nn.functional.embedding(src, given["weight"])
    assert torch.equal(fuseplan.compile(first, "cuda")(src, weight=given["weight"]), table)
    rest = FusionPlan(first.output, *plan.ops[1:])
    others = {key: value for key, value in given.items() if key != "weight"}
    want = fuseplan.compile(rest, "cuda")(table, **others) if len(plan) > 1 else table
    for one, other in zip(
        *((each if isinstance(each, tuple) else (each,)) for each in (got, want)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_an_index_without_a_row_gives_nan_and_reads_nothing_else() -> None:
    compiled = fuseplan.compile("i64[4] -> embedding(5, features=64)", "cuda")
    table = torch.randn(5, 64, device="cuda")
    got = compiled(torch.tensor([4, 5, -1, 2**40], device="cuda"), weight=table)
    assert torch.equal(got[0], table[4])
    assert got[1:].isnan().all()
