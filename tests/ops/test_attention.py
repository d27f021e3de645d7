"""The meaning of attention, beside torch's in float64, and what no attention can have."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fuseplan.errors import PlanError
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan


def drawn(text: str) -> tuple[FusionPlan, dict[str, Any]]:
    plan = FusionPlan.parse(text)
    return plan, {key: array.astype(np.float64) for key, array in random_arrays(plan, 3).items()}


def given(arrays: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(arrays[key].copy()) for key in ("src", "key", "value")]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ("", {}),
        ("is_causal=True", {"is_causal": True}),
        ("key_heads=2", {"enable_gqa": True}),
        ("keys=19, features=3, scale=0.7", {"scale": 0.7}),
        ("keys=19, is_causal=True, key_heads=1", {"is_causal": True, "enable_gqa": True}),
    ],
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd of bhsd"])
def test_the_meaning_is_torchs(fields: str, options: dict[str, Any], layout: str) -> None:
    plan, arrays = drawn(f"f64[2x4x11x6, {layout}] -> attention({fields})")
    operands = {key: array for key, array in arrays.items() if key != "src"}
    got = plan.reference(arrays["src"], operands)
    torch.testing.assert_close(torch.from_numpy(got), sdpa(*given(arrays), **options))


def test_bias_mask_band_and_lengths_are_torchs_mask() -> None:
    plan, arrays = drawn(
        "f64[2x3x11x6, bhsd] -> attention(keys=17, is_causal=True, offset=4, window=5, bias_axes=hst, "
        "mask_axes=bt, is_padded=True, return_lse=True)"
    )
    arrays["lengths"] = np.array([17, 6])
    operands = {key: array for key, array in arrays.items() if key != "src"}
    got, results = plan.evaluate(arrays["src"], operands)
    place, key = np.arange(11)[:, None] + 4, np.arange(17)
    seen = (key <= place) & (key > place - 5) & (arrays["mask"][:, None, None] != 0)
    seen = seen & (key < arrays["lengths"][:, None, None, None])
    bias = torch.from_numpy(np.where(seen, arrays["bias"], -np.inf))
    query, keys, values = given(arrays)
    want = sdpa(query, keys, values, attn_mask=bias).nan_to_num(0)
    torch.testing.assert_close(torch.from_numpy(got), want)
    scores = query @ keys.mT / 6**0.5 + bias
    torch.testing.assert_close(torch.from_numpy(results["lse"]), scores.logsumexp(-1))
    assert not seen.any(-1).all(), "some queries see no key"
    assert not got[~np.broadcast_to(seen.any(-1), got.shape[:3])].any()


def test_scores_are_capped_before_the_bias() -> None:
    plan, arrays = drawn("f64[1x2x5x4, bhsd] -> attention(softcap=0.5, bias_axes=t)")
    got = plan.reference(arrays["src"], {key: arrays[key] for key in ("key", "value", "bias")})
    query, keys, values = given(arrays)
    scores = 0.5 * torch.tanh(query @ keys.mT / 2 / 0.5) + torch.from_numpy(arrays["bias"])
    torch.testing.assert_close(torch.from_numpy(got), scores.softmax(-1) @ values)


@pytest.mark.parametrize(
    "axes", ["", "bias_axes=hst, mask_axes=bt, is_padded=True, is_causal=True, offset=6"]
)
def test_gradients_are_those_of_autograd(axes: str) -> None:
    """Of capped scores with grouped heads; as torch writes them, one operator after another."""
    fields = f"keys=17, key_heads=2, features=5, softcap=0.7, {axes}".rstrip(", ")
    plan, arrays = drawn(f"f64[2x4x11x6, bhsd] -> attention({fields}, return_lse=True)")
    if axes:
        arrays["lengths"] = np.array([17, 6])
    query, key, value = (each.requires_grad_() for each in given(arrays))
    scores = query @ key.repeat_interleave(2, 1).mT / 6**0.5
    scores = 0.7 * torch.tanh(scores / 0.7)
    if axes:
        place, at = np.arange(11)[:, None] + 6, np.arange(17)
        seen = (at <= place) & (arrays["mask"][:, None, None] != 0)
        seen = seen & (at < arrays["lengths"][:, None, None, None])
        bias = torch.from_numpy(arrays["bias"]).masked_fill(~torch.from_numpy(seen), -torch.inf)
        scores = scores + bias
    out = scores.softmax(-1).nan_to_num(0) @ value.repeat_interleave(2, 1)
    grad = torch.from_numpy(np.random.default_rng(0).standard_normal(out.shape))
    wanted = torch.autograd.grad(out, (query, key, value), grad)
    operands = {name: array for name, array in arrays.items() if name != "src"}
    results = plan.evaluate(arrays["src"], operands)[1]
    delta = (grad * out).sum(-1).detach().numpy()
    operands |= {"lse": results["lse"], "delta": delta, "grad": grad.numpy()}
    for by, names in (("query", ["query"]), ("key", ["key", "value"])):
        back = FusionPlan.parse(f"f64[2x4x11x6, bhsd] -> attention_gradient({fields}, by={by})")
        dst, beside = back.evaluate(arrays["src"], operands)
        for name, got in zip(names, (dst, *beside.values()), strict=True):
            want = wanted[("query", "key", "value").index(name)].nan_to_num(0)
            torch.testing.assert_close(torch.from_numpy(got), want)


def test_packed_projections_are_read_with_the_strides_of_src() -> None:
    plan = FusionPlan.parse("f32[2x3x5x8, strides=360:8:72:1 of bhsd] -> attention")
    assert [each.spec for each in plan.operands] == [plan.src, plan.src]
    assert plan.output.layout_text == "bshd of bhsd"
    wider = FusionPlan.parse("f32[2x3x5x8, bshd of bhsd] -> attention(keys=7, features=4)")
    assert [str(each.spec) for each in wider.operands] == [
        "f32[2x3x7x8, bshd of bhsd]",
        "f32[2x3x7x4, bshd of bhsd]",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[2x3x8] -> attention", "tensors of four axes"),
        ("f32[2x3x8] -> attention_gradient(by=key)", "tensors of four axes"),
        ("f32[2x3x4x8] -> attention(key_heads=2)", "must divide the heads"),
        ("f32[2x3x4x8] -> attention(window=-1)", "whole number from 0"),
        ("f32[2x3x4x8] -> attention(keys=True)", "whole number from 0"),
        ("f32[2x3x4x8] -> attention(softcap=-2)", "not negative"),
        ("f32[2x3x4x8] -> attention(scale=inf)", "must be finite"),
        ("f32[2x3x4x8] -> attention(bias_axes=th)", "axes of the scores"),
        ("f32[2x3x4x8] -> attention(mask_axes=bs)", "axes of the scores"),
        ("i32[2x3x4x8] -> attention", "floating-point"),
        ("f32[2x3x4x8] -> attention(enable_gqa=True)", "key_heads"),
        ("f32[2x3x4x8] -> attention_gradient(by=value)", "query or key"),
    ],
)
def test_what_no_attention_can_have_is_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)
