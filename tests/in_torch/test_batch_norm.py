"""Batch norm in steps of training under torch.compile: plans on a CPU, with torch's statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fuseplan.torch import dynamo
from fuseplan.torch.cutting import Fusion, fused
from fuseplan.torch.lying import is_copied, laid_out

aten = torch.ops.aten


class Residual(nn.Module):  # type: ignore[misc]
    """Two convolutions with norms, whose result is added to their input."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two, self.act = nn.BatchNorm2d(8), nn.BatchNorm2d(8), act

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.act(src + self.two(self.second(self.act(self.one(self.first(src))))))
        return made


class Twice(nn.Module):  # type: ignore[misc]
    """One norm for two values: the second call reads the statistics that the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.conv(self.norm(src).relu()))
        return made


class Read(nn.Module):  # type: ignore[misc]
    """The statistics of a call are factors of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(src) * (1 + self.norm.running_mean[:, None, None])
        return made


def _stack(act: nn.Module) -> Callable[[], nn.Module]:
    """A small network for images, with pools of both kinds."""
    return lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), act),
        *(Residual(act), nn.MaxPool2d(2), nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), act),
        *(nn.Conv2d(12, 12, 3, groups=12), nn.BatchNorm2d(12), act, nn.AvgPool2d(2)),
    )


def _layer(act: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), act)


def _alone(norm: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm, nn.ReLU())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (_stack(nn.ReLU()), (2, 3, 20, 18)),
    "silu": (_stack(nn.SiLU()), (2, 3, 20, 18)),
    "leaky_relu": (_layer(nn.LeakyReLU(0.1)), (2, 3, 9, 8)),
    "hardswish": (_layer(nn.Hardswish()), (2, 3, 9, 8)),
    "relu6": (_layer(nn.ReLU6()), (2, 3, 9, 8)),
    "elu": (_layer(nn.ELU(0.7)), (2, 3, 9, 8)),
    "rows": (lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)), (9, 5)),
    "1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()), (3, 4, 11)),
    "3d": (lambda: nn.Sequential(nn.Conv3d(2, 5, 2), nn.BatchNorm3d(5), nn.ReLU()), (2, 2, 4, 5, 6)),
    "momentum": (_alone(nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)), (3, 4, 5, 6)),
    "without statistics": (_alone(nn.BatchNorm2d(4, track_running_stats=False)), (3, 4, 5, 6)),
    "without scale": (_alone(nn.BatchNorm2d(4, affine=False)), (3, 4, 5, 6)),
    "mean of all": (_alone(nn.BatchNorm2d(4, momentum=None)), (3, 4, 5, 6)),
    "twice": (Twice, (2, 4, 7, 6)),
    "read": (Read, (3, 4, 5, 6)),
}
TORCHS = ("without scale", "twice", "read")  # graphs with batch norm of torch's
NORMS = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm_backward.default,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Fusion]:
    """The graphs that are compiled."""
    torch._dynamo.reset()
    found: list[Fusion] = []

    def kept(*given: Any, **how: Any) -> Fusion:
        found.append(fused(*given, **how))
        return found[-1]

    monkeypatch.setattr(dynamo, "fused", kept)
    return found


def _steps(tensor: torch.Tensor) -> list[int]:
    """The strides of axes with more than one element."""
    return [step for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


def _gradients(module: nn.Module, run: Callable[..., torch.Tensor], src: torch.Tensor) -> list[torch.Tensor]:
    out = run(src)
    ahead = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * ahead).sum(), [src, *module.parameters()])]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_with_batch_norm_gives_torchs_gradients_and_statistics(name: str, made: list[Fusion]) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module = make()
    others = copy.deepcopy(module), copy.deepcopy(module).double()
    compiled = torch.compile(module, backend=dynamo.compile_graph, dynamic=False)
    for number in range(2):
        src = torch.randn(shape) + 0.5
        found = [_gradients(module, compiled, src.requires_grad_())]
        for each, dtype in zip(others, (torch.float32, torch.float64), strict=True):
            found.append(_gradients(each, each, src.detach().to(dtype).requires_grad_()))
        largest = max(each.norm() for each in found[-1])
        for got, eager, exact in zip(*found, strict=True):
            assert (got - exact).norm() <= 1.5 * (eager - exact).norm() + 3e-7 * largest
            assert _steps(got) == _steps(eager)
        nodes = [node for each in made for node in each.module.graph.nodes]
        assert number or (name in TORCHS) == any(node.target in NORMS for node in nodes)
    state, wanted = module.state_dict(), others[0].state_dict()
    for key, each in wanted.items():
        torch.testing.assert_close(state[key], each, rtol=1e-5, atol=1e-6)
    fresh = make()
    fresh.load_state_dict(state)
    src = torch.randn(shape)
    for each in (module, compiled, copy.deepcopy(module), fresh):
        each.eval()
        torch.testing.assert_close(each(src), others[0].eval()(src), rtol=1e-4, atol=1e-5)


