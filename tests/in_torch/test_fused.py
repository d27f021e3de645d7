"""Plans as operators of torch's, and torch's layers as plans: beside torch itself."""

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError, PlanError, Unsupported
from fuseplan.torch import kernels, layers

F32 = 2e-5  # of the largest value: sums in another order


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _statistics(module: nn.Module) -> nn.Module:
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
    return module.eval()


def _block() -> fused.Fused:
    block = fused.Fused(nn.Conv2d(6, 11, 3, padding=1), nn.BatchNorm2d(11), nn.ReLU())
    _statistics(block)
    return block


def _unfused(module: fused.Fused, src: torch.Tensor) -> torch.Tensor:
    return nn.Sequential.forward(module, src)


def _close(got: torch.Tensor, want: torch.Tensor, bound: float = F32) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= bound * want.double().abs().max() + 1e-12


CONVOLUTIONS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Conv1d(6, 8, 5, stride=2, padding=3), (2, 6, 19)),
    (lambda: nn.Conv2d(6, 9, (3, 5), padding=(0, 2), groups=3), (2, 6, 11, 13)),
    (lambda: nn.Conv2d(6, 9, (4, 3), padding="same", dilation=(1, 2)), (2, 6, 9, 8)),
    (lambda: nn.Conv2d(6, 9, 2, padding="valid", bias=False), (1, 6, 4, 5)),
    (lambda: nn.Conv3d(4, 5, (1, 3, 2), stride=(1, 2, 1)), (2, 4, 3, 7, 6)),
    (lambda: nn.ConvTranspose1d(6, 8, 5, stride=2, padding=3, output_padding=1), (2, 6, 9)),
    (lambda: nn.ConvTranspose2d(6, 9, (3, 4), stride=(1, 2), padding=(0, 2), groups=3), (2, 6, 5, 7)),
    (lambda: nn.ConvTranspose2d(6, 9, 3, stride=2, dilation=2, bias=False), (1, 6, 4, 5)),
    (lambda: nn.ConvTranspose3d(4, 5, (1, 3, 2), stride=(1, 2, 3)), (2, 4, 3, 4, 3)),
)
ROWS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Linear(17, 9), (3, 5, 17)),
    (lambda: nn.Linear(17, 9, bias=False), (4, 17)),
    (lambda: nn.LayerNorm(17), (3, 5, 17)),
    (lambda: nn.LayerNorm(17, bias=False, eps=0.5), (3, 5, 17)),
    (lambda: nn.LayerNorm(17, elementwise_affine=False), (2, 17)),
    (lambda: nn.RMSNorm(17), (2, 3, 4, 17)),
    (lambda: nn.RMSNorm(17, eps=0.5, elementwise_affine=False), (2, 3, 17)),
)
ELEMENTS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.BatchNorm1d(7, affine=False), (4, 7)),
    (lambda: nn.BatchNorm2d(7, eps=0.1), (2, 7, 3, 5)),
    (lambda: nn.BatchNorm3d(4), (2, 4, 2, 3, 5)),
    (lambda: nn.GroupNorm(3, 6), (2, 6, 5, 7)),
    (lambda: nn.GroupNorm(2, 6, eps=0.1, affine=False), (3, 6)),
    (lambda: nn.InstanceNorm1d(7, affine=True), (2, 7, 5)),
    (lambda: nn.InstanceNorm2d(7), (2, 7, 3, 5)),
    (lambda: nn.InstanceNorm3d(4, eps=0.1), (2, 4, 2, 3, 5)),
    (lambda: nn.PReLU(7), (2, 7, 3)),
    (nn.PReLU, (2, 7, 3)),
    (nn.Softplus, (2, 9)),
    (lambda: nn.LeakyReLU(0.3), (2, 9)),
    (lambda: nn.ELU(0.7), (2, 9)),
    (lambda: nn.Hardtanh(-0.5, 0.25), (2, 9)),
    (lambda: nn.GELU(approximate="tanh"), (2, 9)),
    (lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.SiLU()), (2, 9)),
    *((kind, (3, 5, 9)) for kind in (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh)),
    *((kind, (3, 5, 9)) for kind in (nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.Softsign)),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's own of itself
