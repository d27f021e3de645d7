"""Random modules beside eager torch and float64: operators on any earlier values, any of them outputs.

Fused and compiled modules may be twice as far from float64 as eager torch, or as far as float64 moves where
what it is given is rounded.

python -m pytest tests/in_torch/test_random.py --cases 1000 --first 100000
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fuseplan.torch as fused
from fuseplan.torch.dynamo import compile_graph

Rng = random.Random
Step = Callable[..., Any]

MOST = 20_000  # elements of a value
ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "elu", "softplus", "softsign", "mish")
OTHERS = ("exp", "sin", "sqrt", "square", "sign", "floor", "reciprocal", "neg", "clone", "log1p", "abs")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "fmod", "atan2")
REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "logsumexp", "std")
SCANS = ("softmax", "log_softmax", "cumsum", "flip", "argmax", "median", "sort", "cumprod")
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def unary(rng: Rng, x: Tensor) -> Step:
    if rng.random() < 0.6:
        activation = rng.choice(ACTIVATIONS)
        return lambda x, _: getattr(functional, activation)(x)
    name = rng.choice(OTHERS)
    return lambda x, _: getattr(x, name)()


def binary(rng: Rng, x: Tensor) -> Step:
    name, number = rng.choice(BINARY), rng.choice((0.5, 2, -1, 3))
    second = rng.choice((lambda x, y: y, lambda x, y: number, lambda x, y: x.mean(), lambda x, y: y[..., :1]))
    return lambda x, y: getattr(torch, name)(x, torch.as_tensor(second(x, y)))


def layer(rng: Rng, x: Tensor) -> Any:
    channels, kernel = x.shape[1], rng.randint(1, 3)
    groups = rng.choice([each for each in (1, 1, 2, 3, channels) if channels % each == 0])
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(x.shape[-1], rng.choice((1, 3, 8)), bias=rng.random() < 0.5),
        lambda: nn.LayerNorm(x.shape[-1]),
        lambda: nn.RMSNorm(x.shape[-1]),
        lambda: nn.GroupNorm(groups, channels),
        lambda: (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[x.dim() - 2](channels),
        lambda: CONVOLUTIONS[x.dim() - 3 + 3 * rng.randint(0, 1)](
            channels, groups * rng.randint(1, 4), kernel, stride=rng.randint(1, 2),
            padding=rng.randint(0, kernel // 2), dilation=rng.randint(1, 2), groups=groups,
        ),
    ]  # fmt: skip
    made = rng.choice(makers)()
    for each in made.parameters():
        nn.init.normal_(each, std=0.5)
    return made.eval().to(x.dtype)


class First(nn.Module):  # type: ignore[misc]
    """The first result of a layer that has several."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, src: Tensor) -> Tensor:
        made: Tensor = self.layer(*[src] * self.count)[0]
        return made


def block(rng: Rng, x: Tensor) -> Any:
    """A layer of layers, on the last axis."""
    width, heads = x.shape[-1], rng.choice([each for each in (1, 2) if x.shape[-1] % each == 0])
    makers: list[Callable[[], nn.Module]] = [
        lambda: First(nn.MultiheadAttention(width, heads, batch_first=True), 3),
        lambda: nn.TransformerEncoderLayer(
            width, heads, 8, 0.0, batch_first=True, norm_first=rng.random() < 0.5
        ),
        lambda: First(nn.GRU(width, 3, batch_first=True), 1),
        lambda: First(nn.LSTM(width, 3, batch_first=True, bidirectional=True), 1),
        lambda: nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)),
        lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.SiLU()),
    ]
    return rng.choice(makers)().eval().to(x.dtype)


