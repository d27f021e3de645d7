"""Random modules beside eager torch and float64: operators on any earlier values, any of them outputs.

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
    made.eval()
    return made


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
            lambda x, _: x.exp().relu_(),
            lambda x, y: x.clone().mul_(y),
            lambda x, _: (2 * x).index_fill_(0, torch.tensor([0]), number),
        )
    )


KINDS = (unary, unary, binary, binary, layer, layer, layer, along, viewed, viewed, joined, changed)


def called(step: Step, values: list[Tensor], places: list[int]) -> Any:
    first, second = (values[place] for place in places)
    return step(first) if isinstance(step, nn.Module) else step(first, second)


class Drawn(nn.Module):  # type: ignore[misc]
    """The module of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng, self.steps, self.layers = Rng(seed), list[tuple[Step, list[int]]](), nn.ModuleList()
        torch.manual_seed(seed)
        shape = [rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(rng.choice((2, 3, 4, 4, 5)))]
        self.given = [torch.randn(shape) for _ in range(rng.randint(1, 2))]
        values = [*self.given]
        for _ in range(60):
            places = [max(rng.randrange(len(values)), rng.randrange(len(values))) for _ in range(2)]
            try:
                step = rng.choice(KINDS)(rng, values[places[0]])
                with torch.no_grad():
                    made = called(step, values, places)
            except (RuntimeError, IndexError, ValueError, TypeError, UserWarning):  # it takes no such values
                continue
            if 0 < made.numel() <= MOST and bool((abs(made.double()) < 100).all()):
                values.append(made)
                self.steps.append((step, places))
                if isinstance(step, nn.Module):
                    self.layers.append(step)
            if len(self.steps) == 10:
                break
        self.outputs = [len(values) - 1, *rng.sample(range(len(values)), rng.randint(0, 1))]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        values = [*given]
        for step, places in self.steps:
            values.append(called(step, values, places))
        return tuple(values[place] for place in self.outputs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, cases = map(metafunc.config.getoption, ("first", "cases"))
    metafunc.parametrize("seed", range(first, first + cases // 10))


def assert_near(got: Tensor, eager: Tensor, right: Tensor) -> None:
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    if not got.is_floating_point():
        return  # of equal elements that rounding makes, another may be the largest
    far = abs(eager.double() - right.double()).max()
    bound = 8 * far + 64 * torch.finfo(got.dtype).eps * abs(eager.double()).max()
    assert bool((abs(got.double() - eager.double()) <= bound).all())


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_random_modules(seed: int) -> None:
    module = Drawn(seed).eval()
    double = copy.deepcopy(module).double()
    want, exact = module(*module.given), double(*(each.double() for each in module.given))
    ours = fused.fuse(module, *module.given)
    for _ in range(2):
        for tensors in zip(ours(*module.given), want, exact, strict=True):
            assert_near(*tensors)
