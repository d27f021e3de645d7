"""Plans made, compiled and executed by MIOpen's calls, against the plan's meaning in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import convolution, created, handle, ok, tensor

Array = NDArray[Any]
BN = ("scale", "shift", "mean", "variance")


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def close(got: Array, exact: Array, bound: float = 1e-5) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - exact).max() <= bound * np.abs(exact).max()


def execute(where: Ref, plan: Ref, x: Array, args: Ref) -> Array:
    src = plan.value.src
    assert src.shape == x.shape
    made = plan.value.lowered().plan.output
    y = np.full(made.shape, np.nan, x.dtype)
    ok(miopen.miopenExecuteFusionPlan(where, plan, tensor(*src.shape), x, tensor(*made.shape), y, args))
    return y


def test_convolution_bias_activation() -> None:
    where, plan = (
        handle(),
        created(miopen.miopenCreateFusionPlan, miopen.miopenVerticalFusion, tensor(4, 8, 9, 9)),
    )
    conv = created(miopen.miopenCreateOpConvForward, convolution(pad=1), tensor(16, 8, 3, 3), plan=plan)
    bias = created(miopen.miopenCreateOpBiasForward, tensor(1, 16, 1, 1), plan=plan)
    act = created(miopen.miopenCreateOpActivationForward, miopen.miopenActivationLEAKYRELU, plan=plan)
    ok(miopen.miopenCompileFusionPlan(where, plan))
    args = created(miopen.miopenCreateOperatorArgs)
    x, w, b = random(4, 8, 9, 9), random(16, 8, 3, 3, seed=1), random(1, 16, 1, 1, seed=2)
    ok(miopen.miopenSetOpArgsConvForward(args, conv, 1.0, 0.0, w))
    ok(miopen.miopenSetOpArgsBiasForward(args, bias, Ref(1.0), None, b))
    ok(miopen.miopenSetOpArgsActivForward(args, act, 1, 0, 0.25, 0.0, 0.0))
    fused = plan.value.lowered().plan
    assert str(fused) == "f32[4x8x9x9] -> conv2d(16, kernel=3, padding=1) -> bias -> leaky_relu"
    exact = fused.reference(x, {"weight": w, "bias": b.ravel()}, {"negative_slope": 0.25})
    close(execute(where, plan, x, args), exact)
    ok(miopen.miopenDestroyFusionPlan(plan))
