"""Statistics of a product's rows on Hopper, run by the emulator: every form against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gluon_emulator
from forced import refusal_of
from fuseplan.backends.triton.templates import hopper_tiles
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.backends.triton.templates.summary import ProductSummary, bound
from fuseplan.kernels.emit import COUNTER_BYTES
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

PLANS = (
    "bf16[337x200] -> linear(1301) -> cross_entropy",
    "bf16[600x1064] -> linear(520) -> cross_entropy(label_smoothing=0.1, z_loss=0.001)",
    "f16[330x41] -> linear(665) -> bias -> cross_entropy(ignore_index=2)",
    "f16[3x77x24, bsc] -> linear(267) -> cross_entropy",
    "f16[270x32] -> matmul(513) -> logsumexp(axes=-1)",
    "bf16[300x64] -> matmul(520) -> scale -> batch_norm -> cross_entropy(index_dtype=i64) -> mul",
    "f16[133x16] -> linear(329) -> argmax(axes=-1)",
    "f16[121x8] -> linear(233) -> bias -> var(axes=-1)",
    "bf16[221x8] -> linear(133) -> amin(axes=-1) -> add",
    "f16[2x16x6x5, nhwc] -> conv2d(99, kernel=1) -> bias -> amax(axes=1)",
)
FORM = ("box", "columns", "groups", "together", "resident", "programs", "band", "spread")


@pytest.fixture(scope="module")
def target() -> Target:
    """A GPU of three processors: programs have several tiles, and not all as many."""
    return replace(parse_target("triton:sm_90"), processors=3)


def emulated(
    plan: FusionPlan, choice: Hopper, target: Target, arrays: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Results by key, that of the plan under `dst`; the counters are left zero."""
    kernel = lower(match(plan))
    source = choice.emit(kernel, target)
    made: dict[str, NDArray[Any]] = {"dst": np.full(kernel.dst.span, np.nan, np.float32)}
    made |= {each.key: np.full(each.shape, np.nan, np.float32).ravel() for each in kernel.outputs}
    room = np.full(source.workspace_bytes // 2, np.nan, np.float32)  # elements of two bytes
    room[: COUNTER_BYTES // 2] = 0
    memories: list[Any] = []
    for slot in source.slots:
        key = slot.key or slot.kind
        if slot.kind == "workspace":
            memories.append(room)
        elif key in made:
            memories.append(made[key])
        elif slot.kind == "parameter":
            memories.append(next(each.value for each in plan.parameters if each.key == key))
        else:
            dtype = kernel.src.dtype if key == "src" else kernel.operand(key).dtype
            array = exact(arrays[key], dtype)
            array = np.moveaxis(array, 1, -1) if array.ndim == 4 and key == "src" else array
            if slot.kind == "operand" and kernel.operand(key).packed:
                array = choice.packing(kernel, target, kernel.operand(key)).of(array)
            memories.append(np.ravel(array).astype(np.float32))
    gluon_emulator.run(source, memories)
    assert not room[: COUNTER_BYTES // 4].any(), "counters are left zero"
    return made


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("bf16[*x1064] -> linear(520) -> cross_entropy", Reason.KNOWN_EXTENTS),
        ("f32[300x64] -> linear(520, precision=tf32) -> logsumexp(-1)", Reason.NOT_HALF),
    ],
)
def test_open_rows_and_rounded_factors_are_refused(plan: str, reason: Reason, target: Target) -> None:
    refusal = refusal_of(plan, Hopper, target)
    assert refusal is not None
    assert refusal.reason is reason


def test_the_bound_is_that_of_the_statistics(target: Target) -> None:
    kernel = lower(match(FusionPlan.parse("bf16[300x1064] -> linear(520) -> cross_entropy")))
    first = [next(iter(kind.candidates(kernel, target, "default"))) for kind in (Hopper, ProductSummary)]
    assert [each.error_bound(kernel) for each in first] == [bound(kernel, "native", n) for n in (16, 1)]
    for choice in Hopper.candidates(kernel, target, "default"):
        assert isinstance(choice, Hopper)
        assert len(choice.schedule(kernel).parts) <= 16


@pytest.mark.parametrize("features", [1, 16384])
def test_src_is_copied_to_whole_lines_where_many_features_read_it(
    features: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_tiles, "READ_OFTEN", features)
    text = "bf16[300x1064] -> linear(520) -> cross_entropy"
    geometry, is_often = hopper_tiles.Geometry(lower(match(FusionPlan.parse(text)))), features == 1
    assert geometry.packings == ((True, True),) if is_often else ((True, False), (True, True))
    assert geometry.pitch == 17 * 64
    assert_computed(text, target)


@pytest.mark.parametrize("text", PLANS)
def test_every_form_computes_the_statistics(text: str, target: Target) -> None:
    assert_computed(text, target)


def assert_computed(text: str, target: Target) -> None:
    """Every form gives the plan's results."""
    plan = FusionPlan.parse(text)
    assert refusal_of(plan, Hopper, target) is None
    arrays = random_arrays(plan, 3)
    out, results = evaluated(plan, arrays)
    forms: dict[tuple[object, ...], Hopper] = {}
    for choice in Hopper.candidates(lower(match(plan)), target, "default"):
        assert isinstance(choice, Hopper)
        forms.setdefault(tuple(choice.knobs[name] for name in FORM), choice)
    kinds = {tuple(form[2:]): choice for form, choice in forms.items()}
    wide = {form[:2] + form[-1:]: choice for form, choice in forms.items()}
    for choice in {*kinds.values(), *wide.values()}:
        made = emulated(plan, choice, target, arrays)
        for key, want in {"dst": out, **results}.items():
            got = made[key].reshape(want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3, err_msg=f"{choice.text} {key}")
