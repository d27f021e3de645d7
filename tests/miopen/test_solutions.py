"""Problems and solutions of Find 2.0."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import (
    activation,
    close,
    convolution,
    created,
    fails,
    handle,
    ok,
    random,
    tensor,
)
from miopen_convolution import CONV, LEAKY, B, W, X

FORWARD = miopen.miopenProblemDirectionForward
BACKWARD = miopen.miopenProblemDirectionBackward
INFERENCE = miopen.miopenProblemDirectionInference


def describe(problem: Ref, **descriptors: Ref) -> None:
    for name, descriptor in descriptors.items():
        id = getattr(miopen, f"miopenTensor{name}")
        ok(miopen.miopenSetProblemTensorDescriptor(problem, id, descriptor))


def argument(name: str, buffer: Any, descriptor: Any = None) -> Any:
    id = getattr(miopen, f"miopenTensor{name}", None) or getattr(miopen, f"miopenScalar{name}")
    return miopen.miopenTensorArgument_t(id, descriptor, buffer)


def fused() -> Ref:
    """convolution, bias, leaky relu."""
    first = created(miopen.miopenCreateConvProblem, convolution(pad=1), FORWARD)
    describe(first, ConvolutionX=tensor(2, 8, 9, 9), ConvolutionW=tensor(16, 8, 3, 3))
    second = created(miopen.miopenCreateBiasProblem, FORWARD)
    describe(second, Bias=tensor(1, 16, 1, 1))
    third = created(
        miopen.miopenCreateActivationProblem, activation(miopen.miopenActivationLEAKYRELU, 0.25), FORWARD
    )
    for each in (second, third):
        ok(miopen.miopenFuseProblems(first, each))
        ok(miopen.miopenDestroyProblem(each))
    return first


def found(problem: Ref, options: Ref | None = None, most: int = 8) -> tuple[Ref, ...]:
    solutions, count = Ref(), Ref()
    ok(miopen.miopenFindSolutions(handle(), problem, options, solutions, count, most))
    assert count.value == len(solutions.value) <= most
    return tuple(Ref(each) for each in solutions.value)


def read(getter: Any, solution: Ref) -> Any:
    return created(lambda cell: getter(solution, cell)).value


def tensors(y: Any) -> list[Any]:
    named = {"ConvolutionX": X, "ConvolutionW": W, "Bias": B, "ActivationY": y}
    return [argument(name, value) for name, value in named.items()]


def test_solutions_are_measured_saved_loaded_and_run() -> None:
    solutions = found(fused())
    assert len({read(miopen.miopenGetSolutionSolverId, each) for each in solutions}) == len(solutions) > 1
    times = [read(miopen.miopenGetSolutionTime, each) for each in solutions]
    assert times[0] > 0
    assert times == sorted(times)
    for each in solutions:
        data = read(miopen.miopenSaveSolution, each)
        assert len(data) == read(miopen.miopenGetSolutionSize, each)
        ok(miopen.miopenDestroySolution(each))
        loaded = created(miopen.miopenLoadSolution, data, len(data))
        y = np.full((2, 16, 9, 9), np.nan, np.float32)
        ok(miopen.miopenRunSolution(handle(), loaded, 4, tensors(y), None, 0))
        close(y, LEAKY)


def test_options_order_and_limit_solutions() -> None:
    options = created(miopen.miopenCreateFindOptions)
    ok(miopen.miopenSetFindOptionResultsOrder(options, miopen.miopenFindResultsOrderByWorkspaceSize))
    sizes = [read(miopen.miopenGetSolutionWorkspaceSize, each) for each in found(fused(), options)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    y, small = np.empty((2, 16, 9, 9), np.float32), np.empty(1, np.uint8)
    status = miopen.miopenRunSolution(handle(), found(fused(), options)[-1], 4, tensors(y), small, 1)
    fails(status, "BadParm", f"its size is 1; the kernel needs {sizes[-1]} bytes")
    ok(miopen.miopenSetFindOptionWorkspaceLimit(options, sizes[-1] - 1))
    assert len(found(fused(), options)) == len(sizes) - 1
    assert len(found(fused(), most=1)) == 1
    ok(miopen.miopenSetFindOptionPreallocatedWorkspace(options, np.empty(8, np.uint8), 8))
    ok(miopen.miopenSetFindOptionPreallocatedTensor(options, miopen.miopenTensorConvolutionX, X))
    ok(miopen.miopenSetFindOptionAttachBinaries(options, 0))
    ok(miopen.miopenSetFindOptionTuning(options, 1))
    assert options.value.is_tuning
    fails(miopen.miopenSetFindOptionTuning(options, 2), "BadParm", "0 or 1")
    fails(miopen.miopenSetFindOptionWorkspaceLimit(options, -1), "BadParm", "0 or more")
    fails(miopen.miopenSetFindOptionAttachBinaries(options, 1), "NotImplemented", "no binaries")
    status = miopen.miopenSetFindOptionPreallocatedWorkspace(options, None, 8)
    fails(status, "BadParm", "`workspace` is null")


def test_a_problem_keeps_what_its_descriptors_said() -> None:
    moves = convolution(pad=1)
    problem = created(miopen.miopenCreateConvProblem, moves, FORWARD)
    src = tensor(2, 8, 9, 9)
    describe(problem, ConvolutionX=src, ConvolutionW=tensor(16, 8, 3, 3))
    ok(miopen.miopenInitConvolutionDescriptor(moves, miopen.miopenConvolution, 0, 0, 2, 2, 1, 1))
    ok(miopen.miopenDestroyConvolutionDescriptor(moves))
    ok(miopen.miopenDestroyTensorDescriptor(src))
    follower = created(
        miopen.miopenCreateActivationProblem, activation(miopen.miopenActivationPASTHRU), FORWARD
    )
    ok(miopen.miopenFuseProblems(problem, follower))
    describe(follower, ActivationY=tensor(1, 2, 3, 4))  # of that problem alone
    (solution, *_) = found(problem)
    y = np.full(CONV.shape, np.nan, np.float32)
    named = {"ConvolutionX": Ref(X), "ConvolutionW": Ref(W), "ActivationY": Ref(y)}
    listed = [argument(name, value) for name, value in named.items()]
    ok(miopen.miopenRunSolution(handle(), solution, len(listed), listed, None, 0))
    close(y, CONV)


@pytest.mark.parametrize("wanted", [0, 1])
def test_tuning_comes_first_where_it_is_asked_for(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[str] = []
    monkeypatch.setattr(
        "fuseplan.compat.miopen.solutions.tune",
        lambda plan, target, seconds: tuned.append(f"{plan} on {target}"),
    )
    options = created(miopen.miopenCreateFindOptions)
    ok(miopen.miopenSetFindOptionTuning(options, wanted))
    found(fused(), options, most=1)
    assert len(tuned) == wanted
    assert all(each.startswith("f32[2x8x9x9] -> conv2d(16, kernel=3, padding=1) -> bias") for each in tuned)


def test_normalization_and_activation() -> None:
    norm = created(miopen.miopenCreateBatchnormProblem, miopen.miopenBNSpatial, False, INFERENCE)
    describe(norm, BatchnormX=tensor(2, 8, 9, 9), BatchnormEstimatedMean=tensor(1, 8, 1, 1))
    relu = created(miopen.miopenCreateActivationProblem, activation(miopen.miopenActivationRELU), FORWARD)
    ok(miopen.miopenFuseProblems(norm, relu))
    (solution, *_) = found(norm)
    y, ones, zeros = np.full_like(X, np.nan), np.ones((1, 8, 1, 1), np.float32), np.zeros(8, np.float32)
    named = {
        "BatchnormX": X, "BatchnormScale": 2 * ones, "BatchnormBias": zeros, "ActivationY": y,
        "BatchnormEstimatedMean": zeros, "BatchnormEstimatedVariance": ones, "BatchnormEpsilon": Ref(3.0),
    }  # fmt: skip
    listed = [argument(name, value) for name, value in named.items()]
    ok(miopen.miopenRunSolution(handle(), solution, len(listed), listed, None, 0))
    close(y, np.maximum(X, 0))  # 2 * x/sqrt(1 + 3)


def test_training_and_its_backward_pass() -> None:
    norm = created(miopen.miopenCreateBatchnormProblem, miopen.miopenBNSpatial, True, FORWARD)
    describe(norm, BatchnormX=tensor(2, 8, 9, 9))
    (solution, *_) = found(norm)
    mean, variance, saved, inverse = (np.zeros(8, np.float32) for _ in range(4))
    scale, shift, y = random(8, seed=4), random(8, seed=5), np.full_like(X, np.nan)
    named = {
        "BatchnormX": X, "BatchnormY": y, "BatchnormScale": scale, "BatchnormBias": shift,
        "BatchnormRunningMean": mean, "BatchnormRunningVariance": variance,
        "BatchnormSavedMean": saved, "BatchnormSavedVariance": inverse,
        "BatchnormExpAvgFactor": 1.0, "BatchnormEpsilon": 1e-5,
    }  # fmt: skip
    listed = [argument(name, value) for name, value in named.items()]
    ok(miopen.miopenRunSolution(handle(), solution, len(listed), listed, None, 0))
    close(mean, X.astype(np.float64).mean((0, 2, 3)))
    assert np.array_equal(mean, saved)
    back = created(miopen.miopenCreateBatchnormProblem, miopen.miopenBNSpatial, False, BACKWARD)
    describe(back, BatchnormDY=tensor(2, 8, 9, 9))
    elu = created(miopen.miopenCreateActivationProblem, activation(miopen.miopenActivationELU, 0.5), BACKWARD)
    ok(miopen.miopenFuseProblems(back, elu))
    (solution, *_) = found(back)
    dy, dx, dscale, dshift = random(2, 8, 9, 9, seed=6), np.full_like(X, np.nan), mean.copy(), mean.copy()
    named = {
        "BatchnormDY": dy, "ActivationDX": dx, "BatchnormX": X, "BatchnormScale": scale,
        "BatchnormBias": shift, "BatchnormScaleDiff": dscale, "BatchnormBiasDiff": dshift,
        "BatchnormSavedMean": saved, "BatchnormSavedVariance": inverse, "ActivationY": y,
    }  # fmt: skip
    listed = [argument(name, value) for name, value in named.items()]
    ok(miopen.miopenRunSolution(handle(), solution, len(listed), listed, None, 0))
    leaves = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (X, scale, shift)]
    norms = torch.nn.functional.batch_norm(leaves[0], None, None, *leaves[1:], True, 0.0, 1e-5)
    torch.nn.functional.elu(norms, 0.5).backward(torch.tensor(dy))
    for got, leaf in zip((dx, dscale, dshift), leaves, strict=True):
        assert leaf.grad is not None
        close(got, leaf.grad.numpy())


def load(data: bytes, size: int | None = None) -> Any:
    return miopen.miopenLoadSolution(Ref(), data, len(data) if size is None else size)


def run(listed: Any, count: int | None = None, target: str = "cpu", **workspace: Any) -> Any:
    usual = {"workspace": None, "workspaceSize": 0} | workspace
    (solution,) = found(fused(), most=1)
    return miopen.miopenRunSolution(
        handle(target), solution, len(listed) if count is None else count, listed, **usual
    )


def undescribed(**descriptors: Ref) -> Any:
    problem = created(miopen.miopenCreateConvProblem, convolution(pad=1), FORWARD)
    describe(problem, **descriptors)
    return miopen.miopenFindSolutions(handle(), problem, None, Ref(), None, 1)


def signed(body: bytes) -> bytes:
    return f"fuseplan solution 1 {zlib.crc32(body):08x}\n".encode() + body


def over_its_input() -> Any:
    room = np.zeros(Y.shape, np.float32)
    src = room.reshape(-1)[: X.size].reshape(X.shape)
    return run([argument("ConvolutionX", src), *tensors(room)[1:]])


def described_bias(descriptor: Ref) -> Any:
    problem = fused()
    describe(problem, Bias=descriptor)
    return miopen.miopenFindSolutions(handle(), problem, None, Ref(), None, 1)


def twice_a_bias() -> Any:
    problem = fused()
    other = created(miopen.miopenCreateBiasProblem, FORWARD)
    describe(other, Bias=tensor(1, 16, 1, 1))
    ok(miopen.miopenFuseProblems(problem, other))
    return miopen.miopenFindSolutions(handle(), problem, None, Ref(), None, 1)


Y = np.empty((2, 16, 9, 9), np.float32)
SRC, WEIGHT = tensor(2, 8, 9, 9), tensor(16, 8, 3, 3)
REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "no bytes of ours": (lambda: load(b"{}"), "InvalidValue", ("was not written by miopenSaveSolution",)),
    "another format": (
        lambda: load(b"fuseplan solution 99 00000000\n{}"),
        "VersionMismatch",
        ("saved in format 99",),
    ),
    "changed bytes": (
        lambda: load(b"fuseplan solution 1 00000000\n{}"),
        "InvalidValue",
        ("was changed",),
    ),
    "another size": (lambda: load(b"12", 3), "BadParm", ("`data` has 2 bytes; size is 3",)),
    "no input": (
        lambda: run(tensors(Y)[1:]),
        "BadParm",
        ("the solution needs miopenTensorConvolutionX",),
    ),
    "no weight": (lambda: run([tensors(Y)[0], *tensors(Y)[2:]]), "BadParm", ("`weight`", "missing")),
    "a tensor twice": (
        lambda: run([*tensors(Y), argument("Bias", B)]),
        "BadParm",
        ("miopenTensorBias is given twice",),
    ),
    "a null buffer": (lambda: run([argument("Bias", None)]), "BadParm", ("miopenTensorBias is null",)),
    "a buffer that was never set": (
        lambda: run([argument("ConvolutionX", Ref())]),
        "BadParm",
        ("miopenTensorConvolutionX is null",),
    ),
    "a tensor of another problem": (
        lambda: run([argument("BatchnormX", X)]),
        "BadParm",
        ("the solution has no miopenTensorBatchnormX",),
    ),
    "no such tensor": (
        lambda: run([miopen.miopenTensorArgument_t(999, None, X)]),
        "BadParm",
        ("999 is none of",),
    ),
    "another descriptor": (
        lambda: run([argument("ConvolutionX", X, tensor(2, 8, 9, 8))]),
        "BadParm",
        ("miopenTensorConvolutionX descriptors do not match",),
    ),
    "no descriptor": (
        lambda: run([argument("ConvolutionX", X, "x")]),
        "BadParm",
        ("miopenTensorConvolutionX's descriptor` is a miopenTensorDescriptor_t; got 'x' (str)",),
    ),
    "an input of another shape": (
        lambda: run([argument("ConvolutionX", X[:1]), *tensors(Y)[1:]]),
        "BadParm",
        ("miopenTensorConvolutionX is f32[1x8x9x9]; its descriptor says f32[2x8x9x9]",),
    ),
    "a weight of another shape": (
        lambda: run([tensors(Y)[0], argument("ConvolutionW", W[:, :4]), *tensors(Y)[2:]]),
        "BadParm",
        ("miopenTensorConvolutionW of operator 0 (conv2d) has the wrong shape", "f32[16x8x3x3]"),
    ),
    "an output over the input": (
        over_its_input,
        "BadParm",
        ("miopenTensorActivationY overlaps miopenTensorConvolutionX",),
    ),
    "an output that is none": (
        lambda: run([*tensors(Y)[:-1], argument("ActivationY", "y")]),
        "BadParm",
        ("miopenTensorActivationY is a str; want a NumPy array",),
    ),
    "a bias described as another": (
        lambda: run([argument("Bias", B, tensor(1, 15, 1, 1))]),
        "BadParm",
        ("miopenTensorBias is described as f32[1x15x1x1]; want f32[1x16x1x1]",),
    ),
    "a weight of another type": (
        lambda: run([argument("ConvolutionW", W, tensor(16, 8, 3, 3, dtype=miopen.miopenHalf))]),
        "BadParm",
        ("miopenTensorConvolutionW is described as f16[16x8x3x3]; want f32[16x8x3x3]",),
    ),
    "a tensor outside a sequence": (
        lambda: run(argument("Bias", B), 1),
        "BadParm",
        ("`tensors` is a sequence of miopenTensorArgument_t; got miopenTensorArgument_t",),
    ),
    "bytes of another version": (
        lambda: load(signed(b'{"plan": 3}')),
        "InvalidValue",
        ("was not written by miopenSaveSolution", "plan is 3; want a text"),
    ),
    "bytes that are nested too deep": (
        lambda: load(signed(b"[" * 100_000)),
        "InvalidValue",
        ("nested deeper than 32 levels",),
    ),
    "too large a number": (lambda: load(b"fuseplan solution 1" + 5000 * b"0"), "InvalidValue", ("`data`",)),
    "a copy of src beyond memory": (
        lambda: undescribed(ConvolutionX=tensor(2**39, 8, 2**9, 2**9), ConvolutionW=tensor(1, 8, 1, 1)),
        "UnsupportedOp",
        ("a process cannot address such a copy",),
    ),
    "a bias that cannot be described so": (
        lambda: described_bias(tensor(1, 15, 1, 1)),
        "BadParm",
        ("miopenTensorBias is described as f32[1x15x1x1]; want f32[1x16x1x1]",),
    ),
    "a count": (lambda: run([], 3), "BadParm", ("`tensors` has 0 entries; nInputs is 3",)),
    "another machine": (lambda: run(tensors(Y), target="reference"), "BadParm", ("is reference",)),
    "no workspace": (
        lambda: run(tensors(Y), workspace=None, workspaceSize=8),
        "BadParm",
        ("`workspace` is null",),
    ),
    "no input described": (undescribed, "InvalidValue", ("missing the miopenTensorConvolutionX",)),
    "no weight described": (
        lambda: undescribed(ConvolutionX=SRC),
        "InvalidValue",
        ("missing the miopenTensorConvolutionW",),
    ),
    "another output": (
        lambda: undescribed(ConvolutionX=SRC, ConvolutionW=WEIGHT, ConvolutionY=SRC),
        "BadParm",
        ("miopenTensorConvolutionY is described as",),
    ),
    "two of a kind": (
        twice_a_bias,
        "NotImplemented",
        ("have a miopenTensorBias",),
    ),
    "no tensor of the problem": (
        lambda: miopen.miopenSetProblemTensorDescriptor(fused(), miopen.miopenTensorBatchnormX, SRC),
        "BadParm",
        ("the problem has no tensor miopenTensorBatchnormX",),
    ),
    "no solutions wanted": (
        lambda: miopen.miopenFindSolutions(handle(), fused(), None, Ref(), None, 0),
        "BadParm",
        ("`maxSolutions` is 1 or more",),
    ),
    "a backward convolution": (
        lambda: miopen.miopenCreateConvProblem(Ref(), convolution(), BACKWARD),
        "NotImplemented",
        ("want miopenProblemDirectionForward",),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_problems_and_solutions_that_cannot_be(what: str) -> None:
    call, status, told = REFUSED[what]
    fails(call(), status, *told)
