"""Batch normalization in one call: by frozen statistics, by the batch's, and its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from fuseplan.compat.miopen.arguments import has_statistics
from fuseplan.compat.miopen.call import bad_parameter
from fuseplan.compat.miopen.execute import Arguments, Call, call_of
from fuseplan.compat.miopen.handle import miopenHandle_t
from fuseplan.compat.miopen.kinds import BACKWARD, INFERENCE, TRAINING
from fuseplan.compat.miopen.onecall import Steps
from fuseplan.compat.miopen.operators import Operator, without_ones
from fuseplan.compat.miopen.tensors import MODE_WORDS, check_parameters, check_same
from fuseplan.ops.affine import BatchNorm
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining

EPSILON = 1e-5  # where the batch's statistics stand in for an inverse variance that is null
RUNNING = ("running_mean", "running_variance")
BEFORE = ("prevResultRunningMean", "prevResultRunningVariance")


def infer(arguments: Arguments) -> None:
    """Normalizes by frozen statistics, inverse ones without epsilon; by the batch's where they are null."""
    call, mode = _call(arguments, "x", "y")
    steps, is_inverse = Steps(), "epsilon" not in arguments
    if has_statistics(arguments, "estimated"):
        steps.add(Operator(INFERENCE, BatchNorm(mode, inverse=is_inverse)), arguments)
    else:
        made = Operator(TRAINING, BatchNormTraining(mode, saved=False))
        steps.add(made, {"epsilon": EPSILON, **arguments})
    _finish(steps, call, arguments)


def train(arguments: Arguments) -> None:
    """Normalizes by the batch's statistics, saves them, and updates running ones, or other ones with them."""
    call, mode = _call(arguments, "x", "y")
    has_statistics(arguments, "save")
    is_running = has_statistics(arguments, "running")
    steps = Steps()
    steps.add(Operator(TRAINING, BatchNormTraining(mode, running=is_running)), arguments)
    is_copied = is_running and BEFORE[0] in arguments
    with _begun(steps, call, arguments) if is_copied else nullcontext():
        _finish(steps, call, arguments)


def differentiate(arguments: Arguments) -> None:
    """Computes the gradients of x, the input of the forward pass, scale and bias."""
    call, mode = _call(arguments, "dy", "dx")
    factors = (arguments["alphaParamDiff"], arguments["betaParamDiff"])
    if factors[0] not in (None, 1) or factors[1] not in (None, 0):
        raise bad_parameter(
            f"alphaParamDiff = {factors[0]}, betaParamDiff = {factors[1]}: gradients of scale and bias are "
            "neither scaled nor added to what was there; want 1 and 0"
        )
    check_same("x", arguments["xDesc"].spec, call.src[0])
    statistics = "saved" if has_statistics(arguments, "saved") else "recomputed"
    steps = Steps()
    steps.add(Operator(BACKWARD, BatchNormBackward(mode=mode, statistics=statistics)), arguments)
    _finish(steps, call, arguments)


def _call(arguments: Arguments, src: str, dst: str) -> tuple[Call, str]:
    """Where and on what a call runs, and its mode, with its descriptors of parameters checked."""
    call, mode = call_of(arguments, src, dst), arguments["bn_mode"]
    parameters = arguments.keys() - {"xDesc", f"{src}Desc", f"{dst}Desc", "activDesc"}
    for name, value in arguments.items():
        if name in parameters and name.endswith("Desc"):
            check_parameters(name, value.spec, call.src[0], mode)
    return call, MODE_WORDS[mode]


def _finish(steps: Steps, call: Call, arguments: Arguments) -> None:
    """Appends the activation and the factor, and runs."""
    is_backward = "dy" in arguments
    if "activDesc" in arguments:
        steps.activate(arguments["activDesc"], call.src[0].dtype, {}, is_backward=is_backward)
    ending = "DataDiff" if is_backward else ""
    steps.scale(arguments[f"alpha{ending}"], arguments[f"beta{ending}"])
    steps.run(call)


@contextmanager
def _begun(steps: Steps, call: Call, arguments: Arguments) -> Iterator[None]:
    """Old values in the tensors that the first step updates, which a refused call leaves as they were.

    All are read before one is written: old and new ones may lie in the same memory in any order.
    """
    made, handle = steps.checked(call.src[0]), call.handle
    given = made.named(0, steps.given[0])
    into = [given[key] for key in RUNNING]
    old = [without_ones(made.plan, key, arguments[name]) for key, name in zip(RUNNING, BEFORE, strict=True)]
    held = [
        handle.contents(f"`{name}`", value, like) for name, value, like in zip(BEFORE, old, into, strict=True)
    ]
    before = [handle.contents("the tensor to update", each, each) for each in into]
    _write(handle, held, into)
    try:
        yield
    except Exception:
        _write(handle, before, into)
        raise


def _write(handle: miopenHandle_t, contents: list[Any], into: list[Any]) -> None:
    for each, tensor in zip(contents, into, strict=True):
        handle.write(each, tensor)
