"""Calls of fused modules whose values share memory that is planned once."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.torch import dynamo, kernels
from fuseplan.torch.arenas import Arenas
from fuseplan.torch.kernels import kernel_on
from pretend_gpu import PretendQueue

F = nn.functional
SHAPE = (2, 6, 8, 8)
waits: Callable[[], object] = int  # what the operator between plans does


@torch.library.custom_op("fuseplan_tests::between", mutates_args=())  # type: ignore[untyped-decorator]
def between(src: torch.Tensor) -> torch.Tensor:
    """An operator that no plan computes."""
    waits()
    return src.flip(0)


@between.register_fake  # type: ignore[untyped-decorator]
def _(src: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(src)


class Long(nn.Module):  # type: ignore[misc]
    """Values that live long and shortly, views of them, an operator of torch's, a result that is read too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.more = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(64, 8)
        self.norm.running_mean.normal_()

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        begin = out = self.norm(self.first(src)).relu()
        for each in self.more:
            out = F.relu(each(out))
        turned = between(out)
        out = self.last(turned) + begin
        rows = self.head(out.flatten(2))
        return rows.transpose(1, 2), F.gelu(rows), out.cumsum(1) + turned


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _made() -> tuple[nn.Module, nn.Module, Arenas]:
    module = Long().eval()
    whole = fused.fuse(module, torch.randn(SHAPE))
    assert isinstance(whole.fusion._planned, Arenas)
    return module, whole, whole.fusion._planned


def test_results_are_nobody_elses() -> None:
    module, whole, arenas = _made()
    one, other = torch.randn(SHAPE), torch.randn(SHAPE)
    want = module(one), module(other)
    first = whole(one)
    kept = [each.clone() for each in first]
    _close(first, want[0])
    _close(whole(other), want[1])
    assert all(torch.equal(each, was) for each, was in zip(first, kept, strict=True))
    with torch.inference_mode():
        _close(whole(one), want[0])
    _close(whole(one), want[0])
    assert [*map(len, arenas._free.values())] == [1]  # all calls had the one


def test_values_share_memory_that_their_sum_exceeds() -> None:
    _, _, arenas = _made()
    buffers = list(arenas._lives.buffers.values())
    assert arenas._bytes < sum(each.nbytes for each in buffers)
    pairs = ((a, b) for a in buffers for b in buffers if a is not b)
    for one, other in pairs:
        lives_apart = one.last < other.first or other.last < one.first
        lies_apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
        assert lives_apart or lies_apart


