"""Layers that share a graph: torch.compile compiles the code of equal layers once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fuseplan.torch import repeated
from fuseplan.torch.arenas import Arenas, _Arena

WIDE = 48


@pytest.fixture
def binds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A number for each time that launches are bound."""
    bound, bind = list[int](), _Arena.bind

    def counted(arena: _Arena, *args: object) -> None:
        bound.append(len(bound))
        bind(arena, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(_Arena, "bind", counted)
    torch._dynamo.reset()
    yield bound
    torch._dynamo.reset()


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.nn.functional.gelu(self.first(x)))


def through(layers: list[Block], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def compiled(layers: list[Block]) -> list[Block]:
    for layer in layers:
        layer.compile(backend="fuseplan")
    return layers


def test_layers_in_turns_are_bound_a_few_times(binds: list[int]) -> None:
    layers = [Block() for _ in range(6)]
    x = torch.randn(4, WIDE)
    with torch.no_grad():
        want = through(layers, x)
        compiled(layers)
        for _ in range(4):
            torch.testing.assert_close(through(layers, x), want)
        count = len(binds)
        for _ in range(5):
            torch.testing.assert_close(through(layers, x), want)
        assert len(binds) == count
        layers[2].first.weight.mul_(2)
        wanted = through([layer.eval() for layer in layers], x)
        assert not torch.allclose(wanted, want)
        assert len(binds) <= count + 1  # none where the kernel reads the weight as torch stores it


def test_written_weights_are_seen_in_each_layer(binds: list[int]) -> None:
    layers, same = [Block() for _ in range(3)], [Block() for _ in range(3)]
    for layer, other in zip(layers, same, strict=True):
        other.load_state_dict(layer.state_dict())
    compiled(layers)
    x = torch.randn(64, WIDE)
    with torch.no_grad():
        for turn in range(6):
            torch.testing.assert_close(through(layers, x), through(same, x))
            for layer, other in zip(layers, same, strict=True):
                layer.last.weight.add_(0.01 * turn)
                other.last.weight.add_(0.01 * turn)


def test_layers_that_are_gone_are_forgotten(binds: list[int]) -> None:
    x = torch.randn(4, WIDE)
    with torch.no_grad():
        layers = compiled([Block() for _ in range(4)])
        for _ in range(4):
            through(layers, x)
        old = [weakref.ref(layer.first.weight) for layer in layers]
        del layers
        layers = compiled([Block() for _ in range(4)])
        for _ in range(2 * repeated.LATELY):
            through(layers, x)
            layers.append(compiled([Block()])[0])  # a new one in each turn is bound anew
            del layers[0]
    gc.collect()
    assert not any(each() is not None for each in old)


def test_other_tensors_in_each_call_have_one_binding(binds: list[int]) -> None:
    found = list[Arenas]()
    made = Arenas.__init__

    def noted(arenas: Arenas, *args: object) -> None:
        made(arenas, *args)  # type: ignore[arg-type]
        found.append(arenas)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Arenas, "__init__", noted)
        for _ in range(8):
            x, block = torch.randn(4, WIDE), Block()
            want = block(x)
            torch.testing.assert_close(compiled([block])[0](x), want)
    (arenas,) = found
    assert [len(each.bound) for free in arenas._free.values() for each in free] == [1]
