"""Plans made, compiled and executed by MIOpen's calls, against the plan's meaning in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import Built, close, convolution, created, described, fails, handle, ok, random, tensor

X, W, B = random(4, 8, 9, 9), random(16, 8, 3, 3, seed=1), random(1, 16, 1, 1, seed=2)
SCALE, SHIFT, MEAN = (random(1, 16, 1, 1, seed=seed) for seed in (3, 4, 5))
VARIANCE = random(1, 16, 1, 1, seed=6) ** 2
OWN = {
    "bias": B.ravel(),
    "weight": W,
    "scale": SCALE.ravel(),
    "shift": SHIFT.ravel(),
    "mean": MEAN.ravel(),
    "variance": VARIANCE.ravel(),
}


def built(letters: str, x: Any = None, alpha: float = 1.0) -> Built:
    """A plan of these operators with all arguments; alpha is each operator's but the bias's."""
    made = Built(x or tensor(4, 8 if "C" in letters else 16, 9, 9))
    for letter in letters:
        LETTERS[letter](made, alpha)
    return made


def add_convolution(made: Built, alpha: float) -> None:
    op = made.add(miopen.miopenCreateOpConvForward, convolution(pad=1), tensor(16, 8, 3, 3))
    ok(miopen.miopenSetOpArgsConvForward(made.args, op, alpha, 0.0, W))


def add_bias(made: Built, alpha: float) -> None:
    op = made.add(miopen.miopenCreateOpBiasForward, tensor(1, 16, 1, 1))
    ok(miopen.miopenSetOpArgsBiasForward(made.args, op, Ref(1.0), None, B))


def add_normalization(made: Built, alpha: float) -> None:
    op = made.add(miopen.miopenCreateOpBatchNormInference, miopen.miopenBNSpatial, tensor(1, 16, 1, 1))
    values = (SCALE, SHIFT, MEAN, VARIANCE, 1e-3)
    ok(miopen.miopenSetOpArgsBatchNormInference(made.args, op, alpha, 0, *values))


def add_activation(made: Built, alpha: float) -> None:
    op = made.add(miopen.miopenCreateOpActivationForward, miopen.miopenActivationLEAKYRELU)
    ok(miopen.miopenSetOpArgsActivForward(made.args, op, alpha, 0, 0.25, 0.0, 0.0))


LETTERS = {"C": add_convolution, "B": add_bias, "N": add_normalization, "A": add_activation}


def exactly(made: Built, x: Any) -> Any:
    plan = made.plan.value.lowered().plan
    operands = {each.key: OWN[each.key] for each in plan.operands}
    values = {"epsilon": 1e-3, "negative_slope": 0.25, "negative_slope_2": 0.25}
    given = {each.key: values[each.key] for each in plan.parameters}
    return made.reference(x, operands, given)


def test_alpha_multiplies_each_result() -> None:
    made = built("CNA", alpha=-2.0)
    made.compile()
    assert "alpha" not in str(made.plan.value.lowered().plan)  # its factors are in kernels of their own
    conv = -2 * torch.nn.functional.conv2d(torch.tensor(X), torch.tensor(W), padding=1)
    channel = [torch.tensor(OWN[name]) for name in ("mean", "variance", "scale", "shift")]
    norm = -2 * torch.nn.functional.batch_norm(conv, *channel, False, 0.0, 1e-3)
    exact = -2 * torch.nn.functional.leaky_relu(norm, 0.25)
    close(made.execute(X), exact.numpy(), 1e-4)


def test_power_has_miopens_threshold_in_half_precision() -> None:
    for kind, threshold in ((miopen.miopenHalf, 1e-4), (miopen.miopenFloat, 1e-6)):
        made = Built(tensor(2, 3, dtype=kind))
        op = made.add(miopen.miopenCreateOpActivationForward, miopen.miopenActivationPOWER)
        assert op.value.operator.op.threshold == threshold


HALF, BFLOAT, DOUBLE = miopen.miopenHalf, miopen.miopenBFloat16, miopen.miopenDouble


@pytest.mark.parametrize(("kind", "bound"), [(HALF, 1e-3), (BFLOAT, 8e-3), (DOUBLE, 1e-12)], ids=str)
def test_types(kind: Any, bound: float) -> None:
    """bf16 is torch's here: NumPy has no such type."""
    dtype = {HALF: torch.float16, BFLOAT: torch.bfloat16, DOUBLE: torch.float64}[kind]
    x, w = (torch.tensor(each).to(dtype) for each in (X, W))
    made = Built(tensor(4, 8, 9, 9, dtype=kind))
    conv = made.add(miopen.miopenCreateOpConvForward, convolution(), tensor(16, 8, 3, 3, dtype=kind))
    of_bias = tensor(1, 16, 1, 1, dtype=DOUBLE if kind is DOUBLE else miopen.miopenFloat)
    bias = made.add(miopen.miopenCreateOpBiasForward, of_bias)
    made.compile()
    b = torch.tensor(B).to(torch.float64 if kind is DOUBLE else torch.float32)
    ok(miopen.miopenSetOpArgsConvForward(made.args, conv, 1.0, 0.0, w))
    ok(miopen.miopenSetOpArgsBiasForward(made.args, bias, 1.0, 0.0, b))
    y = torch.full((4, 16, 7, 7), torch.nan, dtype=dtype)
    made.execute_into(x, y)
    exact = torch.nn.functional.conv2d(x.double(), w.double()) + b.double()
    close(y.double().numpy(), exact.numpy(), bound)


