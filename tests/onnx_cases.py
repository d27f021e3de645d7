"""ONNX's own tests of its operators, from the onnx package: a model, inputs, and the right outputs."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
from onnx import numpy_helper
from onnx.backend.test.case import node as suite

import fuseplan.onnx
from fuseplan.onnx.model import OnnxModel
from fuseplan.onnx.stored import array_of

RANDOM = ("bernoulli", "training_dropout")  # results that are drawn: shape and dtype are compared
EPSILONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SLIP = 8  # epsilons of the largest element: how far sums that cancel may be off


@functools.cache
def cases(module: str | None) -> tuple[Any, ...]:
    """The tests of a module of the package (`clip`), which are made as it is imported; or of all modules."""
    if module is None:
        return tuple(each for each in suite.collect_testcases(None) if each.data_sets)
    known = len(suite._NodeTestCases)
    importlib.import_module(f"{suite.__name__}.{module}")
    return tuple(suite._NodeTestCases[known:])


def outcome(case: Any) -> tuple[str, OnnxModel | None]:
    """What is wrong with our run of a test; nothing where it is right."""
    try:
        model: OnnxModel = fuseplan.onnx.load(case.model, threads=1)
        problems = (_wrong(case, model, *data) for data in case.data_sets)
        return next(filter(None, problems), ""), model
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def _wrong(case: Any, model: OnnxModel, inputs: Any, outputs: Any) -> str:
    made = model.run(None, dict(zip(model.inputs, map(_value, inputs), strict=False)))
    pairs = zip(model.outputs, made, map(_value, outputs), strict=True)
    told = ((name, _difference(got, want, case)) for name, got, want in pairs)
    return next((f"{name}: {problem}" for name, problem in told if problem), "")


def _value(value: Any) -> Any:
    """A tensor's array; a sequence's as a list."""
    if isinstance(value, list):
        return [_value(each) for each in value]
    if hasattr(value, "elem_type") and hasattr(value, "tensor_values"):
        return numpy_helper.to_list(value)
    if hasattr(value, "optional_value") or hasattr(value, "tensor_value"):
        return numpy_helper.to_optional(value)
    return array_of(value) if hasattr(value, "data_type") else value


def _difference(got: Any, want: Any, case: Any) -> str:
    if isinstance(got, list) and len(got) == 1 and isinstance(want, np.ndarray):
        (got,) = got  # an optional sequence, which the package stores as its tensor
    if want is None or isinstance(want, list):
        is_same = got is None if want is None else len(got) == len(want)
        pairs = zip(got, want, strict=True) if is_same and want else ()
        return next(filter(None, (_difference(*pair, case) for pair in pairs)), "" if is_same else "another")
    got, want = np.asarray(got), np.asarray(want)
    epsilon = EPSILONS.get(want.dtype.name, 0.0)
    if got.dtype != want.dtype and "str" not in got.dtype.name and want.dtype != object:
        return f"dtype {got.dtype}, not {want.dtype}"
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    if any(word in case.name for word in RANDOM):
        return ""
    try:
        if want.dtype == object or want.dtype.kind in "USO":
            np.testing.assert_array_equal(got.astype(object), want.astype(object))
        else:
            wide = np.complex128 if want.dtype.kind == "c" else np.float64
            got, want = got.astype(wide), want.astype(wide)
            sizes = np.abs(want[np.isfinite(want)])
            atol = max(case.atol, SLIP * min(epsilon, EPSILONS["float16"]) * sizes.max(initial=0))
            rtol = max(case.rtol, epsilon)  # a plan rounds once where the operators round each time
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
    except AssertionError as error:
        return str(error).strip().splitlines()[-1]
    return ""