def test_calls_at_once_have_arenas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, whole, arenas = _made()
    tensors = [torch.randn(SHAPE) for _ in range(2)]
    want = [module(each) for each in tensors]
    monkeypatch.setattr(f"{__name__}.waits", threading.Barrier(2, timeout=60).wait)

    def call(src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            made: tuple[torch.Tensor, ...] = whole(src)
            return made

    with ThreadPoolExecutor(2) as pool:
        for got, exact in zip(pool.map(call, tensors), want, strict=True):
            _close(got, exact)
    assert [*map(len, arenas._free.values())] == [2]


def test_changed_weights_are_seen() -> None:
    module, whole, arenas = _made()
    src = torch.randn(SHAPE)
    whole(src)

    def replaced() -> None:
        module.last.weight = whole.last.weight = nn.Parameter(torch.randn(8, 8, 1, 1))

    def swapped() -> None:
        module.first.weight.data = torch.randn(8, 6, 3, 3)

    def turned() -> None:
        module.to(memory_format=torch.channels_last)

    changes = (replaced, swapped, turned, lambda: module.norm.running_var.mul_(2), module.head.weight.zero_)
    for change in changes:
        change()
        _close(whole(src), module(src))
    twin = copy.deepcopy(whole)
    twin.more[0].weight.zero_()
    _close(whole(src), module(src))
    own = twin.fusion._planned
    assert own is not arenas
    assert not own._free
    _close(twin(src), type(module).forward(twin, src))


def test_other_calls_are_torchs() -> None:
    module, whole, arenas = _made()
    src = torch.randn(SHAPE)
    _close(whole(src.to(memory_format=torch.channels_last)), module(src))
    whole.requires_grad_(False)
    with torch.enable_grad():
        _close(whole(src), module(src))
    assert not arenas._free


class Joining(nn.Module):  # type: ignore[misc]
    """Joins of results that nothing else reads, or something does; of torch's, of a join; one that leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(6, 8, 1)
        self.parts = nn.ModuleList([nn.Conv2d(8, 4 * (1 + place), 1) for place in range(4)])
        self.next, self.head = nn.Conv2d(20, 8, 3, padding=1), nn.Conv2d(52, 8, 1)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stem = F.relu(self.stem(src))
        one, two, three, four = (F.relu(each(stem)) for each in self.parts)
        own = torch.cat([one, four], -3)
        more = torch.cat([self.next(own).relu(), two, three, F.max_pool2d(stem, 3, 1, 1)], 1)
        last = torch.cat([more, more[:, :8].relu(), between(stem)], 1)
        return self.head(last), two + 1, torch.cat([F.relu(self.next(own)), stem], 1)


def test_results_are_written_into_the_value_that_joins_them() -> None:
    module = Joining().eval()
    whole = fused.fuse(module, torch.randn(SHAPE))
    within = [site.plan for site in whole.fusion.cut.sites if site.into]
    assert len(within) >= 4
    lives = whole.fusion._planned._lives
    assert len(lives.parts) >= 4
    assert any(lives.copied.values())
    for _ in range(3):
        src = torch.randn(SHAPE)
        want, made = module(src), whole(src)
        _close(made, want)
        assert [each.stride() for each in made] == [each.stride() for each in want]
    _close(whole(src.to(memory_format=torch.channels_last)), want)  # in no arena: torch joins


class Excited(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, src: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.relu(src * torch.sigmoid(self.gate(other))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operand_that_a_plan_makes_is_read_in_each_call(dtype: torch.dtype) -> None:
    """A kernel takes the factor in float32, and a bfloat16 one is converted."""
    tensors = torch.randn(5, 16, dtype=dtype), torch.randn(2, 16, dtype=dtype)
    module = fused.fuse(Excited().to(dtype), *tensors)
    assert module.report.launches.kernels == 2
    for _ in range(2):
        tensors = torch.randn(5, 16, dtype=dtype), torch.randn(2, 16, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(module(*tensors), Excited.forward(module, *tensors))


class Turned(nn.Module):  # type: ignore[misc]
    """Rotary embedding, whose kernel packs its tables: of numbers, or of a call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.query = kind, nn.Linear(20, 24)

    def forward(self, src: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        query = self.query(src).view(2, 7, 2, 12).transpose(1, 2)
        places = torch.arange(7.0) if self.kind == "constant" else places
        angles = (places[:, None] * 10.0 ** -torch.arange(6)).repeat(1, 2)
        first, second = query.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return query * (angles.cos() * 0.5) + turned * (angles.sin() * 0.5)


class Scaled(nn.Module):  # type: ignore[misc]
    """A kernel that packs a column of what a plan makes, and reads a value of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(20, 9), nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5))

    def forward(self, src: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        made = self.linear(src) * self.scales(rows)[:, 1]
        return F.relu(made + between(src[..., :9].contiguous()))


@pytest.mark.parametrize("kind", ["constant", "call", "scaled"])
def test_operands_are_packed_when_they_are_there(kind: str) -> None:
    """And not before a plan has made them; nor is any kept for longer than it is read."""
    module = Scaled().eval() if kind == "scaled" else Turned(kind).eval()
    rows = (9, 7) if kind == "scaled" else (7,)
    whole = fused.fuse(module, torch.randn(2, 7, 20), torch.randn(rows))
    assert any(word in str(each.plan) for each in whole.fusion.cut.sites for word in ("rotary", "scale ->"))
    for _ in range(3):
        src, places = torch.randn(2, 7, 20), torch.randn(rows)
        _close((whole(src, places),), (module(src, places),))
    if kind == "scaled":
        kernel = kernel_on("[bsc] -> linear(9) -> bias -> scale -> add -> relu", src)
        assert len(kernel._packed) == 1


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
    module, whole, arenas = _made()
    for stream in (7, 9, 0, 7, 9, 0):
        queue.now = stream
        src = torch.randn(SHAPE)
        _close(whole(src), module(src))
    assert {stream: len(free) for stream, free in arenas._free.items()} == {7: 1, 9: 1, 0: 1}
    places = [_places(free[0]) for free in arenas._free.values()]
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
    module, whole, arenas = _made()
    src = torch.randn(SHAPE)
    queue.capturing = True
    _close(whole(src), module(src))  # before any other call
    assert not any(arenas._free.values())
    assert kept
    assert not any(kept), "elements that are there when a graph has run"
    queue.capturing = False
    _close(whole(src), module(src))
    (arena,) = arenas._free[7]
    held, packed = arena.held, [dict(each) for each in kept]
    assert any(packed)
    queue.capturing = True
    module.first.weight.mul_(2)
    _close(whole(src), module(src))
    assert arenas._free[7] == [arena]
    assert arena.held is held
    assert [each.keys() for each in kept] == [each.keys() for each in packed]
    queue.capturing, waits = False, queue.waits
    _close(whole(src), module(src))
    assert queue.waits > waits, "launches of calls before read what is dropped now"


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
        _close((whole(src),), (module(src),))


# ---- what was written, where, and what else may read


class Placed(nn.Module):  # type: ignore[misc]
    """A weight, which kernels pack, and one per element, which they read where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(20, 16), nn.Linear(16, 3)
        self.places = nn.Parameter(torch.randn(5, 16))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.linear(src) + self.places))


def test_launches_are_bound_anew_where_they_have_copies() -> None:
    module, src = Placed(), torch.randn(5, 20)
    whole = fused.fuse(module, src)
    arenas = whole.fusion._planned
    whole(src)
    for tensor, is_copied in ((module.linear.weight, True), (module.places, False), (module.last.bias, True)):
        (arena,) = arenas._free[0]
        held = arena.held
        tensor.mul_(1.25)
        _close((whole(src),), (module(src),))
        assert (arena.held is not held) == is_copied
        _close((whole(src),), (module(src),))
    module.places = whole.places = nn.Parameter(torch.randn(5, 16))
    _close((whole(src),), (module(src),))


@torch.library.custom_op("fuseplan_tests_c10d::reduce", mutates_args=())  # type: ignore[untyped-decorator]
def reduce(src: torch.Tensor) -> torch.Tensor:
    """Stands for an exchange between processes, which goes on while others compute."""
    return src * 2


@reduce.register_fake  # type: ignore[untyped-decorator]
def _(src: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(src)


class Exchanged(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.last(reduce(F.relu(self.first(src))))


def test_what_processes_exchange_is_no_memory_of_later_values() -> None:
    module, src = Exchanged(), torch.randn(4, 8)
    whole = fused.fuse(module, src)
    assert not whole.fusion._planned._lives.buffers
    _close((whole(src),), (module(src),))


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
        _close(compiled(src), module(src))  # type: ignore[arg-type]
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
