"""Whole modules and torch.compile: beside torch, with the operators that are in no plan."""

import copy
import shutil
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError
from fuseplan.graph import choose, trial
from fuseplan.graph.layer import Layer
from fuseplan.graph.why import Reason, Why
from fuseplan.stores import sites
from fuseplan.torch import fusing
from fuseplan.torch.dynamo import compile_graph
from fuseplan.torch.operator import launched
from fuseplan.torch.reader import read

F = nn.functional
leaves = torch.utils._pytree.tree_leaves


class Residual(nn.Module):  # type: ignore[misc]
    """Two convolutions and a shortcut, then what no plan computes, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(6, 8, 1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 5)
        self.norm.running_mean.normal_()

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.norm(self.first(src)))
        out = self.relu(self.second(inner) + self.other(src))
        return F.log_softmax(self.head(F.max_pool2d(out, 2).mean((2, 3)).flatten(1)), -1)


class Block(nn.Module):  # type: ignore[misc]
    """A pre-norm block with attention and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(16), nn.RMSNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*each) for each in ((16, 32), (16, 32), (32, 16)))

    def forward(self, src: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        batch, length, width = src.shape
        heads = self.qkv(self.before(src)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).reshape(src.shape)
        src = src + self.out(made) * scale
        held = self.after(src)
        return src + self.down(F.silu(self.gate(held)) * self.up(held)), {"held": held}


class Heads(nn.Module):  # type: ignore[misc]
    """Attention behind projections: grouped heads, a mask, a bias, other extents of the keys, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, width) for width in (24, 12, 12))

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = src.shape
        made = [each(src) for each in (self.query, self.key, self.value)]
        query, key, value = (each.view(batch, length, -1, 6).transpose(1, 2) for each in made)
        attend = F.scaled_dot_product_attention
        grouped = attend(query, key, value, is_causal=True, enable_gqa=True)
        seen = torch.ones(length, length, dtype=torch.bool, device=src.device).tril(1)
        masked = attend(key, key, value, attn_mask=seen, scale=0.3)
        biased = attend(key[:, :, :5], key, value, attn_mask=src[:, None, :5, :length])
        dropped = attend(key, key, value, dropout_p=0.0 if not self.training else 0.5)
        return grouped.transpose(1, 2).flatten(2), masked, biased, dropped


class Odd(nn.Module):  # type: ignore[misc]
    """Ranks and dtypes that plans lack beside some that they have."""

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = (src.flatten() * 2 + 1).relu()
        whole = (src > 0).to(torch.int64) + 3
        deep = src.reshape(1, 1, 1, *src.shape).exp() / (src * src + 1)
        return flat, whole, 3 - deep.rsqrt()


MODELS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...], int], ...] = (
    (Residual, (2, 6, 8, 8), 4),
    (Block, (2, 5, 16), 7),
    (Heads, (2, 11, 24), 5),
    (Odd, (3, 4, 5), 0),
)


def _calls(module: nn.Module) -> int:
    graph: torch.fx.Graph = module.fusion._graph.graph
    return sum(node.target is launched for node in graph.nodes)


def _same(got: object, want: object, bound: float = 1e-4) -> None:
    for one, other in zip(leaves(got), leaves(want), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert (one - other).abs().max() <= bound * max(1, other.abs().max())


@pytest.mark.parametrize(("made", "shape", "sites"), MODELS)
def test_a_module_computes_what_it_did(
    made: Callable[[], nn.Module], shape: tuple[int, ...], sites: int
) -> None:
    torch.manual_seed(0)
    module, src = made().eval(), torch.randn(shape)
    with torch.no_grad():
        want = module(src)
        whole = fused.fuse(module, src)
        _same(whole(src), want)
        _same(torch.compile(module, backend=compile_graph)(src), want)
    assert _calls(whole) == len(whole.fusion.cut.sites)
    assert len(whole.fusion.cut.sites) >= sites
    assert whole.state_dict().keys() == module.state_dict().keys()
    assert isinstance(whole, made)  # type: ignore[arg-type]


def test_each_operator_of_the_model_is_in_one_place() -> None:
    module = Residual().eval()
    cut = fused.fuse(module, torch.randn(2, 6, 8, 8)).fusion.cut
    inside = [id(node) for site in cut.sites for node in site.nodes]
    assert len(inside) == len(set(inside))
    assert not cut.left.keys() & set(inside)
    plans = [str(site.plan).partition(" -> ")[2] for site in cut.sites]
    assert "conv2d(8, kernel=3, padding=1) -> batch_norm -> relu" in plans
    assert sum(each.endswith("bias -> add -> relu") for each in plans) == 1


LAIN, BESIDE = "strides=528:6:48:1", "key_strides=(528, 6, 48, 1), value_strides=(528, 6, 48, 1)"


def test_heads_are_read_as_the_projections_left_them() -> None:
    made = fused.fuse(Heads().eval(), torch.randn(2, 11, 24))
    cut, operators = made.fusion.cut, {str(node.target) for node in made.fusion._graph.graph.nodes}
    assert not [name for name in operators if "attention" in name], "attention is not computed twice"
    plans = [str(site.plan) for site in cut.sites if "attention" in str(site.plan)]
    assert plans == [
        f"f32[2x4x11x6, {LAIN} of bhsc] -> attention(is_causal=True, key_heads=2, {BESIDE})",
        f"f32[2x2x11x6, {LAIN} of bhsc] -> attention(scale=0.3, mask_axes=st)",
        f"f32[2x2x5x6, {LAIN} of bhsc] -> attention(keys=11, bias_axes=bst, {BESIDE})",
        f"f32[2x2x11x6, {LAIN} of bhsc] -> attention",
    ]


class Cached(nn.Module):  # type: ignore[misc]
    """New queries on keys from before."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@pytest.mark.parametrize(("heads", "sites"), [(2, 0), (8, 1)])
def test_one_query_of_each_head_of_keys_stays_torchs_on_a_cpu(heads: int, sites: int) -> None:
    given = (torch.randn(1, heads, 1, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8))
    cut = fused.fuse(Cached().eval(), *given).fusion.cut
    assert len(cut.sites) == sites
    assert [each.why for each in cut.left.values()] == [Why.SLOWER] * (1 - sites)


def test_weights_stay_the_modules_own() -> None:
    module, src = Residual().eval(), torch.randn(2, 6, 8, 8)
    whole = fused.fuse(module, src)
    with torch.no_grad():
        whole(src)
        module.first.weight.mul_(2)
        module.norm.running_mean.add_(1)
        _same(whole(src), module(src))
        twin = copy.deepcopy(whole)
        twin.head.weight.zero_()
        _same(whole(src), module(src))
        assert (twin(src)[0] - twin(src)[0].mean()).abs().max() < 1  # the head's bias alone is left
        module.double()
        module.float()
        _same(whole(src), module(src))


def test_gradients_are_those_of_the_module() -> None:
    torch.manual_seed(0)
    module, src = Block().eval(), torch.randn(2, 5, 16)
    found = []
    for each in (module, fused.fuse(module, src), torch.compile(module, backend=compile_graph)):
        module.zero_grad()
        each(src)[0].square().sum().backward()
        found.append([parameter.grad.clone() for parameter in module.parameters()])
    for got in found[1:]:
        _same(got, found[0], 1e-3)


def test_training_under_torch_compile_updates_what_torch_updates() -> None:
    torch.manual_seed(0)
    module, src = Residual(), torch.randn(4, 6, 8, 8)
    plain = copy.deepcopy(module)
    for each in (plain, torch.compile(module, backend=compile_graph)):
        each(src).square().sum().backward()
    _same([each.grad for each in module.parameters()], [each.grad for each in plain.parameters()], 1e-3)
    _same(module.norm.running_mean, plain.norm.running_mean)


def test_other_calls_run_as_they_did_and_say_so_once() -> None:
    module, src = Residual().eval(), torch.randn(2, 6, 8, 8)
    whole, other = fused.fuse(module, src), torch.randn(3, 6, 10, 10)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="other tensors, submodules, attributes, hooks, another"):
            _same(whole(other), module(other))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _same(whole(other), module(other))
            _same(whole(src), module(src))
            with torch.autocast("cpu", torch.bfloat16):
                _same(whole(src), module(src), 0)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: None) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sites_are_measured_beside_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(fusing, "lost", lambda _: None)  # the whole call's time is another test's
    module, src = Block().eval().to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    found = fused.fuse(module, src).fusion.cut.sites
    whole = fused.fuse(module, src, choose="measured")
    cut = whole.fusion.cut
    assert sorted(str(site.plan) for site in (*cut.sites, *cut.reverted)) == sorted(
        str(site.plan) for site in found
    )
    for site in (*cut.sites, *cut.reverted):
        made = site.measured
        assert made.code == "slower" or not made.said
        assert made.seconds.keys() == {str(site.plan), f"torch {torch.__version__}"}
        assert made.code in ("", "slower")
        assert made.error <= made.allowed
        assert made.peer_error < 0.1
    assert _calls(whole) == len(cut.sites)
    with torch.no_grad():
        _same(whole(src), module(src), 1e-4 if dtype == torch.float32 else 0.1)
    monkeypatch.setattr(choose, "measured", None)
    assert fused.fuse(module, src, choose="measured").fusion.cut.sites == cut.sites


