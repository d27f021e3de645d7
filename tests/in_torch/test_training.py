"""Training steps under torch.compile: the backward passes run plans, and give torch's gradients."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplan.graph.why import Why
from fuseplan.stores import sites
from fuseplan.torch import cutting, dynamo
from fuseplan.torch.cutting import Fusion, fused
from fuseplan.torch.lying import laid_out
from fuseplan.torch.partition import partitioned
from fuseplan.torch.sites import Site, called

F, aten = nn.functional, torch.ops.aten
INDUCTOR = "fuseplan.torch.inductor"  # which imports torch's compiler


class Block(nn.Module):  # type: ignore[misc]
    """A transformer's block, its attention spelt out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(src).chunk(3, -1)
        src = src + self.out(torch.softmax(query @ key.transpose(1, 2) / 4, -1) @ value)
        return src + self.down(F.gelu(self.up(src)))


class Classifier(nn.Module):  # type: ignore[misc]
    """Convolutions, each activation that has a row, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.classes = nn.Linear(8, 10)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = F.mish(F.silu(self.second(self.first(src).relu()))).mean((2, 3))
        return F.log_softmax(self.classes(made.tanh().sigmoid()), -1)


@pytest.mark.parametrize(
    ("make", "shape", "wanted"),
    [
        (
            Block,
            (2, 6, 16),
            {"linear_weight_gradient(": 4, "activation_backward(gelu)": 1, "softmax_backward": 1},
        ),
        (
            Classifier,
            (2, 4, 9, 9),
            {"linear_weight_gradient(": 1, "log_softmax_backward": 1}
            | {f"activation_backward({each})": 1 for each in ("relu", "silu", "mish")},
        ),
    ],
)
def test_a_training_steps_backward_is_plans(
    make: type[nn.Module], shape: tuple[int, ...], wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, src = make(), torch.randn(shape, requires_grad=True)
    made: list[Fusion] = []

    def kept(*given: Any, **how: Any) -> Fusion:
        made.append(fused(*given, **how))
        return made[-1]

    monkeypatch.setattr(dynamo, "fused", kept)
    found: list[Any] = []
    for each in (copy.deepcopy(module), torch.compile(module, backend=dynamo.compile_graph)):
        out = each(src)
        found.append(torch.autograd.grad(out.square().sum(), [src, *each.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    _, backward = made
    plans = [str(site.plan) for site in backward.cut.sites]
    assert {word: sum(word in plan for plan in plans) for word in wanted} == wanted


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
    "strides": (lambda: nn.Conv2d(4, 6, 3, stride=2, bias=False), (2, 4, 8, 7)),
    "groups": (lambda: nn.Conv2d(4, 8, (3, 1), dilation=2, groups=4), (2, 4, 8, 7)),
    "one": (lambda: nn.Conv1d(4, 6, 1), (2, 4, 9)),
    "one with strides": (lambda: nn.Conv2d(4, 6, 1, stride=(2, 3)), (2, 4, 8, 7)),
    "volume": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 3, 4, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1), (2, 4, 5, 4)),
    "longer": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, output_padding=1, groups=2), (2, 4, 5, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_a_convolution_are_plans_and_torch_makes_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of src with the derivative of the activation in front of the convolution."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, src = nn.Sequential(nn.SiLU(), make()), torch.randn(shape, requires_grad=True)
    made: list[Fusion] = []

    def kept(*given: Any, **how: Any) -> Fusion:
        made.append(fused(*given, **how))
        return made[-1]

    monkeypatch.setattr(dynamo, "fused", kept)
    wanted, double = [src, *module.parameters()], copy.deepcopy(module).double()
    compiled = torch.compile(module, backend=dynamo.compile_graph, dynamic=False)
    found = [torch.autograd.grad(each(src).square().sum(), wanted) for each in (compiled, module)]
    wide = src.detach().double().requires_grad_()
    exact = torch.autograd.grad(double(wide).square().sum(), [wide, *double.parameters()])
    for got, eager, right in zip(*found, exact, strict=True):
        assert (got - right).norm() <= 2 * (eager - right).norm() + 1e-7 * right.norm()
        assert got.stride() == eager.stride()
    _, backward = made
    how: dict[str, Any] = {"op": "call_function", "target": aten.convolution_backward.default}
    assert not backward.module.graph.find_nodes(**how)
    texts = [str(site.plan) for site in backward.cut.sites]
    assert any("conv" in each and "activation_backward(silu)" in each for each in texts)
    assert any("linear_weight_gradient" in each for each in texts) == name.startswith("one")


def test_the_gradient_of_a_bias_is_as_near_to_float64_as_torchs() -> None:
    torch.manual_seed(0)
    errors = list[list[torch.Tensor]]()
    for _ in range(16):
        src = torch.randn(512, 64)
        made = called("sum(0)", src, [])[0], src.sum(0)
        errors.append([(each - src.double().sum(0)).norm() for each in made])
    ours, torchs = (sum(each) for each in zip(*errors, strict=True))
    assert ours <= 1.15 * torchs  # 1.37, where four rows are added by pairs


def test_a_step_lays_out_nothing_that_lies_so_and_counts_the_packing_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs, boxed = list[fx.Graph](), dynamo._boxed

    def kept(call: Any) -> Any:
        graphs.append(call.__self__.graph)
        return boxed(call)

    monkeypatch.setattr(dynamo, "_boxed", kept)
    torch.manual_seed(0)
    module, src = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    torch._dynamo.reset()
    made = torch.compile(module, backend=dynamo.compile_graph)(src)
    found = torch.autograd.grad(made.square().sum(), [*module.parameters()])
    torch.testing.assert_close(found, torch.autograd.grad(module(src).square().sum(), [*module.parameters()]))
    assert len(graphs) == 2
    for graph in graphs:
        assert not graph.find_nodes(op="call_function", target=laid_out)
        texts = [each.args[0] for each in graph.nodes if isinstance(each.target, Site)]
        products = [each for each in texts if "linear" in each or "matmul" in each]
        assert products
        assert all(each.startswith("repacks | ") for each in products)
        assert not any("repacks" in each for each in texts if each not in products)


@pytest.mark.usefixtures("estimated")
@pytest.mark.parametrize(("rows", "count"), [(8, 0), (65536, 1)])
def test_torch_has_products_that_nothing_is_fused_with(rows: int, count: int) -> None:
    """And small ones with a formula behind, and sums of few rows: on a CPU calls take longer than these."""

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        return [torch.addmm(b, x, w.t()), g @ w, g.t() @ x, g.sum(0, keepdim=True), (x @ w.t()).relu()]

    tensors = [torch.empty(*shape) for shape in ((rows, 32), (16, 32), (16,), (rows, 16))]
    given = make_fx(step, tracing_mode="fake")(*tensors)
    cut = fused(given, torch.device("cpu"), is_built=False, ranges=False).cut
    assert [len(site.plan.ops) for site in cut.sites if site.plan.ops[0].kind == "contraction"] == [2] * count
    assert Why.HOST in {each.why for each in cut.left.values()}


def test_on_a_gpu_cublas_has_products_that_nothing_is_fused_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of which each step would copy the weight; others are plans that read it where it lies."""

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.addmm(b, x, w.t()),  # alone
            g.t() @ x,  # a weight's gradient
            F.gelu(torch.addmm(b, x.tanh(), w.t())),
            g @ w + x,
        ]

    like = {"dtype": torch.bfloat16}
    tensors = [torch.empty(*shape, **like) for shape in ((8192, 768), (3072, 768), (3072,), (8192, 3072))]
    given = make_fx(step, tracing_mode="fake")(*tensors)
    few = make_fx(lambda g, w, x: g @ w + x, tracing_mode="fake")(
        tensors[3][:64], tensors[1], tensors[0][:64]
    )
    monkeypatch.setattr(cutting, "target_of", lambda _: ("triton:sm_90", None))
    how: dict[str, Any] = {"is_built": False, "ranges": False}
    cut, packed = (fused(each, torch.device("cuda"), **how).cut for each in (given, few))
    found = {str(site.plan).partition(" -> ")[2] for site in cut.sites}
    assert found >= {"linear(3072) -> bias -> gelu", "matmul(768) -> add"}
    assert Why.ALONE in {each.why for each in cut.left.values()}
    assert not packed.sites
    assert {each.why for each in packed.left.values()} == {Why.PACKED}


