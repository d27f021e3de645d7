"""The meaning of attention, beside torch's in float64, and what no attention can have."""

import warnings
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fuseplan.errors import PlanError
from fuseplan.measure.data import random_arrays
from fuseplan.ops.attention import Attention
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import index, where


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
    ("fields", "turning"), [("rotary=8", ""), ("rotary=6, interleaved=True", "dims=6, interleaved=True")]
)
def test_rotary_turns_queries_and_keys_as_the_operator_does(fields: str, turning: str) -> None:
    plan, arrays = drawn(f"f64[2x4x5x8, bhsd] -> attention(keys=9, offset=4, {fields})")
    got = plan.reference(arrays["src"], {key: array for key, array in arrays.items() if key != "src"})

    def turned(name: str, begin: int) -> Any:
        rows = arrays[name]
        count = rows.shape[2]
        rotary = FusionPlan.parse(f"f64[2x4x{count}x8, bhsd] -> rotary({turning})")
        return rotary.reference(rows, {key: arrays[key][begin : begin + count] for key in ("cos", "sin")})

    plain = FusionPlan.parse("f64[2x4x5x8, bhsd] -> attention(keys=9)")
    want = plain.reference(turned("src", 4), {"key": turned("key", 0), "value": arrays["value"]})
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


ALIBI = "x - 2 ** -(2 * (index(h) + 1)) * (index(s) - index(t))"


def test_a_formula_of_scores_is_torchs_flex_attention() -> None:
    plan, arrays = drawn(f"f64[2x4x11x6, bhsd] -> attention(keys=17, score='{ALIBI}')")

    def biased(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
        return score - 2.0 ** -(2 * (h + 1)) * (s - t)

    got = plan.reference(arrays["src"], {key: arrays[key] for key in ("key", "value")})
    with warnings.catch_warnings(action="ignore"):  # torch's own, that it is not compiled
        want = flex_attention(*given(arrays), score_mod=biased)
    torch.testing.assert_close(torch.from_numpy(got), want)


def test_a_formula_may_be_a_function_of_scalars() -> None:
    made = Attention(score=lambda x: where(index("t") > index("s"), -inf, x * 2))
    plan = FusionPlan("f32[2x3x5x8, bhsd]", made)
    assert str(plan).endswith('attention(score="where(index(t) > index(s), -inf, x * 2)")')
    assert FusionPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    "axes",
    [
        "",
        "bias_axes=hst, mask_axes=bt, is_padded=True, is_causal=True, offset=6",
        "score='where(index(t) > 12, -inf, x * tanh(x + index(h)))'",
    ],
)
def test_gradients_are_those_of_autograd(axes: str) -> None:
    """Of capped scores with grouped heads; as torch writes them, one operator after another."""
    fields = f"keys=17, key_heads=2, features=5, softcap=0.7, {axes}".rstrip(", ")
    plan, arrays = drawn(f"f64[2x4x11x6, bhsd] -> attention({fields}, return_lse=True)")
    if "is_padded" in axes:
        arrays["lengths"] = np.array([17, 6])
    query, key, value = (each.requires_grad_() for each in given(arrays))
    scores = query @ key.repeat_interleave(2, 1).mT / 6**0.5
    scores = 0.7 * torch.tanh(scores / 0.7)
    if "score" in axes:
        scores = scores * torch.tanh(scores + torch.arange(4)[:, None, None])
        scores = scores.masked_fill(torch.arange(17) > 12, -torch.inf)
    elif axes:
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
        ("f32[2x3x4x8] -> attention(score='x + index(d)')", "other places than"),
        ("f32[2x3x4x8] -> attention(score='x + random(1, 2)')", "other places than"),
        ("f32[2x3x4x8] -> attention(rotary=3)", "even number"),
        ("f32[2x3x4x8] -> attention(rotary=10)", "more than a row"),
        ("f32[2x3x4x8] -> attention(rotary=8, offset=-1)", "in front of the first key"),
        ("f32[2x3x4x8] -> attention_gradient(rotary=8)", "no field"),
        ("f32[2x3x4x8] -> attention(score='index(t)')", "does not use all its names"),
        ("f32[2x3x4x8] -> attention(score='x > 1')", "a comparison"),
        ("f32[2x3x4x8] -> attention(score='x + y')", "there is no"),
        ("f32[1x1x4x8, bhsd] -> attention(keys=16777217, score='x + index(t)')", "too large"),
    ],
)
def test_what_no_attention_can_have_is_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)
