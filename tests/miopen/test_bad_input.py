"""Calls whose arguments are each well-formed and cannot be together: a status and a message for every one."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import (
    Built,
    convolution,
    created,
    fails,
    handle,
    ok,
    random,
    tensor,
)

W, B = random(16, 8, 3, 3), random(1, 16, 1, 1)
X, Y = random(4, 8, 9, 9), np.empty((4, 16, 7, 7), np.float32)


def plain() -> Built:
    """conv2d -> bias -> relu, with arguments."""
    made = Built(tensor(4, 8, 9, 9))
    conv = made.add(miopen.miopenCreateOpConvForward, convolution(), tensor(16, 8, 3, 3))
    bias = made.add(miopen.miopenCreateOpBiasForward, tensor(1, 16, 1, 1))
    relu = made.add(miopen.miopenCreateOpActivationForward, miopen.miopenActivationRELU)
    ok(miopen.miopenSetOpArgsConvForward(made.args, conv, 1.0, 0.0, W))
    ok(miopen.miopenSetOpArgsBiasForward(made.args, bias, 1.0, 0.0, B))
    ok(miopen.miopenSetOpArgsActivForward(made.args, relu, 1.0, 0.0, 0.0, 0.0, 0.0))
    return made


def op(made: Built, index: int) -> Ref:
    found = Ref()
    ok(miopen.miopenFusionPlanGetOp(made.plan, index, found))
    return found


def run(made: Built, **other: Any) -> Any:
    """An execution with other arguments in the place of some."""
    usual = {"src": made.src, "x": X, "dst": tensor(4, 16, 7, 7), "y": Y, "args": made.args} | other
    return miopen.miopenExecuteFusionPlan(
        made.handle, made.plan, usual["src"], usual["x"], usual["dst"], usual["y"], usual["args"]
    )


def compiled() -> Built:
    made = plain()
    made.compile()
    return made


def without_arguments() -> Any:
    made = compiled()
    return run(made, args=created(miopen.miopenCreateOperatorArgs))


def with_another_plans_arguments() -> Any:
    made, other = compiled(), Built(tensor(4, 8, 9, 9))
    conv = other.add(miopen.miopenCreateOpConvForward, convolution(pad=1), tensor(16, 8, 3, 3))
    ok(miopen.miopenSetOpArgsConvForward(other.args, conv, 1.0, 0.0, W))
    return run(made, args=other.args)


EXECUTIONS: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "before compile": (lambda: run(plain()), "BadParm", ("was not compiled",)),
    "after SetAlgo": (
        lambda: changed(compiled(), miopen.miopenFusionPlanConvolutionSetAlgo, 1),
        "BadParm",
        ("was not compiled with this handle as it is now",),
    ),
    "another input": (
        lambda: run(compiled(), src=tensor(4, 8, 9, 10)),
        "BadParm",
        ("the input descriptors do not match: got f32[4x8x9x10]; want f32[4x8x9x9]",),
    ),
    "another layout": (
        lambda: run(compiled(), src=tensor(4, 8, 9, 9, layout=miopen.miopenTensorNHWC)),
        "BadParm",
        ("the input descriptors do not match: got f32[4x8x9x9, nhwc]",),
    ),
    "another output": (
        lambda: run(compiled(), dst=tensor(4, 16, 9, 9)),
        "BadParm",
        ("the output descriptors do not match", "f32[4x16x7x7]"),
    ),
    "another output type": (
        lambda: run(compiled(), dst=tensor(4, 16, 7, 7, dtype=miopen.miopenHalf)),
        "BadParm",
        ("the output descriptors do not match: got f16",),
    ),
    "an input that is not as described": (
        lambda: run(compiled(), x=X[:2]),
        "BadParm",
        ("`input` is f32[2x8x9x9]; its descriptor says f32[4x8x9x9]",),
    ),
    "an output that is not as described": (
        lambda: run(compiled(), y=Y.transpose(0, 1, 3, 2)),
        "BadParm",
        ("`output` is f32[4x16x7x7, strides=784:49:1:7]; its descriptor says f32[4x16x7x7]",),
    ),
    "an input that is no tensor": (lambda: run(compiled(), x="x"), "BadParm", ("`input` is a str",)),
    "an output that is read-only": (
        lambda: run(compiled(), y=read_only()),
        "BadParm",
        ("read-only",),
    ),
    "an output that overlaps the input": (
        lambda: run(compiled(), y=np.lib.stride_tricks.as_strided(X, Y.shape, Y.strides)),
        "BadParm",
        ("overlaps",),
    ),
    "no arguments": (without_arguments, "BadParm", ("operator 0 (convolution forward) has no arguments",)),
    "another plan's arguments": (
        with_another_plans_arguments,
        "BadParm",
        ("the arguments of operator 0 were set for another plan's",),
    ),
}


def read_only() -> Any:
    made = Y.copy()
    made.flags.writeable = False
    return made


def changed(made: Built, change: Any, *rest: Any) -> Any:
    ok(change(made.plan, *rest))
    return run(made)


@pytest.mark.parametrize("what", EXECUTIONS)
def test_executions(what: str) -> None:
    call, status, told = EXECUTIONS[what]
    fails(call(), status, *told)


def set_weight(weight: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
    made = plain()
    return miopen.miopenSetOpArgsConvForward(made.args, op(made, 0), alpha, beta, weight)


def set_bias(bias: Any, alpha: Any = 1.0, index: int = 1) -> Any:
    made = plain()
    return miopen.miopenSetOpArgsBiasForward(made.args, op(made, index), alpha, 0.0, bias)


ARGUMENTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "an operator of another kind": (
        lambda: set_bias(B, index=0),
        (
            "operator 0 is of the kind convolution forward, whose arguments miopenSetOpArgsConvForward sets",
            "this call is for bias forward",
        ),
    ),
    "a weight of another shape": (lambda: set_weight(W[:, :4]), ("wrong shape", "f32[16x8x3x3]")),
    "a weight of another type": (lambda: set_weight(W.astype(np.float64)), ("wrong dtype",)),
    "a weight that is no tensor": (lambda: set_weight([1.0]), ("`w` is a list",)),
    "a bias of another shape": (lambda: set_bias(np.zeros(8, np.float32)), ("wrong shape", "f32[16]")),
    "beta": (lambda: set_weight(W, beta=1.0), ("beta = 1.0",)),
    "alpha of a bias": (lambda: set_bias(B, alpha=2.0), ("alpha = 2.0 of a bias forward", "scale the bias")),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments(what: str) -> None:
    call, told = ARGUMENTS[what]
    fails(call(), "BadParm", *told)


def test_refused_arguments_leave_those_before() -> None:
    made = compiled()
    assert run(made) == 0
    before = Y.copy()
    fails(miopen.miopenSetOpArgsConvForward(made.args, op(made, 0), 1.0, 0.0, W[:8]), "BadParm")
    ok(run(made))
    assert np.array_equal(Y, before)


def create(create_op: Any, *rest: Any, src: Any = None) -> Any:
    made = Built(src or tensor(4, 8, 9, 9))
    status = create_op(made.plan, Ref(), *rest)
    assert made.plan.value.operators == []  # what is refused is not added
    return status


def twice() -> Any:
    made = Built(tensor(4, 8, 9, 9))
    made.add(miopen.miopenCreateOpConvForward, convolution(), tensor(16, 8, 3, 3))
    return miopen.miopenCreateOpConvForward(made.plan, Ref(), convolution(), tensor(16, 16, 3, 3))


def normalize_convolution() -> Any:
    made = Built(tensor(4, 8, 9, 9))
    made.add(miopen.miopenCreateOpConvForward, convolution(), tensor(16, 8, 3, 3))
    return miopen.miopenCreateOpBatchNormForward(made.plan, Ref(), miopen.miopenBNSpatial, False)


CONV, BIAS, NORM = (
    miopen.miopenCreateOpConvForward,
    miopen.miopenCreateOpBiasForward,
    miopen.miopenCreateOpBatchNormInference,
)
OPERATORS: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "channels": (
        lambda: create(CONV, convolution(), tensor(16, 4, 3, 3)),
        "BadParm",
        (
            "the channels of input and filter do not match",
            "f32[4x8x9x9] has 8",
            "takes 4 in each of 1 groups",
        ),
    ),
    "groups": (
        lambda: create(CONV, convolution(groups=3), tensor(16, 8, 3, 3)),
        "BadParm",
        ("in each of 3 groups",),
    ),
    "features not divided": (
        lambda: create(CONV, convolution(groups=2), tensor(15, 4, 3, 3)),
        "BadParm",
        ("divide the features",),
    ),
    "axes": (
        lambda: create(CONV, convolution(3), tensor(16, 8, 3, 3)),
        "BadParm",
        ("the convolution descriptor has 3 spatial axes; the filter f32[16x8x3x3] has 2",),
    ),
    "type": (
        lambda: create(CONV, convolution(), tensor(16, 8, 3, 3, dtype=miopen.miopenHalf)),
        "BadParm",
        ("the types of input and filter differ",),
    ),
    "too large a kernel": (
        lambda: create(CONV, convolution(), tensor(16, 8, 11, 3)),
        "BadParm",
        ("the kernel is larger than its padded input",),
    ),
    "transposed": (
        lambda: create(CONV, convolution(mode=miopen.miopenTranspose), tensor(16, 8, 3, 3)),
        "NotImplemented",
        ("transposed",),
    ),
    "a convolution that is not initialised": (
        lambda: create(CONV, created(miopen.miopenCreateConvolutionDescriptor), tensor(16, 8, 3, 3)),
        "NotInitialized",
        ("was never set",),
    ),
    "a weight that is not described": (
        lambda: create(CONV, convolution(), created(miopen.miopenCreateTensorDescriptor)),
        "NotInitialized",
        ("was never set",),
    ),
    "bias": (
        lambda: create(BIAS, tensor(1, 16, 1, 1)),
        "BadParm",
        ("`bDesc` does not describe", "got f32[1x16x1x1]; want f32[1x8x1x1]"),
    ),
    "a bias of another type": (
        lambda: create(BIAS, tensor(1, 8, 1, 1), src=tensor(4, 8, 9, 9, dtype=miopen.miopenDouble)),
        "BadParm",
        ("got f32[1x8x1x1]; want f64[1x8x1x1]",),
    ),
    "a bias of a type between": (
        lambda: create(
            BIAS,
            tensor(1, 8, 1, 1, dtype=miopen.miopenDouble),
            src=tensor(4, 8, 9, 9, dtype=miopen.miopenHalf),
        ),
        "BadParm",
        ("got f64[1x8x1x1]; want f32[1x8x1x1] or f16[1x8x1x1]",),
    ),
    "spatial statistics": (
        lambda: create(NORM, miopen.miopenBNSpatial, tensor(1, 8, 9, 9)),
        "BadParm",
        ("`bnScaleBiasMeanVarDesc` does not describe", "want f32[1x8x1x1]"),
    ),
    "statistics per activation": (
        lambda: create(NORM, miopen.miopenBNPerActivation, tensor(1, 8, 1, 1)),
        "BadParm",
        ("want f32[1x8x9x9]",),
    ),
    "running statistics of one element": (
        lambda: create(
            miopen.miopenCreateOpBatchNormForward, miopen.miopenBNSpatial, True, src=tensor(1, 8, 1, 1)
        ),
        "BadParm",
        ("more than one element",),
    ),
    "two convolutions": (twice, "UnsupportedOp", ("[several-contractions]", "^^^^^^")),
    "training behind a convolution": (normalize_convolution, "UnsupportedOp", ("conv2d(16, kernel=3)",)),
}


@pytest.mark.parametrize("what", OPERATORS)
def test_operators(what: str) -> None:
    call, status, told = OPERATORS[what]
    fails(call(), status, *told)


@pytest.mark.parametrize("index", [-1, 3, 10**9])
def test_an_index_out_of_range(index: int) -> None:
    told = f"`op_idx` is out of bounds: {index}, counted from 0; the plan has 3 operators"
    fails(miopen.miopenFusionPlanGetOp(plain().plan, index, Ref()), "BadParm", told)


def test_an_empty_plan_is_not_compiled() -> None:
    made = Built(tensor(4, 8, 9, 9))
    fails(miopen.miopenCompileFusionPlan(made.handle, made.plan), "UnsupportedOp", "[empty-plan]")


def test_operators_end_with_their_plan() -> None:
    made = plain()
    conv = op(made, 0)
    ok(miopen.miopenDestroyFusionPlan(made.plan))
    status = miopen.miopenSetOpArgsConvForward(made.args, conv, 1.0, 0.0, W)
    fails(status, "BadParm", "`convOp` is a miopenFusionOpDescriptor_t that was destroyed")


def test_descriptors_may_be_destroyed_and_changed_once_a_plan_was_made() -> None:
    made = compiled()
    ok(miopen.miopenSet4dTensorDescriptor(made.src, miopen.miopenFloat, 1, 2, 3, 4))
    fails(run(made), "BadParm", "the input descriptors do not match: got f32[1x2x3x4]")
    ok(miopen.miopenDestroyTensorDescriptor(made.src))
    ok(run(made, src=tensor(4, 8, 9, 9)))


def test_another_machine_is_told() -> None:
    made = plain()
    made.handle = handle("cpu:avx2" if platform.machine() == "aarch64" else "cpu:neon")
    fails(miopen.miopenCompileFusionPlan(made.handle, made.plan), "InternalError", "does not run here")


class Broken:
    """What looks like a tensor with DLPack, and is none."""

    shape = 3

    def __dlpack__(self) -> None:
        raise RuntimeError("no memory")


NO_TENSORS: tuple[Any, ...] = (
    3, "x", [1.0], object(), Broken(), np.float32(1), np.array(1.0), X.astype(">f4"), X.astype(object),
    X.astype(int), X[:, :, ::2], np.ma.masked_array(X), torch.zeros(4, 8, 9, 9, device="meta"),
    torch.zeros(4, 8, 9, 9, requires_grad=True), torch.zeros(4, 8, 9, 9).to_sparse(), memoryview(b"12"),
)  # fmt: skip


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_of_the_plan(value: Any) -> None:
    made = compiled()
    fails(run(made, x=value), "BadParm", "miopenExecuteFusionPlan: `input` ")
    fails(run(made, y=value), "BadParm", "miopenExecuteFusionPlan: `output` ")
    fails(set_bias(value), "BadParm", "miopenSetOpArgsBiasForward: `bias` ")


def test_messages_are_a_threads_own() -> None:
    from concurrent.futures import ThreadPoolExecutor

    fails(miopen.miopenCreate(None), "BadParm", "`handle` is null")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(miopen.miopenGetLastErrorMessage).result() == ""
    assert "`handle` is null" in miopen.miopenGetLastErrorMessage()
