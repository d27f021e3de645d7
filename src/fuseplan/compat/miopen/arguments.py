"""The arguments of a plan's operators: tensors and numbers, by the operator's place, checked when set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuseplan.compat.miopen.call import Object, bad_parameter
from fuseplan.compat.miopen.kinds import ACTIVATION_BACKWARD, BACKWARD, TRAINING, Kind
from fuseplan.compat.miopen.operators import ALPHA, Operator
from fuseplan.compat.miopen.plan import miopenFusionOpDescriptor_t
from fuseplan.ops.training import BatchNormTraining


class miopenOperatorArgs_t(Object):
    """Arguments of operators; a second set call overwrites, and any number of executions may use them."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[int, tuple[Operator, Mapping[str, Any]]] = {}

    def set(self, kind: Kind, descriptor: miopenFusionOpDescriptor_t, arguments: Mapping[str, Any]) -> None:
        """Sets an operator's values from the arguments of a call.

        Raises:
            StatusError: the operator is of another kind; an argument is null or given where it must not be;
                alpha or beta is not honoured.
            ArgumentError: the operator does not take a tensor or a number.
        """
        descriptor.check(kind)
        if kind is TRAINING:
            _check_statistics(descriptor.operator, arguments)
        if kind is ACTIVATION_BACKWARD:
            _check_reserved(descriptor, arguments["reserved"])
        values = descriptor.operator.values(arguments)
        factor = factor_of(kind, arguments["alpha"], arguments["beta"])
        descriptor.plan.lowered().check(descriptor.index, values)
        self._given[descriptor.index] = descriptor.operator, {**values, **factor}

    def of(self, descriptor: miopenFusionOpDescriptor_t) -> Mapping[str, Any]:
        """The values for an operator of a plan, or for its equal at the same place of another plan.

        Raises:
            StatusError: nothing was set, or it was set for another operator.
        """
        operator = descriptor.operator
        given, values = self._given.get(descriptor.index, (None, {}))
        if given is None:
            raise bad_parameter(
                f"operator {descriptor.index} ({operator.kind.name}) has no arguments: "
                f"{operator.kind.set_args} sets them"
            )
        if given != operator:
            raise bad_parameter(
                f"the arguments of operator {descriptor.index} were set for another plan's "
                f"{given.op}; this plan has {operator.op}"
            )
        return values


def set_arguments(kind: Kind, arguments: Mapping[str, Any]) -> None:
    """A call that sets the arguments of an operator: the first two are the object and the operator."""
    args, descriptor, *_ = arguments.values()
    args.set(kind, descriptor, arguments)


def factor_of(kind: Kind, alpha: float | None, beta: float | None) -> dict[str, float]:
    """Alpha, where it is not 1; a StatusError where alpha or beta is not honoured."""
    if beta:
        raise bad_parameter(
            f"beta = {beta}: a result overwrites its tensor and is never added to the old values; "
            "want 0 or null (miopenConvolutionBiasActivationForward adds a tensor, z)"
        )
    if alpha is None or alpha == 1:
        return {}
    if kind.refuses_alpha:
        raise bad_parameter(f"alpha = {alpha} of a {kind.name}: {kind.refuses_alpha}")
    return {ALPHA: alpha}


def has_statistics(arguments: Mapping[str, Any], word: str) -> bool:
    """Whether a call's mean and variance are given whose names contain a word; they go together.

    Raises:
        StatusError: some are, and some are null.
    """
    names = [each for each in arguments if word in each.lower() and each.endswith(("Mean", "Variance"))]
    absent = [each for each in names if arguments[each] is None]
    if absent and len(absent) < len(names):
        raise bad_parameter(f"`{'`, `'.join(absent)}` is null; `{'`, `'.join(names)}` go together")
    return not absent


def _check_statistics(operator: Operator, arguments: Mapping[str, Any]) -> None:
    has_statistics(arguments, "saved")
    is_running, op = has_statistics(arguments, "running"), operator.op
    if isinstance(op, BatchNormTraining) and op.running != is_running:
        wanted = "want running statistics" if op.running else "want null for running statistics"
        raise bad_parameter(f"the operator was created with runningMeanVariance={op.running}: {wanted}")


def _check_reserved(descriptor: miopenFusionOpDescriptor_t, reserved: Any) -> None:
    is_read = not descriptor.follows(BACKWARD)
    if is_read and reserved is None:
        raise bad_parameter("`reserved` is null: want the activation's input; y alone is not enough")
    if not is_read and reserved is not None:
        raise bad_parameter(
            "`reserved` is not null; want null: the x of the batch normalization before it is used"
        )
