"""What a result's distance from float64 is told over: the largest value, and what rounded statistics add."""

from collections.abc import Callable

import numpy as np
import pytest

import fuseplan
from fuseplan.execution.stages import decide
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.clock import HostClock
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.ground import OUT, Ground, first_wrong
from fuseplan.plans.plan import FusionPlan

torch = pytest.importorskip("torch")

# A mean of two elements: all of dx is cancellation, and next to nothing is left of it.
CANCELS = "f32[2x1x2x9] -> batch_norm_backward(relu, mode=per_activation, statistics=recomputed)"
SUMMED = "f32[4x3x5x5] -> batch_norm_training -> relu"


def host(text: str) -> Ground:
    return Ground(FusionPlan.parse(text), 1, None, HostClock())


def torch_on_the_host(text: str) -> Ground:
    """A GPU's tensors and float64, in host memory."""
    return Ground(FusionPlan.parse(text), 1, "cpu", HostClock())


GROUNDS: list[Callable[[str], Ground]] = [host, torch_on_the_host]


@pytest.mark.parametrize("made", GROUNDS)
@pytest.mark.parametrize("text", [CANCELS, SUMMED, f"{CANCELS} -> scale"])
def test_a_right_kernel_is_right(made: Callable[[str], Ground], text: str) -> None:
    place, plan = made(text), FusionPlan.parse(text)
    compiled = fuseplan.compile(plan, target="cpu")
    got = compiled(**{key: np.asarray(tensor) for key, tensor in place.tensors.items()})
    as_tensors = [each if made is host else torch.from_numpy(each) for each in got]
    errors = place.deviations(tuple(as_tensors))
    assert first_wrong(compiled.records.kernel, compiled.records.choice.template, errors) is None, errors


@pytest.mark.parametrize("made", GROUNDS)
def test_statistics_a_thousandth_off_are_wrong(made: Callable[[str], Ground]) -> None:
    place, plan = made(CANCELS), FusionPlan.parse(CANCELS)
    arrays = {key: np.asarray(tensor) for key, tensor in place.tensors.items()}
    out, results = plan.evaluate(arrays.pop("src"), arrays, slip=1e-3)
    got = [each if made is host else torch.from_numpy(each) for each in (out, *results.values())]
    wrong = first_wrong(lower(match(plan)), decide(plan, "cpu").choice.template, place.deviations(tuple(got)))
    assert wrong is not None
    assert wrong.tensor == OUT


@pytest.mark.parametrize("made", GROUNDS)
def test_without_statistics_nothing_is_added(made: Callable[[str], Ground]) -> None:
    place = made("f32[4x8] -> relu")
    want = place._want[OUT]
    largest = float(abs(want).max())
    assert place.deviations(want + 0.5)[OUT] == pytest.approx(0.5 / largest)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("made", GROUNDS)
def test_what_is_infinite_moves_nothing(made: Callable[[str], Ground]) -> None:
    place = made("f32[2x3x4] -> batch_norm_training -> elementwise('exp(x * 1e6)')")
    want = place._want
    assert not np.isfinite(np.asarray(want[OUT])).all()
    assert place.deviations(tuple(want.values()))[OUT] == 0


def test_torch_moves_the_output_as_numpy_does() -> None:
    plan = FusionPlan.parse(SUMMED)
    tensors = random_arrays(plan, 3, device="cpu")
    exact = {key: tensor.double().numpy() for key, tensor in tensors.items()}
    want, results = plan.evaluate(exact.pop("src"), exact, slip=0.125)
    got, made = evaluated(plan, tensors, 0.125)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)
    for key, result in made.items():
        np.testing.assert_allclose(result.numpy(), results[key], rtol=1e-12)
    assert not np.allclose(want, plan.reference(tensors["src"].numpy(), exact))
