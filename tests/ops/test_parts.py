"""Operators that read parts of an axis: torch's numbers, conventions of models, mistakes."""

import numpy as np
import pytest
import torch

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import PlanError
from fuseplan.language.parts import Split, part_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.activation import Gelu, Relu
from fuseplan.ops.parts import Glu, Parted, Rotary
from fuseplan.plans.plan import FusionPlan
from fuseplan.torch.meaning import evaluated

SHAPES = [(5, 12), (2, 3, 14), (2, 3, 4, 10), (2, 2, 3, 2, 6)]


def computed(text: str, *arrays: torch.Tensor) -> np.ndarray:
    plan = FusionPlan.parse(text)
    keys = [each.key for each in plan.operands]
    given = {key: array.numpy() for key, array in zip(keys, arrays[1:], strict=True)}
    return plan.reference(arrays[0].numpy(), given)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_glu_is_torchs(shape: tuple[int, ...]) -> None:
    x, tensor = drawn(*shape), f"f64[{'x'.join(map(str, shape))}"
    np.testing.assert_allclose(computed(f"{tensor}] -> glu", x), torch.nn.functional.glu(x))


@pytest.mark.parametrize("layout", ["nwc", "nchw", "nhwc", "ncdhw"])
def test_glu_of_channels_is_torchs(layout: str) -> None:
    x = drawn(*(3, 6, 2, 5, 1)[: len(layout)])
    text = f"f64[{'x'.join(map(str, x.shape))}, {layout}] -> glu(axis=c)"
    np.testing.assert_allclose(computed(text, x), torch.nn.functional.glu(x, dim=1))


def test_gates_of_models() -> None:
    x = drawn(3, 4, 10)
    first, second = x.chunk(2, dim=-1)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    np.testing.assert_allclose(computed("f64[3x4x10] -> glu(silu, gate=first)", x), silu(first) * second)
    np.testing.assert_allclose(computed("f64[3x4x10] -> glu(gelu)", x), first * gelu(second), atol=1e-14)
    even, odd = x[..., ::2], x[..., 1::2]
    text = "f64[3x4x10] -> glu(relu, gate=first, interleaved=True)"
    np.testing.assert_allclose(computed(text, x), torch.relu(even) * odd)


def halves_turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's Llama has it: angles twice, halves swapped."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return x * torch.cat((cos, cos), dim=-1) + swapped * torch.cat((sin, sin), dim=-1)


def neighbours_turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As complex numbers, the way of the first Llama's code."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


@pytest.mark.parametrize("dims", [14, 6, 2])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rotary_turns_as_models_do(layout: str, dims: int) -> None:
    shape = (2, 3, 5, 14) if layout == "bhsd" else (2, 5, 3, 14)
    x, angles = drawn(*shape), drawn(5, dims // 2)
    cos, sin = angles.cos(), angles.sin()
    along = (cos, sin) if layout == "bhsd" else (cos[:, None], sin[:, None])
    for interleaved, turned in ((False, halves_turned), (True, neighbours_turned)):
        text = f"f64[{'x'.join(map(str, shape))}, {layout}] -> rotary(dims={dims}, interleaved={interleaved})"
        want = torch.cat((turned(x[..., :dims], *along), x[..., dims:]), dim=-1)
        np.testing.assert_allclose(computed(text, x, cos, sin), want)


def test_the_gradient_of_rotary_is_its_inverse() -> None:
    x, angles, grad = drawn(2, 5, 8).requires_grad_(), drawn(5, 3), drawn(2, 5, 8).flip(0)
    halves = halves_turned(x[..., :6], angles.cos(), angles.sin())
    (want,) = torch.autograd.grad(torch.cat((halves, x[..., 6:]), dim=-1), x, grad)
    made = computed("f64[2x5x8] -> rotary(dims=6, inverse=True)", grad, angles.cos(), angles.sin())
    np.testing.assert_allclose(made, want)


def test_gradients_go_through_parts() -> None:
    x, grad = drawn(3, 5, 10).requires_grad_(), drawn(3, 5, 5).flip(0)
    (want,) = torch.autograd.grad(torch.nn.functional.glu(x), x, grad)
    (made,) = evaluated(FusionPlan.parse("f64[3x5x10] -> glu"), x, [], [])
    torch.testing.assert_close(torch.autograd.grad(made, x, grad)[0], want)


@pytest.mark.parametrize("options", ["", "gelu", "silu, gate=first", "relu, gate=first, interleaved=True"])
def test_the_gradient_of_a_gated_product_is_autograds(options: str) -> None:
    x, grad = drawn(3, 4, 10).requires_grad_(), drawn(3, 4, 5).flip(0)
    (made,) = evaluated(FusionPlan.parse(f"f64[3x4x10] -> glu({options})"), x, [], [])
    (want,) = torch.autograd.grad(made, x, grad)
    got = computed(f"f64[3x4x10] -> glu_backward({options})", x.detach(), grad)
    np.testing.assert_allclose(got, want, atol=1e-14)


def test_each_image_has_its_own_positions() -> None:
    x, angles = drawn(2, 5, 3, 4), drawn(2, 5, 2)
    want = halves_turned(x, angles.cos()[:, :, None], angles.sin()[:, :, None])
    made = computed("f64[2x5x3x4, bshd] -> rotary(batched=True)", x, angles.cos(), angles.sin())
    np.testing.assert_allclose(made, want)


def test_angles_and_gates_are_given_by_name() -> None:
    x, sin = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32), np.zeros((3, 4), np.float32)
    still = compile_plan("f32[3x8] -> rotary", "reference")(x, cos=np.ones_like(sin), sin=sin)
    np.testing.assert_array_equal(still, x)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("f32[3x7] -> glu", "even number of elements"),
        ("f32[3x8] -> glu(gate=third)", "first or second"),
        ("f32[3x8] -> glu(axis=q)", "last or n or c"),
        ("f32[3x8] -> glu(glu)", "must be an activation"),
        ("f32[3x8] -> glu(prelu)", "must be an activation"),
        ("f32[2x8x4x4, nchw] -> glu", "reads the last axis"),
        ("f32[3x7] -> rotary", "even extent"),
        ("f32[3x8] -> rotary(dims=10)", "at most 8"),
        ("f32[3x8] -> rotary(dims=3)", "must be an even number"),
        ("f32[3x8] -> rotary(interleaved=2)", "must be True or False"),
        ("f32[3x8] -> activation_backward(glu)", "must be an activation"),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        FusionPlan.parse(text)


@pytest.mark.parametrize("op", [Glu(Relu()), Glu(Gelu(), interleaved=True), Rotary(4), Rotary(8, True)])
def test_parts_cover_the_axis_once(op: Parted) -> None:
    src = TensorSpec((2, 16), "f64")
    split, places = op.split(src), np.arange(16)
    met = np.concatenate([split.of(places[None], index, split.reads)[0] for index in range(split.reads)])
    assert sorted(met) == list(range(16))
    assert op.output(src).shape == (2, split.extent * split.makes)


def test_a_leaf_names_a_part() -> None:
    assert part_of("x") == ("x", None)
    assert part_of("x[1]") == ("x", 1)
    assert part_of("cos_2[10]") == ("cos_2", 10)
    assert Split(1, 3, 4, 4, True).start(3, 4) == 7