@pytest.mark.parametrize(("made", "shape"), CONVOLUTIONS + ROWS + ELEMENTS)
def test_each_layer_computes_what_torch_computes(
    made: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    block = fused.Fused(made())
    _statistics(block)
    src = torch.randn(shape)
    with torch.no_grad():
        _close(block(src), _unfused(block, src))


def test_every_layer_of_the_table_is_tested() -> None:
    made = {type(each) for make, _ in CONVOLUTIONS + ROWS + ELEMENTS for each in make().modules()}
    made |= {nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout}
    untested = layers.TABLE.keys() - made - {nn.Embedding}  # of indices: test_embedding.py
    assert not untested


def test_gradients_are_torchs() -> None:
    block, src = _block(), torch.randn(2, 6, 7, 5, requires_grad=True)
    found = []
    for call in (block, lambda each: _unfused(block, each)):
        block.zero_grad()
        src.grad = None
        call(src).square().sum().backward()
        found.append([src.grad, *(each.grad for each in block.parameters())])
    for got, want in zip(*found, strict=True):
        _close(got, want, 1e-4)


def test_the_operator_passes_torchs_own_checks() -> None:
    given = [torch.randn(9, 17, requires_grad=True), torch.randn(9, requires_grad=True)]
    src = torch.randn(3, 5, 17, requires_grad=True)
    torch.library.opcheck(torch.ops.fuseplan.run, ("linear(9) -> bias -> gelu", src, given, []))


def test_results_of_a_plan_come_behind_its_output_and_old_values_stay() -> None:
    src, ones = torch.randn(4, 3, 5), torch.ones(3)
    old = {"running_mean": torch.zeros(3), "running_variance": torch.ones(3)}
    out, *results = fused.run(
        "batch_norm_training(running=True)", src, scale=ones, shift=torch.zeros(3), momentum=0.25, **old
    )
    norm = nn.BatchNorm1d(3, momentum=0.25)
    _close(out, norm(src).detach())
    _close(results[-2], norm.running_mean)
    _close(results[-1], norm.running_var)
    assert not old["running_mean"].any()


def test_saved_values_are_results_and_have_gradients() -> None:
    src, other, scale = (torch.randn(shape, requires_grad=True) for shape in ((3, 7), (3, 7), (7,)))
    found = []
    for fuses in (True, False):
        if fuses:
            out, total = fused.run(
                "add -> save(sum) -> rms_norm -> add(other=sum)", src, other=other, scale=scale
            )
        else:
            total = src + other
            out = torch.nn.functional.rms_norm(total, (7,), scale, 1e-5) + total
        (out.square().sum() + total.sum()).backward()
        found.append([out.detach(), total.detach(), src.grad, other.grad, scale.grad])
        src.grad = other.grad = scale.grad = None
    for got, want in zip(*found, strict=True):
        _close(got, want, 1e-4)


@pytest.mark.parametrize(
    ("chain", "want"),
    [
        ("sum(1) -> tanh", lambda x: x.sum(1).tanh()),
        ("amax((0, 2)) -> relu", lambda x: x.amax((0, 2)).relu()),
        ("softmax(1)", lambda x: x.softmax(1)),
        ("glu", torch.nn.functional.glu),
    ],
)
def test_gradients_of_plans_whose_output_has_another_shape(
    chain: str, want: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    src = torch.randn(2, 5, 8, requires_grad=True)
    out, expected = fused.run(chain, src), want(src)
    (got,) = torch.autograd.grad(out.square().sum(), src)
    _close(out.detach(), expected.detach())
    _close(got, torch.autograd.grad(expected.square().sum(), src)[0], 1e-4)


def test_a_changed_weight_is_seen_and_packed_copies_go_with_their_weights() -> None:
    block, src = fused.Fused(nn.Linear(17, 9), nn.ReLU()), torch.randn(3, 17)
    with torch.no_grad():
        block(src)
        block[0].weight.mul_(3)
        _close(block(src), _unfused(block, src))
        block[0].weight = nn.Parameter(torch.randn(9, 17))
        _close(block(src), _unfused(block, src))
        kernel = kernels.kernel_on(block.operators, src)
        for _ in range(4):
            fused.run(block.operators, src, weight=torch.randn(9, 17), bias=block[0].bias)
        gc.collect()
        fused.run(block.operators, src, weight=torch.randn(9, 17), bias=block[0].bias)
    assert len(kernel._packed) <= 2


def test_two_views_of_one_weight_are_two_weights() -> None:
    weight, src = torch.randn(9, 9), torch.randn(3, 9)
    for each in (weight, weight.t(), weight[:, :]):
        _close(fused.run("linear(9)", src, weight=each), src @ each.t())


def test_operands_may_lie_in_another_order() -> None:
    src, other = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    _close(fused.run("add -> relu", src, other=other), (src + other).relu())


def test_a_replaced_layer_is_seen() -> None:
    block, src = fused.Fused(nn.Linear(17, 9), nn.ReLU()), torch.randn(3, 17)
    block[1] = nn.Tanh()
    with torch.no_grad():
        _close(block(src), _unfused(block, src))


def test_state_copies_and_files_are_those_of_torchs_layers() -> None:
    block = _block()
    plain = nn.Sequential(nn.Conv2d(6, 11, 3, padding=1), nn.BatchNorm2d(11), nn.ReLU())
    plain.load_state_dict(block.state_dict())
    twin, file = copy.deepcopy(block), io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    src = torch.randn(2, 6, 7, 5)
    with torch.no_grad():
        twin[0].weight.zero_()
        want = _unfused(block, src)
        _close(plain.eval()(src), want, 0)
        _close(block(src), want)
        _close(loaded(src), want)
        _close(twin(src), _unfused(twin, src))
    block.double()
    with torch.no_grad():
        _close(block(src.double()), _unfused(block, src.double()), 1e-12)


def test_training_runs_torchs_layers_where_they_are_others_then() -> None:
    block, src = _block().train(), torch.randn(2, 6, 7, 5)
    plain = copy.deepcopy(block)
    assert not block.is_fused
    assert block.eval().is_fused
    _close(block.train()(src), _unfused(plain, src), 0)
    _close(block[1].running_mean, plain[1].running_mean, 0)


def test_channels_last_goes_in_and_comes_out() -> None:
    block, src = _block(), torch.randn(2, 6, 7, 5).to(memory_format=torch.channels_last)
    with torch.no_grad():
        got, want = block(src), _unfused(block, src)
    assert got.is_contiguous(memory_format=torch.channels_last)
    _close(got, want)


def test_views_are_taken_and_expanded_tensors_are_copied() -> None:
    block = fused.Fused(nn.Linear(17, 9), nn.ReLU())
    with torch.no_grad():
        for src in (torch.randn(5, 20)[:, 3:], torch.randn(17, 6).t(), torch.randn(1, 17).expand(6, 17)):
            _close(block(src), _unfused(block, src))


def test_autocast_runs_in_its_dtype() -> None:
    block, src = fused.Fused(nn.Linear(17, 9), nn.GELU()), torch.randn(3, 17)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = block(src), _unfused(block, src)
    _close(got, want, 2**-6)


def test_graphs_of_torch_hold_the_kernel() -> None:
    block, src = _block(), torch.randn(2, 6, 7, 5)
    with torch.no_grad():
        want = _unfused(block, src)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        _close(compiled(src), want)
        exported = torch.export.export(block, (src,))
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.fuseplan.run.default in targets
    _close(exported.module()(src), want)


def test_a_compiled_training_step_has_torchs_gradients() -> None:
    layers, src = fused.Fused(nn.Linear(17, 9), nn.Tanh()), torch.randn(3, 17)
    step = torch.compile(lambda each: layers(each).square().sum(), backend="aot_eager", fullgraph=True)
    step(src).backward()
    got = layers[0].weight.grad.clone()
    layers.zero_grad()
    _unfused(layers, src).square().sum().backward()
    _close(got, layers[0].weight.grad, 1e-4)


REFUSED = (
    (lambda: nn.Sequential(nn.LSTM(3, 3)), "no operator computes LSTM"),
    (lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), "padding_mode"),
    (lambda: nn.BatchNorm2d(3, track_running_stats=False), "running statistics"),
    (lambda: nn.LayerNorm((3, 5)), "last axis"),
    (lambda: nn.InstanceNorm2d(3, track_running_stats=True), "statistics of each image"),
    (lambda: nn.Softplus(beta=2), "beta"),
)


@pytest.mark.parametrize(("made", "words"), REFUSED)
def test_a_layer_that_no_operator_computes_is_refused(made: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fused.Fused(made())


def test_a_derived_class_may_compute_something_else_and_is_refused() -> None:
    class Doubled(nn.ReLU):  # type: ignore[misc]
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(PlanError, match="Doubled"):
        fused.Fused(Doubled())


def test_wrong_calls_say_what_is_wrong() -> None:
    src = torch.randn(3, 17)
    with pytest.raises(ArgumentError, match="missing: bias"):
        fused.run("linear(9) -> bias", src, weight=torch.randn(9, 17))
    with pytest.raises(ArgumentError, match="unknown: w"):
        fused.run("relu", src, w=src)
    with pytest.raises(ArgumentError, match=r"takes 1 tensor besides src \(weight\), got 2"):
        torch.ops.fuseplan.run("linear(9)", src, [src, src], [])
    with pytest.raises(ArgumentError, match=r"takes 1 parameter \(negative_slope\), or none, got 2"):
        torch.ops.fuseplan.run("leaky_relu", src, [], [1.0, 2.0])
    with pytest.raises(PlanError, match="matmull"):
        fused.run("matmull(9)", src)
    with pytest.raises(Unsupported):
        fused.run("linear(9) -> linear(5)", src, weight=torch.randn(9, 17), weight_2=torch.randn(5, 9))
    with pytest.raises(ArgumentError, match="weight"):
        fused.run("linear(9)", src, weight=torch.randn(9, 16))
    with pytest.raises(ArgumentError, match="on meta"):
        kernels.kernel_on("relu", src.to("meta"))


def test_plans_of_layers_print_as_plans() -> None:
    block = nn.Sequential(nn.Conv2d(6, 11, 3, padding=1), nn.BatchNorm2d(11), nn.ReLU())
    plan = fused.plan_of(block, torch.randn(2, 6, 7, 5).to(memory_format=torch.channels_last))
    assert str(plan) == (
        "f32[2x6x7x5, nhwc] -> conv2d(11, kernel=3, padding=1) -> bias -> batch_norm -> relu"
    )
    assert [each.shape for each in plan.operands] == [tuple(each.shape) for each in fused.operands_of(block)]
    for norm in (nn.LayerNorm(7), nn.RMSNorm(7)):  # whose axis is the last one
        rows = fused.plan_of(nn.Sequential(norm, nn.Tanh()), torch.randn(3, 4, 5, 7))
        assert str(rows) == f"f32[3x4x5x7] -> {fused.operators_of(norm)} -> tanh"
    with pytest.raises(
        PlanError, match=r"the layers do not take f32\[2x5\]\n\n.*weight \(4, 3\) of theirs; want"
    ):
        fused.plan_of(nn.Linear(3, 4), torch.randn(2, 5))


def test_copies_of_constants_are_kept() -> None:
    """A kernel reads a bias where it lies; of a lazy negation there is a copy, which nobody else holds."""
    src, weight = torch.ones(4, 16), torch.eye(16)
    kernel = kernels.kernel_on("linear(16) -> bias", src)
    for bias, lent in ((torch.ones(16), {"bias"}), (torch._neg_view(torch.ones(16)), set())):
        bound = kernel.held([weight, bias]).plan
        assert bound.lent & {"bias"} == lent
        torch.testing.assert_close(bound(src), 1 + bias.expand(4, 16))


def test_gradients_beside_indices() -> None:
    """Indices have none."""
    torch.manual_seed(0)
    places, classes = torch.tensor([[1, 6, 0], [2, 2, 5]]), torch.tensor([1, -100, 0, 4])
    table, scale, logits = (torch.randn(shape, requires_grad=True) for shape in ((7, 5), (5,), (4, 5)))
    rows = fused.run("embedding(7, features=5) -> scale", places, weight=table, scale=scale)
    loss, _ = fused.run("cross_entropy", logits, target=classes.int())
    torch.testing.assert_close(rows, nn.functional.embedding(places, table) * scale)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, classes, reduction="none"))
    made = torch.autograd.grad((rows.square().sum(), loss.sum()), (table, scale, logits))
    embedded = (nn.functional.embedding(places, table) * scale).square().sum()
    want = (embedded, nn.functional.cross_entropy(logits, classes, reduction="sum"))
    for got, exact in zip(made, torch.autograd.grad(want, (table, scale, logits)), strict=True):
        torch.testing.assert_close(got, exact)
