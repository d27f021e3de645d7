"""Calls in any sequence, right and wrong: what fails changes nothing, what succeeds computes what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import Array, created, handle, ok, tensor
from miopen_formulas import CONVOLVE, FORWARD, formula

Status = miopen.miopenStatus_t
BAD, UNSUPPORTED = Status.miopenStatusBadParm, Status.miopenStatusUnsupportedOp
MODES = (miopen.miopenActivationLEAKYRELU, miopen.miopenActivationTANH, miopen.miopenActivationCLAMP)
NUMBERS = st.tuples(*[st.sampled_from((-0.5, 0.25, 1.0, 2.0))] * 3)
ALPHAS = st.sampled_from((None, 1.0, 1, np.float32(-0.5), Ref(2.0)))

# How an array may be given so that it is still itself, and so that it is something else.
FAITHFUL: tuple[Callable[[Array], Any], ...] = (
    lambda a: a,
    Ref,
    np.asfortranarray,
    lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    lambda a: a[:, ::-1].copy()[:, ::-1],
    lambda a: torch.from_numpy(a.copy()),
)
OTHER: tuple[Callable[[Array], Any], ...] = (
    lambda a: None,
    lambda a: Ref(),
    lambda a: 3,
    lambda a: a.tolist(),
    lambda a: a[:, :0],
    lambda a: np.concatenate([a, a], axis=1),
    lambda a: a[None, None],
    lambda a: a.astype(np.float64),
    lambda a: a.astype(np.float16),
    lambda a: a.astype(">f4"),
    lambda a: a.view(np.int32),
    np.ma.masked_array,
    lambda a: torch.zeros(a.shape).to_sparse(),
    lambda a: np.lib.stride_tricks.as_strided(a, (*a.shape, 2), (*a.strides, 0)),
)
# What is told only where it is read.
ELSEWHERE: tuple[Callable[[Array], Any], ...] = (
    *FAITHFUL[2:5],
    lambda a: torch.zeros(a.shape, device="meta"),
)
SHAPE = (2, 4, 5, 3)
DESCRIPTORS = st.sampled_from(
    ((2, 4, 5, 4), (2, 4, 5), (4, 2, 5, 3), (1, 4, 1, 1), (1, 6, 1, 1), (2, 6, 5, 3), (1, 4, 5, 3))
)


@dataclass
class Meant:
    """An operator: its kind, the shapes of its tensors, what it does of what it is given, and that."""

    kind: str
    op: Ref
    shapes: tuple[tuple[int, ...], ...]
    does: Callable[..., Array]
    given: tuple[Any, ...] | None = None


class Calls(RuleBasedStateMachine):
    """One plan, its arguments and a handle, beside what they are to mean."""

    def __init__(self) -> None:
        super().__init__()
        self.meant: list[Meant] = []
        self.shape = SHAPE
        self.is_compiled = self.is_gone = False
        self.random = np.random.default_rng(0)

    @initialize(where=st.sampled_from(("reference", "reference", "reference", "cpu")))
    def begin(self, where: str) -> None:
        self.handle, self.src = handle(where), tensor(*SHAPE)
        self.plan = created(miopen.miopenCreateFusionPlan, miopen.miopenVerticalFusion, self.src)
        self.args = created(miopen.miopenCreateOperatorArgs)

    def draw(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def failed(self, status: Any, *wanted: Any) -> None:
        """Holds that a call failed as it should, and said more than its name."""
        told = miopen.miopenGetLastErrorMessage()
        assert status in wanted, told
        name, _, why = told.partition(": ")
        assert name.startswith("miopen")
        assert len(why) > 8, told

    def append(self, kind: str, shapes: Any, does: Any, create: Any, *rest: Any) -> bool:
        """Adds an operator, which a plan that is gone or has its convolution refuses."""
        op = Ref()
        status = create(self.plan, op, *rest)
        is_second = kind == "C" and any(each.kind == "C" for each in self.meant)
        if self.is_gone or is_second:
            self.failed(status, BAD if self.is_gone else UNSUPPORTED)
            assert op.value is None
            return False
        ok(status)
        self.meant.append(Meant(kind, op, shapes, does))
        self.is_compiled = False
        return True

    @rule(features=st.sampled_from((4, 6)), groups=st.sampled_from((1, 2)), dilation=st.sampled_from((1, 2)))
    def convolve(self, features: int, groups: int, dilation: int) -> None:
        made = created(miopen.miopenCreateConvolutionDescriptor)
        moves = ((dilation, 0), (1, 1), (dilation, 1))  # padding, stride, dilation
        ok(miopen.miopenInitConvolutionNdDescriptor(made, 2, *moves, miopen.miopenConvolution))
        ok(miopen.miopenSetConvolutionGroupCount(made, groups))
        weight = (features, self.shape[1] // groups, 3, 1)
        create = miopen.miopenCreateOpConvForward

        def does(x: Array, alpha: float, w: Array) -> Array:
            return alpha * convolved(x, w, groups, dilation)

        if self.append("C", (weight,), does, create, made, tensor(*weight)):
            self.shape = (self.shape[0], features, *self.shape[2:])

    @rule()
    def shift(self) -> None:
        create, per = miopen.miopenCreateOpBiasForward, self.per_channel
        self.append("B", (per,), lambda x, alpha, b: x + b, create, tensor(*per))

    @rule(mode=st.sampled_from(list(miopen.miopenBatchNormMode_t)))
    def normalize(self, mode: Any) -> None:
        per = (1, *self.shape[1:]) if mode is miopen.miopenBNPerActivation else self.per_channel
        create = miopen.miopenCreateOpBatchNormInference
        self.append("N", (per,) * 4, normalized, create, mode, tensor(*per))

    @rule(mode=st.sampled_from(MODES))
    def activate(self, mode: Any) -> None:
        def does(x: Array, alpha: float, *numbers: float) -> Array:
            exact: Array = alpha * formula(FORWARD, mode)(x, *numbers)
            return exact

        self.append("A", (), does, miopen.miopenCreateOpActivationForward, mode)

    @property
    def per_channel(self) -> tuple[int, ...]:
        return (1, self.shape[1], 1, 1)

    @rule(shape=DESCRIPTORS)
    def add_what_is_described_wrong(self, shape: tuple[int, ...]) -> None:
        if shape == self.per_channel or self.is_gone:
            return
        wrong = tensor(*shape)
        self.failed(miopen.miopenCreateOpBiasForward(self.plan, Ref(), wrong), BAD)
        mode = miopen.miopenBNSpatial
        self.failed(miopen.miopenCreateOpBatchNormInference(self.plan, Ref(), mode, wrong), BAD)

    @precondition(lambda self: self.meant)
    @rule(place=st.integers(0, 5), alpha=ALPHAS, numbers=NUMBERS, how=st.sampled_from(FAITHFUL))
    def give(self, place: int, alpha: Any, numbers: Any, how: Any) -> None:
        """Sets an operator's arguments, in one of the forms that tensors may have."""
        self.give_to(self.meant[place % len(self.meant)], alpha, numbers, how)

    def give_to(self, meant: Meant, alpha: Any, numbers: Any, how: Any) -> None:
        own = self.own(meant, numbers)
        forms = [each if isinstance(each, float) else how(each) for each in own]
        status = self.set(meant, meant.kind, alpha, forms)
        factor = 1.0 if alpha is None else float(getattr(alpha, "value", alpha))
        if self.is_gone or (meant.kind == "B" and factor != 1):
            self.failed(status, BAD)
            return
        ok(status)
        meant.given = (factor, *own)

    def own(self, meant: Meant, numbers: tuple[float, ...]) -> list[Any]:
        """New arguments of an operator."""
        if meant.kind == "A":
            return list(numbers)
        tensors = [self.draw(*shape) for shape in meant.shapes]
        return [*tensors[:3], tensors[3] ** 2, 0.125] if meant.kind == "N" else tensors

    def set(self, meant: Meant, kind: str, alpha: Any, own: list[Any]) -> Any:
        """Calls the set function of a kind, with an operator that may be of another."""
        function = {
            "C": miopen.miopenSetOpArgsConvForward,
            "B": miopen.miopenSetOpArgsBiasForward,
            "A": miopen.miopenSetOpArgsActivForward,
            "N": miopen.miopenSetOpArgsBatchNormInference,
        }[kind]
        return function(self.args, meant.op, alpha, None, *own)

    @precondition(lambda self: self.meant)
    @rule(place=st.integers(0, 5), which=st.integers(0, 4), how=st.sampled_from(OTHER))
    def give_what_is_none(self, place: int, which: int, how: Any) -> None:
        meant = self.meant[place % len(self.meant)]
        own = self.own(meant, (0.5, 0.5, 0.5))
        which %= len(own)
        own[which] = how(own[which] if isinstance(own[which], np.ndarray) else self.draw(1, 4, 1, 1))
        if isinstance(own[which], int):  # which is a number too
            own[which] = "3"
        self.failed(self.set(meant, meant.kind, 1.0, own), BAD)

    @precondition(lambda self: self.meant)
    @rule(place=st.integers(0, 5), kind=st.sampled_from("CBNA"))
    def give_an_operator_of_another_kind(self, place: int, kind: str) -> None:
        meant = self.meant[place % len(self.meant)]
        if kind != meant.kind:
            w = self.draw(1, 4, 1, 1)
            own: dict[str, list[Any]] = {"C": [w], "B": [w], "A": [0.5] * 3, "N": [w] * 4 + [1e-5]}
            self.failed(self.set(meant, kind, 1.0, own[kind]), BAD)

    @rule()
    def compile(self) -> None:
        status = miopen.miopenCompileFusionPlan(self.handle, self.plan)
        if self.is_gone or not self.meant:
            self.failed(status, BAD if self.is_gone else UNSUPPORTED)
            return
        ok(status)
        self.is_compiled = True

    @precondition(lambda self: self.meant and not self.is_gone)
    @rule(alpha=ALPHAS, numbers=NUMBERS, how=st.sampled_from(FAITHFUL))
    def give_all_and_compile(self, alpha: Any, numbers: Any, how: Any) -> None:
        for each in self.meant:
            self.give_to(each, None if each.kind == "B" else alpha, numbers, how)
        self.compile()
        self.execute(FAITHFUL[0])

    @rule(how=st.sampled_from(FAITHFUL[:2]))
    def execute(self, how: Any) -> None:
        x, y = self.draw(*SHAPE), np.full(self.shape, np.nan, np.float32)
        status = miopen.miopenExecuteFusionPlan(
            self.handle, self.plan, self.src, how(x), tensor(*self.shape), y, self.args
        )
        is_ready = self.is_compiled and all(each.given for each in self.meant) and not self.is_gone
        if not is_ready:
            self.failed(status, BAD)
            assert np.isnan(y).all()
            return
        ok(status)
        exact = x.astype(np.float64)
        for each in self.meant:
            assert each.given is not None
            exact = each.does(exact, *each.given)
        np.testing.assert_allclose(y, exact, 1e-4, 1e-4 * np.abs(exact).max())

    @rule(which=st.sampled_from("xy"), how=st.sampled_from(OTHER + ELSEWHERE))
    def execute_on_what_is_none(self, which: str, how: Any) -> None:
        tensors = {"x": self.draw(*SHAPE), "y": np.full(self.shape, np.nan, np.float32)}
        given = tensors | {which: how(tensors[which])}
        status = miopen.miopenExecuteFusionPlan(
            self.handle, self.plan, self.src, given["x"], tensor(*self.shape), given["y"], self.args
        )
        self.failed(status, BAD)
        assert np.isnan(tensors["y"]).all()

    @rule(shape=DESCRIPTORS, is_output=st.booleans())
    def execute_as_another(self, shape: tuple[int, ...], is_output: bool) -> None:
        if shape in (SHAPE, self.shape):
            return
        descriptors = (self.src, tensor(*shape)) if is_output else (tensor(*shape), tensor(*self.shape))
        y = np.full(self.shape, np.nan, np.float32)
        status = miopen.miopenExecuteFusionPlan(
            self.handle, self.plan, descriptors[0], self.draw(*SHAPE), descriptors[1], y, self.args
        )
        self.failed(status, BAD)
        assert np.isnan(y).all()

    @rule(index=st.integers(-3, 9))
    def read(self, index: int) -> None:
        op = Ref("old")
        status = miopen.miopenFusionPlanGetOp(self.plan, index, op)
        if self.is_gone or not 0 <= index < len(self.meant):
            self.failed(status, BAD)
            assert op.value == "old"
        else:
            ok(status)
            assert op.value is self.meant[index].op.value

    @rule(is_meant=st.sampled_from((False,) * 9 + (True,)))
    def destroy(self, is_meant: bool) -> None:
        if is_meant and self.is_gone:
            self.failed(miopen.miopenDestroyFusionPlan(self.plan), BAD)
        elif is_meant:
            ok(miopen.miopenDestroyFusionPlan(self.plan))
            self.is_gone = True

    @invariant()
    def what_failed_added_nothing(self) -> None:
        assert not hasattr(self, "plan") or len(self.plan.value.operators) == len(self.meant)


def convolved(x: Array, w: Array, groups: int, dilation: int) -> Array:
    wide = torch.tensor(x), torch.tensor(w).double()
    exact: Array = CONVOLVE[1](*wide, None, 1, (dilation, 0), (dilation, 1), groups).numpy()
    return exact


def normalized(
    x: Array, alpha: float, scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float
) -> Array:
    exact: Array = scale * ((x - mean) / np.sqrt(variance.astype(np.float64) + epsilon)) + bias
    return alpha * exact


Calls.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCalls = Calls.TestCase
