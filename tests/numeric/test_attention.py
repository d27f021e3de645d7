"""Attention on CPUs, and on GPUs in Triton's interpreter: every candidate beside float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forced import forced
from fuseplan.backends.attending import Heads
from fuseplan.backends.cpu.templates.attention import Attention
from fuseplan.backends.cpu.templates.attention_gradient import AttentionGradient
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.attention_gradient import GpuAttentionGradient
from fuseplan.backends.triton.templates.attention_rows import pieces
from fuseplan.compile import compile as compile_plan
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS, parse_target
from fuseplan.kernels.template import Template
from fuseplan.measure.data import deviation, evaluated, random_arrays
from fuseplan.measure.ground import allowed_deviation
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

CPU, GPU = parse_target("cpu"), parse_target("triton:sm_90")
PLANS = (
    "f32[2x3x5x8, bhsd] -> attention",
    "f32[2x4x9x8, bhsd] -> attention(keys=13, key_heads=2, is_causal=True, window=11)",
    "f16[1x2x130x80, bhsd] -> attention(is_causal=True, return_lse=True)",
    "bf16[2x4x70x96, bshd of bhsd] -> attention(key_heads=2, keys=99, is_causal=True, offset=29) -> add",
    "f16[1x8x1x64, bhsd] -> attention(key_heads=2, keys=1000, return_lse=True) -> bias",
    "f32[1x2x200x40, bhsd] -> attention(window=70, is_causal=True, is_padded=True)",
    "f32[1x2x150x33, bhsd] -> attention(window=40, features=17)",
    "f32[1x2x20x40, bhsd] -> attention(is_causal=True, offset=-7, return_lse=True)",
    "f32[2x6x5x33, bhsd] -> attention(key_heads=2, keys=70, bias_axes=ht, mask_axes=hst, softcap=2.0)",
    "f32[1x2x33x32, bhsd] -> attention(scale=-0.3, bias_axes=bhst)",
    "f32[2x6x5x33, bhsd] -> attention(key_heads=2, keys=70, score='x - index(h) * (index(t) - index(s))')",
    "f16[1x2x130x16, bhsd] -> attention(softcap=2.0, score='where(index(t) > 50, -inf, x * index(b))')",
    "f16[1x2x130x16, bhsd] -> attention(keys=60, score='where(index(t) < 99, -index(t), x)')",
    "f32[2x4x37x16, bhsd] -> attention(key_heads=2, keys=70, offset=33, rotary=16)",
    "bf16[2x2x70x80, bshd of bhsd] -> attention(is_causal=True, rotary=24, interleaved=True)",
    "f16[1x8x1x64, bhsd] -> attention(key_heads=2, keys=300, offset=299, rotary=64, is_padded=True)",
    "f32[2x4x33x32, strides=8448:32:256:1 of bhsd]"
    " -> attention(key_heads=2, value_strides=(8448, 32, 256, 1))",
    "bf16[2x4x33x32, bshd of bhsd] -> attention(key_heads=2, key_strides=(2112, 1056, 32, 1))",
    "f32[2x3x33x33, bhds of bhsd] -> attention(return_lse=True) -> save(a) -> gelu -> add(other=a)",
)
FEW = (  # queries, of which a vector has the scores of several keys
    "f32[2x3x1x33, bhsd] -> attention(keys=1, features=17)",
    "f32[1x3x2x40, bhds of bhsd] -> attention(keys=395, is_causal=True, offset=390, window=390)",
    "f16[2x6x1x33, bhsd] -> attention(key_heads=2, keys=70, bias_axes=ht, mask_axes=hst, softcap=2.0)",
    "bf16[1x2x4x16, bhsd] -> attention(keys=70, softcap=2.0, score='where(index(t) > 9, -inf, x)')",
    "f32[3x4x1x24, bhsd] -> attention(key_heads=1, keys=397, is_padded=True, return_lse=True) -> add -> gelu",
    "f32[1x16x1x50, bhsd] -> attention(key_heads=2, keys=40, window=9, is_causal=True, offset=30) -> bias",
    "f64[1x2x2x20, bhsd] -> attention(keys=50, mask_axes=st, nan_unseen=True)",
)
DOUBLE = "f64[1x2x37x20, bhsd] -> attention(is_causal=True, return_lse=True)"

LARGER = (  # of f32, with rows for tiles of three products
    "f32[1x2x130x40, bhsd] -> attention(is_causal=True, return_lse=True)",
    "f32[1x4x3x65, bhsd] -> attention(key_heads=2, keys=300, is_padded=True)",
    "f32[1x2x70x96, bhsd] -> attention(keys=99, softcap=2.0, bias_axes=st, mask_axes=bt) -> add",
)
ROUNDED = {"f32": 64, "f16": 2**13, "bf1": 2**16}
GRADIENTS = (
    "f32[2x4x9x8, bhsd] -> attention_gradient(keys=13, key_heads=2, is_causal=True, window=11, by=key)",
    "bf16[1x2x70x24, bshd of bhsd] -> attention_gradient(is_causal=True, key_heads=1, offset=2, by=key)",
    "f16[1x2x130x40, bhsd] -> attention_gradient(window=40, features=17) -> bias",
    "f32[2x4x9x33, bhsd] -> attention_gradient(keys=50, key_heads=2, bias_axes=ht, mask_axes=hst, softcap=2)",
    "f32[2x4x9x8, bhsd] -> attention_gradient(is_padded=True, bias_axes=ht, mask_axes=bt, softcap=2, by=key)",
    "f32[2x4x9x8, bhsd] -> attention_gradient(key_heads=2, score='x * tanh(x + index(h))', by=key)",
    "f32[1x2x9x33, bhsd] -> attention_gradient(keys=50, score='where(index(t) > 9, -inf, x)')",
)


def candidates(kind: type[Template], text: str, target: Any) -> list[Template]:
    return list(kind.candidates(lower(match(FusionPlan.parse(text))), target, "default"))


def ends(
    kind: type[Template], texts: tuple[str, ...], target: Any, places: tuple[int, ...] = (0, -1)
) -> Iterator[Any]:
    """The first and the last candidate of each plan."""
    for text in texts:
        listed = candidates(kind, text, target)
        for each in dict.fromkeys(listed[place] for place in places):
            yield pytest.param(each, text, id=f"{each.text}-{text}")


def shared() -> Iterator[Any]:
    """A candidate of each plan that goes through shares of the keys, which are joined."""
    for text in (*PLANS, *FEW, DOUBLE):
        first = candidates(Attention, text, CPU)[0]
        assert isinstance(first, Attention)
        yield pytest.param(replace(first, shares=3), text, id=f"shares-{text}")


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("template", "text"),
    [
        *ends(Attention, (*PLANS, *FEW, DOUBLE), CPU),
        *ends(AttentionGradient, GRADIENTS, CPU, (0,)),
        *shared(),
    ],
)
def test_a_cpus_kernel_is_within_its_bound(template: Template, text: str) -> None:
    plan = FusionPlan.parse(text)
    arrays = random_arrays(plan, 1)
    out, results = evaluated(plan, arrays)
    compiled = forced(text, type(template), CPU, template)
    made = compiled(arrays.pop("src"), **arrays)
    listed = made if isinstance(made, tuple) else (made,)
    dtypes = [None, *(each.dtype for each in plan.results)]
    for got, want, dtype in zip(listed, (out, *results.values()), dtypes, strict=True):
        assert deviation(got, want) <= allowed_deviation(compiled.kernel, template, dtype)


@pytest.mark.part(2)
@pytest.mark.parametrize(("template", "text"), list(ends(GpuAttention, PLANS, GPU)))
def test_a_gpus_kernel_is_right_in_the_interpreter(template: Any, text: str) -> None:
    """Turned queries and keys are rounded to src's dtype, as weights and slopes of gradients."""
    assert_interpreted(text, template, GPU, slack=ROUNDED[text[:3]] if "rotary" in text else 64)


