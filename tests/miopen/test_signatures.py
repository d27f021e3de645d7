"""Bad arguments of every function, as its signature declares them: a status and a message, never a crash."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from fuseplan import miopen
from fuseplan.miopen import Ref
from fuseplan.miopen.call import Extents, Object, Pointer, Scalar
from fuseplan.miopen.spelling import SPELLED
from miopen_calls import activation, convolution, created, fails, handle, ok, tensor

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value
    for name, value in miopen.NAMES.items()
    if inspect.isfunction(value) and hasattr(value, "__wrapped__")
}
HINTS = {
    name: typing.get_type_hints(function.__wrapped__, include_extras=True)
    for name, function in FUNCTIONS.items()
}


def parts(hint: Any) -> tuple[Any, bool]:
    """What a parameter takes, and whether it may be null."""
    is_union = typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    return next(each for each in options if each is not types.NoneType), types.NoneType in options


def operator() -> Ref:
    return created(miopen.miopenCreateOpBiasForward, tensor(1, 4, 1, 1), plan=plan())


def plan() -> Ref:
    return created(miopen.miopenCreateFusionPlan, miopen.miopenVerticalFusion, tensor(2, 4, 5, 6))


def problem() -> Ref:
    made = created(miopen.miopenCreateBiasProblem, miopen.miopenProblemDirectionForward)
    ok(miopen.miopenSetProblemTensorDescriptor(made, miopen.miopenTensorBiasX, tensor(2, 4, 5, 6)))
    ok(miopen.miopenSetProblemTensorDescriptor(made, miopen.miopenTensorBias, tensor(1, 4, 1, 1)))
    return made


def solution() -> Ref:
    found = Ref()
    ok(miopen.miopenFindSolutions(handle(), problem(), None, found, None, 1))
    return Ref(found.value[0])


MAKERS: dict[Any, Callable[[], Any]] = {
    miopen.miopenHandle_t: handle,
    miopen.miopenTensorDescriptor_t: lambda: tensor(2, 4, 5, 6),
    miopen.miopenConvolutionDescriptor_t: convolution,
    miopen.miopenActivationDescriptor_t: lambda: activation(miopen.miopenActivationRELU),
    miopen.miopenFusionPlanDescriptor_t: plan,
    miopen.miopenFusionOpDescriptor_t: operator,
    miopen.miopenOperatorArgs_t: lambda: created(miopen.miopenCreateOperatorArgs),
    miopen.miopenProblem_t: problem,
    miopen.miopenFindOptions_t: lambda: created(miopen.miopenCreateFindOptions),
    miopen.miopenSolution_t: solution,
    Ref: Ref,
    int: lambda: 1,
    float: lambda: 1.0,
    bool: lambda: False,
    bytes: lambda: b"",
    Extents: lambda: (1, 2),
    Scalar: lambda: 1.0,
    Pointer: lambda: np.zeros((1, 4), np.float32),
}
WRONG: dict[Any, tuple[Any, ...]] = {
    Ref: (3, "plan"),
    int: ("1", 1.5, True),
    float: ("1", True, 1j),
    bool: ("yes", 2, 1.0),
    bytes: ("text", 3),
    Extents: (3, "12", (1.5,), [None], (True,), np.array(3), np.array([[1, 2]]), np.array([1.0])),
    Scalar: ("1", True, [1.0]),
    Pointer: (),
}


def valid(hint: Any) -> Any:
    wanted, _ = parts(hint)
    if inspect.isclass(wanted) and issubclass(wanted, IntEnum):
        return next(iter(wanted))
    return MAKERS[wanted]() if wanted in MAKERS else MAKERS_BY_NAME[wanted.__metadata__[0].__name__]()


MAKERS_BY_NAME: dict[str, Callable[[], Any]] = {"_arguments": tuple, "_target": lambda: "cpu"}


def wrong(hint: Any) -> Iterator[Any]:
    """Values of other types, and numbers that no enumerator has."""
    wanted, _ = parts(hint)
    if wanted in WRONG:
        yield from WRONG[wanted]
    elif inspect.isclass(wanted) and issubclass(wanted, IntEnum):
        other = (
            miopen.miopenFusionDirection_t
            if wanted is not miopen.miopenFusionDirection_t
            else miopen.miopenStatus_t
        )
        yield from (999, "0", True, next(iter(other)))
    else:
        yield from (3, "text")


def cases(bad: Callable[[Any], Iterator[Any]]) -> list[Any]:
    return [
        pytest.param(name, parameter, id=f"{name}-{parameter}")
        for name, hints in HINTS.items()
        for parameter, hint in hints.items()
        if parameter != "return" and any(True for _ in bad(hint))
    ]


def null(hint: Any) -> Iterator[Any]:
    if not parts(hint)[1]:
        yield None
        if parts(hint)[0] is not Ref:
            yield Ref()


def destroyed(hint: Any) -> Iterator[Any]:
    wanted, _ = parts(hint)
    if inspect.isclass(wanted) and issubclass(wanted, Object):
        gone = valid(hint)
        held = gone.value
        (held.plan if isinstance(held, miopen.miopenFusionOpDescriptor_t) else held).destroy()
        yield gone


def call_with(name: str, parameter: str, value: Any) -> Any:
    """The function called with one bad argument; the ones before it are good, and the ones behind too."""
    hints = {key: hint for key, hint in HINTS[name].items() if key != "return"}
    return FUNCTIONS[name](*(value if key == parameter else valid(hint) for key, hint in hints.items()))


@pytest.mark.parametrize(("name", "parameter"), cases(null))
def test_null_is_refused(name: str, parameter: str) -> None:
    for value in null(HINTS[name][parameter]):
        fails(call_with(name, parameter, value), "BadParm", f"{name}: `{parameter}` is null")


@pytest.mark.parametrize(("name", "parameter"), cases(wrong))
def test_other_types_are_refused(name: str, parameter: str) -> None:
    for value in wrong(HINTS[name][parameter]):
        fails(call_with(name, parameter, value), "BadParm", f"{name}: ")


@pytest.mark.parametrize(("name", "parameter"), cases(destroyed))
def test_what_was_destroyed_is_refused(name: str, parameter: str) -> None:
    for value in destroyed(HINTS[name][parameter]):
        fails(call_with(name, parameter, value), "BadParm", f"`{parameter}` is a", "that was destroyed")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_and_surplus_arguments_are_refused(name: str) -> None:
    fails(FUNCTIONS[name](), "BadParm", f"{name}: missing a required argument", "it is called as (")
    count = len(inspect.signature(FUNCTIONS[name]).parameters)
    fails(FUNCTIONS[name](*range(count + 1)), "BadParm", f"{name}: too many positional arguments")


DESTROYS = [name for name in FUNCTIONS if name.startswith("miopenDestroy")]


@pytest.mark.parametrize("name", DESTROYS)
def test_nothing_is_destroyed_twice(name: str) -> None:
    (hint,) = (hint for parameter, hint in HINTS[name].items() if parameter != "return")
    made = valid(hint)
    ok(FUNCTIONS[name](made))
    fails(FUNCTIONS[name](made), "BadParm", "that was destroyed")


def test_every_function_is_told_and_returns_a_status() -> None:
    assert len(FUNCTIONS) > 80
    for function in FUNCTIONS.values():
        assert (inspect.getdoc(function) or "").strip()


def test_names_in_messages_are_those_of_some_call() -> None:
    parameters = {name for function in FUNCTIONS.values() for name in inspect.signature(function).parameters}
    assert {each for names in SPELLED.values() for each in names} <= parameters
    y = np.zeros((2, 3), np.float32)
    status = miopen.miopenActivationForward(
        handle(), activation(0), 1.0, tensor(2, 3), np.zeros((2, 4)), 0.0, tensor(2, 3), y
    )
    fails(status, "BadParm", "miopenActivationForward: `x` is f64[2x4]; its descriptor says f32[2x3]")


def test_a_defect_of_ours_is_raised() -> None:
    def broken(number: int) -> None:
        """Divides by nothing."""
        _ = 1 // 0

    from fuseplan.miopen.call import api

    with pytest.raises(ZeroDivisionError):
        api(broken)(1)
