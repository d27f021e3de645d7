"""Matrix products against torch in float64: ranks, orders of the weight, one an image; what cannot be."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import PlanError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match, unfuse
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op
from fuseplan.ops.activation import Relu
from fuseplan.ops.conv import CONVOLUTIONS
from fuseplan.ops.matmul import Linear, Matmul, Product
from fuseplan.plans.plan import FusionPlan
from strategies import products, random_operands, random_src, tensors

torch.set_num_threads(1)  # threads cost more than they give on tensors this small

SAMPLES = [FusionPlan(tensor, op) for kind in (Matmul, Linear) for tensor, op in kind.samples()]


def theirs(op: Product, src: Any, weight: Any) -> Any:
    """torch.matmul, or torch.nn.functional.linear where it has the weight."""
    rows, matrix = torch.from_numpy(src), torch.from_numpy(weight)
    if op.transposed and not op.batched:
        return torch.nn.functional.linear(rows, matrix).numpy()
    matrix = matrix.mT if op.transposed else matrix
    made = torch.matmul(rows.reshape(src.shape[0], -1, src.shape[-1]) if op.batched else rows, matrix)
    return made.reshape(*rows.shape[:-1], op.features).numpy()


def compare(plan: FusionPlan) -> None:
    rng = np.random.default_rng(3)
    src, operands = random_src(plan, rng), random_operands(plan, rng)
    op = plan[0].op
    assert isinstance(op, Product)
    result = plan.reference(src, operands)
    assert result.shape == plan.output.shape
    np.testing.assert_allclose(result, theirs(op, src, operands["weight"]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("plan", SAMPLES, ids=str)
def test_samples_are_torchs(plan: FusionPlan) -> None:
    compare(plan)


@given(st.data())
def test_any_product_is_torchs(data: st.DataObject) -> None:
    src = data.draw(tensors(rows=True))
    compare(FusionPlan(src, data.draw(products(src))))


def test_samples_show_each_order_of_the_weight_and_each_rank() -> None:
    orders = [op for plan in SAMPLES if isinstance(op := plan[0].op, Product)]
    assert len({(op.transposed, op.batched) for op in orders}) == 4
    assert {plan.src.rank for plan in SAMPLES} == {2, 3, 4, 5}


def test_a_batch_of_torchs_matrices_is_taken_as_it_is() -> None:
    """[B, M, K] @ [B, K, N]."""
    first, second = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    made = FusionPlan.parse("f64[2x3x4] -> matmul(5, batched=True)").reference(
        first.numpy(), {"weight": second.numpy()}
    )
    np.testing.assert_allclose(made, torch.bmm(first, second).numpy(), rtol=1e-12)


def test_a_square_layer_is_torchs() -> None:
    """The shape tells nothing here: axis 1 and the last one have the same extent."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, 4)
    given = {key: value.detach() for key, value in layer.named_parameters()}
    with torch.no_grad():
        want = layer(x)
    for text in ("linear(4)", "matmul(4, transposed=True)"):
        made = compile_plan(f"f32[2x4x4] -> {text} -> bias")(x, **given)
        torch.testing.assert_close(made, want)


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (Matmul(5), (7, 5)),
        (Matmul(5, transposed=True), (5, 7)),
        (Matmul(5, batched=True), (2, 7, 5)),
        (Matmul(5, transposed=True, batched=True), (2, 5, 7)),
    ],
)
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_the_weight_is_a_matrix_whatever_the_rank(op: Matmul, shape: tuple[int, ...], rank: int) -> None:
    src = TensorSpec((*(2, 3, 4, 1)[: rank - 1], 7), "bf16", ROWS[rank])
    (weight,) = op.operands(src)
    assert (weight.name, weight.shape, weight.dtype, weight.per) == ("weight", shape, "bf16", "weight")
    assert op.output(src).shape == (2, *src.spatial, 5)


def test_the_output_keeps_dtype_and_order_of_axes() -> None:
    assert (
        str(Matmul(6).output(TensorSpec((2, 9, 8, 4), "bf16", "hbsc of bhsc")))
        == "bf16[2x9x8x6, hbsc of bhsc]"
    )
    assert str(Matmul(6).output(TensorSpec((2, 4), strides=(1, 2)))) == "f32[2x6]"
    strided = TensorSpec((2, 9, 4), strides=(99, 10, 1), names="bsc")
    assert str(Matmul(6).output(strided)) == "f32[2x9x6, bsc]"


@pytest.mark.parametrize("plan", SAMPLES, ids=str)
def test_every_order_of_the_weight_has_one_canonical_form(plan: FusionPlan) -> None:
    kernel, op = lower(match(plan)), plan[0].op
    assert isinstance(op, Product)
    conv = kernel.contraction
    assert conv.is_matrix_product
    assert conv.weight_per_batch == op.batched
    (held,) = plan.operands
    weight = np.random.default_rng(0).standard_normal(held.shape)
    canonical = kernel.canonical_weight(weight)
    images = (plan.src.batch,) if op.batched else ()
    assert canonical.shape == conv.weight_shape
    assert conv.weight_shape == (*images, op.features, plan.src.channels, *[1] * len(plan.src.spatial))
    ordered = weight if op.transposed else weight.swapaxes(-2, -1)
    np.testing.assert_array_equal(canonical.reshape(ordered.shape), ordered)
    np.testing.assert_array_equal(weight.transpose(kernel.weight.axes), ordered)


