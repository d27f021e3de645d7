from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fuseplan
from fuseplan import Arguments, FusionPlan
from fuseplan.backends.backend import Block
from fuseplan.compile import CompiledPlan
from fuseplan.errors import ArgumentError
from fuseplan.measure.data import deviation, random_arrays, reference
from fuseplan.tensors.arrays import empty, view

TEXT = "f32[2x5x9x7, nhwc] -> conv2d(6, kernel=3, padding=1) -> bias -> add -> leaky_relu(0.1)"
TARGETS = ("cpu", "reference")
Arrays = dict[str, Any]


@pytest.fixture(params=TARGETS)
def compiled(request: pytest.FixtureRequest) -> fuseplan.CompiledPlan:
    return fuseplan.compile(TEXT, request.param, threads=2)


@pytest.fixture
def arrays() -> Arrays:
    return random_arrays(FusionPlan.parse(TEXT), seed=5)


def operands(arrays: Arrays) -> Arrays:
    return {key: value for key, value in arrays.items() if key != "src"}


def is_right(got: Any, arrays: Arrays, text: str = TEXT, **parameters: float) -> bool:
    plan = FusionPlan.parse(text)
    exact = {key: np.asarray(value, np.float64) for key, value in arrays.items()}
    want = plan.reference(exact.pop("src"), exact, parameters)
    return deviation(np.asarray(got), want) < 1e-5


