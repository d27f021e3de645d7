"""Bad arguments of every function, as its signature declares them: a status and a message, never a crash."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from fuseplan import miopen
from fuseplan.compat.miopen.call import Object, declarations
from fuseplan.compat.miopen.call import function as made
from fuseplan.compat.miopen.functions import CALLS, CALLS_BY_NAME, CHECK_OF_TYPE, FUNCTIONS
from fuseplan.compat.miopen.kinds import SPELLED
from fuseplan.miopen import Ref
from miopen_calls import TAKES, activation, convolution, created, fails, handle, ok, tensor


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
    "int": lambda: 1,
    "float": lambda: 1.0,
    "bool": lambda: False,
    "bytes": lambda: b"",
    "Extents": lambda: (1, 2),
    "Scalar": lambda: 1.0,
    "Pointer": lambda: np.zeros((1, 4), np.float32),
    "Arguments": tuple,
    "Where": lambda: "cpu",
}
WRONG: dict[Any, tuple[Any, ...]] = {
    Ref: (3, "plan"),
    "int": ("1", 1.5, True),
    "float": ("1", True, 1j),
    "bool": ("yes", 2, 1.0),
    "bytes": ("text", 3),
    "Extents": (3, "12", (1.5,), [None], (True,), np.array(3), np.array([[1, 2]]), np.array([1.0])),
    "Scalar": ("1", True, [1.0]),
    "Pointer": (),
}


def valid(wanted: Any) -> Any:
    if inspect.isclass(wanted) and issubclass(wanted, IntEnum):
        return next(iter(wanted))
    return MAKERS[wanted]()


def wrong(wanted: Any, is_nullable: bool) -> Iterator[Any]:
    """Values of other types, and numbers that no enumerator has."""
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


def cases(bad: Callable[[Any, bool], Iterator[Any]]) -> list[Any]:
    return [
        pytest.param(name, parameter, id=f"{name}-{parameter}")
        for name, takes in TAKES.items()
        for parameter, kind in takes.items()
        if any(True for _ in bad(*kind))
    ]


def null(wanted: Any, is_nullable: bool) -> Iterator[Any]:
    if not is_nullable:
        yield None
        if wanted is not Ref:
            yield Ref()


def destroyed(wanted: Any, is_nullable: bool) -> Iterator[Any]:
    if inspect.isclass(wanted) and issubclass(wanted, Object):
        gone = valid(wanted)
        held = gone.value
        (held.plan if isinstance(held, miopen.miopenFusionOpDescriptor_t) else held).destroy()
        yield gone


def call_with(name: str, parameter: str, value: Any) -> Any:
    """The function called with one bad argument; the ones before it are good, and the ones behind too."""
    takes = TAKES[name].items()
    return FUNCTIONS[name](*(value if key == parameter else valid(kind) for key, (kind, _) in takes))


@pytest.mark.parametrize(("name", "parameter"), cases(null))
def test_null_is_refused(name: str, parameter: str) -> None:
    for value in null(*TAKES[name][parameter]):
        fails(call_with(name, parameter, value), "BadParm", f"{name}: `{parameter}` is null")


@pytest.mark.parametrize(("name", "parameter"), cases(wrong))
def test_other_types_are_refused(name: str, parameter: str) -> None:
    for value in wrong(*TAKES[name][parameter]):
        fails(call_with(name, parameter, value), "BadParm", f"{name}: ")


@pytest.mark.parametrize(("name", "parameter"), cases(destroyed))
def test_what_was_destroyed_is_refused(name: str, parameter: str) -> None:
    for value in destroyed(*TAKES[name][parameter]):
        fails(call_with(name, parameter, value), "BadParm", f"`{parameter}` is a", "that was destroyed")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_and_surplus_arguments_are_refused(name: str) -> None:
    fails(FUNCTIONS[name](), "BadParm", f"{name}: missing a required argument", "it is called as (")
    count = len(inspect.signature(FUNCTIONS[name]).parameters)
    fails(FUNCTIONS[name](*range(count + 1)), "BadParm", f"{name}: too many positional arguments")


DESTROYS = [name for name in FUNCTIONS if name.startswith("miopenDestroy")]


@pytest.mark.parametrize("name", DESTROYS)
def test_nothing_is_destroyed_twice(name: str) -> None:
    ((kind, _),) = TAKES[name].values()
    gone = valid(kind)
    ok(FUNCTIONS[name](gone))
    fails(FUNCTIONS[name](gone), "BadParm", "that was destroyed")


def test_every_function_is_told_and_returns_a_status() -> None:
    assert len(FUNCTIONS) > 80
    for function in FUNCTIONS.values():
        assert (inspect.getdoc(function) or "").strip()


def test_names_in_messages_are_those_of_some_call() -> None:
    parameters = {name for function in FUNCTIONS.values() for name in inspect.signature(function).parameters}
    assert {each for each, _ in SPELLED} <= parameters
    y = np.zeros((2, 3), np.float32)
    status = miopen.miopenActivationForward(
        handle(), activation(0), 1.0, tensor(2, 3), np.zeros((2, 4)), 0.0, tensor(2, 3), y
    )
    fails(status, "BadParm", "miopenActivationForward: `x` is f64[2x4]; its descriptor says f32[2x3]")


def test_a_defect_of_ours_is_raised() -> None:
    """Any error that is not raised on purpose, and not torch's for want of memory."""
    declared = next(declarations())

    def broken(arguments: dict[str, Any]) -> None:
        _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        made(declared, broken, CHECK_OF_TYPE)(Ref())


NUMBERS = [
    pytest.param(each.name, name, value, id=f"{each.name}-{name}-{value}")
    for each in declarations()
    for name, (least, most) in each.bounds.items()
    for value in (least - 1, *(() if most is None else (most + 1,)))
]


@pytest.mark.parametrize(("name", "parameter", "value"), NUMBERS)
def test_numbers_out_of_bounds_are_refused(name: str, parameter: str, value: int) -> None:
    fails(call_with(name, parameter, value), "BadParm", f"{name}: `{parameter}` is ", f"; got {value}")


SEQUENCES = [(each.name, name, count) for each in declarations() for name, count in each.lengths.items()]


@pytest.mark.parametrize(("name", "parameter", "count"), SEQUENCES)
def test_sequences_of_another_length_are_refused(name: str, parameter: str, count: str) -> None:
    """The number is 1 and the other sequences have as many elements: this one has three."""
    one = {each: (1,) for each, (kind, _) in TAKES[name].items() if kind == "Extents"}
    given = {each: valid(kind) for each, (kind, _) in TAKES[name].items()} | one
    told = f"{name}: `{parameter}` has 3 numbers; want {count} = 1"
    fails(FUNCTIONS[name](**(given | {parameter: (1, 2, 3)})), "BadParm", told)


def test_every_function_is_declared_and_made() -> None:
    assert {*CALLS, *CALLS_BY_NAME, *DESTROYS} == FUNCTIONS.keys(), (
        "declared and not made, or made and not declared"
    )
    assert FUNCTIONS.keys() <= miopen.NAMES.keys()