@pytest.mark.parametrize(("template", "text"), list(ends(GpuAttentionGradient, GRADIENTS, GPU, (-1,))))
def test_a_gpus_gradient_is_right_in_the_interpreter(template: Any, text: str) -> None:
    """Weights and slopes are rounded to src's dtype: in roundings of f32, two of a bf16 or f16."""
    assert_interpreted(text, template, GPU, slack=ROUNDED[text[:3]])


@pytest.mark.parametrize(
    "text",
    [
        "f32[1x2x33x32, bhsd] -> attention(keys=40, bias_axes=st)",
        "f32[1x2x33x32, bhsd] -> attention(keys=40, bias_axes=st, nan_unseen=True)",
    ],
)
@pytest.mark.parametrize("template", [GpuAttention, "cpu"])
def test_a_mask_of_the_least_number_is_no_infinity(
    template: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it hides all keys of a query the weights are equal, as torch's; behind -inf zeros, or NaN."""

    def masked(plan: FusionPlan, seed: int) -> dict[str, Any]:
        arrays = random_arrays(plan, seed)
        least = np.finfo(np.float32).min
        arrays["bias"][3], arrays["bias"][5, ::2], arrays["bias"][7], arrays["bias"][9, 3:] = (
            least,
            least,
            -np.inf,
            -np.inf,
        )
        return arrays

    if template == "cpu":
        arrays = masked(FusionPlan.parse(text), 1)
        made = compile_plan(text, "cpu")(arrays.pop("src"), **arrays)
        np.testing.assert_allclose(made[0, 0, 3], arrays["value"][0, 0].mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(made[0, 0, 7], np.nan if "nan_unseen" in text else 0)
        return
    monkeypatch.setattr("interpreted.random_arrays", masked)
    for each in candidates(template, text, GPU)[:2]:
        assert_interpreted(text, each, GPU, slack=64)  # type: ignore[arg-type]


def of_arithmetic(kind: type[Template], text: str, arithmetic: str) -> list[Template]:
    return [each for each in candidates(kind, text, GPU) if each.knobs["arithmetic"] == arithmetic]


def test_f32_is_three_products_unless_these_are_not_exact_enough() -> None:
    kind, text = GpuAttention, LARGER[0]
    kernel = lower(match(FusionPlan.parse(text)))
    three, single = (of_arithmetic(kind, text, each) for each in ("tf32x3", "ieee"))
    assert three
    assert single
    least, most = single[0].error_bound(kernel), min(each.error_bound(kernel) for each in three)
    assert least < most < 1e-4
    for accuracy in ("strict", least):
        found = kind.candidates(kernel, GPU, accuracy)
        assert {each.knobs["arithmetic"] for each in found} == {"ieee"}
    assert {each.knobs["arithmetic"] for each in kind.candidates(kernel, GPU, most)} == {"tf32x3", "ieee"}
    elsewhere = kind.candidates(kernel, parse_target("triton:gfx942"), "default")
    assert {each.knobs["arithmetic"] for each in elsewhere} == {"ieee"}  # which has no such products


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((GpuAttention, text) for text in (*LARGER, "f32[1x2x40x256, bhsd] -> attention(features=200)")),
        *((GpuAttentionGradient, text) for text in GRADIENTS if text.startswith("f32")),
        (GpuAttentionGradient, "f32[1x2x50x80, bhsd] -> attention_gradient(features=100, by=key)"),
        (GpuAttentionGradient, "f32[1x2x70x40, bhsd] -> attention_gradient(is_causal=True)"),
        (GpuAttentionGradient, "f32[1x2x70x40, bhsd] -> attention_gradient(is_causal=True, by=key)"),
    ],
)
def test_three_products_are_right_in_the_interpreter(kind: type[Template], text: str) -> None:
    found = of_arithmetic(kind, text, "tf32x3")
    assert found
    for each in found[:2]:
        assert_interpreted(text, each, GPU, slack=64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rows", "keys"),
    [
        ("f32[4x16x2048x64, bhsd] -> attention_gradient", 128, 32),
        ("f32[4x16x2048x64, bhsd] -> attention_gradient(is_causal=True, by=key)", 128, 16),
        ("f32[1x12x333x64, bhsd] -> attention_gradient(keys=515)", 16, 32),
        ("f32[3x5x777x48, bhsd] -> attention_gradient(is_causal=True, by=key)", 128, 16),
        ("f32[2x8x1000x80, bhsd] -> attention_gradient(is_causal=True, by=key)", 64, 16),
        ("f32[4x8x1500x32, bhsd] -> attention_gradient(is_causal=True, by=key)", 64, 16),
        ("f32[2x8x1024x96, bhsd] -> attention_gradient", 64, 32),
        ("f32[2x8x1024x96, bhsd] -> attention_gradient(by=key)", 16, 32),
        ("f32[4x16x2048x128, bhsd] -> attention_gradient(is_causal=True)", 16, 32),
    ],
)
def test_gradients_of_f32_have_the_fastest_tiles(text: str, rows: int, keys: int) -> None:
    """On an H200: 1849 us for 2885, 1967 for 2329, 47 for 62, 178 for 250, 434 for 932, 370 for 401, ..."""
    first = candidates(GpuAttentionGradient, text, GPU)[0]
    assert (first.knobs["rows"], first.knobs["keys"]) == (rows, keys)


