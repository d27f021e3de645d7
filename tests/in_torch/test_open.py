"""Modules and graphs with open extents: plans that hold for every extent, beside torch."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.export import Dim

import fuseplan
import fuseplan.torch as fused
from fuseplan.plans.plan import FusionPlan
from fuseplan.torch import kernels
from fuseplan.torch.dynamo import compile_graph
from fuseplan.torch.operator import launched

F = nn.functional


class Model(nn.Module):  # type: ignore[misc]
    """Rows of images and of tokens; a bias of scores with an axis that a plan's operand lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.head(self.norm(tokens)) + tokens
        heads = inner.unflatten(2, (2, 8)).transpose(1, 2)
        made = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=(tokens @ tokens.mT)[:, None])
        return F.relu(self.conv(image)).mean((2, 3)), made.transpose(1, 2).reshape(inner.shape)


def _examples(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 6, 6), torch.randn(batch, length, 16)


@pytest.fixture
def built() -> Iterator[list[str]]:
    """The texts of the plans that are compiled from now on."""
    texts: list[str] = []
    plain = fuseplan.compile
    for each in (kernels._compiled, kernels._kernel_of):
        each.cache_clear()

    def noted(plan: FusionPlan, *rest: object, **options: object) -> object:
        texts.append(str(plan))
        return plain(plan, *rest, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "compile_plan", noted)
        yield texts


def test_one_kernel_computes_all_extents(built: list[str]) -> None:
    torch.manual_seed(0)
    module, batch = Model().eval(), Dim("batch", max=64)
    shapes = {"image": {0: batch}, "tokens": {0: batch}}
    made = fused.fuse(module, *_examples(2, 5), dynamic_shapes=shapes)
    called = [node.args[0] for node in made.fusion._graph.graph.nodes if node.target is launched]
    assert {"[*nchw] -> conv2d(8, kernel=3) -> bias -> relu", "[*bsc] -> linear(16) -> bias -> add"} <= {
        *called
    }
    assert len(called) == len(made.fusion.cut.sites)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (2, 1, 9):
            given = _examples(count, 5)
            torch.testing.assert_close(made(*given), module(*given), rtol=1e-4, atol=1e-4)
    assert {text for text in built if "[*x" not in text} == set()
    assert len(built) == len({*built})


def test_extents_that_the_graph_is_not_for_run_the_module() -> None:
    class Two(nn.Module):  # type: ignore[misc]
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return (first * 2 + second[: first.shape[0]]).relu() / first.shape[0]

    count = Dim("count", min=3, max=16)
    module = Two()
    example = torch.randn(4, 8), torch.randn(8, 8)
    made = fused.fuse(module, *example, dynamic_shapes=({0: count}, {0: 2 * count}))
    assert made.fusion.cut.sites
    for first, second, is_known in (
        (5, 10, True),
        (16, 32, True),
        (17, 34, False),
        (5, 9, False),
        (0, 0, False),
    ):
        given = torch.randn(first, 8), torch.randn(second, 8)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.testing.assert_close(made(*given), module(*given))
        assert (not told) == is_known
        made.fusion._is_told = False


class Sized(nn.Module):  # type: ignore[misc]
    """Rows of numbers that depend on an open extent."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(src, src.shape[1:]) * 2


def test_a_plan_with_a_number_that_is_open_is_left_to_torch() -> None:
    module, src = Sized(), torch.randn(4, 6)
    made = fused.fuse(module, src, dynamic_shapes={"src": {1: Dim("width")}})
    wide = torch.randn(4, 9)
    torch.testing.assert_close(made(wide), module(wide))


class Rows(nn.Module):  # type: ignore[misc]
    """A product of rows that a view joins with the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        batch, length, *_ = heads.shape
        return self.linear(heads.reshape(batch * length, 16)).view(batch, length, 16).relu()


