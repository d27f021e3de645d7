"""Memory that calls of a module share on a GPU: streams, threads, graphs, written weights; beside float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.torch.dynamo import compile_graph

Call = Callable[[torch.Tensor], torch.Tensor]
BOUND = 2e-2  # of the largest value, in f16 behind five layers


class Block(nn.Module):  # type: ignore[misc]
    """Convolutions whose weights are packed, a residual, a pool of torch's or a plan's, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.more = nn.ModuleList([nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(64, 48)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.stem(src)).relu()
        for each in self.more:
            made = (each(made) + made).relu()
        return self.head(made.cumprod(2).mean((2, 3)))


def _built(way: str) -> tuple[nn.Module, Call, list[torch.Tensor]]:
    torch.manual_seed(0)
    module = Block().cuda().half().eval()
    sources = [torch.randn(2, 16, 24, 24, device="cuda").half() for _ in range(3)]
    if way == "fuse":
        return module, fused.fuse(module, sources[0]), sources
    torch.compiler.reset()
    rest = {"rest": "inductor" if way == "inductor" else "torch"}
    return module, torch.compile(module, backend=compile_graph, dynamic=False, options=rest), sources


def _check(module: nn.Module, sources: list[torch.Tensor], made: list[tuple[int, torch.Tensor]]) -> None:
    torch.cuda.synchronize()
    exact = copy.deepcopy(module).double()
    for which, got in made:
        want = exact(sources[which].double())
        assert (got.double() - want).abs().max() <= BOUND * want.abs().max()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own of its compiler
@pytest.mark.parametrize("way", ["fuse", "torch", "inductor"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_calls_that_overlap_are_right(way: str) -> None:
    module, call, sources = _built(way)
    made = [(turn % 3, call(sources[turn % 3])) for turn in range(6)]
    sides = [torch.cuda.Stream() for _ in range(2)]
    for side in sides:
        side.wait_stream(torch.cuda.current_stream())
    for turn in range(12):
        with torch.cuda.stream(sides[turn % 2]):
            torch.cuda._sleep(1_000_000 * (turn % 3))  # cycles, in which the host runs ahead
            made.append((turn % 3, call(sources[turn % 3])))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        for each in pool.map(lambda first: _several(call, sources, first), (0, 1)):
            made += each
    module.stem.weight.mul_(1.0)
    _check(module, sources, made)
    module.more[0].weight.mul_(0.5)
    module.head.bias.add_(1)
    _check(module, sources, [(0, call(sources[0])), (1, call(sources[1]))])


@torch.no_grad()  # type: ignore[untyped-decorator]
def _several(call: Call, sources: list[torch.Tensor], first: int) -> list[tuple[int, torch.Tensor]]:
    return [((first + turn) % 3, call(sources[(first + turn) % 3])) for turn in range(6)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own of its compiler
@pytest.mark.parametrize("way", ["fuse", "torch", "inductor"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_graphs_run_beside_calls(way: str) -> None:
    """Two graphs at once, of which one was recorded right after a weight was written, and calls."""
    module, call, sources = _built(way)
    statics = [sources[0].clone(), sources[1].clone()]
    call(sources[0])
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    module.more[1].weight.mul_(0.5)
    for graph, static in zip(graphs, statics, strict=True):
        with torch.cuda.graph(graph):
            outs.append(call(static))
    sides = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(6):
        for place, static in enumerate(statics):
            static.copy_(sources[(turn + place) % 3])
        torch.cuda.synchronize()
        for graph, side in zip(graphs, sides, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
        called = call(sources[(turn + 2) % 3])
        torch.cuda.synchronize()
        _check(
            module,
            sources,
            [*(((turn + place) % 3, out) for place, out in enumerate(outs)), ((turn + 2) % 3, called)],
        )
