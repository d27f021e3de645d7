"""Arenas as on a GPU, and under torch.compile."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from arena_modules import SHAPE, Joining, close, made
from fuseplan.torch import dynamo, kernels
from fuseplan.torch.arenas import Arenas, _Arena
from pretend_gpu import PretendQueue

F = nn.functional


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# ---- as on a GPU: the CPU's kernels, on a queue whose streams the test chooses


class Odd(nn.Module):  # type: ignore[misc]
    """Products of views that begin at no multiple of 16 bytes, and of one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.parts = nn.Linear(20, 24), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        wide = F.relu(self.wide(src))
        return F.gelu(self.parts[0](wide.view(-1)[1:17].view(2, 8))) + self.parts[1](
            wide.view(-1)[4:20].view(2, 8)
        )


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendQueue]:
    made = PretendQueue(0)
    monkeypatch.setattr(kernels, "_queue", lambda target: made)
    for each in (kernels._kernel_of, kernels._compiled):
        each.cache_clear()
    yield made
    kernels._kernel_of.cache_clear()


def _places(arena: object) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in arena._outs.values()}  # type: ignore[attr-defined]


def test_streams_have_arenas_of_their_own(queue: PretendQueue) -> None:
    module, whole, arenas = made()
    for stream in (7, 9, 0, 7, 9, 0):
        queue.now = stream
        src = torch.randn(SHAPE)
        close(whole(src), module(src))
    assert {stream: len(free) for stream, free in arenas._free.items()} == {7: 1, 9: 1, 0: 1}
    places = [_places(free[0].bound[0]) for free in arenas._free.values()]
    assert all(map(len, places))
    assert len(set.union(*places)) == sum(map(len, places))
    assert all(each.offset % 512 == 0 for each in arenas._lives.buffers.values())


def test_a_recorded_call_has_memory_and_packed_weights_of_its_own(
    queue: PretendQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, kept = kernels._compiled, list[kernels.Packed]()

    def noted(*args: Any) -> Any:
        found = real(*args)
        kept.append(found[1])
        return found

    monkeypatch.setattr(kernels, "_compiled", noted)
    module, whole, arenas = made()
    src = torch.randn(SHAPE)
    queue.capturing = True
    close(whole(src), module(src))  # before any other call
    assert not any(arenas._free.values())
    assert kept
    assert not any(kept), "elements that are there when a graph has run"
    queue.capturing = False
    close(whole(src), module(src))
    (arena,) = arenas._free[7][0].bound
    held, packed = arena.held, [dict(each) for each in kept]
    assert any(packed)
    queue.capturing = True
    module.first.weight.mul_(2)
    close(whole(src), module(src))
    assert arenas._free[7][0].bound == [arena]
    assert arena.held is held
    assert [each.keys() for each in kept] == [each.keys() for each in packed]
    queue.capturing, waits = False, queue.waits
    close(whole(src), module(src))
    assert queue.waits > waits, "launches of calls before read what is dropped now"


class Turned(nn.Module):  # type: ignore[misc]
    """A layer whose result is scaled by a table that is computed of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 24)
        self.register_buffer("angles", torch.randn(24))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return (self.linear(src) * torch.cos(self.angles)).relu()


def test_a_recorded_call_reads_what_calls_before_computed_of_weights(
    queue: PretendQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Turned().eval()
    src, computed, real = torch.randn(4, 20), list[Any](), _Arena._made

    def watched(own: _Arena, node: Any, *args: Any) -> Any:
        computed.append(node)
        return real(own, node, *args)

    monkeypatch.setattr(_Arena, "_made", watched)
    whole = fused.fuse(module, src)
    lives = whole.fusion._planned._lives
    tables = [node for node in lives.constant if node.target is torch.ops.aten.cos.default]

    def call() -> set[Any]:
        computed.clear()
        with torch.no_grad():
            torch.testing.assert_close(whole(src), module(src), rtol=1e-5, atol=1e-5)
        return {*computed}

    assert call().issuperset(tables)
    queue.capturing = True
    assert call().isdisjoint(lives.constant)
    module.angles.mul_(2)
    assert call().issuperset(tables), "no call before has this table"


def test_views_that_a_gpu_reads_nowhere_are_copied_in_each_call(queue: PretendQueue) -> None:
    module = Odd()
    src = torch.randn(1, 20)
    whole = fused.fuse(module, src)
    lives = whole.fusion._planned._lives
    (wide,) = (node for node in lives.bound if "linear(24)" in node.args[0])
    assert wide in lives.buffers
    assert len(lives.bound) == whole.report.launches.kernels - 1
    for _ in range(3):
        src = torch.randn(1, 20)
        close((whole(src),), (module(src),))


# ---- under torch.compile


def _compiled(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module
) -> tuple[Callable[..., object], list[Arenas]]:
    made: list[Arenas] = []

    def noted(*args: object) -> Arenas:
        made.append(Arenas(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(dynamo, "Arenas", noted)
    torch._dynamo.reset()
    return torch.compile(module, backend=dynamo.compile_graph, dynamic=False), made


def test_compiled_graphs_lie_in_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Joining().eval()
    compiled, made = _compiled(monkeypatch, module)
    for turn in range(4):
        src = torch.randn(SHAPE)
        close(compiled(src), module(src))  # type: ignore[arg-type]
        if turn == 1:
            module.stem.weight.mul_(0.5)
            module.head.weight.data = torch.randn_like(module.head.weight)
    (arenas,) = made
    assert [*map(len, arenas._free.values())] == [1]
    assert arenas._lives.parts


def test_graphs_that_gradients_or_writes_pass_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, made = _compiled(monkeypatch, nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    src = torch.randn(4, 8, requires_grad=True)
    with torch.enable_grad():
        compiled(src).sum().backward()  # type: ignore[attr-defined]
    assert src.grad is not None
    assert not made
    stateful = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU())
    compiled, made = _compiled(monkeypatch, copy.deepcopy(stateful))
    for _ in range(2):
        src = torch.randn(SHAPE)
        torch.testing.assert_close(compiled(src), stateful(src), rtol=1e-4, atol=1e-4)
    assert all(not {"running_mean", "running_var"} & {str(each) for each in arenas._own} for arenas in made)


def test_open_extents_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    _, made = _compiled(monkeypatch, module)
    compiled = torch.compile(module, backend=dynamo.compile_graph, dynamic=True)
    for rows in (3, 5):
        src = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(src), module(src))
    assert not made


class Split(nn.Module):  # type: ignore[misc]
    """Parts of a value, one of which is read after memory of the size has been written again."""

    def __init__(self, split: Callable[..., Any], *sizes: Any) -> None:
        super().__init__()
        self.split, self.sizes = split, sizes
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        first, second = self.split(self.layers[0](src), *self.sizes, 1)
        out = torch.cat([first.exp(), first], 1)
        for layer in self.layers:
            out = F.relu(layer(out))
        return out[:, :4] * second


UNTOLD = (torch.unsafe_split, 4), (torch.unsafe_split_with_sizes, [4, 4]), (torch.unsafe_chunk, 2)


@pytest.mark.parametrize("split", UNTOLD, ids=lambda split: split[0].__name__)
@pytest.mark.parametrize(
    "compiler", [fused.fuse, lambda module, _: torch.compile(module, backend="fuseplan")]
)
def test_parts_live_as_long_as_views_where_torch_does_not_tell_so(compiler: Any, split: Any) -> None:
    """Those of LSTMCell and GRUCell, for two."""
    module, src = Split(*split), torch.randn(4, 8)
    whole = compiler(module, src)
    for _ in range(2):
        close((whole(src),), (module(src),))
