"""torch's tensors on the CPU: kernels read and write plain ones, and refuse every other before a launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.tensors import torch_tensors
from fuseplan.tensors.torch_tensors import torch_form

SHAPE = (4, 64)
ADD = "f32[4x64] -> add"


@pytest.fixture(scope="module")
def relu() -> fuseplan.CompiledPlan:
    return fuseplan.compile("f32[4x64] -> relu", cache=False)


@pytest.fixture(scope="module")
def add() -> fuseplan.CompiledPlan:
    return fuseplan.compile(ADD, cache=False)


@pytest.fixture
def src() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """A tensor whose elements are another's: its own memory is not there."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody asked")


class Plain(torch.Tensor):  # type: ignore[misc]
    """A subclass that has its own memory."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(SHAPE)


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.zeros(SHAPE))


def shrunk(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(SHAPE)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "negative bit": (lambda: torch._neg_view(torch.ones(SHAPE)), "resolve_neg"),
    "imaginary part of a conjugate": (
        lambda: torch.randn(4, 64, dtype=torch.complex64).conj().imag,
        "resolve_neg",
    ),
    "conjugate": (lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj(), "dtype torch.complex64"),
    "integers": (lambda: torch.zeros(SHAPE, dtype=torch.uint32), "dtype torch.uint32"),
    "fake": (fake, "is a FakeTensor, which has no memory of its own"),
    "wrapper": (lambda: Wrapper(torch.zeros(SHAPE)), "is a Wrapper, which has no memory of its own"),
    "functional": (functional, "has no memory"),
    "meta": (lambda: torch.zeros(SHAPE, device="meta"), "is on meta; this target reads host memory"),
    "zero": (lambda: torch._efficientzerotensor(SHAPE), "has no memory"),
    "sparse": (lambda: torch.zeros(SHAPE).to_sparse(), "layout torch.sparse_coo.*to_dense"),
    "sparse rows": (lambda: torch.zeros(SHAPE).to_sparse_csr(), "layout torch.sparse_csr.*to_dense"),
    "oneDNN's": (lambda: torch.zeros(SHAPE).to_mkldnn(), "layout torch._mkldnn.*to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(SHAPE), 0.1, 0, torch.qint8), "dequantize"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(64)] * 4), "to_padded_tensor"),
    "uninitialized": (torch.nn.UninitializedParameter, "uninitialized parameter"),
    "freed": (lambda: shrunk(0), "beyond its storage of 0 bytes"),
    "gradient": (lambda: torch.zeros(SHAPE, requires_grad=True), r"no_grad\(\).*detach\(\)"),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(SHAPE)), r"no_grad\(\).*detach\(\)"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of prototypes
@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("place", ["src", "out", "operand"])
def test_no_odd_tensor_is_read_or_written(
    relu: fuseplan.CompiledPlan, add: fuseplan.CompiledPlan, src: torch.Tensor, case: str, place: str
) -> None:
    make, says = ODD[case]
    odd, out = make(), torch.full(SHAPE, 7.0)
    bound = relu.bind()
    bound(src, torch.empty(SHAPE))
    calls: dict[str, tuple[Callable[[], Any], ...]] = {
        "src": (lambda: relu(odd, out), lambda: bound(odd, out), lambda: bound(odd)),
        "out": (lambda: relu(src, odd), lambda: bound(src, odd)),
        "operand": (
            lambda: add(src, out, other=odd),
            lambda: add.bind(other=odd),
            lambda: add.bind()(src, out, other=odd),
        ),
    }
    for call in calls[place]:
        with pytest.raises(ArgumentError, match=says):
            call()
    assert (out == 7).all(), "a refused call writes nothing"


def test_a_tensor_larger_than_its_storage_is_refused(relu: fuseplan.CompiledPlan, src: torch.Tensor) -> None:
    for given in ((shrunk(64), torch.empty(SHAPE)), (shrunk(64),), (src, shrunk(64))):
        with pytest.raises(ArgumentError, match="beyond its storage of 64 bytes"):
            relu.bind()(*given)


def test_a_lazy_negation_that_is_resolved_is_right(relu: fuseplan.CompiledPlan) -> None:
    negated = torch.complex(torch.ones(SHAPE), torch.full(SHAPE, -3.0)).conj().imag
    assert torch.equal(relu(negated.resolve_neg().contiguous()), torch.full(SHAPE, 3.0))


def test_subclasses_with_memory_are_taken(relu: fuseplan.CompiledPlan, src: torch.Tensor) -> None:
    for tensor in (src.as_subclass(Plain), torch.nn.Parameter(src, requires_grad=False)):
        assert torch.equal(relu(tensor), src.relu())


# ---- gradients, transforms, traces


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_taken_where_no_gradient_is_recorded(
    add: fuseplan.CompiledPlan, src: torch.Tensor, mode: Callable[[], Any]
) -> None:
    parameter, grown = torch.nn.Parameter(torch.ones(SHAPE)), src.clone().requires_grad_()
    out = torch.empty(SHAPE, requires_grad=True)
    with mode():
        bound = add.bind(other=parameter)
        for tensor in (src, grown, parameter):
            assert torch.equal(bound(tensor), tensor + 1)
            assert torch.equal(bound(tensor, out), tensor + 1)
            assert torch.equal(add(tensor, other=grown), tensor + src)
    for call in (lambda: bound(grown), lambda: bound(src, out), lambda: add.bind(other=parameter)):
        with pytest.raises(ArgumentError, match="requires a gradient"):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it uses itself
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_what_torch_transforms_is_refused(relu: fuseplan.CompiledPlan, src: torch.Tensor) -> None:
    bound = relu.bind()
    bound(src)
    outside = "call the plan outside of torch's transforms"

    def closed_over(x: torch.Tensor) -> torch.Tensor:
        return (x * bound(src)).sum()

    calls: tuple[Callable[[], Any], ...] = (
        lambda: torch.func.vmap(bound)(src[None]),
        lambda: torch.func.grad(lambda x: bound(x).sum())(src),
        lambda: torch.func.grad(closed_over)(src),
        lambda: torch.func.jvp(bound, (src,), (src,)),
        lambda: torch.func.functionalize(bound)(src),
    )
    for transformed in calls:
        with pytest.raises(ArgumentError, match=outside):
            transformed()
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match=r"tangent.*unpack_dual"):
        bound(forward_ad.make_dual(src, src))
    with forward_ad.dual_level():
        assert torch.equal(bound(src), src.relu()), "it has no tangent"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_trace_is_refused_and_not_filled_with_constants(
    relu: fuseplan.CompiledPlan, src: torch.Tensor
) -> None:
    bound, out = relu.bind(), torch.empty(SHAPE)
    bound(src, out)

    def plain(x: torch.Tensor) -> Any:
        return relu(x)

    def into(x: torch.Tensor) -> Any:
        return bound(x, out)

    for traced in (plain, into):
        with pytest.raises(ArgumentError, match="trace cannot record a kernel"):
            torch.jit.trace(traced, src)
        with pytest.raises(ArgumentError, match="trace cannot record a kernel"):
            make_fx(traced)(src)
    with pytest.raises(ArgumentError, match=r"torch\.fx traces"):
        torch.fx.symbolic_trace(plain)
    assert torch.equal(bound(src), src.relu())


def test_modes_that_make_no_memory_are_told(relu: fuseplan.CompiledPlan, src: torch.Tensor) -> None:
    bound = relu.bind()
    with torch.device("meta"):
        assert torch.equal(bound(src), src.relu()), "the output is made where src is"
    with FakeTensorMode(), pytest.raises(ArgumentError, match="no memory for the output"):
        bound(src)


# ---- version counters


@pytest.fixture(params=[True, False], ids=["torch's check", "without it"])
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_tensors, "_has_guards", lambda: request.param)
    yield
    gc.collect()


@pytest.mark.usefixtures("_quick")
def test_writing_out_raises_its_version(relu: fuseplan.CompiledPlan, src: torch.Tensor) -> None:
    bound = relu.bind()
    whole = torch.empty(8, 64)
    out = whole[:4]
    calls: list[Callable[..., Any]] = [relu, bound, bound, bound]
    for count, call in enumerate(calls, 1):
        assert call(src, out) is out
        assert whole._version == count, "a view has its base's counter"
    with pytest.raises(ArgumentError, match="overlaps"):
        bound(out, out)
    assert whole._version == 4, "nothing was written"


def test_autograd_notices_a_saved_tensor_that_a_kernel_overwrote(
    relu: fuseplan.CompiledPlan, src: torch.Tensor
) -> None:
    bound = relu.bind()
    for _ in range(2):
        saved = src.clone()
        loss = (saved * torch.ones(SHAPE, requires_grad=True)).sum()
        bound(src, saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("_quick")
def test_tensors_of_inference_mode_are_written_in_any_mode(
    relu: fuseplan.CompiledPlan, src: torch.Tensor
) -> None:
    bound = relu.bind()
    with torch.inference_mode():
        out = torch.empty(SHAPE)
    plain = torch.empty(SHAPE)
    for _ in range(2):
        for into in (out, plain):
            assert torch.equal(bound(src, into), src.relu())
            with torch.inference_mode():
                assert torch.equal(bound(src, into), src.relu())
    assert plain._version == 4


def test_results_that_are_written_raise_their_versions() -> None:
    compiled = fuseplan.compile("f32[4x8] -> batch_norm_training(running=True)", cache=False)
    given = {key: torch.ones(8) for key in ("scale", "shift")}
    running = {each.key: torch.ones(8) for each in compiled.plan.results if each.updated}
    src = torch.randn(4, 8)
    compiled(src, **given, **running)
    assert [each._version for each in running.values()] == [1] * len(running)
    bound = compiled.bind(**given, **running)
    bound(src)
    bound(src)
    assert [each._version for each in running.values()] == [3] * len(running)


def test_a_torch_that_counts_otherwise_is_asked_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_one(tensor: torch.Tensor) -> None:
        raise TypeError("a tensor, not a list")

    monkeypatch.setattr(torch._C, "_increment_version", takes_one)
    assert torch_tensors._counting.__wrapped__() is torch.autograd.graph.increment_version


def test_a_torch_that_does_not_tell_its_modes_is_checked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder, name in ((torch._C, "_len_torch_dispatch_stack"), (forward_ad, "_current_level")):
        with monkeypatch.context() as patch:
            patch.delattr(holder, name)
            assert torch_tensors._modes.__wrapped__().stacked() == 1


# ---- forms


@pytest.mark.usefixtures("_quick")
def test_a_form_knows_its_like() -> None:
    tensor = torch.zeros(2, 3, 4)
    form = torch_form(tensor)
    assert form is not None
    assert form.address(tensor) == tensor.data_ptr()
    tensor.set_(torch.ones(2, 3, 4))
    assert form.address(tensor) == tensor.data_ptr(), "the pointer is read anew"
    grown = torch.zeros(2, 3, 4, requires_grad=True)
    odd = (torch._neg_view(tensor), torch._efficientzerotensor((2, 3, 4)), fake(), 1.0)
    for unlike in (tensor.double(), tensor.mT, grown, tensor[:1], tensor.numpy(), *odd):
        assert not form.address(unlike)
    with torch.no_grad():
        assert form.address(grown)
    assert not form.address(grown), "what passed without gradients does not pass with them"
    assert form.address(torch.zeros(2, 3, 4))
    assert torch_form(tensor.as_subclass(Plain)) is None