@pytest.mark.parametrize("axes", [1, 3])
def test_other_axes_groups_and_strides(axes: int) -> None:
    shape, kernel = (5, 9, 8)[-axes:], (3,) * axes
    made = Built(tensor(2, 8, *shape))
    described_by = convolution(axes, pad=1, stride=2, groups=4)
    conv = made.add(miopen.miopenCreateOpConvForward, described_by, tensor(12, 2, *kernel))
    relu = made.add(miopen.miopenCreateOpActivationForward, miopen.miopenActivationRELU)
    made.compile()
    x, w = random(2, 8, *shape), random(12, 2, *kernel, seed=1)
    ok(miopen.miopenSetOpArgsConvForward(made.args, conv, 1.0, 0.0, w))
    ok(miopen.miopenSetOpArgsActivForward(made.args, relu, 1.0, 0.0, 0.0, 0.0, 0.0))
    compute = torch.nn.functional.conv1d if axes == 1 else torch.nn.functional.conv3d
    exact = compute(torch.tensor(x).double(), torch.tensor(w).double(), stride=2, padding=1, groups=4)
    close(made.execute(x), exact.relu().numpy())


@pytest.mark.parametrize("layout", [miopen.miopenTensorNHWC, miopen.miopenTensorCHWN])
def test_layouts(layout: Any) -> None:
    made = Ref()
    ok(miopen.miopenCreateTensorDescriptor(made))
    status = miopen.miopenSetNdTensorDescriptorWithLayout(made, miopen.miopenFloat, layout, (4, 8, 9, 9), 4)
    if layout is miopen.miopenTensorCHWN:
        fails(status, "NotImplemented", "miopenTensorCHWN", "strides")
        ok(miopen.miopenSet4dTensorDescriptorEx(made, miopen.miopenFloat, 4, 8, 9, 9, 1, 324, 36, 4))
        x = np.ascontiguousarray(X.transpose(1, 2, 3, 0)).transpose(3, 0, 1, 2)
    else:
        x = np.ascontiguousarray(X.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    plan = built("CBA", made)
    plan.compile()
    out = plan.plan.value.lowered().plan.output
    y = np.full(out.size, np.nan, np.float32)
    y = np.lib.stride_tricks.as_strided(y, out.shape, [4 * each for each in out.element_strides])
    plan.execute_into(x, y)
    close(y, exactly(plan, X))


def test_per_activation_parameters_lose_their_axis_of_one() -> None:
    made = Built(tensor(4, 3, 5, 6))
    derived = created(miopen.miopenCreateTensorDescriptor)
    ok(miopen.miopenDeriveBNTensorDescriptor(derived, made.src, miopen.miopenBNPerActivation))
    assert derived.value.spec.shape == (1, 3, 5, 6)
    for kind, derives in ((HALF, miopen.miopenFloat), (BFLOAT, miopen.miopenFloat), (DOUBLE, DOUBLE)):
        other = created(miopen.miopenCreateTensorDescriptor)
        ok(miopen.miopenDeriveBNTensorDescriptor(other, tensor(4, 3, dtype=kind), miopen.miopenBNSpatial))
        assert other.value.read()[0] is derives
    op = made.add(miopen.miopenCreateOpBatchNormInference, miopen.miopenBNPerActivation, derived)
    values = [random(1, 3, 5, 6, seed=seed) for seed in range(3)] + [random(1, 3, 5, 6) ** 2]
    ok(miopen.miopenSetOpArgsBatchNormInference(made.args, op, 1.0, 0.0, *values, 1e-5))
    made.compile()
    x = random(4, 3, 5, 6, seed=9)
    names = ("scale", "shift", "mean", "variance")
    operands = {name: value[0] for name, value in zip(names, values, strict=True)}
    close(made.execute(x), made.reference(x, operands), 1e-4)


def test_arguments_are_overwritten_and_tensors_are_read_at_each_execution() -> None:
    made = built("CBA")
    made.compile()
    first = made.execute(X)
    B[...] *= 2
    try:
        close(made.execute(X), exactly(made, X))
        assert not np.array_equal(made.execute(X), first)
    finally:
        B[...] /= 2
    assert np.array_equal(made.execute(X), first)
    bias = created_op(made, 1)
    ok(miopen.miopenSetOpArgsBiasForward(made.args, bias, 1.0, 0.0, np.zeros(16, np.float32)))
    exact = made.reference(X, {"weight": W, "bias": np.zeros(16)}, {"negative_slope": 0.25})
    close(made.execute(X), exact)


def created_op(made: Built, index: int) -> Ref:
    op = Ref()
    ok(miopen.miopenFusionPlanGetOp(made.plan, index, op))
    return op


def test_arguments_serve_an_equal_plan() -> None:
    first, second = built("CBA"), built("CBA")
    second.compile()
    second.args = first.args
    close(second.execute(X), exactly(second, X))


def test_a_plan_is_compiled_for_each_handle_and_again_after_an_operator() -> None:
    made = built("CB")
    made.compile()
    other = handle()
    y, dst = np.empty((4, 16, 9, 9), np.float32), tensor(4, 16, 9, 9)
    status = miopen.miopenExecuteFusionPlan(other, made.plan, made.src, X, dst, y, made.args)
    fails(status, "BadParm", "was not compiled with this handle")
    ok(miopen.miopenCompileFusionPlan(other, made.plan))
    ok(miopen.miopenExecuteFusionPlan(other, made.plan, made.src, X, dst, y, made.args))
    made.execute(X)
    add_activation(made, 1.0)
    status = miopen.miopenExecuteFusionPlan(other, made.plan, made.src, X, dst, y, made.args)
    fails(status, "BadParm", "was not compiled with this handle as it is now")
    made.compile()
    close(made.execute(X), exactly(made, X))
    plan = made.plan.value.lowered().plan
    assert made.handle.value.kernel(plan, None) is made.handle.value.kernel(plan, None), "made once"


def test_profiling_times_a_launch() -> None:
    made, time = built("CBA"), Ref()
    made.compile()
    fails(miopen.miopenGetKernelTime(made.handle, time), "NotInitialized", "miopenEnableProfiling")
    ok(miopen.miopenEnableProfiling(made.handle, True))
    begin = perf_counter()
    close(made.execute(X), exactly(made, X))
    wall = 1e3 * (perf_counter() - begin)
    ok(miopen.miopenGetKernelTime(made.handle, time))
    assert 0 < time.value < wall
    ok(miopen.miopenEnableProfiling(made.handle, False))
    made.execute(X)
    again = created(lambda cell: miopen.miopenGetKernelTime(made.handle, cell))
    assert again.value == time.value, "the last launch was not to be timed"


def test_a_cpu_has_no_streams() -> None:
    made, stream = handle(), Ref(1)
    ok(miopen.miopenSetStream(made, None))
    ok(miopen.miopenGetStream(made, stream))
    assert stream.value is None
    fails(miopen.miopenSetStream(made, 1234), "BadParm", "has no streams")
    fails(miopen.miopenCreateWithStream(Ref(), 1234, "cpu"), "BadParm", "has no streams")
    fails(miopen.miopenSetStream(made, object()), "BadParm", "want None; got object")
    fails(miopen.miopenSetStream(handle("triton:sm_90"), 1234), "BadParm", "is not a GPU of this machine")
    ok(miopen.miopenSetAllocator(made, None, None, None))
    fails(miopen.miopenSetAllocator(made, print, None, None), "NotImplemented", "allocator")


def test_a_stream_is_one_of_the_handles_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device = torch.device("cuda", 1)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    made = handle("triton:sm_90")
    made.value.target = replace(made.value.target, device=0)
    fails(miopen.miopenSetStream(made, Stream()), "BadParm", "the stream is of cuda:1")
    for value in (-1, 1 << 64, True, "stream"):
        fails(miopen.miopenSetStream(made, value), "BadParm", "want a torch.cuda.Stream or the address")
    made.value.target = replace(made.value.target, device=1)
    ok(miopen.miopenSetStream(made, Stream()))


def test_a_launch_is_timed_on_the_handles_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Any]] = []

    class Stream:
        device = torch.device("cuda", 0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            told.append(("record", stream))

        def synchronize(self) -> None:
            told.append(("wait", self))

        def elapsed_time(self, end: Any) -> float:
            assert told[-1] == ("wait", end)
            return 2.5

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        told.append(("enter", stream))
        yield
        told.append(("leave", stream))

    for name, value in (("Stream", Stream), ("Event", Event), ("stream", current)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (told[-1][1], device))
    made, stream, time = built("CBA"), Stream(), Ref()
    made.compile()
    made.handle.value.target = replace(made.handle.value.target, processors=132, device=0)
    ok(miopen.miopenSetStream(made.handle, stream))
    ok(miopen.miopenEnableProfiling(made.handle, True))
    close(made.execute(X), exactly(made, X))
    ok(miopen.miopenGetKernelTime(made.handle, time))
    assert time.value == 2.5
    assert [what for what, _ in told] == ["enter", "record", "record", "wait", "leave"]
    assert [where for _, where in told[:3]] == [stream, (stream, 0), (stream, 0)]


def test_a_workspace_is_checked_and_not_needed() -> None:
    made, size = built("CBA"), Ref()
    algo = miopen.miopenConvolutionFwdAlgoWinograd
    ok(miopen.miopenFusionPlanConvolutionSetAlgo(made.plan, algo))
    ok(miopen.miopenFusionPlanGetWorkSpaceSize(made.handle, made.plan, size, algo))
    made.compile()
    compiled = made.handle.value.kernel(made.plan.value.lowered().plan, algo)
    assert size.value == compiled.workspace_bytes > 0
    y, dst = np.empty((4, 16, 9, 9), np.float32), tensor(4, 16, 9, 9)
    call = (made.handle, made.plan, made.src, X, dst, y, made.args)
    ok(miopen.miopenExecuteFusionPlan_v2(*call, None, 0))
    close(y, exactly(made, X), 1e-4)
    ok(miopen.miopenExecuteFusionPlan_v2(*call, np.empty(size.value, np.uint8), size))
    told = ("the workspace is too small: its size is 1", f"needs {size.value} bytes")
    fails(miopen.miopenExecuteFusionPlan_v2(*call, np.empty(1, np.uint8), 1), "BadParm", *told)
    fails(miopen.miopenExecuteFusionPlan_v2(*call, None, 8), "BadParm", "`workspace` is null")


def test_a_horizontal_plan_is_not_yet_fused() -> None:
    made = Built(tensor(4, 8, 9, 9), direction=miopen.miopenHorizontalFusion)
    convolutions = [tensor(16, 8, 3, 3), tensor(32, 8, 3, 3)]
    first, _ = (made.add(miopen.miopenCreateOpConvForward, convolution(), each) for each in convolutions)
    told = "[horizontal]", "operators are fused one after the other, not side by side"
    fails(miopen.miopenCompileFusionPlan(made.handle, made.plan), "UnsupportedOp", *told)
    fails(miopen.miopenSetOpArgsConvForward(made.args, first, 1.0, 0.0, W), "UnsupportedOp", *told)


def test_the_output_descriptor_follows_from_the_plan() -> None:
    made = built("CBA")
    assert described(made.plan.value.place).value.spec == tensor(4, 16, 9, 9).value.spec