def pooled(rng: Rng, x: Tensor) -> Step:
    axes, kernel, stride = x.dim() - 2, rng.randint(1, 3), rng.randint(1, 2)
    name = rng.choice(("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"))
    called = getattr(functional, f"{name}{axes}d")
    if name.startswith("adaptive"):
        return lambda x, _: called(x, kernel)
    return lambda x, _: called(x, kernel, stride, kernel // 2)


def picked(rng: Rng, x: Tensor) -> Step:
    """Elements by their places."""
    axis, last = rng.randrange(x.dim()), x.shape[-1]
    ids = torch.tensor([0, x.shape[axis] - 1, 0])
    table = torch.randn(9, 4).to(x.dtype)
    return rng.choice(
        (
            lambda x, _: x.index_select(axis, ids),
            lambda x, _: x.movedim(axis, 0)[ids],
            lambda x, _: x[..., [0, last - 1]],
            lambda x, y: torch.take_along_dim(x, y.argmax(axis, keepdim=True), axis),
            lambda x, _: functional.embedding(x.abs().clamp(max=8).long(), table),
            lambda x, y: x.index_add(axis, ids, y.index_select(axis, ids)),
            lambda x, y: x.scatter(axis, y[..., :1].argmax(axis, keepdim=True), 0.5),
            lambda x, _: x.reshape(x.shape[0], -1, 2),
            lambda x, _: x.reshape(*x.shape[:-1], 2, -1).transpose(-2, -3),
            lambda x, y: torch.einsum("...ij,...kj->...ik", x, y),
            lambda x, _: functional.interpolate(x, scale_factor=2.0),
            lambda x, _: functional.pixel_shuffle(x, 2),
            lambda x, y: functional.mse_loss(x, y, reduction="none"),
            lambda x, y: functional.cosine_similarity(x, y, dim=axis),
        )
    )


def along(rng: Rng, x: Tensor) -> Step:
    axis, is_kept = rng.randrange(x.dim()), rng.random() < 0.5
    if rng.random() < 0.5:
        name = rng.choice(REDUCTIONS)
        axes = tuple(rng.sample(range(x.dim()), rng.randint(1, 2)))
        return lambda x, _: getattr(x, name)(dim=axes, keepdim=is_kept)
    name = rng.choice(SCANS)

    def scanned(x: Tensor, _: Tensor) -> Tensor:
        made: Any = getattr(x, name)(axis)
        return made if isinstance(made, Tensor) else made[0]

    return scanned


def viewed(rng: Rng, x: Tensor) -> Step:
    axis, order = rng.randrange(x.dim()), rng.sample(range(x.dim()), x.dim())
    begin, pads = rng.randrange(x.shape[axis]), [rng.randint(0, 2) for _ in range(4)]
    return rng.choice(
        (
            lambda x, _: x.permute(order),
            lambda x, _: x.flatten(axis),
            lambda x, _: x.unsqueeze(axis),
            lambda x, _: x.squeeze(),
            lambda x, _: x.narrow(axis, begin, x.shape[axis] - begin),
            lambda x, _: x.select(axis, begin),
            lambda x, _: x.chunk(2, axis)[-1],
            lambda x, _: x.transpose(axis, -1)[..., ::2],
            lambda x, _: x.unsqueeze(0).expand(2, *x.shape),
            lambda x, _: x.repeat_interleave(2, axis),
            lambda x, _: x.roll(1, axis),
            lambda x, _: functional.pad(x, pads, value=pads[0] / 2),
            lambda x, _: functional.glu(x, axis),
        )
    )


def joined(rng: Rng, x: Tensor) -> Step:
    axis, is_causal, mask = rng.randrange(x.dim()), rng.random() < 0.5, torch.ones(x.shape[-2:]).tril() > 0
    attend = functional.scaled_dot_product_attention
    return rng.choice(
        (
            lambda x, y: torch.cat((x, y, x), axis),
            lambda x, y: torch.stack((y, x), axis),
            lambda x, y: attend(x, y, y, is_causal=is_causal),
            lambda x, y: torch.softmax(x @ y.mT / 2, -1) @ y,
            lambda x, y: torch.where(x > y, x, 2 * y),
            lambda x, y: x.masked_fill(mask, 0.25) * y,
            lambda x, y: functional.normalize(x, dim=axis) + y,
        )
    )


def changed(rng: Rng, x: Tensor) -> Step:
    dtype, number = rng.choice(DTYPES), rng.choice((0.5, -1.0))
    return rng.choice(
        (
            lambda x, _: x.to(dtype),
            lambda x, _: x.clone().add_(number),
            lambda x, _: (2 * x).relu_(),
            lambda x, y: x.clone().mul_(y),
            lambda x, _: (2 * x).index_fill_(0, torch.tensor([0]), number),
        )
    )


KINDS = (
    unary, unary, binary, binary, layer, layer, layer, along, viewed, viewed, joined, changed, block, pooled,
    picked,
)  # fmt: skip


def called(step: Step, values: list[Tensor], places: list[int]) -> Any:
    first, second = values[places[0]], values[places[1]]
    if not isinstance(step, nn.Module):
        return step(first, second)
    return step(first.to(next(step.parameters()).dtype))  # of float64, what is cast has not the layer's dtype


class Drawn(nn.Module):  # type: ignore[misc]
    """The module of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng, self.steps, self.layers = Rng(seed), list[tuple[Step, list[int]]](), nn.ModuleList()
        torch.manual_seed(seed)
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        shape = [rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(rng.choice((2, 3, 4, 4, 5)))]
        self.given = [torch.randn(shape).to(dtype) for _ in range(rng.randint(1, 2))]
        values = [*self.given]
        for _ in range(60):
            places = [max(rng.randrange(len(values)), rng.randrange(len(values))) for _ in range(2)]
            try:
                step = rng.choice(KINDS)(rng, values[places[0]])
                with torch.no_grad():
                    made = called(step, values, places)
            except (
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
                AttributeError,
                AssertionError,
                UserWarning,
            ):
                continue  # it takes no such values
            if 0 < made.numel() <= MOST and bool((abs(made.double()) < 100).all()):
                values.append(made)
                self.steps.append((step, places))
                if isinstance(step, nn.Module):
                    self.layers.append(step)
            if len(self.steps) == 10:
                break
        self.outputs = [len(values) - 1, *rng.sample(range(len(values)), rng.randint(0, 1))]
        self.eps = max(torch.finfo(each.dtype).eps for each in values if each.is_floating_point())

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        values = [*given]
        for step, places in self.steps:
            values.append(called(step, values, places))
        return tuple(values[place] for place in self.outputs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, cases = map(metafunc.config.getoption, ("first", "cases"))
    metafunc.parametrize("seed", range(first, first + cases // 10))


def results(
    call: Callable[..., Any], module: nn.Module, given: list[Tensor], is_trained: bool
) -> list[Tensor | None]:
    """The outputs of a call, and the gradients of what it is given and of the module's parameters."""
    if not is_trained:
        with torch.no_grad():
            return [*call(*given)]
    leaves = [*(each.clone().requires_grad_() for each in given), *module.parameters()]
    made = [*call(*leaves[: len(given)])]
    ends = [each for each in made if each.requires_grad]
    if not ends:
        return made
    torch.manual_seed(0)
    rates = [torch.randn(each.shape, dtype=torch.float64).to(each.dtype) for each in ends]
    return [*(each.detach() for each in made), *torch.autograd.grad(ends, leaves, rates, allow_unused=True)]


def shaken(module: nn.Module, given: list[Tensor], far: float) -> tuple[nn.Module, list[Tensor]]:
    """A module and what it is given, moved as rounding would."""
    moved = copy.deepcopy(module)
    with torch.no_grad():
        for each in moved.parameters():
            each.mul_(1 + far * torch.randn_like(each))
    return moved, [each * (1 + far * torch.randn_like(each)) for each in given]


def assert_near(
    got: Tensor | None, eager: Tensor | None, right: Tensor | None, moved: list[Tensor | None], eps: float
) -> None:
    assert (got is None) == (eager is None)
    if got is None or eager is None or right is None:
        return
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    loose = max(abs(each.double() - right.double()).max() for each in moved if each is not None)
    if not got.is_floating_point():  # of equal elements that rounding makes, another may be the largest
        assert loose or bool((got == eager).all() or (got != right).sum() <= 2 * (eager != right).sum())
        return
    far, size = abs(eager.double() - right.double()).max(), abs(right.double()).max()
    error, allowed = abs(got.double() - right.double()).max(), 2 * far + 4 * loose + 16 * eps * max(size, 0.1)
    assert not error > allowed, f"{error:.2g} away, eager {far:.2g}, rounding {loose:.2g}, of {size:.2g}"


def check(module: Drawn, call: Callable[..., Any], is_trained: bool) -> None:
    double, wide = copy.deepcopy(module).double(), [each.double() for each in module.given]
    want, exact = results(module, module, module.given, is_trained), results(double, double, wide, is_trained)
    moved = []
    for _ in range(2):
        other, near = shaken(double, wide, module.eps)
        moved.append(results(other, other, near, is_trained))
    for _ in range(2):
        made = results(call, module, module.given, is_trained)
        for got, eager, right, *others in zip(made, want, exact, *moved, strict=True):
            assert_near(got, eager, right, others, module.eps)


@pytest.mark.parametrize("is_trained", [False, True], ids=["inference", "training"])
def test_random_modules_fused(seed: int, is_trained: bool) -> None:
    module = Drawn(seed).eval()
    with torch.set_grad_enabled(is_trained):
        call = fused.fuse(module, *module.given)
    check(module, call, is_trained)


def test_random_modules_compiled(seed: int) -> None:
    torch._dynamo.reset()
    module = Drawn(seed).eval()
    check(module, torch.compile(module, backend=compile_graph), is_trained=seed % 2 == 1)
