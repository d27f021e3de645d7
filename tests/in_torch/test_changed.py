"""Modules that change after they were fused, and transformed calls: right, or an error that tells."""

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError
from fuseplan.torch.dynamo import compile_graph


class Images(nn.Module):  # type: ignore[misc]
    """Batch norm of four channels: fewer than a vector, so that a kernel reads packed copies."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.conv(src)).relu())


class Rows(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(src))) + src


def _same(made: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(made, exact, rtol=1e-4, atol=1e-5)


def _compiled(module: Images, _: torch.Tensor) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, backend=compile_graph)  # type: ignore[no-any-return]


def _layers(module: Images, _: torch.Tensor) -> nn.Module:
    return fused.Fused(module.conv, module.norm, nn.ReLU()).eval()


@pytest.mark.parametrize("make", [fused.fuse, _compiled, _layers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_that_training_updates_are_seen(
    make: Callable[[nn.Module, torch.Tensor], Callable[..., torch.Tensor]], dtype: torch.dtype
) -> None:
    """torch writes them without raising their version counters."""
    torch.manual_seed(0)
    module, src = Images().eval().to(dtype), torch.randn(2, 3, 8, 8).to(dtype)
    whole = make(module, src)
    with torch.no_grad():
        before = whole(src)
        version = module.norm.running_mean._version
        module.norm.train()(5 * torch.rand(2, 4, 6, 6).to(dtype))
        module.eval()
        assert module.norm.running_mean._version == version
        made, exact = whole(src), module(src)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(made, exact, rtol=bound, atol=bound)
    assert (made - before).abs().max() > 0.1


def _replace(module: Rows) -> None:
    module.up = nn.Linear(6, 6)


def _untie(module: Rows) -> None:
    module.down.weight = nn.Parameter(torch.randn(6, 6))


class Words(nn.Embedding):  # type: ignore[misc]
    """A call whose tensors tell nothing of the parameters."""

    def __init__(self) -> None:
        super().__init__(9, 6)
        self.rows = Rows()

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.rows(super().forward(src))
        return made


def test_parameters_of_another_type_are_seen() -> None:
    module, src = Words(), torch.tensor([[1, 4, 8]])
    whole = fused.fuse(module, src)
    with torch.no_grad():
        _same(whole(src), module(src))
        module.double()
        with pytest.warns(UserWarning, match="other tensors, submodules"):
            assert whole(src).dtype == torch.float64
        module.float().rows.up.to("meta")
        with pytest.raises(RuntimeError, match="meta"):
            whole(src)
    with pytest.raises(ArgumentError, match=r"the tensors of `linear\(2\)` lie on cpu and meta"):
        fused.run("linear(2)", torch.randn(3, 4), weight=torch.randn(2, 4, device="meta"))


@pytest.mark.parametrize("change", [_replace, _untie])
def test_parts_that_are_replaced_are_seen(change: Callable[[Rows], None]) -> None:
    torch.manual_seed(0)
    module, src = Rows(), torch.randn(3, 6)
    module.down.weight = module.up.weight
    whole = fused.fuse(module, src)
    with torch.no_grad():
        _same(whole(src), module(src))
        change(module)
        with pytest.warns(UserWarning, match="other tensors, submodules"):
            _same(whole(src), module(src))


@pytest.mark.parametrize(
    ("kind", "is_own"),
    [
        ("forward", True),
        ("forward", False),
        ("forward_pre", True),
        ("forward_pre", False),
        ("full_backward", False),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_hooks_are_called_as_often_as_in_torch(kind: str, is_first: bool, is_own: bool) -> None:
    """Those of the module, and of a submodule, that come before the module is fused or go behind it."""
    torch.manual_seed(0)
    module, src = Rows().eval(), torch.randn(3, 6, requires_grad=True)
    calls: list[int] = []

    def hook(_: Any, given: Any, made: Any = None) -> Any:
        calls.append(1)
        return made * 2 if kind == "forward" else (given[0] * 2,)

    def gradient(called: nn.Module) -> torch.Tensor:
        (made,) = torch.autograd.grad(called(src).sum(), src)
        return made

    def hooked() -> Any:
        return getattr(module if is_own else module.up, f"register_{kind}_hook")(hook)

    handle = hooked() if is_first else None
    whole = fused.fuse(module, src)
    handle = handle or hooked()
    calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _same(gradient(whole), gradient(module))
        _same(whole(src), module(src))
        assert len(calls) in (2, 4)
        handle.remove()
        _same(whole(src), module(src))
        _same(gradient(whole), gradient(module))


def test_the_mode_of_one_submodule_is_seen() -> None:
    module, src = Images().eval(), torch.randn(2, 3, 8, 8) + 1
    whole = fused.fuse(module, src)
    whole.drop.train()
    with torch.no_grad(), pytest.warns(UserWarning, match="another mode"):
        assert (whole(src) == 0).float().mean() > (module.eval()(src) == 0).float().mean()


class Adapted(nn.Module):  # type: ignore[misc]
    """A layer with an adapter, which may be merged into the layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 6)
        self.merged, self.scaling, self.calls = list[str](), {"first": 0.5}, 0

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.merged:
            return self.layer(src)
        return self.layer(src) + self.up(self.down(src)) * self.scaling["first"]