def test_a_convolutions_weight_is_canonical() -> None:
    kernel = lower(match(FusionPlan.parse("f32[2x4x5x6] -> relu -> conv2d(6, kernel=(3, 2), groups=2)")))
    assert kernel.weight.axes == (0, 1, 2, 3)
    assert kernel.contraction.weight_shape == kernel.weight.shape == (6, 2, 3, 2)
    assert "weight_" not in kernel.text
    assert "precision" not in kernel.text


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ("", ""),
        ("batched=True", "weight_per_batch"),
        ("transposed=True, precision=tf32", "precision=tf32"),
    ],
)
def test_the_records_text_tells_what_is_unusual(attributes: str, words: str) -> None:
    plan = FusionPlan.parse(f"f32[2x4] -> matmul(3{', ' * bool(attributes)}{attributes})")
    line = lower(match(plan)).contraction.text
    assert line == f"convolution 4->3 groups=1 {words}".strip()


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"features": 0}, "features"),
        ({"features": 2**31}, "features"),
        ({"features": True}, "features"),
        ({"features": 2.0}, "features"),
        ({"transposed": 1}, "transposed"),
        ({"transposed": "yes"}, "transposed"),
        ({"batched": None}, "batched"),
        ({"precision": "half"}, "precision"),
        ({"precision": None}, "precision"),
    ],
)
def test_what_no_product_can_have_is_refused_by_field(attributes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        Matmul(**({"features": 4} | attributes))
    assert caught.value.field == field


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("kind", [Matmul, *CONVOLUTIONS])
def test_tf32_is_for_f32(kind: Any, dtype: str) -> None:
    axes = getattr(kind, "axes", 0)
    sizes = {"kernel": 1} if axes else {}
    op = kind(3, precision="tf32", **sizes)
    shape = (2, 4, 5, 5, 5)[: 2 + axes]
    assert op.output(TensorSpec(shape)).channels == 3
    with pytest.raises(PlanError, match="want f32") as caught:
        op.output(TensorSpec(shape, dtype))
    assert caught.value.field == "precision"


def test_a_convolution_of_a_matrix_is_told_of_matmul() -> None:
    with pytest.raises(PlanError, match="taken by matmul"):
        FusionPlan.parse("f32[2x4] -> conv1d(3, kernel=1)")


def test_a_weight_larger_than_memory_is_refused() -> None:
    with pytest.raises(PlanError, match="larger than memory"):
        FusionPlan("f32[2147483647x4]", Matmul(2**31 - 1, batched=True))


def test_nan_and_infinity_reach_their_row() -> None:
    src = np.ones((3, 2))
    src[1, 0] = math.inf
    src[2, 1] = math.nan
    made = Matmul(1).reference(src, {"weight": np.ones((2, 1))}, {})
    np.testing.assert_array_equal(made, [[2], [math.inf], [math.nan]])


# ---- which axis is summed over


@pytest.mark.parametrize(
    ("text", "second", "third"),
    [
        (
            "f32[2x64x48, nwc] -> matmul(32)",
            "f32[2x48x64] -> matmul(32)",
            "f32[2x64x48] -> matmul(32)",
        ),
        (
            "f32[2x5x4x3, nchw] -> relu -> matmul(7, batched=True) -> bias",
            "f32[2x4x3x5, bchs of bhsc] -> relu -> matmul(7, batched=True) -> bias",
            "f32[2x5x4x3] -> relu -> matmul(7, batched=True) -> bias",
        ),
        (
            "f32[2x64x48, strides=4000:60:1] -> linear(32)",
            "f32[2x48x64, strides=4000:1:60 of bsc] -> linear(32)",
            "f32[2x64x48] -> linear(32)",
        ),
    ],
)
def test_a_product_after_a_layout_of_channels_is_refused_with_both_readings(
    text: str, second: str, third: str
) -> None:
    with pytest.raises(PlanError, match="the plan names axis 1 the channels") as caught:
        FusionPlan.parse(text)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert text in lines
    found = [str(FusionPlan.parse(line)) for line in lines[4:] if line.startswith("f32")]
    assert found == [second, third]
    for plan in map(FusionPlan.parse, found):
        assert FusionPlan.parse(str(plan)) == FusionPlan.from_json(plan.to_json()) == plan
    old = TensorSpec.parse(text.partition(" -> ")[0])
    assert FusionPlan.parse(second).src.canonical == old, "the same bytes"


def test_both_readings_mean_what_they_say() -> None:
    rows, weight = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    last = FusionPlan.parse("f64[2x4x3] -> matmul(5)")
    made = last.reference(rows.numpy(), {"weight": weight.numpy()})
    np.testing.assert_allclose(made, (rows @ weight).numpy(), rtol=1e-12)
    square = torch.randn(4, 5, dtype=torch.float64)
    first = FusionPlan.parse("f64[2x3x4, bcs of bsc] -> matmul(5)")
    made = first.reference(rows.numpy().transpose(0, 2, 1), {"weight": square.numpy()})
    np.testing.assert_allclose(made, torch.einsum("nkw,kf->nwf", rows, square).numpy(), rtol=1e-12)


def test_behind_a_convolution_the_product_over_channels_is_a_convolution() -> None:
    with pytest.raises(PlanError, match=r"To sum over axis 1: conv2d\(4, kernel=1\)"):
        FusionPlan.parse("f32[2x3x8x8] -> conv2d(4, kernel=3) -> relu -> linear(4)")


def test_channels_before_a_product_are_not_guessed() -> None:
    with pytest.raises(
        PlanError, match="may be axis 1, of extent 3, or the last axis, of extent 5"
    ) as caught:
        FusionPlan.parse("f32[2x3x5] -> bias -> linear(4)")
    (line,) = [line.strip() for line in str(caught.value).splitlines() if "bsc" in line]
    plan = FusionPlan.parse(line)
    assert plan.operands[0].shape == (5,)
    assert FusionPlan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["batch_norm", "prelu", "batch_norm_training", "conv1d(3, kernel=1)"])
