"""Algorithms of a convolution, in plans and in one call with bias and activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fuseplan import miopen
from fuseplan.backends import BACKENDS
from fuseplan.compat.miopen.algorithms import ALGORITHMS
from fuseplan.miopen import Ref
from miopen_calls import Built, activation, close, convolution, fails, handle, ok, tensor
from miopen_convolution import CONV, LEAKY, B, W, X, Z

Y = np.empty((2, 16, 9, 9), np.float32)
SRC, WEIGHT = tensor(2, 8, 9, 9), tensor(16, 8, 3, 3)


def one_call(**other: Any) -> Any:
    usual: dict[str, Any] = {
        "handle": handle(), "alpha1": 1.0, "xDesc": SRC, "x": X, "wDesc": WEIGHT, "w": W,
        "convDesc": convolution(pad=1), "algo": miopen.miopenConvolutionFwdAlgoDirect,
        "workspace": None, "workspaceSizeInBytes": 0, "alpha2": 0.0, "zDesc": None, "z": None,
        "biasDesc": tensor(1, 16, 1, 1), "bias": B,
        "activationDesc": activation(miopen.miopenActivationLEAKYRELU, 0.25),
        "yDesc": tensor(2, 16, 9, 9), "y": Y,
    }  # fmt: skip
    Y[...] = np.nan
    return miopen.miopenConvolutionBiasActivationForward(*(usual | other).values())


@pytest.mark.parametrize("algorithm", ["Direct", "Winograd"])
def test_convolution_bias_activation_in_one_call(algorithm: str) -> None:
    algo = getattr(miopen, f"miopenConvolutionFwdAlgo{algorithm}")
    ok(one_call(algo=algo))
    close(Y, LEAKY)
    ok(one_call(algo=algo, alpha1=-0.5, activationDesc=activation(miopen.miopenActivationPASTHRU)))
    close(Y, -0.5 * CONV + B[:, None, None])
    plain = {"activationDesc": activation(miopen.miopenActivationRELU), "zDesc": tensor(2, 16, 9, 9), "z": Z}
    ok(one_call(algo=algo, alpha1=2.0, alpha2=0.5, **plain))
    close(Y, np.maximum(2 * CONV + 0.5 * Z + B[:, None, None], 0))


def test_what_one_call_refuses() -> None:
    algo = miopen.miopenConvolutionFwdAlgoFFT
    fails(one_call(algo=algo), "UnsupportedOp", "no kernel of miopenConvolutionFwdAlgoFFT", "AlgoDirect")
    fails(one_call(z=Z), "BadParm", "`zDesc` is null")
    fails(one_call(z=Z, zDesc=SRC), "BadParm", "the z descriptors do not match")
    fails(one_call(yDesc=SRC), "BadParm", "the output descriptors do not match")
    fails(one_call(biasDesc=tensor(1, 8, 1, 1)), "BadParm", "`biasDesc` does not describe")
    fails(one_call(workspaceSizeInBytes=3), "BadParm", "`workspace` is null")
    small = {"workspace": np.empty(3, np.uint8), "workspaceSizeInBytes": 3}
    winograd = miopen.miopenConvolutionFwdAlgoWinograd
    fails(
        one_call(algo=winograd, **small),
        "BadParm",
        "the workspace is too small: its size is 3; the kernel needs",
    )


def test_the_algorithms_are_those_that_would_run_it() -> None:
    made = Built(tensor(2, 8, 9, 9))
    count, listed = Ref(), Ref()
    get, bind = miopen.miopenFusionPlanConvolutionGetAlgo, miopen.miopenFusionPlanConvolutionSetAlgo
    fails(get(made.plan, 8, count, listed), "BadParm", "the plan has no convolution")
    fails(bind(made.plan, 1), "BadParm", "the plan has no convolution")
    made.add(miopen.miopenCreateOpConvForwardAlgo, convolution(), 1, WEIGHT)
    assert made.plan.value.algorithm is miopen.miopenConvolutionFwdAlgoDirect
    fails(get(made.plan, 0, count, listed), "BadParm", "`requestAlgoCount` is 1 or more")
    ok(get(made.plan, 8, count, listed))
    assert set(listed.value) == {
        miopen.miopenConvolutionFwdAlgoDirect,
        miopen.miopenConvolutionFwdAlgoWinograd,
    }
    preferred = listed.value[0]
    ok(get(made.plan, 1, count, listed))
    assert (count.value, listed.value) == (1, (preferred,))
    ok(get(made.plan, 8, count, listed, handle("triton:sm_90")))
    assert {miopen.miopenConvolutionFwdAlgoGEMM, miopen.miopenConvolutionFwdAlgoImplicitGEMM} <= set(
        listed.value
    )
    ok(miopen.miopenCompileFusionPlan(handle("reference"), made.plan))
    ok(get(made.plan, 8, count, listed))
    assert listed.value == (miopen.miopenConvolutionFwdAlgoDirect,), "of the handle that compiled it last"
    for algo in (miopen.miopenConvolutionFwdAlgoDirect, miopen.miopenConvolutionFwdAlgoWinograd):
        ok(bind(made.plan, algo))
        made.compile()
        plan = made.plan.value.lowered().plan
        assert algo in ALGORITHMS[made.handle.value.kernel(plan, algo).choice.template.name]
    ok(bind(made.plan, miopen.miopenConvolutionFwdAlgoGEMM))
    told = "no kernel of miopenConvolutionFwdAlgoGEMM", "miopenConvolutionFwdAlgoWinograd"
    fails(miopen.miopenCompileFusionPlan(made.handle, made.plan), "UnsupportedOp", *told)


def test_a_bound_algorithm_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Built(tensor(2, 8, 9, 9))
    ran: list[Any] = []
    conv = made.add(miopen.miopenCreateOpConvForward, convolution(pad=1), WEIGHT)
    ok(miopen.miopenSetOpArgsConvForward(made.args, conv, 1.0, 0.0, W))
    launch = miopen.miopenHandle_t.run

    def run(self: Any, compiled: Any, *rest: Any) -> None:
        ran.extend(ALGORITHMS[compiled.choice.template.name])
        launch(self, compiled, *rest)

    monkeypatch.setattr(miopen.miopenHandle_t, "run", run)
    wanted = [miopen.miopenConvolutionFwdAlgoDirect, miopen.miopenConvolutionFwdAlgoWinograd]
    for algo in wanted:
        ok(miopen.miopenFusionPlanConvolutionSetAlgo(made.plan, algo))
        made.compile()
        close(made.execute(X), CONV)
        ok(one_call(algo=algo))
    assert ran == [each for each in wanted for _ in range(2)]


def test_a_bound_algorithm_that_cannot_says_why() -> None:
    made = Built(tensor(2, 8, 9, 9))
    made.add(miopen.miopenCreateOpConvForward, convolution(stride=2), WEIGHT)
    ok(miopen.miopenFusionPlanConvolutionSetAlgo(made.plan, miopen.miopenConvolutionFwdAlgoWinograd))
    told = "[no-transform]", "^^^^^^", "`direct` takes any convolution"
    fails(miopen.miopenCompileFusionPlan(made.handle, made.plan), "UnsupportedOp", *told)


def test_every_template_of_a_convolution_has_an_algorithm() -> None:
    others = {"pointwise", "normalization", "reduction", "scan", "product_summary"}
    names = {template.name for backend in BACKENDS for template in backend.templates}
    taken = {name for name in names - others if not ("attention" in name or "gradient" in name)}
    assert taken == set(ALGORITHMS)
