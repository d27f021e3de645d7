"""Winograd's F(2x2, 5x5) against the float64 reference: what differs from 3x3 is the overlap of tiles."""

from typing import Any

import numpy as np
import pytest
import torch

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu import transforms
from fuseplan.backends.cpu.templates.winograd import Winograd
from fuseplan.execution.stages import decide
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan

LAYOUTS = pytest.mark.parametrize("layout", ["nhwc", "nchw"])
WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])

# Shape, features and padding.
SHAPES = (
    ("2x13x9x11", 37, "2"),
    ("1x48x35x35", 64, "2"),
    ("3x5x1x1", 3, "2"),
    ("1x1x5x5", 1, "0"),
    ("2x17x19x33", 48, "same"),
    ("1x20x6x53", 8, "(2, 0)"),
    ("1x8x10x17", 24, "((0, 3), (2, 1))"),
    ("1x4x4x4", 5, "5"),
    ("2x33x28x1", 18, "2"),
    ("3x40x7x7", 16, "1"),
)


def plan_of(
    shape: str, features: int, padding: str, layout: str, tail: str = "", dtype: str = "f32"
) -> FusionPlan:
    return FusionPlan.parse(
        f"{dtype}[{shape}, {layout}] -> conv2d({features}, kernel=5, padding={padding}){tail}"
    )


@pytest.mark.part(4)
@LAYOUTS
@WIDTHS
@pytest.mark.parametrize(("shape", "features", "padding"), SHAPES)
def test_any_shape(layout: str, width: int, shape: str, features: int, padding: str) -> None:
    plan = plan_of(shape, features, padding, layout, " -> bias -> relu")
    assert_close(forced(plan, Winograd, narrowed(width, threads=2)), random_arrays(plan, 1), slack=24)


@LAYOUTS
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("before", ["", "batch_norm -> relu -> "])
def test_half_storage_and_operators_around(layout: str, dtype: str, before: str) -> None:
    conv = "conv2d(19, kernel=5, padding=2)"
    plan = FusionPlan.parse(f"{dtype}[2x13x10x23, {layout}] -> {before}{conv} -> batch_norm -> add -> silu")
    assert_close(forced(plan, Winograd, narrowed(32)), random_arrays(plan, 2), slack=60)


@LAYOUTS
@pytest.mark.parametrize("knobs", [(1, 1, 1, 1), (1, 3, 2, 1), (3, 2, 3, 2), (2, 1, 40, 100), (5, 3, 11, 1)])
def test_any_knobs(layout: str, knobs: tuple[int, int, int, int]) -> None:
    plan = plan_of("2x10x22x37", 75, "2", layout, " -> bias")
    template = Winograd(2, *knobs)
    assert_close(forced(plan, Winograd, narrowed(32, threads=2), template), random_arrays(plan, 3), slack=24)


@LAYOUTS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (8, 9), (29, 39)])
def test_nan_and_infinity_reach_what_they_touch(layout: str, value: float, place: tuple[int, int]) -> None:
    plan = plan_of("2x18x30x40", 20, "2", layout)
    arrays = random_arrays(plan, 4)
    arrays["src"][1, 2, *place] = value
    assert_same_exceptions(forced(plan, Winograd, narrowed(32)), arrays)


@LAYOUTS
def test_nothing_outside_the_tensors_is_touched(layout: str, guarded: Any) -> None:
    plan = plan_of("2x17x9x13", 23, "2", layout, " -> bias -> relu")
    arrays = random_arrays(plan, 5)
    src, out = guarded(plan.src), guarded(plan.output)
    src[...] = arrays["src"]
    forced(plan, Winograd, narrowed(64))(**(arrays | {"src": src}), out=out)
    want = reference(plan, arrays)
    np.testing.assert_allclose(out, want, atol=3e-6 * np.abs(want).max())


@LAYOUTS
def test_its_error_is_at_most_twice_torchs(layout: str) -> None:
    plan = plan_of("1x48x35x35", 64, "2", layout)
    arrays = random_arrays(plan, 6)
    want = reference(plan, arrays)
    src, weight = (torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in ("src", "weight"))
    torchs = np.abs(torch.nn.functional.conv2d(src, weight, padding=2).numpy() - want).max()
    assert np.abs(wide(forced(plan, Winograd, narrowed(32))(**arrays)) - want).max() < 2 * torchs


def test_error_stays_within_the_bound_that_is_claimed() -> None:
    plan = plan_of("1x9x12x12", 7, "2", "nhwc")
    compiled = forced(plan, Winograd, narrowed(32))
    arrays = random_arrays(plan, 7)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    # No tile has larger elements than the whole channel.
    largest = np.abs(arrays["src"]).max(axis=(0, 2, 3))
    size = (np.abs(arrays["weight"]).sum(axis=(2, 3)) * largest).sum(axis=1)
    bound = compiled.choice.template.error_bound(compiled.kernel)
    assert (np.abs(got - want) <= bound * size[None, :, None, None]).all()


def test_strict_excludes_it() -> None:
    plan = plan_of("1x64x28x28", 64, "2", "nhwc")
    assert decide(plan, "cpu:avx512").choice.template.name == "winograd"
    strict = decide(plan, "cpu:avx512", accuracy="strict")
    assert strict.choice.template.name == "direct"
    refusal = first_refusal(Winograd.limits(strict.kernel, strict.target, "strict"), "winograd")
    assert refusal is not None
    assert refusal.reason is Reason.ACCURACY
    assert refusal_of(plan, Winograd, narrowed(32)) is None


def test_transforms_convolve() -> None:
    made, rng = transforms.transforms(2, 5), np.random.default_rng(8)
    src, weight = rng.standard_normal(6), rng.standard_normal(5)
    got = made.dst @ ((made.weight @ weight) * (made.src @ src))
    np.testing.assert_allclose(got, np.correlate(src, weight, "valid"), atol=1e-12)
