"""Calls of plans that give several tensors: how results are given, made, named and refused."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import fuseplan
from fuseplan import Arguments, FusionPlan
from fuseplan.errors import ArgumentError
from fuseplan.measure.data import evaluated
from fuseplan.tensors.arrays import empty
from training import assert_trained, training_arrays

FORWARD = "f32[6x4x5x3] -> bias -> batch_norm_training(running=True, momentum=0.3) -> relu"
BACKWARD = "f32[6x4x5x3] -> batch_norm_backward(relu)"
SAVED, RUNNING = ["saved_mean", "saved_inverse_variance"], ["running_mean", "running_variance"]
Arrays = dict[str, Any]


@pytest.fixture(params=("cpu", "reference"))
def forward(request: pytest.FixtureRequest) -> fuseplan.CompiledPlan:
    return fuseplan.compile(FORWARD, request.param, threads=2)


@pytest.fixture(params=("cpu", "reference"))
def backward(request: pytest.FixtureRequest) -> fuseplan.CompiledPlan:
    return fuseplan.compile(BACKWARD, request.param, threads=2)


def given(text: str, seed: int = 0) -> Arrays:
    return training_arrays(FusionPlan.parse(text), seed)


def fresh(arrays: Arrays) -> Arrays:
    return {key: array.copy() if key in RUNNING else array for key, array in arrays.items()}


def test_a_named_tuple_of_the_output_and_the_results(forward: fuseplan.CompiledPlan) -> None:
    outcome = forward(**given(FORWARD))
    assert outcome._fields == ("out", *SAVED, *RUNNING)
    out, *results = outcome
    assert out is outcome.out
    assert out.shape == (6, 4, 5, 3)
    assert [(result.shape, result.dtype) for result in results] == [((4,), np.float32)] * 4


def test_outcomes_are_pickled_and_copied(forward: fuseplan.CompiledPlan) -> None:
    made = forward(**training_arrays(forward.plan))
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert type(again) is type(made)
        for one, other in zip(again, made, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_plan_without_results_gives_its_output_alone() -> None:
    plan = FusionPlan.parse("f32[4x3] -> batch_norm_training(saved=False)")
    assert isinstance(fuseplan.compile(plan, "reference")(**training_arrays(plan)), np.ndarray)


def test_updated_tensors_are_the_callers_and_others_are_new(forward: fuseplan.CompiledPlan) -> None:
    arrays = given(FORWARD)
    before = {key: arrays[key].copy() for key in RUNNING}
    first = forward(**arrays)
    assert all(getattr(first, key) is arrays[key] for key in RUNNING)
    assert all((arrays[key] != before[key]).all() for key in RUNNING)
    second = forward(**(arrays | before))
    for key in SAVED:
        assert not np.shares_memory(getattr(first, key), getattr(second, key))


def test_every_way_to_give_results_gives_the_same(forward: fuseplan.CompiledPlan) -> None:
    arrays = given(FORWARD)
    src = arrays.pop("src")
    mine = {key: np.full(4, np.nan, np.float32) for key in SAVED}
    operands = {key: array for key, array in arrays.items() if key not in RUNNING}
    want, exact = evaluated(forward.plan, {"src": src, **arrays})

    def old() -> Arrays:
        return {key: arrays[key].copy() for key in RUNNING}

    outcomes = [
        forward(src, **operands, **old()),
        forward(src, empty(forward.output), **operands, **old(), **mine),
        forward.execute(src, Arguments(forward.plan, **operands, **old())),
        forward.bind(**operands)(src, **old()),
        forward.bind(**operands, **old())(src),
        forward.bind(Arguments(forward.plan, **operands, **mine), **old())(src),
        forward.bind(**operands, **old())(src, **old(), **mine),
    ]
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.out, want, rtol=1e-5, atol=1e-5)
        for key, result in exact.items():
            np.testing.assert_allclose(getattr(outcome, key), result, rtol=1e-5, atol=1e-6)


def test_bound_results_are_written_by_every_call(forward: fuseplan.CompiledPlan) -> None:
    arrays = given(FORWARD)
    src = arrays.pop("src")
    results = {key: np.full(4, np.nan, np.float32) for key in SAVED} | {key: arrays[key] for key in RUNNING}
    bound = forward.bind(**(arrays | results))
    assert bound.missing == ()
    plan, old = forward.plan, fresh(arrays)
    for _ in range(4):  # the first call checks, the others know
        _, want = evaluated(plan, {"src": src, **old})
        outcome = bound(src, empty(plan.output))
        assert all(getattr(outcome, key) is array for key, array in results.items())
        for key, array in results.items():
            np.testing.assert_allclose(array, want[key], rtol=1e-5, atol=1e-6)
        old |= {key: array.copy() for key, array in results.items() if key in RUNNING}
        src = src * np.float32(1.5)


def test_calls_that_make_results_make_them_anew(backward: fuseplan.CompiledPlan) -> None:
    arrays = given(BACKWARD)
    bound = backward.bind(**{key: array for key, array in arrays.items() if key != "src"})
    outcomes = [bound(arrays["src"]) for _ in range(4)]
    for place, outcome in enumerate(outcomes):
        for other in outcomes[:place]:
            assert not any(np.shares_memory(one, two) for one, two in zip(outcome, other, strict=True))
            for one, two in zip(outcome, other, strict=True):
                np.testing.assert_array_equal(one, two)
    assert_trained(backward, arrays)


def test_torch_in_torch_out(backward: fuseplan.CompiledPlan) -> None:
    tensors = {key: torch.from_numpy(array) for key, array in given(BACKWARD).items()}
    outcome = backward(**tensors)
    assert all(isinstance(each, torch.Tensor) for each in outcome)
    into = torch.full((4,), float("nan"))
    again = backward(**tensors, shift_gradient=into)
    assert again.shift_gradient is into
    torch.testing.assert_close(into, outcome.shift_gradient, rtol=0, atol=0)


def test_what_has_to_be_given_is_named(forward: fuseplan.CompiledPlan) -> None:
    arrays = given(FORWARD)
    del arrays["running_variance"]
    assert forward.bind(**{key: arrays[key] for key in ("bias", "scale")}).missing == ("shift", *RUNNING)
    says = r"1 tensor missing\n  `running_variance` of operator 1 .*: f32\[4\], to be updated"
    with pytest.raises(ArgumentError, match=says):
        forward(**arrays)
    with pytest.raises(ArgumentError, match="2 operands missing"):
        fuseplan.compile("f32[2x3] -> bias -> scale", "reference")(np.zeros((2, 3), np.float32))


def test_an_unknown_result_is_refused(forward: fuseplan.CompiledPlan) -> None:
    with pytest.raises(ArgumentError, match="no operand, parameter or result `saved_variance`"):
        forward(**given(FORWARD), saved_variance=np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match="no operand, parameter or result `batch_mean`"):
        forward.bind(batch_mean=np.zeros(4, np.float32))


def frozen() -> Any:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            np.zeros(5, np.float32),
            r"has the wrong shape(.|\n)*got f32\[5\]; want f32\[4\](.|\n)*or leave it out",
        ),
        (np.zeros((4, 1), np.float32), "has the wrong shape"),
        (np.zeros(4), r"has the wrong dtype(.|\n)*got f64\[4\]; want f32\[4\]"),
        (np.zeros(8, np.float32)[::2], "has gaps, or its axes in another order"),
        (frozen(), "`saved_mean` is read-only"),
        (3.0, "`saved_mean` is a float; want a NumPy array"),
    ],
)
def test_a_wrong_tensor_is_refused(forward: fuseplan.CompiledPlan, tensor: Any, says: str) -> None:
    for give in (
        lambda: forward(**given(FORWARD), saved_mean=tensor),
        lambda: forward.bind(saved_mean=tensor),
        lambda: Arguments(forward.plan).set(forward.plan[1], saved_mean=tensor),
    ):
        with pytest.raises(ArgumentError, match=says):
            give()


def test_one_axis_may_have_any_stride_where_it_is_one() -> None:
    plan = FusionPlan.parse("f32[6x1x5] -> batch_norm_training(per_activation)")
    arrays = training_arrays(plan)
    wide = np.zeros((3, 5), np.float32)[1:2]
    outcome = fuseplan.compile(plan, "reference")(**arrays, saved_mean=wide)
    assert outcome.saved_mean is wide
    np.testing.assert_allclose(wide[0], arrays["src"].mean(axis=0)[0], rtol=1e-5, atol=1e-6)


class TestOverlaps:
    def test_results_and_the_output(self, forward: fuseplan.CompiledPlan) -> None:
        room = np.zeros(6 * 4 * 5 * 3 + 2, np.float32)
        out, mean = room[:360].reshape(6, 4, 5, 3), room[358:362]
        with pytest.raises(ArgumentError, match="result `saved_mean` overlaps `out`, and both are written"):
            forward(given(FORWARD)["src"], out, **without_src(given(FORWARD)), saved_mean=mean)

    def test_two_results(self, forward: fuseplan.CompiledPlan) -> None:
        arrays = given(FORWARD)
        says = "result `running_mean` overlaps result `saved_mean`, and both are written"
        with pytest.raises(ArgumentError, match=says):
            forward(**arrays, saved_mean=arrays["running_mean"])
        with pytest.raises(ArgumentError, match=says):
            forward.bind(saved_mean=arrays["running_mean"], running_mean=arrays["running_mean"])

    def test_a_result_and_what_is_read(self, backward: fuseplan.CompiledPlan) -> None:
        arrays = given(BACKWARD)
        part = arrays["input"].reshape(-1)[:4]
        says = "result `shift_gradient` overlaps operand `input`, which the kernel still reads"
        with pytest.raises(ArgumentError, match=says):
            backward(**arrays, shift_gradient=part)
        with pytest.raises(ArgumentError, match=says):
            backward.bind(input=arrays["input"], shift_gradient=part)
        with pytest.raises(ArgumentError, match="result `scale_gradient` overlaps operand `scale`"):
            backward(**arrays, scale_gradient=arrays["scale"])

    def test_src_and_a_bound_result(self, backward: fuseplan.CompiledPlan) -> None:
        """Also where the tensors look like those of the call before, which are checked by their addresses."""
        arrays = given(BACKWARD)
        operands = without_src(arrays)
        room = np.zeros(364, np.float32)
        src, own = room[:360].reshape(6, 4, 5, 3), room[360:]
        bound = backward.bind(**operands, scale_gradient=own)
        for out in (None, empty(backward.output)):
            bound(src, out)
            bound(src, out)
            with pytest.raises(ArgumentError, match="result `scale_gradient` overlaps `src`"):
                bound(room[4:].reshape(6, 4, 5, 3), out)
        with pytest.raises(ArgumentError, match="result `scale_gradient` overlaps `out`"):
            bound(arrays["src"], room[4:].reshape(6, 4, 5, 3))


def without_src(arrays: Arrays) -> Arrays:
    return {key: array for key, array in arrays.items() if key != "src"}


def test_arguments_are_set_by_step(forward: fuseplan.CompiledPlan) -> None:
    arrays = given(FORWARD)
    first, second, _ = forward.plan
    arguments = Arguments(forward.plan).set(first, bias=arrays["bias"])
    arguments.set(second, **{key: arrays[key] for key in ("scale", "shift", *RUNNING)}, momentum=0.0)
    before = {key: arrays[key].copy() for key in RUNNING}
    forward.execute(arrays["src"], arguments)
    for key in RUNNING:
        np.testing.assert_array_equal(arrays[key], before[key])


def test_keys_of_two_normalizations_differ() -> None:
    """Which no rule fuses yet; their names are the plan's all the same."""
    plan = FusionPlan.parse("f32[4x3] -> batch_norm_training -> batch_norm_training(running=True)")
    assert [each.key for each in plan.results] == [*SAVED, *(f"{key}_2" for key in SAVED), *RUNNING]
    x = np.random.default_rng(0).standard_normal((4, 3))
    vectors = {each.key: np.ones(3) for each in plan.operands}
    out, results = plan.evaluate(x, vectors | {key: np.zeros(3) for key in RUNNING})
    assert list(results) == [each.key for each in plan.results]
    np.testing.assert_allclose(results["saved_mean_2"], 1, atol=1e-12)
    np.testing.assert_allclose(out.mean(axis=0), 1, atol=1e-12)
    with pytest.raises(ArgumentError, match="running_mean, running_variance are missing"):
        plan.evaluate(x, vectors)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_many_threads_may_call_at_once(target: str) -> None:
    compiled = fuseplan.compile(BACKWARD, target, threads=1)
    inputs = [given(BACKWARD, seed) for seed in range(4)]
    want = [compiled(**arrays) for arrays in inputs]
    wrong: list[str] = []

    def call(arrays: Arrays, expected: Any) -> None:
        bound = compiled.bind(**without_src(arrays))
        for _ in range(20):
            for one, other in zip(bound(arrays["src"]), expected, strict=True):
                if not np.array_equal(one, other):
                    wrong.append("another thread's result")

    pairs = zip(inputs, want, strict=True)
    threads = [threading.Thread(target=call, args=(arrays, expected)) for arrays, expected in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
