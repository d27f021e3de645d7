"""Attention of modules that spell rotations, repeated heads and causal masks by torch's operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fuseplan.torch
from fuseplan.graph.ops import SAFE_SOFTMAX
from fuseplan.kernels.target import parse_target
from fuseplan.torch import cutting
from fuseplan.torch.reader import read

Mask = Callable[[int, torch.dtype], torch.Tensor]


def placed(rows: int, dtype: torch.dtype) -> torch.Tensor:
    places = torch.arange(rows)
    return (places[None, :] <= places[:, None])[None, None]


def added(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, rows), torch.finfo(dtype).min, dtype=dtype).triu(1)


def infinite(rows: int, dtype: torch.dtype) -> torch.Tensor:
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    hidden = torch.full((), -torch.inf, dtype=dtype)
    return torch.where(seen, torch.zeros((), dtype=dtype), hidden).expand(2, 1, rows, rows)


def nearly(rows: int, dtype: torch.dtype) -> torch.Tensor:
    places = torch.arange(rows)
    return (places[None, :] <= places[:, None]) | (places == rows - 1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):  # type: ignore[misc]
    """Attention of 4 heads of 8 elements, whose keys have 2 heads."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4.0))
        self.mask = mask

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = src.shape
        q, k, v = (each(src).view(batch, rows, -1, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        angles = torch.arange(rows)[:, None] * self.frequencies.float()
        angles = torch.cat((angles, angles), -1)[None, None]
        q, k = (rotated(each, angles.cos().to(src.dtype), angles.sin().to(src.dtype)) for each in (q, k))
        k, v = (each[:, :, None].expand(batch, 2, 2, rows, 8).reshape(batch, 4, rows, 8) for each in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, self.mask(rows, src.dtype))


def close(module: nn.Module, src: torch.Tensor) -> None:
    plain = copy.deepcopy(module).double()
    with torch.no_grad():
        want = Block.forward(plain, src.double())
        bound = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[src.dtype]
        assert (module(src).double() - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [(placed, torch.float32), (placed, torch.bfloat16), (added, torch.float32), (infinite, torch.float32)],
)
def test_a_block_of_a_model_is_rotations_and_attention(mask: Mask, dtype: torch.dtype) -> None:
    src = torch.randn(2, 12, 32, dtype=dtype)
    module = fuseplan.torch.fuse(Block(mask).to(dtype), src)
    plans = [site.plan.partition(" -> ")[2] for site in module.report.sites]
    assert plans[:-1] == ["linear(64) -> bias", "rotary(whole=True)"]  # one launch turns queries and keys
    assert plans[-1].startswith("attention(is_causal=True, key_heads=2")
    assert not module.report.copies
    for _ in range(3):
        close(module, torch.randn(2, 12, 32, dtype=dtype))
    module.frequencies.mul_(0.5)
    close(module, src)


def test_a_mask_that_is_nearly_causal_is_read() -> None:
    src = torch.randn(2, 12, 32)
    module = fuseplan.torch.fuse(Block(nearly), src)
    assert "mask_axes=st" in module.report.sites[-1].plan
    close(module, src)


class Given(nn.Module):  # type: ignore[misc]
    def forward(self, src: torch.Tensor) -> Any:
        table = torch.arange(4.0) + 1
        return src * table.exp(), table.view(2, 2), torch.rand(4) + src


def test_what_leaves_or_is_random_is_computed_in_each_call() -> None:
    src = torch.randn(3, 4)
    module = fuseplan.torch.fuse(Given(), src)
    first = module(src)
    first[1].mul_(0)
    made, table, noise = module(src)
    torch.testing.assert_close(made, src * (torch.arange(4.0) + 1).exp())
    assert table.tolist() == [[1, 2], [3, 4]]
    assert not noise.equal(first[2])


class WrittenOut(nn.Module):  # type: ignore[misc]
    """Attention of 4 heads of 8 elements as products and a softmax, perhaps with a causal mask."""

    def __init__(self, is_masked: bool) -> None:
        super().__init__()
        self.packed, self.last = nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.1)
        self.is_masked = is_masked

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = src.shape
        q, k, v = self.packed(src).view(batch, rows, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * 8**-0.5) @ k.transpose(-2, -1)
        if self.is_masked:
            scores = scores + added(rows, src.dtype)
        made = self.dropout(scores.softmax(-1)) @ v
        return self.last(made.transpose(1, 2).reshape(batch, rows, 32))


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_that_is_written_out(is_masked: bool) -> None:
    torch.manual_seed(0)
    module, src = WrittenOut(is_masked).eval(), torch.randn(2, 7, 32)
    fused = fuseplan.torch.fuse(module, src)
    texts = [str(site.plan) for site in fused.report.sites]
    want = copy.deepcopy(module).double()(src.double())
    torch.testing.assert_close(fused(src).double(), want, rtol=1e-5, atol=1e-5)
    assert any("attention" in text and ("nan_unseen" in text) == is_masked for text in texts)


class Capped(WrittenOut):
    """The same as Gemma writes it: scores with a softcap, whose softmax is one of f32."""

    def __init__(self, cap: float) -> None:
        super().__init__(False)
        self.cap = cap

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = src.shape
        heads = (each.view(batch, rows, 4, 8) for each in self.packed(src).chunk(3, -1))
        q, k, v = (each.transpose(1, 2) for each in heads)
        scores = torch.tanh(q @ k.transpose(-2, -1) * 0.25 / self.cap) * self.cap
        scores = scores + added(rows, src.dtype)
        weights = scores.softmax(-1, dtype=src.dtype if src.dtype is torch.float64 else torch.float32)
        made = weights.to(src.dtype) @ v
        return self.last(made.transpose(1, 2).contiguous().reshape(batch, rows, 32))


@pytest.mark.parametrize("cap", [0.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_softcap_that_is_written_out(cap: float, dtype: torch.dtype) -> None:
    """The heads behind it lie as the product reads them, and are not copied."""
    torch.manual_seed(0)
    module, src = Capped(cap).to(dtype).eval(), 4 * torch.randn(2, 7, 32, dtype=dtype)
    fused = fuseplan.torch.fuse(module, src)
    (plan,) = [str(site.plan) for site in fused.report.sites if "attention" in str(site.plan)]
    assert "scale=0.25, softcap=0.5" in plan
    assert not fused.fusion._graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    want = copy.deepcopy(module).double()(src.double())
    bound = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    assert (fused(src).double() - want).abs().max() <= bound * want.abs().max()


class Wide(nn.Module):  # type: ignore[misc]
    """A product of weights in f32 and values in bf16, which no attention is."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1).to(torch.bfloat16) @ v


def test_attention_of_heads_of_several_dtypes_is_none() -> None:
    heads = torch.randn(3, 2, 4, 5, 8).unbind(0)
    given = [*heads[:2], heads[2].bfloat16()]
    fused = fuseplan.torch.fuse(Wide(), *given)
    assert not any("attention" in str(site.plan) for site in fused.report.sites)
    torch.testing.assert_close(fused(*given), Wide()(*given))


@pytest.mark.parametrize(
    ("dtype", "queries", "state"),
    [
        (torch.bfloat16, 4096, "fused"),
        (torch.bfloat16, 200, "fused"),
        (torch.float32, 512, "unmeasured"),
        (torch.float32, 1, "fused"),
    ],
)
def test_attention_on_a_gpu_is_left_to_torch_where_that_is_faster(
    dtype: torch.dtype, queries: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are torch's fake ones."""
    monkeypatch.setattr(cutting, "target_of", lambda device: (parse_target("triton:sm_90"), None))
    with FakeTensorMode():
        query = torch.empty(2, 8, queries, 64, device="cuda", dtype=dtype)
        key = torch.empty(2, 8, 512, 64, device="cuda", dtype=dtype)
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in ("query", "key", "value")]
        nodes.append(graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, tuple(nodes)))
        for node, value in zip(nodes, (query, key, key, query), strict=True):
            node.meta["val"] = value
        graph.output(nodes[-1])
        module = fx.GraphModule(nn.Module(), graph)
        cut = cutting.fused(module, torch.device("cuda"), is_built=False).cut
    left = [reason.why.code for reason in cut.left.values()]
    assert (left or ["fused"], len(cut.sites)) == ([state], int(state == "fused"))


def _in_pieces(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        made: torch.Tensor = functional.scaled_dot_product_attention(query, key, value, mask)
    return made


@pytest.mark.parametrize("is_boolean", [False, True])
def test_torchs_pieces_with_a_mask_of_run_time_are_attention(is_boolean: bool) -> None:
    """Torch's safe softmax and attention give zeros for a query that sees no key."""
    torch.manual_seed(0)
    heads = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    seen = torch.rand(2, 1, 5, 5) < 0.5
    seen[:, :, 2], seen[:, :, 3] = False, True
    mask = seen if is_boolean else torch.where(seen, torch.randn(2, 1, 5, 5), -torch.inf)
    graph = make_fx(_in_pieces, tracing_mode="fake")(*heads, mask)
    assert any(each.target is torch.ops.aten._safe_softmax.default for each in graph.graph.nodes)
    made = cutting.fused(graph, torch.device("cpu"))
    assert [str(site.plan) for site in made.cut.sites] == ["f32[2x3x5x8] -> attention(bias_axes=bst)"]
    got = made.module(*heads, mask)
    query, key, value = (each.double() for each in heads)
    want = _in_pieces(query, key, value, mask if is_boolean else mask.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert not got[:, :, 2].any()


def test_a_safe_softmax_by_itself_is_torchs() -> None:
    def softmaxes(src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        safe = torch.ops.aten._safe_softmax
        return safe(src, -1), safe(src, 0), safe(src, 1, torch.float64)

    src = torch.randn(3, 4)
    src[1], src[:, 2] = -torch.inf, -torch.inf
    graph = make_fx(softmaxes, tracing_mode="fake")(src)
    made = cutting.fused(graph, torch.device("cpu"))
    assert not made.cut.sites
    assert [reason.code for reason in made.cut.left.values()] == ["not-in-table", "not-in-table", "dtype"]
    for got, want in zip(made.module(src), softmaxes(src), strict=True):
        assert torch.equal(got, want)
    (last,) = (each for each in made.cut.graph.nodes if each.op.word == SAFE_SOFTMAX)
    (exact,) = last.op.evaluate([src.double().numpy()])
    torch.testing.assert_close(torch.from_numpy(exact), softmaxes(src.double())[0])


def test_a_safe_softmax_on_a_gpu_stays_in_pieces() -> None:
    """A kernel there takes f32's lowest number for minus infinity, and would give zeros for a hidden row."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        heads = [torch.empty(2, 3, 5, 8, device="cuda") for _ in range(3)]
        graph = make_fx(_in_pieces, tracing_mode="fake")(*heads, torch.empty(5, 5, device="cuda"))
    (node,) = (each for each in read(graph).graph.nodes if "_safe_softmax" in each.op.word)
    assert node.op.word != SAFE_SOFTMAX
    assert str(node.why).endswith("a safe softmax on a GPU, whose mask may be the lowest number")


def test_a_mask_of_the_lowest_number_hides_no_key_from_a_hidden_query() -> None:
    torch.manual_seed(0)
    heads, mask = [torch.randn(1, 2, 5, 8) for _ in range(3)], torch.zeros(5, 5)
    mask[2], mask[4, :3] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    graph = make_fx(_in_pieces, tracing_mode="fake")(*heads, mask)
    made = cutting.fused(graph, torch.device("cpu"))
    assert [str(site.plan) for site in made.cut.sites] == ["f32[1x2x5x8] -> attention(bias_axes=st)"]
    got, want = made.module(*heads, mask), _in_pieces(heads[0], heads[1], heads[2], mask)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[:, :, 2], heads[2].mean(2), rtol=1e-4, atol=1e-5)


class OneHead(nn.Module):  # type: ignore[misc]
    """Attention whose queries of all heads read one head of keys, as torch broadcasts it without a flag."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, key)


def test_all_heads_of_queries_may_read_one_head_of_keys() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 7, 8)
    made = fuseplan.torch.fuse(OneHead(), query, key)
    (site,) = made.fusion.cut.sites
    assert str(site.plan).endswith("-> attention(keys=7, key_heads=1)")
    torch.testing.assert_close(made(query, key), OneHead()(query, key))


class Windows(nn.Module):  # type: ignore[misc]
    """MaxViT's attention of 2 heads in each window of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (each.reshape(*x.shape[:3], 2, 8).permute(0, 1, 3, 2, 4) for each in parts)
        scores = torch.einsum("bwhsd,bwhtd->bwhst", q, k * 0.25) + self.bias
        made = torch.einsum("bwhst,bwhtd->bwhsd", scores.softmax(-1), v)
        return made.permute(0, 1, 3, 2, 4).reshape(x.shape)


@pytest.mark.parametrize("images", [1, 2])
def test_attention_of_heads_of_windows(images: int) -> None:
    torch.manual_seed(0)
    module, src = Windows().eval(), torch.randn(images, 3, 6, 16)
    fused = fuseplan.torch.fuse(module, src)
    plans = [str(site.plan) for site in fused.report.sites]
    assert len(plans) == 2
    assert "-> attention(scale=0.25, bias_axes=hst" in plans[1]
    with torch.no_grad():
        torch.testing.assert_close(fused(src), module(src))