def test_three_products_take_large_means_and_infinite_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of -inf have no weight; a large number has digits that only what it leaves has."""

    def drawn(plan: FusionPlan, seed: int) -> dict[str, Any]:
        arrays = {key: np.abs(array) + 10 for key, array in random_arrays(plan, seed).items()}
        arrays["key"][0, 0, 3, 2] = -np.inf
        return arrays

    monkeypatch.setattr("interpreted.random_arrays", drawn)
    text = "f32[1x2x33x32, bhsd] -> attention(keys=40)"
    for each in of_arithmetic(GpuAttention, text, "tf32x3")[:2]:
        assert_interpreted(text, each, GPU, slack=2**12)  # type: ignore[arg-type]


def test_few_tasks_share_their_keys() -> None:
    def chosen(text: str, threads: int) -> str:
        target = replace(CPU, threads=threads)
        kernel = lower(match(FusionPlan.parse(text)))
        return min(
            Attention.candidates(kernel, target, "default"), key=lambda each: each.seconds(kernel, target)
        ).text

    one = "f32[1x8x1x64, bhsd] -> attention(key_heads=1, keys=4096)"
    assert "shares=1" in chosen(one, 1)
    assert "shares=1" not in chosen(one, 2)
    assert "shares=1" in chosen("f32[1x8x1x64, bhsd] -> attention(key_heads=1, keys=100)", 2)
    assert "shares=1" in chosen("f32[1x32x1x64, bhsd] -> attention(key_heads=8, keys=4096)", 2)


def test_keys_in_parts_are_joined() -> None:
    text = "f16[1x2x1x32, bhsd] -> attention(keys=700, key_heads=1, is_padded=True, return_lse=True)"
    split = [each for each in candidates(GpuAttention, text, GPU) if each.knobs["parts"] > 1]
    assert split
    assert_interpreted(text, split[0], GPU, slack=64)  # type: ignore[arg-type]


def test_infinities_and_nan_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    plan = FusionPlan.parse("f32[1x1x40x8, bhsd] -> attention(keys=50)")
    arrays = random_arrays(plan, 1)
    arrays["src"][0, 0, 3, 2], arrays["src"][0, 0, 17, 0] = np.nan, np.inf
    arrays["value"][0, 0, 7, 5] = np.inf
    given = [torch.from_numpy(arrays[key]) for key in ("src", "key", "value")]
    want = torch.nn.functional.scaled_dot_product_attention(*given).numpy()
    got = compile_plan(plan, "cpu")(arrays.pop("src"), **arrays)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_what_lies_behind_a_length_is_not_read() -> None:
    plan = FusionPlan.parse("f32[2x2x9x8, bhsd] -> attention(keys=30, is_padded=True)")
    arrays = random_arrays(plan, 1)
    arrays["lengths"] = np.array([11, 0], np.int32)
    want, _ = evaluated(plan, arrays)
    for key in ("key", "value"):
        arrays[key][0, :, 11:], arrays[key][1] = np.nan, np.nan
    got = compile_plan(plan, "cpu")(arrays.pop("src"), **arrays)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert not got[1].any()


def test_gradients_do_not_read_behind_a_length() -> None:
    plan = FusionPlan.parse("f32[2x2x9x8, bhsd] -> attention_gradient(keys=30, is_padded=True, by=key)")
    arrays = random_arrays(plan, 1)
    arrays["lengths"] = np.array([11, 0], np.int32)
    want, results = evaluated(plan, arrays)
    for key in ("key", "value"):
        arrays[key][0, :, 11:], arrays[key][1] = np.nan, np.nan
    got, by_value = compile_plan(plan, "cpu")(arrays.pop("src"), **arrays)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_value, results["value_gradient"], rtol=1e-4, atol=1e-6)
    assert not got[0, :, 11:].any()
    assert not by_value[1].any()


def test_a_query_that_sees_no_key_has_no_gradient() -> None:
    plan = FusionPlan.parse("f32[1x1x9x8, bhsd] -> attention_gradient(is_causal=True, offset=-4)")
    arrays = random_arrays(plan, 1)
    arrays["lse"][..., :4] = -np.inf
    got = compile_plan(plan, "cpu")(arrays.pop("src"), **arrays)
    assert not got[:, :, :4].any()
    assert got[:, :, 4:].all()


def test_rows_are_padded_by_less_than_a_quarter() -> None:
    assert [pieces(size) for size in (8, 32, 80, 96, 100, 128, 256)] == [
        (16,), (32,), (64, 16), (64, 32), (128,), (128,), (256,),
    ]  # fmt: skip


@pytest.mark.parametrize(("cpu", "vectors"), [("znver4", 1), ("znver5", 4)])
def test_tiles_are_narrower_where_loads_keep_up(cpu: str, vectors: int) -> None:
    """197 queries are 256 in tiles of four vectors, 224 in tiles of two, and 208 in tiles of one."""
    kernel = lower(match(FusionPlan.parse("f32[1x12x197x64, bhsd] -> attention")))
    target = replace(KINDS["cpu:avx512"], cpu=cpu)
    candidates = Attention.candidates(kernel, target, "default")
    best = min(candidates, key=lambda each: each.seconds(kernel, target))
    assert isinstance(best, Attention)
    assert (best.vectors, best.keys) == (vectors, 384 // vectors)


@pytest.mark.parametrize("options", ["", "is_causal=True", "window=7", "is_causal=True, window=9, keys=50"])
@pytest.mark.parametrize("block", [1, 8, 16, 64])
def test_blocks_go_through_more_than_their_rows_reach(options: str, block: int) -> None:
    """A block goes through all keys that one of its rows sees."""
    plan = FusionPlan.parse(f"f32[1x2x37x8, bhsd] -> attention({options})")
    heads = Heads.of(lower(match(plan)), 1)
    seen = np.ones((heads.rows, heads.others), bool)
    apart = np.arange(heads.others) - np.arange(heads.offset, heads.offset + heads.rows)[:, None]
    seen &= (apart < heads.front) | (heads.front == 0)
    seen &= (-apart < heads.back) | (heads.back == 0)
    blocks = [seen[row : row + block].any(axis=0).sum() * block for row in range(0, heads.rows, block)]
    assert heads.waste(block) == pytest.approx(sum(blocks) / seen.sum())