@pytest.mark.usefixtures("own_folder")
def test_sites_that_lose_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_lost", lambda *_: Reason(Why.SLOWER, "told so"))
    module, src = Residual().eval(), torch.randn(2, 6, 8, 8)
    whole = fused.fuse(module, src, choose="measured")
    assert _calls(whole) == 0
    assert len(whole.fusion.cut.reverted) >= 4
    assert "slower" in {reason.code for reason in whole.fusion.cut.left.values()}
    with torch.no_grad():
        _same(whole(src), module(src), 0)
    with pytest.raises(ArgumentError, match="want 'predicted' or 'measured'"):
        fused.fuse(module, src, choose="best")


def test_calls_by_name_are_as_the_example() -> None:
    module, src = Block().eval(), torch.randn(2, 5, 16)
    whole = fused.fuse(module, src, scale=0.5)
    with torch.no_grad():
        _same(whole(src, scale=0.5), module(src, scale=0.5))


def _compiled(module: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, backend=compile_graph, options=options)  # type: ignore[no-any-return]


def _calls_of(run: Callable[[], object]) -> int:
    with torch.profiler.profile() as profiled:
        run()
    return sum(each.count for each in profiled.key_averages() if each.key == "fuseplan::run")


@pytest.mark.usefixtures("own_folder")
def test_the_backend_measures_and_tells_without_compiling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, src = Residual().eval(), torch.randn(2, 6, 8, 8)
    with torch.no_grad():
        want = module(src)
        dry = _compiled(module, dryrun=True)
        _same(dry(src), want, 0)
        told = capsys.readouterr().out
        assert "conv2d(8, kernel=3, padding=1) -> batch_norm -> relu" in told
        assert _calls_of(lambda: dry(src)) == 0
        measured = _compiled(module, choose="measured")
        _same(measured(src), want)
        monkeypatch.setattr(trial, "_lost", lambda *_: Reason(Why.SLOWER, "told so"))
        monkeypatch.setattr(sites.KEPT, "records", dict)
        reverted = _compiled(module, choose="measured")
        _same(reverted(src), want)
        assert _calls_of(lambda: reverted(src)) == 0


