"""Calls of fused modules whose values share memory that is planned once."""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import fuseplan.torch as fused
from arena_modules import SHAPE, Joining, between, close, made
from fuseplan.execution.run import BoundPlan
from fuseplan.torch import arenas
from fuseplan.torch.kernels import kernel_on
from fuseplan.torch.lifetimes import function_of

F = nn.functional


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def test_results_are_nobody_elses() -> None:
    module, whole, arenas = made()
    one, other = torch.randn(SHAPE), torch.randn(SHAPE)
    want = module(one), module(other)
    first = whole(one)
    kept = [each.clone() for each in first]
    close(first, want[0])
    close(whole(other), want[1])
    assert all(torch.equal(each, was) for each, was in zip(first, kept, strict=True))
    with torch.inference_mode():
        close(whole(one), want[0])
    close(whole(one), want[0])
    assert [*map(len, arenas._free.values())] == [1]  # all calls had the one


def test_what_lies_as_it_should_is_not_laid_out() -> None:
    module, src = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)), torch.randn(1, 4, 8, 8)
    for given, copies in ((src, 2), (src.to(memory_format=torch.channels_last), 0)):
        whole = fused.fuse(module, given)
        text = str(whole.fusion._planned._run.__self__.code)
        assert text.count("laid_out(") == copies
        with torch.no_grad():
            made = whole(given)
            torch.testing.assert_close(made, module(given), rtol=1e-4, atol=1e-5)
        assert made.stride() == module(given).stride()


def test_values_share_memory_that_their_sum_exceeds() -> None:
    _, _, arenas = made()
    buffers = list(arenas._lives.buffers.values())
    assert arenas._bytes < sum(each.nbytes for each in buffers)
    pairs = ((a, b) for a in buffers for b in buffers if a is not b)
    for one, other in pairs:
        lives_apart = one.last < other.first or other.last < one.first
        lies_apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
        assert lives_apart or lies_apart


