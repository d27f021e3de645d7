"""Attention in one piece through AOT autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseplan.torch import dynamo
from fuseplan.torch.cutting import fused as cut
from fuseplan.torch.intact import KEPT, SDPA, keep_attention

F = nn.functional
Call = Callable[..., torch.Tensor]
SHAPE = (2, 4, 9, 16)


class Attending(nn.Module):  # type: ignore[misc]
    """A product, attention as a test wants it, and a product."""

    def __init__(self, attend: Call) -> None:
        super().__init__()
        self.first, self.last, self.attend = nn.Linear(32, 192), nn.Linear(64, 8), attend

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        query, key, value = self.first(src).view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.last(self.attend(query, key, value).transpose(1, 2).flatten(2))


def _masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    places = torch.arange(9)
    return F.scaled_dot_product_attention(query, key, value, (places[None] >= 0).expand(2, 1, 9, 9))


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)


def _grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)


def _three(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = [F.scaled_dot_product_attention(query[:, i], key[:, i], value[:, i]) for i in range(4)]
    return torch.stack(parts, 1)


def _compiled(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> tuple[Call, list[Any]]:
    made: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(cut(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(dynamo, "fused", noted)
    torch._dynamo.reset()
    return torch.compile(module, backend=dynamo.compile_graph, dynamic=False), made


def _kinds(fusion: Any) -> list[str]:
    return [op.kind for site in fusion.cut.sites for op in site.plan.ops]


@pytest.mark.parametrize(("attend", "plans"), [(_masked, 1), (_causal, 1), (_grouped, 1), (_three, 0)])
def test_attention_is_a_plan_or_torchs(monkeypatch: pytest.MonkeyPatch, attend: Call, plans: int) -> None:
    torch.manual_seed(0)
    module = Attending(attend)
    compiled, made = _compiled(monkeypatch, module)
    with torch.no_grad():
        for _ in range(2):
            src = torch.randn(2, 9, 32)
            exact = Attending.forward(module.double(), src.double()).float()
            module.float()
            torch.testing.assert_close(compiled(src), exact, rtol=1e-4, atol=1e-5)
    (fusion,) = made
    assert _kinds(fusion).count("attention") == plans
    targets = {node.target for node in fusion.module.graph.nodes}
    assert KEPT not in targets


def test_attention_with_gradients_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Attending(_causal)
    compiled, _ = _compiled(monkeypatch, module)
    src = torch.randn(2, 9, 32)
    compiled(src).square().sum().backward()
    found = [each.grad.clone() for each in module.parameters()]
    module.zero_grad()
    module(src).square().sum().backward()
    for one, other in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-3, atol=1e-3)


def test_autocast_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, src = Attending(_causal), torch.randn(2, 9, 32)
    compiled, _ = _compiled(monkeypatch, module)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        made, want = compiled(src), module(src)
    assert made.dtype == want.dtype
    torch.testing.assert_close(made, want, rtol=3e-2, atol=3e-2)


def _graph(*, dropout: float = 0.0, mode: Call | None = None, **kwargs: Any) -> fx.GraphModule:
    graph: fx.Graph = fx.Graph()
    query, key, value = (graph.placeholder(name) for name in "qkv")
    if mode is not None:
        graph.call_function(mode, (False,))
    graph.output(graph.call_function(SDPA, (query, key, value, None, dropout), kwargs))
    return fx.GraphModule(nn.Module(), graph)


class Kind(torch.Tensor):  # type: ignore[misc]
    """Another kind of tensor."""


def test_only_plain_attention_is_kept() -> None:
    inputs = [torch.randn(SHAPE) for _ in range(3)]

    def is_kept(given: fx.GraphModule, *inputs: torch.Tensor) -> bool:
        keep_attention(given, inputs)
        return bool(given.graph.find_nodes(op="call_function", target=KEPT))

    with torch.no_grad():
        assert is_kept(_graph(), *inputs)
        assert is_kept(_graph(is_causal=True, scale=2.0), *inputs)
        assert is_kept(_graph(), *(FakeTensorMode().from_tensor(each) for each in inputs))
        assert not is_kept(_graph(dropout=0.5), *inputs)
        assert not is_kept(_graph(mode=torch._C._set_grad_enabled), *inputs)
        assert not is_kept(_graph(mode=torch.amp.autocast_mode._enter_autocast), *inputs)
        assert not is_kept(_graph(), *inputs[:2], inputs[2].as_subclass(Kind))
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_kept(_graph(), *inputs)
        given = _graph(is_causal=True, scale=2.0)
        keep_attention(given, inputs)
        query, key, value = inputs
        want = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=2.0)
        torch.testing.assert_close(given(*inputs), want)
        assert math.isclose(2.0, given.graph.find_nodes(op="call_function", target=KEPT)[0].args[5])
    with torch.enable_grad():
        assert not is_kept(_graph(), *inputs)
