"""What the calls for batch normalization share: operators, in which tensors are optional, run at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuseplan.miopen.activations import miopenActivationDescriptor_t
from fuseplan.miopen.arguments import together
from fuseplan.miopen.enums import miopenBatchNormMode_t
from fuseplan.miopen.execute import Call
from fuseplan.miopen.onecall import Steps
from fuseplan.miopen.operators import BACKWARD, INFERENCE, TRAINING, Operator, without_ones
from fuseplan.miopen.plan import check_parameters
from fuseplan.miopen.tensors import MODE_WORDS, miopenTensorDescriptor_t
from fuseplan.ops.affine import BatchNorm
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining

EPSILON = 1e-5  # where the batch's statistics stand in for an inverse variance that is null
RUNNING = ("running_mean", "running_variance")
Values = dict[str, Any]


@dataclass(frozen=True)
class Normalization:
    """What every call has: where, in which mode, on what, and how the result is blended.

    Attributes:
        call: handle, input and output.
        mode: what statistics are per.
        alpha, beta: of the result.
        activation: behind the normalization; None is none.
    """

    call: Call
    mode: miopenBatchNormMode_t
    alpha: float | None
    beta: float | None
    activation: miopenActivationDescriptor_t | None

    def check(self, **descriptors: miopenTensorDescriptor_t) -> None:
        """Checks that descriptors are of this normalization's parameters.

        Raises:
            PlanError: one is not.
        """
        for name, descriptor in descriptors.items():
            check_parameters(name, descriptor.spec, self.call.src[0], self.mode)

    def infer(self, values: Values, mean: Any, variance: Any, epsilon: float | None) -> None:
        """Normalizes by frozen statistics, inverse ones without epsilon; by the batch's where they are null.

        Raises:
            FuseplanError: as `Steps.run` does.
        """
        word, steps, is_inverse = MODE_WORDS[self.mode], Steps(), epsilon is None
        values |= {"epsilon": epsilon}
        if together(estimatedMean=mean, **{f"estimated{'Inv' * is_inverse}Variance": variance}):
            name = "inverse_variance" if is_inverse else "variance"
            made = Operator(INFERENCE, BatchNorm(word, inverse=is_inverse))
            steps.add(made, **values, mean=mean, **{name: variance})
        else:
            values |= {"epsilon": EPSILON if is_inverse else epsilon}
            steps.add(Operator(TRAINING, BatchNormTraining(word, saved=False)), **values)
        self._finish(steps)

    def train(
        self, values: Values, saved: Values, running: Values, factor: float, old: Values | None = None
    ) -> None:
        """Normalizes by the batch's statistics, saves them, and updates running ones, of `old` if given.

        Statistics are mean and variance, in that order, by their names in the call.

        Raises:
            FuseplanError: as `Steps.run` does.
        """
        together(**saved)
        is_running = together(**running, **(old or {}))
        op = BatchNormTraining(MODE_WORDS[self.mode], running=is_running)
        values |= zip(("saved_mean", "saved_inverse_variance"), saved.values(), strict=True)
        if is_running:
            values |= zip(RUNNING, running.values(), strict=True)
            values |= {"momentum": factor}
        steps = Steps()
        steps.add(Operator(TRAINING, op), **values)
        if is_running and old is not None:
            self._copy(steps, old)
        self._finish(steps)

    def _copy(self, steps: Steps, old: Values) -> None:
        """Copies old values into the tensors that the first step updates."""
        made = steps.checked(self.call.src[0])
        into = made.named(0, steps.given[0])
        for key, (name, of) in zip(RUNNING, old.items(), strict=True):
            self.call.handle.copy(f"`{name}`", without_ones(made.plan, key, of), into[key])

    def differentiate(self, x: Any, values: Values, saved: tuple[Any, Any], epsilon: float) -> None:
        """Computes the gradients of x, scale and bias from dy, which is the call's input.

        Raises:
            FuseplanError: as `Steps.run` does.
        """
        is_saved = together(savedMean=saved[0], savedInvVariance=saved[1])
        statistics = "saved" if is_saved else "recomputed"
        op = BatchNormBackward(mode=MODE_WORDS[self.mode], statistics=statistics)
        given = {"mean": saved[0], "inverse_variance": saved[1]} if is_saved else {"epsilon": epsilon}
        steps = Steps()
        steps.add(Operator(BACKWARD, op), input=x, **values, **given)
        self._finish(steps, is_backward=True)

    def _finish(self, steps: Steps, *, is_backward: bool = False) -> None:
        """Appends the activation and the factor, and runs."""
        steps.activate(self.activation, self.call.src[0].dtype, is_backward=is_backward)
        steps.scale(self.alpha, self.beta)
        steps.run(self.call)