def test_calls_at_once_have_arenas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, whole, arenas = made()
    tensors = [torch.randn(SHAPE) for _ in range(2)]
    want = [module(each) for each in tensors]
    monkeypatch.setattr("arena_modules.waits", threading.Barrier(2, timeout=60).wait)

    def call(src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            made: tuple[torch.Tensor, ...] = whole(src)
            return made

    with ThreadPoolExecutor(2) as pool:
        for got, exact in zip(pool.map(call, tensors), want, strict=True):
            close(got, exact)
    assert [*map(len, arenas._free.values())] == [2]


def test_changed_weights_are_seen() -> None:
    module, whole, arenas = made()
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
        close(whole(src), module(src))
    twin = copy.deepcopy(whole)
    twin.more[0].weight.zero_()
    close(whole(src), module(src))
    own = twin.fusion._planned
    assert own is not arenas
    assert not own._free
    close(twin(src), type(module).forward(twin, src))


def test_calls_whose_tensors_lie_otherwise_are_torchs() -> None:
    module, whole, arenas = made()
    src = torch.randn(SHAPE)
    close(whole(src.to(memory_format=torch.channels_last)), module(src))
    assert not arenas._free
    whole.requires_grad_(False)
    with torch.enable_grad():
        close(whole(src), module(src))
    assert arenas._free


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
        close(made, want)
        assert [each.stride() for each in made] == [each.stride() for each in want]
    close(whole(src.to(memory_format=torch.channels_last)), want)  # in no arena: torch joins


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
        close((whole(src, places),), (module(src, places),))
    if kind == "scaled":
        kernel = kernel_on("[bsc] -> linear(9) -> bias -> scale -> add -> relu", src)
        assert not kernel._packed


class Fed(nn.Module):  # type: ignore[misc]
    """Kernels that read what a call gives, and a column, a row and a turned value of torch's.

    The column has gaps; the row is too short for a vector, and the kernel packs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 5)

    def forward(self, src: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        made = src * self.first(src) + src
        made = self.last(made) * between(gates)[..., 1:2]
        return (made * between(rows)[0]).sum(-1) + between(gates.transpose(0, 1)).transpose(0, 1)[..., 0]


def anywhere(*shape: int) -> torch.Tensor:
    """Random numbers that begin at a multiple of 64 bytes, or not."""
    count = torch.Size(shape).numel()
    return torch.randn(1 + count)[torch.randint(2, ()) :][:count].view(shape)


def test_operands_of_a_call_are_given_to_bound_launches() -> None:
    module = Fed().eval()
    whole = fused.fuse(module, *map(torch.randn, ((2, 7, 20), (2, 7, 3), (2, 5))))
    assert len(whole.fusion._planned._lives.bound) == len(whole.fusion.cut.sites) == 3
    for place in range(12):
        given = anywhere(2, 7, 20), anywhere(2, 7, 3), anywhere(2, 5)
        close((whole(*given),), (module(*given),))
        if place == 5:
            module.first.weight.add_(1)


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
        (arena,) = arenas._free[0][0].bound
        held = arena.held
        tensor.mul_(1.25)
        close((whole(src),), (module(src),))
        assert (arena.held is not held) == is_copied
        close((whole(src),), (module(src),))
    module.places = whole.places = nn.Parameter(torch.randn(5, 16))
    close((whole(src),), (module(src),))


@torch.library.custom_op("fuseplan_tests_c10d::reduce", mutates_args=())  # type: ignore[untyped-decorator]
def reduce(src: torch.Tensor) -> torch.Tensor:
    """Stands for an exchange between processes, which goes on while others compute."""
    return src * 2


@reduce.register_fake  # type: ignore[untyped-decorator]
def _(src: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(src)


class Laid(nn.Module):  # type: ignore[misc]
    """Copies of what plans make, which plans read, and one that leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(5, 7)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = F.relu(self.first(src))
        turned = rows.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return F.gelu(self.last(turned)), rows.mT.clone()


def test_copies_of_known_values_have_their_places() -> None:
    module, src = Laid(), torch.randn(3, 5, 20)
    whole = fused.fuse(module, src)
    lives = whole.fusion._planned._lives
    (copied,) = lives.copied
    assert copied in lives.buffers
    assert sum(node.args[1] not in lives.known for node in lives.bound) == 1
    results = [whole(each) for each in (src, 2 * src, src)]
    for got, each in zip(results, (src, 2 * src, src), strict=True):
        close(got, module(each))
        assert [one.stride() for one in got] == [one.stride() for one in module(each)]


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
    close((whole(src),), (module(src),))


class Stepped(nn.Module):  # type: ignore[misc]
    """Kernels that read steps of one row, and a range with gaps of what a plan makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(6, 40)

    def forward(self, src: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        state, ranges = between(src[:, 0]), self.weights(rows)[:, 8:24]
        for step in range(1, src.shape[1]):
            state = between(torch.tanh(state - src[:, step]))
        return F.relu(between(src) + ranges[:, None]) * state[:, None]


@pytest.mark.parametrize("batch", [1, 2])
def test_launches_on_a_calls_tensors_are_bound(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls neither go through the operator nor are checked anew; axes of one element lie anyhow."""
    shapes = (batch, 5, 16), (batch, 6)
    module = Stepped().eval()
    whole = fused.fuse(module, *map(torch.randn, shapes))
    whole(*map(torch.randn, shapes))
    monkeypatch.setattr(arenas, "launched", None)
    monkeypatch.setattr(BoundPlan, "_checked", None)
    for _ in range(2):
        given = [*map(torch.randn, shapes)]
        close((whole(*given),), (module(*given),))


class Gated(nn.Module):  # type: ignore[misc]
    """A factor of each row that a call computes: a kernel reads zeros behind them, to the end of a vector."""

    def forward(self, src: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return F.relu(between(src) * between(rows)[:, None])


def test_operands_of_a_call_that_end_inside_of_a_vector_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, module = ((30, 16), (30,)), Gated().eval()
    whole = fused.fuse(module, *map(torch.randn, shapes))
    with torch.inference_mode():
        whole(*map(torch.randn, shapes))
    monkeypatch.setattr(BoundPlan, "_checked", None)
    for _ in range(2):
        given = [*map(torch.randn, shapes)]
        close((whole(*given),), (module(*given),))


def test_functions_of_torchs_own_take_what_its_operators_take() -> None:
    """Every name that is called by another way than the operator, with the arguments that graphs have."""
    src, places, mask = (
        torch.rand(4, 6),
        torch.tensor([[0, 2], [1, 1], [0, 0], [3, 4]]),
        torch.rand(4, 6) > 0.5,
    )
    given: dict[str, tuple[Any, ...]] = {
        "unbind.int": (src, 1), "expand.default": (src, [3, -1, -1]), "repeat.default": (src, [2, 1]),
        "roll.default": (src, [1, 2], [0, 1]), "gather.default": (src, 1, places),
        "scatter.src": (src, 1, places, src), "topk.default": (src, 2, -1, True, True), "max.dim": (src, 1),
        "amax.default": (src, [1], True), "sum.dim_IntList": (src, [1], True), "mean.dim": (src, [-1], True),
        "masked_fill.Scalar": (src, mask, -1.0), "index_add.default": (src, 0, places[0], src[:2]),
        "cos.default": (src,), "sin.default": (src,), "rsqrt.default": (src,), "pow.Tensor_Scalar": (src, 2),
        "zeros_like.default": (src,), "logical_not.default": (mask,),
    }  # fmt: skip
    given |= dict.fromkeys((f"{name}.Scalar" for name in ("ge", "gt", "le", "lt", "eq", "ne")), (src, 0.5))
    for name, args in given.items():
        operator, overload = name.split(".")
        target = getattr(getattr(torch.ops.aten, operator), overload)
        node = fx.Graph().call_function(target)
        kwargs = {"pin_memory": False} if operator == "zeros_like" else {}
        function = function_of(node, in_place=False)
        assert function is not target
        close(*(pytree.tree_leaves(call(*args, **kwargs)) for call in (function, target)))
