"""The cross-entropy of a linear layer in training steps: one operator, torch's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fuseplan.torch import heads
from fuseplan.torch.dynamo import compile_graph

F = nn.functional
CLASSES, PLACES = 101, 36  # no multiple of 8


class Head(nn.Module):  # type: ignore[misc]
    """A layer before the classes, and what `loss` makes of their logits."""

    def __init__(self, loss: Callable[..., torch.Tensor], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.loss = loss
        self.first, self.last = nn.Linear(24, 24, dtype=dtype), nn.Linear(24, CLASSES, bias, dtype=dtype)

    def forward(self, src: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.last(self.first(src).tanh()), target)


def mean(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), **options)


def in_f32(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(logits.float(), target)


def shifted(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As models of transformers have it: each place tells the class of the next one."""
    labels = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.float().view(-1, CLASSES), labels.view(-1).to(logits.device), ignore_index=-100
    )


def total(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(logits, target, reduction="sum", label_smoothing=0.1)


def given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    target = torch.randint(0, CLASSES, (4, PLACES // 4))
    target[1, :3] = -100
    return torch.randn(4, PLACES // 4, 24, dtype=dtype), target


def errors(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(
        float((one.detach().double() - other.detach()).norm() / other.detach().norm())
        for one, other in zip(got, exact, strict=True)
    )


def found(loss: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch, **how: Any) -> int:
    """How many losses of a step are the operator."""
    made: list[fx.GraphModule] = []
    join = heads.join_losses

    def kept(graph: fx.GraphModule, inputs: Any) -> None:
        join(graph, inputs)
        made.append(graph)

    monkeypatch.setattr("fuseplan.torch.dynamo.join_losses", kept)
    dtype = how.get("dtype", torch.float32)
    module = Head(loss, True, dtype)
    module.last.weight.requires_grad_(not how.get("is_frozen", False))
    torch._dynamo.reset()
    torch.compile(module, backend=compile_graph, dynamic=False)(*given(dtype))
    return sum(node.target is heads.loss for each in made for node in each.graph.nodes)


@pytest.mark.part(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize("rest", ["torch", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "bias"), [(mean, True), (mean, False), (in_f32, True), (shifted, False), (total, True)]
)
def test_losses_and_gradients_are_torchs(
    loss: Callable[..., torch.Tensor],
    bias: bool,
    dtype: torch.dtype,
    rest: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most twice as far from float64; the loss is scaled, as for a sum of several steps."""
    monkeypatch.setattr(heads, "FEWEST", 1)
    torch.manual_seed(0)
    module, (src, target) = Head(loss, bias, dtype), given(dtype)
    exact = Head(mean if loss is in_f32 else loss, bias, torch.float64)
    exact.load_state_dict(module.state_dict())
    made = []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=compile_graph, options={"rest": rest}, dynamic=False)
    for each, x in ((exact, src.double()), (module, src), (compiled, src)):
        out = each(x, target)
        made.append([out, *torch.autograd.grad(3 * out, list(each.parameters()))])
    assert made[2][0].dtype == made[1][0].dtype
    theirs, ours = (errors(each, made[0]) for each in made[1:])
    assert ours <= max(2 * theirs, 1e-6)


def test_what_is_another_loss_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few logits, a second reader, other options, no gradient of the weight, and gradients in f16."""
    assert found(mean, monkeypatch) == 0
    monkeypatch.setattr(heads, "FEWEST", 1)
    assert found(mean, monkeypatch) == found(shifted, monkeypatch) == 1
    weights = torch.ones(CLASSES)
    others: list[Callable[..., torch.Tensor]] = [
        lambda logits, target: mean(logits, target) + logits.mean(),
        lambda logits, target: mean(logits, target, weight=weights),
        lambda logits, target: mean(logits, target, reduction="none").sum(),
        lambda logits, target: F.cross_entropy(logits.mT, target),
        lambda logits, target: mean(logits.relu(), target),
    ]
    assert [found(each, monkeypatch) for each in others] == [0] * len(others)
    assert found(mean, monkeypatch, is_frozen=True) == 0
    assert found(mean, monkeypatch, dtype=torch.float16) == 0
    with torch.no_grad():
        assert found(mean, monkeypatch) == 0


def test_logits_are_in_memory_once() -> None:
    """No further tensor of their size is made."""
    src, weight = torch.randn(64, 8), torch.randn(4096, 8)
    target, nbytes = torch.randint(0, 4096, (64,)), 64 * 4096 * 4
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        torch.ops.fuseplan.linear_cross_entropy(src, weight, None, target, -100, 0.0)
    sizes = [each.self_cpu_memory_usage for each in seen.events()]
    assert sum(size >= nbytes for size in sizes) == 1
