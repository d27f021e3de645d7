"""Callers, and operators of torch's that read memory by places, get values as torch's own lie."""

import copy
import operator
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fuseplan.torch
from fuseplan.torch.lifetimes import Lifetimes
from fuseplan.torch.lying import ORDER, laid_out
from fuseplan.torch.restoring import restore


def compiled(module: nn.Module, *_: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(module, backend="fuseplan")
    return made


def storages(tensors: Any) -> list[bool]:
    """Which tensors share memory, by pairs."""
    places = [each.untyped_storage().data_ptr() for each in tensors]
    return [operator.eq(*pair) for pair in product(places, repeat=2)]


class Crossed(nn.Module):  # type: ignore[misc]
    """A group norm whose gradient is that of a product over its channels, and of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.GroupNorm(4, 32), nn.Linear(32, 32)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        rows = self.norm(image).flatten(2).transpose(1, 2)
        return rows + self.linear(rows)


class Convolved(nn.Module):  # type: ignore[misc]
    """A group norm of what a convolution gives with its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.conv(src)))


@pytest.mark.parametrize(("module", "shape"), [(Crossed, (3, 32, 4, 5)), (Convolved, (3, 8, 13))])
def test_gradients_of_group_norm_are_of_values_as_torch_lays_them(
    module: type[nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    plain, src = module(), torch.randn(shape)
    wide = copy.deepcopy(plain).double()
    factors = torch.randn_like(plain(src))
    (compiled(plain)(src) * factors).sum().backward()
    (wide(src.double()) * factors.double()).sum().backward()
    for got, want in zip(plain.parameters(), wide.parameters(), strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def test_batch_norm_on_a_cpu_sums_channels_that_lie_as_torch_lays_them() -> None:
    """Torch adds those that lie last in f32: ten times as far from float64."""
    norm = torch.ops.aten._native_batch_norm_legit_functional.default
    own = [torch.ones(6), torch.zeros(6), torch.zeros(6), torch.ones(6)]
    given = make_fx(lambda src, *own: norm(-src, *own, True, 0.1, 1e-5), tracing_mode="fake")
    graph = given(torch.randn(2, 6, 3, 4), *own).graph
    (value,), (batch,) = (
        graph.find_nodes(op="call_function", target=each) for each in (torch.ops.aten.neg.default, norm)
    )
    value.meta[ORDER] = (0, 2, 3, 1)
    restore(graph)
    assert batch.args[0].target is laid_out
    assert batch.args[0].args == (value, (0, 1, 2, 3))


VIEWS: list[Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = [
    lambda value: (value[:, ::2], value),
    lambda value: (value, value.permute(0, 2, 3, 1), value.flatten(2)),
    lambda value: value.chunk(2, 1),
    lambda value: (value[..., 1:].transpose(1, 2), value[:, 0]),
]


class Viewed(nn.Module):  # type: ignore[misc]
    """Views of what a convolution gives."""

    def __init__(self, views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.conv, self.views = nn.Conv2d(4, 8, 3, padding=1), views

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.views(torch.relu(self.conv(image)))


@pytest.mark.part(2)
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("make", [fuseplan.torch.fuse, compiled])
def test_views_among_outputs_share_memory_and_strides_as_in_torch(
    views: Any, last: bool, make: Callable[..., Any]
) -> None:
    kind = torch.channels_last if last else torch.contiguous_format
    module, image = Viewed(views).eval(), torch.randn(2, 4, 6, 5).to(memory_format=kind)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        want, got = module(image), make(module, image)(image)
    assert [each.stride() for each in got] == [each.stride() for each in want]
    assert storages(got) == storages(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


class Chosen(nn.Module):  # type: ignore[misc]
    """Rows that the elements of a tensor choose: torch knows their number in a call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.relu(self.linear(src[src.sum(-1) > 0]))
        return rows, rows.t(), rows.nonzero(), src[src > 0].exp() * 2


@pytest.mark.parametrize("make", [fuseplan.torch.fuse, compiled])
def test_extents_may_depend_on_elements(make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    module, src = Chosen(), torch.randn(5, 16)
    whole = make(module, src)
    with torch.no_grad():
        for each in (src, -src, src * 0):
            for one, other in zip(whole(each), module(each), strict=True):
                torch.testing.assert_close(one, other)


def test_an_input_that_lies_otherwise_is_laid_out_for_group_norms_gradient() -> None:
    """A backward pass has values as the forward pass left them; `val` tells how torch's operators would."""

    def gradient(grad: torch.Tensor, src: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Any:
        named = torch.ops.aten.native_group_norm_backward
        return named.default(grad, src, mean, rstd, None, 2, 8, 20, 4, [True, False, False])[0]

    torch.manual_seed(0)
    grad, src = torch.randn(2, 8, 4, 5), torch.randn(2, 8, 4, 5)
    var, mean = torch.var_mean(src.reshape(2, 4, -1), 2, correction=0)
    tensors = (grad, src, mean, (var + 1e-5).rsqrt())
    module = make_fx(gradient, tracing_mode="fake")(*tensors)
    (_, kept, *_) = module.graph.find_nodes(op="placeholder")
    kept.meta[ORDER] = (0, 2, 3, 1)
    restore(module.graph)
    layings = module.graph.find_nodes(op="call_function", target=laid_out)
    (laid,) = (each for each in layings if each.args == (kept, (0, 1, 2, 3)))
    assert laid not in Lifetimes.of(module, (), on_gpu=False).same
    module.recompile()
    made = module(grad, src.contiguous(memory_format=torch.channels_last), *tensors[2:])
    torch.testing.assert_close(made, gradient(*tensors))


class Gated(nn.Module):  # type: ignore[misc]
    """Squeeze and excitation of what a convolution and a norm make."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.conv(src))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(made.mean((2, 3))))))
        return torch.relu(src + made * gate[:, :, None, None])


def test_a_gated_block_trains_as_torch_does() -> None:
    """How its kept values lie is told of tensors without elements."""
    torch.manual_seed(0)
    plain, src = Gated(), torch.randn(4, 8, 16, 16)
    ours = copy.deepcopy(plain)
    for call in (plain, compiled(ours)):
        call(src).square().sum().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)
