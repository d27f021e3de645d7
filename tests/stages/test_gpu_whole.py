"""The public interface on a GPU that this machine pretends to have: from a plan to what a launch writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from benchmarks.crossbuild import builds
from forced import forced
from fuseplan.backends.triton import TRITON
from fuseplan.backends.triton.templates.order import TEMPLATES
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import random_arrays, reference
from fuseplan.plans.plan import FusionPlan
from posing import CUDA_0, PosingDriver, posing
from toy_templates import HEAD, Toy, ToyProduct

PRODUCT = "f16[2x64x3x5, nhwc] -> conv2d(48, kernel=1)"
AFFINE = "f32[3x7] -> leaky_relu(negative_slope=0.25) -> add"
PLANS = (
    "f16[9x40] -> relu -> softmax",
    "f16[1x2x20x32, bhsd] -> attention(is_causal=True)",
    "f16[1x2x20x32, bhsd] -> attention_gradient(is_causal=True)",
    "f16[2x19x3x5, nhwc] -> batch_norm -> relu",
    "bf16[2x8x6x4] -> batch_norm(mode=per_activation) -> add -> gelu",
    "f16[2x64x3x5, nhwc] -> conv2d(64, kernel=1) -> bias -> relu",
    "f32[2x40x3x5] -> conv2d(24, kernel=1) -> bias -> add",
    "f16[1x32x6x7, nhwc] -> conv2d(32, kernel=3, padding=1) -> batch_norm -> relu",
    "f32[1x5x9x8] -> conv2d(7, kernel=3, stride=2) -> bias",
    "f16[2x24x6x5, nhwc] -> conv2d(24, kernel=3, padding=1, groups=24) -> bias -> silu",
    "bf16[33x64] -> matmul(40) -> bias -> gelu",
    "bf16[33x64] -> linear(300) -> cross_entropy",
    "f16[9x40x6x7, nhwc] -> batch_norm_training(running=True) -> relu",
    "f16[9x40] -> relu -> cumsum -> add",
)


@dataclass(frozen=True)
class ToyAffine(Toy):
    """leaky_relu, then a residual: parameters by value and by pointer, an operand where it lies."""

    name: ClassVar[str] = "toy-affine"

    def emit(self, kernel: Kernel, target: Target) -> Source:
        text = HEAD + (
            "def toy(src, par_negative_slope, parameters, op_other, dst):\n"
            "    at = tl.arange(0, 32)\n"
            f"    inside = at < {kernel.src.size}\n"
            "    x = tl.load(src + at, mask=inside, other=0.0)\n"
            "    x = tl.where(x > 0, x, x * par_negative_slope)\n"
            "    scale, other = tl.load(parameters + 1), tl.load(parameters + 2)\n"
            "    x = scale * x + other * tl.load(op_other + at, mask=inside, other=0.0)\n"
            "    tl.store(dst + at, x, mask=inside)\n"
        )
        first = kernel.parameters[0]
        slots = (
            Slot("src"),
            Slot("parameter", first),
            Slot("parameters"),
            Slot("operand", "other"),
            Slot("dst"),
        )
        return Source(text.replace("negative_slope", first), "toy", slots, language="triton")


@pytest.fixture(scope="module")
def gpu() -> Iterator[PosingDriver]:
    with posing() as driver:
        yield driver


def tensors(plan: FusionPlan, seed: int) -> dict[str, torch.Tensor]:
    return {key: torch_of(array) for key, array in random_arrays(plan, seed).items()}


def torch_of(array: Any) -> torch.Tensor:
    if array.dtype.name in ("uint16", "bfloat16"):  # the latter where another test imported ml_dtypes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def assert_right(plan: FusionPlan, seed: int, got: torch.Tensor, slack: float = 64.0) -> None:
    want = reference(plan, random_arrays(plan, seed))
    epsilon = slack * DTYPES[plan.src.compute_dtype].epsilon
    rounding = DTYPES[plan.src.dtype].epsilon if plan.src.itemsize == 2 else 0.0
    largest = np.abs(want).max()
    np.testing.assert_allclose(
        got.double().numpy(), want, rtol=rounding, atol=(epsilon + rounding / 8) * largest
    )


def toy_product() -> Any:
    return forced(PRODUCT, ToyProduct, CUDA_0, ToyProduct(rows=64, columns=64, depth=64))


def test_a_call_packs_launches_and_computes(gpu: PosingDriver) -> None:
    compiled = toy_product()
    before = len(gpu.launches)
    got = compiled(**tensors(compiled.plan, 1))
    assert got.shape == compiled.output.shape
    assert got.stride() == compiled.output.element_strides
    assert_right(compiled.plan, 1, got)
    (launch,) = gpu.launches[before:]
    assert launch.arguments[2].encoded.address == got.data_ptr()


def test_a_bound_plan_packs_once_and_encodes_what_moves(gpu: PosingDriver) -> None:
    compiled = toy_product()
    given = tensors(compiled.plan, 2)
    bound = compiled.bind(weight=given["weight"])
    out = torch.full_like(compiled(**given), float("nan"))
    before, encoded = len(gpu.launches), len(gpu.encodings)
    for _ in range(3):
        assert bound(given["src"], out) is out
    assert_right(compiled.plan, 2, out)
    assert len(gpu.launches) == before + 3
    assert len(gpu.encodings) <= encoded + 3
    weights = {launch.arguments[1].encoded.address for launch in gpu.launches[before:]}
    assert len(weights) == 1
    assert given["weight"].data_ptr() not in weights  # a bound operand is a copy


def test_parameters_by_value_and_by_pointer(gpu: PosingDriver) -> None:
    compiled = forced(AFFINE, ToyAffine, CUDA_0)
    plan, given = compiled.plan, tensors(compiled.plan, 3)
    names = [each.key for each in plan.parameters]
    assert_right(plan, 3, compiled(**given))
    numbers = dict(zip(names, (0.5, 2.0, -3.0), strict=True))
    got = compiled(**given, **numbers)
    arrays = random_arrays(plan, 3)
    want = plan.reference(arrays.pop("src"), arrays, numbers)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


def test_what_the_program_tells(gpu: PosingDriver) -> None:
    compiled = toy_product()
    told = compiled.to_json()
    assert told["program"]["resources"]["wgmma"] > 0
    assert told["resources"]["spill_bytes"] == 0
    assert "registers per thread, none spilled; 16.4 kB of shared memory for 128 threads" in str(
        compiled.explain()
    )


def test_an_error_of_the_driver_reaches_the_caller_and_the_next_call_works(gpu: PosingDriver) -> None:
    compiled = toy_product()
    given = tensors(compiled.plan, 4)
    gpu.statuses = [700]
    with pytest.raises(BuildError, match="a kernel launched before this one failed"):
        compiled(**given)
    assert_right(compiled.plan, 4, compiled(**given))


def test_what_cannot_be_read_is_refused_before_a_launch(gpu: PosingDriver) -> None:
    compiled = toy_product()
    given = tensors(compiled.plan, 5)
    before = len(gpu.launches)
    elsewhere = torch.empty(given["src"].shape, dtype=torch.float16, device="meta")
    for src, said in (
        (elsewhere, "is on meta"),
        (given["src"].float(), "want f16"),
        (given["src"].numpy(), "memory"),
    ):
        with pytest.raises(ArgumentError, match=said):
            compiled(src, weight=given["weight"])
    assert len(gpu.launches) == before


def test_compile_takes_the_templates_in_turn(gpu: PosingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRITON, "templates", (ToyProduct,))
    compiled = compile_plan(PRODUCT, CUDA_0, cache=False)
    assert compiled.choice.template == ToyProduct()
    assert_right(compiled.plan, 6, compiled(**tensors(compiled.plan, 6)))


@pytest.mark.parametrize(
    "build", list(builds(PLANS, [CUDA_0])), ids=lambda build: f"{build.template.name}-{build.plan}"
)
def test_every_template_through_the_whole_path(gpu: PosingDriver, build: Any) -> None:
    """Plain Triton is computed; of Gluon, which nothing here can run, the launch is looked at."""
    gpu.computes = build.job.source.language == "triton"
    compiled = forced(build.plan, type(build.template), CUDA_0, build.template)
    before = len(gpu.launches)
    got = compiled(**tensors(compiled.plan, 7))
    computed, gpu.computes = gpu.computes, True
    assert len(gpu.launches) == before + 1
    if computed:
        assert_right(compiled.plan, 7, got[0] if compiled.plan.results else got)


def test_every_template_is_launched() -> None:
    built = {type(build.template) for build in builds(PLANS, [CUDA_0])}
    assert built >= set(TEMPLATES), "add a plan that each template takes to PLANS"