def _with_pass(module: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(module, options={"post_grad_custom_pre_pass": fused.inductor_pass()})  # type: ignore[no-any-return]


def _with_rest(module: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(module, backend="fuseplan", options={"rest": "inductor"})  # type: ignore[no-any-return]


class Summed(Residual):
    """The same with operators behind it that no plan computes, and Inductor fuses."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return super().forward(src).cumprod(-1).cumprod(0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles kernels for the CPU with g++")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize(("compiled", "plans"), [(_with_rest, 4), (_with_pass, 4)])
def test_inductor_computes_the_rest(
    compiled: Callable[[nn.Module], Callable[..., torch.Tensor]], plans: int
) -> None:
    """Three convolutions and a product are plans; all else is Inductor's."""
    module, src = Summed().eval(), torch.randn(2, 6, 12, 12)
    torch._dynamo.reset()
    with torch.no_grad():
        made = compiled(module)
        torch.testing.assert_close(made(src), module(src), rtol=1e-5, atol=1e-5)
        with torch.profiler.profile() as profiled:
            made(src)
    called = {each.key: each.count for each in profiled.key_averages()}
    assert called["fuseplan::run"] == plans
    assert not [name for name in called if "conv" in name or name.endswith("mm")]


def test_torch_finds_the_backend_by_its_name() -> None:
    found = {each.name: each for each in entry_points(group="torch_dynamo_backends")}
    assert found["fuseplan"].load() is compile_graph


class Scaled(nn.Module):  # type: ignore[misc]
    """Parameters that have axes of extent 1 beside that of the channels, as broadcasting wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bias = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(4, 1, 1))
        self.scale = nn.Parameter(torch.randn(1, 4, 1, 1))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(src) * self.scale + self.bias)


def test_parameters_that_broadcast_over_positions() -> None:
    module, src = Scaled(), torch.randn(2, 3, 9, 9)
    made = fused.fuse(module, src)
    assert [str(site.plan).count("->") for site in made.fusion.cut.sites] == [5]
    torch.testing.assert_close(made(src), module(src), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "conv", "linear"), [("cuda", "tf32", "full"), ("cpu", "full", "full")])
def test_factors_are_rounded_where_torch_rounds_them(device: str, conv: str, linear: str) -> None:
    """By torch's settings as they stand unless changed; the tensors are torch's fake ones."""
    with torch._subclasses.FakeTensorMode():
        src, weight = torch.empty(1, 3, 8, 8, device=device), torch.empty(4, 3, 3, 3, device=device)
        square = torch.empty(6, 6, device=device)

        def model(src: torch.Tensor, weight: torch.Tensor, square: torch.Tensor) -> list[torch.Tensor]:
            made = torch.ops.aten.conv2d.default(src, weight)
            return [
                made,
                torch.ops.aten.linear.default(made, square),
                torch.ops.aten.mm.default(square, square),
            ]

        graph = read(make_fx(model)(src, weight, square)).graph
    found = [vars(node.op.op)["precision"] for node in graph.nodes if isinstance(node.op, Layer)]
    assert found == [conv, linear, linear]


def test_bounds_in_torchs_spellings() -> None:
    class Bounds(nn.Module):  # type: ignore[misc]
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return F.relu6(src) + src.clamp_min(0.5) - torch.clamp_max(src, -0.5) * F.hardtanh(src)

    src = 9 * torch.randn(3, 7)
    whole = fused.fuse(Bounds(), src)
    assert {row.state for row in whole.report.operators} == {"fused"}
    torch.testing.assert_close(whole(src), Bounds()(src))
