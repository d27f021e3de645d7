"""Which tensors a plan on a GPU takes: others are refused before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuseplan
from fuseplan import Arguments
from fuseplan.backends.triton import memory
from fuseplan.backends.triton.memory import GpuMemory
from fuseplan.errors import ArgumentError
from fuseplan.tensors import torch_tensors
from fuseplan.tensors.torch_tensors import TorchForm
from pretend_gpu import Machine, machine
from toy_chain import PLAN, SIZE, Tensors, ToyChain, chain, random_tensors, split, wanted


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the module: the toys are compiled once."""
    made = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEPLAN_CACHE_DIR", str(made))
        yield made


@pytest.fixture
def gpu() -> Iterator[Machine]:
    with machine(ToyChain) as made:
        made.driver.meaning = chain
        yield made


@pytest.fixture
def tensors() -> Tensors:
    return random_tensors()


# ---- what is refused, before anything is launched


class Exported:
    """A CPU tensor that says it lies on a GPU."""

    def __init__(self, tensor: torch.Tensor, device: tuple[int, int] = (2, 0)) -> None:
        self.tensor, self.device = tensor, device
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> object:
        self.streams.append(stream)
        return self.tensor.__dlpack__()


class Interfaced:
    """The same by `__cuda_array_interface__`."""

    def __init__(self, tensor: torch.Tensor, **changes: Any) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
            **changes,
        }


def negated() -> torch.Tensor:
    return torch.randn(4, 64, dtype=torch.complex64).conj().imag


def freed(nbytes: int) -> torch.Tensor:
    """A tensor whose storage was given back."""
    tensor = torch.zeros(4, 64)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "numpy": (
        lambda: np.zeros((4, 64), np.float32),
        r"`src` is an ndarray in the host's memory.*\.to\('cpu'\)",
    ),
    "list": (lambda: [1.0], "`src` is a list; want a tensor on"),
    "other device": (lambda: torch.zeros(4, 64, device="meta"), "`src` is on meta, and this plan runs on"),
    "dtype": (lambda: torch.zeros(4, 64).half(), r"got f16\[4x64\]; want f32\[4x64\]"),
    "integers": (lambda: torch.zeros(4, 64, dtype=torch.uint32), "dtype torch.uint32; want float64"),
    "shape": (lambda: torch.zeros(3, 64), r"got f32\[3x64\]; want f32\[4x64\]"),
    "layout": (lambda: torch.zeros(64, 4).t(), "the layout differs"),
    "sparse": (lambda: torch.zeros(4, 64).to_sparse(), "to_dense"),
    "gradient": (lambda: torch.zeros(4, 64, requires_grad=True), "detach"),
    "negated": (negated, "resolve_neg|layout differs"),
    "misaligned": (lambda: torch.zeros(SIZE + 1)[1:].view(4, 64), "not a multiple of 16 bytes.*clone"),
    "freed": (lambda: freed(0), "beyond its storage of 0 bytes|no memory"),
    "dlpack elsewhere": (lambda: Exported(torch.zeros(4, 64), (2, 1)), "on cuda:1, .* runs on cuda:0"),
    "dlpack on the host": (lambda: Exported(torch.zeros(4, 64), (1, 0)), "in the host's memory"),
    "interface type": (lambda: Interfaced(torch.zeros(4, 64), typestr="<u4"), "'<u4'"),
    "interface mask": (lambda: Interfaced(torch.zeros(4, 64), mask=1), "masked"),
    "interface null": (lambda: Interfaced(torch.zeros(4, 64), data=(0, False)), "no memory|on cuda"),
    "interface strides": (lambda: Interfaced(torch.zeros(4, 64), strides=(255, 4)), "not aligned"),
}


WARMTH = pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "after a right call"])
QUICKNESS = pytest.mark.parametrize("is_quick", [True, False], ids=["torch's check", "without it"])


@pytest.mark.parametrize("case", REFUSED)
@WARMTH
@QUICKNESS
def test_no_other_tensor_is_read(
    gpu: Machine,
    tensors: Tensors,
    case: str,
    is_warm: bool,
    is_quick: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_tensors, "_has_guards", lambda: is_quick)
    make, says = REFUSED[case]
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    if is_warm:
        bound(src, torch.empty(4, 64))
    before = len(gpu.launches)
    with pytest.raises(ArgumentError, match=says) as raised:
        bound(make(), torch.empty(4, 64))
    assert raised.value.told(lambda tensor: f"the caller's {tensor.key}").startswith("the caller's src ")
    assert len(gpu.launches) == before


