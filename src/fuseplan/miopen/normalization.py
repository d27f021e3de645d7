"""What the calls for batch normalization share: operators, in which tensors are optional, run at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from fuseplan.miopen.activations import miopenActivationDescriptor_t
from fuseplan.miopen.arguments import together
from fuseplan.miopen.call import bad_parameter
from fuseplan.miopen.enums import miopenBatchNormMode_t
from fuseplan.miopen.execute import Call, check_same
from fuseplan.miopen.handle import miopenHandle_t
from fuseplan.miopen.onecall import Steps
from fuseplan.miopen.operators import BACKWARD, INFERENCE, TRAINING, Operator, without_ones
from fuseplan.miopen.plan import check_parameters
from fuseplan.miopen.tensors import MODE_WORDS, miopenTensorDescriptor_t
from fuseplan.ops.affine import BatchNorm
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining

EPSILON = 1e-5  # where the batch's statistics stand in for an inverse variance that is null
RUNNING = ("running_mean", "running_variance")
Values = dict[str, Any]
Described = tuple[miopenTensorDescriptor_t, Any]  # a tensor behind its descriptor


@dataclass(frozen=True)
class Normalization:
    """What every call has: where, in which mode, how the result is blended, and on what.

    Attributes:
        handle: where.
        mode: what statistics are per.
        alpha, beta: of the result.
        src, dst: input and output.
        activation: behind the normalization; None is none.
    """

    handle: miopenHandle_t
    mode: miopenBatchNormMode_t
    alpha: float | None
    beta: float | None
    src: Described
    dst: Described
    activation: miopenActivationDescriptor_t | None = None

    def check(self, **descriptors: miopenTensorDescriptor_t) -> None:
        """Checks that descriptors are of this normalization's parameters.

        Raises:
            PlanError: one is not.
        """
        for name, descriptor in descriptors.items():
            check_parameters(name, descriptor.spec, self.src[0].spec, self.mode)

    def infer(self, scale: Any, shift: Any, mean: Any, variance: Any, epsilon: float | None) -> None:
        """Normalizes by frozen statistics, inverse ones without epsilon; by the batch's where they are null.

        Raises:
            FuseplanError: as `Steps.run` does.
        """
        word, steps, is_inverse = MODE_WORDS[self.mode], Steps(), epsilon is None
        values = {"scale": scale, "shift": shift}
        if together(estimatedMean=mean, **{f"estimated{'Inv' * is_inverse}Variance": variance}):
            values |= {"mean": mean, "inverse_variance" if is_inverse else "variance": variance}
            steps.add(Operator(INFERENCE, BatchNorm(word, inverse=is_inverse)), **values, epsilon=epsilon)
        else:
            made = Operator(TRAINING, BatchNormTraining(word, saved=False))
            steps.add(made, **values, epsilon=EPSILON if is_inverse else epsilon)
        self._finish(steps)

    def train(
        self,
        scale: Any,
        shift: Any,
        epsilon: float,
        saved: Values,
        running: Values,
        factor: float,
        old: Values | None = None,
    ) -> None:
        """Normalizes by the batch's statistics, saves them, and updates running ones, of `old` if given.

        Statistics are mean and variance, in that order, by their names in the call.

        Raises:
            FuseplanError: as `Steps.run` does.
        """
        together(**saved)
        is_running = together(**running, **(old or {}))
        op = BatchNormTraining(MODE_WORDS[self.mode], running=is_running)
        values = {"scale": scale, "shift": shift, "epsilon": epsilon}
        values |= zip(("saved_mean", "saved_inverse_variance"), saved.values(), strict=True)
        if is_running:
            values |= zip(RUNNING, running.values(), strict=True)
            values |= {"momentum": factor}
        steps = Steps()
        steps.add(Operator(TRAINING, op), **values)
        with self._begun(steps, old) if is_running and old is not None else nullcontext():
            self._finish(steps)

    @contextmanager
    def _begun(self, steps: Steps, old: Values) -> Iterator[None]:
        """Old values in the tensors that the first step updates, which a refused call leaves as they were.

        All are read before one is written: old and new ones may lie in the same memory in any order.
        """
        made = steps.checked(self.src[0].spec)
        given = made.named(0, steps.given[0])
        into = [given[key] for key in RUNNING]
        held = [
            self.handle.contents(f"`{name}`", without_ones(made.plan, key, of), given[key])
            for key, (name, of) in zip(RUNNING, old.items(), strict=True)
        ]
        before = [self.handle.contents("the tensor to update", each, each) for each in into]
        self._write(held, into)
        try:
            yield
        except Exception:
            self._write(before, into)
            raise

    def _write(self, contents: list[Any], into: list[Any]) -> None:
        for each, tensor in zip(contents, into, strict=True):
            self.handle.write(each, tensor)

    def differentiate(
        self,
        forward: Described,
        scale: Any,
        shift: Any,
        gradients: tuple[Any, Any],
        saved: tuple[Any, Any],
        epsilon: float,
    ) -> None:
        """Computes the gradients of x, the input of the forward pass, scale and bias; the call's input is dy.

        Raises:
            FuseplanError: as `Steps.run` does.
        """
        check_same("x", forward[0].spec, self.src[0].spec)
        is_saved = together(savedMean=saved[0], savedInvVariance=saved[1])
        statistics = "saved" if is_saved else "recomputed"
        op = BatchNormBackward(mode=MODE_WORDS[self.mode], statistics=statistics)
        values = {"input": forward[1], "scale": scale, "shift": shift}
        values |= zip(("scale_gradient", "shift_gradient"), gradients, strict=True)
        values |= {"mean": saved[0], "inverse_variance": saved[1]} if is_saved else {"epsilon": epsilon}
        steps = Steps()
        steps.add(Operator(BACKWARD, op), **values)
        self._finish(steps, is_backward=True)

    def _finish(self, steps: Steps, *, is_backward: bool = False) -> None:
        """Appends the activation and the factor, and runs."""
        src, dst = self.src[0].spec, self.dst[0].spec
        steps.activate(self.activation, src.dtype, is_backward=is_backward)
        steps.scale(self.alpha, self.beta)
        steps.run(Call(self.handle, (src, self.src[1]), (dst, self.dst[1])))


def check_plain(alpha: float | None, beta: float | None) -> None:
    """Checks that the gradients of scale and bias are wanted as they are.

    Raises:
        StatusError: they are not.
    """
    if alpha not in (None, 1) or beta not in (None, 0):
        raise bad_parameter(
            f"alphaParamDiff = {alpha}, betaParamDiff = {beta}: gradients of scale and bias are neither "
            "scaled nor added to what was there; want 1 and 0"
        )
