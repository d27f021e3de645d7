"""The work of each function; `functions.txt` declares its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fuseplan.compat.miopen.arguments import miopenOperatorArgs_t, set_arguments
from fuseplan.compat.miopen.call import CHECKS, Check, Object, check_of, declarations, function
from fuseplan.compat.miopen.convolutions import miopenConvolutionDescriptor_t as Convolution
from fuseplan.compat.miopen.enums import ENUMS
from fuseplan.compat.miopen.execute import execute, workspace_size
from fuseplan.compat.miopen.handle import VERSION, miopenHandle_t, target_of
from fuseplan.compat.miopen.kinds import BACKWARD, KINDS, RESIDUAL, TRAINING
from fuseplan.compat.miopen.onecall import activate, convolve, differentiate, infer, train
from fuseplan.compat.miopen.operators import backward, forward, normalization
from fuseplan.compat.miopen.operators import miopenActivationDescriptor_t as Activation
from fuseplan.compat.miopen.plan import miopenFusionOpDescriptor_t
from fuseplan.compat.miopen.plan import miopenFusionPlanDescriptor_t as Plan
from fuseplan.compat.miopen.problems import (
    activation_problem,
    bias_problem,
    convolution_problem,
    miopenProblem_t,
    normalization_problem,
)
from fuseplan.compat.miopen.solutions import arguments_of, find, miopenTensorArgument_t, run
from fuseplan.compat.miopen.solutions import miopenFindOptions_t as Options
from fuseplan.compat.miopen.solutions import miopenSolution_t as Solution
from fuseplan.compat.miopen.tensors import miopenTensorDescriptor_t as Tensor

CLASSES: tuple[type[Any], ...] = (
    *(miopenHandle_t, Tensor, Convolution, Activation, miopenFusionOpDescriptor_t, Plan),
    *(miopenOperatorArgs_t, miopenProblem_t, Options, Solution, miopenTensorArgument_t),
)
# By the types that declarations name.
CHECK_OF_TYPE: dict[str, Check] = {
    **CHECKS,
    "Where": target_of,
    "Arguments": arguments_of,
    **{kind.__name__: check_of(kind) for kind in (*ENUMS, *CLASSES)},
}


def _set(attribute: str) -> Callable[[Object, Any], None]:
    """A call that sets an attribute of an object."""
    return lambda it, value: setattr(it, attribute, value)


def _set_tensor(
    it: Tensor, kind: Any, count: int, shape: Sequence[int], strides: Sequence[int] | None
) -> None:
    it.set(kind, shape, strides=strides)


# By function, its result from its arguments in C's order without out-pointers; a tuple for several results.
CALLS: dict[str, Callable[..., Any]] = {
    "miopenCreate": miopenHandle_t,
    "miopenCreateWithStream": lambda stream, target: miopenHandle_t(target, stream),
    "miopenSetStream": miopenHandle_t.set_stream,
    "miopenGetStream": lambda handle: handle.stream,
    "miopenSetAllocator": miopenHandle_t.set_allocator,
    "miopenEnableProfiling": _set("is_profiling"),
    "miopenGetKernelTime": lambda handle: handle.kernel_time,
    "miopenGetVersion": lambda: VERSION,
    "miopenCreateTensorDescriptor": Tensor,
    "miopenSet4dTensorDescriptor": lambda tensor, kind, *shape: tensor.set(kind, shape),
    "miopenSet4dTensorDescriptorEx": lambda tensor, kind, *axes: tensor.set(kind, axes[:4], strides=axes[4:]),
    "miopenSetTensorDescriptor": _set_tensor,
    "miopenSetTensorDescriptorV2": _set_tensor,
    "miopenSetNdTensorDescriptorWithLayout": lambda tensor, *told: tensor.set_layout(*told[:3]),
    "miopenGet4dTensorDescriptor": Tensor.read_4d,
    "miopenGetTensorDescriptorSize": lambda tensor: tensor.spec.rank,
    "miopenGetTensorDescriptor": Tensor.read,
    "miopenGetTensorNumBytes": lambda tensor: tensor.spec.span * tensor.spec.itemsize,
    "miopenDeriveBNTensorDescriptor": Tensor.derive,
    "miopenCreateConvolutionDescriptor": Convolution,
    "miopenInitConvolutionDescriptor": lambda it, mode, *axes: it.set(mode, axes[:2], axes[2:4], axes[4:]),
    "miopenInitConvolutionNdDescriptor": lambda it, count, *axes: it.set(axes[3], *axes[:3]),
    "miopenSetConvolutionGroupCount": _set("groups"),
    "miopenSetConvolutionAttribute": Convolution.set_attribute,
    "miopenGetConvolutionAttribute": lambda convolution, name: int(convolution.attributes[name]),
    "miopenGetConvolutionGroupCount": lambda convolution: convolution.groups,
    "miopenGetConvolutionSpatialDim": lambda convolution: len(convolution.checked().padding),
    "miopenGetConvolutionDescriptor": Convolution.read_2d,
    "miopenGetConvolutionNdDescriptor": Convolution.read,
    "miopenGetConvolutionForwardOutputDim": Convolution.output_2d,
    "miopenGetConvolutionNdForwardOutputDim": Convolution.output_axes,
    "miopenCreateActivationDescriptor": Activation,
    "miopenSetActivationDescriptor": Activation.set,
    "miopenGetActivationDescriptor": lambda activation: activation.told,
    "miopenCreateFusionPlan": lambda direction, src: Plan(direction, src.spec),
    "miopenFusionPlanGetOp": Plan.operator,
    "miopenCreateOpConvForward": Plan.add_convolution,
    "miopenCreateOpConvForwardAlgo": lambda plan, it, algo, w: plan.add_convolution(it, w, algo),
    "miopenCreateOpBiasForward": Plan.add_bias,
    "miopenCreateOpActivationForward": lambda plan, mode: plan.add(forward(mode, plan.src.dtype)),
    "miopenCreateOpActivationBackward": lambda plan, mode: plan.add(backward(mode, plan.src.dtype)),
    "miopenCreateOpBatchNormInference": Plan.add_inference,
    "miopenCreateOpBatchNormForward": lambda plan, *told: plan.add(normalization(TRAINING, *told)),
    "miopenCreateOpBatchNormBackward": lambda plan, mode: plan.add(normalization(BACKWARD, mode)),
    "miopenCompileFusionPlan": lambda handle, plan: plan.compile(handle),
    "miopenFusionPlanGetWorkSpaceSize": lambda handle, plan, algo: plan.workspace(handle),
    "miopenFusionPlanConvolutionGetAlgo": Plan.algorithms,
    "miopenFusionPlanConvolutionSetAlgo": Plan.bind,
    "miopenCreateOperatorArgs": miopenOperatorArgs_t,
    "miopenCreateConvProblem": convolution_problem,
    "miopenCreateBiasProblem": bias_problem,
    "miopenCreateActivationProblem": activation_problem,
    "miopenCreateBatchnormProblem": normalization_problem,
    "miopenSetProblemTensorDescriptor": miopenProblem_t.describe,
    "miopenFuseProblems": miopenProblem_t.fuse,
    "miopenCreateFindOptions": Options,
    "miopenSetFindOptionTuning": _set("is_tuning"),
    "miopenSetFindOptionResultsOrder": _set("order"),
    "miopenSetFindOptionWorkspaceLimit": _set("most_workspace"),
    "miopenSetFindOptionPreallocatedWorkspace": lambda options, *given: workspace_size(*given),
    "miopenSetFindOptionPreallocatedTensor": lambda options, name, buffer: None,
    "miopenSetFindOptionAttachBinaries": Options.attach_binaries,
    "miopenFindSolutions": find,
    "miopenRunSolution": run,
    "miopenSaveSolution": lambda solution: solution.saved,
    "miopenLoadSolution": Solution.load,
    "miopenGetSolutionSize": lambda solution: len(solution.saved),
    "miopenGetSolutionWorkspaceSize": lambda solution: solution.found.workspace,
    "miopenGetSolutionTime": lambda solution: solution.found.milliseconds,
    "miopenGetSolutionSolverId": lambda solution: solution.solver,
}
# The same of functions that read their arguments by name.
CALLS_BY_NAME: dict[str, Callable[[dict[str, Any]], None]] = {
    **{kind.set_args: partial(set_arguments, kind) for kind in KINDS if kind is not RESIDUAL},
    "miopenExecuteFusionPlan": execute,
    "miopenExecuteFusionPlan_v2": execute,
    "miopenConvolutionBiasActivationForward": convolve,
    "miopenActivationForward": activate,
    "miopenActivationBackward": activate,
    "miopenBatchNormalizationForwardInference": infer,
    "miopenBatchNormalizationForwardInference_V2": infer,
    "miopenBatchNormalizationForwardInferenceInvVariance": infer,
    "miopenBatchNormForwardInferenceActivation": infer,
    "miopenBatchNormForwardInferenceActivationInvVariance": infer,
    "miopenBatchNormalizationForwardTraining": train,
    "miopenBatchNormalizationForwardTraining_V2": train,
    "miopenBatchNormalizationForwardTraining_V3": train,
    "miopenBatchNormForwardTrainingActivation": train,
    "miopenBatchNormForwardTrainingActivation_V2": train,
    "miopenBatchNormalizationBackward": differentiate,
    "miopenBatchNormalizationBackward_V2": differentiate,
    "miopenBatchNormBackwardActivation": differentiate,
}


def _run(name: str) -> Callable[[dict[str, Any]], Any]:
    """The work of a function on its arguments by name."""
    if name in CALLS_BY_NAME:
        return CALLS_BY_NAME[name]
    run = Object.destroy if name.startswith("miopenDestroy") else CALLS[name]
    return lambda arguments: run(*arguments.values())


FUNCTIONS = {each.name: function(each, _run(each.name), CHECK_OF_TYPE) for each in declarations()}