def test_values_between_the_passes_lie_as_plans_made_them(made: list[Fusion]) -> None:
    """Of a step of convolutions and norms, src, the ends and gradients of weights alone are copied."""
    torch.manual_seed(0)
    layers, src = [*_stack(nn.ReLU())()], torch.randn(2, 3, 20, 18)
    module = nn.Sequential(*layers[:4], *layers[5:-1])  # without pools, whose gradients are torch's
    compiled = torch.compile(module, backend=dynamo.compile_graph, dynamic=False)
    got = torch.autograd.grad(compiled(src).square().sum(), [*module.parameters()])
    torch.testing.assert_close(
        got, torch.autograd.grad(module(src).square().sum(), [*module.parameters()]), rtol=1e-4, atol=1e-4
    )
    forward, backward = (each.module.graph for each in made)
    out = torch.Size((2, 12, 8, 7))
    assert [_shape(each) for each in _copies(forward)] == [src.shape, out]
    ends = {src.shape, out, *(each.shape for each in module.parameters())}
    assert {_shape(each) for each in _copies(backward)} <= ends


def _copies(graph: fx.Graph) -> list[fx.Node]:
    return [each for each in graph.find_nodes(op="call_function", target=laid_out) if is_copied(each)]


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.args[0].meta["val"].shape
    return shape


def test_saved_values_that_a_caller_sees_lie_as_torchs(made: list[Fusion]) -> None:
    """The result of the first activation is an output, and is kept for the backward pass."""
    torch.manual_seed(0)
    convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def run(src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = convs[0](src).relu()
        return made, convs[1](made)

    src = torch.randn(2, 4, 6, 5)
    found = [each(src) for each in (torch.compile(run, backend=dynamo.compile_graph, dynamic=False), run)]
    assert [each.stride() for each in found[0]] == [each.stride() for each in found[1]]
    grads = [
        torch.autograd.grad(sum(each.square().sum() for each in outs), [*convs.parameters()])
        for outs in found
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert len(made) == 2


def test_what_a_checkpoint_makes_again_is_not_kept() -> None:
    """And what a convolution reads is, without one: its weight's gradient reads it."""
    torch.manual_seed(0)
    convs = nn.Sequential(nn.Conv2d(4, 16, 3), nn.SiLU(), nn.Conv2d(16, 4, 3))
    src, kept = torch.randn(2, 4, 12, 12, requires_grad=True), list[int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    def again(src: torch.Tensor) -> Any:
        return checkpoint(convs, src, use_reentrant=False)

    for run, count in ((convs, 2), (again, 0)):
        torch._dynamo.reset()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = torch.compile(run, backend=dynamo.compile_graph, dynamic=False)(src)
        assert kept.count(2 * 16 * 10 * 10) == count
        found = [torch.autograd.grad(each.square().sum(), src)[0] for each in (made, convs(src))]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "act", [nn.LeakyReLU(0.1), nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid(), nn.ELU(), nn.Hardtanh(-2, 1)]
)
def test_derivatives_are_torchs_where_formulas_change(act: nn.Module, made: list[Fusion]) -> None:
    src = (
        torch.tensor([-7.0, -3.0, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, 7.0, 2.5])
        .view(3, 4)
        .requires_grad_()
    )

    def run(src: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = act(src)
        return made

    compiled = torch.compile(run, backend=dynamo.compile_graph, dynamic=False)
    found = [torch.autograd.grad((each(src) * 3).sum(), src)[0] for each in (compiled, run)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    assert any("activation_backward" in str(site.plan) for site in made[1].cut.sites)