@pytest.mark.parametrize(("axes", "sites"), [((0,), 1), ((1,), 1), ((0, 1), 0)])
def test_joined_rows_are_read_with_one_open_axis(axes: tuple[int, ...], sites: int) -> None:
    module, dims = Rows().eval(), {axis: Dim(f"extent{axis}") for axis in axes}
    made = fused.fuse(module, torch.randn(3, 5, 2, 8), dynamic_shapes={"heads": dims})
    assert sum(" -> linear" in str(site.plan) for site in made.fusion.cut.sites) == sites
    other = torch.randn(*(7 if axis in axes else (3, 5)[axis] for axis in (0, 1)), 2, 8)
    with torch.no_grad():
        assert (made(other) - module(other)).abs().max() < 1e-5


def test_torch_compile_leaves_extents_open(built: list[str]) -> None:
    torch._dynamo.reset()
    module = Model().eval()
    compiled = torch.compile(module, backend=compile_graph, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (9, 4)):
            given = _examples(batch, length)
            torch.testing.assert_close(compiled(*given), module(*given), rtol=1e-4, atol=1e-4)
    assert [text for text in built if "conv2d" in text] == [
        "f32[*x3x6x6, nhwc] -> conv2d(8, kernel=3) -> bias -> relu"
    ]


class Scaled(nn.Module):  # type: ignore[misc]
    """A product of rows, each times a number that has an axis of extent 1 besides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(rows) * scale)


def test_an_operand_of_other_extents_may_have_an_open_one(built: list[str]) -> None:
    torch.manual_seed(0)
    module, batch = Scaled(), Dim("batch", max=64)
    rows, scale = torch.randn(4, 5, 16), torch.randn(4, 5, 1)
    made = fused.fuse(module, rows, scale, dynamic_shapes={"rows": {0: batch}, "scale": {0: batch}})
    for extent in (3, 7):
        rows, scale = torch.randn(extent, 5, 16), torch.randn(extent, 5, 1)
        with torch.no_grad():
            torch.testing.assert_close(made(rows, scale), module(rows, scale))
    assert len(built) == 1
    assert "linear(24) -> bias -> mul_along" in built[0]


def test_a_plan_of_values_within_one_of_torchs_operators_stays_torchs() -> None:
    """What such a plan reads, between the product and the bias of a convolution, no node of torch's makes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, groups=2)).eval()
    compiled = torch.compile(module, backend=compile_graph, dynamic=True)
    wanted = copy.deepcopy(module).double()
    with torch.no_grad():
        for batch in (2, 3):
            src = torch.randn(batch, 6, 5, 8)
            with torch.autocast("cpu", torch.bfloat16):
                made = compiled(src)
            assert made.dtype == torch.bfloat16
            torch.testing.assert_close(made.double(), wanted(src.double()), rtol=2e-2, atol=2e-2)


class Grouped(nn.Module):  # type: ignore[misc]
    """Attention with a mask of keys, of queries, keys and values that one launch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, count) for count in (32, 16, 16))

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (each(rows).unflatten(-1, (-1, 8)).transpose(1, 2) for each in layers)
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        hidden = (1 - mask[:, None, None, :]) * -1e4
        return F.scaled_dot_product_attention(query, key, value, attn_mask=hidden).transpose(1, 2).flatten(2)


def test_attention_with_a_mask_has_open_images_and_keys() -> None:
    """The mask has axes of extent 1 besides; strides within the product's result depend on an extent."""
    torch.manual_seed(0)
    module, open_axes = Grouped().eval(), {0: Dim("batch", min=2), 1: Dim("length", min=2)}
    example = torch.randn(3, 5, 32), torch.ones(3, 5)
    made = fused.fuse(module, *example, dynamic_shapes={"rows": open_axes, "mask": open_axes})
    plans = [str(site.plan) for site in made.fusion.cut.sites]
    assert any("attention(key_heads=2, bias_axes=bt)" in each for each in plans)
    assert made.report.left == ()
    for batch, length in ((2, 9), (4, 6)):
        rows, mask = torch.randn(batch, length, 32), torch.ones(batch, length)
        mask[:, length - 2 :] = 0
        with torch.no_grad():
            torch.testing.assert_close(made(rows, mask), module(rows, mask))