def test_numbers_and_words_of_submodules_are_seen() -> None:
    """A number that a call itself has written is no change."""
    torch.manual_seed(0)
    module, src = nn.Sequential(Adapted(), nn.ReLU()).eval(), torch.randn(4, 6)
    made, adapted = fused.fuse(module, src), module[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale, merged in ((0.5, []), (0.5, ["first"]), (2.0, []), (0.5, [])):
            adapted.merged[:], adapted.scaling["first"] = merged, scale
            _same(made(src), module(src))
            _same(made(src), module(src))
            assert (made.fusion._held.current() is None) == (merged != [] or scale != 0.5)


def test_hooks_of_all_modules_are_called() -> None:
    module, src = Rows().eval(), torch.randn(4, 6)
    made = fused.fuse(module, src)
    hook = nn.modules.module.register_module_forward_hook(lambda *given: given[2] * 2)
    try:
        with pytest.warns(UserWarning, match="hooks"):
            _same(made(src), module(src))
    finally:
        hook.remove()


def test_one_tensor_in_two_places_of_the_example() -> None:
    class Product(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return one * torch.tanh(other) + self.weight

    module, one, other = Product(), torch.randn(3, 4), torch.randn(3, 4)
    for example in ((one, one), (module.weight, one)):
        whole = fused.fuse(module, *example)
        with torch.no_grad():
            _same(whole(one, other), module(one, other))


def test_gradients_of_gradients() -> None:
    """A penalty on the gradient, whose own gradient was silently none."""
    torch.manual_seed(0)
    module, src = Rows(), torch.randn(3, 6, requires_grad=True)
    whole, found = fused.fuse(module, src), []
    for each in (whole, module):
        (slope,) = torch.autograd.grad(each(src).square().sum(), src, create_graph=True)
        found.append(torch.autograd.grad(slope.norm(), [src, *module.parameters()], allow_unused=True))
    for made, exact in zip(*found, strict=True):
        _same(torch.zeros(1) if made is None else made, torch.zeros(1) if exact is None else exact)
    double = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: fused.run("linear(4) -> gelu", x, weight=weight), (double,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_forward_mode_is_torchs_or_refused() -> None:
    module, src = Rows(), torch.randn(3, 6)
    whole = fused.fuse(module, src)
    _same(torch.func.jvp(whole, (src,), (src,)), torch.func.jvp(module, (src,), (src,)))
    with torch.no_grad():
        _same(torch.func.jvp(whole, (src,), (src,)), torch.func.jvp(module, (src,), (src,)))
        with pytest.raises(ArgumentError, match=r"torch.func.jvp"):
            torch.func.jvp(lambda x: fused.run("relu", x), (src,), (src,))


def test_a_view_that_negates_its_storage() -> None:
    whole, src = fused.fuse(module := Rows(), torch.randn(3, 6)), torch.randn(3, 6, dtype=torch.complex64)
    with torch.no_grad():
        _same(whole(src.conj().imag), module(src.conj().imag))


def _in_autocast(call: Any, src: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(src).float()


def _in_inference(call: Any, src: torch.Tensor) -> Any:
    with torch.inference_mode():
        return call(src).clone()


def _replaced(call: Any, src: torch.Tensor) -> Any:
    call.up = nn.Linear(6, 6, bias=False)
    return call(src)


def _written(call: Any, src: torch.Tensor) -> Any:
    call.up.weight.detach().mul_(2)
    return call(src)


def _laid(call: Any, src: torch.Tensor) -> Any:
    call.up.weight.data = call.up.weight.t().contiguous().t()
    return call(src)


OTHERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "autocast": _in_autocast,
    "inference": _in_inference,
    "shape": lambda call, src: call(src[:2]),
    "strides": lambda call, src: call(src.t().contiguous().t()),
    "dtype": lambda call, src: call.double()(src.double()),
    "nested": lambda call, src: call(torch.nested.nested_tensor([src, src + 1])).unbind()[1],
    "negated": lambda call, src: call(torch._neg_view(src)),
    "by name": lambda call, src: call(src=src),
    "vmap": lambda call, src: torch.func.vmap(call)(src[None])[0],
    "replaced": _replaced,
    "written": _written,
    "laid": _laid,
}


@pytest.mark.parametrize("is_recording", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.filterwarnings("ignore:this call has other tensors", "ignore:The PyTorch API of nested")
def test_calls_unlike_those_before_are_seen(other: str, is_recording: bool) -> None:
    """After calls that one check has found to be alike."""
    module, src = Rows(), torch.randn(6, 6)
    whole = fused.fuse(module, src)
    with torch.set_grad_enabled(is_recording):
        for _ in range(4):
            _same(whole(src), module(src))
        torch.manual_seed(0)
        made = OTHERS[other](whole, src)
        torch.manual_seed(0)
        is_changed = other in ("written", "laid")  # in tensors that both have
        torch.testing.assert_close(
            made, module(src) if is_changed else OTHERS[other](module, src), rtol=1e-3, atol=1e-4
        )
        for _ in range(2):
            _same(whole(src.to(module.up.weight.dtype)), module(src.to(module.up.weight.dtype)))


def test_alike_calls_record_gradients_of_what_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the input too, and of no parameter that is frozen; results that want none have none."""
    module, src = Rows(), torch.randn(3, 6)
    whole = fused.fuse(module, src)
    for wanted in (src, src.clone().requires_grad_()):
        for is_frozen in (False, True):
            module.requires_grad_(not is_frozen)
            found = [(whole(wanted), module(wanted)) for _ in range(4)]
            assert all(one.requires_grad == other.requires_grad for one, other in found)
    monkeypatch.setattr(whole.fusion, "_form_of", None)  # which takes longer than the one check of all
    found.append((whole(wanted), module(wanted)))
    gradient = [torch.autograd.grad(each.square().sum(), wanted)[0] for each in found[-1]]
    _same(*gradient)


class _Counting(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return src * self.count


class _Rescaling(nn.Linear):  # type: ignore[misc]
    """Divides its weight in a call, as RWKV does in its first one in eval mode."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(2)
        return super().forward(src)


class _Asking(nn.Module):  # type: ignore[misc]
    def forward(self, src: torch.Tensor) -> torch.Tensor:
        kept = src[src > 0]
        return kept + 1 if len(kept) > 2 else src


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (_Counting(), r"_Counting writes into count.*call \.eval\(\).*backend=.fuseplan"),
        (_Rescaling(4, 4).eval(), r"_Rescaling writes into weight, which fuse does not"),
        (_Counting().eval(), r"_Counting writes into count, which fuse does not: torch\.compile"),
        (_Asking(), r"(?s)_Asking: .*test_changed.py:\d+: return kept \+ 1.*backend=.fuseplan"),
    ],
)
def test_errors_tell_the_line_and_the_way_in(
    module: nn.Module, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ArgumentError, match=told):
        fused.fuse(module, torch.randn(4, 4))
    shown: Any = capfd.readouterr()
    assert "def forward" not in shown.err + shown.out


def test_a_fused_module_tells_how_to_keep_it() -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        pickle.dumps(fused.fuse(nn.Linear(6, 6), torch.randn(3, 6)))


class Scaled(nn.Module):  # type: ignore[misc]
    """Writes into an input, which torch.export cannot be given twice."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one.mul_(1.5)
        return torch.relu(one) + other


def test_what_torch_itself_does_not_expect_is_no_mistake_of_the_call() -> None:
    torch._dynamo.reset()
    src, compiled = torch.randn(2, 3), torch.compile(Scaled(), backend="fuseplan")
    with pytest.raises(ArgumentError, match="takes modules of any kind"):
        fused.fuse(Scaled(), src, src)
    with pytest.raises(ArgumentError, match=r"(?s)keys must be the arg names.*by the names of the arguments"):
        fused.fuse(Scaled(), src, src.clone(), dynamic_shapes={"image": {}})
    one, other = src.clone(), src.clone()
    torch.testing.assert_close(compiled(one, one), Scaled()(other, other))
