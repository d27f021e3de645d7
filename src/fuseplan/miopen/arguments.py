"""The arguments of a plan's operators: tensors and numbers, by the operator's place, checked when set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.arguments import check_value
from fuseplan.miopen.call import Object, Pointer, Ref, Scalar, api, bad_parameter
from fuseplan.miopen.operators import ACTIVATION, ALPHA, BIAS, CONVOLUTION, INFERENCE, Kind, Operator
from fuseplan.miopen.plan import miopenFusionOpDescriptor_t
from fuseplan.plan import FusionPlan


@dataclass(frozen=True)
class Given:
    """What one operator is given: by the names of its operands, results and parameters."""

    operator: Operator
    values: Mapping[str, Any]


class miopenOperatorArgs_t(Object):
    """Arguments of operators; what is set again is overwritten, and any number of executions may use them."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[int, Given] = {}

    def set(
        self,
        descriptor: miopenFusionOpDescriptor_t,
        kind: Kind,
        alpha: float | None,
        beta: float | None,
        values: Mapping[str, Any],
    ) -> None:
        """Sets what an operator is given.

        Raises:
            StatusError: the operator is of another kind; alpha or beta is not honoured.
            ArgumentError: a tensor or a number is not what the operator takes.
        """
        operator = descriptor.operator
        if operator.kind is not kind:
            raise bad_parameter(
                f"operator {descriptor.index} is of the kind {operator.kind.name}, whose arguments "
                f"{operator.kind.set_args} sets; this call is for {kind.name}"
            )
        factor = _factor(kind, alpha, beta)
        self._given[descriptor.index] = Given(operator, checked(descriptor, values) | factor)

    def of(self, descriptor: miopenFusionOpDescriptor_t) -> Mapping[str, Any]:
        """What was set for an operator of a plan, or for its equal at the same place of another.

        Raises:
            StatusError: nothing was, or it was set for another operator.
        """
        given, operator = self._given.get(descriptor.index), descriptor.operator
        if given is None:
            raise bad_parameter(
                f"operator {descriptor.index} ({operator.kind.name}) has no arguments: "
                f"{operator.kind.set_args} sets them"
            )
        if given.operator != operator:
            raise bad_parameter(
                f"the arguments of operator {descriptor.index} were set for another plan's "
                f"{given.operator.op}; this plan has {operator.op}"
            )
        return given.values


def _factor(kind: Kind, alpha: float | None, beta: float | None) -> dict[str, float]:
    """Alpha, where it is not 1.

    Raises:
        StatusError: alpha or beta is not honoured.
    """
    if beta:
        raise bad_parameter(
            f"beta = {beta}: what was in the result before is not added, and in the middle of a plan there "
            "is no such thing; miopenConvolutionBiasActivationForward adds a tensor z"
        )
    if alpha is None or alpha == 1:
        return {}
    if kind.refuses_alpha:
        raise bad_parameter(f"alpha = {alpha} of a {kind.name}: {kind.refuses_alpha}")
    return {ALPHA: alpha}


def checked(descriptor: miopenFusionOpDescriptor_t, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the operator takes them, tensors without MIOpen's axes of length 1.

    Raises:
        ArgumentError: one has another shape or type.
    """
    made = descriptor.plan.lowered()
    keys = made.keys[descriptor.index]
    taken = {name: without_ones(made.plan, keys[name], value) for name, value in values.items()}
    for name, value in taken.items():
        check_value(made.plan, keys[name], value)
    return taken


def without_ones(plan: FusionPlan, key: str, value: Any) -> Any:
    """A tensor 1xCx1x1 or 1xCxHxW as (c,) or (c, h, w), where that is the operand's shape: a view of it."""
    wanted = next((each.operand.shape for each in plan.operands if each.key == key), None)
    shape = tuple(getattr(value, "shape", ()))
    if wanted is None or shape == wanted or shape[:1] != (1,):
        return value
    rest = len(shape) - 1 - len(wanted)
    if rest < 0 or shape != (1, *wanted, *(1,) * rest):
        return value
    return value[(0, *(slice(None),) * len(wanted), *(0,) * rest)]


@api
def miopenCreateOperatorArgs(args: Ref) -> None:
    """Makes an arguments object."""
    args.value = miopenOperatorArgs_t()


@api
def miopenDestroyOperatorArgs(args: miopenOperatorArgs_t) -> None:
    """Ends an arguments object; the tensors are their owners'."""
    args.destroy()


@api
def miopenSetOpArgsConvForward(
    args: miopenOperatorArgs_t,
    convOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    w: Pointer,
) -> None:
    """Sets a convolution's weight; its result is multiplied by alpha."""
    args.set(convOp, CONVOLUTION, alpha, beta, {"weight": w})


@api
def miopenSetOpArgsBiasForward(
    args: miopenOperatorArgs_t,
    biasOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    bias: Pointer,
) -> None:
    """Sets a bias; alpha is 1."""
    args.set(biasOp, BIAS, alpha, beta, {"bias": bias})


@api
def miopenSetOpArgsActivForward(
    args: miopenOperatorArgs_t,
    activFwdOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    activAlpha: float,
    activBeta: float,
    activGamma: float,
) -> None:
    """Sets an activation's numbers; its result is multiplied by alpha."""
    numbers = dict(zip(activFwdOp.operator.parameters, (activAlpha, activBeta, activGamma), strict=False))
    args.set(activFwdOp, ACTIVATION, alpha, beta, numbers)


@api
def miopenSetOpArgsBatchNormInference(
    args: miopenOperatorArgs_t,
    bnOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    bnScale: Pointer,
    bnBias: Pointer,
    estimatedMean: Pointer,
    estimatedVariance: Pointer,
    epsilon: float,
) -> None:
    """Sets frozen statistics; the result is multiplied by alpha."""
    values = {
        "scale": bnScale,
        "shift": bnBias,
        "mean": estimatedMean,
        "variance": estimatedVariance,
        "epsilon": epsilon,
    }
    args.set(bnOp, INFERENCE, alpha, beta, values)
