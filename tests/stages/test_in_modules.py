"""Plans as parts of torch modules: under torch.compile, copied, saved."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import fuseplan
from fuseplan.system import untraced

PLAN = "f32[4x8] -> matmul(8) -> bias -> add -> relu"


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A bound plan between two operations of torch's; its residual is a buffer, read where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("residual", torch.randn(4, 8))
        self.plan = fuseplan.compile(PLAN, cache=False)
        self.bound = self.plan.bind(weight=torch.randn(8, 8), bias=torch.randn(8), other=self.residual)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.bound(src * 2) + 1
        return made


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


@pytest.fixture
def src() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch's, of Python 3.13.0
def test_torch_compile_breaks_its_graph_once_around_a_plan(layer: Layer, src: torch.Tensor) -> None:
    torch._dynamo.reset()
    counters.clear()
    want = layer(src)
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(src), want)
    assert counters["frames"]["ok"] == 2, "the function before the plan, and the one after it"
    assert sum(counters["graph_break"].values()) == 1
    (told,) = counters["graph_break"]
    assert untraced.REASON in told


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")
def test_all_of_a_plans_life_may_be_in_a_compiled_function(layer: Layer, src: torch.Tensor) -> None:
    torch._dynamo.reset()
    weight, out = torch.randn(8, 8), torch.empty(4, 8)

    def whole(src: torch.Tensor) -> Any:
        compiled = fuseplan.compile("f32[4x8] -> matmul(8)", cache=False)
        first = compiled(src + 1, weight=weight)
        return compiled.bind(weight=weight)(first, out) * 2

    assert torch.equal(torch.compile(whole, backend="eager")(src), whole(src))


def test_a_whole_graph_is_refused_with_the_reason(layer: Layer, src: torch.Tensor) -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fuseplan launches a kernel of its own"):
        torch.compile(layer, backend="eager", fullgraph=True)(src)


def test_an_older_torch_skips_the_marked_functions_alone() -> None:
    seen: list[Any] = []

    class Older:
        skip_code = staticmethod(seen.append)

    code = test_an_older_torch_skips_the_marked_functions_alone.__code__
    untraced._skip(Older(), code)
    assert seen == [code]


def test_a_copied_module_has_its_own_tensors(layer: Layer, src: torch.Tensor) -> None:
    twin = copy.deepcopy(layer)
    assert twin.plan is layer.plan, "a compiled plan does not change"
    want = layer(src)
    assert torch.equal(twin(src), want)
    twin.residual += 100
    assert torch.equal(layer(src), want)
    assert (twin(src) > want).all(), "the copy reads the copied buffer"
    with pytest.raises(fuseplan.ArgumentError, match="overlaps operand `other`"):
        twin.bound(src, twin.residual)
    assert copy.copy(layer.bound) is layer.bound


def test_a_copy_writes_its_own_results() -> None:
    compiled = fuseplan.compile("f32[4x8] -> batch_norm_training(running=True)", cache=False)
    running = {each.key: np.zeros(8, np.float32) for each in compiled.plan.results if each.updated}
    bound = compiled.bind(scale=np.ones(8, np.float32), shift=np.zeros(8, np.float32), **running)
    copied: dict[str, Any] = copy.deepcopy({"bound": bound, **running})
    src = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    outcome = copied["bound"](src)
    for key, before in running.items():
        assert getattr(outcome, key) is copied[key]
        assert (copied[key] != 0).all()
        assert (before == 0).all(), "the original's tensors are left alone"


def test_a_bound_plan_without_tensors_of_the_callers_is_its_own_copy() -> None:
    bound = fuseplan.compile("f32[4x8] -> bias", cache=False).bind(bias=np.ones(8, np.float32))
    assert copy.deepcopy(bound) is bound


def test_what_cannot_be_saved_says_what_to_save(layer: Layer) -> None:
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(TypeError, match="keep the text of its plan and the operands"):
            save(layer)
    assert list(layer.state_dict()) == ["residual"]
