"""`fuseplan.miopen` on a GPU: torch tensors, streams, kernel time, training, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseplan import miopen
from fuseplan.miopen import Ref
from miopen_calls import activation, convolution, created, fails, handle, ok, tensor

SHAPE = (8, 16, 12, 12)


def on_device(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def close(got: Any, exact: Any, bound: float = 1e-4) -> None:
    assert bool(torch.isfinite(got).all())
    assert float((got.double() - exact).abs().max()) <= bound * float(exact.abs().max())


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "nhwc"])
def test_convolution_bias_activation(kind: Any, is_last: bool) -> None:
    where, kinds = handle("cuda"), {torch.float32: 1, torch.float16: 0, torch.bfloat16: 5}
    layout = miopen.miopenTensorNHWC if is_last else miopen.miopenTensorNCHW
    src, dst = (tensor(*SHAPE, dtype=kinds[kind], layout=layout) for _ in range(2))
    weight = tensor(16, 16, 3, 3, dtype=kinds[kind])
    plan = created(miopen.miopenCreateFusionPlan, miopen.miopenVerticalFusion, src)
    conv = created(miopen.miopenCreateOpConvForward, convolution(pad=1), weight, plan=plan)
    bias = created(miopen.miopenCreateOpBiasForward, tensor(1, 16, 1, 1), plan=plan)
    act = created(miopen.miopenCreateOpActivationForward, miopen.miopenActivationRELU, plan=plan)
    ok(miopen.miopenCompileFusionPlan(where, plan))
    order = torch.channels_last if is_last else torch.contiguous_format
    x = on_device(*SHAPE, dtype=kind).to(memory_format=order)
    w, b = on_device(16, 16, 3, 3, seed=1, dtype=kind), on_device(1, 16, 1, 1, seed=2)
    y = torch.full_like(x, torch.nan)
    args = created(miopen.miopenCreateOperatorArgs)
    ok(miopen.miopenSetOpArgsConvForward(args, conv, 0.5, 0.0, w))
    ok(miopen.miopenSetOpArgsBiasForward(args, bias, 1.0, 0.0, b))
    ok(miopen.miopenSetOpArgsActivForward(args, act, 1.0, 0.0, 0.0, 0.0, 0.0))
    ok(miopen.miopenExecuteFusionPlan(where, plan, src, x, dst, y, args))
    exact = 0.5 * torch.nn.functional.conv2d(x.double(), w.double(), padding=1) + b.double()
    close(y, exact.relu(), {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[kind])
    found, count = Ref(), Ref()
    ok(miopen.miopenFusionPlanConvolutionGetAlgo(plan, 8, count, found))
    for algorithm in found.value:
        ok(miopen.miopenFusionPlanConvolutionSetAlgo(plan, algorithm))
        ok(miopen.miopenCompileFusionPlan(where, plan))
        ok(miopen.miopenExecuteFusionPlan(where, plan, src, x, dst, y.fill_(torch.nan), args))
        close(y, exact.relu(), {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[kind])


def test_a_stream_and_the_kernels_time() -> None:
    stream, where, time = torch.cuda.Stream(), Ref(), Ref()
    ok(miopen.miopenCreateWithStream(where, stream.cuda_stream))
    ok(miopen.miopenEnableProfiling(where, True))
    x = on_device(*SHAPE)
    y, described = torch.full_like(x, torch.nan), tensor(*SHAPE)
    torch.cuda.synchronize()
    relu = activation(miopen.miopenActivationRELU)
    ok(miopen.miopenActivationForward(where, relu, 1.0, described, x, 0.0, described, y))
    ok(miopen.miopenGetKernelTime(where, time))
    assert 0 < time.value < 100
    close(y, x.double().relu())
    ok(miopen.miopenSetStream(where, torch.cuda.Stream()))
    ok(miopen.miopenSetStream(where, None))
    fails(miopen.miopenSetStream(where, "stream"), "BadParm", "want a torch.cuda.Stream")
    on_host = x.cpu()
    status = miopen.miopenActivationForward(where, relu, 1.0, described, on_host, 0.0, described, y)
    fails(status, "BadParm", "`x` is on cpu")


def test_training_and_its_backward_pass() -> None:
    where, described, channel = handle("cuda"), tensor(*SHAPE), tensor(1, 16, 1, 1)
    x, dy = on_device(*SHAPE), on_device(*SHAPE, seed=1)
    scale, shift = on_device(16, seed=2), on_device(16, seed=3)
    mean, inverse, dscale, dshift = (torch.full((1, 16, 1, 1), torch.nan, device="cuda") for _ in range(4))
    old = torch.zeros(16, device="cuda"), torch.ones(16, device="cuda")
    new = torch.empty(16, device="cuda"), torch.empty(16, device="cuda")
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    leaky, mode = activation(miopen.miopenActivationLEAKYRELU, 0.25), miopen.miopenBNSpatial
    given = (described, x, described, y, *(channel,) * 4, scale, shift, 0.2, *old, *new, 1e-5, mean, inverse)
    ok(miopen.miopenBatchNormForwardTrainingActivation_V2(where, mode, 1.0, 0.0, *given, leaky))
    wide = [each.double().requires_grad_() for each in (x, scale, shift)]
    running = [each.double() for each in old]
    with torch.enable_grad():
        norm = torch.nn.functional.batch_norm(wide[0], *running, *wide[1:], True, 0.2, 1e-5)
        exact = torch.nn.functional.leaky_relu(norm, 0.25)
        exact.backward(dy.double())
    close(y, exact.detach())
    for got, want in zip(new, running, strict=True):
        close(got, want)
    assert not bool(old[0].any())
    back = (described, x, described, dy, described, dx, *(channel,) * 4, scale, shift, dscale, dshift, 1e-5)
    blend = (1.0, 0.0, 1.0, 0.0)
    for saved in ((mean, inverse), (None, None)):
        ok(miopen.miopenBatchNormBackwardActivation(where, mode, *blend, *back, *saved, leaky))
        for got, leaf in ((dx, wide[0]), (dscale.view(16), wide[1]), (dshift.view(16), wide[2])):
            assert leaf.grad is not None
            close(got, leaf.grad)


def test_solutions_are_measured_and_run() -> None:
    where, found, time = handle("cuda"), Ref(), Ref()
    problem = created(miopen.miopenCreateConvProblem, convolution(pad=1), 0)
    ok(miopen.miopenSetProblemTensorDescriptor(problem, miopen.miopenTensorConvolutionX, tensor(*SHAPE)))
    weight = tensor(32, 16, 3, 3)
    ok(miopen.miopenSetProblemTensorDescriptor(problem, miopen.miopenTensorConvolutionW, weight))
    ok(miopen.miopenFindSolutions(where, problem, None, found, None, 8))
    x, w, y = on_device(*SHAPE), on_device(32, 16, 3, 3, seed=1), on_device(8, 32, 12, 12)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    for solution in found.value:
        ok(miopen.miopenGetSolutionTime(solution, time))
        assert 0 < time.value < 100
        tensors = [miopen.miopenTensorArgument_t(id, None, each) for id, each in ((1, x), (2, w), (3, y))]
        ok(miopen.miopenRunSolution(where, solution, 3, tensors, None, 0))
        close(y, exact)
        y.fill_(torch.nan)