def test_every_way_to_call_gives_the_same(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    given = operands(arrays)
    arguments = Arguments(compiled.plan, **given)
    free = {"other": given["other"]}
    bound = {key: value for key, value in given.items() if key != "other"}
    results = [
        compiled(arrays["src"], **given),
        compiled.execute(arrays["src"], arguments),
        compiled.bind(arguments)(arrays["src"]),
        compiled.bind(**given)(arrays["src"]),
        compiled.bind(**bound)(arrays["src"], **free),
        compiled.bind()(arrays["src"], **given),
        compiled.bind(arguments, negative_slope=0.1)(arrays["src"]),
    ]
    assert is_right(results[0], arrays)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_one_compile_runs_with_other_data_and_other_arguments(compiled: fuseplan.CompiledPlan) -> None:
    for seed in range(3):
        other = random_arrays(compiled.plan, seed=seed)
        assert is_right(compiled(**other), other)
        assert is_right(compiled(**other, negative_slope=0.75), other, negative_slope=0.75)


def test_bound_parameters_may_be_overridden(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    bound = compiled.bind(**operands(arrays), negative_slope=0.5)
    first = bound(arrays["src"])
    assert is_right(first, arrays, negative_slope=0.5)
    assert is_right(bound(arrays["src"], negative_slope=0.25), arrays, negative_slope=0.25)
    np.testing.assert_array_equal(bound(arrays["src"]), first)


def test_free_operands_of_one_call_do_not_stay(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    bound = compiled.bind(**operands(arrays))
    first = bound(arrays["src"]).copy()
    other = arrays | {"bias": arrays["bias"] + 1}
    assert is_right(bound(arrays["src"], bias=other["bias"]), other)
    np.testing.assert_array_equal(bound(arrays["src"]), first)


def test_two_bound_plans_of_one_program_keep_their_own(
    compiled: fuseplan.CompiledPlan, arrays: Arrays
) -> None:
    other = arrays | {"weight": arrays["weight"] * 2}
    first, second = compiled.bind(**operands(arrays)), compiled.bind(**operands(other))
    for _ in range(3):
        assert is_right(first(arrays["src"]), arrays)
        assert is_right(second(arrays["src"]), other)


def test_bound_operands_are_copies_and_residuals_are_not(
    compiled: fuseplan.CompiledPlan, arrays: Arrays
) -> None:
    given = operands(arrays)
    bound = compiled.bind(**given)
    before = bound(arrays["src"]).copy()
    given["weight"] *= 3
    np.testing.assert_array_equal(bound(arrays["src"]), before)
    given["other"][...] += 100
    assert (bound(arrays["src"]) > before).all()


def test_operands_need_not_outlive_the_binding(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    given = operands(arrays)
    gone = weakref.ref(given["weight"])
    bound = compiled.bind(**given)
    del given["weight"]
    weight = arrays.pop("weight").copy()
    gc.collect()
    assert gone() is None, "the packed copy is enough"
    assert is_right(bound(arrays["src"]), arrays | {"weight": weight})


def test_non_contiguous_operands_are_packed(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    scattered = np.zeros((12, 5, 3, 6), np.float32)[::2, :, :, ::2]
    scattered[...] = arrays["weight"]
    given = operands(arrays) | {"weight": scattered, "bias": np.repeat(arrays["bias"], 3)[::3]}
    assert is_right(compiled(arrays["src"], **given), arrays)


def test_out_is_written_and_returned(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    bound = compiled.bind(**operands(arrays))
    out = empty(compiled.output)
    for _ in range(3):
        out[...] = np.nan
        assert bound(arrays["src"], out) is out
        assert is_right(out, arrays)
    assert view(bound(arrays["src"]), "out").matches(compiled.output)


def test_a_new_output_each_time(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    bound = compiled.bind(**operands(arrays))
    first, second = bound(arrays["src"]), bound(arrays["src"])
    assert not np.shares_memory(first, second)


def test_out_is_fully_written_and_nothing_beside_it(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    room = np.full(compiled.output.size + 64, 7, np.float32)
    n, c, h, w = compiled.output.shape
    out = room[32:-32].reshape(n, h, w, c).transpose(0, 3, 1, 2)
    out[...] = np.nan
    compiled.bind(**operands(arrays))(arrays["src"], out)
    assert is_right(out, arrays)
    assert (room[:32] == 7).all()
    assert (room[-32:] == 7).all()


# ---- what is refused, before anything is launched


@pytest.fixture
def bound(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> fuseplan.BoundPlan:
    return compiled.bind(**operands(arrays))


def refused(call: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(ArgumentError) as met:
        call(*args, **named)
    return str(met.value)


@pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "after a right call"])
class TestRefusals:
    @pytest.fixture(autouse=True)
    def _warm(self, is_warm: bool, bound: fuseplan.BoundPlan, arrays: Arrays) -> None:
        if is_warm:
            bound(arrays["src"], empty(FusionPlan.parse(TEXT).output))

    def test_another_input_is_shown_beside_the_plans(self, bound: fuseplan.BoundPlan, arrays: Arrays) -> None:
        src = arrays["src"]
        assert "got f32[1x5x9x7, nhwc]; want f32[2x5x9x7, nhwc]" in refused(bound, src[:1])
        assert "got f64[2x5x9x7, nhwc]; want f32[2x5x9x7, nhwc]" in refused(bound, src.astype(np.float64))
        contiguous = np.ascontiguousarray(src)
        assert "got f32[2x5x9x7]; want f32[2x5x9x7, nhwc]" in refused(bound, contiguous)
        assert "layout" in refused(bound, src[:, :, ::-1])
        assert "`src` is a list" in refused(bound, [1, 2])
        assert "want f32[2x5x9x7, nhwc]" in refused(bound, src[0])

    def test_a_wrong_out_is_refused(self, bound: fuseplan.BoundPlan, arrays: Arrays) -> None:
        src = arrays["src"]
        assert "`out` does not match the plan" in refused(bound, src, np.zeros((2, 6, 9, 7), np.float32))
        assert "got f64" in refused(bound, src, np.zeros((2, 9, 7, 6)).transpose(0, 3, 1, 2))
        assert "`out` is a str" in refused(bound, src, "there")

    def test_a_read_only_out_is_refused(self, bound: fuseplan.BoundPlan, arrays: Arrays) -> None:
        out = empty(FusionPlan.parse(TEXT).output)
        out[...] = 3
        out.flags.writeable = False
        assert "`out` is read-only" in refused(bound, arrays["src"], out)
        assert (out == 3).all()

    def test_out_over_src_is_refused(self, bound: fuseplan.BoundPlan) -> None:
        memory = np.zeros(2 * 9 * 7 * 6 + 100, np.float32)
        src = memory[100 : 100 + 2 * 9 * 7 * 5].reshape(2, 9, 7, 5).transpose(0, 3, 1, 2)
        out = memory[: 2 * 9 * 7 * 6].reshape(2, 9, 7, 6).transpose(0, 3, 1, 2)
        assert "`out` overlaps `src`" in refused(bound, src, out)
        assert (memory == 0).all()

    def test_out_over_a_bound_residual_is_refused(self, bound: fuseplan.BoundPlan, arrays: Arrays) -> None:
        before = arrays["other"].copy()
        assert "`out` overlaps operand `other`" in refused(bound, arrays["src"], arrays["other"])
        np.testing.assert_array_equal(arrays["other"], before)

    def test_unknown_operands_are_refused(self, bound: fuseplan.BoundPlan, arrays: Arrays) -> None:
        assert "`wight`" in refused(bound, arrays["src"], wight=arrays["weight"])


def test_missing_operands_are_named(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    bound = compiled.bind(bias=arrays["bias"])
    assert bound.missing == ("weight", "other")
    said = refused(bound, arrays["src"])
    assert "2 operands missing" in said
    assert "`weight` of operator 0 (conv2d): f32[6x5x3x3]" in said
    assert "`other` of operator 2 (add)" in said
    assert "1 operand missing" in refused(bound, arrays["src"], weight=arrays["weight"])


def test_out_over_an_unbound_operand_is_refused(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    given = operands(arrays)
    out = given["other"]
    assert "`out` overlaps operand `other`" in refused(compiled, arrays["src"], out, **given)
    memory = np.zeros(2 * 6 * 9 * 7, np.float32)
    out = memory.reshape(2, 9, 7, 6).transpose(0, 3, 1, 2)
    given["bias"] = memory[10:16]
    assert "`out` overlaps operand `bias`" in refused(compiled, arrays["src"], out, **given)


def test_arguments_of_another_plan_are_refused(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    other = Arguments(FusionPlan.parse("f32[2x3] -> relu"))
    assert refused(compiled.execute, arrays["src"], other).endswith(f"\n  want {TEXT}")
    assert "another plan" in refused(compiled.bind, other)
    assert "want Arguments" in refused(compiled.execute, arrays["src"], {"weight": 1})


def test_what_is_bound_prints_and_does_not_travel(compiled: fuseplan.CompiledPlan, arrays: Arrays) -> None:
    bound = compiled.bind(**operands(arrays))
    assert repr(bound) == f"<bound: {TEXT}>"
    assert repr(compiled.bind(weight=arrays["weight"])) == f"<bound, each call gives bias, other: {TEXT}>"
    for each in (compiled, bound):
        with pytest.raises(TypeError, match="keep the text of its plan and the operands"):
            pickle.dumps(each)


def test_a_residual_may_be_src_itself() -> None:
    plan = "f32[1x4x6x6, nhwc] -> conv2d(4, kernel=3, padding=1) -> add"
    arrays = random_arrays(FusionPlan.parse(plan), seed=1)
    arrays["other"] = arrays["src"]
    assert is_right(fuseplan.compile(plan)(**arrays), arrays, plan)


def test_reference_reads_a_residual_in_front_of_a_contraction_where_it_lies() -> None:
    """In the layout of its operator's output, whatever gaps src has."""
    plan = FusionPlan.parse("f32[2x3x4x5, strides=240:1:60:12] -> add -> conv2d(4, kernel=1)")
    arrays = random_arrays(plan, seed=3)
    assert deviation(fuseplan.compile(plan, "reference")(**arrays), reference(plan, arrays)) < 1e-6


@pytest.mark.parametrize("target", TARGETS)
def test_out_right_beside_src_in_one_buffer_is_taken(target: str) -> None:
    bound = fuseplan.compile("f32[1x8x3x3] -> relu", target).bind()
    whole = np.random.default_rng(0).standard_normal((1, 24, 3, 3)).astype(np.float32)
    for first, second in ((8, 0), (8, 16), (0, 8)):
        src, out = whole[:, first : first + 8], whole[:, second : second + 8]
        want = np.maximum(src, 0)
        assert bound(src, out) is out
        np.testing.assert_array_equal(out, want)


# ---- numbers that are not


@pytest.mark.parametrize("target", TARGETS)
def test_nan_and_infinity_are_propagated(target: str) -> None:
    compiled = fuseplan.compile("f32[1x4] -> relu", target)
    got = compiled(np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32))
    assert np.isnan(got[0, 0])
    assert got[0, 1] == np.inf
    assert got[0, 2] == 0


@pytest.mark.parametrize("target", TARGETS)
def test_a_parameter_may_be_nan_and_is_rounded_to_the_compute_dtype(target: str) -> None:
    compiled = fuseplan.compile("f32[1x2] -> leaky_relu(0.5)", target)
    src = np.array([[-1.0, 2.0]], np.float32)
    assert np.isnan(compiled(src, negative_slope=np.nan)[0, 0])
    np.testing.assert_array_equal(compiled(src, negative_slope=1e300), [[-np.inf, 2]])


# ---- other packages' tensors


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [("f64", torch.float64, 1e-14), ("f32", torch.float32, 1e-6), ("f16", torch.float16, 1e-3),
     ("bf16", torch.bfloat16, 8e-3)],
)  # fmt: skip
@pytest.mark.parametrize("target", TARGETS)
def test_torch_in_torch_out(name: str, dtype: torch.dtype, bound: float, target: str) -> None:
    compiled = fuseplan.compile(f"{name}[2x8x5x5, nhwc] -> conv2d(8, kernel=3) -> bias -> relu", target)
    torch.manual_seed(0)
    src = torch.randn(2, 8, 5, 5).to(dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 8, 3, 3).to(dtype)
    bias = torch.randn(8, dtype=dtype if name == "f64" else torch.float32)
    layer = compiled.bind(weight=weight, bias=bias)
    got = layer(src)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last)
    want = torch.conv2d(src.double(), weight.double(), bias.double()).relu()
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < bound
    out = torch.empty_like(got)
    assert layer(src, out) is out
    assert torch.equal(out, got)
    with pytest.raises(ArgumentError, match="overlaps"):
        fuseplan.compile(f"{name}[2x3] -> relu", target)(*(torch.zeros(2, 3, dtype=dtype),) * 2)


def test_numpy_in_torch_out(arrays: Arrays) -> None:
    compiled = fuseplan.compile(TEXT)
    out = torch.empty(2, 6, 9, 7).to(memory_format=torch.channels_last)
    assert compiled(**arrays, out=out) is out
    assert is_right(out.numpy(), arrays)


def test_bf16_in_numpy_is_bits_or_ml_dtypes() -> None:
    plan = FusionPlan.parse("bf16[3x40] -> gelu")
    arrays = random_arrays(plan, seed=0)
    want = reference(plan, arrays)
    bits = arrays["src"].view(np.uint16)
    compiled = fuseplan.compile(plan)
    for src in (bits, bits.view(ml_dtypes.bfloat16)):
        assert deviation(compiled(src), want) < 4e-3
        out = np.zeros((3, 40), ml_dtypes.bfloat16)
        assert deviation(compiled(src, out), want) < 4e-3


# ---- many threads at once


def free_blocks(compiled: CompiledPlan) -> list[Block]:
    assert compiled._runner is not None
    return compiled._runner.free


@pytest.mark.parametrize("target", TARGETS)
def test_many_threads_may_call_at_once(target: str) -> None:
    text = "f32[1x16x24x24, nhwc] -> conv2d(16, kernel=3, padding=1) -> bias -> relu"
    compiled = fuseplan.compile(text, target, threads=2)
    sets = [random_arrays(compiled.plan, seed=seed) for seed in range(6)]
    shared = compiled.bind(**operands(sets[0]))
    wanted = [compiled(**arrays) for arrays in sets]
    shared_wanted = [shared(arrays["src"]) for arrays in sets]
    wrong: list[int] = []
    start = threading.Barrier(len(sets))

    def work(index: int) -> None:
        arrays = sets[index]
        own, out = compiled.bind(**operands(arrays)), empty(compiled.output)
        start.wait()
        for _ in range(50 if target == "cpu" else 3):
            same = np.array_equal(own(arrays["src"], out), wanted[index])
            same &= np.array_equal(shared(arrays["src"], out), shared_wanted[index])
            same &= np.array_equal(compiled(**arrays), wanted[index])
            if not same:
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(sets))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert len(free_blocks(compiled)) <= len(sets) + 1, "blocks are used again"


def test_a_failed_launch_gives_its_block_back(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = fuseplan.compile("f32[1x4] -> relu", "reference")
    bound = compiled.bind()
    src = np.zeros((1, 4), np.float32)
    bound(src)
    blocks = len(free_blocks(compiled))

    def fails() -> None:
        raise MemoryError

    for block in free_blocks(compiled):
        monkeypatch.setattr(block, "launch", fails)
    with pytest.raises(MemoryError):
        bound(src)
    assert len(free_blocks(compiled)) == blocks