def test_a_tensor_larger_than_its_storage_is_refused(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    compiled = fuseplan.compile(PLAN, "cuda")
    for out in (None, freed(100)):
        with pytest.raises(ArgumentError, match="beyond its storage of 100 bytes: was it resized"):
            compiled.bind(**given)(freed(100) if out is None else src, out)
    assert gpu.launches == []


@WARMTH
@QUICKNESS
def test_out_must_lie_apart_and_right(
    gpu: Machine, tensors: Tensors, is_warm: bool, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_tensors, "_has_guards", lambda: is_quick)
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    if is_warm:
        bound(src, torch.empty(4, 64))
    before = len(gpu.launches)
    whole = torch.zeros(2 * SIZE)
    for out, says in (
        (src, "`out` overlaps `src`"),
        (given["other"], "`out` overlaps operand `other`"),
        (whole[1 : SIZE + 1].view(4, 64), "not a multiple of 16"),
        (torch.zeros(4, 64).double(), "`out` does not match the plan"),
        (np.zeros((4, 64), np.float32), "`out` is an ndarray"),
        (torch.zeros(4, 64, requires_grad=True), "detach"),
    ):
        with pytest.raises(ArgumentError, match=says):
            bound(src, out)
    with pytest.raises(ArgumentError, match="`out` overlaps `src`"):
        bound(whole[:SIZE].view(4, 64), whole[4 : SIZE + 4].view(4, 64))
    assert len(gpu.launches) == before


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_this_torch_has_the_quick_check(mode: Callable[[], Any]) -> None:
    with mode():
        assert torch_tensors._has_guards.__wrapped__()


class Asking(TorchDispatchMode):  # type: ignore[misc]
    """Asks a form, inside of torch's dispatcher, about a view that negates its memory."""

    def __init__(self, form: TorchForm, tensor: torch.Tensor) -> None:
        super().__init__()
        self.form, self.tensor, self.told = form, tensor, list[bool]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.told += [torch_tensors._has_guards.__wrapped__(), bool(self.form.address(self.tensor))]
        return func(*args, **kwargs or {})


def test_torchs_dispatcher_hides_no_negation() -> None:
    tensor = torch.randn(4, 64)
    with Asking(TorchForm(tensor), torch._neg_view(tensor)) as mode:
        torch.neg(tensor)
    assert mode.told == [True, False]


def test_tensors_like_those_that_passed_are_not_looked_at_again(
    gpu: Machine, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    bound(src)
    monkeypatch.delattr(TorchForm, "fits")
    monkeypatch.delattr(GpuMemory, "view")
    for out in (None, torch.empty(4, 64)):
        torch.testing.assert_close(bound(src.clone(), out), wanted(tensors))


def test_a_torch_whose_quick_check_overlooks_something_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_shapes(*like: torch.Tensor) -> torch_tensors.Likeness:
        return lambda *given: all(
            isinstance(each, torch.Tensor) and each.shape == wanted.shape
            for each, wanted in zip(given, like, strict=True)
        )

    def missing(*like: torch.Tensor) -> torch_tensors.Likeness:
        raise ImportError("TensorGuards")

    for guards in (of_shapes, missing):
        monkeypatch.setattr(torch_tensors, "_guards", guards)
        assert not torch_tensors._has_guards.__wrapped__()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "transposed": lambda tensor: tensor.resize_(64, 4).t_(),
    "shrunk": lambda tensor: tensor.resize_(2, 64),
    "another dtype": lambda tensor: setattr(tensor, "data", tensor.data.half()),
    "moved by an element": lambda tensor: tensor.set_(torch.zeros(SIZE + 1)[1:].view(4, 64)),
    "a gradient": lambda tensor: tensor.requires_grad_(),
    "no memory": lambda tensor: tensor.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["src", "out", "src for a new one"])
def test_a_tensor_that_passed_and_was_changed_is_refused(
    gpu: Machine, tensors: Tensors, change: str, which: str
) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    out = torch.empty(4, 64)
    bound(src, out)
    bound(src, out)
    CHANGES[change](out if which == "out" else src)
    with pytest.raises(ArgumentError):
        bound(src, None if which == "src for a new one" else out)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("which", ["src", "src for a new one", "out"])
def test_a_gradient_is_refused_where_torch_records_them(gpu: Machine, tensors: Tensors, which: str) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    src.requires_grad_(which != "out")
    out = None if "new" in which else torch.empty(4, 64, requires_grad=which == "out")
    for mode in (torch.no_grad, torch.inference_mode) * 2:
        with mode():
            torch.testing.assert_close(bound(src, out).detach(), wanted(tensors))
        with pytest.raises(ArgumentError, match="no_grad"):
            bound(src, out)
    assert len(gpu.launches) == 4


def test_out_moved_onto_what_is_read_is_refused(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    out = torch.empty(4, 64)
    bound(src, out)
    for read in (src, given["other"]):
        out.set_(read)
        with pytest.raises(ArgumentError, match="`out` overlaps"):
            bound(src, out)
    assert len(gpu.launches) == 1


def test_modes_of_torch_change_nothing(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    out = torch.empty(4, 64)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for result in (bound(src, out), bound(src), bound(src, torch.empty(4, 64))):
                torch.testing.assert_close(result, wanted(tensors))
            with pytest.raises(ArgumentError, match="want f32"):
                bound(src, torch.empty(4, 64).half())
    assert len(gpu.launches) == 12


def test_operands_are_checked_like_src(gpu: Machine, tensors: Tensors) -> None:
    compiled = fuseplan.compile(PLAN, "cuda")
    src, given = split(tensors)
    misaligned = torch.zeros(SIZE + 1)[1:].view(4, 64)
    for key, value, says in (
        ("scale", np.zeros(64, np.float32), "operand `scale` is an ndarray in the host's memory"),
        ("scale", torch.zeros(64, device="meta"), "operand `scale` is on meta"),
        ("scale", torch.zeros(63), "wrong shape"),
        ("other", torch.zeros(64, 4).t(), "wrong layout"),
        ("other", misaligned, "operand `other` begins at an address"),
    ):
        with pytest.raises(ArgumentError, match=says):
            compiled.bind(**{key: value})
        with pytest.raises(ArgumentError, match=says):
            compiled(src, **given | {key: value})
    out = given["scale"].repeat(4).view(4, 64)
    with pytest.raises(ArgumentError, match="`out` overlaps operand `scale`"):
        compiled(src, out, scale=out[1], other=given["other"])
    assert gpu.launches == []


# ---- other packages' tensors


def test_dlpack_is_read_in_order_with_our_stream(
    gpu: Machine, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuMemory, "_torch_view", lambda self, owner: owner.tensor)
    foreign = {key: Exported(tensor) for key, tensor in tensors.items()}
    src, given = foreign.pop("src"), foreign
    out = Exported(torch.empty(4, 64))
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    assert bound(src, out) is out
    torch.testing.assert_close(out.tensor, wanted(tensors))
    gpu.queues[0].now = 0
    bound(src, out)
    assert src.streams == [7, 1], "the legacy stream is called 1"


def test_the_cuda_array_interface_is_read(
    gpu: Machine, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_index_of", lambda tensor: 0)
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    torch.testing.assert_close(bound(Interfaced(src, strides=(256, 4))), wanted(tensors))
    readonly = Interfaced(torch.empty(4, 64), data=(torch.empty(4, 64).data_ptr(), True))
    with pytest.raises(ArgumentError, match="read-only"):
        bound(src, readonly)
    monkeypatch.setattr(memory, "_index_of", lambda tensor: 1)
    with pytest.raises(ArgumentError, match="on cuda:1"):
        bound(Interfaced(src))


def test_arguments_may_lie_anywhere_until_they_are_used(gpu: Machine) -> None:
    plan = fuseplan.FusionPlan.parse(PLAN)
    given = Arguments(plan, scale=torch.zeros(64, device="meta"), other=Exported(torch.zeros(4, 64)))
    given.set(scale=Interfaced(torch.zeros(64)))
    with pytest.raises(ArgumentError, match="wrong shape"):
        given.set(scale=torch.zeros(65, device="meta"))
    with pytest.raises(ArgumentError, match="uint32"):
        given.set(scale=torch.zeros(64, dtype=torch.uint32, device="meta"))
