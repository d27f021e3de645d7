"""Formulas that change no bit of a value: none is a kernel, from ATen and from ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import nn

import fuseplan.onnx
import fuseplan.torch as fused
from from_onnx.test_model import plans
from onnx_models import model

SPECIAL = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.0, -2.5]] * 3, np.float32)
SAME: dict[str, Callable[[Any], Any]] = {
    "times one": lambda x: x * 1.0,
    "one times": lambda x: 1 * x,
    "over one": lambda x: x / 1,
    "minus zero": lambda x: x - 0.0,
    "plus -0": lambda x: x + -0.0,
    "power of one": lambda x: x**1,
    "cast": lambda x: x.to(x.dtype),
}
OTHER: dict[str, Callable[[Any], Any]] = {  # all of these make +0 of -0
    "plus zero": lambda x: x + 0,
    "minus -0": lambda x: x - -0.0,
    "two": lambda x: x * 1.0 + 0.0,
}
ARITHMETIC = [getattr(torch.ops.aten, name).Tensor for name in ("mul", "div", "sub", "add")] + [
    torch.ops.aten.pow.Tensor_Scalar,
    torch.ops.aten._to_copy.default,
]


class Between(nn.Module):  # type: ignore[misc]
    """A formula between operators that no plan computes."""

    def __init__(self, formula: Callable[[Any], Any], is_last: bool = False) -> None:
        super().__init__()
        self.formula, self.is_last = formula, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.formula(x if self.is_last else x.flip(-1))
        return made if self.is_last else made.flip(-1)


def _bits(made: torch.Tensor) -> list[int]:
    return [*map(int, made.view(torch.int32).flatten())]


@pytest.mark.parametrize("name", [*SAME, *OTHER])
@pytest.mark.parametrize("is_last", [False, True])
def test_every_bit_is_torchs(name: str, is_last: bool) -> None:
    src, module = torch.from_numpy(SPECIAL), Between((SAME | OTHER)[name], is_last)
    made = fused.fuse(module, src)
    with torch.no_grad():
        got, want = made(src), module(src)
    assert _bits(got) == _bits(want)
    if is_last and name != "cast":  # new memory
        assert len(made.fusion.cut.sites) == 1
        assert got.data_ptr() != src.data_ptr()
        return
    assert len(made.fusion.cut.sites) == (name in OTHER)
    run = [node.target for node in made.fusion._graph.graph.nodes if node.op == "call_function"]
    assert is_last or run.count(torch.ops.aten.flip.default) == 2
    assert not [each for each in run if each in ARITHMETIC]


@pytest.mark.parametrize("name", SAME)
def test_none_stands_between_the_operators_of_a_plan(name: str) -> None:
    torch.manual_seed(0)
    first, norm, formula = nn.Linear(8, 6), nn.LayerNorm(6), SAME[name]

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = first, norm

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = formula(self.first(x))
            return formula(made.relu()), formula(self.norm(formula(made.mT.contiguous().mT)))

    module, src = Model().eval(), torch.randn(3, 8)
    made = fused.fuse(module, src)
    told = [str(site.plan) for site in made.fusion.cut.sites]
    assert not [plan for plan in told if "elementwise" in plan or "identity" in plan]
    with torch.no_grad():
        for got, want in zip(made(src), module(src), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_view_of_the_same_elements_is_other_memory() -> None:
    class Viewed(nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1.0).view(-1)

    src = torch.ones(2, 3)
    made = fused.fuse(Viewed(), src)
    with torch.no_grad():
        made(src).add_(1)
    assert (src == 1).all()


def test_another_dtype_or_shape_is_no_identity() -> None:
    src = torch.randn(3).half()
    made = fused.fuse(Between(lambda x: x * torch.ones(1, 1)), src)
    assert made(src).shape == (1, 3)
    counts = torch.arange(6)
    made = fused.fuse(Between(lambda x: x * 1.0), counts)
    assert made(counts).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "number", "is_same"),
    [
        ("Mul", 1.0, True),
        ("Div", 1.0, True),
        ("Sub", 0.0, True),
        ("Add", -0.0, True),
        ("Pow", 1.0, True),
        ("Add", 0.0, False),
        ("Sub", -0.0, False),
        ("Mul", -1.0, False),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_every_bit_is_onnxs(kind: str, number: float, is_same: bool, shape: tuple[int, ...]) -> None:
    nodes = [
        helper.make_node(kind, ["x", "number"], ["z"], "z"),
        helper.make_node("Transpose", ["z"], ["y"], "y"),
    ]
    made = model(nodes, {"x": (3, 8)}, ["y"], {"number": np.full(shape, number, np.float32)})
    ours = fuseplan.onnx.load(made, threads=1)
    (got,) = ours.run(None, {"x": SPECIAL})
    functions = {"Mul": np.multiply, "Div": np.divide, "Sub": np.subtract, "Add": np.add, "Pow": np.power}
    want = functions[kind](SPECIAL, np.full(shape, number, np.float32)).T
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(want)[finite])
    if is_same and len(shape) < 3:
        assert plans(ours, {"x": SPECIAL}) == []