class Gated(nn.Module):  # type: ignore[misc]
    """A normalization and a gated layer, whose product and whose normalized src are no matrix product's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = self.norm(src)
        return src + self.down(F.silu(self.gate(made)) * self.up(made))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize("rest", ["torch", "inductor"])
def test_what_elementwise_operators_make_of_kept_values_is_not_kept(rest: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, src = Gated(), torch.randn(2, 32, 16, requires_grad=True)
    own = {each.untyped_storage().data_ptr() for each in (src, *module.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compiled = torch.compile(module, backend="fuseplan", options={"rest": rest}, dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = compiled(src)
    inner, statistic = 2 * 32 * 64 * 4, 2 * 32 * 4
    assert sum(size for at, size in kept.items() if at not in own) <= 2 * inner + statistic
    wanted = [src, *module.parameters()]
    found = [torch.autograd.grad(each.square().sum(), wanted) for each in (made, module(src))]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("resting")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize("rest", ["torch", "inductor"])
def test_sites_of_a_step_are_measured_beside_the_rest(
    rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward and the backward pass; where the rest is faster, it has the site."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    torch.manual_seed(0)
    torch._dynamo.reset()
    made: list[Fusion] = []

    def kept(*given: Any, **how: Any) -> Fusion:
        made.append(fused(*given, **how))
        return made[-1]

    monkeypatch.setattr(dynamo if rest == "torch" else importlib.import_module(INDUCTOR), "fused", kept)
    module, src = Gated(), torch.randn(2, 32, 16, requires_grad=True)
    how = {"rest": rest, "choose": "measured"}
    compiled = torch.compile(module, backend="fuseplan", options=how, dynamic=False)
    wanted = [src, *module.parameters()]
    found = [torch.autograd.grad(each(src).square().sum(), wanted) for each in (compiled, module)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    for each in made:
        measured = [site.measured for site in (*each.cut.sites, *each.cut.reverted)]
        assert measured
        assert all(site is not None and len(site.seconds) > 1 for site in measured)
        assert {each.cut.left[id(node)].why for site in each.cut.reverted for node in site.nodes} <= {
            Why.SLOWER
        }


def test_tables_of_a_rotation_are_kept_and_other_cosines_made_again() -> None:
    graphs: list[fx.GraphModule] = []

    def kept(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def turned(src: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return src.tanh() * (angles * 2).cos().mul(0.5).unsqueeze(0) + (src + 1).cos()

    src, angles = torch.randn(3, 5, 4, requires_grad=True), torch.randn(5, 4)
    found = aot_function(turned, kept, kept, partition_fn=partitioned)(src, angles)
    (made,) = torch.autograd.grad(found.sum(), src)
    _, backward = graphs
    targets = [node.target for node in backward.graph.nodes]
    assert aten.cos.default not in targets
    assert aten.sin.default in targets  # of the gradient
    torch.testing.assert_close(made, torch.autograd.grad(turned(src, angles).sum(), src)[0])


def test_operands_of_another_dtype_are_read_as_the_plans_src() -> None:
    """The gradient of a norm's scale, of src in f32 and gradients in bf16."""

    def step(src: torch.Tensor, factor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return ((src.float() * factor).to(grad.dtype) * grad).sum((0, 1), keepdim=True)

    torch.manual_seed(0)
    torch._dynamo.reset()
    tensors = [torch.randn(8, 64, 64), torch.rand(8, 64, 1), torch.randn(8, 64, 64)]
    tensors = [tensors[0].bfloat16(), tensors[1], tensors[2].bfloat16()]
    with torch.no_grad():
        made = torch.compile(step, backend=dynamo.compile_graph, dynamic=False)(*tensors)
    exact, plain = step(*(each.double() for each in tensors)), step(*tensors)
    assert made.dtype == torch.bfloat16
    assert (made - exact).norm() <= 2 * (plain - exact).norm()
