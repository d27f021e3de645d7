"""Gated products of modules: the two weights are joined when they are packed, and stay the module's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fuseplan.torch


class Gated(nn.Module):  # type: ignore[misc]
    def __init__(self, formula: Callable[[Any, torch.Tensor], torch.Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 24, bias=bias) for _ in range(2))
        self.both = nn.Linear(16, 48, bias=bias)
        self.formula = formula

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.formula(self, src)


def swiglu(own: Any, src: torch.Tensor) -> torch.Tensor:
    return functional.silu(own.gate(src)) * own.up(src)


def geglu(own: Any, src: torch.Tensor) -> torch.Tensor:
    value, gate = own.both(src).chunk(2, -1)
    return value * functional.gelu(gate)


def glu(own: Any, src: torch.Tensor) -> torch.Tensor:
    return functional.glu(own.both(src))


def sizes(own: Any, src: torch.Tensor) -> torch.Tensor:
    gate, value = own.both(src).split([24, 24], -1)
    return functional.silu(gate) * value


def uneven(own: Any, src: torch.Tensor) -> torch.Tensor:
    gate, value, _ = own.both(src).split([20, 20, 8], -1)
    return functional.silu(gate) * value


def twice(own: Any, src: torch.Tensor) -> torch.Tensor:
    gate = own.gate(src)
    return functional.silu(gate) * own.up(src) + gate


def plans(module: nn.Module) -> list[str]:
    return [site.plan.partition(" -> ")[2] for site in module.report.sites]


def close(module: nn.Module, src: torch.Tensor) -> None:
    """The fused module is near its meaning in float64."""
    plain = copy.deepcopy(module).double()
    want = plain.formula(plain, src.double())
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[src.dtype]
    with torch.no_grad():
        assert (module(src).double() - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("formula", "bias", "plan"),
    [
        (swiglu, True, "linear(48) -> bias -> glu(silu, gate=first)"),
        (swiglu, False, "linear(48) -> glu(silu, gate=first)"),
        (geglu, True, "linear(48) -> bias -> glu(gelu)"),
        (sizes, False, "linear(48) -> glu(silu, gate=first)"),
        (glu, True, "linear(48) -> bias -> glu"),
    ],
)
def test_a_gated_product_is_one_launch(formula: Any, bias: bool, plan: str, dtype: torch.dtype) -> None:
    src = torch.randn(2, 5, 16, dtype=dtype)
    module = fuseplan.torch.fuse(Gated(formula, bias=bias).to(dtype), src)
    assert plans(module) == [plan]
    assert (module.report.launches.kernels, module.report.launches.libraries) == (1, {})
    assert {row.state for row in module.report.operators} <= {"fused", "view"}
    close(module, src)


@pytest.mark.parametrize("formula", [uneven, twice])
def test_what_is_nearly_a_gated_product_is_none(formula: Any) -> None:
    src = torch.randn(2, 5, 16)
    module = fuseplan.torch.fuse(Gated(formula), src)
    assert not [plan for plan in plans(module) if "glu" in plan]
    close(module, src)


def test_a_weight_that_is_changed_is_seen() -> None:
    src = torch.randn(3, 16)
    module = fuseplan.torch.fuse(Gated(swiglu), src)
    assert [*module.state_dict()] == [*Gated(swiglu).state_dict()]
    close(module, src)
    for name in ("up.weight", "gate.weight", "up.bias"):
        with torch.no_grad():
            module.get_parameter(name).mul_(2)
        close(module, src)
    module.gate.weight = nn.Parameter(torch.randn(24, 16))
    close(module, src)
    other = copy.deepcopy(module)
    other.up.load_state_dict({"weight": torch.randn(24, 16), "bias": torch.randn(24)})
    close(other, src)
    close(module, src)


def test_each_weight_has_its_gradient() -> None:
    src = torch.randn(2, 5, 16, requires_grad=True)
    module = Gated(swiglu)
    tensors = [src, *module.gate.parameters(), *module.up.parameters()]
    want = torch.autograd.grad(module(src).square().sum(), tensors)
    got = torch.autograd.grad(fuseplan.torch.fuse(module, src)(src).square().sum(), tensors)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_operator_and_its_text() -> None:
    tensors = [torch.randn(24, 16), torch.randn(24, 16), torch.randn(24), torch.randn(24)]
    tensors = [each.requires_grad_() for each in tensors]
    arguments: Any = ("weight=2:0 bias=2:0 | linear(48) -> bias -> glu", torch.randn(3, 16), tensors, [])
    torch.library.opcheck(torch.ops.fuseplan.run, arguments)
    with pytest.raises(
        fuseplan.ArgumentError, match=r"takes 4 tensors besides src \(weight, weight, bias, bias\)"
    ):
        torch.ops.fuseplan.run(*arguments[:2], tensors[:3], [])


def test_an_exported_module_joins_the_weights_in_the_operator() -> None:
    src = torch.randn(3, 16)
    module = fuseplan.torch.fuse(Gated(swiglu), src)
    with torch.no_grad():
        program = torch.export.export(module, (src,))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["fuseplan.run.default", "<built-in function getitem>"]
    torch.testing.assert_close(program.module()(src), module(src))