def test_what_torch_does_at_axis_1_is_not_done_at_the_last(text: str) -> None:
    with pytest.raises(PlanError, match="reads the channels at axis 1, and here they are axis 2") as caught:
        FusionPlan.parse(f"f32[2x5x3] -> linear(4) -> {text}")
    assert "the input is f32[2x3x5, nwc]" in str(caught.value)


@pytest.mark.parametrize("text", ["batch_norm", "conv2d(3, kernel=1)"])
def test_rows_of_a_table_have_their_channels_last(text: str) -> None:
    with pytest.raises(PlanError, match="reads the channels at axis 1, and here they are axis 3"):
        FusionPlan.parse(f"i64[2x5x3] -> embedding(9, features=4) -> {text}")


@pytest.mark.parametrize(
    "plan",
    [
        lambda: FusionPlan("f32[2x64x48]", Relu(), Matmul(32)),
        lambda: FusionPlan(TensorSpec((2, 64, 48)), Relu(), Matmul(32)),
        lambda: added(FusionPlan("f32[2x64x48]"), Relu(), Matmul(32)),
        lambda: added(FusionPlan("f32[2x64x48]", Relu()), Matmul(32)),
        lambda: FusionPlan("f32[2x64x48, bsc]", Relu(), Matmul(32)),
        lambda: FusionPlan.from_json(
            '{"src": {"shape": [2, 64, 48], "dtype": "f32"}, "operators": [{"name": "relu", "fields": {}}, '
            '{"name": "matmul", "fields": {"features": 32}}]}'
        ),
    ],
)
def test_however_a_plan_is_made_the_axes_have_the_same_names(plan: Any) -> None:
    made = plan()
    assert made == FusionPlan.parse("f32[2x64x48] -> relu -> matmul(32)")
    assert (made.src.names, made.output.shape) == ("bsc", (2, 64, 32))
    assert {step.src.names for step in made} == {"bsc"}


def test_a_refused_product_leaves_the_plan_as_it_was() -> None:
    plan = FusionPlan("f16[2x3x4]", Relu())
    with pytest.raises(PlanError, match="want f32"):
        plan.add(Matmul(3, precision="tf32"))
    assert plan == FusionPlan("f16[2x3x4]", Relu())
    assert plan.add(Relu()).src.names == "ncw"


def added(plan: FusionPlan, *ops: Op) -> FusionPlan:
    for op in ops:
        plan.add(op)
    return plan


@pytest.mark.parametrize(
    "text",
    [
        "f32[2x64x48] -> matmul(32)",
        "f32[2x64x48] -> gelu -> linear(32) -> bias",
        "f32[2x64x48, bsc] -> bias -> matmul(32)",
        "f32[2x64x48, bcs of bsc] -> gelu -> matmul(32)",
        "f32[2x64x48, strides=4000:60:1 of bsc] -> matmul(32)",
        "f32[2x64x48, xyc] -> matmul(32)",
        "f32[2x64] -> matmul(32)",
    ],
)
def test_the_text_says_no_more_than_it_must(text: str) -> None:
    plan = FusionPlan.parse(text)
    assert str(plan) == text
    for one in unfuse(plan):
        assert FusionPlan.parse(str(one)) == one
        assert FusionPlan.from_json(one.to_json()) == one


def test_equal_tensors_may_differ_in_what_was_said() -> None:
    said, assumed = TensorSpec((2, 3, 4), layout="ncw"), TensorSpec((2, 3, 4))
    assert (said, hash(said), str(said)) == (assumed, hash(assumed), str(assumed))
    assert pickle.loads(pickle.dumps(said)).is_layout_said
